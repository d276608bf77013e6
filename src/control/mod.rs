//! The control plane: what runs beside the requests. It keeps the time limits, starts the fleet's
//! probes, and takes over a changed configuration: whole, or not at all.

mod build;
mod certificates;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use parking_lot::Mutex;
use pingora::server::ShutdownWatch;
use pingora::services::background::BackgroundService;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tracing::{error, info, warn};

use crate::clock;
use crate::config::watch::{Cause, Patience, Watch};
use crate::config::{Applies, Config, Fault, Files, Loaded, Shown, differences};
use crate::proxy::{Gateway, Shared};
use crate::telemetry::ReloadResult;

pub use build::state;
pub use certificates::Certificate;

/// Reloads that may wait for their turn; all of them are answered by the same reading.
const WAITING_MAX: usize = 16;

/// Why a file without replicas is not taken over where there were some.
const EMPTIED: &str = "fleet.replicas: no replica is named any more; if that is meant, write `[]`";

/// What came of the last reading of the configuration.
#[derive(Clone, Debug, Serialize)]
pub struct ReloadReport {
    /// Whether it was taken over.
    pub taken: bool,
    /// When, as seconds since 1970.
    pub at: u64,
    /// Fingerprint of the configuration in use.
    pub fingerprint: String,
    /// Why it was not taken over.
    pub faults: Vec<String>,
    /// Changes that wait for a restart.
    pub at_restart: Vec<String>,
}

/// The control plane of one process.
pub struct Control {
    gateway: Arc<Gateway>,
    source: Option<Source>,
    certificates: Vec<Arc<Certificate>>,
    config: Mutex<Config>,
    report: Mutex<ReloadReport>,
    requests: mpsc::Sender<oneshot::Sender<ReloadReport>>,
    inbox: Mutex<Option<mpsc::Receiver<oneshot::Sender<ReloadReport>>>>,
}

/// Where the configuration came from.
#[derive(Debug)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// It and the files it names, as they were when it was read.
    pub files: Files,
}

impl Control {
    /// For a gateway that works with this configuration, read from `source`, behind listeners that
    /// show these certificates.
    pub fn new(
        gateway: Arc<Gateway>,
        config: Config,
        source: Option<Source>,
        certificates: Vec<Arc<Certificate>>,
    ) -> Arc<Self> {
        let (requests, inbox) = mpsc::channel(WAITING_MAX);
        let report = ReloadReport {
            taken: true,
            at: seconds(clock::date()),
            fingerprint: config.fingerprint(),
            faults: Vec::new(),
            at_restart: Vec::new(),
        };
        gateway.shared().metrics.config(&report.fingerprint);
        gateway.shared().metrics.reload_date(clock::date());
        Arc::new(Self {
            gateway,
            source,
            certificates,
            config: Mutex::new(config),
            report: Mutex::new(report),
            requests,
            inbox: Mutex::new(Some(inbox)),
        })
    }

    /// The proxy under control.
    pub fn gateway(&self) -> &Arc<Gateway> {
        &self.gateway
    }

    /// What outlives reloads.
    pub fn shared(&self) -> &Arc<Shared> {
        self.gateway.shared()
    }

    /// The configuration in use, secrets hidden.
    pub fn shown(&self) -> Shown {
        self.config.lock().shown()
    }

    /// What came of the last reading.
    pub fn report(&self) -> ReloadReport {
        self.report.lock().clone()
    }

    /// Reads the configuration again and waits for the result. `None`: the control plane is busy
    /// or gone.
    pub async fn reload(&self) -> Option<ReloadReport> {
        let (answer, result) = oneshot::channel();
        self.requests.try_send(answer).ok()?;
        result.await.ok()
    }

    /// The result: the files to watch from now on.
    fn read_again(&self) -> Files {
        let Some(source) = &self.source else {
            self.refuse(vec!["there is no configuration file to read again".to_owned()]);
            return Files::default();
        };
        let loaded = Loaded::from_file(&source.path);
        for warning in &loaded.warnings {
            warn!(%warning, "in the configuration");
        }
        let emptied = |config: &Config| {
            let had = !self.config.lock().fleet.replicas.is_empty();
            had && config.fleet.replicas.is_empty() && !loaded.empty_on_purpose
        };
        match loaded.config {
            Ok(config) if emptied(&config) => self.refuse(vec![EMPTIED.to_owned()]),
            Ok(config) => self.take_over(config),
            Err(faults) => self.refuse(faults.iter().map(Fault::to_string).collect()),
        }
        loaded.files
    }

    fn take_over(&self, config: Config) {
        let old = self.gateway.state();
        let state = match state(&config, Some(&old), self.shared()) {
            Ok(state) => state,
            Err(fault) => return self.refuse(vec![fault]),
        };
        let changes = differences(&self.config.lock(), &config);
        let at_restart: Vec<String> = changes
            .iter()
            .filter(|change| change.applies == Applies::AtRestart)
            .map(|change| change.path.clone())
            .collect();
        self.gateway.swap(Arc::clone(&state));
        for certificate in &self.certificates {
            certificate.renew();
        }
        state.fleet.start(&tokio::runtime::Handle::current());
        let fingerprint = config.fingerprint();
        info!(%fingerprint, changes = changes.len(), "configuration taken over");
        for change in &changes {
            info!(path = %change.path, before = %change.before, after = %change.after, "changed");
        }
        if !at_restart.is_empty() {
            warn!(keys = ?at_restart, "these changes take effect when weir is started again");
        }
        let now = clock::date();
        self.shared().metrics.reload(ReloadResult::Taken, now);
        self.shared().metrics.config(&fingerprint);
        *self.report.lock() =
            ReloadReport { taken: true, at: seconds(now), fingerprint, faults: vec![], at_restart };
        let mut in_use = self.config.lock();
        // What waits for a restart is not in use, and is told again at the next reload.
        let fixed = in_use.clone();
        *in_use = Config {
            listen: fixed.listen,
            admin: fixed.admin,
            telemetry: fixed.telemetry,
            server: fixed.server,
            ..config
        };
    }

    fn refuse(&self, faults: Vec<String>) {
        for fault in &faults {
            error!(%fault, "fault in the configuration");
        }
        error!(faults = faults.len(), "configuration not taken over, the one in use stays");
        let now = clock::date();
        self.shared().metrics.reload(ReloadResult::Refused, now);
        let mut report = self.report.lock();
        report.taken = false;
        report.at = seconds(now);
        report.faults = faults;
    }

    fn watched(&self) -> Option<Watched> {
        let source = self.source.as_ref()?;
        let patience = Patience::polling_every(self.config.lock().server.config_poll);
        match Watch::start_to_channel(&source.path, source.files.clone(), patience) {
            Ok((watch, changes)) => Some(Watched { watch, changes }),
            Err(error) => {
                let reason = error.to_string();
                warn!(reason, "the configuration file is not watched, send SIGHUP after a change");
                None
            }
        }
    }

    async fn serve_reloads(&self) {
        let Some(mut inbox) = self.inbox.lock().take() else { return };
        let mut watched = self.watched();
        let mut hangup = signal(SignalKind::hangup()).ok();
        loop {
            let mut answers = Vec::new();
            tokio::select! {
                cause = next_change(&mut watched) => {
                    if cause.is_none() {
                        warn!("the configuration file is watched no longer");
                        watched = None;
                        continue;
                    }
                    info!("the configuration file changed");
                }
                () = next_signal(&mut hangup) => info!("reload asked for by SIGHUP"),
                Some(answer) = inbox.recv() => {
                    info!("reload asked for by the admin API");
                    answers.push(answer);
                }
            }
            while let Ok(answer) = inbox.try_recv() {
                answers.push(answer);
            }
            let files = self.read_again();
            if let Some(watched) = &watched {
                watched.watch.handle().set_files(files);
            }
            let report = self.report();
            for answer in answers {
                // Who asked may be gone.
                let _ = answer.send(report.clone());
            }
        }
    }
}

#[async_trait]
impl BackgroundService for Control {
    async fn start(&self, mut shutdown: ShutdownWatch) {
        self.gateway.state().fleet.start(&tokio::runtime::Handle::current());
        tokio::select! {
            () = self.shared().watch_limits() => {}
            () = self.serve_reloads() => {}
            _ = shutdown.changed() => {}
        }
        self.gateway.state().fleet.stop();
    }
}

struct Watched {
    watch: Watch,
    changes: mpsc::Receiver<Cause>,
}

async fn next_change(watched: &mut Option<Watched>) -> Option<Cause> {
    match watched {
        Some(watched) => watched.changes.recv().await,
        None => std::future::pending().await,
    }
}

async fn next_signal(signal: &mut Option<tokio::signal::unix::Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

fn seconds(date: SystemTime) -> u64 {
    date.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

//! What a request works with: the [`State`] made of one configuration and swapped whole, and the
//! [`Shared`] that outlives every reload.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use http::HeaderName;
use tokio::sync::watch;

use super::connect::{Connections, Connector};
use super::options::Options;
use super::retry::Budget;
use super::watchdog::Watchdog;
use crate::fleet::Fleet;
use crate::request;
use crate::response::Consumers;
use crate::routing::Policy;
use crate::telemetry::{AccessLog, Metrics};

/// Everything built from one configuration.
pub struct State {
    /// Time limits, retries, forwarded headers.
    pub options: Options,
    /// Limits of requests.
    pub request: request::Options,
    /// Where a session's key is found.
    pub session_keys: SessionKeys,
    /// Who can serve.
    pub fleet: Arc<Fleet>,
    /// Who should serve.
    pub policy: Box<dyn Policy>,
    /// Who wants finished answers.
    pub consumers: Arc<Consumers>,
    /// Retries that are still allowed.
    pub retry_budget: Budget,
}

/// Where the key of a session is looked for, in this order; headers first.
#[derive(Clone, Debug, Default)]
pub struct SessionKeys {
    /// Names of request headers.
    pub headers: Vec<HeaderName>,
    /// Dotted paths in the body.
    pub body_fields: Vec<String>,
}

/// What all requests of the process share, over all reloads.
pub struct Shared {
    /// Every number.
    pub metrics: Arc<Metrics>,
    /// One line per request.
    pub access_log: AccessLog,
    pub(super) watchdog: Arc<Watchdog>,
    pub(super) connections: Arc<Connections>,
    pub(super) connector: Arc<Connector>,
    /// Requests under way.
    pub(super) under_way: AtomicU64,
    draining: watch::Sender<bool>,
}

impl Shared {
    /// At the start of the process.
    pub fn new(metrics: Arc<Metrics>, access_log: AccessLog) -> Arc<Self> {
        let connections = Connections::new();
        Arc::new(Self {
            metrics,
            access_log,
            watchdog: Watchdog::new(),
            connector: Connector::new(&connections),
            connections,
            under_way: AtomicU64::new(0),
            draining: watch::Sender::new(false),
        })
    }

    /// Requests that have begun and not ended.
    pub fn under_way(&self) -> u64 {
        self.under_way.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The process is going to stop: not ready, connections are closed after their answer.
    pub fn start_draining(&self) {
        self.draining.send_replace(true);
    }

    /// Whether the process is going to stop.
    pub fn draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Tells when the process is going to stop.
    pub fn watch_draining(&self) -> watch::Receiver<bool> {
        self.draining.subscribe()
    }

    /// Cuts all requests, as one does that ran into the limit on its whole time.
    pub fn cut_all(&self) {
        self.watchdog.end_all();
    }

    /// Keeps the time limits of all requests; runs for ever.
    pub async fn watch_limits(&self) {
        self.watchdog.run().await;
    }
}

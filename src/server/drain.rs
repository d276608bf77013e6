//! When the process stops: at once on SIGINT, in good order on SIGTERM.
//!
//! In good order means: not ready at once, but still serving until the balancers in front have
//! noticed (`pre_stop`); then until no request is under way, but not longer than `grace`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pingora::server::{ShutdownSignal, ShutdownSignalWatch};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use crate::clock;
use crate::proxy::Shared;

/// How often it is looked whether all requests are done.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long requests that are cut have to tell their clients and the access log.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

/// Waits for the signal to stop, and for the requests under way.
pub(super) struct Drain {
    pub(super) shared: Arc<Shared>,
    pub(super) pre_stop: Duration,
    pub(super) grace: Duration,
}

#[async_trait]
impl ShutdownSignalWatch for Drain {
    async fn recv(&self) -> ShutdownSignal {
        let mut terminate = Signals::new(SignalKind::terminate());
        let mut interrupt = Signals::new(SignalKind::interrupt());
        tokio::select! {
            () = terminate.recv() => {}
            () = interrupt.recv() => {
                info!("interrupted, stopping at once");
                return ShutdownSignal::FastShutdown;
            }
        }
        self.shared.start_draining();
        info!(
            under_way = self.shared.under_way(),
            pre_stop = ?self.pre_stop,
            grace = ?self.grace,
            "stopping: no longer ready, requests under way are finished",
        );
        tokio::select! {
            () = self.drained() => ShutdownSignal::GracefulTerminate,
            () = terminate.recv() => ShutdownSignal::FastShutdown,
            () = interrupt.recv() => ShutdownSignal::FastShutdown,
        }
    }
}

impl Drain {
    async fn drained(&self) {
        tokio::time::sleep(self.pre_stop).await;
        let began = clock::now();
        while 0 < self.shared.under_way() {
            if self.grace <= began.elapsed() {
                warn!(cut = self.shared.under_way(), "the grace is over, requests are cut");
                self.shared.cut_all();
                self.emptied(LAST_WORDS_MAX).await;
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        info!("all requests are done");
    }
}

impl Drain {
    /// Until no request is under way, or for so long.
    async fn emptied(&self, at_most: Duration) {
        let began = clock::now();
        while 0 < self.shared.under_way() && began.elapsed() < at_most {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// A signal that may not be had; then it never comes.
struct Signals(Option<Signal>);

impl Signals {
    fn new(kind: SignalKind) -> Self {
        Self(signal(kind).ok())
    }

    async fn recv(&mut self) {
        match &mut self.0 {
            Some(signal) => {
                signal.recv().await;
            }
            None => std::future::pending().await,
        }
    }
}

//! Keeps three pictures of the fleet in step: Pingora's `Backends` (members, enabled, healthy), the
//! marks that requests read, and the roster. One task does it, woken by whoever changed something;
//! it opens no connection and looks nothing up, so it never waits for an engine.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use parking_lot::Mutex;
use pingora::{Error, ErrorType, Result};
use pingora_load_balancing::health_check::HealthCheck;
use pingora_load_balancing::{Backend, Backends};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tracing::error;

use super::discovery::{backend_of, replica_of, sources};
use super::health::Verdict;
use super::options::Options;
use super::replica::Replica;
use super::roster::{Drawing, Roster};
use crate::telemetry::Metrics;

/// News that come within this time of a pass are dealt with together.
const PAUSE: Duration = Duration::from_millis(5);

/// Wakes the keeper. Shared by all generations of a fleet, of which one keeper at most is at work.
#[derive(Clone, Default)]
pub(super) struct Wake(Arc<Waking>);

#[derive(Default)]
struct Waking {
    news: Notify,
    keeper: Mutex<Option<AbortHandle>>,
}

impl Wake {
    /// Something changed. Cheap, and never waits.
    pub(super) fn wake(&self) {
        self.0.news.notify_one();
    }

    /// Puts a new keeper in charge and ends the one before.
    pub(super) fn supervise(&self, keeper: AbortHandle) {
        if let Some(former) = self.0.keeper.lock().replace(keeper) {
            former.abort();
        }
        self.wake();
    }
}

/// What the keeper keeps.
pub(super) struct Kept {
    pub(super) options: Options,
    pub(super) replicas: Vec<Arc<Replica>>,
    pub(super) backends: Backends,
    pub(super) roster: ArcSwap<Roster>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) wake: Wake,
    pub(super) created: u64,
}

impl Kept {
    pub(super) fn new(
        options: Options,
        replicas: Vec<Arc<Replica>>,
        metrics: Arc<Metrics>,
        wake: Wake,
        created: u64,
    ) -> Self {
        let mut backends = Backends::new(Box::new(sources(&replicas)));
        backends.set_health_check(Box::new(Verdicts));
        let kept = Self {
            options,
            replicas,
            backends,
            roster: ArcSwap::from_pointee(Roster::default()),
            metrics,
            wake,
            created,
        };
        kept.draw();
        kept
    }

    /// Whether the operator wants no new request on it. At work when this returns.
    pub(super) fn drain(&self, replica: &Arc<Replica>, draining: bool) {
        replica.state().set_draining(draining);
        if let Some(backend) = backend_of(replica) {
            self.backends.set_enable(&backend, replica.state().enabled());
            // Not asked of the backends: right after a reload they are empty yet.
            let up = replica.state().health().verdict() == Verdict::Up;
            replica.state().set_ready(up && replica.state().enabled());
        }
        self.wake.wake();
    }

    /// Works until it is aborted.
    pub(super) async fn keep(&self) {
        loop {
            self.pass().await;
            tokio::time::sleep(PAUSE).await;
            self.wake.0.news.notified().await;
        }
    }

    async fn pass(&self) {
        if let Err(error) = self.backends.update(|_| {}).await {
            error!(%error, "discovery failed");
        }
        self.backends.run_health_check(false).await;
        for replica in &self.replicas {
            let ready = backend_of(replica).is_some_and(|backend| self.backends.ready(&backend));
            replica.state().set_ready(ready);
        }
        self.draw();
    }

    fn draw(&self) {
        let drawing = Drawing {
            options: &self.options,
            replicas: &self.replicas,
            metrics: &self.metrics,
            created: self.created,
        };
        let roster = Roster::draw(&drawing, &self.roster.load());
        self.roster.store(Arc::new(roster));
    }
}

/// Pingora's health check, answered from the verdict our own probes reached at their own pace. One
/// verdict is enough, as the probes have counted already. No I/O.
struct Verdicts;

#[async_trait]
impl HealthCheck for Verdicts {
    async fn check(&self, target: &Backend) -> Result<()> {
        let Some(replica) = replica_of(target) else {
            return Error::e_explain(ErrorType::InternalError, "a backend without a replica");
        };
        let health = replica.state().health();
        match health.verdict() {
            // An unknown one is not enabled yet; no need to call it unhealthy as well.
            Verdict::Up | Verdict::Unknown => Ok(()),
            Verdict::Down => Error::e_explain(ErrorType::Custom("down"), health.reason()),
        }
    }

    fn backend_summary(&self, target: &Backend) -> String {
        replica_of(target).map_or_else(String::new, |replica| format!("replica {}", replica.id()))
    }

    fn health_threshold(&self, _success: bool) -> usize {
        1
    }
}

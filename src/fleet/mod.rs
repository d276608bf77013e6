//! Who can serve, and how they are: the replicas of the config, kept in Pingora's `Backends`,
//! probed, asked for their models, and handed out one lease at a time.
//!
//! [`Fleet::resolve`] finds the pool of a model, [`Pool::choose`] a replica in it. What is learnt
//! of a replica outlives a reload while its id and URL stay the same. How a request is read,
//! judged or sent on is none of this room's business.
//!
//! To add a source of replicas, see `discovery`. To add something that is learnt of each, write a
//! loop such as `learn.rs`, let [`Fleet::start`] join it to the others, and keep what it finds in
//! `state.rs`.

pub mod breaker;
pub mod health;
pub mod secret;

mod client;
mod discovery;
mod keeper;
mod learn;
mod lease;
mod models;
mod options;
mod peer;
mod pool;
mod probe;
mod replica;
mod roster;
mod snapshot;
mod state;
mod url;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tracing::info;

pub use self::breaker::{BreakerOptions, Outcome};
pub use self::health::ProbeOptions;
pub use self::lease::Lease;
pub use self::models::CARDS_MAX;
pub use self::options::{DnsOptions, Options, Protocol, REPLICAS_MAX, ReplicaOptions, TlsOptions};
pub use self::pool::Pool;
pub use self::replica::Replica;
pub use self::roster::Resolved;
pub use self::secret::Secret;
pub use self::snapshot::{FleetSnapshot, ModelSnapshot, ProbeSnapshot, ReplicaSnapshot};
pub use self::url::{Host, ReplicaUrl, UrlFault};

use self::client::Client;
use self::discovery::Lookups;
use self::keeper::{Kept, Wake};
use self::replica::Making;
use crate::clock;
use crate::names::{ModelName, ReplicaId};
use crate::routing::SlowStartOptions;
use crate::telemetry::Metrics;

/// What can be wrong with a fleet.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// A replica's URL cannot be used.
    #[error("the url of a replica {fault}")]
    Url {
        /// As the config has it.
        url: String,
        /// What is wrong.
        #[source]
        fault: UrlFault,
    },
    /// Two replicas have one id.
    #[error("two replicas are called `{0}`")]
    DoubleId(ReplicaId),
    /// A certificate or key file cannot be used.
    #[error("the file `{}` cannot be used: {reason}", path.display())]
    Certificate {
        /// Which file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// Nobody is called that.
    #[error("no replica is called `{0}`")]
    UnknownReplica(ReplicaId),
}

/// Whether a replica is to take new requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draining {
    /// It finishes what it has and gets nothing new.
    On,
    /// It serves.
    Off,
}

/// All replicas.
pub struct Fleet {
    kept: Arc<Kept>,
    by_id: HashMap<ReplicaId, usize>,
    shared: Shared,
    /// The fleet before the reload, until this one starts.
    former: Mutex<Weak<Kept>>,
    tasks: Mutex<Vec<AbortHandle>>,
}

/// What one generation hands to the next.
#[derive(Clone)]
struct Shared {
    wake: Wake,
    client: Arc<Client>,
    lookups: Lookups,
}

impl Fleet {
    /// Reads certificate files; touches no network. What `previous` knows of replicas that did not
    /// change is carried over; `previous` itself is left as it is until [`Fleet::start`].
    pub fn new(
        options: &Options,
        slow_start: &SlowStartOptions,
        previous: Option<&Self>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, FleetError> {
        let shared = previous.map_or_else(Shared::new, |previous| previous.shared.clone());
        let now = clock::now();
        let mut by_id = HashMap::with_capacity(options.replicas.len());
        let mut replicas = Vec::with_capacity(options.replicas.len());
        for (slot, replica) in options.replicas.iter().enumerate() {
            let wake = shared.wake.clone();
            let metrics = &metrics;
            let making = Making { options, slow_start, slot, wake, metrics, now, previous };
            let replica = Arc::new(Replica::new(replica, making)?);
            if by_id.insert(replica.id().clone(), slot).is_some() {
                return Err(FleetError::DoubleId(replica.id().clone()));
            }
            replicas.push(replica);
        }
        let created = clock::date().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let wake = shared.wake.clone();
        let kept = Kept::new(options.clone(), replicas, metrics, wake, created.as_secs());
        let former = previous.map_or_else(Weak::new, |previous| Arc::downgrade(&previous.kept));
        Ok(Arc::new(Self {
            kept: Arc::new(kept),
            by_id,
            shared,
            former: Mutex::new(former),
            tasks: Mutex::new(Vec::new()),
        }))
    }

    /// Begins to look after the replicas, on this runtime. The tasks of the fleet that came before
    /// end here, and replicas that are in it no more are retired, series and all.
    pub fn start(&self, handle: &Handle) {
        self.take_over();
        let mut tasks = self.tasks.lock();
        let kept = Arc::clone(&self.kept);
        let keeper = handle.spawn(async move { kept.keep().await }).abort_handle();
        tasks.push(keeper.clone());
        self.shared.wake.supervise(keeper);
        for replica in &self.kept.replicas {
            let (replica, kept, shared) =
                (Arc::clone(replica), Arc::clone(&self.kept), self.shared.clone());
            let state = Arc::clone(replica.state());
            let task = handle.spawn(async move {
                let options = &kept.options;
                tokio::join!(
                    discovery::follow(&replica, &options.dns, &shared.lookups),
                    probe::watch(&replica, &options.probe, &shared.client),
                    learn::learn(&replica, &options.probe, &shared.client),
                );
            });
            let task = task.abort_handle();
            tasks.push(task.clone());
            state.supervise(task);
        }
    }

    /// Looks after the replicas no more. Also done by being dropped.
    pub fn stop(&self) {
        for task in self.tasks.lock().drain(..) {
            task.abort();
        }
    }

    /// Where a request for `model` goes, as it stands now. Takes no lock.
    pub fn resolve(&self, model: Option<&str>) -> Resolved {
        self.kept.roster.load().resolve(model)
    }

    /// Where a request goes that names no model and needs none: to any replica.
    pub fn everyone(&self) -> Resolved {
        self.kept.roster.load().everyone()
    }

    /// Every model that a client may name.
    pub fn known(&self) -> Arc<[ModelName]> {
        self.kept.roster.load().known()
    }

    /// The body of `GET /v1/models`: one card for each model that [`Fleet::resolve`] knows.
    pub fn models(&self) -> Bytes {
        self.kept.roster.load().list()
    }

    /// The body of `GET /v1/models/{id}`, for an id already decoded.
    pub fn model(&self, id: &str) -> Option<Bytes> {
        self.kept.roster.load().card(id)
    }

    /// All replicas, in the order of the config.
    pub fn replicas(&self) -> &[Arc<Replica>] {
        &self.kept.replicas
    }

    /// The replica of this id.
    pub fn replica(&self, id: &str) -> Option<&Arc<Replica>> {
        self.by_id.get(id).and_then(|slot| self.kept.replicas.get(*slot))
    }

    /// How all replicas are, for the admin API; never with a key in it.
    pub fn snapshot(&self, now: Instant) -> FleetSnapshot {
        snapshot::take(&self.kept, now)
    }

    /// Takes a replica out of service, or puts it back. At work when this returns; survives a
    /// reload.
    pub fn drain(&self, id: &str, draining: Draining) -> Result<(), FleetError> {
        let replica =
            self.replica(id).ok_or_else(|| FleetError::UnknownReplica(ReplicaId::new(id)))?;
        self.kept.drain(replica, draining == Draining::On);
        info!(replica = %id, ?draining, "replica draining changed");
        Ok(())
    }

    /// Whether some replica can serve something.
    pub fn ready(&self) -> bool {
        self.kept.roster.load().pools().any(|pool| pool.live())
    }

    /// Leases held at this moment.
    pub fn in_flight(&self) -> u64 {
        self.kept.replicas.iter().map(|replica| u64::from(replica.in_flight())).sum()
    }

    /// Whether no lease is held.
    pub fn idle(&self) -> bool {
        self.in_flight() == 0
    }

    fn take_over(&self) {
        let Some(former) = std::mem::take(&mut *self.former.lock()).upgrade() else { return };
        let options = &self.kept.options;
        let ours: HashSet<_> =
            self.kept.replicas.iter().map(|replica| Arc::as_ptr(replica.state())).collect();
        for replica in &former.replicas {
            let state = replica.state();
            if !ours.contains(&Arc::as_ptr(state)) {
                state.retire();
            } else if former.options.probe != options.probe
                || former.options.breaker != options.breaker
            {
                state.reconfigure(&options.probe, &options.breaker, clock::now());
            }
            // The series of an id that is still there go on.
            if !self.by_id.contains_key(replica.id()) {
                state.series().retire();
                info!(replica = %replica.id(), "replica removed");
            }
        }
        former.roster.load().retire_series(|id| !self.by_id.contains_key(id));
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn new() -> Self {
        Self { wake: Wake::default(), client: Arc::new(Client::new()), lookups: Lookups::new() }
    }
}

#[cfg(test)]
mod tests;

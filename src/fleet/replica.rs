//! One vLLM server: what the config says of it, and a hand on its state. Built anew on every
//! reload; the state inside is carried over. Nothing here opens a connection.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pingora::protocols::l4::socket::SocketAddr as PeerAddress;
use pingora::upstreams::peer::HttpPeer;

use super::keeper::Wake;
use super::options::{Options, ReplicaOptions};
use super::peer;
use super::secret::Secret;
use super::state::ReplicaState;
use super::url::ReplicaUrl;
use super::{Fleet, FleetError};
use crate::names::{ModelName, ReplicaId};
use crate::routing::{SlowStartOptions, stable_hash};
use crate::telemetry::Metrics;

/// A replica as this config sees it.
pub struct Replica {
    id: ReplicaId,
    id_hash: u64,
    slot: usize,
    url: ReplicaUrl,
    weight: f32,
    slow_start: SlowStartOptions,
    models: Vec<ModelName>,
    api_key: Option<Secret>,
    probe_key: Option<Secret>,
    template: HttpPeer,
    state: Arc<ReplicaState>,
    wake: Wake,
}

/// What a replica is made from, besides its own options.
pub(super) struct Making<'a> {
    pub(super) options: &'a Options,
    pub(super) slow_start: &'a SlowStartOptions,
    /// Its number in the config, by which Pingora tells two replicas at one address apart.
    pub(super) slot: usize,
    pub(super) wake: Wake,
    pub(super) metrics: &'a Arc<Metrics>,
    pub(super) now: Instant,
    /// The fleet before the reload.
    pub(super) previous: Option<&'a Fleet>,
}

impl Replica {
    /// Reads certificate files. The state is that of the same replica before the reload.
    pub(super) fn new(options: &ReplicaOptions, making: Making<'_>) -> Result<Self, FleetError> {
        let url = ReplicaUrl::parse(&options.url)
            .map_err(|fault| FleetError::Url { url: options.url.clone(), fault })?;
        let id = match &options.id {
            Some(id) => ReplicaId::new(id),
            None => ReplicaId::new(url.name()),
        };
        let fleet = making.options;
        let former = making.previous.and_then(|previous| previous.replica(id.as_str()));
        let former = former.filter(|former| former.url == url && !former.state.retired());
        let state = match former {
            Some(former) => Arc::clone(&former.state),
            None => {
                let series = making.metrics.replica_state(&id);
                Arc::new(ReplicaState::new(&fleet.probe, &fleet.breaker, series, making.now))
            }
        };
        Ok(Self {
            id_hash: stable_hash(id.as_str().as_bytes()),
            template: peer::template(options, &url)?,
            id,
            slot: making.slot,
            url,
            weight: options.weight,
            slow_start: making.slow_start.clone(),
            models: options.models.clone(),
            probe_key: options.api_key.clone().or_else(|| fleet.api_key.clone()),
            api_key: options.api_key.clone(),
            state,
            wake: making.wake,
        })
    }

    /// Its name.
    pub fn id(&self) -> &ReplicaId {
        &self.id
    }

    /// [`stable_hash`] of its name.
    pub fn id_hash(&self) -> u64 {
        self.id_hash
    }

    /// Its URL, normalised; never with a key in it.
    pub fn url(&self) -> &ReplicaUrl {
        &self.url
    }

    /// Its share beside others, as configured.
    pub fn weight(&self) -> f32 {
        self.weight
    }

    /// The models the config says it serves; empty when it is asked.
    pub fn fixed_models(&self) -> &[ModelName] {
        &self.models
    }

    /// Leases on it at this moment.
    pub fn in_flight(&self) -> u32 {
        self.state.in_flight()
    }

    /// What belongs into the `Host` header.
    pub fn authority(&self) -> &str {
        self.url.authority()
    }

    /// What stands in front of every API path: empty, or a path without a slash at its end.
    pub fn path_prefix(&self) -> &str {
        self.url.prefix()
    }

    /// The key to put on a client's request in place of the client's own.
    pub fn api_key(&self) -> Option<&Secret> {
        self.api_key.as_ref()
    }

    /// Whether connections to it are TLS.
    pub fn is_tls(&self) -> bool {
        self.url.is_tls()
    }

    /// Where it is now; `None` while its name leads nowhere.
    pub fn address(&self) -> Option<SocketAddr> {
        self.state.address()
    }

    /// Since when nobody listens there, as probes found that were refused; `None` while it may be
    /// there. Who has heard nothing from it since before then will hear nothing more.
    pub fn gone_since(&self) -> Option<Instant> {
        self.state.gone_since()
    }

    /// The key for our own questions.
    pub(super) fn probe_key(&self) -> Option<&Secret> {
        self.probe_key.as_ref()
    }

    pub(super) fn slot(&self) -> usize {
        self.slot
    }

    pub(super) fn state(&self) -> &Arc<ReplicaState> {
        &self.state
    }

    pub(super) fn wake(&self) -> &Wake {
        &self.wake
    }

    /// Its share now: what is configured, less while it warms up.
    pub(super) fn weight_now(&self, now: Instant) -> f32 {
        if self.slow_start.window == Duration::ZERO {
            return self.weight;
        }
        self.weight * self.slow_start.share(self.state.served_for(now))
    }

    /// How to connect to it at this address. Without time limits: those are the caller's.
    pub(super) fn peer(&self, address: SocketAddr) -> HttpPeer {
        let mut peer = self.template.clone();
        peer._address = PeerAddress::Inet(address);
        peer
    }
}

impl fmt::Debug for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replica").field("id", &self.id).field("url", &self.url.to_string()).finish()
    }
}

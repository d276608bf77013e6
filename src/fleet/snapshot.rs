//! How the fleet is, for the admin API and for people: states with their reasons, and how long they
//! have lasted or will. No key, no prompt. To show more, add a field and fill it in [`take`].

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::breaker::Reason;
use super::health::Verdict;
use super::keeper::Kept;
use super::replica::Replica;
use crate::names::{ModelName, ReplicaId};

/// All replicas and models.
#[derive(Clone, Debug, Serialize)]
pub struct FleetSnapshot {
    /// Some replica can serve something.
    pub ready: bool,
    /// Leases held.
    pub in_flight: u64,
    /// In the order of the config.
    pub replicas: Vec<ReplicaSnapshot>,
    /// By name.
    pub models: Vec<ModelSnapshot>,
    /// Alias to model, as configured.
    pub aliases: BTreeMap<ModelName, ModelName>,
}

/// One model.
#[derive(Clone, Debug, Serialize)]
pub struct ModelSnapshot {
    /// As engines call it.
    pub id: ModelName,
    /// Who serves it, well or not.
    pub replicas: Vec<ReplicaId>,
    /// How many of them can serve now.
    pub live: usize,
}

/// One replica.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaSnapshot {
    /// Its name.
    pub id: ReplicaId,
    /// Its URL, normalised.
    pub url: String,
    /// Where it is now.
    pub address: Option<String>,
    /// What went wrong with the last look-up of its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address_trouble: Option<String>,
    /// In one word.
    pub state: ReplicaStanding,
    /// In a sentence.
    pub reason: String,
    /// How much longer it is ejected or cooling off, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_ms: Option<u64>,
    /// How long it has served without being down, in milliseconds.
    pub up_for_ms: u64,
    /// The models it serves, from the config or as it told last.
    pub models: Vec<ModelName>,
    /// Why it did not tell its models when last asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub models_trouble: Option<String>,
    /// Its share as configured.
    pub weight: f32,
    /// Its share now; less while it warms up.
    pub weight_now: f32,
    /// Leases held.
    pub in_flight: u32,
    /// Leases taken since it is known.
    pub started: u64,
    /// The last probe.
    pub probe: Option<ProbeSnapshot>,
    /// How long ago it last sent bytes for a request, in milliseconds.
    pub heard_ago_ms: Option<u64>,
}

/// One probe.
#[derive(Clone, Debug, Serialize)]
pub struct ProbeSnapshot {
    /// How long ago it ended, in milliseconds.
    pub ago_ms: u64,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
    /// What came of it.
    pub result: String,
}

/// How a replica stands, worst first: the first that applies is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaStanding {
    /// Its name leads to no address yet.
    Unresolved,
    /// No verdict of the probes yet.
    Unknown,
    /// The probes say it is not well.
    Down,
    /// The operator took it out of service.
    Draining,
    /// Its model is not loaded.
    Asleep,
    /// Requests failed on it; it is left alone.
    Ejected,
    /// It was ejected and is being tried.
    OnTrial,
    /// It refused work a moment ago.
    CoolingOff,
    /// It serves.
    Up,
}

pub(super) fn take(kept: &Kept, now: Instant) -> FleetSnapshot {
    let replicas: Vec<_> = kept.replicas.iter().map(|replica| of(replica, now)).collect();
    let roster = kept.roster.load();
    let mut models: Vec<ModelSnapshot> = roster
        .pools()
        .map(|pool| ModelSnapshot {
            id: pool.model().clone(),
            replicas: pool.replicas().iter().map(|replica| replica.id().clone()).collect(),
            live: pool.replicas().iter().filter(|one| one.state().can_serve()).count(),
        })
        .collect();
    models.sort_by(|a, b| a.id.cmp(&b.id));
    FleetSnapshot {
        ready: models.iter().any(|model| 0 < model.live),
        in_flight: replicas.iter().map(|replica| u64::from(replica.in_flight)).sum(),
        replicas,
        models,
        aliases: kept.options.aliases.clone(),
    }
}

fn of(replica: &Replica, now: Instant) -> ReplicaSnapshot {
    let state = replica.state();
    let (standing, reason, left) = standing(replica, now);
    let models = match replica.fixed_models() {
        [] => state
            .cards()
            .as_ref()
            .map(|cards| cards.iter().map(|card| card.id.clone()).collect())
            .unwrap_or_default(),
        fixed => fixed.to_vec(),
    };
    ReplicaSnapshot {
        id: replica.id().clone(),
        url: replica.url().to_string(),
        address: replica.address().map(|address| address.to_string()),
        address_trouble: state.address_trouble(),
        state: standing,
        reason,
        left_ms: left.map(millis),
        up_for_ms: millis(state.served_for(now)),
        models,
        models_trouble: state.models_trouble().map(|trouble| trouble.as_str().to_owned()),
        weight: replica.weight(),
        weight_now: replica.weight_now(now),
        in_flight: state.in_flight(),
        started: state.started(),
        probe: state.last_probe().map(|probe| ProbeSnapshot {
            ago_ms: millis(now.saturating_duration_since(probe.ended)),
            took_ms: millis(probe.took),
            result: probe.text,
        }),
        heard_ago_ms: state.alive_ago(now).map(millis),
    }
}

fn standing(replica: &Replica, now: Instant) -> (ReplicaStanding, String, Option<Duration>) {
    let state = replica.state();
    let (verdict, health) = {
        let health = state.health();
        (health.verdict(), health.reason())
    };
    let breaker = state.breaker().reason(now);
    let plain = |standing, reason: &str| (standing, reason.to_owned(), None);
    if replica.address().is_none() {
        return plain(ReplicaStanding::Unresolved, "its name leads to no address");
    }
    match verdict {
        Verdict::Unknown => return (ReplicaStanding::Unknown, health, None),
        Verdict::Down => return (ReplicaStanding::Down, health, None),
        Verdict::Up => {}
    }
    if state.draining() {
        return plain(ReplicaStanding::Draining, "the operator wants no new request on it");
    }
    if state.asleep() {
        return plain(ReplicaStanding::Asleep, "it sleeps");
    }
    let reason = breaker.to_string();
    match breaker {
        Reason::Ready => (ReplicaStanding::Up, reason, None),
        Reason::CoolingOff { left } => (ReplicaStanding::CoolingOff, reason, Some(left)),
        Reason::OnTrial { .. } => (ReplicaStanding::OnTrial, reason, None),
        Reason::Ejected { left, .. } => (ReplicaStanding::Ejected, reason, Some(left)),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

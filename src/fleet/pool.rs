//! The replicas of one model, and the one step in which one of them is chosen and its lease taken.
//! How candidates are judged is the business of `routing`; whether they may serve, of the probes
//! and the breaker. Nothing here waits.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::breaker::{Admission, BreakerOptions, eligible};
use super::lease::Lease;
use super::replica::Replica;
use super::roster::Drawing;
use crate::names::{ModelName, ReplicaId};
use crate::routing::{self, Candidate, Choice, Policy, Question};
use crate::telemetry::{BreakerLabel, Metrics, ModelMetrics, ReplicaMetrics};

/// Up to this many replicas a choice allocates nothing.
const INLINE: usize = 32;

/// The replicas of one model.
pub struct Pool {
    model: ModelName,
    replicas: Box<[Arc<Replica>]>,
    /// In the same order. Held here, so that the counters live as long as the pool; made at the
    /// first use where most would show zero for ever.
    series: Box<[OnceLock<Arc<ReplicaMetrics>>]>,
    metrics: Arc<Metrics>,
    model_metrics: Arc<ModelMetrics>,
    breaker: BreakerOptions,
    /// How many choices were made, from a random start. Its lock makes choice and lease one step.
    turn: Mutex<u64>,
}

/// A replica that may serve the request at hand.
#[derive(Clone, Copy)]
struct Seat {
    place: usize,
    address: SocketAddr,
    admission: Admission,
}

type Seats = SmallVec<[Seat; INLINE]>;

impl Pool {
    pub(super) fn new(
        model: ModelName,
        replicas: Vec<Arc<Replica>>,
        drawing: &Drawing<'_>,
    ) -> Self {
        let metrics = drawing.metrics;
        Self {
            series: replicas.iter().map(|_| OnceLock::new()).collect(),
            metrics: Arc::clone(metrics),
            model_metrics: metrics.model(&model),
            replicas: replicas.into(),
            breaker: drawing.options.breaker.clone(),
            turn: Mutex::new(fastrand::u64(..)),
            model,
        }
    }

    /// Shows all counters from the start, at zero.
    pub(super) fn with_all_series(self) -> Self {
        for (replica, series) in self.replicas.iter().zip(&self.series) {
            series.get_or_init(|| self.metrics.replica(&self.model, replica.id()));
        }
        self
    }

    /// Whether it holds these replicas and no others.
    pub(super) fn is_of(&self, replicas: &[Arc<Replica>]) -> bool {
        self.replicas.len() == replicas.len()
            && self.replicas.iter().zip(replicas).all(|(ours, one)| Arc::ptr_eq(ours, one))
    }

    /// The model, as the engines call it.
    pub fn model(&self) -> &ModelName {
        &self.model
    }

    /// Everyone who serves the model, well or not.
    pub fn replicas(&self) -> &[Arc<Replica>] {
        &self.replicas
    }

    /// The counters of the model.
    pub fn metrics(&self) -> &Arc<ModelMetrics> {
        &self.model_metrics
    }

    /// Whether the probes think well of some replica, be it busy or ejected.
    pub fn live(&self) -> bool {
        self.replicas.iter().any(|replica| replica.state().can_serve())
    }

    /// Chooses a replica and takes its lease, in one step: nobody chooses in between, so a burst
    /// sees its own load. Leaves out those in `tried`. Sets `question.rotation`, of which each pool
    /// has its own. `None` when nobody may serve.
    pub fn choose(
        &self,
        policy: &dyn Policy,
        question: &mut Question<'_>,
        tried: &[ReplicaId],
        now: Instant,
    ) -> Option<(Lease, Choice)> {
        let mut turn = self.turn.lock();
        let seats = self.seats(tried, now);
        question.rotation = *turn;
        let candidates: SmallVec<[Candidate<'_>; INLINE]> =
            seats.iter().filter_map(|seat| self.candidate(seat, now)).collect();
        debug_assert_eq!(candidates.len(), seats.len(), "a seat without a replica");
        let choice = routing::choose(policy, question, &candidates)?;
        *turn = turn.wrapping_add(1);
        let seat = seats.get(choice.index)?;
        let replica = self.replicas.get(seat.place)?;
        let series = self.series.get(seat.place)?;
        let series = series.get_or_init(|| self.metrics.replica(&self.model, replica.id()));
        if matches!(seat.admission, Admission::Trial { .. }) {
            replica.state().series().breaker(BreakerLabel::HalfOpen);
        }
        let lease = Lease::new(Arc::clone(replica), seat.address, Arc::clone(series), now);
        Some((lease, choice))
    }

    /// Whether [`Pool::choose`] would have anybody to offer.
    pub fn any_untried(&self, tried: &[ReplicaId], now: Instant) -> bool {
        !self.seats(tried, now).is_empty()
    }

    /// Takes the counters of some replicas away, though requests may still hold the pool.
    pub(super) fn retire_series(&self, gone: impl Fn(&ReplicaId) -> bool) {
        for (replica, series) in self.replicas.iter().zip(&self.series) {
            if let Some(series) = series.get().filter(|_| gone(replica.id())) {
                series.retire();
            }
        }
    }

    fn candidate(&self, seat: &Seat, now: Instant) -> Option<Candidate<'_>> {
        let replica = self.replicas.get(seat.place)?;
        Some(Candidate {
            id: replica.id(),
            id_hash: replica.id_hash(),
            weight: replica.weight_now(now),
            in_flight: replica.in_flight(),
            waiting: None,
        })
    }

    /// Who may serve. What share of the pool looks bad is judged by all of it; but when only tried
    /// ones are sound, the others are asked among themselves.
    fn seats(&self, tried: &[ReplicaId], now: Instant) -> Seats {
        let mut seats: Seats = SmallVec::new();
        for (place, replica) in self.replicas.iter().enumerate() {
            let state = replica.state();
            if !state.can_serve() {
                continue;
            }
            let Some(address) = state.address() else { continue };
            let calm = !state.tripped();
            let admission = if calm { Admission::Ready } else { state.breaker().admission(now) };
            seats.push(Seat { place, address, admission });
        }
        let untried = |seat: &Seat| {
            self.replicas.get(seat.place).is_some_and(|replica| !tried.contains(replica.id()))
        };
        let admissions = |seats: &Seats| eligible(seats.iter().map(|s| s.admission), &self.breaker);
        let rule = admissions(&seats);
        if tried.is_empty() {
            seats.retain(|seat| rule.admits(seat.admission));
            return seats;
        }
        seats.retain(|seat| untried(seat));
        let rule = match seats.iter().any(|seat| rule.admits(seat.admission)) {
            true => rule,
            false => admissions(&seats),
        };
        seats.retain(|seat| rule.admits(seat.admission));
        seats
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("model", &self.model)
            .field("replicas", &self.replicas)
            .finish()
    }
}

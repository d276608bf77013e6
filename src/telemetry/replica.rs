//! Handles on the series of one replica or one model: found once, then only atomic additions.
//! A handle gives its series back when it is dropped or retired, so that nothing is shown of what
//! is gone; asked for again, the series are back at zero. No label look-up happens on the hot path.
//! To add a series: a field in `Families` (metrics.rs), its handle here, its removal in `forget_*`.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};

use super::facts::Usage;
use super::labels::{
    AttemptOutcome, BreakerLabel, Ended, Label, ProbeResult, StatusClass, TokenKind,
};
use super::metrics::Families;
use crate::names::{ModelName, ReplicaId};

/// One counter per value of a label.
#[derive(Debug)]
pub(super) struct Counted<L> {
    counters: Vec<IntCounter>,
    label: std::marker::PhantomData<fn(L)>,
}

impl<L: Label> Counted<L> {
    /// The counters of `family` under `labels` and each value of `L`, which is the last label.
    pub(super) fn new(family: &IntCounterVec, labels: &[&str]) -> Self {
        let counters = L::ALL
            .iter()
            .map(|value| {
                let mut all = labels.to_vec();
                all.push(value.text());
                family.with_label_values(&all)
            })
            .collect();
        Self { counters, label: std::marker::PhantomData }
    }

    /// Adds to the counter of `value`.
    pub(super) fn add(&self, value: L, by: u64) {
        if let Some(counter) = self.counters.get(value.index()) {
            counter.inc_by(by);
        }
    }

    /// Takes the series out of `family`.
    pub(super) fn forget(family: &IntCounterVec, labels: &[&str]) {
        for value in L::ALL {
            let mut all = labels.to_vec();
            all.push(value.text());
            // An error says that the series is not there, which is what is wanted.
            let _ = family.remove_label_values(&all);
        }
    }
}

/// The handles that somebody holds. An entry whose serial is not the holder's belongs to a
/// successor: a late drop must not take the successor's series away.
#[derive(Debug)]
pub(super) struct Roll<K, H> {
    entries: Mutex<HashMap<K, (u64, Weak<H>)>>,
    serials: AtomicU64,
}

impl<K, H> Default for Roll<K, H> {
    fn default() -> Self {
        Self { entries: Mutex::new(HashMap::new()), serials: AtomicU64::new(0) }
    }
}

impl<K: Eq + Hash + Clone, H> Roll<K, H> {
    /// The live handle of `key`, or a new one made after `forget` took leftovers away.
    fn enter(&self, key: &K, forget: impl FnOnce(), build: impl FnOnce(u64) -> H) -> Arc<H> {
        let mut entries = self.entries.lock();
        if let Some(handle) = entries.get(key).and_then(|(_, handle)| handle.upgrade()) {
            return handle;
        }
        forget();
        let serial = self.serials.fetch_add(1, Ordering::Relaxed);
        let handle = Arc::new(build(serial));
        entries.insert(key.clone(), (serial, Arc::downgrade(&handle)));
        handle
    }

    /// Runs `forget` and strikes the entry, if the holder of `serial` is still the one entered.
    fn leave(&self, key: &K, serial: u64, forget: impl FnOnce()) {
        let mut entries = self.entries.lock();
        if entries.get(key).is_some_and(|(entered, _)| *entered == serial) {
            entries.remove(key);
            forget();
        }
    }

    /// Runs `make` while the holder of `serial` is the one entered; else `None`.
    fn while_entered<T>(&self, key: &K, serial: u64, make: impl FnOnce() -> T) -> Option<T> {
        let entries = self.entries.lock();
        entries.get(key).is_some_and(|(entered, _)| *entered == serial).then(make)
    }
}

/// What is counted of a replica whatever the model: whether it is up, its breaker, its ledger.
#[derive(Debug)]
pub struct ReplicaState {
    families: Arc<Families>,
    id: ReplicaId,
    serial: u64,
    up: IntGauge,
    in_flight: IntGauge,
    breaker: Vec<IntGauge>,
    probes: Counted<ProbeResult>,
    connect: Histogram,
}

impl ReplicaState {
    pub(super) fn enter(families: &Arc<Families>, id: &ReplicaId) -> Arc<Self> {
        let forget = || Self::forget(families, id);
        families.replicas.enter(id, forget, |serial| {
            let label = [id.as_str()];
            let breaker = BreakerLabel::ALL
                .iter()
                .map(|state| families.breaker.with_label_values(&[id.as_str(), state.text()]))
                .collect();
            let state = Self {
                up: families.up.with_label_values(&label),
                in_flight: families.replica_in_flight.with_label_values(&label),
                breaker,
                probes: Counted::new(&families.probes, &label),
                connect: families.connect.with_label_values(&label),
                families: Arc::clone(families),
                id: id.clone(),
                serial,
            };
            state.breaker(BreakerLabel::Closed);
            state
        })
    }

    fn forget(families: &Families, id: &ReplicaId) {
        let label = [id.as_str()];
        let _ = families.up.remove_label_values(&label);
        let _ = families.replica_in_flight.remove_label_values(&label);
        let _ = families.connect.remove_label_values(&label);
        for state in BreakerLabel::ALL {
            let _ = families.breaker.remove_label_values(&[id.as_str(), state.text()]);
        }
        Counted::<ProbeResult>::forget(&families.probes, &label);
    }

    /// Takes every series of the replica away now, though somebody may still hold the handle.
    pub fn retire(&self) {
        let forget = || Self::forget(&self.families, &self.id);
        self.families.replicas.leave(&self.id, self.serial, forget);
    }

    /// The replica can serve.
    pub fn went_up(&self) {
        self.up.set(1);
    }

    /// The replica cannot serve.
    pub fn went_down(&self) {
        self.up.set(0);
    }

    /// Shows where the breaker stands.
    pub fn breaker(&self, now: BreakerLabel) {
        for (state, gauge) in BreakerLabel::ALL.iter().zip(&self.breaker) {
            gauge.set(i64::from(*state == now));
        }
    }

    /// Counts a probe.
    pub fn probe(&self, result: ProbeResult) {
        self.probes.add(result, 1);
    }

    /// Counts a lease taken.
    pub fn lease_taken(&self) {
        self.in_flight.inc();
    }

    /// Counts a lease given back.
    pub fn lease_given_back(&self) {
        self.in_flight.dec();
    }

    /// Notes how long a new connection took.
    pub fn connected(&self, took: Duration) {
        self.connect.observe(took.as_secs_f64());
    }
}

impl Drop for ReplicaState {
    fn drop(&mut self) {
        self.retire();
    }
}

/// What is counted of the traffic of one model on one replica.
#[derive(Debug)]
pub struct ReplicaMetrics {
    families: Arc<Families>,
    key: (ModelName, ReplicaId),
    serial: u64,
    attempts: Counted<AttemptOutcome>,
    tokens: Counted<TokenKind>,
    first_byte: Histogram,
    first_token: Histogram,
    inter_token: Histogram,
}

impl ReplicaMetrics {
    pub(super) fn enter(families: &Arc<Families>, model: &ModelName, id: &ReplicaId) -> Arc<Self> {
        let key = (model.clone(), id.clone());
        families.pairs.enter(&key, || Self::forget(families, &key), |serial| {
            let labels = [model.as_str(), id.as_str()];
            Self {
                attempts: Counted::new(&families.attempts, &labels),
                tokens: Counted::new(&families.tokens, &labels),
                first_byte: families.first_byte.with_label_values(&labels),
                first_token: families.first_token.with_label_values(&labels),
                inter_token: families.inter_token.with_label_values(&labels),
                families: Arc::clone(families),
                key: key.clone(),
                serial,
            }
        })
    }

    fn forget(families: &Families, (model, id): &(ModelName, ReplicaId)) {
        let labels = [model.as_str(), id.as_str()];
        Counted::<AttemptOutcome>::forget(&families.attempts, &labels);
        Counted::<TokenKind>::forget(&families.tokens, &labels);
        for family in [&families.first_byte, &families.first_token, &families.inter_token] {
            let _ = family.remove_label_values(&labels);
        }
    }

    /// Takes every series of the pair away now, though somebody may still hold the handle.
    pub fn retire(&self) {
        let forget = || Self::forget(&self.families, &self.key);
        self.families.pairs.leave(&self.key, self.serial, forget);
    }

    /// Counts an attempt that has ended.
    pub fn attempt(&self, outcome: AttemptOutcome) {
        self.attempts.add(outcome, 1);
    }

    /// Notes the time from the first byte of the request to the head of the answer.
    pub fn first_byte(&self, after: Duration) {
        self.first_byte.observe(after.as_secs_f64());
    }

    /// Notes the time from the head of the request to the first event with content.
    pub fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    /// Notes the mean time between tokens of one chunk: the time since the last chunk with tokens,
    /// shared by the `token_events` of this one. At most one observation per chunk.
    pub fn inter_token(&self, since_last: Duration, token_events: u32) {
        if token_events > 0 {
            self.inter_token.observe(since_last.as_secs_f64() / f64::from(token_events));
        }
    }

    /// Counts the tokens of a finished request.
    pub fn tokens(&self, usage: &Usage) {
        for (kind, tokens) in [
            (TokenKind::Prompt, usage.prompt),
            (TokenKind::Completion, usage.completion),
            (TokenKind::Cached, usage.cached),
        ] {
            if let Some(tokens) = tokens {
                self.tokens.add(kind, tokens.0);
            }
        }
    }
}

impl Drop for ReplicaMetrics {
    fn drop(&mut self) {
        self.retire();
    }
}

/// What is counted of one model, whichever replica served it.
#[derive(Debug)]
pub struct ModelMetrics {
    families: Arc<Families>,
    model: ModelName,
    serial: u64,
    /// One row per API that was used; APIs are names of our own, so their number is bounded.
    requests: RwLock<Vec<(&'static str, Counted<StatusClass>)>>,
    ended: Vec<Histogram>,
    queued: Histogram,
}

impl ModelMetrics {
    pub(super) fn enter(families: &Arc<Families>, model: &ModelName) -> Arc<Self> {
        families.models.enter(model, || Self::forget(families, model), |serial| {
            let ended = Ended::ALL
                .iter()
                .map(|how| families.total.with_label_values(&[model.as_str(), how.text()]))
                .collect();
            Self {
                requests: RwLock::default(),
                ended,
                queued: families.queued.with_label_values(&[model.as_str()]),
                families: Arc::clone(families),
                model: model.clone(),
                serial,
            }
        })
    }

    fn forget(families: &Families, model: &ModelName) {
        let model = model.as_str();
        let _ = families.queued.remove_label_values(&[model]);
        for how in Ended::ALL {
            let _ = families.total.remove_label_values(&[model, how.text()]);
        }
        for api in families.apis.lock().iter() {
            Counted::<StatusClass>::forget(&families.requests, &[model, api]);
        }
    }

    /// Takes every series of the model away now, though somebody may still hold the handle.
    pub fn retire(&self) {
        let forget = || Self::forget(&self.families, &self.model);
        self.families.models.leave(&self.model, self.serial, forget);
    }

    /// Counts a request by the API it used and the status the client got; 0 when it got none.
    pub fn request(&self, api: &'static str, status: u16) {
        let class = StatusClass::of(status);
        if let Some((_, row)) = self.requests.read().iter().find(|(known, _)| *known == api) {
            row.add(class, 1);
            return;
        }
        // A retired model must not grow new series that nobody would take away.
        let _ = self.families.models.while_entered(&self.model, self.serial, || {
            let mut rows = self.requests.write();
            if !rows.iter().any(|(known, _)| *known == api) {
                self.families.apis.lock().insert(api);
                let labels = [self.model.as_str(), api];
                rows.push((api, Counted::new(&self.families.requests, &labels)));
            }
            if let Some((_, row)) = rows.iter().find(|(known, _)| *known == api) {
                row.add(class, 1);
            }
        });
    }

    /// Notes how long a request took in all, and how it ended.
    pub fn ended(&self, how: Ended, total: Duration) {
        if let Some(histogram) = self.ended.get(how.index()) {
            histogram.observe(total.as_secs_f64());
        }
    }

    /// Notes how long a request waited to be let in.
    pub fn queued(&self, waited: Duration) {
        self.queued.observe(waited.as_secs_f64());
    }
}

impl Drop for ModelMetrics {
    fn drop(&mut self) {
        self.retire();
    }
}

//! Handles on the series of one replica or one model: found once, then only atomic additions.
//! A handle gives its series back when it is dropped or retired, so that nothing is shown of what
//! is gone; asked for again, the series are back at zero. No label look-up happens on the hot path.
//! To add a series: a field in `Families` (families.rs), its handle and its removal here.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge};

use super::facts::Usage;
use super::families::Families;
use super::labels::{
    AttemptOutcome, BreakerLabel, Ended, Label, ProbeResult, StatusClass, TokenKind,
};
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
        families.pairs.enter(
            &key,
            || Self::forget(families, &key),
            |serial| {
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
            },
        )
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
        families.models.enter(
            model,
            || Self::forget(families, model),
            |serial| {
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
            },
        )
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

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::super::{Metrics, Usage};
    use super::*;
    use crate::names::Tokens;

    fn metrics() -> Arc<Metrics> {
        Metrics::new(SystemTime::UNIX_EPOCH).unwrap()
    }

    fn has(metrics: &Metrics, series: &str, value: &str) -> bool {
        metrics.encode().lines().any(|line| line == format!("{series} {value}"))
    }

    #[test]
    fn one_key_has_one_handle_while_it_is_held() {
        let metrics = metrics();
        let (model, id) = (ModelName::new("m"), ReplicaId::new("r"));
        let first = metrics.replica(&model, &id);
        assert!(Arc::ptr_eq(&first, &metrics.replica(&model, &id)));
        let other = metrics.replica(&ModelName::new("n"), &id);
        assert!(!Arc::ptr_eq(&first, &other));
    }

    #[test]
    fn what_is_counted_is_shown_under_its_labels() {
        let metrics = metrics();
        let (model, id) = (ModelName::new("m"), ReplicaId::new("r"));
        let state = metrics.replica_state(&id);
        state.went_up();
        state.breaker(BreakerLabel::Open);
        state.probe(ProbeResult::Bad);
        state.lease_taken();
        state.lease_taken();
        state.lease_given_back();
        state.connected(Duration::from_millis(2));
        let pair = metrics.replica(&model, &id);
        pair.attempt(AttemptOutcome::Backpressure);
        pair.first_byte(Duration::from_secs(1));
        pair.first_token(Duration::from_secs(2));
        pair.inter_token(Duration::from_secs(3), 3);
        pair.inter_token(Duration::from_secs(3), 0);
        pair.tokens(&Usage { prompt: Some(Tokens(16)), completion: Some(Tokens(6)), cached: None });
        let all = metrics.model(&model);
        all.request("chat_completions", 200);
        all.request("chat_completions", 503);
        all.request("completions", 0);
        all.ended(Ended::ClientLeft, Duration::from_secs(4));
        all.queued(Duration::from_secs(5));
        for (series, value) in [
            (r#"weir_replica_up{replica="r"}"#, "1"),
            (r#"weir_replica_breaker_state{replica="r",state="open"}"#, "1"),
            (r#"weir_replica_breaker_state{replica="r",state="closed"}"#, "0"),
            (r#"weir_probes_total{replica="r",result="bad"}"#, "1"),
            (r#"weir_probes_total{replica="r",result="good"}"#, "0"),
            (r#"weir_replica_in_flight_requests{replica="r"}"#, "1"),
            (r#"weir_connect_seconds_sum{replica="r"}"#, "0.002"),
            (r#"weir_attempts_total{model="m",outcome="backpressure",replica="r"}"#, "1"),
            (r#"weir_attempts_total{model="m",outcome="answered",replica="r"}"#, "0"),
            (r#"weir_first_byte_seconds_sum{model="m",replica="r"}"#, "1"),
            (r#"weir_first_token_seconds_sum{model="m",replica="r"}"#, "2"),
            (r#"weir_inter_token_seconds_sum{model="m",replica="r"}"#, "1"),
            (r#"weir_inter_token_seconds_count{model="m",replica="r"}"#, "1"),
            (r#"weir_tokens_total{kind="prompt",model="m",replica="r"}"#, "16"),
            (r#"weir_tokens_total{kind="completion",model="m",replica="r"}"#, "6"),
            (r#"weir_tokens_total{kind="cached",model="m",replica="r"}"#, "0"),
            (r#"weir_requests_total{api="chat_completions",model="m",status="2xx"}"#, "1"),
            (r#"weir_requests_total{api="chat_completions",model="m",status="5xx"}"#, "1"),
            (r#"weir_requests_total{api="completions",model="m",status="none"}"#, "1"),
            (r#"weir_request_seconds_sum{ended="client_left",model="m"}"#, "4"),
            (r#"weir_queue_seconds_sum{model="m"}"#, "5"),
        ] {
            assert!(has(&metrics, series, value), "{series} {value} in {}", metrics.encode());
        }
        state.went_down();
        assert!(has(&metrics, r#"weir_replica_up{replica="r"}"#, "0"));
    }

    #[test]
    fn a_replica_that_is_dropped_leaves_no_series_and_comes_back_at_zero() {
        let metrics = metrics();
        let (model, id) = (ModelName::new("m"), ReplicaId::new("gone:8000"));
        let start = metrics.encode().lines().count();
        let state = metrics.replica_state(&id);
        let pair = metrics.replica(&model, &id);
        state.went_up();
        pair.attempt(AttemptOutcome::Answered);
        drop((state, pair));
        let text = metrics.encode();
        assert!(!text.contains("gone:8000"), "{text}");
        assert_eq!(text.lines().count(), start);
        let _again = metrics.replica(&model, &id);
        let series = r#"weir_attempts_total{model="m",outcome="answered",replica="gone:8000"}"#;
        assert!(has(&metrics, series, "0"));
    }

    #[test]
    fn retiring_takes_series_away_at_once_and_a_late_drop_harms_no_successor() {
        let metrics = metrics();
        let (model, id) = (ModelName::new("m"), ReplicaId::new("r"));
        let series = r#"weir_attempts_total{model="m",outcome="answered",replica="r"}"#;
        let old = metrics.replica(&model, &id);
        let old_state = metrics.replica_state(&id);
        let old_model = metrics.model(&model);
        old_model.request("chat_completions", 200);
        old.retire();
        old_state.retire();
        old_model.retire();
        assert!(!metrics.encode().contains("\"m\""), "{}", metrics.encode());
        assert!(!metrics.encode().contains("\"r\""), "{}", metrics.encode());
        let new = metrics.replica(&model, &id);
        let new_state = metrics.replica_state(&id);
        assert!(!Arc::ptr_eq(&old, &new));
        new.attempt(AttemptOutcome::Answered);
        old.attempt(AttemptOutcome::Answered);
        new_state.lease_taken();
        old_state.lease_given_back();
        drop((old, old_state));
        assert!(has(&metrics, series, "1"));
        assert!(has(&metrics, r#"weir_replica_in_flight_requests{replica="r"}"#, "1"));
    }

    #[test]
    fn a_retired_model_grows_no_new_series() {
        let metrics = metrics();
        let model = metrics.model(&ModelName::new("old"));
        model.request("chat_completions", 200);
        model.retire();
        model.request("chat_completions", 200);
        model.request("completions", 200);
        model.ended(Ended::Complete, Duration::ZERO);
        assert!(!metrics.encode().contains("\"old\""), "{}", metrics.encode());
    }

    #[test]
    fn a_thousand_churns_leave_as_many_series_as_before() {
        let metrics = metrics();
        let lines = || metrics.encode().lines().filter(|line| line.starts_with("weir_")).count();
        let start = lines();
        for round in 0..1000 {
            let (model, id) = (ModelName::new("m"), ReplicaId::new(format!("r{round}")));
            let state = metrics.replica_state(&id);
            let pair = metrics.replica(&model, &id);
            let all = metrics.model(&model);
            pair.attempt(AttemptOutcome::Answered);
            all.request("chat_completions", 200);
            state.went_up();
        }
        assert_eq!(lines(), start);
    }

    #[test]
    fn handles_taken_and_dropped_by_many_threads_end_with_no_series() {
        let metrics = metrics();
        let (model, id) = (ModelName::new("m"), ReplicaId::new("r"));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        let pair = metrics.replica(&model, &id);
                        pair.attempt(AttemptOutcome::Answered);
                        let all = metrics.model(&model);
                        all.request("chat_completions", 200);
                    }
                });
            }
        });
        let held = metrics.replica(&model, &id);
        held.attempt(AttemptOutcome::Answered);
        let series = r#"weir_attempts_total{model="m",outcome="answered",replica="r"}"#;
        assert!(has(&metrics, series, "1"), "a new handle starts at zero and is shown");
        drop(held);
        assert!(!metrics.encode().contains("\"m\""));
    }

    #[test]
    fn requests_of_models_nobody_knows_share_one_series() {
        let metrics = metrics();
        metrics.unknown_model().request("chat_completions", 404);
        let series = r#"weir_requests_total{api="chat_completions",model="unknown",status="4xx"}"#;
        assert!(has(&metrics, series, "1"));
    }
}

//! Every number Weir shows, named once: name, unit, labels. Labels come from closed sets, from the
//! configuration or from models the fleet knows; never from a client's text.
//! Nothing here decides anything. To add a number: a field, its line in `new`, and a method that
//! says in words what happened. Numbers of one replica or model go through the handles in
//! `replica.rs`, which take them away again.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, Registry, TextEncoder};

use super::Result;
use super::families::{Families, Names};
use super::labels::{Phase, ReloadResult};
use super::process;
use super::replica::{Counted, ModelMetrics, ReplicaMetrics, ReplicaState};
use crate::names::{ModelName, ReplicaId};

/// A number's name and what it tells, for people.
pub(super) type Name = (&'static str, &'static str);

pub(super) const CONNECT_SECONDS: Name =
    ("weir_connect_seconds", "Time to get a new connection to the replica");
pub(super) const FIRST_BYTE_SECONDS: Name =
    ("weir_first_byte_seconds", "From the head of the request to that of the answer");
pub(super) const FIRST_TOKEN_SECONDS: Name = (
    "weir_first_token_seconds",
    "From the head of the request to the first event with content; streams only",
);
pub(super) const INTER_TOKEN_SECONDS: Name = (
    "weir_inter_token_seconds",
    "Time between events with content, the mean of each chunk; streams only",
);
pub(super) const REQUEST_SECONDS: Name =
    ("weir_request_seconds", "Whole time of a request, by how it ended");
pub(super) const QUEUE_SECONDS: Name = ("weir_queue_seconds", "Time spent waiting to be let in");
pub(super) const REPLICA_UP: Name = ("weir_replica_up", "1 when the replica can serve");
pub(super) const REPLICA_BREAKER_STATE: Name =
    ("weir_replica_breaker_state", "1 for the state in which the breaker of the replica stands");
pub(super) const PROBES_TOTAL: Name = ("weir_probes_total", "Health probes, by what came of them");
pub(super) const REPLICA_IN_FLIGHT_REQUESTS: Name =
    ("weir_replica_in_flight_requests", "Leases taken and not yet given back");
pub(super) const ATTEMPTS_TOTAL: Name =
    ("weir_attempts_total", "Attempts at a replica, by what came of them");
pub(super) const TOKENS_TOTAL: Name =
    ("weir_tokens_total", "Tokens as engines report them; cached ones are part of the prompt");
pub(super) const REQUESTS_TOTAL: Name =
    ("weir_requests_total", "Requests that have ended, by the class of the status that was sent");
const CANCELS_TOTAL: Name =
    ("weir_cancels_total", "Requests whose client left, by how far they had come");
const RELOADS_TOTAL: Name = ("weir_reloads_total", "Readings of the configuration");
const BUILD_INFO: Name = ("weir_build_info", "1, with the version of this program");
const IN_FLIGHT_REQUESTS: Name = ("weir_in_flight_requests", "Requests that have not ended");
const ERRORS_TOTAL: Name = ("weir_errors_total", "Errors, by kind");
const RETRIES_TOTAL: Name = ("weir_retries_total", "Further attempts, by the reason");
const REFUSALS_TOTAL: Name = ("weir_refusals_total", "Answers that Weir made itself to say no");
const REQUEST_BYTES_TOTAL: Name = ("weir_request_bytes_total", "Bytes of bodies received");
const RESPONSE_BYTES_TOTAL: Name = ("weir_response_bytes_total", "Bytes of bodies sent");
const BUFFERED_BYTES: Name = ("weir_buffered_bytes", "Bytes of answers kept for consumers now");
const REQUEST_BODIES_BYTES: Name = ("weir_request_bodies_bytes", "Bytes of requests held now");
const CONSUMER_SKIPPED_TOTAL: Name =
    ("weir_consumer_skipped_total", "Answers that a consumer wanted and had to go without");
const DISGUISED_FAILURES_TOTAL: Name =
    ("weir_disguised_failures_total", "Answers with status 200 that say inside that they failed");
const STREAM_EVENTS_SKIPPED_TOTAL: Name = (
    "weir_stream_events_skipped_total",
    "Events of streams too large to be read; they were passed on all the same",
);
const ACCESS_LOG_DROPPED_LINES_TOTAL: Name =
    ("weir_access_log_dropped_lines_total", "Lines of the access log that were not written");
const RELOAD_SUCCESS_TIMESTAMP_SECONDS: Name =
    ("weir_reload_success_timestamp_seconds", "When the configuration in use was taken");
const CONFIG_INFO: Name = ("weir_config_info", "1, with the hash of the configuration");

/// The model label of requests whose model the fleet does not know.
const UNKNOWN_MODEL: &str = "unknown";

/// All that is counted in this process. One per process, shared, kept over reloads.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    families: Arc<Families>,
    unknown_model: Arc<ModelMetrics>,
    started: SystemTime,
    in_flight: IntGauge,
    errors: IntCounterVec,
    retries: IntCounterVec,
    refusals: IntCounterVec,
    cancels: Counted<Phase>,
    request_bytes: IntCounter,
    response_bytes: IntCounter,
    buffered: Arc<AtomicUsize>,
    buffered_bytes: IntGauge,
    bodies: Arc<AtomicUsize>,
    bodies_bytes: IntGauge,
    consumer_skipped: IntCounterVec,
    disguised: IntCounterVec,
    events_skipped: IntCounter,
    log_dropped: IntCounter,
    reloads: Counted<ReloadResult>,
    reload_success: Gauge,
    config: GaugeVec,
}

impl Metrics {
    /// Names every number. `started` is the date the process began, shown as such.
    pub fn new(started: SystemTime) -> Result<Arc<Self>> {
        let names = Names { registry: Registry::new() };
        let families = Arc::new(Families::new(&names)?);
        let unknown_model = ModelMetrics::enter(&families, &ModelName::new(UNKNOWN_MODEL));
        let cancels = names.counters(CANCELS_TOTAL, &["phase"])?;
        let reloads = names.counters(RELOADS_TOTAL, &["result"])?;
        names
            .gauges(BUILD_INFO, &["version"])?
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1);
        Ok(Arc::new(Self {
            families,
            unknown_model,
            started,
            in_flight: names.gauge(IN_FLIGHT_REQUESTS)?,
            errors: names.counters(ERRORS_TOTAL, &["kind"])?,
            retries: names.counters(RETRIES_TOTAL, &["reason"])?,
            refusals: names.counters(REFUSALS_TOTAL, &["reason"])?,
            cancels: Counted::new(&cancels, &[]),
            request_bytes: names.counter(REQUEST_BYTES_TOTAL)?,
            response_bytes: names.counter(RESPONSE_BYTES_TOTAL)?,
            buffered: Arc::default(),
            buffered_bytes: names.gauge(BUFFERED_BYTES)?,
            bodies: Arc::default(),
            bodies_bytes: names.gauge(REQUEST_BODIES_BYTES)?,
            consumer_skipped: names.counters(CONSUMER_SKIPPED_TOTAL, &["consumer", "reason"])?,
            disguised: names.counters(DISGUISED_FAILURES_TOTAL, &["kind"])?,
            events_skipped: names.counter(STREAM_EVENTS_SKIPPED_TOTAL)?,
            log_dropped: names.counter(ACCESS_LOG_DROPPED_LINES_TOTAL)?,
            reloads: Counted::new(&reloads, &[]),
            reload_success: names.seconds_gauge(RELOAD_SUCCESS_TIMESTAMP_SECONDS)?,
            config: names.info(CONFIG_INFO)?,
            registry: names.registry,
        }))
    }

    /// The handle on what is true of a replica whatever the model. Cached while anybody holds it.
    pub fn replica_state(&self, id: &ReplicaId) -> Arc<ReplicaState> {
        ReplicaState::enter(&self.families, id)
    }

    /// The handle on the traffic of a model on a replica. Cached while anybody holds it.
    pub fn replica(&self, model: &ModelName, id: &ReplicaId) -> Arc<ReplicaMetrics> {
        ReplicaMetrics::enter(&self.families, model, id)
    }

    /// The handle on a model that the fleet knows. Cached while anybody holds it.
    pub fn model(&self, model: &ModelName) -> Arc<ModelMetrics> {
        ModelMetrics::enter(&self.families, model)
    }

    /// The handle for requests that name no model, or one the fleet does not know.
    pub fn unknown_model(&self) -> &Arc<ModelMetrics> {
        &self.unknown_model
    }

    /// Counts a request as in flight until the result is dropped.
    pub fn enter(&self) -> InFlight {
        self.in_flight.inc();
        InFlight { gauge: self.in_flight.clone() }
    }

    /// Counts an error. `kind` is a name of our own.
    pub fn error(&self, kind: &'static str) {
        self.errors.with_label_values(&[kind]).inc();
    }

    /// Counts a further attempt. `reason` is a name of our own.
    pub fn retry(&self, reason: &'static str) {
        self.retries.with_label_values(&[reason]).inc();
    }

    /// Counts an answer of ours that says no. `reason` is a name of our own.
    pub fn refusal(&self, reason: &'static str) {
        self.refusals.with_label_values(&[reason]).inc();
    }

    /// Counts a client that left.
    pub fn cancel(&self, phase: Phase) {
        self.cancels.add(phase, 1);
    }

    /// Counts bytes of a request body that were received.
    pub fn request_bytes(&self, bytes: u64) {
        self.request_bytes.inc_by(bytes);
    }

    /// Counts bytes of a response body that were sent.
    pub fn response_bytes(&self, bytes: u64) {
        self.response_bytes.inc_by(bytes);
    }

    /// Where the bytes of answers that are kept now are added up; shown at each scrape.
    pub fn buffered(&self) -> &Arc<AtomicUsize> {
        &self.buffered
    }

    /// Where the bytes of request bodies that are held now are added up; shown at each scrape.
    pub fn bodies(&self) -> &Arc<AtomicUsize> {
        &self.bodies
    }

    /// Counts an answer that a consumer had to go without. Both are names of our own.
    pub fn consumer_skipped(&self, consumer: &'static str, reason: &'static str) {
        self.consumer_skipped.with_label_values(&[consumer, reason]).inc();
    }

    /// Counts an answer with status 200 that failed inside. `kind` is a name of our own.
    pub fn disguised_failure(&self, kind: &'static str) {
        self.disguised.with_label_values(&[kind]).inc();
    }

    /// Counts events of a stream that were too large to be read.
    pub fn events_skipped(&self, events: u64) {
        self.events_skipped.inc_by(events);
    }

    /// The counter of lines that the access log dropped.
    pub(super) fn log_dropped(&self) -> &IntCounter {
        &self.log_dropped
    }

    /// Counts a reading of the configuration that ended at `at`.
    pub fn reload(&self, result: ReloadResult, at: SystemTime) {
        self.reloads.add(result, 1);
        if result == ReloadResult::Taken {
            self.reload_date(at);
        }
    }

    /// Shows when the configuration in use was taken.
    pub fn reload_date(&self, at: SystemTime) {
        let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        self.reload_success.set(since.as_secs_f64());
    }

    /// Shows the hash of the configuration in use, and no other.
    pub fn config(&self, hash: &str) {
        self.config.reset();
        self.config.with_label_values(&[hash]).set(1.0);
    }

    /// Everything in Prometheus' text format, read at one go: the counts of a histogram agree with
    /// each other, and no counter is lower than in an earlier text.
    pub fn encode(&self) -> String {
        let buffered = self.buffered.load(Ordering::Relaxed);
        self.buffered_bytes.set(i64::try_from(buffered).unwrap_or(i64::MAX));
        let bodies = self.bodies.load(Ordering::Relaxed);
        self.bodies_bytes.set(i64::try_from(bodies).unwrap_or(i64::MAX));
        let families = self.registry.gather();
        let mut text = String::with_capacity(TEXT_BYTES);
        if let Err(error) = TextEncoder::new().encode_utf8(&families, &mut text) {
            tracing::error!(%error, "metrics cannot be encoded");
        }
        process::encode(self.started, &mut text);
        text
    }
}

/// Room for the text of a small fleet, so that it seldom grows.
const TEXT_BYTES: usize = 64 * 1024;

/// A request in flight; dropping it takes it out of the count.
#[derive(Debug)]
pub struct InFlight {
    gauge: IntGauge,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics() -> Arc<Metrics> {
        Metrics::new(SystemTime::UNIX_EPOCH).unwrap()
    }

    /// The value of a series in the text.
    pub(super) fn value(text: &str, series: &str) -> Option<f64> {
        let rest = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
        rest.parse().ok()
    }

    #[test]
    fn a_request_is_in_flight_until_its_mark_is_dropped() {
        let metrics = metrics();
        let first = metrics.enter();
        let second = metrics.enter();
        assert_eq!(value(&metrics.encode(), "weir_in_flight_requests"), Some(2.0));
        drop(first);
        drop(second);
        assert_eq!(value(&metrics.encode(), "weir_in_flight_requests"), Some(0.0));
    }

    #[test]
    fn every_event_is_told_under_its_own_name() {
        let metrics = metrics();
        metrics.error("upstream_reset");
        metrics.retry("connect_failed");
        metrics.refusal("queue_full");
        metrics.cancel(Phase::Queued);
        metrics.request_bytes(7);
        metrics.response_bytes(11);
        metrics.buffered().store(13, Ordering::Relaxed);
        metrics.bodies().store(17, Ordering::Relaxed);
        metrics.consumer_skipped("usage", "too_large");
        metrics.disguised_failure("aborted");
        metrics.events_skipped(3);
        metrics.log_dropped().inc();
        let text = metrics.encode();
        for (series, expected) in [
            (r#"weir_errors_total{kind="upstream_reset"}"#, 1.0),
            (r#"weir_retries_total{reason="connect_failed"}"#, 1.0),
            (r#"weir_refusals_total{reason="queue_full"}"#, 1.0),
            (r#"weir_cancels_total{phase="queued"}"#, 1.0),
            (r#"weir_cancels_total{phase="streaming"}"#, 0.0),
            ("weir_request_bytes_total", 7.0),
            ("weir_response_bytes_total", 11.0),
            ("weir_buffered_bytes", 13.0),
            ("weir_request_bodies_bytes", 17.0),
            (r#"weir_consumer_skipped_total{consumer="usage",reason="too_large"}"#, 1.0),
            (r#"weir_disguised_failures_total{kind="aborted"}"#, 1.0),
            ("weir_stream_events_skipped_total", 3.0),
            ("weir_access_log_dropped_lines_total", 1.0),
            ("process_start_time_seconds", 0.0),
        ] {
            assert_eq!(value(&text, series), Some(expected), "{series} in {text}");
        }
    }

    #[test]
    fn only_a_reload_that_was_taken_moves_its_date() {
        let metrics = metrics();
        let second = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        metrics.reload(ReloadResult::Taken, second(5));
        metrics.reload(ReloadResult::Refused, second(9));
        let text = metrics.encode();
        assert_eq!(value(&text, "weir_reload_success_timestamp_seconds"), Some(5.0));
        assert_eq!(value(&text, r#"weir_reloads_total{result="taken"}"#), Some(1.0));
        assert_eq!(value(&text, r#"weir_reloads_total{result="refused"}"#), Some(1.0));
    }

    #[test]
    fn the_hash_of_one_configuration_is_shown_at_a_time() {
        let metrics = metrics();
        metrics.config("aaaa");
        metrics.config("bbbb");
        let text = metrics.encode();
        assert!(!text.contains("aaaa"));
        assert_eq!(value(&text, r#"weir_config_info{hash="bbbb"}"#), Some(1.0));
    }

    #[test]
    fn every_number_has_a_help_text_and_our_prefix() {
        let metrics = metrics();
        for family in metrics.registry.gather() {
            assert!(family.name().starts_with("weir_"), "{}", family.name());
            assert!(!family.help().is_empty(), "{}", family.name());
        }
    }

    #[test]
    fn buckets_reach_an_hour() {
        let metrics = metrics();
        let (model, id) = (ModelName::new("m"), ReplicaId::new("r"));
        let handle = metrics.replica(&model, &id);
        handle.first_token(Duration::from_secs(3000));
        let text = metrics.encode();
        let bucket = |le: &str| {
            let series =
                format!(r#"weir_first_token_seconds_bucket{{model="m",replica="r",le="{le}"}}"#);
            value(&text, &series)
        };
        assert_eq!(bucket("1800"), Some(0.0));
        assert_eq!(bucket("3600"), Some(1.0));
    }

    #[test]
    fn a_scrape_under_load_is_consistent_and_never_goes_back() {
        let metrics = metrics();
        let (model, id) = (ModelName::new("m"), ReplicaId::new("r"));
        let handle = metrics.replica(&model, &id);
        let counted = 20_000;
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..counted {
                        handle.inter_token(Duration::from_millis(3), 1);
                        metrics.request_bytes(1);
                    }
                });
            }
            let mut last = 0.0;
            for _ in 0..50 {
                let text = metrics.encode();
                let labels = r#"{model="m",replica="r""#;
                let all = format!("weir_inter_token_seconds_bucket{labels},le=\"+Inf\"}}");
                let count = format!("weir_inter_token_seconds_count{labels}}}");
                let tight = format!("weir_inter_token_seconds_bucket{labels},le=\"0.005\"}}");
                let seen = value(&text, &count).unwrap();
                assert_eq!(value(&text, &all), Some(seen));
                assert_eq!(value(&text, &tight), Some(seen), "all were three milliseconds");
                let bytes = value(&text, "weir_request_bytes_total").unwrap();
                assert!(last <= bytes, "a counter went back from {last} to {bytes}");
                last = bytes;
            }
        });
        let text = metrics.encode();
        assert_eq!(value(&text, "weir_request_bytes_total"), Some(f64::from(2 * counted)));
    }
}

//! Every number Weir shows, named once: name, unit, labels. Labels come from closed sets, from the
//! configuration or from models the fleet knows; never from a client's text.
//! Nothing here decides anything. To add a number: a field, its line in `new`, and a method that
//! says in words what happened. Numbers of one replica or model go through the handles in
//! `replica.rs`, which take them away again.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use prometheus::{
    Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};

use super::labels::{Label, Phase, ReloadResult};
use super::process;
use super::replica::{Counted, ModelMetrics, ReplicaMetrics, ReplicaState, Roll};
use super::{Result, TelemetryError};
use crate::names::{ModelName, ReplicaId};

/// The model label of requests whose model the fleet does not know.
const UNKNOWN_MODEL: &str = "unknown";

/// Seconds of whole requests and of waits for engines: a long answer takes most of an hour.
const LONG_SECONDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
    600.0, 1200.0, 1800.0, 3600.0,
];
/// Seconds between two tokens: fine around reading speed, coarse where an engine stalls.
const TOKEN_SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0, 60.0,
];
/// Seconds to get a connection: loopback is far below a millisecond, another region tens of them.
const CONNECT_SECONDS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
];

/// The families whose series belong to one replica or one model, and who holds handles on them.
#[derive(Debug)]
pub(super) struct Families {
    pub(super) replicas: Roll<ReplicaId, ReplicaState>,
    pub(super) pairs: Roll<(ModelName, ReplicaId), ReplicaMetrics>,
    pub(super) models: Roll<ModelName, ModelMetrics>,
    /// Names of APIs that were counted; all are names of our own.
    pub(super) apis: Mutex<BTreeSet<&'static str>>,
    pub(super) up: IntGaugeVec,
    pub(super) breaker: IntGaugeVec,
    pub(super) probes: IntCounterVec,
    pub(super) replica_in_flight: IntGaugeVec,
    pub(super) connect: HistogramVec,
    pub(super) attempts: IntCounterVec,
    pub(super) tokens: IntCounterVec,
    pub(super) first_byte: HistogramVec,
    pub(super) first_token: HistogramVec,
    pub(super) inter_token: HistogramVec,
    pub(super) requests: IntCounterVec,
    pub(super) total: HistogramVec,
    pub(super) queued: HistogramVec,
}

impl Families {
    fn new(names: &Names) -> Result<Self> {
        Ok(Self {
            replicas: Roll::default(),
            pairs: Roll::default(),
            models: Roll::default(),
            apis: Mutex::default(),
            up: names.gauges("weir_replica_up", "1 when the replica can serve", &["replica"])?,
            breaker: names.gauges(
                "weir_replica_breaker_state",
                "1 for the state in which the breaker of the replica stands",
                &["replica", "state"],
            )?,
            probes: names.counters(
                "weir_probes_total",
                "Health probes, by what came of them",
                &["replica", "result"],
            )?,
            replica_in_flight: names.gauges(
                "weir_replica_in_flight_requests",
                "Leases taken and not yet given back",
                &["replica"],
            )?,
            connect: names.histograms(
                ("weir_connect_seconds", "Time to get a new connection to the replica"),
                &["replica"],
                CONNECT_SECONDS,
            )?,
            attempts: names.counters(
                "weir_attempts_total",
                "Attempts at a replica, by what came of them",
                &["model", "replica", "outcome"],
            )?,
            tokens: names.counters(
                "weir_tokens_total",
                "Tokens as engines report them; cached ones are part of the prompt",
                &["model", "replica", "kind"],
            )?,
            first_byte: names.histograms(
                ("weir_first_byte_seconds", "From the head of the request to that of the answer"),
                &["model", "replica"],
                LONG_SECONDS,
            )?,
            first_token: names.histograms(
                (
                    "weir_first_token_seconds",
                    "From the head of the request to the first event with content; streams only",
                ),
                &["model", "replica"],
                LONG_SECONDS,
            )?,
            inter_token: names.histograms(
                (
                    "weir_inter_token_seconds",
                    "Time between events with content, the mean of each chunk; streams only",
                ),
                &["model", "replica"],
                TOKEN_SECONDS,
            )?,
            requests: names.counters(
                "weir_requests_total",
                "Requests that have ended, by the class of the status that was sent",
                &["model", "api", "status"],
            )?,
            total: names.histograms(
                ("weir_request_seconds", "Whole time of a request, by how it ended"),
                &["model", "ended"],
                LONG_SECONDS,
            )?,
            queued: names.histograms(
                ("weir_queue_seconds", "Time spent waiting to be let in"),
                &["model"],
                LONG_SECONDS,
            )?,
        })
    }
}

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
        let cancels = names.counters(
            "weir_cancels_total",
            "Requests whose client left, by how far they had come",
            &["phase"],
        )?;
        let reloads =
            names.counters("weir_reloads_total", "Readings of the configuration", &["result"])?;
        names
            .gauges("weir_build_info", "1, with the version of this program", &["version"])?
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1);
        Ok(Arc::new(Self {
            families,
            unknown_model,
            started,
            in_flight: names.gauge("weir_in_flight_requests", "Requests that have not ended")?,
            errors: names.counters("weir_errors_total", "Errors, by kind", &["kind"])?,
            retries: names.counters(
                "weir_retries_total",
                "Further attempts, by the reason",
                &["reason"],
            )?,
            refusals: names.counters(
                "weir_refusals_total",
                "Answers that Weir made itself to say no",
                &["reason"],
            )?,
            cancels: Counted::new(&cancels, &[]),
            request_bytes: names.counter("weir_request_bytes_total", "Bytes of bodies received")?,
            response_bytes: names.counter("weir_response_bytes_total", "Bytes of bodies sent")?,
            buffered: Arc::default(),
            buffered_bytes: names
                .gauge("weir_buffered_bytes", "Bytes of answers kept for consumers now")?,
            consumer_skipped: names.counters(
                "weir_consumer_skipped_total",
                "Answers that a consumer wanted and had to go without",
                &["consumer", "reason"],
            )?,
            disguised: names.counters(
                "weir_disguised_failures_total",
                "Answers with status 200 that say inside that they failed",
                &["kind"],
            )?,
            events_skipped: names.counter(
                "weir_stream_events_skipped_total",
                "Events of streams too large to be read; they were passed on all the same",
            )?,
            log_dropped: names.counter(
                "weir_access_log_dropped_lines_total",
                "Lines of the access log that were not written",
            )?,
            reloads: Counted::new(&reloads, &[]),
            reload_success: names.seconds_gauge(
                "weir_reload_success_timestamp_seconds",
                "When the configuration in use was taken",
            )?,
            config: names.info("weir_config_info", "1, with the hash of the configuration")?,
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
            let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
            self.reload_success.set(since.as_secs_f64());
        }
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

/// Makes families and registers them; fails when one name is used twice.
struct Names {
    registry: Registry,
}

impl Names {
    fn enter<C: prometheus::core::Collector + Clone + 'static>(&self, family: C) -> Result<C> {
        self.registry.register(Box::new(family.clone()))?;
        Ok(family)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter> {
        self.enter(IntCounter::new(name, help)?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec> {
        self.enter(IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge> {
        self.enter(IntGauge::new(name, help)?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec> {
        self.enter(IntGaugeVec::new(Opts::new(name, help), labels)?)
    }

    fn seconds_gauge(&self, name: &str, help: &str) -> Result<Gauge> {
        self.enter(Gauge::new(name, help)?)
    }

    fn info(&self, name: &str, help: &str) -> Result<GaugeVec> {
        self.enter(GaugeVec::new(Opts::new(name, help), &["hash"])?)
    }

    fn histograms(
        &self,
        (name, help): (&str, &str),
        labels: &[&str],
        buckets: &[f64],
    ) -> Result<HistogramVec> {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.enter(HistogramVec::new(options, labels)?)
    }
}

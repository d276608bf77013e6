//! The families of numbers that belong to one replica or one model, and how families are made.
//! Names and their meaning are in `metrics.rs`; who counts in them is in `replica.rs`.
//! To add a family: its name there, a field and its line in `new` here.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use prometheus::{
    Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry,
};

use super::Result;
use super::metrics::{
    ATTEMPTS_TOTAL, CONNECT_SECONDS, FIRST_BYTE_SECONDS, FIRST_TOKEN_SECONDS, INTER_TOKEN_SECONDS,
    Name, PROBES_TOTAL, QUEUE_SECONDS, REPLICA_BREAKER_STATE, REPLICA_IN_FLIGHT_REQUESTS,
    REPLICA_UP, REQUEST_SECONDS, REQUESTS_TOTAL, TOKENS_TOTAL,
};
use super::replica::{ModelMetrics, ReplicaMetrics, ReplicaState, Roll};
use crate::names::{ModelName, ReplicaId};

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
const SHORT_SECONDS: &[f64] = &[
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
    pub(super) fn new(names: &Names) -> Result<Self> {
        Ok(Self {
            replicas: Roll::default(),
            pairs: Roll::default(),
            models: Roll::default(),
            apis: Mutex::default(),
            up: names.gauges(REPLICA_UP, &["replica"])?,
            breaker: names.gauges(REPLICA_BREAKER_STATE, &["replica", "state"])?,
            probes: names.counters(PROBES_TOTAL, &["replica", "result"])?,
            replica_in_flight: names.gauges(REPLICA_IN_FLIGHT_REQUESTS, &["replica"])?,
            connect: names.histograms(CONNECT_SECONDS, &["replica"], SHORT_SECONDS)?,
            attempts: names.counters(ATTEMPTS_TOTAL, &["model", "replica", "outcome"])?,
            tokens: names.counters(TOKENS_TOTAL, &["model", "replica", "kind"])?,
            first_byte: names.histograms(
                FIRST_BYTE_SECONDS,
                &["model", "replica"],
                LONG_SECONDS,
            )?,
            first_token: names.histograms(
                FIRST_TOKEN_SECONDS,
                &["model", "replica"],
                LONG_SECONDS,
            )?,
            inter_token: names.histograms(
                INTER_TOKEN_SECONDS,
                &["model", "replica"],
                TOKEN_SECONDS,
            )?,
            requests: names.counters(REQUESTS_TOTAL, &["model", "api", "status"])?,
            total: names.histograms(REQUEST_SECONDS, &["model", "ended"], LONG_SECONDS)?,
            queued: names.histograms(QUEUE_SECONDS, &["model"], LONG_SECONDS)?,
        })
    }
}

/// Makes families and registers them; fails when one name is used twice.
pub(super) struct Names {
    pub(super) registry: Registry,
}

impl Names {
    pub(super) fn enter<C: prometheus::core::Collector + Clone + 'static>(
        &self,
        family: C,
    ) -> Result<C> {
        self.registry.register(Box::new(family.clone()))?;
        Ok(family)
    }

    pub(super) fn counter(&self, (name, help): Name) -> Result<IntCounter> {
        self.enter(IntCounter::new(name, help)?)
    }

    pub(super) fn counters(&self, (name, help): Name, labels: &[&str]) -> Result<IntCounterVec> {
        self.enter(IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    pub(super) fn gauge(&self, (name, help): Name) -> Result<IntGauge> {
        self.enter(IntGauge::new(name, help)?)
    }

    pub(super) fn gauges(&self, (name, help): Name, labels: &[&str]) -> Result<IntGaugeVec> {
        self.enter(IntGaugeVec::new(Opts::new(name, help), labels)?)
    }

    pub(super) fn seconds_gauge(&self, (name, help): Name) -> Result<Gauge> {
        self.enter(Gauge::new(name, help)?)
    }

    pub(super) fn info(&self, (name, help): Name) -> Result<GaugeVec> {
        self.enter(GaugeVec::new(Opts::new(name, help), &["hash"])?)
    }

    pub(super) fn histograms(
        &self,
        (name, help): Name,
        labels: &[&str],
        buckets: &[f64],
    ) -> Result<HistogramVec> {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.enter(HistogramVec::new(options, labels)?)
    }
}

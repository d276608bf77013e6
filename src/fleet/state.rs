//! What is known of a replica from one moment to the next: counts, breaker, health, address,
//! models. It outlives a reload as long as id and URL stay the same, so it holds nothing that the
//! config says. What a request reads is in atomics; locks are for those who write.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwapOption, Guard};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::breaker::{Breaker, BreakerOptions};
use super::health::{Change, Health, Probe, ProbeOptions, Verdict};
use super::models::{self, Card};
use super::probe::LastProbe;
use crate::telemetry::ReplicaState as Series;

/// Pingora's `Backends` say it is enabled and healthy.
const READY: u8 = 1;
/// The operator wants no new request on it.
const DRAINING: u8 = 1 << 1;
/// It answers, and its model is not loaded.
const ASLEEP: u8 = 1 << 2;
/// It is in no config any more.
const RETIRED: u8 = 1 << 3;
/// Its first good probe came.
const ADMITTED: u8 = 1 << 4;
/// The breaker may have something against it, so its lock must be taken to know.
const TRIPPED: u8 = 1 << 5;

/// It said that it has no such question as whether it sleeps.
const SLEEPLESS: u8 = 1 << 6;

/// Marks that decide whether a replica may be chosen, the breaker apart.
const DECIDING: u8 = READY | DRAINING | ASLEEP | RETIRED;

/// Nothing yet, where a time is kept as milliseconds since [`ReplicaState::born`].
const NEVER: u64 = u64::MAX;

/// See the module's text.
pub(super) struct ReplicaState {
    born: Instant,
    in_flight: AtomicU32,
    started: AtomicU64,
    marks: AtomicU8,
    alive_at: AtomicU64,
    serving_since: AtomicU64,
    gone_since: AtomicU64,
    probe_due: AtomicU64,
    last_probe: Mutex<Option<LastProbe>>,
    breaker: Mutex<Breaker>,
    health: Mutex<Health>,
    addresses: Mutex<Addresses>,
    address: ArcSwapOption<SocketAddr>,
    cards: ArcSwapOption<Vec<Card>>,
    models_trouble: ArcSwapOption<String>,
    /// Woken when the models should be asked for at once.
    pub(super) learn: Notify,
    supervisor: Mutex<Option<AbortHandle>>,
    series: Arc<Series>,
}

/// Where a name leads.
#[derive(Debug, Default)]
struct Addresses {
    all: Vec<SocketAddr>,
    current: Option<SocketAddr>,
    trouble: Option<String>,
}

impl ReplicaState {
    pub(super) fn new(
        probe: &ProbeOptions,
        breaker: &BreakerOptions,
        series: Arc<Series>,
        now: Instant,
    ) -> Self {
        Self {
            born: now,
            in_flight: AtomicU32::new(0),
            started: AtomicU64::new(0),
            marks: AtomicU8::new(0),
            alive_at: AtomicU64::new(NEVER),
            serving_since: AtomicU64::new(NEVER),
            gone_since: AtomicU64::new(NEVER),
            probe_due: AtomicU64::new(0),
            last_probe: Mutex::new(None),
            breaker: Mutex::new(Breaker::new(breaker.clone())),
            health: Mutex::new(Health::new(probe.clone())),
            addresses: Mutex::new(Addresses::default()),
            address: ArcSwapOption::empty(),
            cards: ArcSwapOption::empty(),
            models_trouble: ArcSwapOption::empty(),
            learn: Notify::new(),
            supervisor: Mutex::new(None),
            series,
        }
    }

    // The ledger.

    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn started(&self) -> u64 {
        self.started.load(Ordering::Relaxed)
    }

    pub(super) fn take(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.started.fetch_add(1, Ordering::Relaxed);
        self.series.lease_taken();
    }

    pub(super) fn give_back(&self) {
        let before = self.in_flight.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(0 < before, "more leases given back than taken");
        self.series.lease_given_back();
    }

    /// Its counters and gauges.
    pub(super) fn series(&self) -> &Arc<Series> {
        &self.series
    }

    // Marks.

    fn marked(&self, mark: u8) -> bool {
        self.marks.load(Ordering::Relaxed) & mark != 0
    }

    /// Returns whether that changed something.
    fn mark(&self, mark: u8, on: bool) -> bool {
        let before = if on {
            self.marks.fetch_or(mark, Ordering::Relaxed)
        } else {
            self.marks.fetch_and(!mark, Ordering::Relaxed)
        };
        (before & mark != 0) != on
    }

    /// Ready, awake and wanted: may be chosen if the breaker lets it.
    pub(super) fn can_serve(&self) -> bool {
        self.marks.load(Ordering::Relaxed) & DECIDING == READY
    }

    /// What Pingora's `Backends` should be told by `set_enable`.
    pub(super) fn enabled(&self) -> bool {
        self.marks.load(Ordering::Relaxed) & (ADMITTED | DRAINING) == ADMITTED
    }

    pub(super) fn set_ready(&self, ready: bool) {
        self.mark(READY, ready);
    }

    pub(super) fn admit(&self) {
        self.mark(ADMITTED, true);
    }

    pub(super) fn admitted(&self) -> bool {
        self.marked(ADMITTED)
    }

    pub(super) fn set_draining(&self, draining: bool) -> bool {
        self.mark(DRAINING, draining)
    }

    pub(super) fn draining(&self) -> bool {
        self.marked(DRAINING)
    }

    pub(super) fn set_asleep(&self, asleep: bool) -> bool {
        self.mark(ASLEEP, asleep)
    }

    pub(super) fn asleep(&self) -> bool {
        self.marked(ASLEEP)
    }

    /// It cannot be asked whether it sleeps, until it next comes up.
    pub(super) fn set_sleepless(&self, sleepless: bool) {
        self.mark(SLEEPLESS, sleepless);
    }

    pub(super) fn sleepless(&self) -> bool {
        self.marked(SLEEPLESS)
    }

    // Times.

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.born).as_millis()).unwrap_or(NEVER - 1)
    }

    fn since(&self, moment: &AtomicU64, now: Instant) -> Option<Duration> {
        match moment.load(Ordering::Relaxed) {
            NEVER => None,
            then => Some(Duration::from_millis(self.millis(now).saturating_sub(then))),
        }
    }

    fn moment(&self, moment: &AtomicU64) -> Option<Instant> {
        match moment.load(Ordering::Relaxed) {
            NEVER => None,
            then => self.born.checked_add(Duration::from_millis(then)),
        }
    }

    /// Bytes came from it just now.
    pub(super) fn seen_alive(&self, now: Instant) {
        self.alive_at.store(self.millis(now), Ordering::Relaxed);
    }

    /// How long ago the last bytes came.
    pub(super) fn alive_ago(&self, now: Instant) -> Option<Duration> {
        self.since(&self.alive_at, now)
    }

    /// When the last bytes came.
    pub(super) fn heard_at(&self) -> Option<Instant> {
        self.moment(&self.alive_at)
    }

    /// Since when nobody listens there, as the probes found.
    pub(super) fn gone_since(&self) -> Option<Instant> {
        self.moment(&self.gone_since)
    }

    /// How long to wait for the next probe.
    pub(super) fn probe_due_in(&self, now: Instant) -> Duration {
        let due = self.probe_due.load(Ordering::Relaxed);
        Duration::from_millis(due.saturating_sub(self.millis(now)))
    }

    pub(super) fn set_probe_due(&self, moment: Instant) {
        self.probe_due.store(self.millis(moment), Ordering::Relaxed);
    }

    /// It begins to serve, or stops to.
    pub(super) fn set_serving(&self, serving: bool, now: Instant) {
        let moment = if serving { self.millis(now) } else { NEVER };
        self.serving_since.store(moment, Ordering::Relaxed);
    }

    pub(super) fn serving(&self) -> bool {
        self.serving_since.load(Ordering::Relaxed) != NEVER
    }

    /// How long it has served since it last came up.
    pub(super) fn served_for(&self, now: Instant) -> Duration {
        self.since(&self.serving_since, now).unwrap_or_default()
    }

    // The breaker.

    /// The breaker, and the mark that spares others its lock set anew when it is let go.
    pub(super) fn breaker(&self) -> BreakerGuard<'_> {
        BreakerGuard { state: self, guard: self.breaker.lock() }
    }

    /// Whether the breaker may have something against it. Without a lock.
    pub(super) fn tripped(&self) -> bool {
        self.marked(TRIPPED)
    }

    // Health.

    pub(super) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock()
    }

    /// A probe ended.
    pub(super) fn probed(&self, probe: Probe, now: Instant) -> Option<Change> {
        let mut health = self.health();
        let change = health.record(probe, self.heard_at(), now);
        let gone = health.gone_since().map_or(NEVER, |since| self.millis(since));
        self.gone_since.store(gone, Ordering::Relaxed);
        change
    }

    /// Traffic made a connection to it.
    pub(super) fn reached(&self) {
        let mut health = self.health();
        health.reached();
        self.gone_since.store(NEVER, Ordering::Relaxed);
    }

    pub(super) fn last_probe(&self) -> Option<LastProbe> {
        self.last_probe.lock().clone()
    }

    pub(super) fn set_last_probe(&self, probe: LastProbe) {
        *self.last_probe.lock() = Some(probe);
    }

    /// Goes on under other options: what was found out stands.
    pub(super) fn reconfigure(&self, probe: &ProbeOptions, breaker: &BreakerOptions, now: Instant) {
        let ending = self.last_probe().map_or(Probe::TimedOut, |last| last.probe);
        let mut health = self.health();
        let mut renewed = Health::new(probe.clone());
        let (times, ending) = match health.verdict() {
            _ if !probe.is_on() => (0, ending),
            Verdict::Unknown => (0, ending),
            Verdict::Up => (probe.successes_min, Probe::Good),
            Verdict::Down => (probe.failures_max, ending),
        };
        for _ in 0..times {
            let _ = renewed.record(ending, None, now);
        }
        *health = renewed;
        drop(health);
        *self.breaker() = Breaker::new(breaker.clone());
    }

    // Addresses.

    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.address.load().as_deref().copied()
    }

    /// A look-up found these. The current one stays while it is among them. Returns whether the
    /// current one changed.
    pub(super) fn resolved(&self, found: Vec<SocketAddr>) -> bool {
        let mut addresses = self.addresses.lock();
        addresses.trouble = None;
        if found.is_empty() {
            return false;
        }
        let keep = addresses.current.filter(|current| found.contains(current));
        let current = keep.or_else(|| found.first().copied());
        addresses.all = found;
        self.set_current(&mut addresses, current)
    }

    /// A look-up failed; what is known stays. Returns whether that is news.
    pub(super) fn unresolved(&self, trouble: String) -> bool {
        self.addresses.lock().trouble.replace(trouble).is_none()
    }

    /// Nobody answers at this address: the next one becomes the current one, if there is one.
    /// Returns whether the current one changed.
    pub(super) fn unreachable(&self, address: SocketAddr) -> bool {
        let mut addresses = self.addresses.lock();
        if addresses.current != Some(address) || addresses.all.len() < 2 {
            return false;
        }
        let place = addresses.all.iter().position(|one| *one == address);
        let next = place.map_or(0, |place| (place + 1) % addresses.all.len());
        let next = addresses.all.get(next).copied();
        self.set_current(&mut addresses, next)
    }

    pub(super) fn address_trouble(&self) -> Option<String> {
        self.addresses.lock().trouble.clone()
    }

    fn set_current(&self, addresses: &mut Addresses, current: Option<SocketAddr>) -> bool {
        if addresses.current == current {
            return false;
        }
        addresses.current = current;
        self.address.store(current.map(Arc::new));
        true
    }

    // Models.

    /// The cards of its last `/v1/models`; `None` until the first.
    pub(super) fn cards(&self) -> Guard<Option<Arc<Vec<Card>>>> {
        self.cards.load()
    }

    /// Returns whether anything but dates differs from the last list.
    pub(super) fn learned(&self, cards: Vec<Card>) -> bool {
        self.models_trouble.store(None);
        let same = self.cards.load().as_ref().is_some_and(|known| models::alike(known, &cards));
        self.cards.store(Some(Arc::new(cards)));
        !same
    }

    /// It did not tell its models. Returns whether that is news.
    pub(super) fn not_learned(&self, trouble: String) -> bool {
        let trouble = Some(Arc::new(trouble));
        self.models_trouble.swap(trouble.clone()) != trouble
    }

    pub(super) fn models_trouble(&self) -> Option<Arc<String>> {
        self.models_trouble.load_full()
    }

    // The task that looks after it.

    /// Puts a new task in charge and ends the one before, so that there never are two.
    pub(super) fn supervise(&self, task: AbortHandle) {
        if let Some(former) = self.supervisor.lock().replace(task) {
            former.abort();
        }
    }

    /// It is in no config any more: nobody looks after it and nobody chooses it.
    pub(super) fn retire(&self) {
        self.mark(RETIRED, true);
        if let Some(task) = self.supervisor.lock().take() {
            task.abort();
        }
    }

    pub(super) fn retired(&self) -> bool {
        self.marked(RETIRED)
    }
}

/// The breaker under its lock.
pub(super) struct BreakerGuard<'a> {
    state: &'a ReplicaState,
    guard: MutexGuard<'a, Breaker>,
}

impl std::ops::Deref for BreakerGuard<'_> {
    type Target = Breaker;

    fn deref(&self) -> &Breaker {
        &self.guard
    }
}

impl std::ops::DerefMut for BreakerGuard<'_> {
    fn deref_mut(&mut self) -> &mut Breaker {
        &mut self.guard
    }
}

impl Drop for BreakerGuard<'_> {
    fn drop(&mut self) {
        self.state.mark(TRIPPED, !self.guard.is_calm());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::telemetry::Metrics;

    fn state() -> ReplicaState {
        let series = Metrics::new(clock::date()).unwrap().replica_state(&"r".into());
        let now = clock::now();
        ReplicaState::new(&ProbeOptions::default(), &BreakerOptions::default(), series, now)
    }

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn an_address_stays_while_the_name_still_leads_to_it() {
        let state = state();
        assert!(state.resolved(vec![at(1), at(2)]));
        assert!(!state.resolved(vec![at(3), at(1)]), "order does not matter");
        assert_eq!(state.address(), Some(at(1)));
        assert!(state.resolved(vec![at(3), at(4)]));
        assert_eq!(state.address(), Some(at(3)));
    }

    #[test]
    fn a_failed_lookup_keeps_the_last_good_address() {
        let state = state();
        state.resolved(vec![at(1)]);
        assert!(state.unresolved("no such host".into()), "the first time is news");
        assert!(!state.unresolved("no such host".into()));
        assert!(!state.resolved(Vec::new()), "an empty answer is no answer");
        assert_eq!(state.address(), Some(at(1)));
    }

    #[test]
    fn a_failed_connect_moves_on_to_the_next_address_and_round() {
        let state = state();
        state.resolved(vec![at(1), at(2), at(3)]);
        assert!(state.unreachable(at(1)));
        assert!(!state.unreachable(at(1)), "old news of an address already left");
        assert!(state.unreachable(at(2)) && state.unreachable(at(3)));
        assert_eq!(state.address(), Some(at(1)));
        state.resolved(vec![at(9)]);
        assert!(!state.unreachable(at(9)), "there is no other");
    }

    #[test]
    fn only_a_ready_replica_that_is_wanted_and_awake_can_serve() {
        let state = state();
        assert!(!state.can_serve());
        state.set_ready(true);
        assert!(state.can_serve());
        for set in [ReplicaState::set_draining, ReplicaState::set_asleep] {
            assert!(set(&state, true) && !state.can_serve());
            assert!(set(&state, false) && state.can_serve());
        }
        state.retire();
        assert!(!state.can_serve());
    }

    #[test]
    fn it_is_gone_while_probes_are_refused_and_there_again_when_somebody_connects() {
        let state = state();
        let start = clock::now();
        let later = start + Duration::from_secs(1);
        for now in [start, later, later] {
            assert_eq!(state.gone_since(), None);
            state.probed(Probe::Refused, now);
        }
        assert!(state.gone_since().is_some_and(|since| since < later));
        state.reached();
        assert_eq!(state.gone_since(), None);
    }

    #[test]
    fn the_time_of_service_counts_from_the_last_coming_up() {
        let state = state();
        let start = clock::now();
        let second = Duration::from_secs(1);
        assert_eq!(state.served_for(start + second), Duration::ZERO);
        state.set_serving(true, start);
        assert!(second * 9 / 10 < state.served_for(start + second));
        state.set_serving(false, start);
        assert_eq!(state.served_for(start + second), Duration::ZERO);
    }
}

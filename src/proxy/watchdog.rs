//! Ends the connection of a request whose present phase lasts too long, or whose replica is gone.
//!
//! A request writes its next deadline into its [`Watch`], an atomic, as it goes along; one task
//! for the whole process looks at all of them. No timer and no task belongs to a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connect::Connection;
use crate::clock;
use crate::fleet::Replica;

/// How often deadlines are looked at: a limit may be exceeded by this much.
pub(super) const TICK: Duration = Duration::from_millis(50);

const SHARDS: usize = 16;
const NEVER: u64 = u64::MAX;

/// Which limit a request ran into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// No head, or no first token of a stream, in time.
    FirstByte,
    /// The answer stood still.
    BetweenBytes,
    /// The request as a whole.
    Total,
    /// Nobody listens at the replica any more, and nothing has come since before that. No limit of
    /// time, but ended in the same way.
    Gone,
}

impl Limit {
    fn code(self) -> u8 {
        match self {
            Self::FirstByte => 1,
            Self::BetweenBytes => 2,
            Self::Total => 3,
            Self::Gone => 4,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::FirstByte),
            2 => Some(Self::BetweenBytes),
            3 => Some(Self::Total),
            4 => Some(Self::Gone),
            _ => None,
        }
    }
}

/// The deadlines of one request.
#[derive(Debug)]
pub(super) struct Watch {
    started: Instant,
    /// Milliseconds after `started`.
    phase_deadline: AtomicU64,
    phase: AtomicU8,
    total_deadline: AtomicU64,
    /// Milliseconds after `started` when a phase was last armed, which is when something came.
    progress: AtomicU64,
    fired: AtomicU8,
    attached: Mutex<Option<Attached>>,
}

/// What is ended, and whom it leads to.
#[derive(Debug)]
struct Attached {
    connection: Arc<Connection>,
    replica: Arc<Replica>,
}

impl Watch {
    fn new(started: Instant) -> Self {
        Self {
            started,
            phase_deadline: AtomicU64::new(NEVER),
            phase: AtomicU8::new(0),
            total_deadline: AtomicU64::new(NEVER),
            progress: AtomicU64::new(0),
            fired: AtomicU8::new(0),
            attached: Mutex::new(None),
        }
    }

    /// Something came: from now on this phase may last so long; zero means no limit.
    pub(super) fn arm(&self, limit: Limit, now: Instant, length: Duration) {
        self.progress.store(self.millis(now), Ordering::Relaxed);
        self.phase.store(limit.code(), Ordering::Relaxed);
        self.phase_deadline.store(self.deadline(now, length), Ordering::Relaxed);
    }

    /// No phase is limited until the next [`Watch::arm`].
    pub(super) fn disarm(&self) {
        self.phase_deadline.store(NEVER, Ordering::Relaxed);
    }

    /// The whole request may last so long; zero means no limit.
    pub(super) fn arm_total(&self, now: Instant, length: Duration) {
        self.total_deadline.store(self.deadline(now, length), Ordering::Relaxed);
    }

    /// The connection of a new attempt, to be ended when a deadline passes or the replica is gone.
    /// To be called after [`Watch::arm`].
    pub(super) fn attach(&self, connection: Option<Arc<Connection>>, replica: &Arc<Replica>) {
        let replica = Arc::clone(replica);
        let mut attached = self.attached.lock();
        self.fired.store(0, Ordering::Relaxed);
        *attached = connection.map(|connection| Attached { connection, replica });
    }

    /// Nothing is ended any more: the connection may serve another request.
    pub(super) fn detach(&self) {
        self.disarm();
        *self.attached.lock() = None;
    }

    /// The limit that was exceeded in this attempt, if one was.
    pub(super) fn fired(&self) -> Option<Limit> {
        Limit::from_code(self.fired.load(Ordering::Relaxed))
    }

    /// Whether a limit of time was exceeded.
    pub(super) fn timed_out(&self) -> bool {
        self.fired().is_some_and(|limit| limit != Limit::Gone)
    }

    /// After `started`.
    fn millis(&self, now: Instant) -> u64 {
        let age = now.saturating_duration_since(self.started).as_millis();
        u64::try_from(age).unwrap_or(NEVER - 1)
    }

    fn deadline(&self, now: Instant, length: Duration) -> u64 {
        if length.is_zero() {
            return NEVER;
        }
        let end = now.saturating_duration_since(self.started).saturating_add(length);
        u64::try_from(end.as_millis()).unwrap_or(NEVER)
    }

    fn check(&self, now: Instant) {
        // Under the lock, so that a connection that was detached is never ended.
        let attached = self.attached.lock();
        let Some(Attached { connection, replica }) = attached.as_ref() else { return };
        let Some(limit) = self.exceeded(now, replica) else { return };
        if limit != Limit::Total && connection.has_unread() {
            return;
        }
        self.fired.store(limit.code(), Ordering::Relaxed);
        connection.end();
    }

    /// The time of the whole process is over, and so is that of the request.
    fn end(&self) {
        if let Some(Attached { connection, .. }) = self.attached.lock().as_ref() {
            self.fired.store(Limit::Total.code(), Ordering::Relaxed);
            connection.end();
        }
    }

    fn exceeded(&self, now: Instant, replica: &Replica) -> Option<Limit> {
        let age = self.millis(now);
        if self.total_deadline.load(Ordering::Relaxed) <= age {
            return Some(Limit::Total);
        }
        if self.phase_deadline.load(Ordering::Relaxed) <= age {
            return Limit::from_code(self.phase.load(Ordering::Relaxed));
        }
        let gone = self.millis(replica.gone_since()?);
        (self.progress.load(Ordering::Relaxed) < gone).then_some(Limit::Gone)
    }
}

/// All requests that are watched.
#[derive(Debug)]
pub(super) struct Watchdog {
    shards: [Mutex<Vec<Arc<Watch>>>; SHARDS],
    next: AtomicU64,
}

impl Watchdog {
    /// Watching nothing yet.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { shards: Default::default(), next: AtomicU64::new(0) })
    }

    /// Watches one more request until the guard is dropped.
    pub(super) fn watch(self: &Arc<Self>, now: Instant) -> Watched {
        let shard = self.next.fetch_add(1, Ordering::Relaxed) as usize % SHARDS;
        let watch = Arc::new(Watch::new(now));
        self.shards[shard].lock().push(Arc::clone(&watch));
        Watched { dog: Arc::clone(self), watch, shard }
    }

    /// Ends what is overdue.
    pub(super) fn check(&self, now: Instant) {
        for shard in &self.shards {
            for watch in shard.lock().iter() {
                watch.check(now);
            }
        }
    }

    /// Ends everything: each client is told, and each request gets its line.
    pub(super) fn end_all(&self) {
        for shard in &self.shards {
            shard.lock().iter().for_each(|watch| watch.end());
        }
    }

    /// Looks at the deadlines for ever.
    pub(super) async fn run(&self) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.check(clock::now());
        }
    }
}

/// A watched request; dropped, it is watched no longer.
#[derive(Debug)]
pub(super) struct Watched {
    dog: Arc<Watchdog>,
    watch: Arc<Watch>,
    shard: usize,
}

impl std::ops::Deref for Watched {
    type Target = Watch;

    fn deref(&self) -> &Watch {
        &self.watch
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut shard = self.dog.shards[self.shard].lock();
        if let Some(place) = shard.iter().position(|held| Arc::ptr_eq(held, &self.watch)) {
            shard.swap_remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use pingora::connectors::l4::Connect;
    use pingora::protocols::l4::socket::SocketAddr;

    use super::super::connect::{Connections, Connector};
    use super::*;
    use crate::fleet::{Fleet, Options, ProbeOptions, ReplicaOptions};
    use crate::routing::SlowStartOptions;
    use crate::telemetry::Metrics;

    fn fleet_of(url: String) -> Arc<Fleet> {
        let every = Duration::from_millis(50);
        let probe = ProbeOptions { every, down_every_max: every, ..ProbeOptions::default() };
        let replicas = vec![ReplicaOptions { url, ..ReplicaOptions::default() }];
        let options = Options { probe, replicas, ..Options::default() };
        let metrics = Metrics::new(clock::date()).unwrap();
        Fleet::new(&options, &SlowStartOptions::default(), None, metrics).unwrap()
    }

    fn count(dog: &Watchdog) -> usize {
        dog.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    #[test]
    fn a_request_is_watched_until_its_guard_is_dropped() {
        let dog = Watchdog::new();
        let watched: Vec<_> = (0..100).map(|_| dog.watch(clock::now())).collect();
        assert_eq!(count(&dog), 100);
        drop(watched);
        assert_eq!(count(&dog), 0);
    }

    #[test]
    fn without_a_connection_nothing_fires() {
        let dog = Watchdog::new();
        let now = clock::now();
        let watched = dog.watch(now);
        watched.arm(Limit::FirstByte, now, Duration::from_millis(1));
        dog.check(now + Duration::from_secs(9));
        assert_eq!(watched.fired(), None);
    }

    #[tokio::test]
    async fn a_request_that_heard_nothing_since_its_replica_went_is_ended_and_no_other() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Connections::new();
        let to = SocketAddr::Inet(address);
        let stream = Connector::new(&connections).connect(&to).await.unwrap();
        let connection = connections.get(stream.as_raw_fd());
        let fleet = fleet_of(format!("http://{address}"));
        let replica = &fleet.replicas()[0];
        let dog = Watchdog::new();
        let (silent, other) = (dog.watch(clock::now()), dog.watch(clock::now()));
        for watched in [&silent, &other] {
            watched.arm(Limit::FirstByte, clock::now(), Duration::ZERO);
            watched.attach(connection.clone(), replica);
        }
        dog.check(clock::now());
        assert_eq!(silent.fired(), None);

        drop(listener);
        // Progress is kept in whole milliseconds.
        tokio::time::sleep(Duration::from_millis(5)).await;
        fleet.start(&tokio::runtime::Handle::current());
        while replica.gone_since().is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        other.arm(Limit::BetweenBytes, clock::now(), Duration::ZERO);
        dog.check(clock::now());
        assert_eq!((silent.fired(), other.fired()), (Some(Limit::Gone), None));
        assert!(!silent.timed_out(), "it may be tried again");
        silent.attach(None, replica);
        assert_eq!(silent.fired(), None, "a new attempt");
    }

    #[test]
    fn zero_means_no_limit() {
        let watch = Watch::new(clock::now());
        assert_eq!(watch.deadline(watch.started, Duration::ZERO), NEVER);
        assert_eq!(watch.deadline(watch.started, Duration::from_millis(7)), 7);
    }
}

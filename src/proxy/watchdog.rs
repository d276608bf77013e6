//! Ends the connection of a request whose present phase lasts too long.
//!
//! A request writes its next deadline into its [`Watch`], an atomic, as it goes along; one task
//! for the whole process looks at all of them. No timer and no task belongs to a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connect::Connection;
use crate::clock;

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
}

impl Limit {
    fn code(self) -> u8 {
        match self {
            Self::FirstByte => 1,
            Self::BetweenBytes => 2,
            Self::Total => 3,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::FirstByte),
            2 => Some(Self::BetweenBytes),
            3 => Some(Self::Total),
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
    fired: AtomicU8,
    connection: Mutex<Option<Arc<Connection>>>,
}

impl Watch {
    fn new(started: Instant) -> Self {
        Self {
            started,
            phase_deadline: AtomicU64::new(NEVER),
            phase: AtomicU8::new(0),
            total_deadline: AtomicU64::new(NEVER),
            fired: AtomicU8::new(0),
            connection: Mutex::new(None),
        }
    }

    /// From now on this phase may last so long; zero means no limit.
    pub(super) fn arm(&self, limit: Limit, now: Instant, length: Duration) {
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

    /// The connection to end when a deadline passes.
    pub(super) fn attach(&self, connection: Option<Arc<Connection>>) {
        *self.connection.lock() = connection;
    }

    /// Nothing is ended any more: the connection may serve another request.
    pub(super) fn detach(&self) {
        self.disarm();
        *self.connection.lock() = None;
    }

    /// The limit that was exceeded, if one was.
    pub(super) fn fired(&self) -> Option<Limit> {
        Limit::from_code(self.fired.load(Ordering::Relaxed))
    }

    fn deadline(&self, now: Instant, length: Duration) -> u64 {
        if length.is_zero() {
            return NEVER;
        }
        let end = now.saturating_duration_since(self.started).saturating_add(length);
        u64::try_from(end.as_millis()).unwrap_or(NEVER)
    }

    fn check(&self, now: Instant) {
        let age = now.saturating_duration_since(self.started).as_millis();
        let age = u64::try_from(age).unwrap_or(NEVER - 1);
        let limit = if self.total_deadline.load(Ordering::Relaxed) <= age {
            Limit::Total
        } else if self.phase_deadline.load(Ordering::Relaxed) <= age {
            match Limit::from_code(self.phase.load(Ordering::Relaxed)) {
                Some(limit) => limit,
                None => return,
            }
        } else {
            return;
        };
        // Under the lock, so that a connection that was detached is never ended.
        let connection = self.connection.lock();
        if let Some(connection) = connection.as_ref() {
            if limit != Limit::Total && connection.has_unread() {
                return;
            }
            self.fired.store(limit.code(), Ordering::Relaxed);
            connection.end();
        }
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
    use super::*;

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

    #[test]
    fn zero_means_no_limit() {
        let watch = Watch::new(clock::now());
        assert_eq!(watch.deadline(watch.started, Duration::ZERO), NEVER);
        assert_eq!(watch.deadline(watch.started, Duration::from_millis(7)), 7);
    }
}

//! Runs the pure engine on the real clock and tells each request of its tokens.
//! A request holds a [`Ticket`]; dropping it aborts what is left of it in the engine at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::sync::Notify;

use super::counters::FinishReason;
use super::engine::{Engine, Event, EventKind, Rejection, Request};
use super::options::EngineOptions;
use crate::clock;

/// What the engine has made so far for one choice of one request.
#[derive(Debug, Default)]
struct Choice {
    tokens: AtomicU32,
    cached: AtomicU32,
    /// 0 while it runs, else 1 plus the place in `FinishReason::ALL`.
    finish: AtomicU8,
}

#[derive(Debug)]
struct Progress {
    changed: Notify,
    dead: AtomicBool,
    choices: SmallVec<[Choice; 1]>,
}

/// Engine time: real time, faster or slower, and standing still during a hang.
#[derive(Debug)]
struct EngineClock {
    origin: Instant,
    speed: f64,
    frozen: Option<Duration>,
    lost: Duration,
}

impl EngineClock {
    fn at(&self, instant: Instant) -> Duration {
        let real = instant.saturating_duration_since(self.origin);
        self.frozen.unwrap_or_else(|| real.mul_f64(self.speed).saturating_sub(self.lost))
    }

    /// How long until engine time `at`, in real time.
    fn until(&self, at: Duration, now: Instant) -> Duration {
        at.saturating_sub(self.at(now)).div_f64(self.speed)
    }
}

struct Core {
    engine: Engine,
    clock: EngineClock,
    tickets: HashMap<u64, (Arc<Progress>, usize)>,
    events: Vec<Event>,
    next_id: u64,
    dead: bool,
}

impl Core {
    fn run(&mut self, now: Instant) {
        let mut events = std::mem::take(&mut self.events);
        self.engine.advance(self.clock.at(now), &mut events);
        for event in events.drain(..) {
            let Some((progress, choice)) = self.tickets.get(&event.id) else { continue };
            let Some(choice) = progress.choices.get(*choice) else { continue };
            match event.kind {
                EventKind::FirstToken { cached_tokens } => {
                    choice.cached.store(cached_tokens, Ordering::Relaxed);
                    choice.tokens.store(1, Ordering::Relaxed);
                }
                EventKind::Token { count } => choice.tokens.store(count, Ordering::Relaxed),
                EventKind::Preempted => continue,
                EventKind::Finished { reason } => {
                    choice.finish.store(reason as u8 + 1, Ordering::Release);
                }
            }
            progress.changed.notify_one();
            if matches!(event.kind, EventKind::Finished { .. }) {
                self.tickets.remove(&event.id);
            }
        }
        self.events = events;
    }
}

/// The engine of one server.
pub(super) struct Driver {
    core: Mutex<Core>,
    wake: Notify,
}

/// What the engine shows at one instant.
#[derive(Clone, Debug)]
pub(super) struct Gauges {
    pub(super) running: usize,
    pub(super) waiting: usize,
    pub(super) usage: f64,
    pub(super) counters: super::counters::Counters,
}

impl Driver {
    pub(super) fn new(options: EngineOptions, speed: f64) -> Arc<Self> {
        let speed = if speed.is_finite() && speed > 0.0 { speed } else { 1.0 };
        let clock = EngineClock { origin: clock::now(), speed, frozen: None, lost: Duration::ZERO };
        let core = Core {
            engine: Engine::new(options),
            clock,
            tickets: HashMap::new(),
            events: Vec::new(),
            next_id: 0,
            dead: false,
        };
        Arc::new(Self { core: Mutex::new(core), wake: Notify::new() })
    }

    /// Steps the engine for ever; ends by being aborted.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            let pause = {
                let mut core = self.core.lock();
                let now = clock::now();
                core.run(now);
                let next = core.engine.next_event_at().filter(|_| core.clock.frozen.is_none());
                next.map(|at| core.clock.until(at, now))
            };
            match pause {
                None => self.wake.notified().await,
                Some(pause) => tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = self.wake.notified() => {}
                },
            }
        }
    }

    /// Hands the choices of one request to the engine: all, or none.
    pub(super) fn submit(
        self: &Arc<Self>,
        requests: impl ExactSizeIterator<Item = Request>,
    ) -> Result<Ticket, Rejection> {
        let count = requests.len();
        let progress = Arc::new(Progress {
            changed: Notify::new(),
            dead: AtomicBool::new(false),
            choices: (0..count).map(|_| Choice::default()).collect(),
        });
        let mut ticket = Ticket {
            driver: Arc::clone(self),
            progress: Arc::clone(&progress),
            ids: SmallVec::new(),
        };
        let mut core = self.core.lock();
        progress.dead.store(core.dead, Ordering::Relaxed);
        for (index, request) in requests.enumerate().take(if core.dead { 0 } else { count }) {
            core.next_id += 1;
            let id = core.next_id;
            let now = core.clock.at(clock::now());
            core.tickets.insert(id, (Arc::clone(&progress), index));
            ticket.ids.push(id);
            if let Err(rejection) = core.engine.add(Request { id, ..request }, now) {
                drop(core); // the ticket's drop wants the lock
                return Err(rejection);
            }
        }
        drop(core);
        self.wake.notify_one();
        Ok(ticket)
    }

    /// Does something to the engine between two steps.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut Engine, Duration) -> T) -> T {
        let mut core = self.core.lock();
        let now = clock::now();
        let at = core.clock.at(now);
        let value = change(&mut core.engine, at);
        core.run(now);
        drop(core);
        self.wake.notify_one();
        value
    }

    /// Stops the engine's clock while the server still answers probes.
    pub(super) fn hang(&self) {
        let mut core = self.core.lock();
        let at = core.clock.at(clock::now());
        core.clock.frozen = Some(at);
    }

    /// Ends a hang: the engine goes on where it stood.
    pub(super) fn unhang(&self) {
        let mut core = self.core.lock();
        if let Some(frozen) = core.clock.frozen.take() {
            let lost = core.clock.at(clock::now()).saturating_sub(frozen);
            core.clock.lost += lost;
        }
        drop(core);
        self.wake.notify_one();
    }

    /// The engine dies: every request is told so, now and later.
    pub(super) fn die(&self) {
        let mut core = self.core.lock();
        core.dead = true;
        let at = core.clock.at(clock::now());
        for (id, (progress, _)) in std::mem::take(&mut core.tickets) {
            core.engine.abort(id, at);
            progress.dead.store(true, Ordering::Relaxed);
            progress.changed.notify_one();
        }
    }

    /// Whether it died.
    pub(super) fn dead(&self) -> bool {
        self.core.lock().dead
    }

    /// Everything `/metrics` wants to know.
    pub(super) fn gauges(&self) -> Gauges {
        let mut core = self.core.lock();
        core.run(clock::now());
        Gauges {
            running: core.engine.running(),
            waiting: core.engine.waiting(),
            usage: core.engine.pool().usage(),
            counters: core.engine.counters().clone(),
        }
    }
}

/// The right to the engine's work for one request.
pub(super) struct Ticket {
    driver: Arc<Driver>,
    progress: Arc<Progress>,
    ids: SmallVec<[u64; 1]>,
}

impl Ticket {
    /// Tokens made for a choice, tokens of its prompt found in the cache, and its end if it ended.
    pub(super) fn look(&self, choice: usize) -> (u32, u32, Option<FinishReason>) {
        let Some(choice) = self.progress.choices.get(choice) else { return (0, 0, None) };
        // The end is read first: whoever sees it also sees all tokens before it.
        let finish = choice.finish.load(Ordering::Acquire);
        let finish = (finish as usize).checked_sub(1).and_then(|i| FinishReason::ALL.get(i));
        let tokens = choice.tokens.load(Ordering::Relaxed);
        (tokens, choice.cached.load(Ordering::Relaxed), finish.copied())
    }

    /// Whether the engine died.
    pub(super) fn dead(&self) -> bool {
        self.progress.dead.load(Ordering::Relaxed)
    }

    /// Until there is something new to look at.
    pub(super) async fn changed(&self) {
        self.progress.changed.notified().await;
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut core = self.driver.core.lock();
        let at = core.clock.at(clock::now());
        for id in &self.ids {
            if core.tickets.remove(id).is_some() {
                core.engine.abort(*id, at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(tokens: u32) -> Request {
        Request {
            id: 0,
            prompt_tokens: 10,
            output_tokens: tokens,
            blocks: Arc::from([]),
            priority: 0,
            finish: FinishReason::Stop,
        }
    }

    #[tokio::test]
    async fn a_dropped_ticket_takes_its_request_out_of_the_engine() {
        let driver = Driver::new(EngineOptions::default(), 1.0);
        let ticket = driver.submit([request(1_000), request(1_000)].into_iter()).unwrap();
        assert_eq!(driver.gauges().running + driver.gauges().waiting, 2);
        drop(ticket);
        assert_eq!(driver.gauges().running + driver.gauges().waiting, 0);
    }

    #[tokio::test]
    async fn a_hang_is_silent_and_the_work_goes_on_after_it() {
        let driver = Driver::new(EngineOptions::default(), 1_000.0);
        let running = tokio::spawn(Arc::clone(&driver).run());
        driver.hang();
        let ticket = driver.submit([request(3)].into_iter()).unwrap();
        tokio::task::yield_now().await;
        assert_eq!(ticket.look(0), (0, 0, None));
        driver.unhang();
        while ticket.look(0).2.is_none() {
            ticket.changed().await;
        }
        assert_eq!(ticket.look(0), (3, 0, Some(FinishReason::Stop)));
        driver.die();
        assert!(driver.submit([request(3)].into_iter()).unwrap().dead());
        running.abort();
    }
}

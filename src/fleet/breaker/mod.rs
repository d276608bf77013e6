//! Whether a replica that answers badly is left alone for a while: one breaker for each replica,
//! fed with the outcome of every attempt. Pure: time and dice are arguments; the fleet holds the
//! lock and writes the log. What probes find out is not here but in `health.rs`.
//!
//! To add an outcome: a variant of [`Outcome`], an arm in [`Breaker::record`], and a test of what
//! it must and must not do.
//!
//! Three habits make it safe. An outcome counts only as far as its attempt began late enough to
//! say something new: each attempt has a [`Ticket`], so fifty requests that were running when a
//! replica died are one event, and an old stream that ends well does not hide that nobody can
//! connect any more. Errors that one bad request could cause (other 5xx) have a count of their own
//! and a higher one. And however many look bad by their answers, [`eligible()`] never lets a
//! majority be left out: then it is the requests, not the replicas.

use std::time::{Duration, Instant};

use crate::routing::unit_interval;

mod eligible;
#[cfg(test)]
mod laws;
mod options;
mod words;

pub use self::eligible::{Eligible, eligible};
pub use self::options::BreakerOptions;
pub use self::words::{Admission, Cause, Change, Outcome, Reason};

/// Part of a pause that dice take away, so that many Weirs do not come back in the same moment.
const JITTER_SHARE: f64 = 0.2;
/// Doublings of a pause, at most; its limit is reached long before.
const DOUBLINGS_MAX: u32 = 16;

/// Which attempt an outcome belongs to: how much the breaker had seen when the attempt began.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    at: u64,
}

/// Events in a row, forgotten when the last one is long ago.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    count: u32,
    last: Option<Instant>,
}

impl Row {
    /// Length of the row with one more.
    fn add(&mut self, now: Instant, forget_after: Duration) -> u32 {
        let is_old = |last: Instant| forget_after <= now.saturating_duration_since(last);
        self.count = if self.last.is_some_and(is_old) { 1 } else { self.count.saturating_add(1) };
        self.last = Some(now);
        self.count
    }
}

#[derive(Clone, Copy, Debug)]
enum State {
    Closed,
    Open { until: Instant, cause: Cause, failures: u32, trial: Option<Trial> },
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    at: u64,
    lost_at: Instant,
}

/// The breaker of one replica.
#[derive(Clone, Debug)]
pub struct Breaker {
    options: BreakerOptions,
    state: State,
    /// Counts what happens; a ticket holds its value, the three marks below are values of it.
    events: u64,
    /// The last opening or closing.
    turned: u64,
    /// The last of `failures` if it was a failed connect, else 0.
    unreached: u64,
    /// The last 429 or 503.
    refused: u64,
    failures: Row,
    server_errors: Row,
    openings: Row,
    refusals: Row,
    cooling_until: Option<Instant>,
}

impl Breaker {
    /// A breaker that knows nothing bad.
    pub fn new(options: BreakerOptions) -> Self {
        Self {
            options,
            state: State::Closed,
            events: 0,
            turned: 0,
            unreached: 0,
            refused: 0,
            failures: Row::default(),
            server_errors: Row::default(),
            openings: Row::default(),
            refusals: Row::default(),
            cooling_until: None,
        }
    }

    /// Whether the replica may serve. Changes nothing; a few comparisons.
    pub fn admission(&self, now: Instant) -> Admission {
        match self.state {
            State::Closed => match self.cooling_until {
                Some(until) if now < until => Admission::CoolingOff { until },
                _ => Admission::Ready,
            },
            State::Open { until, cause, .. } if now < until => Admission::Ejected { until, cause },
            State::Open { until, cause, trial, .. } => match trial {
                Some(trial) if now < trial.lost_at => {
                    Admission::Ejected { until: trial.lost_at, cause }
                }
                _ if after(until, self.options.forget_after) <= now => Admission::Ready,
                _ => Admission::Trial { cause },
            },
        }
    }

    /// Whether the admission is `Ready` whatever the time, until the next outcome: the fleet may
    /// remember that and ask no more.
    pub fn is_calm(&self) -> bool {
        matches!(self.state, State::Closed) && self.cooling_until.is_none()
    }

    /// An attempt begins. Takes the trial when one is due; to be asked in the same step as the
    /// choice, so that two attempts cannot both take it.
    pub fn enter(&mut self, now: Instant) -> Ticket {
        self.forget_if_old(now);
        if !matches!(self.admission(now), Admission::Trial { .. }) {
            return Ticket { at: self.events };
        }
        let at = self.mark();
        // Those that begin after it must not be taken for it.
        self.mark();
        let lost_at = after(now, self.options.trial_timeout);
        if let State::Open { trial, .. } = &mut self.state {
            *trial = Some(Trial { at, lost_at });
        }
        Ticket { at }
    }

    /// The head of a good answer came: a trial has succeeded, long before its stream ends. Rows of
    /// failures stay, or an engine that begins every answer and ends none would look well.
    pub fn answering(&mut self, ticket: &mut Ticket, now: Instant) -> Option<Change> {
        let change = self.close(*ticket, now);
        if change.is_some() {
            ticket.at = self.events;
        }
        change
    }

    /// An attempt ended. To be told once for each ticket, and with `ClientLeft` when an attempt is
    /// dropped, so that a trial is given back at once.
    pub fn record(
        &mut self,
        ticket: Ticket,
        outcome: Outcome,
        now: Instant,
        dice: u64,
    ) -> Option<Change> {
        self.forget_if_old(now);
        let was_trial = self.give_back_trial(ticket);
        let cause = match outcome {
            Outcome::ClientLeft => return None,
            Outcome::Answered => {
                self.succeeded(ticket);
                return self.close(ticket, now);
            }
            Outcome::Backpressure { retry_after } => {
                return self.cool_off(ticket, retry_after, now, dice);
            }
            Outcome::ServerError => Cause::ServerErrors,
            Outcome::ConnectFailed => Cause::ConnectFailed,
            Outcome::Reset => Cause::Reset,
            Outcome::TimedOut => Cause::TimedOut,
            Outcome::BrokenStream => Cause::BrokenStream,
        };
        // What began before the last turn is part of what turned it.
        if ticket.at < self.turned {
            return None;
        }
        match self.state {
            State::Closed => self.count_failure(ticket, cause, now, dice),
            // The connection holds; what the answers are worth is counted from here on.
            State::Open { cause: was, .. }
                if cause == Cause::ServerErrors && was != Cause::ServerErrors =>
            {
                let change = self.close(ticket, now);
                self.server_errors.add(now, self.options.forget_after);
                change
            }
            State::Open { failures, .. } if was_trial => {
                self.open(cause, failures.saturating_add(1), now, dice);
                None
            }
            // Sent although it is ejected, for want of others: the trial decides, not this.
            State::Open { .. } => None,
        }
    }

    /// A probe reached the replica: where connects had failed, a trial is due at once.
    pub fn reached(&mut self, now: Instant) {
        if let State::Open { until, cause: Cause::ConnectFailed, .. } = &mut self.state {
            *until = now.min(*until);
        }
    }

    /// Another engine stands behind the replica now: nothing that was holds any more, and what is
    /// still running there counts for nothing.
    pub fn reset(&mut self) {
        let events = self.events + 1;
        *self = Self { events, turned: events, ..Self::new(self.options.clone()) };
    }

    /// The state, for the admin API.
    pub fn reason(&self, now: Instant) -> Reason {
        let left = |until: Instant| until.saturating_duration_since(now);
        match (self.admission(now), self.state) {
            (Admission::Ready, _) => Reason::Ready,
            (Admission::CoolingOff { until }, _) => Reason::CoolingOff { left: left(until) },
            (Admission::Ejected { cause, .. }, State::Open { until, failures, .. })
                if now < until =>
            {
                Reason::Ejected { cause, failures, left: left(until) }
            }
            (Admission::Ejected { cause, .. } | Admission::Trial { cause }, _) => {
                Reason::OnTrial { cause }
            }
        }
    }

    fn count_failure(
        &mut self,
        ticket: Ticket,
        cause: Cause,
        now: Instant,
        dice: u64,
    ) -> Option<Change> {
        let forget_after = self.options.forget_after;
        let (failures, max) = if cause == Cause::ServerErrors {
            // An answer, though a bad one: the way there is open.
            self.connection_held(ticket);
            (self.server_errors.add(now, forget_after), self.options.server_errors_max)
        } else {
            self.unreached = if cause == Cause::ConnectFailed { self.mark() } else { 0 };
            (self.failures.add(now, forget_after), self.options.failures_max)
        };
        if max == 0 || failures < max {
            return None;
        }
        let open_for = self.open(cause, failures, now, dice);
        Some(Change::Opened { cause, failures, open_for })
    }

    fn succeeded(&mut self, ticket: Ticket) {
        self.connection_held(ticket);
        self.server_errors = Row::default();
        // Work taken on after the last refusal ends it; work from before says nothing of it.
        if self.refused <= ticket.at {
            self.refusals = Row::default();
            self.cooling_until = None;
        }
    }

    /// Ends the row of failures, unless the connection is older than a failed connect: an engine
    /// that is stopping finishes its streams and takes no new connection.
    fn connection_held(&mut self, ticket: Ticket) {
        if self.unreached <= ticket.at {
            self.failures = Row::default();
            self.unreached = 0;
        }
    }

    /// Ejects, longer each time. The rows of failures start anew at the closing.
    fn open(&mut self, cause: Cause, failures: u32, now: Instant, dice: u64) -> Duration {
        let options = &self.options;
        let openings = self.openings.add(now, options.forget_after);
        let open_for = pause(options.open_for, options.open_for_max, openings, dice);
        let until = after(now, open_for);
        // Remembered from its end on: a long ejection must not make itself forgotten.
        self.openings.last = Some(until);
        self.state = State::Open { until, cause, failures, trial: None };
        self.turned = self.mark();
        open_for
    }

    fn close(&mut self, ticket: Ticket, now: Instant) -> Option<Change> {
        if matches!(self.state, State::Closed) || ticket.at < self.turned {
            return None;
        }
        self.state = State::Closed;
        self.turned = self.mark();
        self.failures = Row::default();
        self.server_errors = Row::default();
        self.unreached = 0;
        self.openings.last = Some(now);
        Some(Change::Closed)
    }

    fn cool_off(
        &mut self,
        ticket: Ticket,
        retry_after: Option<Duration>,
        now: Instant,
        dice: u64,
    ) -> Option<Change> {
        let options = &self.options;
        // A whole burst that is refused together is one refusal.
        if self.refused <= ticket.at || self.refusals.count == 0 {
            self.refusals.add(now, options.forget_after);
        }
        let asked = retry_after.filter(|asked| !asked.is_zero());
        let pause = asked.map_or_else(
            || pause(options.cool_off, options.cool_off_max, self.refusals.count, dice),
            |asked| asked.min(options.cool_off_max),
        );
        let end = after(now, pause);
        let end = self.cooling_until.map_or(end, |until| until.max(end));
        self.cooling_until = Some(end);
        self.refused = self.mark();
        match &mut self.state {
            // It says no, but whether its answers are good again stays open.
            State::Open { until, cause: Cause::ServerErrors, .. } => {
                *until = end.max(*until);
                None
            }
            // It is there and able to say no.
            State::Open { .. } => self.close(ticket, now),
            State::Closed => None,
        }
    }

    /// Whether the ticket is that of the running trial, which is over with it.
    fn give_back_trial(&mut self, ticket: Ticket) -> bool {
        let State::Open { trial, .. } = &mut self.state else { return false };
        trial.take_if(|trial| trial.at == ticket.at).is_some()
    }

    fn forget_if_old(&mut self, now: Instant) {
        if matches!(self.state, State::Open { .. }) && self.admission(now) == Admission::Ready {
            self.reset();
        }
        self.cooling_until = self.cooling_until.filter(|until| now < *until);
    }

    fn mark(&mut self) -> u64 {
        self.events += 1;
        self.events
    }
}

/// The `times`th pause: doubled each time up to its limit, less a part that dice take away.
fn pause(first: Duration, most: Duration, times: u32, dice: u64) -> Duration {
    let doublings = times.saturating_sub(1).min(DOUBLINGS_MAX);
    let whole = first.saturating_mul(1 << doublings).min(most);
    whole.mul_f64(1.0 - JITTER_SHARE * unit_interval(dice))
}

fn after(start: Instant, time: Duration) -> Instant {
    start.checked_add(time).unwrap_or(start)
}

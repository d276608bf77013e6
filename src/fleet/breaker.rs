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
//! and a higher one. And however many look bad by their answers, [`eligible`] never lets a
//! majority be left out: then it is the requests, not the replicas.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::routing::unit_interval;

/// Part of a pause that dice take away, so that many Weirs do not come back in the same moment.
const JITTER_SHARE: f64 = 0.2;
/// Doublings of a pause, at most; its limit is reached long before.
const DOUBLINGS_MAX: u32 = 16;
/// Longest pause that the options may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(3_600);

/// When a replica that answers badly is left alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerOptions {
    /// Failed connects, resets, timeouts and broken streams in a row that eject a replica; 0 for
    /// never. Default 3.
    pub failures_max: u32,
    /// Answers of 5xx (but 503) in a row that eject a replica; 0 for never. Higher than
    /// `failures_max`, for one bad request can make every engine answer 500. Default 10.
    pub server_errors_max: u32,
    /// How long the first ejection lasts; each further one lasts twice as long. Default `1s`.
    #[serde(with = "humantime_serde")]
    pub open_for: Duration,
    /// The longest ejection. Default `30s`.
    #[serde(with = "humantime_serde")]
    pub open_for_max: Duration,
    /// After an ejection one request at a time tries the replica. When such a trial has no answer
    /// after this long, another one is let through. Default `5s`.
    #[serde(with = "humantime_serde")]
    pub trial_timeout: Duration,
    /// How long bad outcomes are remembered while nothing new happens. Default `1m`.
    #[serde(with = "humantime_serde")]
    pub forget_after: Duration,
    /// How long a replica that answered 429 or 503 is avoided while others are there; twice as long
    /// each further time. An answer's `Retry-After` goes before it. Default `1s`.
    #[serde(with = "humantime_serde")]
    pub cool_off: Duration,
    /// The longest such time, and the most that is believed of a `Retry-After`. Default `30s`.
    #[serde(with = "humantime_serde")]
    pub cool_off_max: Duration,
    /// The part of a pool that may be left out for bad answers. When more look bad, all serve.
    /// From 0 (nobody) to 1 (everybody). Failed connects are not counted. Default 0.5.
    pub ejected_share_max: f64,
}

impl Default for BreakerOptions {
    fn default() -> Self {
        Self {
            failures_max: 3,
            server_errors_max: 10,
            open_for: Duration::from_secs(1),
            open_for_max: Duration::from_secs(30),
            trial_timeout: Duration::from_secs(5),
            forget_after: Duration::from_secs(60),
            cool_off: Duration::from_secs(1),
            cool_off_max: Duration::from_secs(30),
            ejected_share_max: 0.5,
        }
    }
}

impl BreakerOptions {
    /// What is wrong, as pairs of a path within this section and a message; empty when fine.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        let times = [
            ("open_for", self.open_for),
            ("open_for_max", self.open_for_max),
            ("trial_timeout", self.trial_timeout),
            ("forget_after", self.forget_after),
            ("cool_off", self.cool_off),
            ("cool_off_max", self.cool_off_max),
        ];
        for (path, time) in times {
            if time.is_zero() || PAUSE_MAX < time {
                faults.push((path.to_owned(), format!("{time:?} is not within 1ms to 1h")));
            }
        }
        for (path, first, most) in [
            ("open_for", self.open_for, self.open_for_max),
            ("cool_off", self.cool_off, self.cool_off_max),
        ] {
            if most < first {
                let advice = format!("{first:?} is above its limit {most:?}; raise `{path}_max`");
                faults.push((path.to_owned(), advice));
            }
        }
        if !(0.0..=1.0).contains(&self.ejected_share_max) {
            let advice = format!("{} is not within 0 to 1; 0.5 is usual", self.ejected_share_max);
            faults.push(("ejected_share_max".to_owned(), advice));
        }
        faults
    }
}

/// How an attempt ended. One for each attempt, told when it ends; see also [`Breaker::answering`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A whole answer of 2xx to 4xx, but not 429.
    Answered,
    /// 429 or 503: the engine is well and wants no more for now.
    Backpressure {
        /// What the answer's `Retry-After` said.
        retry_after: Option<Duration>,
    },
    /// Another 5xx.
    ServerError,
    /// No connection was made.
    ConnectFailed,
    /// The connection died before an answer.
    Reset,
    /// No answer came in time.
    TimedOut,
    /// The answer began and was cut off.
    BrokenStream,
    /// The client went away first, or nobody knows how it ended; says nothing of the replica.
    ClientLeft,
}

/// Why a replica is ejected: the last failure of the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Connections could not be made.
    ConnectFailed,
    /// Connections died before an answer.
    Reset,
    /// Answers did not come in time.
    TimedOut,
    /// Answers were cut off.
    BrokenStream,
    /// Answers were 5xx.
    ServerErrors,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ConnectFailed => "connect failed",
            Self::Reset => "connection reset before an answer",
            Self::TimedOut => "no answer in time",
            Self::BrokenStream => "answer cut off",
            Self::ServerErrors => "answer was a server error",
        })
    }
}

/// Which attempt an outcome belongs to: how much the breaker had seen when the attempt began.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    at: u64,
}

/// What the breaker says of its replica at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may serve.
    Ready,
    /// It may serve if nobody else can.
    CoolingOff {
        /// When it is ready again.
        until: Instant,
    },
    /// It was ejected and may serve one request that tries it.
    Trial {
        /// Why it was ejected.
        cause: Cause,
    },
    /// It should not serve.
    Ejected {
        /// When a trial is due.
        until: Instant,
        /// Why it was ejected.
        cause: Cause,
    },
}

/// A change worth a line in the log; told once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The replica was ejected.
    Opened {
        /// The last failure of the row.
        cause: Cause,
        /// Length of the row.
        failures: u32,
        /// For how long.
        open_for: Duration,
    },
    /// The replica serves again.
    Closed,
}

/// The same as [`Admission`], for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It may serve.
    Ready,
    /// It refused work a moment ago.
    CoolingOff {
        /// For how long it is still avoided.
        left: Duration,
    },
    /// A request may try it, or is just trying it.
    OnTrial {
        /// Why it was ejected.
        cause: Cause,
    },
    /// It is left alone.
    Ejected {
        /// The last failure of the row.
        cause: Cause,
        /// Length of the row.
        failures: u32,
        /// Until a trial is due.
        left: Duration,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("ready"),
            Self::CoolingOff { left } => {
                write!(f, "cooling off for {:.1} s after 429 or 503", left.as_secs_f64())
            }
            Self::OnTrial { cause } => write!(f, "on trial after: {cause}"),
            Self::Ejected { cause, failures, left } => {
                let left = left.as_secs_f64();
                write!(f, "ejected for {left:.1} s after {failures} in a row, the last: {cause}")
            }
        }
    }
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
        if let Admission::Trial { .. } = self.admission(now) {
            let at = self.mark();
            let lost_at = after(now, self.options.trial_timeout);
            if let State::Open { trial, .. } = &mut self.state {
                *trial = Some(Trial { at, lost_at });
            }
        }
        Ticket { at: self.events }
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

/// Which replicas of a pool may serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eligible {
    /// Those that are ready or due for a trial.
    Sound,
    /// These, and those ejected for their answers: too many look bad for it to be their fault.
    Doubtful,
    /// Those that are cooling off, for want of others.
    Cooling,
    /// All, for want of anybody better.
    Anyone,
}

impl Eligible {
    /// Whether a replica of this admission may serve.
    pub fn admits(self, admission: Admission) -> bool {
        match (self, admission) {
            (Self::Anyone, _) => true,
            (Self::Cooling, admission) => matches!(admission, Admission::CoolingOff { .. }),
            (_, Admission::Ready | Admission::Trial { .. }) => true,
            (Self::Doubtful, Admission::Ejected { cause, .. }) => cause != Cause::ConnectFailed,
            (Self::Sound | Self::Doubtful, _) => false,
        }
    }
}

/// Which of a pool may serve, from what the breaker says of each that the probes think well of.
///
/// When more than `ejected_share_max` of them look bad by their answers, ejection for answers is
/// ignored: a fleet does not fall ill together, but bad requests reach all of it. Failed connects
/// are no matter of opinion; such a replica is tried before its time only when nobody is left.
pub fn eligible(
    admissions: impl IntoIterator<Item = Admission>,
    options: &BreakerOptions,
) -> Eligible {
    let (mut all, mut sound, mut cooling, mut doubtful, mut unsure) = (0_u32, 0_u32, 0_u32, 0, 0);
    for admission in admissions {
        all += 1;
        match admission {
            Admission::Ready => sound += 1,
            Admission::CoolingOff { .. } => cooling += 1,
            Admission::Trial { cause } => {
                sound += 1;
                unsure += u32::from(cause != Cause::ConnectFailed);
            }
            Admission::Ejected { cause, .. } => doubtful += u32::from(cause != Cause::ConnectFailed),
        }
    }
    let looks_bad = f64::from(doubtful + unsure);
    if 0 < doubtful && options.ejected_share_max * f64::from(all) < looks_bad {
        Eligible::Doubtful
    } else if 0 < sound {
        Eligible::Sound
    } else if 0 < cooling {
        Eligible::Cooling
    } else {
        Eligible::Anyone
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

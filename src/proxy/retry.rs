//! Whether a failed attempt may be followed by another one. Pure: the shell tells the facts, does
//! what is decided, and passes the time.
//!
//! A model's work must not be done twice, so the question is never *may it help* but *can the first
//! one still be running*. It cannot when the request never reached the engine whole, when the
//! engine said that it refuses, and when the engine is gone. All else ends here.
//!
//! To add a condition: a variant of [`Condition`], its arm in `condition_of`, and its tests.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Most attempts that the options may allow.
const ATTEMPTS_LIMIT: u32 = 10;
/// Largest burst and rate that the options may allow.
const BUDGET_LIMIT: f64 = 1_000_000.0;

/// When a request is tried again at another replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RetryOptions {
    /// Attempts for one request, the first one counted; 1 for no retry. Default 3.
    pub attempts_max: u32,
    /// What is followed by another attempt: `connect_failure`, `reused_reset`, `replica_gone`,
    /// `unavailable`, `too_many_requests`, `reset`. Default all but `reset`, which may do the
    /// engine's work twice.
    pub on: Vec<Condition>,
    /// A connection that was kept from an earlier request and is lost within this time had been
    /// closed before the engine read the request; lost later, it had been read. To be a little
    /// longer than the way to the replica and back. Default `100ms`.
    #[serde(with = "humantime_serde")]
    pub reused_reset_within: Duration,
    /// What all requests together may spend on retries.
    pub budget: BudgetOptions,
}

impl Default for RetryOptions {
    fn default() -> Self {
        Self {
            attempts_max: 3,
            on: vec![
                Condition::ConnectFailure,
                Condition::ReusedReset,
                Condition::ReplicaGone,
                Condition::Unavailable,
                Condition::TooManyRequests,
            ],
            reused_reset_within: Duration::from_millis(100),
            budget: BudgetOptions::default(),
        }
    }
}

impl RetryOptions {
    /// What is wrong, as pairs of a path within this section and a message; empty when fine.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        if !(1..=ATTEMPTS_LIMIT).contains(&self.attempts_max) {
            let advice = format!("{} is not within 1 to {ATTEMPTS_LIMIT}", self.attempts_max);
            faults.push(("attempts_max".to_owned(), advice));
        }
        let budget = &self.budget;
        for (path, value) in [
            ("budget.ratio", budget.ratio),
            ("budget.min_per_second", budget.min_per_second),
            ("budget.burst", budget.burst),
        ] {
            if !(0.0..=BUDGET_LIMIT).contains(&value) {
                let advice = format!("{value} is not within 0 to {BUDGET_LIMIT}");
                faults.push((path.to_owned(), advice));
            }
        }
        if budget.burst < 1.0 && 1 < self.attempts_max {
            let advice = "is below 1, so no retry is ever made; set attempts_max to 1 for that";
            faults.push(("budget.burst".to_owned(), advice.to_owned()));
        }
        faults
    }
}

/// What all requests together may spend on retries, so that a fleet in trouble is not given more
/// work than it had.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BudgetOptions {
    /// Retries earned by each request. Default 0.2.
    pub ratio: f64,
    /// Retries earned by each second, for fleets with little traffic. Default 10.
    pub min_per_second: f64,
    /// The most that is saved up, and what there is at the start. Default 100.
    pub burst: f64,
}

impl Default for BudgetOptions {
    fn default() -> Self {
        Self { ratio: 0.2, min_per_second: 10.0, burst: 100.0 }
    }
}

/// What may be followed by another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// No connection was made, or it was lost before the request was sent whole.
    ConnectFailure,
    /// A kept connection turned out to be closed.
    ReusedReset,
    /// The connection was lost, and nobody listens at the replica any more.
    ReplicaGone,
    /// The answer was 503.
    Unavailable,
    /// The answer was 429.
    TooManyRequests,
    /// The connection was lost before an answer; the engine may still be at work.
    Reset,
}

/// Whether a connection had served before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connection {
    /// It was made for this attempt.
    Fresh,
    /// It was kept from an earlier request.
    Reused,
}

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// No connection was made, in time or at all.
    Connect,
    /// The connection was lost before the request was sent whole.
    Unsent,
    /// The connection was lost after the request was sent whole, before a byte of an answer.
    Reset {
        /// What connection it was.
        connection: Connection,
        /// How long after the request was sent.
        after: Duration,
    },
    /// The head of an answer came, and nothing of it was passed on yet.
    Answered {
        /// Its status.
        status: u16,
    },
    /// No answer came in time.
    TimedOut,
    /// The answer began and was cut off, or made no sense.
    MidBody,
}

/// Where the request stands after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// Attempts made, the failed one counted.
    pub attempts: u32,
    /// Replicas that could serve and were not tried for this request.
    pub untried: usize,
    /// Whether a byte of an answer was passed to the client.
    pub committed: bool,
    /// Whether the whole request is still at hand.
    pub replayable: bool,
}

/// What to do after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Try another replica.
    Again,
    /// Try another replica if nobody listens at this one any more; else give up with 502.
    AgainIfGone,
    /// Let the failure, or the answer there is, reach the client.
    GiveUp(Reason),
}

/// Why there is no other attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The client has part of an answer.
    Committed,
    /// The engine may be at work, or its answer is an answer.
    NotSafe,
    /// The options do not list the condition.
    NotListed,
    /// The request is not at hand any more.
    NotReplayable,
    /// All attempts were made.
    AttemptsSpent,
    /// No replica is left that was not tried.
    NobodyLeft,
    /// All requests together have spent their retries.
    BudgetSpent,
    /// The replica is there, so the engine may be at work.
    StillThere,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Committed => "an answer was begun",
            Self::NotSafe => "the engine may have done the work",
            Self::NotListed => "not among the conditions for a retry",
            Self::NotReplayable => "the request is not at hand any more",
            Self::AttemptsSpent => "all attempts were made",
            Self::NobodyLeft => "no replica is left that was not tried",
            Self::BudgetSpent => "the retry budget is spent",
            Self::StillThere => "the replica is there and may be at work",
        })
    }
}

/// Whether the request is tried again. To be passed through [`Budget::spend`] before it is done.
pub(super) fn decide(failure: Failure, facts: &Facts, options: &RetryOptions) -> Decision {
    if facts.committed {
        return Decision::GiveUp(Reason::Committed);
    }
    let Some(decision) = once_safe(failure, options) else {
        return Decision::GiveUp(Reason::NotSafe);
    };
    if matches!(decision, Decision::GiveUp(_)) {
        return decision;
    }
    if !facts.replayable {
        Decision::GiveUp(Reason::NotReplayable)
    } else if options.attempts_max <= facts.attempts {
        Decision::GiveUp(Reason::AttemptsSpent)
    } else if facts.untried == 0 {
        Decision::GiveUp(Reason::NobodyLeft)
    } else {
        decision
    }
}

/// What the failure alone would allow; `None` when no option can make it safe.
fn once_safe(failure: Failure, options: &RetryOptions) -> Option<Decision> {
    let listed = |condition| options.on.contains(&condition);
    let again_on = |condition| {
        Some(if listed(condition) { Decision::Again } else { Decision::GiveUp(Reason::NotListed) })
    };
    match failure {
        Failure::Connect | Failure::Unsent => again_on(Condition::ConnectFailure),
        Failure::Answered { status: 503 } => again_on(Condition::Unavailable),
        Failure::Answered { status: 429 } => again_on(Condition::TooManyRequests),
        Failure::Reset { .. } if listed(Condition::Reset) => Some(Decision::Again),
        Failure::Reset { connection: Connection::Reused, after }
            if after < options.reused_reset_within && listed(Condition::ReusedReset) =>
        {
            Some(Decision::Again)
        }
        Failure::Reset { .. } if listed(Condition::ReplicaGone) => Some(Decision::AgainIfGone),
        Failure::Reset { .. } => Some(Decision::GiveUp(Reason::NotListed)),
        Failure::Answered { .. } | Failure::TimedOut | Failure::MidBody => None,
    }
}

/// What all requests together may still spend on retries.
///
/// Requests only count themselves, without a lock; what they and the time have earned is added up
/// when somebody wants a retry, which is rare.
#[derive(Debug)]
pub struct Budget {
    options: BudgetOptions,
    /// Requests that came since the balance was struck.
    requests: AtomicU64,
    balance: Mutex<Balance>,
}

#[derive(Debug)]
struct Balance {
    retries: f64,
    struck: Instant,
}

impl Budget {
    /// A full one.
    pub fn new(options: BudgetOptions, now: Instant) -> Self {
        let balance = Mutex::new(Balance { retries: options.burst, struck: now });
        Self { options, requests: AtomicU64::new(0), balance }
    }

    /// A request came; to be told once for each, not for each attempt.
    pub fn earn(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Pays for a retry that was decided on; the decision as it stands after that. A retry that
    /// turns out to be impossible stays paid for: the trouble is the same.
    pub fn spend(&self, decision: Decision, now: Instant) -> Decision {
        match decision {
            Decision::GiveUp(_) => decision,
            Decision::Again | Decision::AgainIfGone if self.withdraw(now) => decision,
            Decision::Again | Decision::AgainIfGone => Decision::GiveUp(Reason::BudgetSpent),
        }
    }

    /// Retries that could be made at once, for the metrics.
    pub fn left(&self, now: Instant) -> f64 {
        self.strike(&mut self.balance.lock(), now)
    }

    fn withdraw(&self, now: Instant) -> bool {
        let mut balance = self.balance.lock();
        let left = self.strike(&mut balance, now);
        if left < 1.0 {
            return false;
        }
        balance.retries = left - 1.0;
        true
    }

    fn strike(&self, balance: &mut Balance, now: Instant) -> f64 {
        let requests = self.requests.swap(0, Ordering::Relaxed) as f64;
        let seconds = now.saturating_duration_since(balance.struck).as_secs_f64();
        let earned = requests * self.options.ratio + seconds * self.options.min_per_second;
        balance.retries = (balance.retries + earned).min(self.options.burst);
        balance.struck = balance.struck.max(now);
        balance.retries
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock;

    const SAFE: Facts = Facts { attempts: 1, untried: 2, committed: false, replayable: true };

    fn reset(connection: Connection, after: Duration) -> Failure {
        Failure::Reset { connection, after }
    }

    fn by_default(failure: Failure) -> Decision {
        decide(failure, &SAFE, &RetryOptions::default())
    }

    fn any_failure() -> impl Strategy<Value = Failure> {
        let connection = prop::sample::select(vec![Connection::Fresh, Connection::Reused]);
        prop_oneof![
            Just(Failure::Connect),
            Just(Failure::Unsent),
            Just(Failure::TimedOut),
            Just(Failure::MidBody),
            prop::sample::select(vec![400, 404, 429, 500, 502, 503, 504, 529])
                .prop_map(|status| Failure::Answered { status }),
            (connection, 0_u64..5_000).prop_map(|(connection, after)| Failure::Reset {
                connection,
                after: Duration::from_millis(after),
            }),
        ]
    }

    fn any_options() -> impl Strategy<Value = RetryOptions> {
        let all: Vec<_> =
            RetryOptions::default().on.into_iter().chain([Condition::Reset]).collect();
        let on = prop::sample::subsequence(all, 0..=6);
        (on, 1_u32..5).prop_map(|(on, attempts_max)| RetryOptions {
            on,
            attempts_max,
            ..RetryOptions::default()
        })
    }

    #[test]
    fn what_never_reached_the_engine_and_what_it_refused_is_tried_again() {
        for failure in [
            Failure::Connect,
            Failure::Unsent,
            Failure::Answered { status: 503 },
            Failure::Answered { status: 429 },
            reset(Connection::Reused, Duration::from_millis(2)),
        ] {
            assert_eq!(by_default(failure), Decision::Again, "{failure:?}");
        }
    }

    #[test]
    fn what_the_engine_may_be_working_on_is_not_sent_twice() {
        for failure in [
            Failure::TimedOut,
            Failure::MidBody,
            Failure::Answered { status: 500 },
            Failure::Answered { status: 502 },
            Failure::Answered { status: 504 },
        ] {
            assert_eq!(by_default(failure), Decision::GiveUp(Reason::NotSafe), "{failure:?}");
        }
    }

    #[test]
    fn a_reset_after_dispatch_is_tried_again_only_if_the_replica_is_gone() {
        let worked = Duration::from_secs(3);
        assert_eq!(by_default(reset(Connection::Fresh, worked)), Decision::AgainIfGone);
        assert_eq!(by_default(reset(Connection::Fresh, Duration::ZERO)), Decision::AgainIfGone);
        let late = by_default(reset(Connection::Reused, worked));
        assert_eq!(late, Decision::AgainIfGone, "a kept connection that was read is no excuse");
    }

    #[test]
    fn an_operator_may_ask_for_a_retry_of_any_reset_or_for_none() {
        let failure = reset(Connection::Fresh, Duration::from_secs(3));
        let any = RetryOptions { on: vec![Condition::Reset], ..RetryOptions::default() };
        assert_eq!(decide(failure, &SAFE, &any), Decision::Again);
        let none = RetryOptions { on: vec![], ..RetryOptions::default() };
        assert_eq!(decide(failure, &SAFE, &none), Decision::GiveUp(Reason::NotListed));
        let busy = Failure::Answered { status: 503 };
        assert_eq!(decide(busy, &SAFE, &none), Decision::GiveUp(Reason::NotListed));
    }

    #[test]
    fn the_facts_end_it_each_with_its_reason() {
        for (facts, reason) in [
            (Facts { committed: true, ..SAFE }, Reason::Committed),
            (Facts { replayable: false, ..SAFE }, Reason::NotReplayable),
            (Facts { attempts: 3, ..SAFE }, Reason::AttemptsSpent),
            (Facts { untried: 0, ..SAFE }, Reason::NobodyLeft),
        ] {
            let decision = decide(Failure::Connect, &facts, &RetryOptions::default());
            assert_eq!(decision, Decision::GiveUp(reason));
        }
    }

    #[test]
    fn a_spent_budget_turns_a_retry_down() {
        let now = clock::now();
        let options = BudgetOptions { ratio: 0.5, min_per_second: 0.0, burst: 2.0 };
        let budget = Budget::new(options, now);
        let spend = |decision| budget.spend(decision, now);
        assert_eq!(spend(Decision::Again), Decision::Again);
        assert_eq!(spend(Decision::AgainIfGone), Decision::AgainIfGone);
        assert_eq!(spend(Decision::Again), Decision::GiveUp(Reason::BudgetSpent));
        budget.earn();
        budget.earn();
        assert_eq!(spend(Decision::Again), Decision::Again, "two requests earned one");
        let given_up = Decision::GiveUp(Reason::NotSafe);
        assert_eq!(spend(given_up), given_up);
    }

    #[test]
    fn the_options_are_read_checked_and_written_as_documented() {
        assert_eq!(RetryOptions::default().faults(), []);
        let text = "{attempts_max: 0, on: [reset, unavailable], budget: {ratio: -1, burst: .nan}}";
        let options = serde_yaml::from_str::<RetryOptions>(text).unwrap();
        assert_eq!(options.on, [Condition::Reset, Condition::Unavailable]);
        let paths: Vec<_> = options.faults().into_iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["attempts_max", "budget.ratio", "budget.burst"]);
        assert!(serde_yaml::from_str::<RetryOptions>("{on: [timeout]}").is_err());
    }

    proptest! {
        #[test]
        fn no_options_and_no_facts_make_an_unsafe_retry(
            failure in any_failure(),
            options in any_options(),
            attempts in 1_u32..6,
            untried in 0_usize..3,
            committed: bool,
            replayable: bool,
        ) {
            let facts = Facts { attempts, untried, committed, replayable };
            let decision = decide(failure, &facts, &options);
            if matches!(decision, Decision::GiveUp(_)) {
                return Ok(());
            }
            prop_assert!(!committed && replayable && 0 < untried);
            prop_assert!(attempts < options.attempts_max);
            let is_safe = match failure {
                Failure::Connect | Failure::Unsent => true,
                Failure::Answered { status } => status == 429 || status == 503,
                Failure::Reset { connection, after } => {
                    decision == Decision::AgainIfGone
                        || options.on.contains(&Condition::Reset)
                        || (connection == Connection::Reused && after < options.reused_reset_within)
                }
                Failure::TimedOut | Failure::MidBody => false,
            };
            prop_assert!(is_safe, "{:?} after {:?}", decision, failure);
        }

        #[test]
        fn retries_never_pass_burst_and_rate_and_ratio(
            steps in prop::collection::vec((0_u64..500, 0_u64..20, 0_u32..20), 1..60),
            ratio in 0.0_f64..1.0,
            min_per_second in 0.0_f64..20.0,
            burst in 0.0_f64..30.0,
        ) {
            let start = clock::now();
            let options = BudgetOptions { ratio, min_per_second, burst };
            let budget = Budget::new(options, start);
            let (mut passed, mut requests, mut retries) = (Duration::ZERO, 0, 0);
            for (milliseconds, came, wanted) in steps {
                passed += Duration::from_millis(milliseconds);
                requests += came;
                (0..came).for_each(|_| budget.earn());
                for _ in 0..wanted {
                    let decision = budget.spend(Decision::Again, start + passed);
                    retries += u32::from(decision == Decision::Again);
                }
                let earned = min_per_second * passed.as_secs_f64() + ratio * requests as f64;
                prop_assert!(f64::from(retries) <= burst + earned + 1e-6);
                prop_assert!(budget.left(start + passed) <= burst);
            }
        }
    }
}

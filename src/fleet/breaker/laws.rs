//! The laws of the breaker, tried with an invented clock. Tests only.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::clock;

const ALL: [Outcome; 9] = [
    Outcome::Answered,
    Outcome::Backpressure { retry_after: None },
    Outcome::Backpressure { retry_after: Some(Duration::from_secs(7)) },
    Outcome::ServerError,
    Outcome::ConnectFailed,
    Outcome::Reset,
    Outcome::TimedOut,
    Outcome::BrokenStream,
    Outcome::ClientLeft,
];
const FAILURES: [Outcome; 4] =
    [Outcome::ConnectFailed, Outcome::Reset, Outcome::TimedOut, Outcome::BrokenStream];

/// A breaker and an invented clock.
struct Bench {
    breaker: Breaker,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        Self { breaker: Breaker::new(BreakerOptions::default()), now: clock::now() }
    }

    fn wait(&mut self, time: Duration) {
        self.now += time;
    }

    fn admission(&self) -> Admission {
        self.breaker.admission(self.now)
    }

    fn enter(&mut self) -> Ticket {
        self.breaker.enter(self.now)
    }

    fn end(&mut self, ticket: Ticket, outcome: Outcome) -> Option<Change> {
        self.breaker.record(ticket, outcome, self.now, 0)
    }

    /// One attempt, begun and ended now.
    fn attempt(&mut self, outcome: Outcome) -> Option<Change> {
        let ticket = self.enter();
        self.end(ticket, outcome)
    }

    fn attempts(&mut self, count: usize, outcome: Outcome) -> Option<Change> {
        (0..count).filter_map(|_| self.attempt(outcome)).last()
    }

    /// How long it is still ejected.
    fn ejected_for(&self) -> Duration {
        match self.admission() {
            Admission::Ejected { until, .. } => until - self.now,
            other => panic!("not ejected but {other:?}"),
        }
    }

    fn is_on_trial(&self) -> bool {
        matches!(self.admission(), Admission::Trial { .. })
    }
}

#[test]
fn a_success_between_them_keeps_failures_from_adding_up() {
    let mut bench = Bench::new();
    for _ in 0..20 {
        bench.attempts(2, Outcome::Reset);
        bench.attempt(Outcome::Answered);
    }
    assert_eq!(bench.admission(), Admission::Ready);
}

#[test]
fn twelve_bad_requests_spread_over_four_replicas_eject_nobody() {
    let mut benches = [(); 4].map(|()| Bench::new());
    for number in 0..12 {
        assert_eq!(benches[number % 4].attempt(Outcome::ServerError), None);
    }
    assert!(benches.iter().all(|bench| bench.admission() == Admission::Ready));
}

#[test]
fn server_errors_have_a_row_of_their_own_and_a_higher_limit() {
    let mut bench = Bench::new();
    assert_eq!(bench.attempts(9, Outcome::ServerError), None);
    let change = bench.attempt(Outcome::ServerError);
    let expected = Change::Opened { cause: Cause::ServerErrors, failures: 10, open_for: secs(1) };
    assert_eq!(change, Some(expected));
}

#[test]
fn one_trial_at_a_time_closes_or_reopens_for_longer() {
    let mut bench = Bench::new();
    bench.attempts(3, Outcome::ConnectFailed);
    for (trial, open_for) in [1, 2, 4, 8, 16, 30, 30].into_iter().enumerate() {
        assert_eq!(bench.ejected_for(), secs(open_for), "before trial {trial}");
        bench.wait(secs(open_for));
        assert!(bench.is_on_trial());
        let ticket = bench.enter();
        assert!(matches!(bench.admission(), Admission::Ejected { .. }), "one at a time");
        assert_eq!(bench.end(ticket, Outcome::ConnectFailed), None, "a repeat is no news");
    }
    bench.wait(secs(30));
    assert_eq!(bench.attempt(Outcome::Answered), Some(Change::Closed));
    assert_eq!(bench.admission(), Admission::Ready);
    bench.attempts(3, Outcome::ConnectFailed);
    assert_eq!(bench.ejected_for(), secs(30), "one good answer does not wipe out the past");
}

#[test]
fn a_trial_that_vanishes_or_whose_client_leaves_wedges_nothing() {
    let mut bench = Bench::new();
    bench.attempts(3, Outcome::Reset);
    bench.wait(secs(1));
    let vanished = bench.enter();
    bench.wait(secs(5));
    assert!(bench.is_on_trial(), "lost, so another may try");
    let second = bench.enter();
    bench.end(vanished, Outcome::Reset);
    assert!(!bench.is_on_trial(), "the late end of a lost trial decides nothing");
    assert_eq!(bench.end(second, Outcome::ClientLeft), None);
    assert!(bench.is_on_trial(), "given back");
    assert_eq!(bench.attempt(Outcome::Answered), Some(Change::Closed));
}

#[test]
fn a_trial_succeeds_with_the_head_of_its_answer() {
    let mut bench = Bench::new();
    bench.attempts(3, Outcome::TimedOut);
    bench.wait(secs(1));
    let mut ticket = bench.enter();
    assert_eq!(bench.breaker.answering(&mut ticket, bench.now), Some(Change::Closed));
    assert_eq!(bench.admission(), Admission::Ready, "long before the stream ends");
    assert_eq!(bench.end(ticket, Outcome::BrokenStream), None);
    bench.attempt(Outcome::BrokenStream);
    assert!(bench.attempt(Outcome::BrokenStream).is_some(), "and its break counted");
}

#[test]
fn an_engine_that_begins_every_answer_and_ends_none_is_ejected() {
    let mut bench = Bench::new();
    for number in 1..=3 {
        let mut ticket = bench.enter();
        bench.breaker.answering(&mut ticket, bench.now);
        assert_eq!(bench.end(ticket, Outcome::BrokenStream).is_some(), number == 3);
    }
}

#[test]
fn what_began_before_the_ejection_neither_lengthens_nor_ends_it() {
    let mut bench = Bench::new();
    let old: Vec<_> = (0..50).map(|_| bench.enter()).collect();
    bench.attempts(3, Outcome::Reset);
    let left = bench.ejected_for();
    let mut changes = 0;
    for (number, mut ticket) in old.into_iter().enumerate() {
        changes += usize::from(bench.breaker.answering(&mut ticket, bench.now).is_some());
        let outcome = ALL[number % ALL.len()];
        if !matches!(outcome, Outcome::Backpressure { .. }) {
            changes += usize::from(bench.end(ticket, outcome).is_some());
        }
    }
    assert_eq!((changes, bench.ejected_for()), (0, left));
}

#[test]
fn failures_from_before_the_closing_do_not_open_it_again() {
    let mut bench = Bench::new();
    bench.attempts(3, Outcome::Reset);
    let sent_for_want_of_others: Vec<_> = (0..20).map(|_| bench.enter()).collect();
    bench.wait(secs(1));
    assert_eq!(bench.attempt(Outcome::Answered), Some(Change::Closed));
    for ticket in sent_for_want_of_others {
        assert_eq!(bench.end(ticket, Outcome::Reset), None);
    }
    assert_eq!(bench.admission(), Admission::Ready);
}

#[test]
fn an_engine_that_stops_is_ejected_although_it_finishes_its_old_streams() {
    let mut bench = Bench::new();
    let old: Vec<_> = (0..3).map(|_| bench.enter()).collect();
    let mut opened = None;
    for ticket in old {
        opened = opened.or(bench.attempt(Outcome::ConnectFailed));
        bench.end(ticket, Outcome::Answered);
    }
    assert!(matches!(opened, Some(Change::Opened { cause: Cause::ConnectFailed, .. })));
}

#[test]
fn while_all_look_bad_a_success_closes_and_failures_do_not_lengthen() {
    let mut bench = Bench::new();
    bench.attempts(10, Outcome::ServerError);
    let left = bench.ejected_for();
    bench.attempts(30, Outcome::ServerError);
    assert_eq!(bench.ejected_for(), left);
    assert_eq!(bench.attempt(Outcome::Answered), Some(Change::Closed));
}

#[test]
fn a_refusal_is_no_failure_but_the_replica_is_avoided_for_a_while() {
    let mut bench = Bench::new();
    for (number, pause) in [1, 2, 4, 8, 16, 30, 30].into_iter().enumerate() {
        assert_eq!(bench.attempt(Outcome::Backpressure { retry_after: None }), None);
        let until = bench.now + secs(pause);
        assert_eq!(bench.admission(), Admission::CoolingOff { until }, "refusal {number}");
        bench.wait(secs(pause));
        assert_eq!(bench.admission(), Admission::Ready);
    }
    bench.attempt(Outcome::Answered);
    bench.attempt(Outcome::Backpressure { retry_after: None });
    let until = bench.now + secs(1);
    assert_eq!(bench.admission(), Admission::CoolingOff { until }, "it took work in between");
}

#[test]
fn retry_after_is_heeded_up_to_the_limit() {
    for (asked, pause) in [(7, 7), (86_400, 30), (0, 1)] {
        let mut bench = Bench::new();
        bench.attempt(Outcome::Backpressure { retry_after: Some(secs(asked)) });
        let until = bench.now + secs(pause);
        assert_eq!(bench.admission(), Admission::CoolingOff { until });
    }
}

#[test]
fn a_burst_that_is_refused_together_is_one_refusal() {
    let mut bench = Bench::new();
    let burst: Vec<_> = (0..20).map(|_| bench.enter()).collect();
    let earlier = bench.enter();
    for ticket in burst {
        bench.end(ticket, Outcome::Backpressure { retry_after: None });
    }
    bench.end(earlier, Outcome::Answered);
    let until = bench.now + secs(1);
    assert_eq!(bench.admission(), Admission::CoolingOff { until });
    assert_eq!(bench.attempt(Outcome::Answered), None);
    assert_eq!(bench.admission(), Admission::Ready, "it takes work again");
    assert!(bench.breaker.is_calm());
}

#[test]
fn a_probe_that_connects_brings_the_trial_forward_only_where_connects_had_failed() {
    for (outcome, count, is_on_trial) in [
        (Outcome::ConnectFailed, 3, true),
        (Outcome::Reset, 3, false),
        (Outcome::ServerError, 10, false),
    ] {
        let mut bench = Bench::new();
        bench.attempts(count, outcome);
        bench.breaker.reached(bench.now);
        assert_eq!(bench.is_on_trial(), is_on_trial);
    }
}

#[test]
fn a_reset_breaker_is_cold_and_heeds_nothing_from_before() {
    let mut bench = Bench::new();
    let old: Vec<_> = (0..9).map(|_| bench.enter()).collect();
    bench.attempts(3, Outcome::Reset);
    bench.breaker.reset();
    assert_eq!(bench.admission(), Admission::Ready);
    for ticket in old {
        assert_eq!(bench.end(ticket, Outcome::Reset), None);
    }
    assert_eq!(bench.admission(), Admission::Ready);
}

#[test]
fn the_reason_is_told_to_a_person() {
    let mut bench = Bench::new();
    let tell = |bench: &Bench| bench.breaker.reason(bench.now).to_string();
    assert_eq!(tell(&bench), "ready");
    bench.attempt(Outcome::Backpressure { retry_after: Some(secs(3)) });
    assert_eq!(tell(&bench), "cooling off for 3.0 s after 429 or 503");
    bench.attempts(3, Outcome::ConnectFailed);
    assert_eq!(tell(&bench), "ejected for 1.0 s after 3 in a row, the last: connect failed");
    bench.wait(secs(1));
    assert_eq!(tell(&bench), "on trial after: connect failed");
}

#[test]
fn the_defaults_have_no_fault_and_each_bad_value_is_named() {
    assert_eq!(BreakerOptions::default().faults(), []);
    let text = "{open_for: 2m, cool_off: 0s, ejected_share_max: 1.5}";
    let faults = serde_yaml::from_str::<BreakerOptions>(text).unwrap().faults();
    let paths: Vec<_> = faults.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["cool_off", "open_for", "ejected_share_max"]);
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A step of a made-up history.
#[derive(Clone, Debug)]
enum Step {
    Enter,
    End(prop::sample::Index, Outcome),
    Wait(u64),
    Probe,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Enter),
        4 => (any::<prop::sample::Index>(), prop::sample::select(&ALL[..]))
            .prop_map(|(index, outcome)| Step::End(index, outcome)),
        2 => (0_u64..4_000).prop_map(Step::Wait),
        1 => Just(Step::Probe),
    ]
}

proptest! {
    #[test]
    fn it_opens_after_the_stated_number_of_failures_and_not_before(
        outcomes in prop::collection::vec(prop::sample::select(&FAILURES[..]), 3),
        dice: u64,
    ) {
        let mut bench = Bench::new();
        for (number, outcome) in outcomes.into_iter().enumerate() {
            prop_assert_eq!(bench.admission(), Admission::Ready);
            let ticket = bench.enter();
            let change = bench.breaker.record(ticket, outcome, bench.now, dice);
            prop_assert_eq!(change.is_some(), number == 2);
        }
        let open_for = bench.ejected_for();
        prop_assert!(Duration::from_millis(800) <= open_for && open_for <= secs(1));
    }

    #[test]
    fn whatever_happens_there_is_one_trial_at_a_time_and_in_the_end_it_is_cold(
        steps in prop::collection::vec(any_step(), 0..200),
    ) {
        let mut bench = Bench::new();
        let mut running = Vec::new();
        let mut trial_began: Option<Instant> = None;
        for step in steps {
            match step {
                Step::Enter => {
                    if bench.is_on_trial() {
                        let is_lost = |began| bench.now - began >= secs(5);
                        prop_assert!(trial_began.is_none_or(is_lost), "two trials");
                        trial_began = Some(bench.now);
                        running.push((bench.enter(), true));
                    } else {
                        running.push((bench.enter(), false));
                    }
                }
                Step::End(index, outcome) if !running.is_empty() => {
                    let (ticket, was_trial) = running.swap_remove(index.index(running.len()));
                    let change = bench.end(ticket, outcome);
                    if was_trial || change == Some(Change::Closed) {
                        trial_began = None;
                    }
                }
                Step::End(..) => {}
                Step::Wait(milliseconds) => bench.wait(Duration::from_millis(milliseconds)),
                Step::Probe => bench.breaker.reached(bench.now),
            }
            if bench.breaker.is_calm() {
                prop_assert_eq!(bench.admission(), Admission::Ready);
            }
            if let Admission::Ejected { until, .. } | Admission::CoolingOff { until } =
                bench.admission()
            {
                prop_assert!(until - bench.now <= secs(30));
            }
        }
        // Idle long enough: the longest ejection and the memory after it.
        bench.wait(secs(90));
        prop_assert_eq!(bench.admission(), Admission::Ready);
        prop_assert_eq!(bench.attempts(2, Outcome::Reset), None);
        let change = bench.attempt(Outcome::Reset);
        let expected = Change::Opened { cause: Cause::Reset, failures: 3, open_for: secs(1) };
        prop_assert_eq!(change, Some(expected), "an idle replica starts cold");
    }
}

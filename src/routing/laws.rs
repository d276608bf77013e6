//! The laws of routing, tried through the room's public face with an invented pool: a lease is
//! taken in the same step as the choice, as the fleet does it. Tests only.

use std::collections::HashMap;
use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::clock;

/// A made-up pool of replicas with its ledger.
struct Pool {
    ids: Vec<ReplicaId>,
    weights: Vec<f32>,
    in_flight: Vec<u32>,
    rotation: u64,
    now: Instant,
}

impl Pool {
    fn new(weights: &[f32]) -> Self {
        Self {
            ids: (0..weights.len())
                .map(|index| ReplicaId::new(format!("replica-{index}")))
                .collect(),
            weights: weights.to_vec(),
            in_flight: vec![0; weights.len()],
            rotation: 0,
            now: clock::now(),
        }
    }

    fn candidates(&self) -> Vec<Candidate<'_>> {
        let facts = self.ids.iter().zip(&self.weights).zip(&self.in_flight);
        facts
            .map(|((id, weight), in_flight)| Candidate {
                id,
                id_hash: stable_hash(id.as_str().as_bytes()),
                weight: *weight,
                in_flight: *in_flight,
                waiting: None,
            })
            .collect()
    }

    fn question<'a>(&self, key: Option<&'a str>) -> Question<'a> {
        Question {
            session_key: key.map(str::as_bytes),
            tokens_estimated: Tokens(0),
            dice: mix(self.rotation.wrapping_mul(31) + 7),
            rotation: self.rotation,
            now: self.now,
        }
    }

    fn choose(&mut self, policy: &dyn Policy, key: Option<&str>) -> usize {
        let choice = choose(policy, &self.question(key), &self.candidates()).unwrap();
        self.rotation += 1;
        choice.index
    }

    fn burst(&mut self, count: usize, policy: &dyn Policy, key: Option<&str>) {
        for _ in 0..count {
            self.start(policy, key);
        }
    }

    fn start(&mut self, policy: &dyn Policy, key: Option<&str>) -> usize {
        let index = self.choose(policy, key);
        self.in_flight[index] += 1;
        index
    }

    fn mean(&self) -> f64 {
        f64::from(self.in_flight.iter().sum::<u32>()) / self.in_flight.len() as f64
    }
}

fn policy(name: &str) -> Box<dyn Policy> {
    build(&Options { policy: name.to_owned(), ..Options::default() }).unwrap()
}

/// Says of each candidate what the test wrote down for it.
#[derive(Debug)]
struct Scripted(Vec<f64>);

impl Policy for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn cost(&self, _: &Question<'_>, _: &[Candidate<'_>], costs: &mut [f64]) {
        costs.copy_from_slice(&self.0);
    }
}

fn any_cost() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => (-3_i32..4).prop_map(f64::from),
        1 => Just(f64::INFINITY),
        1 => Just(f64::NEG_INFINITY),
        1 => Just(f64::NAN),
    ]
}

fn any_weight() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => 0.1_f32..4.0,
        1 => Just(0.0),
        1 => Just(-1.0),
        1 => Just(f32::NAN),
        1 => Just(f32::INFINITY),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_choice_is_a_candidate_of_least_cost_and_never_an_unfit_one(
        costs in prop::collection::vec(any_cost(), 0..9),
        rotation: u64,
    ) {
        let mut pool = Pool::new(&vec![1.0; costs.len()]);
        pool.rotation = rotation;
        let least = costs.iter().copied().filter(|cost| cost.is_finite()).reduce(f64::min);
        let choice = choose(&Scripted(costs.clone()), &pool.question(None), &pool.candidates());
        prop_assert_eq!(choice.map(|choice| choice.cost), least);
        if let Some(choice) = choice {
            prop_assert_eq!(costs[choice.index], choice.cost);
        }
    }

    #[test]
    fn every_policy_finds_a_fit_candidate_where_there_is_one_and_only_such(
        weights in prop::collection::vec(any_weight(), 0..150),
        loads in prop::collection::vec(0_u32..500, 150),
        rotation: u64,
        key in prop::option::of("[a-c]{0,3}"),
    ) {
        let mut pool = Pool::new(&weights);
        pool.in_flight.copy_from_slice(&loads[..weights.len()]);
        pool.rotation = rotation;
        let candidates = pool.candidates();
        for row in POLICIES {
            let policy = policy(row.name);
            prop_assert_eq!(policy.name(), row.name);
            let choice = choose(&*policy, &pool.question(key.as_deref()), &candidates);
            prop_assert_eq!(choice.is_some(), candidates.iter().any(Candidate::is_fit));
            prop_assert!(choice.is_none_or(|choice| candidates[choice.index].is_fit()));
        }
    }

    #[test]
    fn a_burst_of_equal_requests_spreads_evenly_although_nobody_answered(rotation: u64) {
        for (name, apart) in [("least_load", 0), ("round_robin", 0), ("power_of_two", 6)] {
            let policy = policy(name);
            let mut pool = Pool::new(&[1.0; 4]);
            // The counter may start anywhere but does not overflow within the burst.
            pool.rotation = rotation >> 1;
            pool.burst(64, &*policy, None);
            let even = pool.in_flight.iter().all(|count| count.abs_diff(16) <= apart);
            prop_assert!(even, "{}: {:?}", name, pool.in_flight);
        }
    }

    #[test]
    fn losing_a_replica_moves_only_its_own_sessions(
        weights in prop::collection::vec(0.5_f32..3.0, 2..8),
        lost: prop::sample::Index,
        salt: u32,
    ) {
        let policy = policy("session");
        let pool = Pool::new(&weights);
        let candidates = pool.candidates();
        let lost = lost.index(candidates.len());
        let mut left = candidates.clone();
        left.remove(lost);
        for number in 0..50 {
            let key = format!("{salt}-{number}");
            let question = pool.question(Some(&key));
            let before = choose(&*policy, &question, &candidates).unwrap().index;
            let after = choose(&*policy, &question, &left).unwrap().index;
            prop_assert!(before == lost || left[after].id == candidates[before].id);
        }
    }
}

#[test]
fn an_unknown_policy_is_refused_with_the_names_there_are() {
    let options = Options { policy: "foo".to_owned(), ..Options::default() };
    let known = "round_robin, least_load, power_of_two, session";
    let text = build(&options).unwrap_err().to_string();
    assert_eq!(text, format!("no policy is called `foo`; known: {known}"));
}

#[test]
fn round_robin_gives_heavier_replicas_more_turns_evenly_spaced() {
    let policy = policy("round_robin");
    let mut pool = Pool::new(&[2.0, 1.0, 1.0]);
    let mut turns = [0_i32; 3];
    for round in 1..=4_000 {
        turns[pool.choose(&*policy, None)] += 1;
        let due = [round / 2, round / 4, round / 4];
        let near = turns.iter().zip(due).all(|(turn, due)| (turn - due).abs() <= 4);
        assert!(near, "after {round}: {turns:?}, due {due:?}");
    }
}

#[test]
fn least_load_heeds_weights_and_the_engines_own_queue() {
    let policy = policy("least_load");
    let mut pool = Pool::new(&[3.0, 1.0]);
    pool.burst(40, &*policy, None);
    assert_eq!(pool.in_flight, [30, 10]);

    let pool = Pool::new(&[1.0, 1.0]);
    let mut candidates = pool.candidates();
    candidates[0].waiting = Some(5);
    candidates[1].in_flight = 4;
    let choice = choose(&*policy, &pool.question(None), &candidates).unwrap();
    assert_eq!(choice, Choice { index: 1, cost: 4.0 });
}

#[test]
fn a_large_pool_is_sampled_and_stays_even() {
    for name in ["least_load", "power_of_two"] {
        let policy = policy(name);
        let mut pool = Pool::new(&[1.0; 200]);
        pool.burst(2_000, &*policy, None);
        let most = pool.in_flight.iter().max().unwrap();
        let least = pool.in_flight.iter().min().unwrap();
        assert!(*most <= 14 && 4 <= *least, "{name}: {least} to {most} around 10");
    }
}

#[test]
fn a_session_has_one_home_for_all_weirs_and_homes_are_spread_by_weight() {
    let (one, other) = (policy("session"), policy("session"));
    let mut pool = Pool::new(&[2.0, 1.0, 1.0]);
    let mut homes = [0_u32; 3];
    for number in 0..4_000 {
        let key = format!("session-{number}");
        let home = pool.choose(&*one, Some(&key));
        assert_eq!(pool.choose(&*other, Some(&key)), home, "without a word between them");
        homes[home] += 1;
    }
    let near =
        homes.iter().zip([2_000, 1_000, 1_000]).all(|(count, due)| count.abs_diff(due) < 120);
    assert!(near, "{homes:?}");
}

#[test]
fn a_new_replica_takes_only_its_part_of_the_sessions() {
    let policy = policy("session");
    let pool = Pool::new(&[1.0; 5]);
    let five = pool.candidates();
    let mut moved = 0;
    for number in 0..4_000 {
        let key = format!("session-{number}");
        let question = pool.question(Some(&key));
        let before = choose(&*policy, &question, &five[..4]).unwrap().index;
        let after = choose(&*policy, &question, &five).unwrap().index;
        assert!(after == before || after == 4, "sessions move to the new one only");
        moved += u32::from(after != before);
    }
    assert!(moved.abs_diff(800) < 100, "one in five, not {moved} of 4000");
}

#[test]
fn no_key_and_an_empty_key_go_where_the_load_is_least() {
    let policy = policy("session");
    for key in [None, Some("")] {
        let mut pool = Pool::new(&[1.0; 4]);
        pool.burst(64, &*policy, key);
        assert_eq!(pool.in_flight, [16; 4]);
    }
}

#[test]
fn a_session_alone_stays_at_home_while_there_is_little_traffic() {
    let policy = policy("session");
    let mut pool = Pool::new(&[1.0; 4]);
    let home = pool.start(&*policy, Some("alone"));
    (0..3).for_each(|_| assert_eq!(pool.start(&*policy, Some("alone")), home));
    assert_ne!(pool.start(&*policy, Some("alone")), home, "the fifth would crowd it");
}

/// One key makes 60 % of 400 concurrent requests, 99 keys the rest, for 20,000 requests.
#[test]
fn a_hot_key_neither_crowds_its_home_nor_drives_light_sessions_out() {
    let policy = policy("session");
    let mut pool = Pool::new(&[1.0; 4]);
    let mut running = Vec::new();
    let mut visits: HashMap<String, [u32; 4]> = HashMap::new();
    for step in 0..20_000_u64 {
        let dice = mix(step);
        if running.len() == 400 {
            let done: usize = running.swap_remove((dice % 400) as usize);
            pool.in_flight[done] -= 1;
        }
        let is_hot = dice / 400 % 100 < 60;
        let key = if is_hot { "hot".to_owned() } else { format!("light-{}", dice / 40_000 % 99) };
        let index = pool.start(&*policy, Some(&key));
        running.push(index);
        let most = f64::from(pool.in_flight[index]);
        assert!(most <= (1.25 * pool.mean() + 1.0).max(4.0), "{:?}", pool.in_flight);
        // The first requests fill the pool; what counts is how it runs then.
        if 1_000 <= step && !is_hot {
            visits.entry(key).or_default()[index] += 1;
        }
    }
    assert_eq!(visits.len(), 99);
    for (key, counts) in visits {
        let (home, all) = (*counts.iter().max().unwrap(), counts.iter().sum::<u32>());
        assert!(95 * all <= 100 * home, "{key} left its home: {counts:?}");
    }
}

#[test]
fn three_weirs_that_start_together_do_not_all_choose_the_first() {
    let policy = policy("least_load");
    let mut together = 0;
    for round in 0..200_u64 {
        let first = |weir: u64| {
            let mut pool = Pool::new(&[1.0; 4]);
            pool.rotation = mix(round * 3 + weir) >> 1;
            pool.choose(&*policy, None)
        };
        together += u32::from(first(0) == first(1) && first(1) == first(2));
    }
    assert!(together < 30, "a random start makes it one in sixteen, not {together} of 200");
}

//! A session stays at home, where the engine still has its prefix in the cache.
//!
//! The home is found by rendezvous: every candidate draws a number from the key and its own id,
//! and the lowest wins. So any number of Weirs agree without talking, losing a replica moves only
//! its own sessions, and a new one takes only its part. Homes are bounded in load: one that would
//! stand well above the mean is passed over for the next in the key's own order.
//!
//! A key that alone is more than one replica's due part must be spread anyway; it is passed on as
//! soon as a home reaches the mean, so that it does not fill the headroom and drive the light
//! sessions that live there out of their home.

use crate::routing::hash::{mix, stable_hash, unit_interval};
use crate::routing::hot_keys::HotKeys;
use crate::routing::{Candidate, Error, Options, Policy, Question};

use super::least_load::write_loads;

pub(in crate::routing) const NAME: &str = "session";

/// Put on the cost of a home that is too full: behind all others, in the same order, yet better
/// than nobody. Draws are far below it for any sensible weight.
const TOO_FULL: f64 = 1e9;

pub(in crate::routing) fn build(options: &Options) -> Result<Box<dyn Policy>, Error> {
    Ok(Box::new(Session {
        load_bound: options.session.load_bound.max(1.0),
        load_floor: f64::from(options.session.load_floor.max(1)),
        hot_keys: HotKeys::default(),
    }))
}

#[derive(Debug)]
struct Session {
    load_bound: f64,
    load_floor: f64,
    hot_keys: HotKeys,
}

impl Policy for Session {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cost(&self, question: &Question<'_>, candidates: &[Candidate<'_>], costs: &mut [f64]) {
        let Some(key) = key_hash(question) else {
            write_loads(candidates, costs);
            return;
        };
        let (mut fit, mut weights, mut requests) = (0_u32, 0.0, 1.0);
        for candidate in candidates.iter().filter(|candidate| candidate.is_fit()) {
            fit += 1;
            weights += f64::from(candidate.weight);
            requests += candidate.occupancy();
        }
        // A hot key leaves the headroom to the others.
        let bound = if self.hot_keys.is_hot(key, fit) { 1.0 } else { self.load_bound };
        let bound_per_weight = bound * requests / weights;
        for (candidate, cost) in candidates.iter().zip(costs) {
            if !candidate.is_fit() {
                continue;
            }
            // The bound is rounded up to whole requests, so that for every load somebody has room.
            let room = (bound_per_weight * f64::from(candidate.weight)).max(self.load_floor);
            let is_full = room <= candidate.occupancy();
            *cost = draw(key, candidate) + if is_full { TOO_FULL } else { 0.0 };
        }
    }

    fn learn(&self, question: &Question<'_>, _: &Candidate<'_>) {
        self.hot_keys.count(key_hash(question));
    }
}

/// `None` for no key and for an empty one: a constant would put all of them on one replica.
fn key_hash(question: &Question<'_>) -> Option<u64> {
    question.session_key.filter(|key| !key.is_empty()).map(stable_hash)
}

/// What a candidate draws for a key: exponential with the weight as its rate, so that the chance
/// to be the lowest is the weight's part of all weights, and changing one weight moves no session
/// between two others.
fn draw(key: u64, candidate: &Candidate<'_>) -> f64 {
    let open_above_zero = 1.0 - unit_interval(mix(key ^ candidate.id_hash));
    -open_above_zero.ln() / f64::from(candidate.weight)
}

//! Picking: the lowest cost wins, ties take turns. Shared by all policies, so that none can get
//! the turns or the treatment of unfit candidates wrong. No judgement of load lives here.

use smallvec::{SmallVec, smallvec};

use super::hash::{index_below, mix, unit_interval};
use super::{Candidate, Choice, Policy, Question, Sight};

/// Pools of more candidates than this are sampled, for policies that allow it. Up to this many a
/// choice allocates nothing.
pub const SAMPLE_ABOVE: usize = 64;

/// Candidates in a sample. Two would do to keep the greatest load low; a few more cost nothing and
/// come close to seeing all.
const SAMPLE: usize = 16;

/// 2^64 divided by the golden ratio: multiples of it fill the circle evenly, whatever the count.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The candidate of lowest cost; among equals the turn goes round. `None` when none is fit.
pub fn choose(
    policy: &dyn Policy,
    question: &Question<'_>,
    candidates: &[Candidate<'_>],
) -> Option<Choice> {
    let sampled = match policy.sight() {
        Sight::Sample if SAMPLE_ABOVE < candidates.len() => {
            choose_in_sample(policy, question, candidates)
        }
        Sight::Sample | Sight::Whole => None,
    };
    // A sample may hold nobody fit where the whole does.
    let choice = sampled.or_else(|| lowest(policy, question, candidates))?;
    policy.learn(question, candidates.get(choice.index)?);
    Some(choice)
}

/// One candidate at random from each of [`SAMPLE`] equal stretches of the list.
fn choose_in_sample(
    policy: &dyn Policy,
    question: &Question<'_>,
    candidates: &[Candidate<'_>],
) -> Option<Choice> {
    let count = candidates.len();
    let drawn: SmallVec<[usize; SAMPLE]> = (0..SAMPLE)
        .map(|stretch| {
            let (start, end) = (stretch * count / SAMPLE, (stretch + 1) * count / SAMPLE);
            let dice = mix(question.dice.wrapping_add((stretch as u64 + 1).wrapping_mul(GOLDEN)));
            start + index_below(dice, end - start)
        })
        .collect();
    let sample: SmallVec<[Candidate<'_>; SAMPLE]> =
        drawn.iter().filter_map(|index| candidates.get(*index).copied()).collect();
    let choice = lowest(policy, question, &sample)?;
    Some(Choice { index: *drawn.get(choice.index)?, cost: choice.cost })
}

fn lowest(
    policy: &dyn Policy,
    question: &Question<'_>,
    candidates: &[Candidate<'_>],
) -> Option<Choice> {
    let mut costs: SmallVec<[f64; SAMPLE_ABOVE]> = smallvec![f64::INFINITY; candidates.len()];
    policy.cost(question, candidates, &mut costs);
    let mut tied: Option<Tied> = None;
    for (index, (cost, candidate)) in costs.iter().zip(candidates).enumerate() {
        match &mut tied {
            _ if !cost.is_finite() => {}
            Some(tied) if tied.cost < *cost => {}
            Some(tied) if tied.cost == *cost => tied.join(candidate),
            _ => tied = Some(Tied::new(*cost, index, candidate)),
        }
    }
    let tied = tied?;
    let equals = || (0..).zip(costs.iter().zip(candidates)).filter(|one| *one.1.0 == tied.cost);
    let index = match tied.turn(question.rotation) {
        Turn::First => Some(tied.first),
        Turn::Nth(number) => equals().nth(number).map(|(index, _)| index),
        Turn::Point(mut point) => {
            let here = equals().find(|(_, (_, candidate))| {
                point -= weight(candidate);
                point < 0.0
            });
            // Rounding may leave a crumb behind the last.
            here.or_else(|| equals().last()).map(|(index, _)| index)
        }
    };
    Some(Choice { index: index?, cost: tied.cost })
}

/// Those that share the lowest cost.
struct Tied {
    cost: f64,
    first: usize,
    count: u64,
    /// The first one's weight, and whether all have the same.
    weight: f64,
    is_even: bool,
    weights: f64,
}

/// Whose turn it is among equals, counted from the first.
enum Turn {
    First,
    Nth(usize),
    /// The one at this point of the line, if each takes as much of it as its weight.
    Point(f64),
}

impl Tied {
    fn new(cost: f64, first: usize, candidate: &Candidate<'_>) -> Self {
        let weight = weight(candidate);
        Self { cost, first, count: 1, weight, is_even: true, weights: weight }
    }

    fn join(&mut self, candidate: &Candidate<'_>) {
        let weight = weight(candidate);
        self.count += 1;
        self.weights += weight;
        self.is_even &= weight == self.weight;
    }

    /// Equal weights take exact turns. Others follow the multiples of the golden ratio, which need
    /// no state and stay within a few turns of each one's due part.
    fn turn(&self, rotation: u64) -> Turn {
        if self.count == 1 {
            Turn::First
        } else if self.is_even {
            Turn::Nth((rotation % self.count) as usize)
        } else {
            Turn::Point(unit_interval(rotation.wrapping_mul(GOLDEN)) * self.weights)
        }
    }
}

/// The weight in turns; a policy may let one serve that has none.
fn weight(candidate: &Candidate<'_>) -> f64 {
    if candidate.is_fit() { f64::from(candidate.weight) } else { 0.0 }
}

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
    // NaN never is the least, nor finite.
    let cost = costs.iter().copied().filter(|cost| cost.is_finite()).fold(f64::INFINITY, f64::min);
    if !cost.is_finite() {
        return None;
    }
    let tied = || {
        let numbered = costs.iter().zip(candidates).enumerate();
        numbered.filter(|(_, (other, _))| **other == cost).map(|(index, (_, one))| (index, one))
    };
    let index = whose_turn(tied, question.rotation)?;
    Some(Choice { index, cost })
}

/// Whose turn it is among equals. Equal weights take exact turns. Others follow the multiples of
/// the golden ratio, which need no state and stay within a few turns of each one's due part.
fn whose_turn<'a, I>(tied: impl Fn() -> I, rotation: u64) -> Option<usize>
where
    I: Iterator<Item = (usize, &'a Candidate<'a>)>,
{
    let (_, first) = tied().next()?;
    let (mut count, mut total, mut even) = (0_u64, 0.0, true);
    for (_, one) in tied() {
        count += 1;
        total += f64::from(one.weight.max(0.0));
        even &= one.weight == first.weight;
    }
    if even || !total.is_finite() {
        return tied().nth((rotation % count) as usize).map(|(index, _)| index);
    }
    let mut point = unit_interval(rotation.wrapping_mul(GOLDEN)) * total;
    for (index, one) in tied() {
        point -= f64::from(one.weight.max(0.0));
        if point < 0.0 {
            return Some(index);
        }
    }
    // Rounding may leave a crumb behind the last.
    tied().last().map(|(index, _)| index)
}

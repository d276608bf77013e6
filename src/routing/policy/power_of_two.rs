//! The less loaded of two drawn at random. Nearly as even as looking at all, and several Weirs
//! that see different loads do not all run to the same idle replica.

use crate::routing::hash::{index_below, mix};
use crate::routing::{Candidate, Error, Options, Policy, Question, Sight};

pub(in crate::routing) const NAME: &str = "power_of_two";

pub(in crate::routing) fn build(_: &Options) -> Result<Box<dyn Policy>, Error> {
    Ok(Box::new(PowerOfTwo))
}

#[derive(Debug)]
struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cost(&self, question: &Question<'_>, candidates: &[Candidate<'_>], costs: &mut [f64]) {
        // Drawn among the fit only: a pair of unfit ones would leave nobody.
        let fit = candidates.iter().filter(|candidate| candidate.is_fit()).count();
        let pair = draw(question.dice, fit);
        let numbered = candidates.iter().zip(costs).filter(|(candidate, _)| candidate.is_fit());
        for (number, (candidate, cost)) in numbered.enumerate() {
            if pair.contains(&number) {
                *cost = candidate.load();
            }
        }
    }

    fn sight(&self) -> Sight {
        Sight::Sample
    }
}

/// Two different numbers below `count`; twice the same when there is only one.
fn draw(dice: u64, count: usize) -> [usize; 2] {
    if count < 2 {
        return [0, 0];
    }
    let first = index_below(dice, count);
    let step = 1 + index_below(mix(dice), count - 1);
    [first, (first + step) % count]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_different_ones_are_drawn_and_every_pair_comes_up() {
        let mut seen = [[0_u32; 4]; 4];
        for dice in 0..12_000_u64 {
            let [first, second] = draw(mix(dice), 4);
            assert_ne!(first, second);
            seen[first][second] += 1;
        }
        for (first, row) in seen.iter().enumerate() {
            for (second, count) in row.iter().enumerate() {
                assert!(first == second || (800..1_200).contains(count), "{seen:?}");
            }
        }
    }
}

//! The fewest requests for its weight. The cost is the ledger's count, which goes up in the same
//! step as the choice, so a burst spreads although no engine has answered yet.

use crate::routing::{Candidate, Error, Options, Policy, Question, Sight};

pub(in crate::routing) const NAME: &str = "least_load";

pub(in crate::routing) fn build(_: &Options) -> Result<Box<dyn Policy>, Error> {
    Ok(Box::new(LeastLoad))
}

#[derive(Debug)]
struct LeastLoad;

impl Policy for LeastLoad {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cost(&self, _: &Question<'_>, candidates: &[Candidate<'_>], costs: &mut [f64]) {
        write_loads(candidates, costs);
    }

    fn sight(&self) -> Sight {
        Sight::Sample
    }
}

/// The load of each; what other policies fall back to when they know nothing better.
pub(super) fn write_loads(candidates: &[Candidate<'_>], costs: &mut [f64]) {
    for (candidate, cost) in candidates.iter().zip(costs) {
        *cost = candidate.load();
    }
}

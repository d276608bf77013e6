//! Each replica in turn. All cost the same; the turns are taken by the shared picking, which also
//! gives heavier replicas more of them. Nothing about load belongs here.

use crate::routing::{Candidate, Error, Options, Policy, Question};

pub(in crate::routing) const NAME: &str = "round_robin";

pub(in crate::routing) fn build(_: &Options) -> Result<Box<dyn Policy>, Error> {
    Ok(Box::new(RoundRobin))
}

#[derive(Debug)]
struct RoundRobin;

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cost(&self, _: &Question<'_>, candidates: &[Candidate<'_>], costs: &mut [f64]) {
        for (candidate, cost) in candidates.iter().zip(costs) {
            if candidate.is_fit() {
                *cost = 0.0;
            }
        }
    }
}

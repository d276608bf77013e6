//! Which replica should serve an inference.
//!
//! Pure: no socket, no clock, no hidden dice; what is random or counted comes with the question.
//! The fleet makes candidates, a policy puts a cost on each, [`choose()`] picks the lowest.
//! Nothing here knows that a fleet exists, holds a lease or opens a connection.
//!
//! To add a way to choose: write `policy/<name>.rs`, add its row to [`POLICIES`] and an example
//! config. Its options, if it has any, become a section of [`Options`].

use std::fmt::Debug;
use std::time::Instant;

use crate::names::{ReplicaId, Tokens};

mod choose;
mod hash;
mod hot_keys;
mod options;
mod policy;

pub use self::choose::{SAMPLE_ABOVE, choose};
pub use self::hash::{mix, stable_hash, unit_interval};
pub use self::options::{Options, SessionOptions, SlowStartOptions};

/// What a policy may know about an inference.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// What names the session, as the client sent it. `None` and empty mean the same: no session.
    pub session_key: Option<&'a [u8]>,
    /// Tokens the engine will have to read, estimated from the length of the prompt.
    pub tokens_estimated: Tokens,
    /// Randomness of this choice; another attempt brings other dice.
    pub dice: u64,
    /// How many choices the pool made before this one, counted from a random start, so that
    /// several Weirs started together do not all begin at the first replica. One counter for each
    /// pool: a counter shared by pools would skip replicas in step with the other pool's traffic.
    pub rotation: u64,
    /// When the question is asked.
    pub now: Instant,
}

/// What a policy may know about a replica, as it stood when the question was asked.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Which replica.
    pub id: &'a ReplicaId,
    /// [`stable_hash`] of the id, computed once when the replica is made.
    pub id_hash: u64,
    /// Its part of the work in relation to the others; 1 is usual. One that is not above zero
    /// keeps the replica from being chosen.
    pub weight: f32,
    /// Leases held on it by this Weir at this moment.
    pub in_flight: u32,
    /// Requests in the engine's own queue, as last reported. It is added to `in_flight`, never
    /// taken instead: the report is old and the ledger is not. `None` when nobody asks the engine.
    pub waiting: Option<u32>,
}

impl Candidate<'_> {
    /// Whether it may be chosen at all.
    pub fn is_fit(&self) -> bool {
        0.0 < self.weight && self.weight.is_finite()
    }

    /// Requests that stand before a new one: ours, and the reported queue.
    pub fn occupancy(&self) -> f64 {
        f64::from(self.in_flight) + f64::from(self.waiting.unwrap_or(0))
    }

    /// Occupancy for each unit of weight; infinite when it must not serve.
    pub fn load(&self) -> f64 {
        if self.is_fit() { self.occupancy() / f64::from(self.weight) } else { f64::INFINITY }
    }
}

/// The pick, with the cost that made it: the answer to *why this replica*.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Index of the chosen one among the candidates.
    pub index: usize,
    /// What the policy said it costs.
    pub cost: f64,
}

/// How many candidates a policy must see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// All, always.
    Whole,
    /// A random sample will do when there are more than [`SAMPLE_ABOVE`].
    Sample,
}

/// A way to choose.
pub trait Policy: Send + Sync + Debug {
    /// Its name in the config, the metrics and the admin API.
    fn name(&self) -> &'static str;

    /// Writes a cost for each candidate: lower is better, infinite means that it must not serve,
    /// and NaN is taken as infinite. `costs` is as long as `candidates` and starts infinite.
    fn cost(&self, question: &Question<'_>, candidates: &[Candidate<'_>], costs: &mut [f64]);

    /// How many candidates it must see to judge.
    fn sight(&self) -> Sight {
        Sight::Whole
    }

    /// Told what was chosen.
    fn learn(&self, question: &Question<'_>, chosen: &Candidate<'_>) {
        let _ = (question, chosen);
    }
}

/// Why a policy cannot be built.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// The config asks for a policy that is not in [`POLICIES`].
    #[error("no policy is called `{name}`; known: {known}")]
    UnknownPolicy {
        /// What was asked for.
        name: String,
        /// The names there are, with commas between.
        known: String,
    },
}

/// One way to choose, as the config and the manual know it.
#[derive(Debug)]
pub struct PolicyRow {
    /// What `routing.policy` calls it.
    pub name: &'static str,
    /// One line for the manual.
    pub summary: &'static str,
    /// An example config that uses it, from the root of the repository.
    pub example: &'static str,
    /// Makes it.
    pub build: fn(&Options) -> Result<Box<dyn Policy>, Error>,
}

/// All ways to choose.
pub static POLICIES: &[PolicyRow] = &[
    PolicyRow {
        name: policy::round_robin::NAME,
        summary: "Each replica in turn, heavier ones more often.",
        example: "conf/examples/round_robin.yaml",
        build: policy::round_robin::build,
    },
    PolicyRow {
        name: policy::least_load::NAME,
        summary: "The replica with the fewest requests in flight for its weight.",
        example: "conf/examples/least_load.yaml",
        build: policy::least_load::build,
    },
    PolicyRow {
        name: policy::power_of_two::NAME,
        summary: "The less loaded of two replicas drawn at random.",
        example: "conf/examples/power_of_two.yaml",
        build: policy::power_of_two::build,
    },
    PolicyRow {
        name: policy::session::NAME,
        summary: "The home of the session, unless it is loaded well above the mean.",
        example: "conf/examples/session.yaml",
        build: policy::session::build,
    },
];

/// Makes the policy that the options name.
pub fn build(options: &Options) -> Result<Box<dyn Policy>, Error> {
    let row = POLICIES
        .iter()
        .find(|row| row.name == options.policy)
        .ok_or_else(|| Error::UnknownPolicy { name: options.policy.clone(), known: known() })?;
    (row.build)(options)
}

/// The names of all policies, with commas between.
pub fn known() -> String {
    POLICIES.iter().map(|row| row.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod laws;

//! The finished story of one request, as consumers get it. Pure: plain values, no behaviour but
//! putting an end into one word. To tell consumers more: a field here, filled by the shell.

use super::Shape;
use crate::names::{ModelName, ReplicaId, RequestId, TenantId};
use crate::telemetry::{Ended, Phase, Timings, Usage};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It was answered to the last byte, whatever the status.
    Complete,
    /// The client left first.
    ClientLeft {
        /// How far it had come.
        phase: Phase,
    },
    /// The engine went away in the middle of its answer, or said inside it that it broke.
    EngineBroke,
    /// A time limit was reached.
    TimedOut,
    /// Weir said no.
    Refused,
    /// Every attempt at a replica was in vain, and none had sent a byte to the client.
    Failed,
}

impl Ending {
    /// The end in one word, for counting and for the access log.
    pub fn ended(self) -> Ended {
        match self {
            Self::Complete => Ended::Complete,
            Self::ClientLeft { .. } => Ended::ClientLeft,
            Self::EngineBroke => Ended::EngineBroke,
            Self::TimedOut => Ended::TimedOut,
            Self::Refused => Ended::Refused,
            Self::Failed => Ended::Failed,
        }
    }

    /// How far the request had come, if it was the client who ended it.
    pub fn phase(self) -> Option<Phase> {
        match self {
            Self::ClientLeft { phase } => Some(phase),
            Self::Complete | Self::EngineBroke | Self::TimedOut | Self::Refused | Self::Failed => {
                None
            }
        }
    }
}

/// A finished inference with its answer's shape and its timings. Never a prompt or a key.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Which request.
    pub id: RequestId,
    /// The API, a name of our own.
    pub api: &'static str,
    /// The model as the client named it.
    pub model: Option<ModelName>,
    /// The replica that answered, or was tried last.
    pub replica: Option<ReplicaId>,
    /// Whose request.
    pub tenant: Option<TenantId>,
    /// Status, wire and form of the answer.
    pub shape: Shape,
    /// Attempts at replicas.
    pub attempts: u32,
    /// How long each part took.
    pub timings: Timings,
    /// What the engine says it cost, once a consumer has read it.
    pub usage: Option<Usage>,
    /// Bytes of the request's body.
    pub request_bytes: u64,
    /// Bytes of the answer's body.
    pub response_bytes: u64,
    /// How it ended.
    pub ending: Ending,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ending_has_its_word_and_only_a_client_has_a_phase() {
        let left = Ending::ClientLeft { phase: Phase::Queued };
        for (ending, ended, phase) in [
            (Ending::Complete, Ended::Complete, None),
            (left, Ended::ClientLeft, Some(Phase::Queued)),
            (Ending::EngineBroke, Ended::EngineBroke, None),
            (Ending::TimedOut, Ended::TimedOut, None),
            (Ending::Refused, Ended::Refused, None),
            (Ending::Failed, Ended::Failed, None),
        ] {
            assert_eq!((ending.ended(), ending.phase()), (ended, phase));
        }
    }
}

//! What goes into the engine and what comes out: requests, events, and a request on its way. Pure.

use std::sync::Arc;
use std::time::Duration;

use super::cache::{BlockHash, BlockId};
use super::counters::{FinishReason, Stations};

/// One sequence to compute.
#[derive(Clone, Debug)]
pub struct Request {
    /// Chosen by the caller; no two at once are equal.
    pub id: u64,
    /// Length of the prompt, at least 1.
    pub prompt_tokens: u32,
    /// How many tokens it will make, at least 1.
    pub output_tokens: u32,
    /// What each full block of prompt and answer holds, from the first on. May be shorter than the
    /// sequence: blocks beyond its end are never shared.
    pub blocks: Arc<[BlockHash]>,
    /// Lower runs earlier, if the engine looks at it.
    pub priority: i64,
    /// Why it will end.
    pub finish: FinishReason,
}

/// What happened to a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// To which.
    pub id: u64,
    /// When, since the engine's start.
    pub at: Duration,
    /// What.
    pub kind: EventKind,
}

/// See [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The first token is there; so many prompt tokens came from the cache.
    FirstToken {
        /// Prompt tokens not computed again.
        cached_tokens: u32,
    },
    /// One more token; it is number `count`, the first being 1.
    Token {
        /// Tokens made so far.
        count: u32,
    },
    /// The last event of this sequence.
    Finished {
        /// Why.
        reason: FinishReason,
    },
    /// It lost its blocks, waits again, and will compute them again.
    Preempted,
}

/// Why a request is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejection {
    /// As many wait as may.
    #[error("the queue of the engine is full")]
    QueueFull,
    /// It could never run.
    #[error("the sequence needs more blocks than the engine has")]
    TooLong,
}

/// A request on its way through the engine.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: Request,
    pub(super) order: u64,
    pub(super) computed: u32,
    pub(super) generated: u32,
    /// Tokens of it in the step that runs now.
    pub(super) granted: u32,
    pub(super) cached: u32,
    pub(super) preempted: bool,
    pub(super) table: Vec<BlockId>,
    pub(super) stations: Stations,
}

impl Sequence {
    pub(super) fn new(request: Request, order: u64, now: Duration) -> Self {
        Self {
            request,
            order,
            computed: 0,
            generated: 0,
            granted: 0,
            cached: 0,
            preempted: false,
            table: Vec::new(),
            stations: Stations { arrived: now, ..Stations::default() },
        }
    }

    /// Length of prompt and answer so far.
    pub(super) fn tokens(&self) -> u32 {
        self.request.prompt_tokens + self.generated
    }

    /// Who comes first: low priority numbers, then early comers.
    pub(super) fn rank(&self) -> (i64, u64) {
        (self.request.priority, self.order)
    }
}

//! What Weir knows of one request while it is under way: small, and gone with the request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use pingora::{Error, ErrorType};
use smallvec::SmallVec;

use super::body::Room;
use super::connect::Connector;
use super::peer::Doubt;
use super::refusal::{ErrorShape, Refusal};
use super::state::{Shared, State};
use super::watchdog::Watched;
use crate::fleet::{Lease, Pool};
use crate::names::{ModelName, ReplicaId, RequestId};
use crate::request::{Api, Wire};
use crate::response::{Shape, Tap};
use crate::telemetry::{InFlight, Phase, ReplicaMetrics};

/// One request, from its head to its last byte.
pub struct RequestContext {
    /// The configuration it began with; a reload does not touch it.
    pub(super) state: Arc<State>,
    pub(super) started: Instant,
    pub(super) watch: Watched,
    pub(super) id: Option<RequestId>,
    pub(super) api: Option<&'static Api>,
    pub(super) target: Option<Target>,
    /// The body for the replica, held until the answer begins: then no replay is possible.
    pub(super) body: Option<Bytes>,
    pub(super) body_bytes: u64,
    /// What the body takes of what all bodies may hold.
    pub(super) room: Option<Room>,
    pub(super) session_key: Option<Box<[u8]>>,
    /// What the answer will look like.
    pub(super) wire: Wire,
    pub(super) attempt: Option<Attempt>,
    pub(super) attempts: u32,
    pub(super) tried: SmallVec<[ReplicaId; 2]>,
    /// A replica that broke off: the next attempt is made only if it is gone.
    pub(super) doubt: Option<Doubt>,
    /// The replica of the last attempt.
    pub(super) replica: Option<ReplicaId>,
    /// Where the answer that goes to the client is counted; outlives the attempt.
    pub(super) series: Option<Arc<ReplicaMetrics>>,
    pub(super) refusal: Option<Refusal>,
    pub(super) answer: Answer,
    pub(super) tap: Tap,
    pub(super) times: Times,
    pub(super) phase: Phase,
    _present: Present,
    _in_flight: InFlight,
}

/// Where the request goes.
pub(super) struct Target {
    pub(super) pool: Arc<Pool>,
    pub(super) model: ModelName,
    /// The path for the replica, where it differs from the client's.
    pub(super) path: Option<Box<str>>,
}

/// What is known of the answer.
#[derive(Default)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// The form of an engine's answer, once its head came.
    pub(super) shape: Option<Shape>,
    /// An interim answer came: the replica had read the request.
    pub(super) interim: bool,
    /// Nothing but the end of the connection tells the end of the answer.
    pub(super) unframed: bool,
    /// A stream said that it is over.
    pub(super) end_said: bool,
    pub(super) bytes: u64,
}

impl Answer {
    /// The answer is `text/event-stream`.
    pub(super) fn is_stream(&self) -> bool {
        self.shape.is_some_and(|shape| shape.streaming)
    }

    /// The connection ended, which is the only end there is, before the stream said that it is
    /// over.
    pub(super) fn is_cut(&self) -> bool {
        self.is_readable_stream() && self.unframed && !self.end_said
    }

    /// A stream said that it is over, and so the client has all of it.
    pub(super) fn has_ended(&self) -> bool {
        self.is_readable_stream() && self.end_said
    }

    /// The answer is a stream of tokens that is read as it passes.
    pub(super) fn is_readable_stream(&self) -> bool {
        self.shape.is_some_and(|shape| shape.readable_stream())
    }
}

/// When what happened.
#[derive(Default)]
pub(super) struct Times {
    pub(super) body_read: Option<Instant>,
    pub(super) chosen: Option<Instant>,
    pub(super) connected: Option<Instant>,
    pub(super) first_byte: Option<Instant>,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
}

/// One try at one replica.
pub(super) struct Attempt {
    pub(super) lease: Lease,
    pub(super) connector: Arc<Connector>,
    /// A connect is under way, and goes on.
    pub(super) connecting_still: bool,
    pub(super) began: Instant,
    /// The outcome was told to the breaker and counted.
    pub(super) reported: bool,
}

impl Attempt {
    pub(super) fn new(lease: Lease, connector: Arc<Connector>, now: Instant) -> Self {
        Self { lease, connector, connecting_still: false, began: now, reported: false }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.connecting_still {
            self.connector.abandon(self.lease.address());
        }
    }
}

impl RequestContext {
    pub(super) fn new(state: Arc<State>, shared: &Arc<Shared>, now: Instant) -> Self {
        Self {
            state,
            started: now,
            watch: shared.watchdog.watch(now),
            id: None,
            api: None,
            target: None,
            body: None,
            body_bytes: 0,
            room: None,
            session_key: None,
            wire: Wire::Other,
            attempt: None,
            attempts: 0,
            tried: SmallVec::new(),
            doubt: None,
            replica: None,
            series: None,
            refusal: None,
            answer: Answer::default(),
            tap: Tap::default(),
            times: Times::default(),
            phase: Phase::Uploading,
            _present: Present::enter(shared),
            _in_flight: shared.metrics.enter(),
        }
    }

    /// Remembers why, and makes the error by which Pingora leaves the request.
    pub(super) fn refuse(&mut self, refusal: Refusal) -> Box<Error> {
        let error = Error::explain(ErrorType::HTTPStatus(refusal.status()), refusal.reason());
        self.refusal = Some(refusal);
        error
    }

    /// The request's id; empty before its head was looked at.
    pub(super) fn id(&self) -> &str {
        self.id.as_ref().map_or("", RequestId::as_str)
    }

    /// The error shape of the API that was called.
    pub(super) fn error_shape(&self) -> ErrorShape {
        match self.api {
            Some(api) if api.speaks_anthropic() => ErrorShape::Anthropic,
            Some(api) if api.wire == Wire::Responses => ErrorShape::Responses,
            _ => ErrorShape::OpenAi,
        }
    }
}

/// One more request under way in this process, for as long as it lives.
struct Present {
    shared: Arc<Shared>,
}

impl Present {
    fn enter(shared: &Arc<Shared>) -> Self {
        shared.under_way.fetch_add(1, Ordering::Relaxed);
        Self { shared: Arc::clone(shared) }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let before: u64 = AtomicU64::fetch_sub(&self.shared.under_way, 1, Ordering::Relaxed);
        debug_assert!(0 < before, "more requests left than came");
    }
}

//! Facts of one request that the access log, the counters and the consumers all tell.
//! Only plain values; nothing here measures, counts or writes. To add one: a field, and its name in
//! `access_log.rs` if the line shall show it.

use std::time::Duration;

use crate::names::Tokens;

/// How long each part of a request took. `None` where it did not come to that.
/// All are measured from the moment the head of the request was read, but `connect`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// The time spent waiting to be let in.
    pub queued: Option<Duration>,
    /// The time the last attempt took to get a connection; zero when one was reused.
    pub connect: Option<Duration>,
    /// Until the head of the answer came.
    pub first_byte: Option<Duration>,
    /// Until the first event with content came; only of streams.
    pub first_token: Option<Duration>,
    /// Until the end, whatever end it was.
    pub total: Duration,
}

/// The tokens an engine says a request cost. `None` where it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The whole prompt, cached parts included.
    pub prompt: Option<Tokens>,
    /// What was made, reasoning included.
    pub completion: Option<Tokens>,
    /// The part of the prompt that was read from the engine's prefix cache.
    pub cached: Option<Tokens>,
}

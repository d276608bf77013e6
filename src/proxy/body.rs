//! Reading a whole request body before a replica is chosen, so that Pingora still forwards it.
//!
//! Pingora calls `request_body_filter` for a body that was read beforehand only if its own replay
//! buffer holds something, and that buffer takes 64 KiB at the most (`BODY_BUF_LIMIT` in
//! pingora-core; one byte more and it is lost). What the buffer holds does not matter: the filter
//! puts the real body in its place. It only must not be empty and not be overrun. So it is armed
//! for the tail of the body alone, or, where nobody can know which read is the last (chunked
//! HTTP/1), filled afterwards from a stub request. See docs/life-of-a-request.md.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::{Version, header};
use pingora::http::RequestHeader;
use pingora::protocols::http::ServerSession;
use pingora::{Error, ErrorType, OrErr, Result};
use pingora_proxy::Session;

/// What Pingora keeps of a body for a replay.
const REPLAY_BYTES_MAX: usize = 64 * 1024;

/// First allocation for a body whose declared length nobody has proven yet.
const FIRST_ALLOCATION_BYTES: usize = 1024 * 1024;

/// How long the rest of a refused upload is read, so that the client gets to see the refusal.
const DRAIN_MAX: Duration = Duration::from_secs(2);

/// What came of reading.
#[derive(Debug)]
pub(super) enum Upload {
    /// The request has no body.
    None,
    /// All of it, and its place in the budget.
    Whole(Bytes, Room),
    /// More than is allowed; what was read is dropped.
    TooLarge,
    /// All bodies together would be more than the process may hold.
    NoRoom,
    /// The client did not send all of it in time.
    TooSlow,
    /// `Expect` asks for something that is not known.
    UnknownExpectation,
}

/// Limits of an upload.
#[derive(Clone, Debug)]
pub(super) struct UploadLimits {
    /// Largest body.
    pub(super) bytes_max: usize,
    /// Most bytes of all bodies together.
    pub(super) held_max: usize,
    /// What all bodies together hold now.
    pub(super) held: Arc<AtomicUsize>,
    /// Time for all of it.
    pub(super) time_max: Duration,
}

/// What a body takes of what all may hold; given back by being dropped.
#[derive(Debug)]
pub(super) struct Room {
    held: Arc<AtomicUsize>,
    held_max: usize,
    bytes: usize,
}

impl Room {
    fn new(limits: &UploadLimits) -> Self {
        Self { held: Arc::clone(&limits.held), held_max: limits.held_max, bytes: 0 }
    }

    /// Grows to `bytes`. False: there is no room for so much.
    fn grow(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let before = self.held.fetch_add(more, Ordering::Relaxed);
        self.bytes += more;
        before.saturating_add(more) <= self.held_max
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Why a body is not read to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Overrun {
    TooLarge,
    NoRoom,
}

/// Reads the body whole and arms the replay.
///
/// # Errors
/// The client went away while it sent (source: downstream).
pub(super) async fn read(session: &mut Session, limits: UploadLimits) -> Result<Upload> {
    let downstream: &mut ServerSession = &mut session.downstream_session;
    if downstream.is_upgrade_req() || downstream.is_body_empty() {
        return Ok(Upload::None);
    }
    let declared = declared_length(downstream.req_header());
    if declared.is_some_and(|length| limits.bytes_max < length) {
        return Ok(Upload::TooLarge);
    }
    if !meet_expectation(downstream).await? {
        return Ok(Upload::UnknownExpectation);
    }
    let reading = read_all(downstream, declared, &limits);
    let body = match tokio::time::timeout(limits.time_max, reading).await {
        Err(_) => return Ok(Upload::TooSlow),
        Ok(Err(error)) if error.etype() == &ErrorType::ReadTimedout => return Ok(Upload::TooSlow),
        Ok(read) => read?,
    };
    let body = match body {
        Ok(body) => body,
        Err(Overrun::TooLarge) => return Ok(Upload::TooLarge),
        Err(Overrun::NoRoom) => return Ok(Upload::NoRoom),
    };
    if body.bytes.is_empty() {
        return Ok(Upload::None);
    }
    if downstream.retry_buffer_truncated() || downstream.get_retry_buffer().is_none() {
        prime_replay(downstream).await?;
    }
    Ok(Upload::Whole(body.bytes.freeze(), body.room))
}

/// Reads what is left of a refused upload for a short while: a connection that is closed with
/// unread data is reset, and the reset may reach the client before the refusal does.
pub(super) async fn drain(session: &mut Session) {
    session.set_keepalive(None);
    session.downstream_session.set_total_drain_timeout(Some(DRAIN_MAX));
    let _ = tokio::time::timeout(DRAIN_MAX, session.drain_request_body()).await;
}

fn declared_length(request: &RequestHeader) -> Option<usize> {
    if request.headers.contains_key(header::TRANSFER_ENCODING) {
        return None;
    }
    let value = request.headers.get(header::CONTENT_LENGTH)?.to_str().ok()?;
    value.split(',').next()?.trim().parse().ok()
}

/// Answers `Expect: 100-continue`, which Pingora leaves to us. False: another expectation.
async fn meet_expectation(downstream: &mut ServerSession) -> Result<bool> {
    let Some(expect) = downstream.req_header().headers.get(header::EXPECT) else {
        return Ok(true);
    };
    if !expect.as_bytes().eq_ignore_ascii_case(b"100-continue") {
        return Ok(false);
    }
    if downstream.req_header().version == Version::HTTP_11 {
        // Writing it with the body unread would switch keep-alive off.
        let keepalive = downstream.get_keepalive();
        downstream.write_continue_response().await?;
        downstream.set_keepalive(keepalive);
    }
    Ok(true)
}

async fn read_all(
    downstream: &mut ServerSession,
    declared: Option<usize>,
    limits: &UploadLimits,
) -> Result<std::result::Result<Body, Overrun>> {
    let mut body = Body::new(declared, limits);
    if let ServerSession::H2(_) = downstream {
        return read_http2(downstream, body).await;
    }
    if declared.is_none() {
        downstream.enable_retry_buffering();
    }
    loop {
        if let Some(length) = declared {
            let missing = length.saturating_sub(body.bytes.len());
            if 0 < missing && missing <= REPLAY_BYTES_MAX {
                downstream.enable_retry_buffering();
            }
        }
        let Some(piece) = downstream.read_request_body().await.map_err(|e| e.into_down())? else {
            return Ok(Ok(body));
        };
        if let Err(overrun) = body.take(&piece) {
            return Ok(Err(overrun));
        }
        if downstream.is_body_done() {
            return Ok(Ok(body));
        }
    }
}

/// The first frame with data goes through the recording reader, the rest past it: so the replay
/// buffer is small, not empty and not overrun.
async fn read_http2(
    downstream: &mut ServerSession,
    mut body: Body,
) -> Result<std::result::Result<Body, Overrun>> {
    let ServerSession::H2(stream) = downstream else { return Ok(Ok(body)) };
    stream.enable_retry_buffering();
    loop {
        let piece = if body.bytes.is_empty() {
            stream.read_body_bytes().await.map_err(|e| e.into_down())?
        } else {
            match std::future::poll_fn(|cx| stream.poll_read_body_bytes(cx)).await {
                None => None,
                Some(Ok(piece)) => Some(piece),
                Some(Err(error)) => {
                    let what = "the body of an HTTP/2 request";
                    return Err(Error::because(ErrorType::ReadError, what, error).into_down());
                }
            }
        };
        let Some(piece) = piece else { return Ok(Ok(body)) };
        if let Err(overrun) = body.take(&piece) {
            return Ok(Err(overrun));
        }
    }
}

#[derive(Debug)]
struct Body {
    bytes: BytesMut,
    declared: Option<usize>,
    bytes_max: usize,
    room: Room,
}

impl Body {
    fn new(declared: Option<usize>, limits: &UploadLimits) -> Self {
        let room = Room::new(limits);
        Self { bytes: BytesMut::new(), declared, bytes_max: limits.bytes_max, room }
    }

    fn take(&mut self, piece: &Bytes) -> std::result::Result<(), Overrun> {
        if self.bytes_max - self.bytes.len() < piece.len() {
            return Err(Overrun::TooLarge);
        }
        if self.bytes.capacity() - self.bytes.len() < piece.len() {
            self.reserve(piece.len());
        }
        if !self.room.grow(self.bytes.len() + piece.len()) {
            return Err(Overrun::NoRoom);
        }
        self.bytes.put_slice(piece);
        Ok(())
    }

    /// A declared length is believed for [`FIRST_ALLOCATION_BYTES`] at once, for the rest when so
    /// much has really come; then the buffer is made exactly as long as the body.
    fn reserve(&mut self, piece: usize) {
        match self.declared {
            Some(declared) if self.bytes.is_empty() => {
                self.bytes.reserve(declared.min(FIRST_ALLOCATION_BYTES).max(piece));
            }
            Some(declared) => {
                self.bytes.reserve(declared.saturating_sub(self.bytes.len()).max(piece));
            }
            None => self.bytes.reserve(piece.max(4096)),
        }
    }
}

/// Feeds the same session a stub request of one byte through the entry for pipelined requests,
/// with the replay buffer on, and puts the real head back. No network is touched.
///
/// What a client pipelined behind the body is forgotten by this, so the connection is not reused.
async fn prime_replay(downstream: &mut ServerSession) -> Result<()> {
    const STUB: &[u8] = b"POST / HTTP/1.1\r\nHost: stub\r\nContent-Length: 1\r\n\r\n0";
    let ServerSession::H1(session) = downstream else {
        return Error::e_explain(ErrorType::InternalError, "no replay buffer for this session");
    };
    let head = session.req_header().clone();
    session.set_pipelined_prefix(BytesMut::from(STUB));
    session.read_request().await.or_err(ErrorType::InternalError, "reading the stub request")?;
    session.enable_retry_buffering();
    session.read_body_bytes().await.or_err(ErrorType::InternalError, "reading the stub body")?;
    *session.req_header_mut() = head;
    session.set_server_keepalive(None);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(bytes_max: usize, held_max: usize) -> UploadLimits {
        let held = Arc::new(AtomicUsize::new(0));
        UploadLimits { bytes_max, held_max, held, time_max: Duration::from_secs(1) }
    }

    #[test]
    fn a_body_of_declared_length_is_held_once() {
        let mut body = Body::new(Some(5 << 20), &limits(64 << 20, 64 << 20));
        let piece = Bytes::from(vec![7_u8; 64 << 10]);
        for _ in 0..80 {
            assert_eq!(body.take(&piece), Ok(()));
        }
        assert_eq!(body.bytes.len(), 5 << 20);
        assert!(body.bytes.capacity() < (5 << 20) + (64 << 10), "one copy and no more");
    }

    #[test]
    fn a_declared_length_alone_takes_little_memory() {
        let mut body = Body::new(Some(1 << 30), &limits(2 << 30, 4 << 30));
        assert_eq!(body.take(&Bytes::from_static(b"x")), Ok(()));
        assert!(body.bytes.capacity() <= FIRST_ALLOCATION_BYTES);
    }

    #[test]
    fn the_limit_is_the_last_byte_that_is_taken() {
        let mut body = Body::new(None, &limits(4, 100));
        assert_eq!(body.take(&Bytes::from_static(b"1234")), Ok(()));
        assert_eq!(body.take(&Bytes::from_static(b"5")), Err(Overrun::TooLarge));
    }

    #[test]
    fn all_bodies_together_have_a_limit_and_give_back_what_they_held() {
        let limits = limits(100, 10);
        let mut first = Body::new(None, &limits);
        let mut second = Body::new(None, &limits);
        assert_eq!(first.take(&Bytes::from_static(b"123456")), Ok(()));
        assert_eq!(second.take(&Bytes::from_static(b"12345")), Err(Overrun::NoRoom));
        drop(second);
        assert_eq!(limits.held.load(Ordering::Relaxed), 6);
        assert_eq!(first.take(&Bytes::from_static(b"1234")), Ok(()));
        drop(first);
        assert_eq!(limits.held.load(Ordering::Relaxed), 0);
    }
}

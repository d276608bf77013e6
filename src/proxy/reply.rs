//! What came back, on its way to the client. The chunks of an answer go through
//! [`Gateway::pass_body`]: if somebody needs them, they are shown to the tap; nothing else is kept.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderName, Method, StatusCode, Version, header};
use pingora::http::ResponseHeader;
use pingora::{Error, ErrorType, Result};
use pingora_proxy::Session;

use super::Gateway;
use super::context::RequestContext;
use super::failure::is_committed;
use super::outbound::REQUEST_ID;
use super::retry::{Decision, Failure};
use super::watchdog::Limit;
use crate::clock;
use crate::fleet::Outcome;
use crate::request::{Treatment, Wire};
use crate::response::Shape;
use crate::telemetry::Phase;

/// Headers of an answer that speak of the connection it came on.
const NOT_PASSED: [HeaderName; 4] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::UPGRADE,
];

/// How many replicas are asked for a stored response before its 404 is believed.
const ASKED_MAX: u32 = 16;

const EVENTS: &[u8] = b"text/event-stream";

impl Gateway {
    /// The head of an answer: taken, or the request goes to another replica.
    pub(super) fn judge_head(
        &self,
        session: &Session,
        response: &ResponseHeader,
        context: &mut RequestContext,
    ) -> Result<()> {
        if response.status.is_informational() && response.status != StatusCode::SWITCHING_PROTOCOLS
        {
            context.answer.interim = true;
            return Ok(());
        }
        let now = clock::now();
        context.times.first_byte = Some(now);
        // Asked here, as Pingora fits the head to the client afterwards.
        context.answer.unframed = is_unframed(response);
        let status = response.status.as_u16();
        let outcome = outcome_of(response);
        let elsewhere = status == 404 && is_kept_elsewhere(context);
        if outcome == Outcome::Answered && !elsewhere {
            // Told at its end, when it is known to have been a whole answer.
            context.attempt.iter().for_each(|attempt| attempt.lease.answering(now));
            return Ok(());
        }
        self.report(context, outcome, now);
        if !is_committed(session) && self.goes_on(context, status, elsewhere, now) {
            self.give_up_attempt(context);
            let mut error = Error::explain(ErrorType::HTTPStatus(status), "the replica declines");
            error.as_up();
            error.set_retry(true);
            return Err(error);
        }
        Ok(())
    }

    /// Whether another replica is asked instead of passing this answer on.
    fn goes_on(
        &self,
        context: &RequestContext,
        status: u16,
        elsewhere: bool,
        now: Instant,
    ) -> bool {
        let mut tried = context.tried.clone();
        tried.extend(context.attempt.iter().map(|attempt| attempt.lease.id().clone()));
        let Some(target) = &context.target else { return false };
        if !target.pool.any_untried(&tried, now) {
            return false;
        }
        (elsewhere && context.attempts < ASKED_MAX)
            || self.decide(context, Failure::Answered { status }, now) == Decision::Again
    }

    /// The head goes to the client: from here on nothing can be tried again.
    pub(super) fn pass_head(
        &self,
        session: &mut Session,
        response: &mut ResponseHeader,
        context: &mut RequestContext,
    ) -> Result<()> {
        let upgraded = response.status == StatusCode::SWITCHING_PROTOCOLS;
        if response.status.is_informational() && !upgraded {
            return Ok(());
        }
        context.body = None;
        context.room = None;
        context.series = context.attempt.as_ref().map(|one| Arc::clone(one.lease.metrics()));
        if !upgraded {
            strip_connection_headers(response);
        }
        response.insert_header(REQUEST_ID, context.id())?;
        if session.req_header().version == Version::HTTP_10 {
            // Pingora would send chunks to a client that cannot read them.
            if response.remove_header(&header::TRANSFER_ENCODING).is_some() {
                session.set_keepalive(None);
            }
        }
        if self.shared.draining() {
            session.set_keepalive(None);
        }
        let shape = shape_of(session, response, context);
        context.answer.status = shape.status;
        context.answer.shape = Some(shape);
        context.phase = if shape.streaming { Phase::SilentStream } else { Phase::Streaming };
        context.tap = context.state.consumers.tap(&shape, declared_length(response));
        let times = &context.state.options.timeouts;
        if upgraded || shape.bodyless || declared_length(response) == Some(0) {
            context.watch.detach();
        } else if !shape.streaming {
            context.watch.arm(Limit::BetweenBytes, clock::now(), times.between_bytes);
        }
        Ok(())
    }

    /// One chunk of the answer, and its end.
    ///
    /// # Errors
    /// The answer only seems to end: the watchdog ended the connection.
    pub(super) fn pass_body(
        &self,
        chunk: Option<&Bytes>,
        end_of_stream: bool,
        context: &mut RequestContext,
    ) -> Result<()> {
        if let Some(chunk) = chunk.filter(|chunk| !chunk.is_empty()) {
            self.see_chunk(chunk, context);
        }
        if end_of_stream {
            if context.watch.timed_out() {
                return Error::e_explain(ErrorType::ReadTimedout, "the answer was cut");
            }
            if context.watch.fired().is_some() || context.answer.is_cut() {
                let what = "the connection ended before the stream did";
                return Err(Error::explain(ErrorType::ConnectionClosed, what).into_up());
            }
            context.watch.detach();
        }
        Ok(())
    }

    fn see_chunk(&self, chunk: &Bytes, context: &mut RequestContext) {
        let now = clock::now();
        context.answer.bytes += chunk.len() as u64;
        let seen = context.tap.chunk(chunk);
        context.answer.end_said |= seen.ended;
        let times = &context.state.options.timeouts;
        let Some(attempt) = context.attempt.as_ref() else { return };
        attempt.lease.alive(now);
        if !context.answer.is_readable_stream() {
            context.phase = Phase::Streaming;
            context.watch.arm(Limit::BetweenBytes, now, times.between_bytes);
            return;
        }
        let metrics = attempt.lease.metrics();
        if seen.first_token {
            context.times.first_token = Some(now);
            context.phase = Phase::Streaming;
            metrics.first_token(now.saturating_duration_since(context.started));
        } else if let Some(last) = context.times.last_token {
            metrics.inter_token(now.saturating_duration_since(last), seen.token_events);
        } else {
            // A role, a comment, an empty delta: the prompt may still be in work.
            context.watch.arm(Limit::FirstByte, now, times.first_byte);
            return;
        }
        context.watch.arm(Limit::BetweenBytes, now, times.between_bytes);
        if seen.first_token || 0 < seen.token_events {
            context.times.last_token = Some(now);
        }
    }
}

/// A stored response lives on the replica that made it; another may say 404.
fn is_kept_elsewhere(context: &RequestContext) -> bool {
    context.api.is_some_and(|api| api.treatment == Treatment::Stateful)
}

fn outcome_of(response: &ResponseHeader) -> Outcome {
    match response.status.as_u16() {
        429 | 503 => Outcome::Backpressure { retry_after: retry_after(response) },
        500.. => Outcome::ServerError,
        _ => Outcome::Answered,
    }
}

/// `Retry-After` in seconds; the form with a date is not used between servers.
fn retry_after(response: &ResponseHeader) -> Option<Duration> {
    let value = response.headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    value.trim().parse().ok().map(Duration::from_secs)
}

fn strip_connection_headers(response: &mut ResponseHeader) {
    if let Some(named) = response.headers.get(header::CONNECTION).cloned() {
        for name in named.to_str().unwrap_or_default().split(',') {
            let name = name.trim();
            // `close` and `keep-alive` are words, not names; content-length must not go.
            if !name.is_empty() && !name.eq_ignore_ascii_case("content-length") {
                response.remove_header(name);
            }
        }
    }
    for name in &NOT_PASSED {
        response.remove_header(name);
    }
}

fn shape_of(session: &Session, response: &ResponseHeader, context: &RequestContext) -> Shape {
    let streaming = response.headers.get(header::CONTENT_TYPE).is_some_and(|value| {
        let kind = value.as_bytes().get(..EVENTS.len());
        kind.is_some_and(|kind| kind.eq_ignore_ascii_case(EVENTS))
    });
    let encoded = response
        .headers
        .get(header::CONTENT_ENCODING)
        .is_some_and(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"));
    let wire = match context.api {
        // A stored response told its usage when it was made.
        Some(api) if api.treatment == Treatment::Stateful => Wire::Other,
        Some(api) if !api.has_inference() => api.wire,
        _ => context.wire,
    };
    let bodyless = session.req_header().method == Method::HEAD
        || matches!(response.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    Shape { streaming, wire, status: response.status.as_u16(), encoded, bodyless }
}

/// Whether only the end of the connection tells where the body ends.
fn is_unframed(response: &ResponseHeader) -> bool {
    response.version != Version::HTTP_2
        && !response.headers.contains_key(header::TRANSFER_ENCODING)
        && !response.headers.contains_key(header::CONTENT_LENGTH)
}

fn declared_length(response: &ResponseHeader) -> Option<u64> {
    response.headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_named_by_connection_are_not_passed() {
        let mut response = ResponseHeader::build(200, None).unwrap();
        for (name, value) in [
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("content-length", "3"),
            ("x-kept", "1"),
        ] {
            response.append_header(name, value).unwrap();
        }
        strip_connection_headers(&mut response);
        let left: Vec<_> = response.headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(left, ["content-length", "x-kept"]);
    }

    #[test]
    fn a_status_is_judged_by_what_it_says_of_the_replica() {
        let outcome = |status| outcome_of(&ResponseHeader::build(status, None).unwrap());
        assert_eq!(outcome(200_u16), Outcome::Answered);
        assert_eq!(outcome(400), Outcome::Answered);
        assert_eq!(outcome(429), Outcome::Backpressure { retry_after: None });
        assert_eq!(outcome(503), Outcome::Backpressure { retry_after: None });
        assert_eq!(outcome(500), Outcome::ServerError);
    }

    #[test]
    fn retry_after_is_read_in_seconds() {
        let mut response = ResponseHeader::build(503, None).unwrap();
        response.insert_header(header::RETRY_AFTER, "7").unwrap();
        assert_eq!(retry_after(&response), Some(Duration::from_secs(7)));
    }
}

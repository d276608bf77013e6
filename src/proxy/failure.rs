//! What went wrong in an attempt, and what becomes of the request: again elsewhere, a refusal, or
//! the end of a stream that had begun.

use std::time::{Duration, Instant};

use pingora::{Error, ErrorSource, ErrorType, RetryType};
use pingora_proxy::Session;
use tracing::{debug, warn};

use super::Gateway;
use super::connect::{OUT_OF_SOCKETS, STILL_CONNECTING};
use super::context::RequestContext;
use super::peer::{Doubt, RETRY_AFTER};
use super::refusal::{ErrorShape, Refusal, broken_stream_event};
use super::retry::{self, Connection, Decision, Facts, Failure};
use super::watchdog::Limit;
use crate::clock;
use crate::fleet::Outcome;
use crate::telemetry::AttemptOutcome;

/// After the last event of a broken HTTP/2 stream: the reset that follows it overtakes data that
/// is still queued, so the connection is given a moment to send it.
const RESET_DELAY: Duration = Duration::from_millis(20);

impl Gateway {
    /// No connection: the slice is over, or it cannot be had.
    pub(super) fn connect_failed(
        &self,
        context: &mut RequestContext,
        mut error: Box<Error>,
    ) -> Box<Error> {
        let now = clock::now();
        let limit = context.state.options.timeouts.connect;
        if let Some(attempt) = context.attempt.as_mut() {
            attempt.connecting_still = error.etype() == &STILL_CONNECTING;
            if attempt.connecting_still && now.saturating_duration_since(attempt.began) < limit {
                error.set_retry(true);
                return error;
            }
        }
        if error.etype() == &OUT_OF_SOCKETS {
            warn!(error = %error, "no socket left to connect with; raise the limit of open files");
            self.give_up_attempt(context);
            context.refusal = Some(Refusal::NoRoom { retry_after: RETRY_AFTER });
            error.set_retry(false);
            return error;
        }
        debug!(error = %error, "no connection to the replica");
        self.report(context, Outcome::ConnectFailed, now);
        self.give_up_attempt(context);
        let again = self.decide(context, Failure::Connect, now) == Decision::Again;
        if !again {
            context.refusal = Some(Refusal::Unreachable);
        }
        error.set_retry(again);
        error
    }

    /// An attempt broke off after its connection stood.
    pub(super) fn attempt_failed(
        &self,
        session: &Session,
        context: &mut RequestContext,
        mut error: Box<Error>,
        reused: bool,
    ) -> Box<Error> {
        let decided = error.retry == RetryType::Decided(true);
        if decided && matches!(error.etype(), ErrorType::HTTPStatus(_)) {
            // When the head was judged.
            return error;
        }
        error.set_retry(false);
        let now = clock::now();
        if context.refusal.is_some() {
            self.give_up_attempt(context);
            return error;
        }
        if error.esource() == &ErrorSource::Downstream {
            // Whatever the client did, it says nothing of the replica.
            if !is_client_gone(&error) && !is_committed(session) {
                context.refusal = Some(Refusal::BadRequest);
            }
            let ended = context.answer.has_ended();
            let outcome = if ended { Outcome::Answered } else { Outcome::ClientLeft };
            self.report(context, outcome, now);
            self.give_up_attempt(context);
            return error;
        }
        let committed = is_committed(session);
        let (outcome, failure) = classify(&error, context, committed, reused, now);
        debug!(error = %error, ?failure, "attempt failed");
        let doubt = context.attempt.as_ref().map(Doubt::of);
        if is_stale(failure, context.state.options.retry.reused_reset_within) {
            // The replica closed an idle connection, which says nothing of it to the breaker. Or it
            // died, and more such connections wait in the pool: another one is the safer choice,
            // if there is one.
            self.leave_for_others(context, now);
        } else {
            self.report(context, outcome, now);
            self.give_up_attempt(context);
        }
        let decision = if committed {
            Decision::GiveUp(retry::Reason::Committed)
        } else {
            self.decide(context, failure, now)
        };
        match decision {
            Decision::Again => error.set_retry(true),
            Decision::AgainIfGone => {
                context.doubt = doubt;
                error.set_retry(true);
            }
            Decision::GiveUp(_) if !committed => {
                context.refusal = Some(refusal_for(&error, failure));
            }
            Decision::GiveUp(_) => {}
        }
        error
    }

    /// The request is over and not well: tells the client what can be told. The code is Pingora's
    /// way to hear the status; 0 means that there is nobody to tell.
    pub(super) async fn tell_failure(
        &self,
        session: &mut Session,
        error: &Error,
        context: &mut RequestContext,
    ) -> u16 {
        session.set_keepalive(None);
        let shape = context.error_shape();
        if is_committed(session) {
            if is_client_gone(error) {
                return 0;
            }
            let timed_out =
                context.watch.timed_out() || matches!(error.etype(), ErrorType::ReadTimedout);
            return end_broken_stream(session, context, shape, timed_out).await;
        }
        if context.refusal.is_none() && is_client_gone(error) {
            return 0;
        }
        let refusal = context.refusal.get_or_insert_with(|| refusal_of(error)).clone();
        match refusal.send(session, shape, context.id()).await {
            Ok(bytes) => {
                context.answer.status = refusal.status();
                context.answer.bytes = bytes;
            }
            Err(error) => debug!(error = %error, "the refusal did not reach the client"),
        }
        refusal.status()
    }

    /// Tells the breaker of the attempt's replica, once, and counts the attempt.
    pub(super) fn report(&self, context: &mut RequestContext, outcome: Outcome, now: Instant) {
        let Some(attempt) = context.attempt.as_mut().filter(|attempt| !attempt.reported) else {
            return;
        };
        attempt.reported = true;
        attempt.lease.report(outcome, now, fastrand::u64(..));
        attempt.lease.metrics().attempt(label(outcome));
    }

    /// Leaves the replica for this request: it will not be chosen again.
    pub(super) fn give_up_attempt(&self, context: &mut RequestContext) {
        if let Some(attempt) = &context.attempt {
            context.tried.push(attempt.lease.id().clone());
        }
        self.drop_attempt(context);
    }

    /// Leaves the replica for this request if another one could serve it.
    fn leave_for_others(&self, context: &mut RequestContext, now: Instant) {
        let mut tried = context.tried.clone();
        tried.extend(context.attempt.iter().map(|attempt| attempt.lease.id().clone()));
        let others = context.target.as_ref();
        if others.is_some_and(|target| target.pool.any_untried(&tried, now)) {
            context.tried = tried;
        }
        if let Some(attempt) = &context.attempt {
            attempt.lease.metrics().attempt(AttemptOutcome::Stale);
        }
        self.drop_attempt(context);
    }

    fn drop_attempt(&self, context: &mut RequestContext) {
        context.watch.detach();
        context.attempt = None;
    }

    /// Whether the request, of which nothing was passed on yet, is tried again after this failure
    /// of an attempt that was given up.
    pub(super) fn decide(
        &self,
        context: &RequestContext,
        failure: Failure,
        now: Instant,
    ) -> Decision {
        let untried = context
            .target
            .as_ref()
            .is_some_and(|target| target.pool.any_untried(&context.tried, now));
        let facts = Facts {
            attempts: context.attempts,
            untried: usize::from(untried),
            committed: false,
            replayable: !context.watch.timed_out(),
        };
        let state = &context.state;
        let wanted = retry::decide(failure, &facts, &state.options.retry);
        let decision = state.retry_budget.spend(wanted, now);
        match decision {
            Decision::GiveUp(reason) => debug!(%reason, "no further attempt"),
            Decision::Again | Decision::AgainIfGone => {
                self.shared.metrics.retry(word(failure));
            }
        }
        decision
    }
}

/// The word of a failure in the metrics.
fn word(failure: Failure) -> &'static str {
    match failure {
        Failure::Connect => "connect_failure",
        Failure::Unsent => "unsent",
        Failure::Reset { connection: Connection::Reused, .. } => "reused_reset",
        Failure::Reset { connection: Connection::Fresh, .. } => "reset",
        Failure::Answered { status: 503 } => "unavailable",
        Failure::Answered { status: 429 } => "too_many_requests",
        Failure::Answered { .. } => "answered",
        Failure::TimedOut => "timed_out",
        Failure::MidBody => "mid_body",
    }
}

/// A kept connection that turned out to be closed says nothing about the replica.
fn is_stale(failure: Failure, within: Duration) -> bool {
    matches!(failure, Failure::Reset { connection: Connection::Reused, after } if after < within)
}

fn label(outcome: Outcome) -> AttemptOutcome {
    match outcome {
        Outcome::Answered => AttemptOutcome::Answered,
        Outcome::Backpressure { .. } => AttemptOutcome::Backpressure,
        Outcome::ServerError => AttemptOutcome::ServerError,
        Outcome::ConnectFailed => AttemptOutcome::ConnectFailed,
        Outcome::Reset => AttemptOutcome::Reset,
        Outcome::TimedOut => AttemptOutcome::TimedOut,
        Outcome::BrokenStream => AttemptOutcome::BrokenStream,
        Outcome::ClientLeft => AttemptOutcome::ClientLeft,
    }
}

/// Has a final head gone to the client?
pub(super) fn is_committed(session: &Session) -> bool {
    session
        .response_written()
        .is_some_and(|head| !head.status.is_informational() || head.status == 101)
}

/// The client is gone, or does not take what it asked for.
pub(super) fn is_client_gone(error: &Error) -> bool {
    error.esource() == &ErrorSource::Downstream
        && matches!(
            error.etype(),
            ErrorType::ReadError
                | ErrorType::WriteError
                | ErrorType::ConnectionClosed
                | ErrorType::H2Error
                | ErrorType::WriteTimedout
                | ErrorType::ReadTimedout
        )
}

fn classify(
    error: &Error,
    context: &RequestContext,
    committed: bool,
    reused: bool,
    now: Instant,
) -> (Outcome, Failure) {
    let sent = context.times.connected.unwrap_or(now);
    let after = now.saturating_duration_since(sent);
    match context.watch.fired() {
        // It says nothing of the replica, which may have had the request for a moment only.
        Some(Limit::Total) => return (Outcome::ClientLeft, Failure::TimedOut),
        Some(Limit::FirstByte | Limit::BetweenBytes) => {
            return (Outcome::TimedOut, Failure::TimedOut);
        }
        Some(Limit::Gone) if !committed => {
            return (Outcome::Reset, Failure::Reset { connection: Connection::Fresh, after });
        }
        Some(Limit::Gone) | None => {}
    }
    if matches!(error.etype(), ErrorType::ReadTimedout | ErrorType::WriteTimedout) {
        return (Outcome::TimedOut, Failure::TimedOut);
    }
    if committed {
        return (Outcome::BrokenStream, Failure::MidBody);
    }
    if matches!(error.etype(), ErrorType::InvalidHTTPHeader | ErrorType::H1Error) {
        return (Outcome::Reset, Failure::MidBody);
    }
    if error.etype() == &ErrorType::WriteError && !reused {
        return (Outcome::Reset, Failure::Unsent);
    }
    // Bytes of an answer, be it an interim one, show that the replica had read the request.
    let stale = reused && !context.answer.interim;
    let connection = if stale { Connection::Reused } else { Connection::Fresh };
    (Outcome::Reset, Failure::Reset { connection, after })
}

fn refusal_for(error: &Error, failure: Failure) -> Refusal {
    match failure {
        Failure::TimedOut => Refusal::TimedOut,
        _ if error.etype() == &ErrorType::InvalidHTTPHeader => Refusal::BadAnswer,
        _ => Refusal::ReplicaFailed,
    }
}

fn refusal_of(error: &Error) -> Refusal {
    match (error.esource(), error.etype()) {
        (ErrorSource::Downstream, _) => Refusal::BadRequest,
        (_, ErrorType::HTTPStatus(status)) if (400..500).contains(status) => Refusal::BadRequest,
        (ErrorSource::Upstream, _) => Refusal::ReplicaFailed,
        _ => Refusal::Internal,
    }
}

/// Ends a stream that the engine left unfinished: an event that says so, and no proper end.
async fn end_broken_stream(
    session: &mut Session,
    context: &mut RequestContext,
    shape: ErrorShape,
    timed_out: bool,
) -> u16 {
    if context.answer.is_stream() {
        let event = broken_stream_event(shape, timed_out);
        if session.write_response_body(Some(event), false).await.is_ok()
            && session.downstream_session.is_http2()
        {
            tokio::time::sleep(RESET_DELAY).await;
        }
    }
    502
}

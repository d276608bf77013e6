//! What went wrong in an attempt, and what becomes of the request: again elsewhere, a refusal, or
//! the end of a stream that had begun.

use std::time::{Duration, Instant};

use pingora::{Error, ErrorSource, ErrorType};
use pingora_proxy::Session;
use tracing::debug;

use super::Gateway;
use super::connect::STILL_CONNECTING;
use super::context::{Phase, RequestContext};
use super::refusal::{ErrorShape, Refusal, broken_stream_event};
use super::retry::{self, Decision, Facts, Failure};
use crate::clock;
use crate::fleet::Outcome;

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
            let in_time = now.saturating_duration_since(attempt.began) < limit;
            if error.etype() == &STILL_CONNECTING && in_time {
                attempt.connecting_still = true;
                error.set_retry(true);
                return error;
            }
        }
        debug!(error = %error, "no connection to the replica");
        self.report(context, Outcome::ConnectFailed, now);
        self.give_up_attempt(context);
        let decision = self.decide_uncommitted(context, Failure::ConnectFailed, now);
        if decision == Decision::Again {
            error.set_retry(true);
        } else {
            context.refusal = Some(Refusal::Unreachable);
            error.set_retry(false);
        }
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
        if error.retry.retry() && matches!(error.etype(), ErrorType::HTTPStatus(_)) {
            // Decided when the head was judged.
            return error;
        }
        error.set_retry(false);
        let now = clock::now();
        if context.refusal.is_some() {
            self.give_up_attempt(context);
            return error;
        }
        if is_client_gone(&error) {
            self.report(context, Outcome::ClientLeft, now);
            self.give_up_attempt(context);
            return error;
        }
        let committed = is_committed(session);
        let (outcome, failure) = classify(&error, context, committed, reused);
        debug!(error = %error, ?failure, "attempt failed");
        let address = context.attempt.as_ref().map(|attempt| attempt.lease.address());
        if failure != Failure::ReusedReset {
            context.report_again(outcome);
        }
        self.report(context, outcome, now);
        let decision = self.decide(session, context, failure, now);
        if failure == Failure::ReusedReset && decision == Decision::Again {
            // The replica closed an idle connection; it is as good as the others.
            self.drop_attempt(context);
        } else {
            self.give_up_attempt(context);
        }
        match decision {
            Decision::Again => error.set_retry(true),
            Decision::AgainIfGone => {
                context.doubt = address;
                error.set_retry(true);
            }
            Decision::GiveUp(_) if !committed => {
                context.refusal = Some(refusal_for(&error, outcome));
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
            return end_broken_stream(session, context, shape).await;
        }
        if context.refusal.is_none() && is_client_gone(error) {
            return 0;
        }
        let refusal = context.refusal.get_or_insert_with(|| refusal_of(error)).clone();
        let id = Some(context.id.as_str()).filter(|id| !id.is_empty());
        match refusal.send(session, shape, id).await {
            Ok(()) => context.answer.status = refusal.status(),
            Err(error) => debug!(error = %error, "the refusal did not reach the client"),
        }
        refusal.status()
    }

    /// Tells the breaker of the attempt's replica, once.
    pub(super) fn report(&self, context: &mut RequestContext, outcome: Outcome, now: Instant) {
        let Some(attempt) = context.attempt.as_mut().filter(|attempt| !attempt.reported) else {
            return;
        };
        attempt.reported = true;
        attempt.lease.report(outcome, now, fastrand::u64(..));
        if let Some(metrics) = &context.replica_metrics {
            metrics.attempt(outcome);
        }
    }

    /// Leaves the replica for this request: it will not be chosen again.
    pub(super) fn give_up_attempt(&self, context: &mut RequestContext) {
        if let Some(attempt) = &context.attempt {
            context.tried.push(attempt.lease.id().clone());
        }
        self.drop_attempt(context);
    }

    fn drop_attempt(&self, context: &mut RequestContext) {
        context.watch.detach();
        context.attempt = None;
    }

    /// Whether the request is tried again after this failure.
    pub(super) fn decide(
        &self,
        session: &Session,
        context: &RequestContext,
        failure: Failure,
        now: Instant,
    ) -> Decision {
        if is_committed(session) {
            return Decision::GiveUp(retry::Reason::Committed);
        }
        self.decide_uncommitted(context, failure, now)
    }

    fn decide_uncommitted(
        &self,
        context: &RequestContext,
        failure: Failure,
        now: Instant,
    ) -> Decision {
        let others = context.target.as_ref().is_some_and(|target| {
            let current = context.attempt.as_ref().map(|attempt| attempt.lease.id());
            let mut tried = context.tried.clone();
            tried.extend(current.cloned());
            target.pool.any_untried(&tried, now)
        });
        let facts = Facts {
            committed: false,
            attempts: context.attempts,
            replayable: context.watch.fired().is_none(),
            untried_left: others,
        };
        let options = &context.state.options.retry;
        let decision = retry::decide(failure, &facts, options);
        if decision == Decision::GiveUp(retry::Reason::NotRetried) {
            return decision;
        }
        if matches!(decision, Decision::GiveUp(_)) {
            return decision;
        }
        if !self.shared.retry_budget.lock().withdraw(&options.budget, now) {
            self.shared.metrics.retry_refused();
            return Decision::GiveUp(retry::Reason::BudgetSpent);
        }
        self.shared.metrics.retried(failure.word());
        decision
    }
}

impl RequestContext {
    /// A stream that breaks after its head was counted as answered is told to the breaker, too.
    fn report_again(&mut self, outcome: Outcome) {
        if outcome == Outcome::BrokenStream || outcome == Outcome::TimedOut {
            if let Some(attempt) = self.attempt.as_mut() {
                attempt.reported = false;
            }
        }
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
) -> (Outcome, Failure) {
    let timed_out = context.watch.fired().is_some()
        || matches!(error.etype(), ErrorType::ReadTimedout | ErrorType::WriteTimedout);
    if timed_out {
        return (Outcome::TimedOut, Failure::TimedOut);
    }
    if committed {
        return (Outcome::BrokenStream, Failure::BrokenStream);
    }
    if matches!(error.etype(), ErrorType::InvalidHTTPHeader | ErrorType::H1Error) {
        return (Outcome::Reset, Failure::BadAnswer);
    }
    if reused && context.times.first_byte.is_none() {
        return (Outcome::Reset, Failure::ReusedReset);
    }
    (Outcome::Reset, Failure::Reset)
}

fn refusal_for(error: &Error, outcome: Outcome) -> Refusal {
    match outcome {
        Outcome::TimedOut => Refusal::TimedOut,
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
) -> u16 {
    if context.answer.events && context.phase != Phase::Uploading {
        let event = broken_stream_event(shape, context.watch.fired().is_some());
        if session.write_response_body(Some(event), false).await.is_ok()
            && session.downstream_session.is_http2()
        {
            tokio::time::sleep(RESET_DELAY).await;
        }
    }
    502
}

//! The end of every request, whatever ended it: give back, count, hand on, one line.

use std::time::{Duration, Instant};

use pingora::Error;
use pingora_proxy::Session;

use super::Gateway;
use super::context::{RequestContext, Times};
use super::failure::{is_client_gone, is_committed};
use super::refusal::Refusal;
use crate::clock;
use crate::fleet::Outcome;
use crate::names::RequestId;
use crate::response::{Ending, Exchange, Finished};
use crate::telemetry::{AccessLine, Ended, Timings, Usage};

impl Gateway {
    /// Called once for each request. Nothing here waits: the connection is not free before.
    pub(super) fn finish(
        &self,
        session: &Session,
        context: &mut RequestContext,
        error: Option<&Error>,
    ) {
        let now = clock::now();
        context.watch.detach();
        let finished = std::mem::take(&mut context.tap).finish();
        let ended = how_it_ended(session, context, &finished, error);
        if ended == Ended::Complete {
            self.report(context, Outcome::Answered, now);
        } else if ended == Ended::EngineBroke {
            self.report(context, Outcome::BrokenStream, now);
        }
        self.count(context, &finished, ended, now);
        self.tell(session, context, &finished, ended, now);
        self.hand_on(context, finished, ended, now);
        context.attempt = None;
    }

    fn count(
        &self,
        context: &RequestContext,
        finished: &Finished,
        ended: Ended,
        now: Instant,
    ) {
        let metrics = &self.shared.metrics;
        let api = context.api.map_or("unknown", |api| api.name);
        let model = match &context.target {
            Some(target) => target.pool.metrics(),
            None => metrics.unknown_model(),
        };
        model.request(api, context.answer.status);
        model.ended(ended, now.saturating_duration_since(context.started));
        metrics.request_bytes(context.body_bytes);
        metrics.response_bytes(context.answer.bytes);
        if let Some(refusal) = &context.refusal {
            match ended {
                Ended::Refused => metrics.refusal(refusal.reason()),
                _ => metrics.error(refusal.reason()),
            }
        } else if ended == Ended::EngineBroke {
            metrics.error("broken_stream");
        } else if ended == Ended::TimedOut {
            metrics.error("timed_out");
        }
        if ended == Ended::ClientLeft {
            metrics.cancel(context.phase);
        }
        if let Some(attempt) = &context.attempt {
            if let Some(first) = context.times.first_byte {
                let series = attempt.lease.metrics();
                series.first_byte(first.saturating_duration_since(context.started));
            }
            if let Some(usage) = &finished.usage {
                attempt.lease.metrics().tokens(usage);
            }
        }
        context.state.retry_budget.earn();
    }

    fn tell(
        &self,
        session: &Session,
        context: &RequestContext,
        finished: &Finished,
        ended: Ended,
        now: Instant,
    ) {
        if !self.shared.access_log.is_on() {
            return;
        }
        let policy = if 0 < context.attempts { context.state.policy.name() } else { "" };
        let left = (ended == Ended::ClientLeft).then_some(context.phase);
        self.shared.access_log.tell(AccessLine {
            at: clock::date(),
            id: RequestId::new(&context.id),
            client: session.client_addr().and_then(|one| one.as_inet()).map(|one| one.ip()),
            method: session.req_header().method.clone(),
            api: context.api.map_or("unknown", |api| api.name),
            model: context.target.as_ref().map(|target| target.model.clone()),
            tenant: None,
            replica: context.replica.clone(),
            policy,
            status: context.answer.status,
            streaming: context.answer.events,
            attempts: context.attempts,
            timings: timings(context, now),
            usage: finished.usage.unwrap_or_default(),
            request_bytes: context.body_bytes,
            response_bytes: context.answer.bytes,
            ended,
            phase: left,
            reason: context.refusal.as_ref().map_or("", Refusal::reason),
        });
    }

    fn hand_on(
        &self,
        context: &RequestContext,
        finished: Finished,
        ended: Ended,
        now: Instant,
    ) {
        let consumers = &context.state.consumers;
        if !consumers.wants_exchanges() {
            return;
        }
        let exchange = Exchange {
            id: RequestId::new(&context.id),
            api: context.api.map_or("unknown", |api| api.name),
            model: context.target.as_ref().map(|target| target.model.clone()),
            replica: context.replica.clone(),
            tenant: None,
            status: context.answer.status,
            streaming: context.answer.events,
            timings: timings(context, now),
            usage: finished.usage.unwrap_or_default(),
            ending: Ending::of(ended, context.phase),
            attempts: context.attempts,
        };
        consumers.consume(exchange, finished);
    }
}

fn timings(context: &RequestContext, now: Instant) -> Timings {
    let since = |at: Option<Instant>| Some(at?.saturating_duration_since(context.started));
    let Times { body_read, chosen, connected, first_byte, first_token, .. } = &context.times;
    let between = |from: &Option<Instant>, to: &Option<Instant>| -> Option<Duration> {
        Some((*to)?.saturating_duration_since((*from)?))
    };
    Timings {
        queued: between(body_read, chosen),
        connect: between(chosen, connected),
        first_byte: since(*first_byte),
        first_token: since(*first_token),
        total: now.saturating_duration_since(context.started),
    }
}

fn how_it_ended(
    session: &Session,
    context: &RequestContext,
    finished: &Finished,
    error: Option<&Error>,
) -> Ended {
    let fired = context.watch.fired().is_some();
    match (&context.refusal, error) {
        (Some(Refusal::TimedOut), _) => Ended::TimedOut,
        (Some(refusal), _) if refusal.is_failure() => Ended::Failed,
        (Some(_), _) => Ended::Refused,
        (None, None) if finished.broke => Ended::EngineBroke,
        (None, None) => Ended::Complete,
        (None, Some(_)) if fired => Ended::TimedOut,
        (None, Some(error)) if is_client_gone(error) => Ended::ClientLeft,
        (None, Some(_)) if is_committed(session) => Ended::EngineBroke,
        (None, Some(_)) => Ended::Failed,
    }
}

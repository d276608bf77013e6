//! The end of every request, whatever ended it: give back, count, hand on, one line.

use std::time::{Duration, Instant};

use pingora::{Error, ErrorSource, ErrorType};
use pingora_proxy::Session;

use super::Gateway;
use super::context::{RequestContext, Times};
use super::failure::{is_client_gone, is_committed};
use super::refusal::Refusal;
use crate::clock;
use crate::fleet::Outcome;
use crate::names::RequestId;
use crate::request::Wire;
use crate::response::{Ending, Exchange, Finished, Shape};
use crate::telemetry::{AccessLine, Ended, Timings};

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
        let ending = how_it_ended(session, context, &finished, error);
        match (ending, finished.disguise) {
            (Ending::Complete, _) => self.report(context, Outcome::Answered, now),
            // The engine said so itself, and it may have been the request's own fault.
            (Ending::EngineBroke, Some(_)) => self.report(context, Outcome::ServerError, now),
            (Ending::EngineBroke, None) => self.report(context, Outcome::BrokenStream, now),
            _ => {}
        }
        let mut exchange = exchange(context, ending, now);
        context.state.consumers.deliver(&mut exchange, finished);
        self.count(context, &exchange, now);
        self.tell(session, context, exchange);
        context.attempt = None;
    }

    fn count(&self, context: &RequestContext, exchange: &Exchange, now: Instant) {
        let metrics = &self.shared.metrics;
        let model = match &context.target {
            Some(target) => target.pool.metrics(),
            None => metrics.unknown_model(),
        };
        let ended = exchange.ending.ended();
        model.request(exchange.api, context.answer.status);
        if let Some(queued) = exchange.timings.queued {
            model.queued(queued);
        }
        model.ended(ended, now.saturating_duration_since(context.started));
        metrics.request_bytes(exchange.request_bytes);
        metrics.response_bytes(exchange.response_bytes);
        match (&context.refusal, ended) {
            (Some(refusal), Ended::Refused) => metrics.refusal(refusal.reason()),
            (Some(refusal), _) => metrics.error(refusal.reason()),
            (None, Ended::EngineBroke) => metrics.error("engine_broke"),
            (None, Ended::TimedOut) => metrics.error("timed_out"),
            (None, _) => {}
        }
        if let Some(phase) = exchange.ending.phase() {
            metrics.cancel(phase);
        }
        if let Some(series) = &context.series {
            if let Some(first) = exchange.timings.first_byte {
                series.first_byte(first);
            }
            if let Some(usage) = &exchange.usage {
                series.tokens(usage);
            }
        }
        context.state.retry_budget.earn();
    }

    fn tell(&self, session: &Session, context: &RequestContext, exchange: Exchange) {
        if !self.shared.access_log.is_on() {
            return;
        }
        self.shared.access_log.tell(AccessLine {
            at: clock::date(),
            id: exchange.id,
            client: session.client_addr().and_then(|one| one.as_inet()).map(|one| one.ip()),
            method: session.req_header().method.clone(),
            api: exchange.api,
            model: exchange.model,
            tenant: exchange.tenant,
            replica: exchange.replica,
            policy: if 0 < context.attempts { context.state.policy.name() } else { "" },
            status: context.answer.status,
            streaming: exchange.shape.streaming,
            attempts: exchange.attempts,
            timings: exchange.timings,
            usage: exchange.usage.unwrap_or_default(),
            request_bytes: exchange.request_bytes,
            response_bytes: exchange.response_bytes,
            ended: exchange.ending.ended(),
            phase: exchange.ending.phase(),
            reason: context.refusal.as_ref().map_or("", Refusal::reason),
        });
    }
}

fn exchange(context: &mut RequestContext, ending: Ending, now: Instant) -> Exchange {
    let shape = context.answer.shape.unwrap_or(Shape {
        wire: context.api.map_or(Wire::Other, |api| api.wire),
        status: context.answer.status,
        streaming: false,
        encoded: false,
        bodyless: false,
    });
    Exchange {
        id: context.id.take().unwrap_or_else(|| RequestId::new("")),
        api: context.api.map_or("unknown", |api| api.name),
        model: context.target.as_ref().map(|target| target.model.clone()),
        replica: context.replica.take(),
        tenant: None,
        shape,
        attempts: context.attempts,
        timings: timings(context, now),
        usage: None,
        request_bytes: context.body_bytes,
        response_bytes: context.answer.bytes,
        ending,
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
) -> Ending {
    let timed_out = context.watch.timed_out()
        || error.is_some_and(|error| {
            error.esource() == &ErrorSource::Upstream && error.etype() == &ErrorType::ReadTimedout
        });
    match (&context.refusal, error) {
        (Some(Refusal::TimedOut), _) => Ending::TimedOut,
        (Some(refusal), _) if refusal.is_failure() => Ending::Failed,
        (Some(_), _) => Ending::Refused,
        (None, None) if finished.disguise.is_some() => Ending::EngineBroke,
        (None, None) => Ending::Complete,
        (None, Some(_)) if timed_out => Ending::TimedOut,
        // Many clients close at the last event and do not wait for the end of the body.
        (None, Some(error)) if is_client_gone(error) && context.answer.has_ended() => {
            if finished.disguise.is_some() { Ending::EngineBroke } else { Ending::Complete }
        }
        (None, Some(error)) if is_client_gone(error) => Ending::ClientLeft { phase: context.phase },
        (None, Some(_)) if is_committed(session) => Ending::EngineBroke,
        (None, Some(_)) => Ending::Failed,
    }
}

//! One request from its head to its answer: reads the body, applies faults, finds the route.
//! To add a route: see `routes.rs`, then an arm in `plain`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::answer::{Answer, TEXT};
use super::connection::{Connection, Stop};
use super::faults::{Early, End, Faults};
use super::head::Head;
use super::http::Shared;
use super::job::{Desk, Wire};
use super::log::{Ended, Record, Recording};
use super::options::Mode;
use super::routes::{self, ROUTES, Route};
use super::stream::Reply;
use super::{admin, audio, echo, generate, instant, pooling};
use crate::clock;

/// A request whose body was read.
pub(super) struct Call<'a> {
    pub(super) shared: &'a Shared,
    pub(super) head: &'a Head,
    pub(super) body: &'a Bytes,
    pub(super) faults: &'a Faults,
    pub(super) route: Route,
    /// Seconds since 1970.
    pub(super) now: u64,
}

impl Call<'_> {
    /// Does something with a view over what reading the body's JSON depends on.
    pub(super) fn at_desk<T>(&self, work: impl FnOnce(&Desk<'_>) -> T) -> T {
        let models = Arc::clone(&self.shared.models.read());
        work(&Desk {
            options: &self.shared.options,
            models: &models.names,
            faults: self.faults,
            request_id: self.request_id(),
            now: self.now,
        })
    }

    /// `X-Request-Id`, else a fresh one.
    pub(super) fn request_id(&self) -> String {
        match self.head.header("x-request-id") {
            Some(id) => id.to_owned(),
            None => format!("{:016x}", self.shared.fresh_id()),
        }
    }
}

/// Answers one request; whether the connection goes on.
pub(super) async fn exchange(
    connection: &mut Connection,
    shared: &Arc<Shared>,
    head: Head,
) -> Result<bool, Stop> {
    let row = routes::find(head.path());
    shared.count(row);
    let route = ROUTES.get(row).map_or(Route::Unknown, |row| row.route);
    let recording = shared.log.begin(|| Record {
        target: head.target().to_owned(),
        request_id: head.header("x-request-id").map(str::to_owned),
        connection: connection.id,
        started_at: clock::now(),
        body_bytes: 0,
        status: 0,
        ended: None,
        ended_at: None,
    });
    let quick = shared.options.mode == Mode::Instant
        && matches!(route, Route::Chat | Route::Completions)
        && head.method() == "POST"
        && !head.simulated
        && head.minor == 1
        && shared.options.api_key.is_none()
        && !shared.knobs.active();
    let outcome = if quick {
        quickly(connection, shared, &head, &recording).await
    } else {
        carefully(connection, shared, &head, (route, &recording)).await
    };
    recording.end(match outcome {
        Ok(_) => Ended::Finished,
        Err(Stop::PeerLeft) => Ended::PeerLeft,
        Err(Stop::Cut | Stop::Malformed) => Ended::Cut,
    });
    outcome
}

async fn quickly(
    connection: &mut Connection,
    shared: &Shared,
    head: &Head,
    recording: &Recording,
) -> Result<bool, Stop> {
    let body = read_body(connection, shared, head, (None, recording)).await?;
    recording.status(200);
    instant::answer(connection, shared, head, &body).await
}

async fn carefully(
    connection: &mut Connection,
    shared: &Shared,
    head: &Head,
    (route, recording): (Route, &Recording),
) -> Result<bool, Stop> {
    let faults = shared.knobs.of_request(head.path(), head.header("x-sim-fault"));
    let (faults, misspelt) = match faults {
        Ok(faults) => (faults, None),
        Err(text) => (Arc::default(), Some(Answer::error(400, "Bad Request", None, &text))),
    };
    connection.split = faults.split;
    let early = faults.early;
    let no_body = Bytes::new();
    let now = shared.seconds();
    let mut call = Call { shared, head, body: &no_body, faults: &faults, route, now };
    if early.is_some() {
        let keep = respond_early(connection, &call, recording).await?;
        if early == Some(Early::Close) {
            return Ok(false);
        }
        read_body(connection, shared, head, (None, recording)).await?;
        return Ok(keep);
    }
    let body = read_body(connection, shared, head, (faults.slow_read, recording)).await?;
    call.body = &body;
    if faults.hints {
        connection.outbox.extend_from_slice(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n");
        connection.flush().await?;
    }
    if faults.blackhole {
        connection.left().await;
        return Err(Stop::PeerLeft);
    }
    if let Some(how) = faults.no_answer {
        return Err(connection.end(how).await);
    }
    connection.pause(faults.head_delay).await?;
    let told = misspelt.or_else(|| told_status(&faults));
    let keep = match told {
        Some(answer) => finish(connection, &call, &answer, recording).await?,
        None => respond(connection, &call, recording).await?,
    };
    match faults.close_after {
        Some(how) => Err(connection.end(how).await),
        None => Ok(keep),
    }
}

async fn respond_early(
    connection: &mut Connection,
    call: &Call<'_>,
    recording: &Recording,
) -> Result<bool, Stop> {
    let refused = || Answer::error(413, "BadRequestError", None, "Request body too large.");
    let answer = told_status(call.faults).unwrap_or_else(refused);
    finish(connection, call, &answer, recording).await
}

fn told_status(faults: &Faults) -> Option<Answer> {
    let status = faults.status?;
    Some(match &faults.body {
        Some(body) if body.starts_with('{') => {
            Answer::new(status, super::answer::JSON, body.clone())
        }
        Some(body) => Answer::new(status, TEXT, body.clone()),
        None if status == 503 => Answer::busy(),
        None if status >= 400 => {
            Answer::error(status, "SimulatedError", None, "This was asked for by a fault.")
        }
        None => Answer { status, ..Answer::empty() },
    })
}

async fn read_body(
    connection: &mut Connection,
    shared: &Shared,
    head: &Head,
    (slow, recording): (Option<(u32, std::time::Duration)>, &Recording),
) -> Result<Bytes, Stop> {
    if head.expects_continue {
        connection.outbox.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
        connection.flush().await?;
    }
    let bytes_max = shared.options.body_bytes_max.as_u64();
    let mut seen = 0;
    let body = connection.body(head.length, bytes_max, slow, &mut seen).await;
    recording.body(seen);
    body
}

/// A plain answer to a call.
pub(super) async fn finish(
    connection: &mut Connection,
    call: &Call<'_>,
    answer: &Answer,
    recording: &Recording,
) -> Result<bool, Stop> {
    recording.status(answer.status);
    let date = call.shared.date(call.now);
    reply(call, &date).whole(connection, answer).await
}

/// What all answers to a call have in common.
pub(super) fn reply<'c>(call: &'c Call<'_>, date: &'c str) -> Reply<'c> {
    let id = call.shared.options.request_id_headers.then(|| call.request_id());
    Reply {
        faults: call.faults,
        date,
        keep_alive: call.head.keep_alive,
        knows_chunks: call.head.minor == 1,
        head_only: call.head.method() == "HEAD",
        request_id: id,
    }
}

async fn respond(
    connection: &mut Connection,
    call: &Call<'_>,
    recording: &Recording,
) -> Result<bool, Stop> {
    if call.route == Route::Echo || call.head.header("x-sim-echo").is_some() {
        let answer = echo::answer(call, connection.id);
        return finish(connection, call, &answer, recording).await;
    }
    if let Some(answer) = barred(call) {
        return finish(connection, call, &answer, recording).await;
    }
    let wire = match call.route {
        Route::Chat => Wire::Chat,
        Route::Completions => Wire::Completion,
        Route::Responses => Wire::Responses,
        Route::Messages => Wire::Messages,
        _ => {
            let answer = connection.unless_left(plain(call)).await?;
            if call.route == Route::Audio && answer.content_type == Some(audio::EVENTS) {
                recording.status(200);
                return audio::stream(connection, call, &answer).await;
            }
            return finish(connection, call, &answer, recording).await;
        }
    };
    generate::answer(connection, call, wire, recording).await
}

/// Refusals that come before any route is looked at: no such path, wrong method, no key.
fn barred(call: &Call<'_>) -> Option<Answer> {
    let method = call.head.method();
    if method == "OPTIONS" && call.head.header("access-control-request-method").is_some() {
        return Some(Answer::new(400, TEXT, "Disallowed CORS origin"));
    }
    if let Some(key) = &call.shared.options.api_key
        && call.head.path().starts_with("/v1")
    {
        let given = call.head.header("authorization").and_then(|text| text.split_once(' '));
        let bearer = given.filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"));
        let given = bearer.map(|(_, key)| key).or_else(|| call.head.header("x-api-key"));
        if given != Some(key) {
            return Some(Answer::unauthorized());
        }
    }
    let row = ROUTES.iter().find(|row| row.route == call.route)?;
    if call.route == Route::Unknown {
        return Some(Answer::not_found());
    }
    let dev_mode = matches!(
        call.route,
        Route::Sleep | Route::WakeUp | Route::IsSleeping | Route::ResetPrefixCache
    );
    if dev_mode && !call.shared.options.dev_mode {
        return Some(Answer::not_found());
    }
    let allowed = row.method.split(", ").any(|allowed| allowed == method);
    (!allowed).then(|| Answer::wrong_method(row.method))
}

async fn plain(call: &Call<'_>) -> Answer {
    match call.route {
        Route::CountTokens => pooling::count_tokens(call),
        Route::Tokenize => pooling::tokenize(call),
        Route::Detokenize => pooling::detokenize(call),
        Route::Embeddings | Route::Pooling | Route::Score | Route::Rerank | Route::Classify => {
            pooling::answer(call).await
        }
        Route::Audio => audio::answer(call),
        Route::Models => admin::models(call),
        Route::Health if call.shared.driver.dead() => Answer { status: 503, ..Answer::empty() },
        Route::Health | Route::Ping => Answer::empty(),
        Route::Version => Answer::json(r#"{"version":"0.32.0"}"#),
        Route::Load => admin::load(call),
        Route::Metrics => Answer::new(200, super::metrics::CONTENT_TYPE, call.shared.metrics()),
        Route::LoadLora => admin::load_lora(call),
        Route::UnloadLora => admin::unload_lora(call),
        Route::Response | Route::CancelResponse => admin::response(call),
        Route::ScaleOut => Answer::error(
            403,
            "PermissionDeniedError",
            None,
            "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to \
             enable them.",
        ),
        route => admin::engine(call, route),
    }
}

/// Says that a request was no HTTP, and closes.
pub(super) async fn refuse(connection: &mut Connection, shared: &Shared) {
    let date = shared.date(shared.seconds());
    let faults = Faults::default();
    let reply = Reply {
        faults: &faults,
        date: &date,
        keep_alive: false,
        knows_chunks: true,
        head_only: false,
        request_id: None,
    };
    let text = "Invalid HTTP request received.";
    let answer = Answer { vary: false, ..Answer::new(400, TEXT, text) };
    if reply.whole(connection, &answer).await.is_ok() {
        connection.end(End::Fin).await;
    }
}

/// Asleep, as `/is_sleeping` tells it.
pub(super) fn asleep(shared: &Shared) -> bool {
    shared.sleep_level.load(Ordering::Relaxed) > 0
}

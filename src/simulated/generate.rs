//! Answers to requests for text: reads the JSON, hands the job to the engine (or to nobody), and
//! writes what comes, in the words of the API that was asked.

use serde_json::Value;

use super::answer::Answer;
use super::connection::{Connection, Stop};
use super::engine::Rejection;
use super::job::{Job, Wire};
use super::log::Recording;
use super::serve::{Call, finish, reply};
use super::source::{Busy, News, Source};
use super::stream::EventStream;
use super::wire::{Script, Totals, script};

/// Answers a request for text; whether the connection goes on.
pub(super) async fn answer(
    connection: &mut Connection,
    call: &Call<'_>,
    wire: Wire,
    recording: &Recording,
) -> Result<bool, Stop> {
    let job = read(call, wire);
    let refused = match &job {
        Err(refusal) => refusal.clone(),
        Ok(job) => match start(call, job) {
            Err(Rejection::QueueFull) => Answer::busy(),
            Err(Rejection::TooLong) => Answer::error(
                400,
                "BadRequestError",
                None,
                "The request needs more KV cache blocks than there are.",
            ),
            Ok(source) if job.stream => {
                recording.status(200);
                return stream(connection, call, job, source).await;
            }
            Ok(source) => whole(connection, call, job, source).await?,
        },
    };
    let answer = match wire {
        Wire::Messages if refused.status == 404 || is_too_long(&refused) => {
            refused.in_messages_shape()
        }
        _ => refused,
    };
    finish(connection, call, &answer, recording).await
}

fn is_too_long(answer: &Answer) -> bool {
    memchr::memmem::find(&answer.body, b"\"param\":\"input_tokens\"").is_some()
}

fn read(call: &Call<'_>, wire: Wire) -> Result<Job, Answer> {
    if let Some(rank) = call.head.header("x-data-parallel-rank")
        && let Ok(rank) = rank.parse::<u64>()
        && rank >= u64::from(call.shared.options.data_parallel)
    {
        let ranks = call.shared.options.data_parallel;
        let text = format!("data_parallel_rank {rank} is out of range [0, {ranks}).");
        return Err(Answer::error(400, "BadRequestError", None, &text));
    }
    let body = json(call)?;
    let mut job = call.at_desk(|desk| desk.job(wire, &body))?;
    let priority = call.head.header("x-vllm-priority").and_then(|text| text.parse().ok());
    job.priority = priority.unwrap_or(job.priority);
    Ok(job)
}

/// The body as a JSON object, or vLLM's refusal.
pub(super) fn json(call: &Call<'_>) -> Result<Value, Answer> {
    let content_type = call.head.header("content-type").unwrap_or_default();
    let media = content_type.split(';').next().unwrap_or_default().trim();
    if !call.body.is_empty() && !media.eq_ignore_ascii_case("application/json") {
        let text = "Unsupported Media Type: Only 'application/json' is allowed".to_owned();
        return Err(Answer::invalid(None, &[text]));
    }
    let invalid = |fault: String, place: &str| Answer::invalid(Some(place), &[fault]);
    if call.body.is_empty() {
        let fault = "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}";
        return Err(invalid(fault.to_owned(), "body"));
    }
    let text = std::str::from_utf8(call.body)
        .map_err(|_| Answer::detail(400, "There was an error parsing the body"))?;
    match serde_json::from_str::<Value>(text) {
        Ok(value) if value.is_object() => Ok(value),
        Ok(other) => {
            let (kind, count) = other.as_array().map_or(("str", 0), |list| ("list", list.len()));
            Err(invalid(
                format!(
                    "{{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a \
                     valid dictionary or object to extract fields from', 'input': \
                     '<{kind} of {count} items>'}}"
                ),
                "body",
            ))
        }
        Err(error) => {
            let place = format!("body.{}", error.column());
            let fault = format!(
                "{{'type': 'json_invalid', 'loc': '{place}', 'msg': 'JSON decode error', \
                 'input': '<dict of 0 items>', 'ctx': {{'error': 'Expecting value'}}}}"
            );
            Err(invalid(fault, &place))
        }
    }
}

fn start<'j>(call: &Call<'_>, job: &'j Job) -> Result<Source<'j>, Rejection> {
    if job.canned {
        let busy = Busy::new(&call.shared.canned);
        return Ok(Source::canned(job, call.shared.options.instant.gap, busy));
    }
    Source::engine(job, &call.shared.driver)
}

/// Waits for all tokens, then makes the answer; the peer's leaving ends both.
async fn whole(
    connection: &mut Connection,
    call: &Call<'_>,
    job: &Job,
    mut source: Source<'_>,
) -> Result<Answer, Stop> {
    loop {
        match source.poll() {
            Some(News::Tokens { .. }) => {}
            Some(News::Dead) => return Ok(Answer::engine_dead()),
            Some(News::Ended) => break,
            None => connection.unless_left(source.wait()).await?,
        }
    }
    let totals = source.totals();
    let body = script(job).whole(&totals);
    if job.wire == Wire::Responses {
        call.shared.remember_response(&job.id, body.clone());
    }
    Ok(Answer::json(body))
}

async fn stream(
    connection: &mut Connection,
    call: &Call<'_>,
    job: &Job,
    mut source: Source<'_>,
) -> Result<bool, Stop> {
    let date = call.shared.date(call.now);
    let reply = reply(call, &date);
    let mut stream = reply.events(connection);
    let mut script = script(job);
    let mut events = Vec::new();
    let mut opened = false;
    loop {
        let Some(news) = source.poll() else {
            stream.flush().await?;
            stream.connection.unless_left(source.wait()).await?;
            continue;
        };
        // The first event comes with the first token: before it, only the head is sent.
        if !opened {
            script.open(&mut events);
            opened = true;
        }
        match news {
            News::Dead => {
                send(&mut stream, &mut events).await?;
                return stream.die().await;
            }
            News::Ended => break,
            News::Tokens { choice, from, to, finish } => {
                for piece in source.pieces(choice, from..to, finish) {
                    script.piece(&piece, &mut events);
                    send(&mut stream, &mut events).await?;
                    if stream.dies_here() {
                        return stream.die().await;
                    }
                }
            }
        }
    }
    conclude(call, job, &mut *script, source.totals(), &mut events);
    drop(source);
    send(&mut stream, &mut events).await?;
    stream.close().await
}

fn conclude(
    call: &Call<'_>,
    job: &Job,
    script: &mut dyn Script,
    totals: Totals,
    events: &mut Vec<String>,
) {
    script.close(&totals, events);
    if job.wire == Wire::Responses {
        call.shared.remember_response(&job.id, script.whole(&totals));
    }
}

async fn send(stream: &mut EventStream<'_>, events: &mut Vec<String>) -> Result<(), Stop> {
    for event in events.drain(..) {
        stream.event(&event).await?;
    }
    Ok(())
}

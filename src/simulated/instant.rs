//! The busy path of mode `instant`: a chat or completion without faults, answered from ready-made
//! text with one look at the body's bytes. Nothing is parsed, nothing is allocated per event.
//! May not: check anything; whoever wants vLLM's refusals uses mode `engine`.

use std::io::Write as _;

use tokio::time::{Instant, sleep_until};

use super::connection::{Connection, Stop};
use super::head::Head;
use super::http::Shared;
use super::source::Busy;
use super::text;
use super::wire::{DONE, FINGERPRINT};

/// Bytes gathered before they are written.
const OUTBOX_BYTES: usize = 64 * 1024;
const TOKENS_MAX: u32 = 1_000_000;
/// A longer `X-Request-Id` is not taken over, as an event must fit its four digits of length.
const ID_BYTES_MAX: usize = 1_024;

/// What one look at the body tells.
struct Glance {
    chat: bool,
    stream: bool,
    include_usage: bool,
    tokens: u32,
    prompt_tokens: usize,
}

/// Answers; whether the connection goes on.
pub(super) async fn answer(
    connection: &mut Connection,
    shared: &Shared,
    head: &Head,
    body: &[u8],
) -> Result<bool, Stop> {
    let chat = head.path() == "/v1/chat/completions";
    let asked = number(body, b"\"max_completion_tokens\"").or(number(body, b"\"max_tokens\""));
    let stream = says_true(body, b"\"stream\"");
    let glance = Glance {
        chat,
        stream,
        include_usage: stream && says_true(body, b"\"include_usage\""),
        tokens: asked.unwrap_or(shared.options.instant.tokens).clamp(1, TOKENS_MAX),
        prompt_tokens: body.len() / 5 + 1,
    };
    let mut begin = Vec::with_capacity(256);
    let seconds = shared.seconds();
    open_object(&mut begin, shared, head, seconds, &glance);
    let date = shared.date(seconds);
    let _busy = Busy::new(&shared.canned);
    if glance.stream {
        events(connection, shared, head, &begin, (&date, &glance)).await?;
    } else {
        whole(connection, head, &mut begin, (&date, &glance)).await?;
    }
    Ok(head.keep_alive)
}

/// `{"id":…,"model":…,`, which begins every object of the answer.
fn open_object(out: &mut Vec<u8>, shared: &Shared, head: &Head, seconds: u64, glance: &Glance) {
    let (prefix, object) = match (glance.chat, glance.stream) {
        (true, true) => ("chatcmpl-", "chat.completion.chunk"),
        (true, false) => ("chatcmpl-", "chat.completion"),
        (false, _) => ("cmpl-", "text_completion"),
    };
    out.extend_from_slice(b"{\"id\":\"");
    out.extend_from_slice(prefix.as_bytes());
    match head
        .header("x-request-id")
        .filter(|id| id.len() <= ID_BYTES_MAX && !id.contains(['"', '\\']))
    {
        Some(id) => out.extend_from_slice(id.as_bytes()),
        None => {
            let _ = write!(out, "{:016x}", shared.fresh_id());
        }
    }
    let models = shared.models.read();
    let model = models.names.first().map_or("", String::as_str);
    let _ = write!(
        out,
        "\",\"object\":\"{object}\",\"created\":{seconds},\"model\":\"{model}\",\"choices\":["
    );
}

fn usage(out: &mut Vec<u8>, glance: &Glance) {
    let (prompt, made) = (glance.prompt_tokens, glance.tokens as usize);
    let total = prompt + made;
    let _ = write!(
        out,
        "\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\
         \"completion_tokens\":{made},\"prompt_tokens_details\":{{\"cached_tokens\":0}}}}"
    );
}

async fn whole(
    connection: &mut Connection,
    head: &Head,
    body: &mut Vec<u8>,
    (date, glance): (&str, &Glance),
) -> Result<(), Stop> {
    body.extend_from_slice(match glance.chat {
        true => b"{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"",
        false => b"{\"index\":0,\"text\":\"",
    });
    let mut words = String::new();
    (0..glance.tokens).for_each(|index| text::word(0, index, &mut words));
    body.extend_from_slice(words.as_bytes());
    body.extend_from_slice(match glance.chat {
        true => {
            b"\",\"refusal\":null,\"reasoning\":null},\"logprobs\":null,\
             \"finish_reason\":\"length\",\"stop_reason\":null}],"
        }
        false => b"\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}],",
    });
    let _ = write!(body, "\"system_fingerprint\":\"{FINGERPRINT}\",");
    usage(body, glance);
    body.push(b'}');
    let length = body.len();
    let close = if head.keep_alive { "" } else { "connection: close\r\n" };
    let _ = write!(
        connection.outbox,
        "HTTP/1.1 200 OK\r\ndate: {date}\r\nserver: uvicorn\r\ncontent-length: {length}\r\n\
         content-type: application/json\r\nvary: Origin\r\n{close}\r\n"
    );
    connection.outbox.extend_from_slice(body);
    connection.flush().await
}

async fn events(
    connection: &mut Connection,
    shared: &Shared,
    head: &Head,
    begin: &[u8],
    (date, glance): (&str, &Glance),
) -> Result<(), Stop> {
    let gap = shared.options.instant.gap;
    let close = if head.keep_alive { "" } else { "connection: close\r\n" };
    let _ = write!(
        connection.outbox,
        "HTTP/1.1 200 OK\r\ndate: {date}\r\nserver: uvicorn\r\ncontent-type: text/event-stream; \
         charset=utf-8\r\nvary: Origin\r\n{close}transfer-encoding: chunked\r\n\r\n"
    );
    if glance.chat {
        chunk(&mut connection.outbox, begin, |out| {
            out.extend_from_slice(
                b"{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\
                 \"logprobs\":null,\"finish_reason\":null}]}",
            );
        });
    }
    let mut next = Instant::now();
    let mut word = String::new();
    for index in 0..glance.tokens {
        if !gap.is_zero() {
            next += gap;
            connection.flush().await?;
            connection.unless_left(sleep_until(next)).await?;
        } else if connection.outbox.len() > OUTBOX_BYTES {
            connection.flush().await?;
        }
        word.clear();
        text::word(0, index, &mut word);
        let last = index + 1 == glance.tokens;
        chunk(&mut connection.outbox, begin, |out| token(out, glance.chat, &word, last));
    }
    if glance.include_usage {
        chunk(&mut connection.outbox, begin, |out| {
            out.extend_from_slice(b"],");
            usage(out, glance);
            out.push(b'}');
        });
    }
    frame(&mut connection.outbox, DONE.len());
    connection.outbox.extend_from_slice(DONE.as_bytes());
    connection.outbox.extend_from_slice(b"\r\n0\r\n\r\n");
    connection.flush().await
}

fn token(out: &mut Vec<u8>, chat: bool, word: &str, last: bool) {
    out.extend_from_slice(match chat {
        true => b"{\"index\":0,\"delta\":{\"content\":\"",
        false => b"{\"index\":0,\"text\":\"",
    });
    out.extend_from_slice(word.as_bytes());
    out.extend_from_slice(if chat { b"\"},\"logprobs\":null," } else { b"\",\"logprobs\":null," });
    out.extend_from_slice(match last {
        true => b"\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":null}]}",
        false => b"\"finish_reason\":null,\"token_ids\":null}]}",
    });
}

/// Room for the length of a chunk, written once the chunk is there.
const LENGTH_DIGITS: usize = 4;

/// One event in one chunk, written in place.
fn chunk(out: &mut Vec<u8>, begin: &[u8], fill: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(b"0000\r\ndata: ");
    let content = start + LENGTH_DIGITS + 2;
    out.extend_from_slice(begin);
    fill(out);
    out.extend_from_slice(b"\n\n");
    let mut length = out.len() - content;
    for digit in out[start..start + LENGTH_DIGITS].iter_mut().rev() {
        *digit = b"0123456789abcdef"[length % 16];
        length /= 16;
    }
    out.extend_from_slice(b"\r\n");
}

fn frame(out: &mut Vec<u8>, length: usize) {
    let _ = write!(out, "{length:x}\r\n");
}

/// What follows `key` and its colon, without white space.
fn after<'b>(body: &'b [u8], key: &[u8]) -> Option<&'b [u8]> {
    let at = memchr::memmem::find(body, key)?;
    let rest = body.get(at + key.len()..)?.trim_ascii_start();
    rest.strip_prefix(b":").map(<[u8]>::trim_ascii_start)
}

fn says_true(body: &[u8], key: &[u8]) -> bool {
    after(body, key).is_some_and(|rest| rest.starts_with(b"true"))
}

fn number(body: &[u8], key: &[u8]) -> Option<u32> {
    let rest = after(body, key)?;
    let end = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
    std::str::from_utf8(rest.get(..end)?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glance_finds_flags_and_numbers_however_they_are_spaced() {
        let body = br#"{"stream" : true, "max_tokens":12,"n":"x"}"#;
        assert!(says_true(body, b"\"stream\""));
        assert_eq!(number(body, b"\"max_tokens\""), Some(12));
        assert!(!says_true(br#"{"stream":false}"#, b"\"stream\""));
        assert_eq!(number(body, b"\"n\""), None);
    }

    #[test]
    fn a_chunk_tells_its_own_length() {
        let mut out = Vec::new();
        chunk(&mut out, b"{", |out| out.push(b'}'));
        assert_eq!(out, b"000a\r\ndata: {}\n\n\r\n");
    }
}

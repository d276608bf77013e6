//! `/v1/audio/transcriptions` and `translations`: reads the upload and tells what arrived,
//! `sha256:… bytes:… name:…`, in place of words it could not have heard.

use super::answer::{Answer, quoted};
use super::connection::{Connection, Stop};
use super::echo::sha256;
use super::serve::{Call, reply};
use super::wire::DONE;

/// The content type that marks an answer to be streamed.
pub(super) const EVENTS: &str = "text/event-stream; charset=utf-8";

const PARTS_MAX: usize = 1_000;

/// One part of a form.
struct Part<'b> {
    name: String,
    file: Option<String>,
    data: &'b [u8],
}

/// The answer; with the content type [`EVENTS`], its body is the text to be streamed.
pub(super) fn answer(call: &Call<'_>) -> Answer {
    let content_type = call.head.header("content-type").unwrap_or_default();
    let Some(parts) = parts(call.body, content_type) else {
        return Answer::missing(&["file"], 0);
    };
    let field = |name: &str| {
        let part = parts.iter().find(|part| part.name == name && part.file.is_none());
        part.map(|part| String::from_utf8_lossy(part.data).into_owned())
    };
    let Some(file) = parts.iter().find(|part| part.name == "file") else {
        return Answer::missing(&["file"], parts.len());
    };
    if let Some(model) = field("model") {
        let models = call.shared.models.read();
        if !models.names.contains(&model) {
            return Answer::unknown_model(&model, &models.names);
        }
    }
    let (digest, bytes) = (sha256(file.data), file.data.len());
    let name = file.file.as_deref().unwrap_or_default();
    let text = format!("sha256:{digest} bytes:{bytes} name:{name}");
    if field("stream").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Answer::new(200, EVENTS, text);
    }
    match field("response_format").as_deref() {
        Some("text") => Answer::new(200, super::answer::TEXT, text),
        _ => Answer::json(format!(
            r#"{{"text":{},"usage":{{"type":"duration","seconds":1}}}}"#,
            quoted(&text)
        )),
    }
}

/// Streams the text of an answer, word by word.
pub(super) async fn stream(
    connection: &mut Connection,
    call: &Call<'_>,
    answer: &Answer,
) -> Result<bool, Stop> {
    let date = call.shared.date(call.now);
    let reply = reply(call, &date);
    let mut stream = reply.events(connection);
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    let (id, now) = (quoted(&format!("trsc-{}", call.request_id())), call.now);
    let model = call.shared.models.read().names.first().map_or_else(String::new, |n| quoted(n));
    let words: Vec<&str> = text.split_inclusive(' ').collect();
    for (index, word) in words.iter().enumerate() {
        let finish = if index + 1 == words.len() { r#""stop""# } else { "null" };
        let word = quoted(word);
        let event = format!(
            "data: {{\"id\":{id},\"object\":\"transcription.chunk\",\"created\":{now},\
             \"model\":{model},\"choices\":[{{\"delta\":{{\"content\":{word}}},\
             \"finish_reason\":{finish},\"stop_reason\":null}}]}}\n\n"
        );
        stream.event(&event).await?;
    }
    if !call.faults.no_done {
        stream.event(DONE).await?;
    }
    stream.close().await
}

/// The parts of a form; `None` if it is none.
fn parts<'b>(body: &'b [u8], content_type: &str) -> Option<Vec<Part<'b>>> {
    let boundary = content_type.split(';').find_map(|p| p.trim().strip_prefix("boundary="))?;
    let boundary = format!("--{}", boundary.trim_matches('"'));
    let marks = memchr::memmem::find_iter(body, boundary.as_bytes());
    let marks: Vec<usize> = marks.take(PARTS_MAX + 1).collect();
    let between = marks.windows(2).filter_map(|pair| {
        let part = body.get(pair[0] + boundary.len()..pair[1])?;
        let part = part.strip_prefix(b"\r\n")?.strip_suffix(b"\r\n")?;
        let end = memchr::memmem::find(part, b"\r\n\r\n")?;
        let head = String::from_utf8_lossy(part.get(..end)?).into_owned();
        let name = parameter(&head, " name=\"")?;
        Some(Part { name, file: parameter(&head, "filename=\""), data: part.get(end + 4..)? })
    });
    Some(between.collect())
}

fn parameter(head: &str, key: &str) -> Option<String> {
    let (_, rest) = head.split_once(key)?;
    rest.split_once('"').map(|(value, _)| value.to_owned())
}

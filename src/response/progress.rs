//! What one event of a stream says: whether it carries a token, what it reports, whether the
//! engine failed behind a status of success. Pure; how events are cut out of chunks is in
//! `events.rs`. To read one more API: a case in `Progress::event`.
//!
//! An event carries a token when it brings the client something it waits for: text of the answer,
//! reasoning, a refusal, or a piece of a tool call. The opening event with a role and empty
//! content, pings, usage and closing events carry none; so the first token of a stream is the
//! first event with content, not the first byte. One event may hold several tokens of the model;
//! what is counted are events.

use std::borrow::Cow;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::consumers::usage::{Answer, Counts, first_in};
use super::events::Event;
use super::keys::{any_member, is_string, is_text, value_after};
use super::{Reading, Usage};
use crate::request::Wire;

/// How a stream with a status of success says that it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disguise {
    /// It holds an error where an answer should be.
    Error,
    /// It ends with the reason `abort`: the engine was stopped, the answer is cut.
    Aborted,
}

impl Disguise {
    /// The kind as a label.
    pub fn text(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Aborted => "aborted",
        }
    }
}

struct Finders {
    delta: Finder<'static>,
    text: Finder<'static>,
    token_ids: Finder<'static>,
    error: Finder<'static>,
    abort: Finder<'static>,
    finish_reason: Finder<'static>,
    stop_reason: Finder<'static>,
}

static FINDERS: LazyLock<Finders> = LazyLock::new(|| Finders {
    delta: Finder::new(b"\"delta\""),
    text: Finder::new(b"\"text\""),
    token_ids: Finder::new(b"\"token_ids\""),
    error: Finder::new(b"\"error\""),
    abort: Finder::new(b"\"abort\""),
    finish_reason: Finder::new(b"\"finish_reason\""),
    stop_reason: Finder::new(b"\"stop_reason\""),
});

/// What a stream has said so far.
#[derive(Debug)]
pub(super) struct Progress {
    wire: Wire,
    reads_usage: bool,
    counts: Option<Counts>,
    /// The first failure it showed.
    pub(super) disguise: Option<Disguise>,
    /// It has said that it is over.
    pub(super) ended: bool,
}

impl Progress {
    pub(super) fn new(wire: Wire, reading: Reading) -> Self {
        let reads_usage = reading == Reading::Usage;
        Self { wire, reads_usage, counts: None, disguise: None, ended: false }
    }

    /// The last usage it reported.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.counts?.usage()
    }

    /// Takes an event in; true if it carries a token.
    pub(super) fn event(&mut self, event: Event<'_>) -> bool {
        // Only as a whole event: the same letters inside an answer mean nothing.
        if event.data == b"[DONE]" {
            self.ended = true;
            return false;
        }
        match self.wire {
            Wire::Chat | Wire::Audio => self.chunk(event.data, has_delta(event.data)),
            Wire::Completion => self.chunk(event.data, has_text(event.data)),
            Wire::Responses => self.response(event),
            Wire::Messages => self.message(event),
            Wire::Pooling | Wire::Tokens | Wire::Other => false,
        }
    }

    /// An event of chat or completions.
    fn chunk(&mut self, data: &[u8], token: bool) -> bool {
        if self.reads_usage {
            // The last report wins; with continuous reports each one is a total.
            self.counts = first_in(data).or(self.counts);
        }
        if was_aborted(data) {
            self.failed(Disguise::Aborted);
        }
        if !token && is_error(data) {
            self.failed(Disguise::Error);
        }
        token
    }

    /// An event of the Responses API.
    fn response(&mut self, event: Event<'_>) -> bool {
        match &*kind(event) {
            b"response.completed" | b"response.incomplete" => self.closing(event.data),
            b"response.failed" | b"response.cancelled" => {
                self.closing(event.data);
                self.failed(Disguise::Error);
            }
            b"error" => self.failed(Disguise::Error),
            other if other.starts_with(b"response.") => {
                return other.ends_with(b".delta") && has_delta(event.data);
            }
            _ if is_error(event.data) => self.failed(Disguise::Error),
            _ => {}
        }
        false
    }

    /// The closing event of the Responses API holds the whole answer once more.
    fn closing(&mut self, data: &[u8]) {
        #[derive(Deserialize)]
        struct Closing {
            response: Answer,
        }
        self.ended = true;
        if self.reads_usage
            && let Ok(closing) = serde_json::from_slice::<Closing>(data)
        {
            self.counts = closing.response.usage.or(self.counts);
        }
    }

    /// An event of the Anthropic API.
    fn message(&mut self, event: Event<'_>) -> bool {
        match &*kind(event) {
            b"content_block_delta" => return has_delta(event.data),
            b"message_start" if self.reads_usage => self.message_usage(event.data),
            b"message_delta" => {
                if was_aborted(event.data) {
                    self.failed(Disguise::Aborted);
                }
                if self.reads_usage {
                    self.message_usage(event.data);
                }
            }
            b"message_stop" => self.ended = true,
            b"error" => self.failed(Disguise::Error),
            b"message_start" | b"content_block_start" | b"content_block_stop" | b"ping" => {}
            _ if is_error(event.data) => self.failed(Disguise::Error),
            _ => {}
        }
        false
    }

    /// The prompt is reported at the start, the completion at the end, each once or again.
    fn message_usage(&mut self, data: &[u8]) {
        #[derive(Deserialize)]
        struct Reporting {
            message: Option<Answer>,
            usage: Option<Counts>,
        }
        let Ok(reporting) = serde_json::from_slice::<Reporting>(data) else { return };
        let inner = reporting.message.and_then(|message| message.usage);
        if let Some(later) = reporting.usage.or(inner) {
            self.counts = Some(self.counts.unwrap_or_default().updated(later));
        }
    }

    fn failed(&mut self, how: Disguise) {
        self.disguise = self.disguise.or(Some(how));
    }
}

/// The kind of an event that has one: its name, or if the engine leaves names away, its type.
fn kind(event: Event<'_>) -> Cow<'_, [u8]> {
    #[derive(Deserialize)]
    struct Typed<'a> {
        #[serde(borrow, default)]
        r#type: Cow<'a, str>,
    }
    if !event.name.is_empty() {
        return Cow::Borrowed(event.name);
    }
    match serde_json::from_slice::<Typed<'_>>(event.data) {
        Ok(Typed { r#type: Cow::Borrowed(kind) }) => Cow::Borrowed(kind.as_bytes()),
        Ok(Typed { r#type: Cow::Owned(kind) }) => Cow::Owned(kind.into_bytes()),
        Err(_) => Cow::Borrowed(b""),
    }
}

/// Whether any value under the key that `finder` finds is one that `wanted` likes.
fn any_value(finder: &Finder<'_>, json: &[u8], wanted: impl Fn(&[u8]) -> bool) -> bool {
    let mut from = 0;
    while let Some((value, next)) = value_after(finder, json, from) {
        if wanted(value) {
            return true;
        }
        from = next;
    }
    false
}

/// Whether an event brings something under `delta`: a text, or an object with content.
fn has_delta(data: &[u8]) -> bool {
    any_value(&FINDERS.delta, data, |value| is_text(value) || any_member(value, is_content))
}

/// Whether a member of a delta is something the client waits for.
fn is_content(key: &[u8], value: &[u8]) -> bool {
    match key {
        b"content" | b"reasoning" | b"reasoning_content" | b"refusal" | b"tool_calls"
        | b"function_call" | b"text" | b"thinking" | b"partial_json" => is_filled(value),
        _ => false,
    }
}

/// Whether a value is a text, a list or an object, and not an empty one.
fn is_filled(value: &[u8]) -> bool {
    match value {
        [b'[' | b'{', inside @ ..] => !matches!(inside.trim_ascii_start(), [] | [b']' | b'}', ..]),
        _ => is_text(value),
    }
}

/// Whether an event of completions brings text, or tokens where the client wants only those.
fn has_text(data: &[u8]) -> bool {
    any_value(&FINDERS.text, data, is_text) || any_value(&FINDERS.token_ids, data, is_filled)
}

/// Whether an answer, whole or an event of it, was cut by the engine.
pub(super) fn was_aborted(json: &[u8]) -> bool {
    // Nearly always one quick search and no more.
    if FINDERS.abort.find(json).is_none() {
        return false;
    }
    let is_abort = |value: &[u8]| is_string(value, "abort");
    any_value(&FINDERS.finish_reason, json, is_abort)
        || any_value(&FINDERS.stop_reason, json, is_abort)
}

/// Whether the text is an object that is, or holds at its top, an error.
pub(super) fn is_error(json: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Top<'a> {
        error: Option<IgnoredAny>,
        #[serde(borrow)]
        object: Option<Cow<'a, str>>,
    }
    if FINDERS.error.find(json).is_none() {
        return false;
    }
    serde_json::from_slice::<Top<'_>>(json)
        .is_ok_and(|top| top.error.is_some() || top.object.as_deref() == Some("error"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Tokens;

    fn data(data: &str) -> Event<'_> {
        Event { name: b"", data: data.as_bytes() }
    }

    fn token(wire: Wire, event: Event<'_>) -> bool {
        let mut usage = Progress::new(wire, Reading::Usage);
        let token = usage.event(event);
        assert_eq!(token, Progress::new(wire, Reading::Progress).event(event));
        assert_eq!(usage.disguise, None, "{event:?}");
        token
    }

    #[test]
    fn a_chat_event_with_content_carries_a_token() {
        for (delta, expected) in [
            (r#"{"role":"assistant","content":""}"#, false),
            (r#"{"role":"assistant"}"#, false),
            (r#"{}"#, false),
            (r#"{"content":null}"#, false),
            (r#"{"content":" user"}"#, true),
            (r#"{"content":"\""}"#, true),
            (r#"{ "role": "assistant", "content": "x" }"#, true),
            (r#"{"reasoning":"x"}"#, true),
            (r#"{"reasoning_content":"x","content":null}"#, true),
            (r#"{"refusal":"no"}"#, true),
            (r#"{"content":null,"tool_calls":[]}"#, false),
            (r#"{"content":null,"tool_calls":[ ]}"#, false),
            (r#"{"content":null,"tool_calls":[{"index":0,"function":{"name":"f"}}]}"#, true),
            (r#"{"function_call":{}}"#, false),
            (r#"{"function_call":{"arguments":"{"}}"#, true),
            (r#"{"role":"content"}"#, false),
            (r#"{"x":{"content":"y"}}"#, false),
        ] {
            let event = format!(
                r#"{{"id":"c","object":"chunk","model":"\"delta\":{{\"content\":\"x",
                "choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":null}}]}}"#
            );
            assert_eq!(token(Wire::Chat, data(&event)), expected, "{delta}");
            assert_eq!(token(Wire::Audio, data(&event)), expected, "{delta}");
        }
    }

    #[test]
    fn any_choice_may_bring_the_token() {
        let event = r#"{"choices":[{"index":0,"delta":{"role":"assistant"}},
            {"index":1,"delta":{"content":"x"}}]}"#;
        assert!(token(Wire::Chat, data(event)));
    }

    #[test]
    fn a_completion_event_with_text_carries_a_token() {
        for (text, expected) in [("\"\"", false), ("null", false), ("\" a\"", true)] {
            let event =
                format!(r#"{{"choices":[{{"index":0,"text":{text},"stop_reason":null}}]}}"#);
            assert_eq!(token(Wire::Completion, data(&event)), expected, "{text}");
        }
        assert!(token(Wire::Completion, data(r#"{"choices":[{"text":""},{"text":"a"}]}"#)));
        assert!(token(Wire::Completion, data(r#"{"choices":[{"index":0,"token_ids":[7]}]}"#)));
        assert!(!token(Wire::Completion, data(r#"{"choices":[{"text":"","token_ids":[]}]}"#)));
        assert!(!token(Wire::Completion, data(r#"{"choices":[{"text":"","token_ids":null}]}"#)));
        assert!(!token(Wire::Completion, data(r#"{"choices":[],"x":"text"}"#)));
    }

    #[test]
    fn a_responses_event_with_a_delta_carries_a_token() {
        for (name, body, expected) in [
            ("response.output_text.delta", r#"{"delta":"x","logprobs":[]}"#, true),
            ("response.output_text.delta", r#"{"delta":""}"#, false),
            ("response.reasoning_text.delta", r#"{"delta":"x"}"#, true),
            ("response.function_call_arguments.delta", r#"{"delta":"{"}"#, true),
            ("response.output_text.done", r#"{"delta":"x","text":"y"}"#, false),
            ("response.created", r#"{"response":{"usage":null,"error":null}}"#, false),
            ("keepalive.delta", r#"{"delta":"x"}"#, false),
        ] {
            let event = Event { name: name.as_bytes(), data: body.as_bytes() };
            assert_eq!(token(Wire::Responses, event), expected, "{name} {body}");
            let typed = body.replacen('{', &format!("{{\"type\":\"{name}\","), 1);
            assert_eq!(token(Wire::Responses, data(&typed)), expected, "{typed}");
        }
    }

    #[test]
    fn an_anthropic_delta_carries_a_token() {
        for (name, body, expected) in [
            ("content_block_delta", r#"{"delta":{"type":"text_delta","text":"x"}}"#, true),
            ("content_block_delta", r#"{"delta":{"type":"text_delta","text":""}}"#, false),
            ("content_block_delta", r#"{"delta":{"thinking":"x"}}"#, true),
            ("content_block_delta", r#"{"delta":{"partial_json":"{"}}"#, true),
            ("content_block_delta", r#"{"delta":{"signature":"x"}}"#, false),
            ("content_block_start", r#"{"content_block":{"type":"text","text":"x"}}"#, false),
            ("message_delta", r#"{"delta":{"stop_reason":"end_turn","text":"x"}}"#, false),
            ("message_start", r#"{"message":{"content":[]}}"#, false),
            ("ping", r#"{"type":"ping"}"#, false),
        ] {
            let event = Event { name: name.as_bytes(), data: body.as_bytes() };
            assert_eq!(token(Wire::Messages, event), expected, "{name} {body}");
            let typed = body.replacen('{', &format!("{{\"type\":\"{name}\","), 1);
            assert_eq!(token(Wire::Messages, data(&typed)), expected, "{typed}");
        }
    }

    #[test]
    fn other_wires_carry_none() {
        for wire in [Wire::Pooling, Wire::Tokens, Wire::Other] {
            assert!(!token(wire, data(r#"{"delta":"x","text":"x"}"#)));
        }
    }

    fn after(wire: Wire, events: &[(&str, &str)]) -> Progress {
        let mut progress = Progress::new(wire, Reading::Usage);
        for (name, body) in events {
            progress.event(Event { name: name.as_bytes(), data: body.as_bytes() });
        }
        progress
    }

    fn counted(progress: &Progress) -> Option<(u64, u64, Option<u64>)> {
        let usage = progress.usage()?;
        Some((usage.prompt?.0, usage.completion?.0, usage.cached.map(|Tokens(cached)| cached)))
    }

    #[test]
    fn the_last_usage_of_a_chat_wins_and_null_does_not_erase_it() {
        let progress = after(
            Wire::Chat,
            &[
                ("", r#"{"choices":[{"delta":{"content":"a"}}],"usage":null}"#),
                (
                    "",
                    r#"{"choices":[{"delta":{"content":"a"}}],
                    "usage":{"prompt_tokens":16,"completion_tokens":1,"total_tokens":17}}"#,
                ),
                (
                    "",
                    r#"{"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":6,
                    "prompt_tokens_details":{"cached_tokens":3}}}"#,
                ),
                ("", r#"{"choices":[],"usage":null}"#),
            ],
        );
        assert_eq!(counted(&progress), Some((16, 6, Some(3))));
    }

    #[test]
    fn usage_is_not_read_when_nobody_wants_it() {
        for (wire, name, body) in [
            (Wire::Chat, "", r#"{"usage":{"prompt_tokens":1}}"#),
            (Wire::Completion, "", r#"{"usage":{"prompt_tokens":1}}"#),
            (Wire::Responses, "response.completed", r#"{"response":{"usage":{"input_tokens":1}}}"#),
            (Wire::Messages, "message_start", r#"{"message":{"usage":{"input_tokens":1}}}"#),
            (Wire::Messages, "message_delta", r#"{"usage":{"input_tokens":1}}"#),
        ] {
            let event = Event { name: name.as_bytes(), data: body.as_bytes() };
            let mut without = Progress::new(wire, Reading::Progress);
            without.event(event);
            assert_eq!(without.usage(), None);
            let mut with = Progress::new(wire, Reading::Usage);
            with.event(event);
            assert_eq!(with.usage().and_then(|usage| usage.prompt), Some(Tokens(1)), "{body}");
        }
    }

    #[test]
    fn the_closing_event_of_a_response_is_read_to_the_letter() {
        let body = r#"{"type":"response.incomplete","response":{
            "tools":[{"usage":{"input_tokens":99}}],"usage":{"input_tokens":16,"output_tokens":6,
            "input_tokens_details":{"cached_tokens":2}}}}"#;
        for kind in ["response.completed", "response.incomplete"] {
            let progress = after(Wire::Responses, &[(kind, body)]);
            assert_eq!(counted(&progress), Some((16, 6, Some(2))));
            assert!(progress.ended);
            assert_eq!(progress.disguise, None);
        }
    }

    #[test]
    fn usage_of_a_message_is_put_together_from_both_ends() {
        let progress = after(
            Wire::Messages,
            &[
                (
                    "message_start",
                    r#"{"message":{"usage":{"cache_read_input_tokens":15,
                    "input_tokens":1,"output_tokens":0}}}"#,
                ),
                (
                    "message_delta",
                    r#"{"delta":{"stop_reason":"max_tokens"},
                    "usage":{"output_tokens":6}}"#,
                ),
                ("message_stop", r#"{"type":"message_stop"}"#),
            ],
        );
        assert_eq!(counted(&progress), Some((16, 6, Some(15))));
        assert!(progress.ended);
    }

    #[test]
    fn done_counts_only_as_a_whole_event() {
        let inside = r#"{"choices":[{"delta":{"content":"data: [DONE]"}}]}"#;
        assert!(!after(Wire::Chat, &[("", inside)]).ended);
        assert!(!after(Wire::Chat, &[("", "[DONE] ")]).ended);
        for wire in [Wire::Chat, Wire::Completion, Wire::Responses, Wire::Messages] {
            assert!(after(wire, &[("", "[DONE]")]).ended);
        }
    }

    #[test]
    fn an_error_in_the_stream_is_noticed() {
        let spaced = r#"{"error": {"message": "EngineCore encountered an issue", "code": 500}}"#;
        for (wire, name, body) in [
            (Wire::Chat, "", spaced),
            (Wire::Completion, "", spaced),
            (Wire::Responses, "", spaced),
            (Wire::Messages, "", spaced),
            (Wire::Chat, "", r#"{"object":"error","message":"m"}"#),
            (Wire::Messages, "error", r#"{"type":"error","error":{"type":"overloaded_error"}}"#),
            (Wire::Messages, "", r#"{"type":"error","error":{"type":"overloaded_error"}}"#),
            (Wire::Responses, "error", r#"{"type":"error","code":"x"}"#),
            (Wire::Responses, "response.failed", r#"{"response":{"error":{"code":"x"}}}"#),
            (Wire::Responses, "response.cancelled", r#"{"response":{}}"#),
        ] {
            let progress = after(wire, &[(name, body)]);
            assert_eq!(progress.disguise, Some(Disguise::Error), "{wire:?} {name} {body}");
        }
    }

    #[test]
    fn words_about_errors_are_no_errors() {
        for body in [
            r#"{"choices":[{"delta":{"content":"\"error\":{}"}}]}"#,
            r#"{"choices":[{"delta":{"content":"error"}}],"error":null}"#,
            r#"{"choices":[],"error":null}"#,
            r#"{"choices":[{"delta":{"role":"error","content":""}}]}"#,
            r#"{"choices":[{"delta":{},"error":{"message":"inside"}}]}"#,
            r#"{"error""#,
        ] {
            assert_eq!(after(Wire::Chat, &[("", body)]).disguise, None, "{body}");
        }
    }

    #[test]
    fn an_aborted_answer_is_noticed() {
        let abort = r#"{"choices":[{"delta":{"content":"x"},"finish_reason":"abort"}]}"#;
        assert_eq!(after(Wire::Chat, &[("", abort)]).disguise, Some(Disguise::Aborted));
        let later = r#"{"choices":[{"finish_reason":null},{"finish_reason": "abort"}]}"#;
        assert_eq!(after(Wire::Completion, &[("", later)]).disguise, Some(Disguise::Aborted));
        let message = [("message_delta", r#"{"delta":{"stop_reason":"abort"}}"#)];
        assert_eq!(after(Wire::Messages, &message).disguise, Some(Disguise::Aborted));
        for body in [
            r#"{"choices":[{"delta":{"content":"abort"},"finish_reason":null}]}"#,
            r#"{"choices":[{"delta":{"content":"abort"},"finish_reason":"stop"}]}"#,
            r#"{"choices":[{"delta":{"content":"x"},"finish_reason":"aborted"}]}"#,
        ] {
            assert_eq!(after(Wire::Chat, &[("", body)]).disguise, None, "{body}");
        }
    }

    #[test]
    fn the_first_failure_is_the_one_told() {
        let abort = r#"{"choices":[{"finish_reason":"abort"}]}"#;
        let progress = after(Wire::Chat, &[("", abort), ("", r#"{"error":{}}"#)]);
        assert_eq!(progress.disguise, Some(Disguise::Aborted));
        assert_eq!(Disguise::Aborted.text(), "aborted");
        assert_eq!(Disguise::Error.text(), "error");
    }
}

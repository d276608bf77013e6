//! Reads how many tokens an answer cost, as the engine itself reports it: from the whole body when
//! it was not streamed, from passing events when it was. Nothing is estimated here, and a report of
//! another form than expected is no error: there is just nothing to count.
//! To read one more form: its fields in `Counts`, and the wire in `read`.

use std::sync::{Arc, LazyLock};

use memchr::memmem::{Finder, FinderRev};
use serde::Deserialize;

use crate::names::Tokens;
use crate::request::Wire;
use crate::response::keys::value_after;
use crate::response::{Consumer, Exchange, Need, Options, ResponseBuffer, Setting, Shape, Usage};

/// The quoted name under which every API reports.
const KEY: &[u8] = b"\"usage\"";

static FIRST: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(KEY));
static LAST: LazyLock<FinderRev<'static>> = LazyLock::new(|| FinderRev::new(KEY));

/// How many places that look like a report are tried before an answer counts as having none.
const PLACES_MAX: usize = 16;

/// The name under which skipped answers are counted.
pub(in crate::response) const NAME: &str = "usage";

/// Counts tokens.
#[derive(Debug)]
struct UsageConsumer {
    bytes_max: usize,
}

/// The consumer, unless the operator does without it.
pub(in crate::response) fn build(setting: &Setting<'_>) -> Option<Arc<dyn Consumer>> {
    let options: &Options = setting.options;
    let bytes_max = usize::try_from(options.buffer_bytes_max.as_u64()).unwrap_or(usize::MAX);
    options.usage.enabled.then(|| Arc::new(UsageConsumer { bytes_max }) as Arc<dyn Consumer>)
}

impl Consumer for UsageConsumer {
    fn name(&self) -> &'static str {
        NAME
    }

    fn need(&self, shape: &Shape) -> Need {
        need(shape, self.bytes_max)
    }

    fn consume(&self, exchange: &mut Exchange, body: Option<&Arc<ResponseBuffer>>) {
        let Some(Ok(bytes)) = body.map(|body| body.bytes()) else { return };
        if exchange.usage.is_none() {
            exchange.usage = read(exchange.shape.wire, bytes);
        }
    }
}

/// What counting needs: only of success, only what can be read, only where usage is reported.
pub(in crate::response) fn need(shape: &Shape, bytes_max: usize) -> Need {
    if !shape.succeeded() || shape.encoded || shape.bodyless {
        return Need::Nothing;
    }
    match (shape.wire, shape.streaming) {
        (Wire::Chat | Wire::Completion | Wire::Responses | Wire::Messages, true) => Need::Events,
        (
            Wire::Chat | Wire::Completion | Wire::Responses | Wire::Messages | Wire::Pooling,
            false,
        ) => Need::Whole { bytes_max },
        (Wire::Pooling | Wire::Tokens | Wire::Audio | Wire::Other, _) => Need::Nothing,
    }
}

/// What a whole body reports, if it does.
pub(in crate::response) fn read(wire: Wire, body: &[u8]) -> Option<Usage> {
    match wire {
        // All text of clients and models is inside strings here, so nothing can imitate the key.
        // The report stands at the end of long answers: looking from there costs next to nothing.
        Wire::Chat | Wire::Completion => last_in(body)?.usage(),
        // A reranker may echo documents as objects, after its report.
        Wire::Pooling => first_in(body)?.usage(),
        // Tool schemas, metadata and tool inputs are echoed as objects: only a parser can tell.
        Wire::Responses | Wire::Messages => {
            serde_json::from_slice::<Answer>(body).ok()?.usage?.usage()
        }
        Wire::Tokens | Wire::Audio | Wire::Other => None,
    }
}

/// The top of a body, all else ignored.
#[derive(Deserialize)]
pub(in crate::response) struct Answer {
    pub(in crate::response) usage: Option<Counts>,
}

/// A report, in any of the forms engines use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(in crate::response) struct Counts {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    total_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Details {
    cached_tokens: Option<u64>,
}

impl Counts {
    /// What `later` says, and where it says nothing, what was said before.
    pub(in crate::response) fn updated(self, later: Self) -> Self {
        Self {
            prompt_tokens: later.prompt_tokens.or(self.prompt_tokens),
            completion_tokens: later.completion_tokens.or(self.completion_tokens),
            total_tokens: later.total_tokens.or(self.total_tokens),
            prompt_tokens_details: later.prompt_tokens_details.or(self.prompt_tokens_details),
            input_tokens: later.input_tokens.or(self.input_tokens),
            output_tokens: later.output_tokens.or(self.output_tokens),
            input_tokens_details: later.input_tokens_details.or(self.input_tokens_details),
            cache_read_input_tokens: later.cache_read_input_tokens.or(self.cache_read_input_tokens),
            cache_creation_input_tokens: later
                .cache_creation_input_tokens
                .or(self.cache_creation_input_tokens),
        }
    }

    /// The report in our own words; `None` if there is no number in it.
    pub(in crate::response) fn usage(&self) -> Option<Usage> {
        let cached = |details: Option<Details>| details.and_then(|details| details.cached_tokens);
        let completion = self.completion_tokens.or(self.output_tokens);
        // Anthropic's form leaves out of `input_tokens` what the cache took part in.
        let input = self.input_tokens.map(|input| {
            input
                .saturating_add(self.cache_read_input_tokens.unwrap_or(0))
                .saturating_add(self.cache_creation_input_tokens.unwrap_or(0))
        });
        // Rerankers report no more than a total.
        let rest = self.total_tokens.map(|total| total.saturating_sub(completion.unwrap_or(0)));
        let usage = Usage {
            prompt: self.prompt_tokens.or(input).or(rest).map(Tokens),
            completion: completion.map(Tokens),
            cached: cached(self.prompt_tokens_details)
                .or(cached(self.input_tokens_details))
                .or(self.cache_read_input_tokens)
                .map(Tokens),
        };
        (usage != Usage::default()).then_some(usage)
    }
}

/// The first report in a text whose strings are all that clients and models have a say in.
pub(in crate::response) fn first_in(json: &[u8]) -> Option<Counts> {
    let mut from = 0;
    for _ in 0..PLACES_MAX {
        let (value, next) = value_after(&FIRST, json, from)?;
        if let Some(counts) = counts_at(value) {
            return Some(counts);
        }
        from = next;
    }
    None
}

/// The last one.
fn last_in(json: &[u8]) -> Option<Counts> {
    let mut end = json.len();
    for _ in 0..PLACES_MAX {
        end = LAST.rfind(json.get(..end)?)?;
        let here = value_after(&FIRST, json, end);
        if let Some(counts) = here.and_then(|(value, _)| counts_at(value)) {
            return Some(counts);
        }
    }
    None
}

/// The report that begins a text, if it is one with a number in it.
fn counts_at(json: &[u8]) -> Option<Counts> {
    // A list of numbers would be read as a report too.
    let json = json.starts_with(b"{").then_some(json)?;
    let counts = Counts::deserialize(&mut serde_json::Deserializer::from_slice(json)).ok()?;
    counts.usage().map(|_| counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(prompt: Option<u64>, completion: Option<u64>, cached: Option<u64>) -> Option<Usage> {
        Some(Usage {
            prompt: prompt.map(Tokens),
            completion: completion.map(Tokens),
            cached: cached.map(Tokens),
        })
    }

    const CHAT: &str = r#"{"id":"chatcmpl-1","object":"chat.completion","model":"m","choices":[
        {"index":0,"message":{"role":"assistant","content":"\"usage\":{\"prompt_tokens\":9}"},
        "finish_reason":"length"}],"usage":{"prompt_tokens":16,"total_tokens":22,
        "completion_tokens":6,"prompt_tokens_details":{"cached_tokens":8,
        "created_cache_tokens":0,"multimodal_tokens":null},"completion_tokens_details":null},
        "prompt_logprobs":null,"kv_transfer_params":null}"#;

    #[test]
    fn a_chat_answer_is_read() {
        assert_eq!(read(Wire::Chat, CHAT.as_bytes()), usage(Some(16), Some(6), Some(8)));
        assert_eq!(read(Wire::Completion, CHAT.as_bytes()), usage(Some(16), Some(6), Some(8)));
    }

    #[test]
    fn details_may_be_missing_or_null() {
        for details in ["", r#","prompt_tokens_details":null"#, r#","prompt_tokens_details":{}"#] {
            let body =
                format!(r#"{{"usage":{{"prompt_tokens":4,"completion_tokens":1{details}}}}}"#);
            assert_eq!(read(Wire::Chat, body.as_bytes()), usage(Some(4), Some(1), None));
        }
    }

    #[test]
    fn an_embedding_and_a_score_report_their_prompt() {
        let body = br#"{"object":"list","data":[{"embedding":[0.1,0.2]}],
            "usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0}}"#;
        assert_eq!(read(Wire::Pooling, body), usage(Some(3), Some(0), None));
    }

    #[test]
    fn a_reranker_reports_a_total_and_its_documents_can_not_forge_it() {
        let body = br#"{"id":"r","usage":{"total_tokens":56},
            "results":[{"document":{"usage":{"total_tokens":1}}}]}"#;
        assert_eq!(read(Wire::Pooling, body), usage(Some(56), None, None));
    }

    #[test]
    fn a_responses_answer_is_read() {
        let body = br#"{"id":"resp","tools":[{"parameters":{"usage":{"input_tokens":1}}}],
            "usage":{"input_tokens":16,"input_tokens_details":{"cached_tokens":4},
            "output_tokens":6,"total_tokens":22},"metadata":{"usage":"x"}}"#;
        assert_eq!(read(Wire::Responses, body), usage(Some(16), Some(6), Some(4)));
    }

    #[test]
    fn an_anthropic_answer_counts_the_cached_part_into_the_prompt() {
        let body = br#"{"type":"message","content":[{"type":"tool_use",
            "input":{"usage":{"input_tokens":99}}}],"usage":{"input_tokens":1,"output_tokens":6,
            "cache_creation_input_tokens":2,"cache_read_input_tokens":15}}"#;
        assert_eq!(read(Wire::Messages, body), usage(Some(18), Some(6), Some(15)));
    }

    #[test]
    fn the_last_report_of_a_chat_wins_and_a_null_is_passed_over() {
        let body =
            br#"{"usage":{"prompt_tokens":1},"x":{"usage":{"prompt_tokens":2}},"usage":null}"#;
        assert_eq!(read(Wire::Chat, body), usage(Some(2), None, None));
    }

    #[test]
    fn a_report_of_another_form_counts_nothing() {
        for body in [
            "",
            "{}",
            "null",
            r#"{"usage":null}"#,
            r#"{"usage":{}}"#,
            r#"{"usage":[]}"#,
            r#"{"usage":"16"}"#,
            r#"{"usage":{"prompt_tokens":"16"}}"#,
            r#"{"usage":{"prompt_tokens":-1}}"#,
            r#"{"usage":{"prompt_tokens":1"#,
            r#"{"usage":{"type":"duration","seconds":3}}"#,
            r#""usage""#,
            r#""usage":"#,
            "\u{0}\u{1}",
        ] {
            for wire in crate::response::need::tests::WIRES {
                assert_eq!(read(wire, body.as_bytes()), None, "{wire:?} {body}");
            }
        }
    }

    #[test]
    fn a_list_of_numbers_is_no_report() {
        let body = br#"{"usage":[1,2,3,null,5,6,null,8,9]}"#;
        assert_eq!(read(Wire::Chat, body), None);
        assert_eq!(read(Wire::Pooling, body), None);
    }

    #[test]
    fn places_that_only_look_like_a_report_are_tried_up_to_a_limit() {
        let report = r#""usage":{"prompt_tokens":7},"#;
        let decoy = r#""usage":null,"#;
        for (decoys, expected) in [(PLACES_MAX - 1, true), (PLACES_MAX, false)] {
            let before = format!("{{{}{report}", decoy.repeat(decoys));
            let after = format!("{{{report}{}", decoy.repeat(decoys));
            let found = expected.then(|| usage(Some(7), None, None)).flatten();
            assert_eq!(read(Wire::Pooling, before.as_bytes()), found);
            assert_eq!(read(Wire::Chat, after.as_bytes()), found);
        }
    }

    #[test]
    fn wires_without_reports_are_not_read() {
        for wire in [Wire::Tokens, Wire::Audio, Wire::Other] {
            assert_eq!(read(wire, CHAT.as_bytes()), None);
        }
    }

    #[test]
    fn sums_that_no_engine_could_mean_do_not_overflow() {
        let body = format!(
            r#"{{"usage":{{"input_tokens":{max},"cache_read_input_tokens":{max},
            "cache_creation_input_tokens":1}}}}"#,
            max = u64::MAX
        );
        assert_eq!(
            read(Wire::Messages, body.as_bytes()),
            usage(Some(u64::MAX), None, Some(u64::MAX))
        );
        let less = br#"{"usage":{"total_tokens":3,"completion_tokens":5}}"#;
        assert_eq!(read(Wire::Chat, less), usage(Some(0), Some(5), None));
    }

    #[test]
    fn a_later_report_fills_in_and_does_not_erase() {
        let first =
            counts_at(br#"{"input_tokens":1,"cache_read_input_tokens":15,"output_tokens":0}"#);
        let later = counts_at(br#"{"output_tokens":6}"#);
        let both = first.unwrap().updated(later.unwrap());
        assert_eq!(both.usage(), usage(Some(16), Some(6), Some(15)));
    }
}

//! One request for text, understood: what the engine must compute and what will be said.
//! Pure. The checks and their order follow vLLM. May not: write an answer other than a refusal.

use std::sync::Arc;

use serde_json::Value;

use super::answer::Answer;
use super::cache::BlockHash;
use super::counters::FinishReason;
use super::engine::Request;
use super::faults::{Faults, Usage};
use super::guided::guided;
use super::options::{Mode, Options};
use super::text::{self, Fingerprint};

const CHOICES_MAX: u64 = 128;
const PROMPTS_MAX: usize = 1_024;

/// Which of the four ways to ask for text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire {
    Chat,
    Completion,
    Responses,
    Messages,
}

/// The words of one choice.
#[derive(Clone, Debug)]
pub(super) enum Output {
    /// Made from this seed.
    Words(u64),
    /// Exactly these tokens.
    Pieces(Vec<String>),
    /// So many bytes per token.
    Filler(usize),
}

/// One answer of a request; `n` and lists of prompts ask for several.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) finish: FinishReason,
    pub(super) blocks: Arc<[BlockHash]>,
    output: Output,
}

impl Choice {
    /// The text of tokens `from..to`.
    pub(super) fn text(&self, from: u32, to: u32) -> String {
        let mut text = String::new();
        match &self.output {
            Output::Words(seed) => (from..to).for_each(|n| text::word(*seed, n, &mut text)),
            Output::Pieces(pieces) => {
                let (from, to) = (from as usize, (to as usize).min(pieces.len()));
                text.extend(pieces.get(from..to).into_iter().flatten().map(String::as_str));
            }
            Output::Filler(bytes) => text = "x".repeat(bytes * (to - from) as usize),
        }
        text
    }
}

/// One request for text.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) wire: Wire,
    /// With its prefix, as the answer tells it.
    pub(super) id: String,
    pub(super) model: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) continuous_usage: bool,
    /// Whether usage tells cached tokens.
    pub(super) details: bool,
    pub(super) usage: Usage,
    pub(super) no_done: bool,
    pub(super) prompt_tokens: u32,
    pub(super) tokens_max: Option<u32>,
    pub(super) priority: i64,
    /// The tool that is called, if the answer is a call.
    pub(super) tool: Option<String>,
    /// Whether the prefill is for another server to go on from.
    pub(super) remote_decode: bool,
    pub(super) choices: Vec<Choice>,
    /// Engine or canned, and the canned gap; decided by mode and faults.
    pub(super) canned: bool,
}

/// What reading a request depends on besides its body.
pub(super) struct Desk<'a> {
    pub(super) options: &'a Options,
    /// Names served at this moment.
    pub(super) models: &'a [String],
    pub(super) faults: &'a Faults,
    /// `X-Request-Id`, else a fresh one.
    pub(super) request_id: String,
    /// Seconds since 1970.
    pub(super) now: u64,
}

impl Desk<'_> {
    /// The model a body names, or the first; refused when it is not served.
    pub(super) fn model(&self, body: &Value) -> Result<String, Answer> {
        let served = self.models.first().map_or("", String::as_str);
        match body.get("model").and_then(Value::as_str) {
            None => Ok(served.to_owned()),
            Some(name) if self.models.iter().any(|known| known == name) => Ok(name.to_owned()),
            Some(name) => Err(Answer::unknown_model(name, self.models)),
        }
    }

    /// An empty fingerprint for prompts to this model, apart from those under other salts.
    pub(super) fn fingerprint(&self, model: &str, body: &Value) -> Fingerprint {
        let salt = body.get("cache_salt").and_then(Value::as_str).unwrap_or_default();
        let salt = text::mix(text::hash(model.as_bytes()), text::hash(salt.as_bytes()));
        Fingerprint::new(salt, self.options.engine.block_tokens)
    }

    /// A prompt that leaves no room for an answer is refused.
    pub(super) fn check_length(&self, tokens: u32) -> Result<(), Answer> {
        let max = self.options.model_tokens_max;
        if tokens < max {
            return Ok(());
        }
        let least = max + 1;
        Err(Answer::bad_request(
            "input_tokens",
            &format!(
                "This model's maximum context length is {max} tokens. However, your prompt \
                 contains at least {least} input tokens, which exceeds this limit even without \
                 any output tokens. Please reduce the length of the input prompt. \
                 (parameter=input_tokens, value={least})"
            ),
        ))
    }

    /// Reads a request for text.
    pub(super) fn job(&self, wire: Wire, body: &Value) -> Result<Job, Answer> {
        let stream = body.get("stream").and_then(Value::as_bool).unwrap_or(false);
        check_fields(wire, body, stream)?;
        let model = self.model(body)?;
        check_sampling(body)?;
        let tokens_max = self.tokens_max(wire, body)?;
        let prompts = self.prompts(wire, &model, body);
        for prompt in &prompts {
            self.check_length(prompt.tokens())?;
        }
        let n = body.get("n").and_then(Value::as_u64).unwrap_or(1).clamp(1, CHOICES_MAX);
        let prompt_tokens = prompts.iter().map(Fingerprint::tokens).sum();
        let choices = prompts
            .into_iter()
            .flat_map(|prompt| (0..n).map(move |index| (prompt.clone(), index)))
            .map(|(prompt, index)| self.choice(prompt, index, body, tokens_max))
            .collect();
        let option = |name: &str| {
            let options = body.get("stream_options");
            options.and_then(|o| o.get(name)).and_then(Value::as_bool).unwrap_or(false)
        };
        let body_id = body.get("request_id").and_then(Value::as_str);
        Ok(Job {
            wire,
            id: format!("{}{}", prefix(wire), body_id.unwrap_or(&self.request_id)),
            model,
            created: self.now,
            stream,
            include_usage: option("include_usage"),
            continuous_usage: option("continuous_usage_stats"),
            details: self.options.prompt_tokens_details,
            usage: self.faults.usage,
            no_done: self.faults.no_done,
            prompt_tokens,
            tokens_max,
            priority: body.get("priority").and_then(Value::as_i64).unwrap_or(0),
            tool: guided(body).and_then(|guided| guided.tool),
            remote_decode: body["kv_transfer_params"]["do_remote_decode"] == true,
            choices,
            canned: self.canned(),
        })
    }

    fn canned(&self) -> bool {
        let filled = self.faults.events.is_some() || self.faults.body_bytes.is_some();
        self.options.mode == Mode::Instant || filled
    }

    fn tokens_max(&self, wire: Wire, body: &Value) -> Result<Option<u32>, Answer> {
        let (first, second) = match wire {
            Wire::Chat => ("max_completion_tokens", "max_tokens"),
            Wire::Completion | Wire::Messages => ("max_tokens", "max_tokens"),
            Wire::Responses => ("max_output_tokens", "max_output_tokens"),
        };
        let given = [first, second].into_iter().find_map(|name| {
            let value = body.get(name)?.as_i64()?;
            Some((name, value))
        });
        let Some((name, value)) = given else {
            return Ok((wire == Wire::Completion).then_some(16));
        };
        if value < 1 {
            let text = format!(
                "max_tokens must be at least 1, got {value}. (parameter=max_tokens, value={value})"
            );
            return Err(Answer::bad_request(name, &text));
        }
        let max = self.options.model_tokens_max;
        match u32::try_from(value) {
            Ok(tokens) if tokens <= max => Ok(Some(tokens)),
            _ => Err(Answer::bad_request(
                name,
                &format!(
                    "max_tokens={value} cannot be greater than max_model_len={max}. Please \
                     request fewer output tokens. (parameter=max_tokens, value={value})"
                ),
            )),
        }
    }

    fn prompts(&self, wire: Wire, model: &str, body: &Value) -> Vec<Fingerprint> {
        let mut print = self.fingerprint(model, body);
        match wire {
            Wire::Chat | Wire::Messages | Wire::Responses => {
                push_conversation(&mut print, body);
                vec![print]
            }
            Wire::Completion => match body.get("prompt") {
                Some(Value::Array(list)) if list.iter().all(Value::is_number) => {
                    push_prompt(&mut print, &body["prompt"]);
                    vec![print]
                }
                Some(Value::Array(list)) => list
                    .iter()
                    .take(PROMPTS_MAX)
                    .map(|prompt| {
                        let mut print = print.clone();
                        push_prompt(&mut print, prompt);
                        print
                    })
                    .collect(),
                prompt => {
                    push_prompt(&mut print, prompt.unwrap_or(&Value::Null));
                    vec![print]
                }
            },
        }
    }

    fn choice(
        &self,
        mut prompt: Fingerprint,
        index: u64,
        body: &Value,
        tokens_max: Option<u32>,
    ) -> Choice {
        let options = self.options;
        let seed = text::mix(text::mix(options.seed, prompt.seed()), index);
        let prompt_tokens = prompt.tokens();
        let room = options.model_tokens_max.saturating_sub(prompt_tokens).max(1);
        let asked = self.faults.events.or(tokens_max);
        let limit = asked.unwrap_or(room).min(room).max(1);
        let (output, wished) = self.output(seed, body, tokens_max);
        let (output_tokens, finish) = if wished > limit {
            (limit, FinishReason::Length)
        } else {
            (wished, FinishReason::Stop)
        };
        if !self.canned() && matches!(output, Output::Words(_)) {
            prompt.push_answer(seed, output_tokens);
        }
        let blocks = prompt.into_blocks().into();
        Choice { prompt_tokens, output_tokens, finish, blocks, output }
    }

    /// What is said, and how many tokens it would be without a limit.
    fn output(&self, seed: u64, body: &Value, tokens_max: Option<u32>) -> (Output, u32) {
        let (options, faults) = (self.options, self.faults);
        if let Some(bytes) = faults.body_bytes {
            return (Output::Filler(bytes as usize), 1);
        }
        if let Some(guided) = guided(body) {
            let pieces: Vec<String> = text::pieces(&guided.text).map(str::to_owned).collect();
            let wished = u32::try_from(pieces.len()).unwrap_or(u32::MAX).max(1);
            return (Output::Pieces(pieces), wished);
        }
        let endless = body.get("ignore_eos").and_then(Value::as_bool).unwrap_or(false);
        let wished = match (faults.events, options.mode) {
            (Some(events), _) => events.max(1),
            (None, Mode::Instant) => tokens_max.map_or(options.instant.tokens.max(1), |_| u32::MAX),
            (None, Mode::Engine) if endless && tokens_max.is_some() => u32::MAX,
            (None, Mode::Engine) => {
                let least = options.answer_tokens_min.max(1);
                let spread = options.answer_tokens_max.saturating_sub(least).saturating_add(1);
                least.saturating_add((text::mix(seed, 99) % u64::from(spread)) as u32)
            }
        };
        let output = match faults.event_bytes {
            Some(bytes) => Output::Filler(bytes as usize),
            None => Output::Words(seed),
        };
        (output, wished)
    }
}

impl Job {
    /// What the engine must compute, choice by choice.
    pub(super) fn requests(&self) -> impl ExactSizeIterator<Item = Request> + '_ {
        self.choices.iter().map(|choice| Request {
            id: 0,
            prompt_tokens: choice.prompt_tokens.max(1),
            output_tokens: choice.output_tokens,
            blocks: Arc::clone(&choice.blocks),
            priority: self.priority,
            finish: choice.finish,
        })
    }
}

fn prefix(wire: Wire) -> &'static str {
    match wire {
        Wire::Chat | Wire::Messages => "chatcmpl-",
        Wire::Completion => "cmpl-",
        Wire::Responses => "resp_",
    }
}

fn check_fields(wire: Wire, body: &Value, stream: bool) -> Result<(), Answer> {
    let fields = body.as_object().map_or(0, serde_json::Map::len);
    let needed: &[&str] = match wire {
        Wire::Chat => &["messages"],
        Wire::Completion => &["prompt"],
        Wire::Responses => &["input"],
        Wire::Messages => &["messages", "max_tokens"],
    };
    let missing: Vec<&str> =
        needed.iter().filter(|name| body.get(**name).is_none()).copied().collect();
    if !missing.is_empty() {
        return Err(Answer::missing(&missing, fields));
    }
    let messages = body.get("messages").and_then(Value::as_array);
    let nameless = messages.into_iter().flatten().position(|m| m.get("role").is_none());
    if let Some(index) = nameless {
        let name = format!("messages.{index}.ChatCompletionUserMessageParam.role");
        return Err(Answer::missing(&[&name], 1));
    }
    if !stream && body.get("stream_options").is_some_and(|options| !options.is_null()) {
        return Err(Answer::bad_request(
            "stream_options",
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
        ));
    }
    Ok(())
}

fn check_sampling(body: &Value) -> Result<(), Answer> {
    match body.get("temperature").and_then(Value::as_f64) {
        Some(value) if value < 0.0 => Err(Answer::bad_request(
            "temperature",
            &format!(
                "temperature must be non-negative, got {value:?}. (parameter=temperature, \
                 value={value:?})"
            ),
        )),
        _ => Ok(()),
    }
}

/// The chat template: system text and tools first, then turn by turn.
pub(super) fn push_conversation(print: &mut Fingerprint, body: &Value) {
    const TURN: u64 = 1;
    const END: u64 = 2;
    if let Some(tools) = body.get("tools").filter(|tools| !tools.is_null()) {
        print.push_text(&tools.to_string());
    }
    let mut turn = |role: &str, content: &Value| {
        print.push(TURN);
        print.push_text(role);
        print.push_text("\n");
        push_content(print, content);
        print.push(END);
        print.push_text("\n");
    };
    for name in ["system", "instructions"] {
        if let Some(content) = body.get(name).filter(|content| !content.is_null()) {
            turn("system", content);
        }
    }
    match body.get("messages").or_else(|| body.get("input")) {
        Some(Value::Array(messages)) => messages.iter().for_each(|message| {
            let role = message.get("role").and_then(Value::as_str).unwrap_or("user");
            turn(role, message.get("content").unwrap_or(&Value::Null));
        }),
        Some(input) => turn("user", input),
        None => {}
    }
    print.push(TURN);
    print.push_text("assistant\n");
}

fn push_content(print: &mut Fingerprint, content: &Value) {
    match content {
        Value::String(text) => print.push_text(text),
        Value::Array(parts) => parts.iter().for_each(|part| {
            match part.get("text").and_then(Value::as_str) {
                Some(text) => print.push_text(text),
                None => {
                    // A picture or a sound: as many tokens whatever it shows.
                    let seed = text::hash(part.to_string().as_bytes());
                    (0..256).for_each(|n| print.push(text::mix(seed, n)));
                }
            }
        }),
        _ => {}
    }
}

/// A prompt of `/v1/completions`: text, or token numbers.
pub(super) fn push_prompt(print: &mut Fingerprint, prompt: &Value) {
    match prompt {
        Value::String(text) => print.push_text(text),
        Value::Array(tokens) => {
            tokens.iter().filter_map(Value::as_u64).for_each(|token| print.push(token));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn job(wire: Wire, body: Value) -> Result<Job, Answer> {
        let options = Options::default();
        let desk = Desk {
            options: &options,
            models: &options.models,
            faults: &Faults::default(),
            request_id: "id".to_owned(),
            now: 0,
        };
        desk.job(wire, &body)
    }

    fn refusal(wire: Wire, body: Value) -> String {
        let answer = job(wire, body).unwrap_err();
        format!("{} {}", answer.status, std::str::from_utf8(&answer.body).unwrap())
    }

    #[test]
    fn limits_of_tokens_are_honoured() {
        let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5});
        let choice = job(Wire::Chat, body).unwrap().choices.remove(0);
        assert_eq!((choice.output_tokens, choice.finish), (5, FinishReason::Length));
        assert_eq!(choice.text(0, 5).split(' ').count(), 6);
        let job = job(Wire::Completion, json!({"prompt": "a"})).unwrap();
        assert_eq!(job.choices[0].output_tokens, 16, "the default of completions");
    }

    #[test]
    fn lists_of_prompts_and_n_make_choices() {
        let three = json!({"prompt": ["a", "b c", [1, 2, 3]], "n": 2});
        let job_of_lists = job(Wire::Completion, three).unwrap();
        let lengths = job_of_lists.choices.iter().map(|choice| choice.prompt_tokens);
        assert_eq!(lengths.collect::<Vec<_>>(), [1, 1, 2, 2, 3, 3]);
        assert_eq!(job(Wire::Completion, json!({"prompt": [1, 2]})).unwrap().choices.len(), 1);
    }

    #[test]
    fn a_wished_text_is_said_byte_for_byte() {
        let text = "Grüße,  \n\n \"quoted\" \u{1F30A} end";
        let body =
            json!({"prompt": "x", "max_tokens": 99, "structured_outputs": {"choice": [text]}});
        let choice = job(Wire::Completion, body).unwrap().choices.remove(0);
        assert_eq!(choice.text(0, choice.output_tokens), text);
    }

    #[test]
    fn an_answer_sent_back_in_the_next_turn_is_found_in_the_cache() {
        let first = json!([{"role": "user", "content": "Tell me of the river"}]);
        let body = json!({"messages": first, "max_tokens": 64, "ignore_eos": true});
        let first = job(Wire::Chat, body).unwrap().choices.remove(0);
        let next = json!({"messages": [
            {"role": "user", "content": "Tell me of the river"},
            {"role": "assistant", "content": first.text(0, 64)},
            {"role": "user", "content": "More"},
        ]});
        let next = job(Wire::Chat, next).unwrap().choices.remove(0);
        let shared = first.blocks.len();
        assert!(shared > 3 && next.blocks[..shared] == first.blocks[..]);
    }

    #[test]
    fn faults_of_a_request_are_told_as_vllm_tells_them() {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let with = |key: &str, value: Value| {
            let mut body = json!({"messages": messages});
            body[key] = value;
            refusal(Wire::Chat, body)
        };
        assert_eq!(
            with("max_tokens", json!(-5)),
            concat!(
                r#"400 {"error":{"message":"max_tokens must be at least 1, got -5. "#,
                r#"(parameter=max_tokens, value=-5)","type":"BadRequestError","#,
                r#""param":"max_tokens","code":400}}"#,
            )
        );
        assert_eq!(
            with("temperature", json!(-1)),
            concat!(
                r#"400 {"error":{"message":"temperature must be non-negative, got -1.0. "#,
                r#"(parameter=temperature, value=-1.0)","type":"BadRequestError","#,
                r#""param":"temperature","code":400}}"#,
            )
        );
        assert_eq!(
            with("stream_options", json!({"include_usage": true})),
            concat!(
                r#"400 {"error":{"message":"Stream options can only be defined when "#,
                r#"`stream=True`. (parameter=stream_options)","type":"BadRequestError","#,
                r#""param":"stream_options","code":400}}"#,
            )
        );
        assert_eq!(
            refusal(Wire::Chat, json!({"model": "sim/tiny"})),
            concat!(
                r#"400 {"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': "#,
                r#"'body.messages', 'msg': 'Field required', 'input': '<dict of 1 items>'}","#,
                r#""type":"Bad Request","param":"body.messages","code":400}}"#,
            )
        );
        let long = "word ".repeat(200_000);
        assert!(refusal(Wire::Completion, json!({"prompt": long})).contains("131073"));
    }
}

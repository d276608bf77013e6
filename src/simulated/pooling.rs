//! Routes that make no text: embeddings, pooling, scores, rerank, classes, and tokens.
//! The numbers are made from the input, so the same input always gets the same vector.

use std::fmt::Write as _;
use std::sync::Arc;

use serde_json::Value;

use super::answer::{Answer, quoted};
use super::counters::FinishReason;
use super::engine::{Rejection, Request};
use super::generate::json;
use super::job::{Desk, push_conversation, push_prompt};
use super::options::Mode;
use super::routes::Route;
use super::serve::Call;
use super::text::{self, Fingerprint};

const DIMENSIONS: u64 = 64;
const DIMENSIONS_MAX: u64 = 16_384;
const INPUTS_MAX: usize = 4_096;

/// One input, reduced to what the numbers are made of.
struct Input {
    seed: u64,
    tokens: u32,
    text: String,
}

/// Embeddings, pooling, score, rerank and classify.
pub(super) async fn answer(call: &Call<'_>) -> Answer {
    let read = json(call).and_then(|body| {
        call.at_desk(|desk| {
            let model = desk.model(&body)?;
            let inputs = inputs(desk, call.route, &model, &body)?;
            for input in &inputs {
                desk.check_length(input.tokens)?;
            }
            Ok((body, model, inputs))
        })
    });
    let (body, model, inputs) = match read {
        Ok(read) => read,
        Err(refusal) => return refusal,
    };
    match compute(call, &inputs).await {
        Some(refusal) => refusal,
        None => Answer::json(write(call, &body, &model, &inputs)),
    }
}

/// Lets the engine prefill all inputs.
async fn compute(call: &Call<'_>, inputs: &[Input]) -> Option<Answer> {
    if call.shared.options.mode == Mode::Instant {
        return None;
    }
    let requests = inputs.iter().map(|input| Request {
        id: 0,
        prompt_tokens: input.tokens.max(1),
        output_tokens: 1,
        blocks: Arc::from([]),
        priority: 0,
        finish: FinishReason::Stop,
    });
    let ticket = match call.shared.driver.submit(requests) {
        Ok(ticket) => ticket,
        Err(Rejection::QueueFull) => return Some(Answer::busy()),
        Err(Rejection::TooLong) => return Some(Answer::engine_dead()),
    };
    while !(0..inputs.len()).all(|choice| ticket.look(choice).2.is_some()) {
        if ticket.dead() {
            return Some(Answer::engine_dead());
        }
        ticket.changed().await;
    }
    None
}

fn inputs(desk: &Desk<'_>, route: Route, model: &str, body: &Value) -> Result<Vec<Input>, Answer> {
    let fields = body.as_object().map_or(0, serde_json::Map::len);
    let print = || desk.fingerprint(model, body);
    let one = |value: &Value| {
        let mut print = print();
        push_prompt(&mut print, value);
        let text = value.as_str().unwrap_or_default().to_owned();
        Input { seed: print.seed(), tokens: print.tokens(), text }
    };
    let field = |names: &[&'static str]| {
        let found = names.iter().find_map(|name| body.get(*name));
        found.ok_or_else(|| Answer::missing(&names[..1], fields))
    };
    let pairs = match route {
        Route::Score => (field(&["text_1", "queries"])?, field(&["text_2", "documents", "items"])?),
        Route::Rerank => (field(&["query"])?, field(&["documents"])?),
        _ => {
            if body.get("messages").is_some() {
                let mut print = print();
                push_conversation(&mut print, body);
                let text = String::new();
                return Ok(vec![Input { seed: print.seed(), tokens: print.tokens(), text }]);
            }
            let input = field(&["input"])?;
            return Ok(each(input).map(one).collect());
        }
    };
    let left: Vec<&Value> = each(pairs.0).collect();
    let both = each(pairs.1).enumerate().map(|(index, right)| {
        let left = left.get(index).or_else(|| left.first()).copied().unwrap_or(&Value::Null);
        let (left, right) = (one(left), one(right));
        let tokens = left.tokens + right.tokens;
        Input { seed: text::mix(left.seed, right.seed), tokens, text: right.text }
    });
    Ok(both.collect())
}

/// A list's members, or the one value; a list of numbers is one value.
fn each(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Array(list) if !list.iter().all(Value::is_number) => {
            Box::new(list.iter().take(INPUTS_MAX))
        }
        one => Box::new(std::iter::once(one)),
    }
}

/// A number between 0 and 1.
fn unit(seed: u64, index: u64) -> f32 {
    (text::mix(seed, index) % 1_000_000) as f32 / 1_000_000.0
}

fn vector(seed: u64, dimensions: u64) -> impl Iterator<Item = f32> {
    (0..dimensions).map(move |index| unit(seed, index) * 2.0 - 1.0)
}

fn write(call: &Call<'_>, body: &Value, model: &str, inputs: &[Input]) -> String {
    let tokens: u32 = inputs.iter().map(|input| input.tokens).sum();
    let (id, now, model) = (call.request_id(), call.now, quoted(model));
    let entries: Vec<String> =
        inputs.iter().enumerate().map(|(index, input)| entry(call, body, index, input)).collect();
    let entries = entries.join(",");
    if call.route == Route::Rerank {
        let id = quoted(&format!("rerank-{id}"));
        return format!(
            r#"{{"id":{id},"model":{model},"usage":{{"prompt_tokens":{tokens},
             "total_tokens":{tokens}}},"results":[{entries}]}}"#
        );
    }
    let prefix = match call.route {
        Route::Embeddings => "embd-",
        Route::Score => "score-",
        Route::Classify => "classify-",
        _ => "pool-",
    };
    let id = quoted(&format!("{prefix}{id}"));
    format!(
        r#"{{"id":{id},"object":"list","created":{now},"model":{model},"data":[{entries}],
         "usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens},"completion_tokens":0,
         "prompt_tokens_details":null}}}}"#
    )
}

fn entry(call: &Call<'_>, body: &Value, index: usize, input: &Input) -> String {
    let asked = body.get("dimensions").and_then(Value::as_u64).unwrap_or(DIMENSIONS);
    let dimensions = asked.clamp(1, DIMENSIONS_MAX);
    let score = unit(input.seed, 0);
    match call.route {
        Route::Embeddings => {
            let vector = if body["encoding_format"] == "base64" {
                let bytes: Vec<u8> =
                    vector(input.seed, dimensions).flat_map(f32::to_le_bytes).collect();
                quoted(&base64(&bytes))
            } else {
                list(vector(input.seed, dimensions))
            };
            format!(r#"{{"index":{index},"object":"embedding","embedding":{vector}}}"#)
        }
        Route::Score => format!(r#"{{"index":{index},"object":"score","score":{score}}}"#),
        Route::Rerank => {
            let text = quoted(&input.text);
            format!(
                r#"{{"index":{index},"document":{{"text":{text},"multi_modal":null}},
                 "relevance_score":{score}}}"#
            )
        }
        Route::Classify => {
            let label = usize::from(score < 0.5);
            let probabilities = list([score, 1.0 - score].into_iter());
            format!(
                r#"{{"index":{index},"label":"LABEL_{label}","probs":{probabilities},
                 "num_classes":2}}"#
            )
        }
        _ => {
            let vector = list(vector(input.seed, dimensions));
            format!(r#"{{"index":{index},"object":"pooling","data":{vector}}}"#)
        }
    }
}

fn list(numbers: impl Iterator<Item = f32>) -> String {
    let mut text = String::from("[");
    for (index, number) in numbers.enumerate() {
        let _ = write!(text, "{}{number}", if index > 0 { "," } else { "" });
    }
    text + "]"
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let group = (0..3).fold(0u32, |group, index| {
            group << 8 | u32::from(three.get(index).copied().unwrap_or(0))
        });
        for digit in 0..4usize {
            let value = (group >> (18 - 6 * digit)) & 63;
            let letter = char::from(DIGITS[value as usize]);
            text.push(if digit <= three.len() { letter } else { '=' });
        }
    }
    text
}

/// The prompt of `/tokenize` or `/v1/messages/count_tokens`.
fn prompt(call: &Call<'_>) -> Result<(Value, Fingerprint), Answer> {
    let body = json(call)?;
    call.at_desk(|desk| {
        let model = desk.model(&body)?;
        let mut print = desk.fingerprint(&model, &body);
        match body.get("prompt") {
            Some(prompt) => push_prompt(&mut print, prompt),
            None if body.get("messages").is_some() => push_conversation(&mut print, &body),
            None => {
                let fields = body.as_object().map_or(0, serde_json::Map::len);
                return Err(Answer::missing(&["messages"], fields));
            }
        }
        Ok((body, print))
    })
}

/// `POST /v1/messages/count_tokens`.
pub(super) fn count_tokens(call: &Call<'_>) -> Answer {
    match prompt(call) {
        Ok((_, print)) => {
            let tokens = print.tokens();
            Answer::json(format!(
                r#"{{"input_tokens":{tokens},"context_management":{{
                 "original_input_tokens":{tokens}}}}}"#
            ))
        }
        Err(refusal) if refusal.status == 404 => refusal.in_messages_shape(),
        Err(refusal) => refusal,
    }
}

/// `POST /tokenize`. The numbers stand for nothing but themselves.
pub(super) fn tokenize(call: &Call<'_>) -> Answer {
    let (body, print) = match prompt(call) {
        Ok(read) => read,
        Err(refusal) => return refusal,
    };
    let max = call.shared.options.model_tokens_max;
    let (count, seed) = (print.tokens(), print.seed());
    let tokens: Vec<String> = match body.get("prompt").and_then(Value::as_str) {
        Some(text) => {
            text::pieces(text).map(|piece| text::hash(piece.as_bytes())).map(id).collect()
        }
        None => (0..count).map(|index| id(text::mix(seed, u64::from(index)))).collect(),
    };
    let tokens = tokens.join(",");
    Answer::json(format!(
        r#"{{"count":{count},"max_model_len":{max},"tokens":[{tokens}],"token_strs":null}}"#
    ))
}

fn id(token: u64) -> String {
    (token % 32_000).to_string()
}

/// `POST /detokenize`: a word per number.
pub(super) fn detokenize(call: &Call<'_>) -> Answer {
    let body =
        match json(call).and_then(|body| call.at_desk(|desk| desk.model(&body)).map(|_| body)) {
            Ok(body) => body,
            Err(refusal) => return refusal,
        };
    let Some(tokens) = body.get("tokens").and_then(Value::as_array) else {
        return Answer::missing(&["tokens"], body.as_object().map_or(0, serde_json::Map::len));
    };
    let words: Vec<&str> =
        tokens.iter().filter_map(Value::as_u64).map(text::word_of_token).collect();
    Answer::json(format!(r#"{{"prompt":{}}}"#, quoted(&words.join(" "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_padded() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}

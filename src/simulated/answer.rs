//! Plain answers: a status, some headers and a body, and vLLM's many ways to say no.
//! Pure. To add a refusal: a function here, with the sample it was taken from in its test.

use std::fmt::Write as _;

use bytes::Bytes;

pub(super) const JSON: &str = "application/json";
pub(super) const TEXT: &str = "text/plain; charset=utf-8";

/// An answer that is not a stream.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) content_type: Option<&'static str>,
    /// Before Content-Length, where uvicorn has `allow`.
    pub(super) headers: Vec<(&'static str, String)>,
    pub(super) body: Bytes,
    /// Whether the middleware that adds `vary: Origin` was reached; 401 is told before it.
    pub(super) vary: bool,
}

impl Answer {
    /// JSON, which may be written over several lines.
    pub(super) fn json(body: impl AsRef<str>) -> Self {
        Self::new(200, JSON, one_line(body.as_ref()))
    }

    pub(super) fn new(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        Self {
            status,
            content_type: Some(content_type),
            headers: Vec::new(),
            body: body.into(),
            vary: true,
        }
    }

    /// 200 without a body or a type.
    pub(super) fn empty() -> Self {
        Self { content_type: None, ..Self::new(200, JSON, Bytes::new()) }
    }

    /// OpenAI's shape.
    pub(super) fn error(status: u16, kind: &str, param: Option<&str>, message: &str) -> Self {
        let param = param.map_or_else(|| "null".to_owned(), quoted);
        let message = quoted(message);
        let body = format!(
            r#"{{"error":{{"message":{message},"type":"{kind}","param":{param},"code":{status}}}}}"#
        );
        Self::new(status, JSON, body)
    }

    /// The framework's shape, for paths and methods that do not exist.
    pub(super) fn detail(status: u16, detail: &str) -> Self {
        Self::new(status, JSON, format!(r#"{{"detail":"{detail}"}}"#))
    }

    pub(super) fn not_found() -> Self {
        Self::detail(404, "Not Found")
    }

    pub(super) fn wrong_method(allow: &str) -> Self {
        let mut answer = Self::detail(405, "Method Not Allowed");
        answer.headers.push(("allow", allow.to_owned()));
        answer
    }

    pub(super) fn unauthorized() -> Self {
        Self { vary: false, ..Self::new(401, JSON, r#"{"error":"Unauthorized"}"#) }
    }

    pub(super) fn bad_request(param: &str, message: &str) -> Self {
        Self::error(400, "BadRequestError", Some(param), message)
    }

    /// A field of the wrong type or missing; `faults` are pydantic's words, one per fault.
    pub(super) fn invalid(param: Option<&str>, faults: &[String]) -> Self {
        let plural = if faults.len() == 1 { "" } else { "s" };
        let mut message = format!("{} validation error{plural}:", faults.len());
        for fault in faults {
            let _ = write!(message, "\n  {fault}");
        }
        Self::error(400, "Bad Request", param, &message)
    }

    pub(super) fn missing(names: &[&str], fields: usize) -> Self {
        let faults: Vec<String> = names
            .iter()
            .map(|name| {
                format!(
                    "{{'type': 'missing', 'loc': 'body.{name}', 'msg': 'Field required', \
                     'input': '<dict of {fields} items>'}}"
                )
            })
            .collect();
        let param = names.first().map(|name| format!("body.{name}"));
        Self::invalid(param.as_deref(), &faults)
    }

    pub(super) fn unknown_model(model: &str, known: &[String]) -> Self {
        let known = known.join(", ");
        let message = format!("The model `{model}` does not exist. Valid aliases: {known}.");
        Self::error(404, "NotFoundError", Some("model"), &message)
    }

    pub(super) fn busy() -> Self {
        Self::error(
            503,
            "Service Unavailable",
            None,
            "The engine is currently busy and cannot accept new requests. Please try again later \
             or on a different instance.",
        )
    }

    pub(super) fn engine_dead() -> Self {
        Self::error(500, "InternalServerError", None, ENGINE_DEAD)
    }

    /// The same refusal as `/v1/messages` words it.
    pub(super) fn in_messages_shape(self) -> Self {
        let parsed: Result<serde_json::Value, _> = serde_json::from_slice(&self.body);
        let Ok(parsed) = parsed else { return self };
        let (kind, message) = (&parsed["error"]["type"], &parsed["error"]["message"]);
        if !kind.is_string() {
            return self;
        }
        let body = format!(r#"{{"type":"error","error":{{"type":{kind},"message":{message}}}}}"#);
        Self { body: body.into(), ..self }
    }
}

/// What vLLM says when its engine process is gone.
pub(super) const ENGINE_DEAD: &str =
    "EngineCore encountered an issue. See stack trace (above) for the root cause.";

/// JSON written over several lines, as one: each line break goes, with the spaces that follow it.
/// Line breaks inside of strings are escaped, so none of them is lost.
pub(super) fn one_line(json: &str) -> String {
    json.split('\n').map(|line| line.trim_start_matches(' ')).collect()
}

/// Text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(answer: Answer, status: u16, body: &str) {
        assert_eq!((answer.status, std::str::from_utf8(&answer.body).unwrap()), (status, body));
    }

    #[test]
    fn refusals_are_worded_as_vllm_words_them() {
        check(Answer::unauthorized(), 401, r#"{"error":"Unauthorized"}"#);
        check(Answer::not_found(), 404, r#"{"detail":"Not Found"}"#);
        let known = ["tiny/qwen-tiny".to_owned()];
        check(
            Answer::unknown_model("no/such", &known),
            404,
            concat!(
                r#"{"error":{"message":"The model `no/such` does not exist. Valid aliases: "#,
                r#"tiny/qwen-tiny.","type":"NotFoundError","param":"model","code":404}}"#,
            ),
        );
        check(
            Answer::unknown_model("no/such", &known).in_messages_shape(),
            404,
            concat!(
                r#"{"type":"error","error":{"type":"NotFoundError","message":"The model "#,
                r#"`no/such` does not exist. Valid aliases: tiny/qwen-tiny."}}"#,
            ),
        );
        check(
            Answer::missing(&["messages", "max_tokens"], 1),
            400,
            concat!(
                r#"{"error":{"message":"2 validation errors:\n  {'type': 'missing', 'loc': "#,
                r#"'body.messages', 'msg': 'Field required', 'input': '<dict of 1 items>'}\n  {"#,
                r#"'type': 'missing', 'loc': 'body.max_tokens', 'msg': 'Field required', "#,
                r#"'input': '<dict of 1 items>'}","type":"Bad Request","param":"body.messages","#,
                r#""code":400}}"#,
            ),
        );
        check(
            Answer::busy(),
            503,
            concat!(
                r#"{"error":{"message":"The engine is currently busy and cannot accept new "#,
                r#"requests. Please try again later or on a different instance.","type":"Service "#,
                r#"Unavailable","param":null,"code":503}}"#,
            ),
        );
    }
}

//! Every answer that Weir makes itself because it will not, or cannot, let an engine answer.
//! The only place that writes an error body. To add one: a variant and its row in `facts`.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{StatusCode, header};
use pingora::Result;
use pingora::http::ResponseHeader;
use pingora_proxy::Session;
use serde_json::json;

use crate::names::ModelName;
use crate::request::Malformed;

/// How many models a refusal lists.
const LISTED_MODELS_MAX: usize = 50;

/// Why a request is not served.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// The body cannot be read as what its path asks for.
    Malformed {
        /// 400, or 415 for a body of the wrong type.
        status: u16,
        /// What is wrong, for the client.
        message: String,
        /// The field at fault.
        param: Option<&'static str>,
    },
    /// The body is longer than the limit.
    BodyTooLarge {
        /// The limit in bytes.
        bytes_max: u64,
    },
    /// The body did not come in time.
    UploadTooSlow,
    /// `Expect` names something unknown.
    UnknownExpectation,
    /// The body is compressed in a way nobody here reads.
    UnknownEncoding,
    /// No such path, or one that is closed.
    UnknownPath,
    /// The path is known, the method is not.
    WrongMethod {
        /// For the `Allow` header.
        allowed: &'static str,
    },
    /// Nobody serves this model.
    UnknownModel {
        /// As the client wrote it, cut short.
        model: String,
        /// What there is.
        known: Arc<[ModelName]>,
    },
    /// No model is named and there are several.
    ModelMissing {
        /// What there is.
        known: Arc<[ModelName]>,
    },
    /// The model is known, but no replica can take the request now.
    NoReplica {
        /// When to come again.
        retry_after: Duration,
    },
    /// All request bodies together are as much as the process may hold.
    NoRoom {
        /// When to come again.
        retry_after: Duration,
    },
    /// No replica could be reached.
    Unreachable,
    /// The replica closed the connection without an answer.
    ReplicaFailed,
    /// The replica's answer cannot be understood.
    BadAnswer,
    /// The replica did not answer in time.
    TimedOut,
    /// The head of the request cannot be forwarded.
    BadRequest,
    /// A fault of our own.
    Internal,
}

struct Facts {
    status: u16,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<&'static str>,
    message: String,
}

impl From<&Malformed> for Refusal {
    fn from(malformed: &Malformed) -> Self {
        Self::Malformed {
            status: malformed.status(),
            message: malformed.to_string(),
            param: malformed.param(),
        }
    }
}

const INVALID: &str = "invalid_request_error";
const UPSTREAM: &str = "upstream_error";

impl Refusal {
    /// The status code.
    pub fn status(&self) -> u16 {
        match self {
            Self::Malformed { status, .. } => *status,
            Self::ModelMissing { .. } | Self::BadRequest => 400,
            Self::BodyTooLarge { .. } => 413,
            Self::UploadTooSlow => 408,
            Self::UnknownExpectation => 417,
            Self::UnknownEncoding => 415,
            Self::UnknownPath | Self::UnknownModel { .. } => 404,
            Self::WrongMethod { .. } => 405,
            Self::NoReplica { .. } | Self::NoRoom { .. } => 503,
            Self::Unreachable | Self::ReplicaFailed | Self::BadAnswer => 502,
            Self::TimedOut => 504,
            Self::Internal => 500,
        }
    }

    /// Whether a replica was at fault, or Weir itself, rather than the request.
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Unreachable | Self::ReplicaFailed | Self::BadAnswer | Self::Internal)
    }

    /// The word for logs and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Malformed { .. } => "malformed",
            Self::BodyTooLarge { .. } => "body_too_large",
            Self::UploadTooSlow => "upload_too_slow",
            Self::UnknownExpectation => "unknown_expectation",
            Self::UnknownEncoding => "unknown_encoding",
            Self::UnknownPath => "unknown_path",
            Self::WrongMethod { .. } => "wrong_method",
            Self::UnknownModel { .. } => "unknown_model",
            Self::ModelMissing { .. } => "model_missing",
            Self::NoReplica { .. } => "no_replica",
            Self::NoRoom { .. } => "no_room",
            Self::Unreachable => "unreachable",
            Self::ReplicaFailed => "replica_failed",
            Self::BadAnswer => "bad_answer",
            Self::TimedOut => "timed_out",
            Self::BadRequest => "bad_request",
            Self::Internal => "internal",
        }
    }

    fn facts(&self) -> Facts {
        let (kind, code, param, message) = match self {
            Self::Malformed { message, param, .. } => (INVALID, None, *param, message.clone()),
            Self::BodyTooLarge { bytes_max } => (
                INVALID,
                Some("request_too_large"),
                None,
                format!("the request body is larger than the limit of {bytes_max} bytes"),
            ),
            Self::UploadTooSlow => {
                (INVALID, None, None, "the request body did not arrive in time".into())
            }
            Self::UnknownExpectation => {
                (INVALID, None, None, "the Expect header names an unknown expectation".into())
            }
            Self::UnknownEncoding => (
                INVALID,
                None,
                None,
                "the Content-Encoding of the request body is not supported; send it plain".into(),
            ),
            Self::UnknownPath => (INVALID, None, None, "this path is not served here".into()),
            Self::WrongMethod { allowed } => {
                (INVALID, None, None, format!("this path takes {allowed} only"))
            }
            Self::UnknownModel { model, known } => (
                INVALID,
                Some("model_not_found"),
                Some("model"),
                format!("The model `{model}` does not exist. Available: {}", list(known)),
            ),
            Self::ModelMissing { known } => (
                INVALID,
                None,
                Some("model"),
                format!("the request names no model; available: {}", list(known)),
            ),
            Self::NoReplica { .. } => (
                "service_unavailable",
                None,
                None,
                "no engine can take the request at the moment; try again shortly".into(),
            ),
            Self::NoRoom { .. } => (
                "service_unavailable",
                None,
                None,
                "the proxy has no room for the request at the moment; try again shortly".into(),
            ),
            Self::Unreachable => (UPSTREAM, None, None, "no engine could be reached".into()),
            Self::ReplicaFailed => {
                (UPSTREAM, None, None, "the engine closed the connection without an answer".into())
            }
            Self::BadAnswer => {
                (UPSTREAM, None, None, "the engine's answer was not understood".into())
            }
            Self::TimedOut => {
                ("timeout_error", None, None, "the engine did not answer in time".into())
            }
            Self::BadRequest => (INVALID, None, None, "the request cannot be forwarded".into()),
            Self::Internal => ("internal_error", None, None, "an error inside the proxy".into()),
        };
        Facts { status: self.status(), kind, code, param, message }
    }

    /// The body in the shape of the API that was called: OpenAI's, or Anthropic's.
    pub fn body(&self, shape: ErrorShape) -> Bytes {
        let facts = self.facts();
        let value = match shape {
            ErrorShape::OpenAi | ErrorShape::Responses => json!({"error": {
                "message": facts.message,
                "type": facts.kind,
                "param": facts.param,
                "code": facts.code.map_or_else(|| json!(facts.status), |code| json!(code)),
            }}),
            ErrorShape::Anthropic => json!({
                "type": "error",
                "error": {"type": anthropic_kind(facts.status), "message": facts.message},
            }),
        };
        Bytes::from(value.to_string())
    }

    /// Sends the refusal; the result is the length of its body. The connection stays open unless
    /// the caller switched that off.
    pub(super) async fn send(
        &self,
        session: &mut Session,
        shape: ErrorShape,
        request_id: &str,
    ) -> Result<u64> {
        let body = self.body(shape);
        let mut head = ResponseHeader::build(self.status(), Some(6))?;
        head.insert_header(header::CONTENT_TYPE, "application/json")?;
        head.insert_header(header::CONTENT_LENGTH, body.len())?;
        if !request_id.is_empty() {
            head.insert_header("x-request-id", request_id)?;
        }
        match self {
            Self::Unreachable => head.insert_header(header::RETRY_AFTER, 1)?,
            Self::NoReplica { retry_after } | Self::NoRoom { retry_after } => {
                head.insert_header(header::RETRY_AFTER, retry_after.as_secs().max(1))?;
            }
            Self::WrongMethod { allowed } => head.insert_header(header::ALLOW, *allowed)?,
            _ => {}
        }
        let length = body.len() as u64;
        send_whole(session, head, body).await?;
        Ok(length)
    }
}

/// Sends a head and a whole body; to a `HEAD` request the head alone.
pub(super) async fn send_whole(
    session: &mut Session,
    head: ResponseHeader,
    body: Bytes,
) -> Result<()> {
    let head_only = session.req_header().method == http::Method::HEAD
        || body.is_empty()
        || head.status == StatusCode::NO_CONTENT;
    session.write_response_header(Box::new(head), head_only).await?;
    if !head_only {
        session.write_response_body(Some(body), true).await?;
    }
    Ok(())
}

/// Whose error shape a client expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorShape {
    /// `{"error": {...}}`
    OpenAi,
    /// `{"type": "error", "error": {...}}`
    Anthropic,
    /// OpenAI's; in a stream an event of the type `error`.
    Responses,
}

/// Source: Anthropic API reference, "Errors".
fn anthropic_kind(status: u16) -> &'static str {
    match status {
        404 => "not_found_error",
        413 => "request_too_large",
        503 => "overloaded_error",
        500..=599 => "api_error",
        _ => "invalid_request_error",
    }
}

fn list(known: &[ModelName]) -> String {
    if known.is_empty() {
        return "none".into();
    }
    let mut text = String::new();
    for (place, model) in known.iter().take(LISTED_MODELS_MAX).enumerate() {
        if 0 < place {
            text.push_str(", ");
        }
        text.push_str(model.as_str());
    }
    if LISTED_MODELS_MAX < known.len() {
        text.push_str(", …");
    }
    text
}

/// The event that tells the reader of a stream that the rest will not come.
///
/// It begins with a blank line, as the stream may have stopped inside an event.
pub(super) fn broken_stream_event(shape: ErrorShape, timed_out: bool) -> Bytes {
    let refusal = if timed_out { Refusal::TimedOut } else { Refusal::ReplicaFailed };
    let message = if timed_out {
        "the engine stopped sending; the answer is incomplete"
    } else {
        "the engine broke off; the answer is incomplete"
    };
    let status = refusal.status();
    let event = match shape {
        ErrorShape::OpenAi => {
            let error = json!({"error": {
                "message": message, "type": refusal.facts().kind, "param": null, "code": status,
            }});
            format!("\n\ndata: {error}\n\n")
        }
        // Source: OpenAI API reference, "Streaming events" of Responses. The SDKs look for the
        // inner object first.
        ErrorShape::Responses => {
            let kind = refusal.facts().kind;
            let error = json!({
                "type": "error", "code": status.to_string(), "message": message, "param": null,
                "sequence_number": 0,
                "error": {"message": message, "type": kind, "param": null, "code": status},
            });
            format!("\n\nevent: error\ndata: {error}\n\n")
        }
        ErrorShape::Anthropic => {
            let error = json!({
                "type": "error", "error": {"type": anthropic_kind(status), "message": message},
            });
            format!("\n\nevent: error\ndata: {error}\n\n")
        }
    };
    Bytes::from(event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn parsed(refusal: &Refusal, shape: ErrorShape) -> Value {
        serde_json::from_slice(&refusal.body(shape)).unwrap()
    }

    #[test]
    fn an_unknown_model_is_told_as_openai_does_and_lists_what_exists() {
        let known = [ModelName::new("a"), ModelName::new("b")].into();
        let refusal = Refusal::UnknownModel { model: "x".into(), known };
        let body = parsed(&refusal, ErrorShape::OpenAi);
        assert_eq!(body["error"]["code"], "model_not_found");
        assert_eq!(body["error"]["param"], "model");
        assert!(body["error"]["message"].as_str().unwrap().contains("a, b"));
        assert_eq!(refusal.status(), 404);
    }

    #[test]
    fn anthropic_clients_get_their_own_shape() {
        let body = parsed(&Refusal::TimedOut, ErrorShape::Anthropic);
        assert_eq!(body["type"], "error");
        assert_eq!(body["error"]["type"], "api_error");
    }

    #[test]
    fn the_broken_stream_event_never_looks_like_a_finish() {
        for shape in [ErrorShape::OpenAi, ErrorShape::Anthropic, ErrorShape::Responses] {
            let event = broken_stream_event(shape, false);
            let text = std::str::from_utf8(&event).unwrap();
            assert!(text.starts_with("\n\n") && text.ends_with("\n\n"));
            assert!(!text.contains("[DONE]") && !text.contains("finish_reason"));
            assert!(text.contains("\"error\""));
        }
    }
}

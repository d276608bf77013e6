//! The mirror: tells what a request looked like when it arrived, byte for byte.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use super::answer::{Answer, quoted};
use super::serve::Call;

/// `x-sim-echo: body` gives the body back; anything else describes the request:
/// `{"line", "method", "target", "headers": [[name, value], …], "body_bytes", "body_sha256",
/// "connection"}`.
pub(super) fn answer(call: &Call<'_>, connection: u64) -> Answer {
    if call.head.header("x-sim-echo") == Some("body") {
        return Answer::new(200, "application/octet-stream", call.body.clone());
    }
    let head = call.head;
    let mut headers = String::new();
    for (index, (name, value)) in head.headers().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let (name, value) = (String::from_utf8_lossy(name), String::from_utf8_lossy(value));
        let _ = write!(headers, "{comma}[{},{}]", quoted(&name), quoted(&value));
    }
    let (line, method) = (quoted(&head.line()), quoted(head.method()));
    let (target, bytes) = (quoted(head.target()), call.body.len());
    let digest = sha256(call.body);
    Answer::json(format!(
        r#"{{"line":{line},"method":{method},"target":{target},"headers":[{headers}],
         "body_bytes":{bytes},"body_sha256":"{digest}","connection":{connection}}}"#
    ))
}

/// In hexadecimal digits.
pub(super) fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

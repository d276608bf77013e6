//! One line of the access log: what it says, and how it is written as text or JSON.
//! What a client chose (its id, a model's name) is escaped and cut, so that no request can forge a
//! line, move a terminal's cursor or fill a disk. No prompt, answer or key has a field here.
//! To add a field: in `AccessLine`, and one line in `AccessLine::write`.

use std::io::{self, Write};
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use super::facts::{Timings, Usage};
use super::labels::{Ended, Label, Phase};
use super::options::AccessLogFormat;
use crate::names::{ModelName, ReplicaId, RequestId, TenantId, Tokens};

/// The most characters of a name that a line shows.
const NAME_CHARS_MAX: usize = 256;

/// What is told of one request. Cheap to fill: names are shared, nothing is formatted.
#[derive(Clone, Debug)]
pub struct AccessLine {
    /// When the request came.
    pub at: SystemTime,
    /// Which request.
    pub id: RequestId,
    /// The client's address, if it shall be shown.
    pub client: Option<IpAddr>,
    /// The method as it came.
    pub method: http::Method,
    /// The API, a name of our own.
    pub api: &'static str,
    /// The model as the client named it.
    pub model: Option<ModelName>,
    /// Whose request.
    pub tenant: Option<TenantId>,
    /// The replica of the last attempt.
    pub replica: Option<ReplicaId>,
    /// The policy that chose it; empty when none did.
    pub policy: &'static str,
    /// The status that went to the client; 0 when none did.
    pub status: u16,
    /// Whether the answer was a stream of events.
    pub streaming: bool,
    /// Attempts at replicas.
    pub attempts: u32,
    /// How long each part took.
    pub timings: Timings,
    /// What the engine says it cost.
    pub usage: Usage,
    /// Bytes of the request's body.
    pub request_bytes: u64,
    /// Bytes of the answer's body.
    pub response_bytes: u64,
    /// How it ended.
    pub ended: Ended,
    /// How far it had come, if the client left.
    pub phase: Option<Phase>,
    /// Why Weir refused or gave up, a name of our own; empty when it did not.
    pub reason: &'static str,
}

impl AccessLine {
    /// Writes the line, its end included.
    pub(super) fn write(&self, format: AccessLogFormat, out: &mut dyn Write) -> io::Result<()> {
        let mut fields = match format {
            AccessLogFormat::Off => return Ok(()),
            AccessLogFormat::Text => Fields { out, json: false, first: true },
            AccessLogFormat::Json => Fields { out, json: true, first: true },
        };
        let timings = &self.timings;
        fields.open()?;
        fields.date("time", self.at)?;
        fields.name("id", Some(self.id.as_str()))?;
        if let Some(client) = self.client {
            fields.plain("client", client)?;
        }
        fields.name("method", Some(self.method.as_str()))?;
        fields.name("api", Some(self.api))?;
        fields.name("model", self.model.as_ref().map(ModelName::as_str))?;
        fields.name("tenant", self.tenant.as_ref().map(TenantId::as_str))?;
        fields.name("replica", self.replica.as_ref().map(ReplicaId::as_str))?;
        fields.name("policy", word(self.policy))?;
        fields.number("status", u64::from(self.status))?;
        fields.number("streaming", u64::from(self.streaming))?;
        fields.number("attempts", u64::from(self.attempts))?;
        fields.number("retries", u64::from(self.attempts.saturating_sub(1)))?;
        fields.milliseconds("queue_ms", timings.queued)?;
        fields.milliseconds("connect_ms", timings.connect)?;
        fields.milliseconds("first_byte_ms", timings.first_byte)?;
        fields.milliseconds("first_token_ms", timings.first_token)?;
        fields.milliseconds("total_ms", Some(timings.total))?;
        fields.tokens("prompt_tokens", self.usage.prompt)?;
        fields.tokens("completion_tokens", self.usage.completion)?;
        fields.tokens("cached_tokens", self.usage.cached)?;
        fields.number("request_bytes", self.request_bytes)?;
        fields.number("response_bytes", self.response_bytes)?;
        fields.name("ended", Some(self.ended.text()))?;
        fields.name("phase", self.phase.map(Label::text))?;
        fields.name("reason", word(self.reason))?;
        fields.close()
    }
}

/// `None` for the empty word.
fn word(text: &'static str) -> Option<&'static str> {
    Some(text).filter(|text| !text.is_empty())
}

/// The fields of one line, in the one format or the other. A field without a value is left out.
struct Fields<'a> {
    out: &'a mut dyn Write,
    json: bool,
    first: bool,
}

impl Fields<'_> {
    fn open(&mut self) -> io::Result<()> {
        if self.json { self.out.write_all(b"{") } else { Ok(()) }
    }

    fn close(&mut self) -> io::Result<()> {
        self.out.write_all(if self.json { b"}\n" } else { b"\n" })
    }

    fn key(&mut self, key: &str) -> io::Result<()> {
        let first = std::mem::replace(&mut self.first, false);
        match (self.json, first) {
            (true, true) => write!(self.out, "\"{key}\":"),
            (true, false) => write!(self.out, ",\"{key}\":"),
            (false, true) => write!(self.out, "{key}="),
            (false, false) => write!(self.out, " {key}="),
        }
    }

    /// A value that has no character in need of escaping; quoted in JSON.
    fn plain(&mut self, key: &str, value: impl std::fmt::Display) -> io::Result<()> {
        self.key(key)?;
        if self.json { write!(self.out, "\"{value}\"") } else { write!(self.out, "{value}") }
    }

    fn date(&mut self, key: &str, date: SystemTime) -> io::Result<()> {
        // Before 1970 a date cannot be written; the first moment of it is as good a lie as any.
        let date = date.max(SystemTime::UNIX_EPOCH);
        self.plain(key, humantime::format_rfc3339_millis(date))
    }

    fn name(&mut self, key: &str, value: Option<&str>) -> io::Result<()> {
        let Some(value) = value else { return Ok(()) };
        self.key(key)?;
        let bare = !value.is_empty()
            && value.len() <= NAME_CHARS_MAX
            && value
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_./:@+~".contains(&byte));
        if bare && !self.json {
            return self.out.write_all(value.as_bytes());
        }
        self.out.write_all(b"\"")?;
        let mut shown = value.chars();
        for character in shown.by_ref().take(NAME_CHARS_MAX) {
            escape(character, self.out)?;
        }
        if shown.next().is_some() {
            self.out.write_all("…".as_bytes())?;
        }
        self.out.write_all(b"\"")
    }

    fn number(&mut self, key: &str, value: u64) -> io::Result<()> {
        self.key(key)?;
        write!(self.out, "{value}")
    }

    fn tokens(&mut self, key: &str, value: Option<Tokens>) -> io::Result<()> {
        value.map_or(Ok(()), |tokens| self.number(key, tokens.0))
    }

    fn milliseconds(&mut self, key: &str, value: Option<Duration>) -> io::Result<()> {
        let Some(value) = value else { return Ok(()) };
        self.key(key)?;
        write!(self.out, "{}.{:03}", value.as_millis(), value.subsec_micros() % 1000)
    }
}

/// One character inside quotes. Escaped are quotes, backslashes, and all that moves a cursor,
/// breaks a line or turns the direction of reading.
fn escape(character: char, out: &mut dyn Write) -> io::Result<()> {
    match character {
        '"' | '\\' => write!(out, "\\{character}"),
        '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2066}'..='\u{2069}'
        | '\u{feff}' => {
            write!(out, "\\u{:04x}", u32::from(character))
        }
        control if control.is_control() => write!(out, "\\u{:04x}", u32::from(control)),
        other => write!(out, "{other}"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in crate::telemetry) fn line() -> AccessLine {
        AccessLine {
            at: SystemTime::UNIX_EPOCH + Duration::from_millis(1_796_124_791_042),
            id: RequestId::new("req-1"),
            client: Some(IpAddr::from([192, 0, 2, 7])),
            method: http::Method::POST,
            api: "chat_completions",
            model: Some(ModelName::new("tiny/qwen-tiny")),
            tenant: None,
            replica: Some(ReplicaId::new("gpu-1:8000")),
            policy: "least_load",
            status: 200,
            streaming: true,
            attempts: 2,
            timings: Timings {
                queued: None,
                connect: Some(Duration::from_micros(250)),
                first_byte: Some(Duration::from_micros(12_034)),
                first_token: Some(Duration::from_millis(40)),
                total: Duration::from_secs(61),
            },
            usage: Usage { prompt: Some(Tokens(16)), completion: Some(Tokens(6)), cached: None },
            request_bytes: 120,
            response_bytes: 2365,
            ended: Ended::Complete,
            phase: None,
            reason: "",
        }
    }

    pub(in crate::telemetry) fn written(line: &AccessLine, format: AccessLogFormat) -> String {
        let mut out = Vec::new();
        line.write(format, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn text_is_made_for_eyes() {
        assert_eq!(
            written(&line(), AccessLogFormat::Text),
            "time=2026-12-01T11:33:11.042Z id=req-1 client=192.0.2.7 method=POST \
             api=chat_completions model=tiny/qwen-tiny replica=gpu-1:8000 policy=least_load \
             status=200 streaming=1 attempts=2 retries=1 connect_ms=0.250 first_byte_ms=12.034 \
             first_token_ms=40.000 total_ms=61000.000 prompt_tokens=16 completion_tokens=6 \
             request_bytes=120 response_bytes=2365 ended=complete\n"
        );
    }

    #[test]
    fn json_says_the_same() {
        let text = written(&line(), AccessLogFormat::Json);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["model"], "tiny/qwen-tiny");
        assert_eq!(value["client"], "192.0.2.7");
        assert_eq!(value["status"], 200);
        assert_eq!(value["first_byte_ms"], 12.034);
        assert_eq!(value["total_ms"], 61000.0);
        assert_eq!(value.get("cached_tokens"), None);
        assert_eq!(value.get("reason"), None);
    }

    #[test]
    fn off_writes_nothing() {
        assert_eq!(written(&line(), AccessLogFormat::Off), "");
    }

    #[test]
    fn a_client_that_left_is_told_with_its_phase() {
        let mut left = line();
        left.client = None;
        left.status = 0;
        left.attempts = 0;
        left.ended = Ended::ClientLeft;
        left.phase = Some(Phase::Queued);
        left.reason = "gone";
        let text = written(&left, AccessLogFormat::Text);
        assert!(text.ends_with(" ended=client_left phase=queued reason=gone\n"), "{text}");
        assert!(text.contains(" status=0 streaming=1 attempts=0 retries=0 "), "{text}");
        assert!(!text.contains("client="), "{text}");
    }

    #[test]
    fn a_long_name_is_cut() {
        let mut long = line();
        long.model = Some(ModelName::new("é".repeat(NAME_CHARS_MAX)));
        assert!(written(&long, AccessLogFormat::Json).contains(&"é".repeat(NAME_CHARS_MAX)));
        long.model = Some(ModelName::new("x".repeat(NAME_CHARS_MAX + 1)));
        let cut = format!("model=\"{}…\" ", "x".repeat(NAME_CHARS_MAX));
        assert!(written(&long, AccessLogFormat::Text).contains(&cut));
        long.model = Some(ModelName::new("x".repeat(NAME_CHARS_MAX)));
        let whole = format!("model={} ", "x".repeat(NAME_CHARS_MAX));
        assert!(written(&long, AccessLogFormat::Text).contains(&whole));
    }

    #[test]
    fn an_empty_name_is_still_one_value() {
        let mut empty = line();
        empty.model = Some(ModelName::new(""));
        assert!(written(&empty, AccessLogFormat::Text).contains(" model=\"\" "));
    }

    #[test]
    fn signs_that_turn_or_break_a_line_are_escaped() {
        let mut odd = line();
        odd.id = RequestId::new("a\u{202e}b\u{2028}c\u{9b}d\u{7f}e\u{feff}f\u{200b}");
        let text = written(&odd, AccessLogFormat::Text);
        let id = r#"id="a\u202eb\u2028c\u009bd\u007fe\ufefff\u200b""#;
        assert!(text.contains(id), "{text}");
    }

    proptest! {
        #[test]
        fn no_name_can_forge_a_line(id in ".{0,40}", model in "[\\PC\\n\\r\\x1b\"= ]{0,300}") {
            let mut line = line();
            line.id = RequestId::new(&id);
            line.model = Some(ModelName::new(&model));
            let text = written(&line, AccessLogFormat::Text);
            prop_assert_eq!(text.matches('\n').count(), 1);
            prop_assert!(!text.trim_end_matches('\n').contains(char::is_control));
            let json = written(&line, AccessLogFormat::Json);
            prop_assert_eq!(json.matches('\n').count(), 1);
            let value: serde_json::Value = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(value["id"].as_str(), Some(id.as_str()));
            prop_assert_eq!(&value["ended"], "complete");
        }
    }
}

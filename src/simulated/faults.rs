//! What can go wrong on purpose. One list of knobs, set for a whole server while it runs, or for
//! one request by the header `x-sim-fault: key=value,key=value`.
//! A value with a comma or a percent sign writes it as `%2C`, `%25`. Durations are `20ms`, `1s`.
//! To add a fault: a field, its line in `set`, and the place in `stream.rs`, `connection.rs` or
//! `serve.rs` that obeys it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// An orderly close.
    Fin,
    /// A reset.
    Rst,
    /// Not at all: silence, with the socket open.
    Stall,
}

impl End {
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "fin" => Some(Self::Fin),
            "rst" => Some(Self::Rst),
            "stall" => Some(Self::Stall),
            _ => None,
        }
    }
}

/// What becomes of the token counts in an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Usage {
    /// They are told.
    #[default]
    Told,
    /// `"usage":null`.
    Null,
    /// No such field.
    Missing,
}

/// Answering before the request body was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Early {
    /// Then the body is read and thrown away, and the connection goes on.
    Drain,
    /// Then the connection is closed.
    Close,
}

/// All knobs. The default is a healthy server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Path prefixes that are hit. Empty: every path but those of probes and scrapes
    /// (`/health`, `/ping`, `/version`, `/load`, `/metrics`, `/is_sleeping`, `/v1/models`).
    pub paths: Vec<String>,
    /// Hits only so many requests, then no more. `count=2`
    pub count: Option<u32>,
    /// Wait before the response head. `head_delay=1s`
    #[serde(with = "humantime_serde")]
    pub head_delay: Duration,
    /// Wait after the head, before the first event. `first_token_delay=1s`
    #[serde(with = "humantime_serde")]
    pub first_token_delay: Duration,
    /// Wait before every later event. `gap=500ms`
    #[serde(with = "humantime_serde")]
    pub gap: Duration,
    /// Answer this status and nothing of the real answer. `status=503`
    pub status: Option<u16>,
    /// Body that goes with `status`; without it, one in vLLM's shape. `body=busy`
    pub body: Option<String>,
    /// Header lines added to any answer, also a second time. `header=Retry-After:5`
    pub headers: Vec<(String, String)>,
    /// Ends the connection in place of an answer. `no_answer=rst`
    pub no_answer: Option<End>,
    /// Ends the connection after so many events. `cut=5:RST`, `cut=5:FIN`, `cut=5:stall`
    pub cut: Option<(u32, End)>,
    /// The cut goes through the middle of the next event. `cut_inside=1`
    pub cut_inside: bool,
    /// Closes after the last event without the last chunk. `no_last_chunk=1`
    pub no_last_chunk: bool,
    /// After so many events, bytes that are no chunk. `garbage=3`
    pub garbage: Option<u32>,
    /// Opens the stream, sends so many events, then the engine's death as vLLM tells it: an error
    /// event and `[DONE]`. `engine_error=3`
    pub engine_error: Option<u32>,
    /// Accepts, reads, never answers. `blackhole=1`
    pub blackhole: bool,
    /// Takes no connection: the listener is closed. Only for a server.
    pub refuse: bool,
    /// Takes connections and reads nothing. Only for a server.
    pub deaf: bool,
    /// Closes a connection that is idle for so long. `idle_close=50ms`
    #[serde(with = "humantime_serde")]
    pub idle_close: Option<Duration>,
    /// Ends a used connection just when its next request arrives. `close_on_next=fin`
    pub close_on_next: Option<End>,
    /// Ends the connection after the answer, without having said so. `close_after=fin`
    pub close_after: Option<End>,
    /// Reads the body so many bytes at a time with a pause. `slow_read=4096:10ms`
    pub slow_read: Option<(u32, Duration)>,
    /// Writes so many bytes at a time with a pause. `split=1:0ms`
    pub split: Option<(u32, Duration)>,
    /// Size of the chunks of a chunked answer, whatever the events. `chunk=7`
    pub chunk: Option<u32>,
    /// Events end with CR LF. `crlf=1`
    pub crlf: bool,
    /// Events end with CR. `cr=1`
    pub cr: bool,
    /// A comment line before every event. `comments=1`
    pub comments: bool,
    /// A byte order mark begins the stream. `bom=1`
    pub bom: bool,
    /// The stream ends without `[DONE]`. `no_done=1`
    pub no_done: bool,
    /// Bytes of text per token, in place of words. `event_bytes=1000`
    pub event_bytes: Option<u32>,
    /// Tokens of the answer, whatever was asked. `events=100`
    pub events: Option<u32>,
    /// Bytes of text of a plain answer. `body_bytes=1000000`
    pub body_bytes: Option<u32>,
    /// Token counts in the answer. `usage=null`, `usage=missing`
    pub usage: Usage,
    /// Every answer is HTTP/1.0 and ends with the connection. `http10=1`
    pub http10: bool,
    /// The answer's end is the connection's end, in HTTP/1.1. `close_delimited=1`
    pub close_delimited: bool,
    /// Answers before the body is read. `early=drain`, `early=close`
    pub early: Option<Early>,
    /// Sends a `103 Early Hints` before the answer. `hints=1`
    pub hints: bool,
    /// Content-Length promises so many bytes more than come; then the close. `short=10`
    pub short: Option<u32>,
}

impl Faults {
    /// The faults of a header's text on top of these.
    pub fn with(&self, text: &str) -> Result<Self, String> {
        let mut faults = self.clone();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, "1"));
            let value = unescape(value);
            if !faults.set(key, &value) && !faults.set_end(key, &value) {
                return Err(format!("x-sim-fault: `{pair}` is not known"));
            }
        }
        Ok(faults)
    }

    /// The faults that a text names, on top of none.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::default().with(text)
    }

    /// Whether a request to `path` is hit.
    pub fn hits(&self, path: &str) -> bool {
        if self.paths.is_empty() {
            return !is_control(path);
        }
        self.paths.iter().any(|prefix| path.starts_with(prefix.as_str()))
    }

    fn set(&mut self, key: &str, value: &str) -> bool {
        match key {
            "paths" => {
                self.paths.push(value.to_owned());
                true
            }
            "count" => number(value, &mut self.count),
            "head_delay" => time(value, &mut self.head_delay),
            "first_token_delay" => time(value, &mut self.first_token_delay),
            "gap" => time(value, &mut self.gap),
            "status" => number(value, &mut self.status),
            "body" => {
                self.body = Some(value.to_owned());
                true
            }
            "header" => value.split_once(':').is_some_and(|(name, value)| {
                self.headers.push((name.trim().to_owned(), value.trim().to_owned()));
                true
            }),
            "engine_error" => number(value, &mut self.engine_error),
            "garbage" => number(value, &mut self.garbage),
            "chunk" => number(value, &mut self.chunk),
            "event_bytes" => number(value, &mut self.event_bytes),
            "events" => number(value, &mut self.events),
            "body_bytes" => number(value, &mut self.body_bytes),
            "short" => number(value, &mut self.short),
            "slow_read" => pace(value, &mut self.slow_read),
            "split" => pace(value, &mut self.split),
            "idle_close" => {
                let mut after = Duration::ZERO;
                let known = time(value, &mut after);
                self.idle_close = known.then_some(after).or(self.idle_close);
                known
            }
            "cut_inside" => flag(value, &mut self.cut_inside),
            "no_last_chunk" => flag(value, &mut self.no_last_chunk),
            "blackhole" => flag(value, &mut self.blackhole),
            "crlf" => flag(value, &mut self.crlf),
            "cr" => flag(value, &mut self.cr),
            "comments" => flag(value, &mut self.comments),
            "bom" => flag(value, &mut self.bom),
            "no_done" => flag(value, &mut self.no_done),
            "http10" => flag(value, &mut self.http10),
            "close_delimited" => flag(value, &mut self.close_delimited),
            "hints" => flag(value, &mut self.hints),
            _ => false,
        }
    }

    fn set_end(&mut self, key: &str, value: &str) -> bool {
        match key {
            "no_answer" => end(value, &mut self.no_answer),
            "close_on_next" => end(value, &mut self.close_on_next),
            "close_after" => end(value, &mut self.close_after),
            "cut" => {
                let (events, how) = value.split_once(':').unwrap_or((value, "fin"));
                let parsed = events.parse().ok().zip(End::parse(how));
                self.cut = parsed.or(self.cut);
                parsed.is_some()
            }
            "usage" => {
                self.usage = match value {
                    "null" => Usage::Null,
                    "missing" => Usage::Missing,
                    _ => return false,
                };
                true
            }
            "early" => {
                self.early = match value {
                    "drain" => Some(Early::Drain),
                    "close" => Some(Early::Close),
                    _ => return false,
                };
                true
            }
            _ => false,
        }
    }
}

fn is_control(path: &str) -> bool {
    const CONTROL: [&str; 7] =
        ["/health", "/ping", "/version", "/load", "/metrics", "/is_sleeping", "/v1/models"];
    CONTROL.contains(&path)
}

fn number<N: std::str::FromStr>(value: &str, place: &mut Option<N>) -> bool {
    let parsed = value.parse().ok();
    let known = parsed.is_some();
    *place = parsed;
    known
}

fn flag(value: &str, place: &mut bool) -> bool {
    *place = matches!(value, "1" | "true");
    matches!(value, "0" | "1" | "true" | "false")
}

fn time(value: &str, place: &mut Duration) -> bool {
    humantime::parse_duration(value).map(|parsed| *place = parsed).is_ok()
}

fn end(value: &str, place: &mut Option<End>) -> bool {
    *place = End::parse(value);
    place.is_some()
}

fn pace(value: &str, place: &mut Option<(u32, Duration)>) -> bool {
    let (bytes, pause) = value.split_once(':').unwrap_or((value, "0s"));
    let bytes = bytes.parse().ok().filter(|bytes| *bytes > 0);
    *place = bytes.zip(humantime::parse_duration(pause).ok());
    place.is_some()
}

fn unescape(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.as_bytes().iter();
    while let Some(byte) = bytes.next() {
        let rest = bytes.as_slice();
        let escaped = (*byte == b'%').then(|| rest.get(..2)).flatten();
        let value = escaped.and_then(|hex| std::str::from_utf8(hex).ok());
        match value.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(value) => {
                out.push(value);
                bytes.nth(1);
            }
            None => out.push(*byte),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_names_faults_on_top_of_the_servers() {
        let server = Faults { gap: Duration::from_millis(3), ..Default::default() };
        let faults = server
            .with("cut=5:RST, head_delay=20ms,status=503,header=Retry-After:5,body=a%2Cb")
            .unwrap();
        assert_eq!(faults.cut, Some((5, End::Rst)));
        assert_eq!(faults.head_delay, Duration::from_millis(20));
        assert_eq!(faults.gap, Duration::from_millis(3));
        assert_eq!((faults.status, faults.body.as_deref()), (Some(503), Some("a,b")));
        assert_eq!(faults.headers, [("Retry-After".to_owned(), "5".to_owned())]);
        assert_eq!(Faults::parse("").unwrap(), Faults::default());
    }

    #[test]
    fn a_misspelt_fault_is_refused_so_that_no_test_passes_by_mistake() {
        for text in ["cutt=5", "cut=x", "gap=5", "usage=none", "crlf=yes", "slow_read=0:1ms"] {
            assert!(Faults::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn probes_are_spared_unless_named() {
        let faults = Faults::default();
        assert!(faults.hits("/v1/chat/completions") && !faults.hits("/health"));
        let faults = Faults { paths: vec!["/health".to_owned()], ..Default::default() };
        assert!(faults.hits("/health") && !faults.hits("/v1/chat/completions"));
    }
}

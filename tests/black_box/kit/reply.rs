//! An answer as a strict client sees it, and the events inside it.

use std::fmt;

use serde_json::Value;

/// How an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// As its framing says it must.
    Proper,
    /// The connection was closed or reset before that.
    Cut,
    /// HTTP/2 reset the stream for this reason.
    Reset(String),
}

/// Header lines in their order, names as they were sent.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(pub Vec<(String, Vec<u8>)>);

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.0.iter().map(|(name, value)| (name, String::from_utf8_lossy(value)));
        f.debug_list().entries(lines).finish()
    }
}

impl Headers {
    /// All values of a name, in order.
    pub fn all(&self, name: &str) -> Vec<String> {
        let named = self.0.iter().filter(|(own, _)| own.eq_ignore_ascii_case(name));
        named.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).collect()
    }

    /// The value of a name that is there once.
    pub fn one(&self, name: &str) -> Option<String> {
        let mut all = self.all(name);
        assert!(all.len() < 2, "`{name}` is there {} times: {self:?}", all.len());
        all.pop()
    }

    /// The value as it was sent.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let found = self.0.iter().find(|(own, _)| own.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_slice())
    }

    /// Whether there is such a line.
    pub fn has(&self, name: &str) -> bool {
        self.bytes(name).is_some()
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Status code.
    pub status: u16,
    /// Header lines.
    pub headers: Headers,
    /// The body without its framing.
    pub body: Vec<u8>,
    /// How it ended.
    pub end: End,
}

impl Reply {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap_or_else(|_| panic!("not UTF-8: {self:?}"))
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The events of the body.
    pub fn events(&self) -> Vec<Event> {
        events(&self.body)
    }

    /// Complains unless the answer is whole and has this status.
    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        let body = String::from_utf8_lossy(&self.body).into_owned();
        assert_eq!(self.status, status, "{:?} {body}", self.headers);
        assert_eq!(self.end, End::Proper, "{body}");
        self
    }

    /// Complains unless this is an error in OpenAI's shape that a client can act on.
    #[track_caller]
    pub fn expect_refusal(self, status: u16) -> Value {
        let reply = self.expect(status);
        assert_eq!(reply.headers.one("content-type").as_deref(), Some("application/json"));
        assert!(reply.headers.one("x-request-id").is_some_and(|id| !id.is_empty()));
        let error = reply.json()["error"].clone();
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
        assert!(error["type"].is_string(), "{error}");
        assert!(error.get("param").is_some() && error.get("code").is_some(), "{error}");
        error
    }
}

/// One server-sent event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// The field `event`.
    pub name: String,
    /// The field `data`, lines joined.
    pub data: String,
}

impl Event {
    /// The data as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// The complete events of a stream, read as the standard says: an event ends with a blank line,
/// what is left over at the end is none. Source: HTML living standard, 9.2.6.
pub fn events(body: &[u8]) -> Vec<Event> {
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    let (mut found, mut event, mut has_data) = (Vec::new(), Event::default(), false);
    let mut rest = body;
    while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')) {
        let line = std::str::from_utf8(&rest[..end]).expect("an event is UTF-8");
        let ending = if rest[end..].starts_with(b"\r\n") { 2 } else { 1 };
        rest = &rest[end + ending..];
        if line.is_empty() {
            if has_data {
                found.push(event);
            }
            (event, has_data) = (Event::default(), false);
            continue;
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => event.name = value.to_owned(),
            "data" => {
                if has_data {
                    event.data.push('\n');
                }
                event.data.push_str(value);
                has_data = true;
            }
            "" | "id" | "retry" => {}
            other => panic!("`{other}` is no field of an event"),
        }
    }
    found
}

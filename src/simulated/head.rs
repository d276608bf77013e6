//! Heads of HTTP/1.1: a request's, kept as the bytes that came; a response's, in uvicorn's order.
//! Pure. May not: read a socket. Requests are judged as uvicorn does, not as a proxy should.

use bytes::{Bytes, BytesMut};
use smallvec::SmallVec;

/// A request head larger than this is refused.
pub(super) const HEAD_BYTES_MAX: usize = 64 * 1024;
const HEADERS_MAX: usize = 256;

type Span = (u32, u32);

/// How long the request's body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyLength {
    Exact(u64),
    Chunked,
}

/// One request head.
#[derive(Debug)]
pub(super) struct Head {
    raw: Bytes,
    method: Span,
    target: Span,
    headers: SmallVec<[(Span, Span); 16]>,
    pub(super) minor: u8,
    pub(super) length: BodyLength,
    pub(super) keep_alive: bool,
    pub(super) expects_continue: bool,
    /// Whether any header begins with `x-sim-`.
    pub(super) simulated: bool,
}

/// Not HTTP.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

impl Head {
    /// Cuts a head off the bytes that came; `None` while it is not whole.
    pub(super) fn cut(inbox: &mut BytesMut) -> Result<Option<Self>, Malformed> {
        let mut lines = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut request = httparse::Request::new(&mut lines);
        let end = match request.parse(inbox) {
            Ok(httparse::Status::Complete(end)) => end,
            Ok(httparse::Status::Partial) if inbox.len() <= HEAD_BYTES_MAX => return Ok(None),
            _ => return Err(Malformed),
        };
        let base = inbox.as_ptr() as usize;
        let span = |part: &[u8]| {
            let start = part.as_ptr() as usize - base;
            (start as u32, (start + part.len()) as u32)
        };
        let (Some(method), Some(target)) = (request.method, request.path) else {
            return Err(Malformed);
        };
        let mut head = Self {
            raw: Bytes::new(),
            method: span(method.as_bytes()),
            target: span(target.as_bytes()),
            headers: SmallVec::new(),
            minor: request.version.unwrap_or(1),
            length: BodyLength::Exact(0),
            keep_alive: request.version == Some(1),
            expects_continue: false,
            simulated: false,
        };
        for header in request.headers.iter() {
            head.learn(header)?;
            head.headers.push((span(header.name.as_bytes()), span(header.value)));
        }
        head.raw = inbox.split_to(end).freeze();
        Ok(Some(head))
    }

    fn learn(&mut self, header: &httparse::Header<'_>) -> Result<(), Malformed> {
        let (name, value) = (header.name, header.value);
        // Told apart by length first: this runs for every header of every request.
        match name.len() {
            6 if name.eq_ignore_ascii_case("expect") => {
                self.expects_continue = value.eq_ignore_ascii_case(b"100-continue");
            }
            10 if name.eq_ignore_ascii_case("connection") => {
                if value.eq_ignore_ascii_case(b"close") {
                    self.keep_alive = false;
                } else if value.eq_ignore_ascii_case(b"keep-alive") {
                    self.keep_alive = true;
                }
            }
            14 if name.eq_ignore_ascii_case("content-length") => {
                let text = std::str::from_utf8(value).map_err(|_| Malformed)?;
                let bytes = text.trim().parse().map_err(|_| Malformed)?;
                if self.length != BodyLength::Chunked {
                    self.length = BodyLength::Exact(bytes);
                }
            }
            17 if name.eq_ignore_ascii_case("transfer-encoding") => {
                if !value.eq_ignore_ascii_case(b"chunked") {
                    return Err(Malformed);
                }
                self.length = BodyLength::Chunked;
            }
            _ => {
                let prefix = name.as_bytes().get(..6);
                self.simulated |= prefix.is_some_and(|six| six.eq_ignore_ascii_case(b"x-sim-"));
            }
        }
        Ok(())
    }

    fn part(&self, span: Span) -> &[u8] {
        self.raw.get(span.0 as usize..span.1 as usize).unwrap_or_default()
    }

    /// `GET`, `POST` …
    pub(super) fn method(&self) -> &str {
        std::str::from_utf8(self.part(self.method)).unwrap_or_default()
    }

    /// The request target as it came.
    pub(super) fn target(&self) -> &str {
        std::str::from_utf8(self.part(self.target)).unwrap_or_default()
    }

    /// The target without its query.
    pub(super) fn path(&self) -> &str {
        let target = self.target();
        target.split_once('?').map_or(target, |(path, _)| path)
    }

    /// The target's query, without the question mark.
    pub(super) fn query(&self) -> &str {
        self.target().split_once('?').map_or("", |(_, query)| query)
    }

    /// Header lines in the order they came.
    pub(super) fn headers(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.headers.iter().map(|(name, value)| (self.part(*name), self.part(*value)))
    }

    /// The first header of that name, if it is text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers().find(|(key, _)| key.eq_ignore_ascii_case(name.as_bytes()));
        found.and_then(|(_, value)| std::str::from_utf8(value).ok())
    }

    /// The first line as it came, without its end.
    pub(super) fn line(&self) -> String {
        let end = memchr::memchr(b'\r', &self.raw).unwrap_or(self.raw.len());
        String::from_utf8_lossy(self.raw.get(..end).unwrap_or_default()).into_owned()
    }
}

/// The words that go with a status.
pub(super) fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        202 => "Accepted",
        204 => "No Content",
        301 => "Moved Permanently",
        302 => "Found",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Request Entity Too Large",
        415 => "Unsupported Media Type",
        422 => "Unprocessable Entity",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Status",
    }
}

/// A date as HTTP writes it; `seconds` since 1970.
pub(super) fn date(seconds: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (days, clock) = (seconds / 86_400, seconds % 86_400);
    // Days counted from 1 March of year 0, in eras of 400 years.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let leaps = day_of_era / 1_460 + day_of_era / 146_096;
    let year_of_era = (day_of_era + day_of_era / 36_524 - leaps) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12;
    let year = era * 400 + year_of_era + u64::from(month < 2);
    let weekday = DAYS.get((days % 7) as usize).copied().unwrap_or_default();
    let month = MONTHS.get(month as usize).copied().unwrap_or_default();
    let (hour, minute, second) = (clock / 3_600, clock / 60 % 60, clock % 60);
    format!("{weekday}, {day:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str) -> Result<Option<Head>, Malformed> {
        Head::cut(&mut BytesMut::from(text))
    }

    #[test]
    fn a_head_is_cut_off_and_the_body_stays() {
        let mut inbox = BytesMut::from(
            "POST /v1/x?y=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nX-Sim-Echo: 1\r\n\r\nabc",
        );
        let head = Head::cut(&mut inbox).unwrap().unwrap();
        assert_eq!((head.method(), head.path(), head.query()), ("POST", "/v1/x", "y=1"));
        assert_eq!(head.length, BodyLength::Exact(3));
        assert!(head.keep_alive && head.simulated);
        assert_eq!(head.header("host"), Some("a"));
        assert_eq!(head.line(), "POST /v1/x?y=1 HTTP/1.1");
        assert_eq!(&inbox[..], b"abc");
    }

    #[test]
    fn half_a_head_waits_and_nonsense_is_refused() {
        assert!(cut("GET / HT").unwrap().is_none());
        assert!(cut("GET\r\n\r\n").is_err());
        assert!(cut("GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n").is_err());
        assert!(cut("GET / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n").is_err());
        let endless = format!("GET / HTTP/1.1\r\na: {}", "x".repeat(HEAD_BYTES_MAX));
        assert!(cut(&endless).is_err());
        assert!(!cut("GET / HTTP/1.0\r\n\r\n").unwrap().unwrap().keep_alive);
    }

    #[test]
    fn dates_are_written_as_http_wants() {
        assert_eq!(date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(date(951_782_400), "Tue, 29 Feb 2000 00:00:00 GMT");
        assert_eq!(date(1_796_124_791), "Tue, 01 Dec 2026 11:33:11 GMT");
    }
}

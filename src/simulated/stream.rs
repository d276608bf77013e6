//! Writing answers, healthy or faulty: heads in uvicorn's order, whole bodies, event streams.
//! Events count from the first one, which for a chat is the one with the role.

use std::borrow::Cow;
use std::io::Write as _;
use std::time::Duration;

use super::answer::{Answer, ENGINE_DEAD};
use super::connection::{Connection, Stop};
use super::faults::{End, Faults};
use super::head::reason;

/// Bytes gathered before they are written.
const OUTBOX_BYTES: usize = 64 * 1024;

/// What every answer of one exchange has in common.
pub(super) struct Reply<'a> {
    pub(super) faults: &'a Faults,
    /// The value of the `date` line.
    pub(super) date: &'a str,
    /// Whether the connection goes on afterwards, as far as the client is concerned.
    pub(super) keep_alive: bool,
    /// Whether the request's version knows chunks.
    pub(super) knows_chunks: bool,
    /// Whether a body may follow the head.
    pub(super) head_only: bool,
    /// `x-request-id` to be told.
    pub(super) request_id: Option<String>,
}

impl Reply<'_> {
    fn version(&self) -> &'static str {
        if self.faults.http10 { "HTTP/1.0" } else { "HTTP/1.1" }
    }

    fn closes(&self) -> bool {
        !self.keep_alive || self.faults.http10 || self.faults.close_delimited
    }

    fn begin(&self, out: &mut Vec<u8>, status: u16) {
        let (version, reason, date) = (self.version(), reason(status), self.date);
        let _ = write!(out, "{version} {status} {reason}\r\ndate: {date}\r\nserver: uvicorn\r\n");
    }

    fn finish(&self, out: &mut Vec<u8>, vary: bool) {
        if vary {
            out.extend_from_slice(b"vary: Origin\r\n");
        }
        if let Some(id) = &self.request_id {
            let _ = write!(out, "x-request-id: {id}\r\n");
        }
        for (name, value) in &self.faults.headers {
            let _ = write!(out, "{name}: {value}\r\n");
        }
    }

    /// Writes a plain answer; whether the connection goes on.
    pub(super) async fn whole(
        &self,
        connection: &mut Connection,
        answer: &Answer,
    ) -> Result<bool, Stop> {
        let out = &mut connection.outbox;
        self.begin(out, answer.status);
        for (name, value) in &answer.headers {
            let _ = write!(out, "{name}: {value}\r\n");
        }
        let bodiless = answer.status == 204 || answer.status == 304;
        let delimited = self.faults.http10 || self.faults.close_delimited;
        if !bodiless && !delimited {
            let length = answer.body.len() + self.faults.short.unwrap_or(0) as usize;
            let _ = write!(out, "content-length: {length}\r\n");
        }
        if let Some(content_type) = answer.content_type.filter(|_| !bodiless) {
            let _ = write!(out, "content-type: {content_type}\r\n");
        }
        self.finish(out, answer.vary);
        if self.closes() {
            out.extend_from_slice(b"connection: close\r\n");
        }
        out.extend_from_slice(b"\r\n");
        if !self.head_only && !bodiless {
            if answer.body.len() < OUTBOX_BYTES || connection.split.is_some() {
                out.extend_from_slice(&answer.body);
            } else {
                connection.flush().await?;
                connection.write(&answer.body).await?;
            }
        }
        connection.flush().await?;
        if self.faults.short.is_some() {
            return Err(connection.end(End::Fin).await);
        }
        Ok(!self.closes())
    }

    /// Begins a stream of events; its head goes out with the first flush.
    pub(super) fn events<'c>(&'c self, connection: &'c mut Connection) -> EventStream<'c> {
        let out = &mut connection.outbox;
        self.begin(out, 200);
        out.extend_from_slice(b"content-type: text/event-stream; charset=utf-8\r\n");
        self.finish(out, true);
        let delimited = self.faults.http10 || self.faults.close_delimited || !self.knows_chunks;
        if delimited || self.closes() {
            out.extend_from_slice(b"connection: close\r\n");
        }
        if !delimited {
            out.extend_from_slice(b"transfer-encoding: chunked\r\n");
        }
        out.extend_from_slice(b"\r\n");
        let mut stream = EventStream {
            connection,
            faults: self.faults,
            chunked: !delimited,
            keep_alive: !delimited && !self.closes(),
            sent: 0,
            loose: Vec::new(),
        };
        if self.faults.bom {
            stream.frame("\u{feff}".as_bytes());
        }
        stream
    }
}

/// A stream of events being written.
pub(super) struct EventStream<'a> {
    pub(super) connection: &'a mut Connection,
    faults: &'a Faults,
    chunked: bool,
    keep_alive: bool,
    sent: u32,
    /// Bytes not yet framed, when a fault sets the size of chunks.
    loose: Vec<u8>,
}

impl EventStream<'_> {
    /// Adds one event, with whatever is to go wrong before, in or instead of it.
    pub(super) async fn event(&mut self, event: &str) -> Result<(), Stop> {
        self.fail_here(event).await?;
        let gap = match self.sent {
            0 => self.faults.first_token_delay,
            _ => self.faults.gap,
        };
        if !gap.is_zero() {
            self.pause(gap).await?;
        }
        let event = self.dress(event);
        if self.faults.comments {
            self.frame(b": keep-alive\n\n");
        }
        self.frame(event.as_bytes());
        self.sent += 1;
        if self.connection.outbox.len() > OUTBOX_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    /// The faults that end the stream before the event number `self.sent`.
    async fn fail_here(&mut self, event: &str) -> Result<(), Stop> {
        if let Some((after, how)) = self.faults.cut
            && self.sent >= after
        {
            self.frame_loose();
            if self.faults.cut_inside {
                let half = &event.as_bytes()[..event.len() / 2];
                if self.chunked {
                    let _ = write!(self.connection.outbox, "{:x}\r\n", event.len());
                }
                self.connection.outbox.extend_from_slice(half);
            }
            return Err(self.connection.end(how).await);
        }
        if self.faults.garbage.is_some_and(|after| self.sent >= after) {
            self.frame_loose();
            self.connection.outbox.extend_from_slice(b"zz\x00 this is no chunk\r\n");
            return Err(self.connection.end(End::Fin).await);
        }
        Ok(())
    }

    /// Whether the engine is to die now, as a fault wants it.
    pub(super) fn dies_here(&self) -> bool {
        self.faults.engine_error.is_some_and(|after| self.sent >= after)
    }

    /// The end of a stream whose engine died, as vLLM writes it.
    pub(super) async fn die(mut self) -> Result<bool, Stop> {
        let error = format!(
            "data: {{\"error\": {{\"message\": \"{ENGINE_DEAD}\", \"type\": \
             \"InternalServerError\", \"param\": null, \"code\": 500}}}}\n\n"
        );
        self.frame(error.as_bytes());
        self.frame(super::wire::DONE.as_bytes());
        self.finish().await
    }

    /// Ends the stream; whether the connection goes on.
    pub(super) async fn close(mut self) -> Result<bool, Stop> {
        self.fail_here("data: [DONE]\n\n").await?;
        if self.faults.no_last_chunk {
            self.frame_loose();
            return Err(self.connection.end(End::Fin).await);
        }
        self.finish().await
    }

    async fn finish(&mut self) -> Result<bool, Stop> {
        self.frame_loose();
        if self.chunked {
            self.connection.outbox.extend_from_slice(b"0\r\n\r\n");
        }
        self.connection.flush().await?;
        Ok(self.keep_alive)
    }

    /// Writes what was added so far.
    pub(super) async fn flush(&mut self) -> Result<(), Stop> {
        self.frame_loose();
        self.connection.flush().await
    }

    async fn pause(&mut self, gap: Duration) -> Result<(), Stop> {
        self.flush().await?;
        self.connection.pause(gap).await
    }

    fn dress<'e>(&self, event: &'e str) -> Cow<'e, str> {
        match (self.faults.crlf, self.faults.cr) {
            (true, _) => Cow::Owned(event.replace('\n', "\r\n")),
            (false, true) => Cow::Owned(event.replace('\n', "\r")),
            (false, false) => Cow::Borrowed(event),
        }
    }

    fn frame(&mut self, bytes: &[u8]) {
        if self.faults.chunk.is_some() && self.chunked {
            self.loose.extend_from_slice(bytes);
        } else {
            frame(&mut self.connection.outbox, bytes, self.chunked);
        }
    }

    /// Frames what was kept loose, in chunks of the size the fault wants.
    fn frame_loose(&mut self) {
        let size = self.faults.chunk.unwrap_or(1).max(1) as usize;
        for piece in self.loose.chunks(size) {
            frame(&mut self.connection.outbox, piece, true);
        }
        self.loose.clear();
    }
}

fn frame(out: &mut Vec<u8>, bytes: &[u8], chunked: bool) {
    if chunked {
        let _ = write!(out, "{:x}\r\n", bytes.len());
    }
    out.extend_from_slice(bytes);
    if chunked {
        out.extend_from_slice(b"\r\n");
    }
}

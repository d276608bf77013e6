//! Reads server-sent events out of the chunks of a stream, however the chunks are cut. Pure.
//! Nothing here knows what an event means (see `progress.rs`), and nothing is decoded: bytes in,
//! bytes out. The form is that of the HTML standard, section "server-sent events"; of its fields
//! only `event` and `data` are of use here. To read one more field: a case in `field`.
//!
//! An event that lies whole in one chunk is lent out of the chunk itself: no copy, no allocation.
//! Only the tail of an event that is still to come is carried over to the next chunk.

use memchr::memchr2;

/// The most bytes of one line, and of the data of one event. A larger event is skipped and
/// counted, and reading goes on with the next.
pub const EVENT_BYTES_MAX: usize = 1 << 20;

/// The memory a reader may keep from one event to the next.
const CARRY_BYTES_MAX: usize = 16 * 1024;

/// Some producers begin a stream with a byte order mark.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// One event, lent for the time of looking at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    /// The value of the last `event` line; empty when there is none.
    pub name: &'a [u8],
    /// The values of the `data` lines, joined by line feeds.
    pub data: &'a [u8],
}

/// Where reading stands between two chunks.
#[derive(Debug)]
pub struct EventReader {
    /// The line that has begun and not ended.
    line: Vec<u8>,
    /// The length of that line, also while it is not kept.
    line_length: usize,
    name: Vec<u8>,
    data: Vec<u8>,
    /// Whether there was a `data` line, be it empty.
    has_data: bool,
    /// Not a byte of the stream has been read.
    at_start: bool,
    /// The last byte was a carriage return: a line feed now belongs to it.
    after_return: bool,
    /// The event is too large: nothing is kept until the empty line that ends it.
    skipping: bool,
    skipped: u64,
    bytes_max: usize,
}

impl Default for EventReader {
    fn default() -> Self {
        Self::new(EVENT_BYTES_MAX)
    }
}

impl EventReader {
    /// A reader that skips events larger than `bytes_max`. It takes no memory before it must.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            line: Vec::new(),
            line_length: 0,
            name: Vec::new(),
            data: Vec::new(),
            has_data: false,
            at_start: true,
            after_return: false,
            skipping: false,
            skipped: 0,
            bytes_max,
        }
    }

    /// Events that were too large to be read.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Reads a chunk and hands each event that ends in it to `each`.
    pub fn read(&mut self, chunk: &[u8], mut each: impl FnMut(Event<'_>)) {
        let mut rest = chunk;
        if self.after_return && !rest.is_empty() {
            self.after_return = false;
            rest = rest.strip_prefix(b"\n").unwrap_or(rest);
        }
        // Once the chunk was seen to end before the event does, looking again would be in vain.
        let mut may_be_whole = true;
        while !rest.is_empty() {
            if may_be_whole && self.is_between_events() {
                if let Some(after) = self.whole_event(rest, &mut each) {
                    rest = after;
                    continue;
                }
                may_be_whole = false;
            }
            let Some((line, after)) = self.split_line(rest) else {
                self.keep(rest);
                return;
            };
            may_be_whole |= self.end_line(line, &mut each);
            rest = after;
        }
    }

    /// The stream has ended: an event that no empty line followed is handed out too, since some
    /// engines leave that line away at the end.
    pub fn end(&mut self, mut each: impl FnMut(Event<'_>)) {
        if self.line_length > 0 {
            self.end_line(b"", &mut each);
        }
        self.end_event(&mut each);
    }

    fn is_between_events(&self) -> bool {
        self.line_length == 0 && !self.has_data && !self.skipping && self.name.is_empty()
    }

    /// Hands out the event at the start of `bytes` if it ends in them and is a plain one, and
    /// returns what follows it. Otherwise nothing has changed.
    fn whole_event<'a>(
        &mut self,
        bytes: &'a [u8],
        each: &mut impl FnMut(Event<'_>),
    ) -> Option<&'a [u8]> {
        let mut rest = bytes;
        if self.at_start {
            rest = rest.strip_prefix(MARK).unwrap_or(rest);
        }
        let mut event = Event { name: b"", data: b"" };
        let mut has_data = false;
        loop {
            let end = memchr2(b'\n', b'\r', rest)?;
            let (line, after) = rest.split_at(end);
            rest = match after {
                [b'\r', b'\n', after @ ..] | [_, after @ ..] => after,
                [] => return None,
            };
            match field(line) {
                _ if self.bytes_max < line.len() => return None,
                Field::End => {
                    self.after_return = after == b"\r";
                    if has_data {
                        each(event);
                    }
                    return Some(rest);
                }
                Field::Data(_) if has_data => return None,
                Field::Data(value) => {
                    event.data = value;
                    has_data = true;
                }
                Field::Name(value) => event.name = value,
                Field::Other => {}
            }
        }
    }

    /// The first line of `bytes` without its end, and what follows; `None` if it does not end.
    fn split_line<'a>(&mut self, bytes: &'a [u8]) -> Option<(&'a [u8], &'a [u8])> {
        let end = memchr2(b'\n', b'\r', bytes)?;
        let (line, after) = bytes.split_at(end);
        self.after_return = after == b"\r";
        match after {
            [b'\r', b'\n', after @ ..] | [_, after @ ..] => Some((line, after)),
            [] => None,
        }
    }

    /// Carries a piece of a line over to what follows.
    fn keep(&mut self, piece: &[u8]) {
        self.line_length = self.line_length.saturating_add(piece.len());
        if self.skipping {
            return;
        }
        // The mark does not count as part of the first line, and cannot be told from it yet.
        if self.bytes_max + MARK.len() < self.line_length {
            self.skip();
        } else {
            self.line.extend_from_slice(piece);
        }
    }

    /// A line ends with `piece`. True if it was the empty one that ends an event.
    fn end_line(&mut self, piece: &[u8], each: &mut impl FnMut(Event<'_>)) -> bool {
        if self.line_length == 0 {
            return self.whole_line(piece, each);
        }
        self.keep(piece);
        self.line_length = 0;
        let mut line = std::mem::take(&mut self.line);
        // While skipping, the line that just ended had bytes, so it is not the empty one.
        let ended = !self.skipping && self.whole_line(&line, each);
        line.clear();
        self.line = small(line);
        ended
    }

    fn whole_line(&mut self, line: &[u8], each: &mut impl FnMut(Event<'_>)) -> bool {
        let mut line = line;
        if std::mem::take(&mut self.at_start) {
            line = line.strip_prefix(MARK).unwrap_or(line);
        }
        if self.bytes_max < line.len() {
            self.skip();
        }
        match field(line) {
            Field::End => {
                self.end_event(each);
                return true;
            }
            _ if self.skipping => {}
            Field::Data(value) => self.add_data(value),
            Field::Name(value) => {
                self.name.clear();
                self.name.extend_from_slice(value);
            }
            Field::Other => {}
        }
        false
    }

    fn add_data(&mut self, value: &[u8]) {
        if self.has_data {
            if self.bytes_max < self.data.len() + 1 + value.len() {
                self.skip();
                return;
            }
            self.data.push(b'\n');
        }
        self.has_data = true;
        self.data.extend_from_slice(value);
    }

    fn end_event(&mut self, each: &mut impl FnMut(Event<'_>)) {
        if std::mem::take(&mut self.skipping) {
            self.skipped += 1;
        } else if self.has_data {
            each(Event { name: &self.name, data: &self.data });
        }
        self.forget();
    }

    /// The event is too large: what was carried of it is freed, and nothing more is.
    fn skip(&mut self) {
        self.skipping = true;
        self.at_start = false;
        self.line = Vec::new();
        self.forget();
    }

    fn forget(&mut self) {
        self.has_data = false;
        self.data.clear();
        self.data = small(std::mem::take(&mut self.data));
        self.name.clear();
        self.name = small(std::mem::take(&mut self.name));
    }
}

/// An empty block of memory to use again, unless it has grown large.
fn small(block: Vec<u8>) -> Vec<u8> {
    if block.capacity() <= CARRY_BYTES_MAX { block } else { Vec::new() }
}

enum Field<'a> {
    Data(&'a [u8]),
    Name(&'a [u8]),
    /// The empty line.
    End,
    /// A comment, or a field that is of no use here.
    Other,
}

fn field(line: &[u8]) -> Field<'_> {
    let value = |rest: &'static str| match line.strip_prefix(rest.as_bytes()) {
        Some([b':', b' ', value @ ..] | [b':', value @ ..]) => Some(value),
        Some([]) => Some(&b""[..]),
        Some(_) | None => None,
    };
    if line.is_empty() {
        Field::End
    } else if let Some(value) = value("data") {
        Field::Data(value)
    } else if let Some(value) = value("event") {
        Field::Name(value)
    } else {
        Field::Other
    }
}

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
        self.end_line(b"", &mut each);
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
                    self.at_start = false;
                    // A line feed may still follow a carriage return: one more empty line, which
                    // between two events means nothing.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Owned = (Vec<u8>, Vec<u8>);

    fn owned(event: Event<'_>) -> Owned {
        (event.name.to_vec(), event.data.to_vec())
    }

    /// The events of `chunks`, and how many were skipped.
    fn read(bytes_max: usize, chunks: &[&[u8]]) -> (Vec<Owned>, u64) {
        let mut reader = EventReader::new(bytes_max);
        let mut events = Vec::new();
        for chunk in chunks {
            reader.read(chunk, |event| events.push(owned(event)));
        }
        reader.end(|event| events.push(owned(event)));
        (events, reader.skipped())
    }

    /// The data of the events and how many were skipped: the same in chunks of every size.
    fn in_chunks(bytes_max: usize, stream: &[u8]) -> (Vec<String>, u64) {
        let read = |size| {
            let chunks: Vec<&[u8]> = stream.chunks(size).collect();
            read(bytes_max, &chunks)
        };
        let (events, skipped) = read(stream.len());
        for size in 1..stream.len() {
            assert_eq!(read(size), (events.clone(), skipped), "in chunks of {size}");
        }
        let text = |(_, data)| String::from_utf8(data).unwrap();
        (events.into_iter().map(text).collect(), skipped)
    }

    fn data(stream: &[u8]) -> Vec<String> {
        let (events, skipped) = read(EVENT_BYTES_MAX, &[stream]);
        assert_eq!(skipped, 0);
        events.into_iter().map(|(_, data)| String::from_utf8(data).unwrap()).collect()
    }

    /// The same, written once more the plain way: the whole stream in hand, line by line.
    fn plainly(bytes_max: usize, stream: &[u8]) -> (Vec<Owned>, u64) {
        let stream = stream.strip_prefix(MARK).unwrap_or(stream);
        let mut lines: Vec<&[u8]> = Vec::new();
        let mut rest = stream;
        while !rest.is_empty() {
            let end = rest.iter().position(|byte| b"\r\n".contains(byte)).unwrap_or(rest.len());
            lines.push(&rest[..end]);
            let length = if rest[end..].starts_with(b"\r\n") { 2 } else { 1 };
            rest = rest.get(end + length..).unwrap_or_default();
        }
        lines.push(b"");
        let (mut events, mut skipped) = (Vec::new(), 0);
        let (mut name, mut data, mut large) = (Vec::new(), None::<Vec<u8>>, false);
        for line in lines {
            if line.is_empty() {
                skipped += u64::from(large);
                if let (Some(data), false) = (data.take(), large) {
                    events.push((name, data));
                }
                (name, data, large) = (Vec::new(), None, false);
                continue;
            }
            large |= bytes_max < line.len();
            let mut parts = line.splitn(2, |byte| *byte == b':');
            let key = parts.next().unwrap();
            let value = parts.next().unwrap_or_default();
            let value = value.strip_prefix(b" ").unwrap_or(value);
            if key == b"event" {
                name = value.to_vec();
            } else if key == b"data" {
                data = Some(match data {
                    None => value.to_vec(),
                    Some(before) => [&before, &b"\n"[..], value].concat(),
                });
                large |= data.as_ref().is_some_and(|data| bytes_max < data.len());
            }
        }
        (events, skipped)
    }

    #[test]
    fn all_three_line_ends_end_lines() {
        for end in ["\n", "\r\n", "\r"] {
            let stream = format!("data: a{end}{end}event: x{end}data: b{end}{end}");
            let (events, _) = read(EVENT_BYTES_MAX, &[stream.as_bytes()]);
            assert_eq!(events, [(vec![], b"a".to_vec()), (b"x".to_vec(), b"b".to_vec())]);
        }
        assert_eq!(data(b"data: a\r\n\rdata: b\n\r\n"), ["a", "b"]);
    }

    #[test]
    fn comments_and_unknown_fields_are_passed_over() {
        assert_eq!(data(b": ping\n\nid: 7\nretry: 3\n: x\ndata: a\n\n:\n\n"), ["a"]);
        assert_eq!(data(b"data2: a\n\ndatum\n\n data: a\n\n"), [""; 0]);
    }

    #[test]
    fn data_lines_are_joined_and_one_space_is_dropped() {
        assert_eq!(data(b"data: a\ndata:b\ndata:  c\n\n"), ["a\nb\n c"]);
        assert_eq!(data(b"data\n\ndata:\n\ndata: \n\ndata\ndata\n\n"), ["", "", "", "\n"]);
    }

    #[test]
    fn an_event_without_data_is_none() {
        assert_eq!(data(b"event: ping\n\n\n\ndata: a\n\n"), ["a"]);
    }

    #[test]
    fn the_last_name_counts_and_does_not_leak_into_the_next_event() {
        let stream = b"event: a\nevent: b\ndata: 1\n\ndata: 2\n\n";
        for size in 1..=stream.len() {
            let chunks: Vec<&[u8]> = stream.chunks(size).collect();
            let (events, _) = read(99, &chunks);
            assert_eq!(events, [(b"b".to_vec(), b"1".to_vec()), (vec![], b"2".to_vec())]);
        }
    }

    #[test]
    fn a_last_event_without_an_empty_line_is_read() {
        assert_eq!(data(b"data: a\n\ndata: b"), ["a", "b"]);
        assert_eq!(data(b"data: a\n\ndata: b\n"), ["a", "b"]);
        assert_eq!(data(b"data: b\ndata: c"), ["b\nc"]);
    }

    #[test]
    fn a_byte_order_mark_is_dropped_only_at_the_start() {
        assert_eq!(data(b"\xef\xbb\xbfdata: a\n\n"), ["a"]);
        assert_eq!(data(b"\xef\xbb\xbf\ndata: a\n\n"), ["a"]);
        assert_eq!(data(b"data: a\n\n\xef\xbb\xbfdata: b\n\n"), ["a"]);
        let mark: Vec<&[u8]> = b"\xef\xbb\xbfdata: a\n\n".chunks(1).collect();
        assert_eq!(read(99, &mark).0.len(), 1);
    }

    #[test]
    fn characters_cut_in_the_middle_stay_whole() {
        let text = "data: {\"content\":\"漢字 🤦🏽‍♀️ é\"}\n\n";
        let bytes: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        let (events, _) = read(EVENT_BYTES_MAX, &bytes);
        assert_eq!(events[0].1, "{\"content\":\"漢字 🤦🏽‍♀️ é\"}".as_bytes());
    }

    #[test]
    fn a_data_line_of_just_the_limit_is_read_and_one_byte_more_is_skipped() {
        let next = "data: a\n\n";
        let just = format!("data:12345\n\n{next}");
        assert_eq!(in_chunks(10, just.as_bytes()), (vec!["12345".into(), "a".into()], 0));
        let more = format!("data:123456\n\n{next}");
        assert_eq!(in_chunks(10, more.as_bytes()), (vec!["a".into()], 1));
    }

    #[test]
    fn many_small_data_lines_are_bounded_too() {
        let just = b"data:12345\ndata:123456\n\n";
        assert_eq!(in_chunks(12, just), (vec!["12345\n123456".into()], 0));
        let more = b"data:12345\ndata:1234567\n\ndata:a\n\n";
        assert_eq!(in_chunks(12, more), (vec!["a".into()], 1));
    }

    #[test]
    fn an_endless_line_keeps_no_memory() {
        let mut reader = EventReader::new(1000);
        for _ in 0..10_000 {
            reader.read(&[b'x'; 100], |_| panic!("no event ended"));
            assert!(reader.line.capacity() <= 2 * 1003);
        }
        assert_eq!(reader.line.capacity(), 0);
        reader.read(b"\n\ndata: a\n\n", |event| assert_eq!(event.data, b"a"));
        assert_eq!(reader.skipped(), 1);
    }

    #[test]
    fn an_event_that_is_skipped_at_the_end_is_counted() {
        assert_eq!(read(10, &[b"data: 1234567890"]), (vec![], 1));
        assert_eq!(read(10, &[b"data: 1234567890\n", b"x"]), (vec![], 1));
    }

    #[test]
    fn whole_events_in_a_chunk_cost_no_memory() {
        let mut reader = EventReader::default();
        let mut events = 0;
        for _ in 0..100 {
            reader.read(b"event: a\ndata: b\n\n: ping\n\ndata: c\r\n\r\n", |_| events += 1);
        }
        assert_eq!(events, 200);
        let kept = [&reader.line, &reader.data, &reader.name].map(Vec::capacity);
        assert_eq!(kept, [0, 0, 0]);
    }

    #[test]
    fn events_are_lent_out_of_the_chunk_itself() {
        fn lent(reader: &mut EventReader, chunk: &[u8]) -> usize {
            let mut lent = 0;
            let inside = chunk.as_ptr_range();
            reader.read(chunk, |event| lent += usize::from(inside.contains(&event.data.as_ptr())));
            lent
        }
        let mut reader = EventReader::default();
        assert_eq!(lent(&mut reader, b"data: abc\n\ndata: def\n\ndata: a"), 2);
        assert_eq!(lent(&mut reader, b"bc\n\ndata: def\n\n"), 1, "the first came in two pieces");
        assert_eq!(lent(&mut reader, b"data: a\ndata: b\n\ndata: c\n\n"), 1, "two are joined");
    }

    #[test]
    fn a_first_line_of_just_the_limit_may_have_a_mark_before_it() {
        let just = b"\xef\xbb\xbfdata:12345\n\n";
        assert_eq!(in_chunks(10, just), (vec!["12345".into()], 0));
        let more = b"\xef\xbb\xbfdata:123456\n\n";
        assert_eq!(in_chunks(10, more), (vec![], 1));
    }

    #[test]
    fn a_mark_after_a_first_line_that_was_too_long_is_no_mark() {
        let stream = b"data: 12345678901234567890\n\xef\xbb\xbf\ndata: b\n\ndata: a\n\n";
        assert_eq!(in_chunks(10, stream), (vec!["a".into()], 1));
    }

    #[test]
    fn while_an_event_is_skipped_nothing_of_it_is_kept() {
        let mut reader = EventReader::new(10 * CARRY_BYTES_MAX);
        let line = [b"data: ", vec![b'x'; 3 * CARRY_BYTES_MAX].as_slice(), b"\n"].concat();
        reader.read(b"event: n\n", |_| ());
        for _ in 0..5 {
            reader.read(&line, |_| panic!("no event ended"));
        }
        assert!(reader.skipping);
        assert_eq!([reader.line.capacity(), reader.data.capacity(), reader.name.len()], [0, 0, 0]);
    }

    #[test]
    fn memory_of_a_large_event_is_given_back_and_of_a_small_one_used_again() {
        let mut reader = EventReader::default();
        let mut seen = 0;
        let large = vec![b'x'; 2 * CARRY_BYTES_MAX];
        for name in [&b"event: "[..], b"\ndata: "] {
            reader.read(name, |_| ());
            reader.read(&large, |_| ());
        }
        reader.read(b"\n\n", |event| seen = event.data.len().min(event.name.len()));
        assert_eq!(seen, large.len());
        let kept = [&reader.line, &reader.data, &reader.name].map(Vec::capacity);
        assert_eq!(kept, [0, 0, 0]);
        reader.read(b"event: n\ndata: small", |_| ());
        reader.read(b"\n\n", |event| seen = event.data.len());
        assert_eq!(seen, 5);
        assert!(
            [&reader.line, &reader.data, &reader.name]
                .iter()
                .all(|kept| { kept.capacity() > 0 && kept.capacity() <= CARRY_BYTES_MAX })
        );
    }

    #[test]
    fn many_short_lines_in_one_chunk_are_read_in_one_pass() {
        // 2 MiB of lines without an event's end: looking ahead from each would take minutes.
        let chunk = b":\n".repeat(1 << 20);
        let mut reader = EventReader::default();
        reader.read(&chunk, |_| ());
        reader.read(b"data: a\n\n", |event| assert_eq!(event.data, b"a"));
    }

    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            Just(b"\n".to_vec()),
            Just(b"\n\n".to_vec()),
            Just(b"\r\n\r\n".to_vec()),
            Just(b"\r".to_vec()),
            Just(b"\r\n".to_vec()),
            Just(b"data: ".to_vec()),
            Just(b"data:".to_vec()),
            Just(b"data".to_vec()),
            Just(b"event: ".to_vec()),
            Just(b"event".to_vec()),
            Just(b": ping".to_vec()),
            Just(b"[DONE]".to_vec()),
            Just(MARK.to_vec()),
            prop::collection::vec(any::<u8>(), 0..9),
            Just("漢🤦".as_bytes().to_vec()),
        ];
        prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_cut_of_the_stream_gives_the_same_events(
            stream in stream(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            bytes_max in prop_oneof![Just(9usize), Just(12), Just(16), Just(EVENT_BYTES_MAX)],
        ) {
            let expected = plainly(bytes_max, &stream);
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            let mut chunks = Vec::new();
            let mut from = 0;
            for cut in cuts {
                chunks.push(&stream[from..cut]);
                from = cut;
            }
            chunks.push(&stream[from..]);
            prop_assert_eq!(&read(bytes_max, &[&stream]), &expected, "in one chunk");
            prop_assert_eq!(&read(bytes_max, &chunks), &expected, "cut");
            let single: Vec<&[u8]> = stream.chunks(1).collect();
            prop_assert_eq!(&read(bytes_max, &single), &expected, "byte by byte");
        }
    }
}

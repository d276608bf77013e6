//! What the response phases hold of a request: a tap on the chunks as they pass. It never changes,
//! delays or holds back a chunk, and reads no clock: it says what it saw, the shell stamps times.
//! What it does was decided before the first chunk (`need.rs`). To see one more thing in a stream:
//! a field in `Seen` or `Finished`, filled from `progress.rs`.

use super::buffer::{ResponseBuffer, Skip};
use super::events::EventReader;
use super::need::{Plan, Reading, Shape};
use super::progress::{Disguise, Progress, is_error, was_aborted};
use super::{Budget, Usage};
use crate::request::Wire;

/// What was seen in one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The first token of the stream is in this chunk.
    pub first_token: bool,
    /// Events of this chunk that carry a token.
    pub token_events: u32,
    /// The stream says, in this chunk or before, that it failed.
    pub failed: bool,
    /// The stream said, in this chunk or before, that it is over.
    pub ended: bool,
}

/// Whether a stream said that it is over, before it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndMark {
    /// It was not a stream, or not one we can read.
    NotRead,
    /// It did.
    Seen,
    /// It did not: what the client has is cut, though the connection may have closed cleanly.
    Missing,
}

/// What a tap has to tell in the end.
#[derive(Debug)]
pub struct Finished {
    /// The usage that events reported; that of a whole body is read by its consumer.
    pub usage: Option<Usage>,
    /// Events that carried a token.
    pub token_events: u64,
    /// How the answer failed behind a status of success.
    pub disguise: Option<Disguise>,
    /// Whether a stream said that it is over.
    pub end_mark: EndMark,
    /// Events too large to be read.
    pub events_skipped: u64,
    /// The copy, if somebody needed one.
    pub body: Option<ResponseBuffer>,
}

/// The tap on one answer. The default one does nothing.
#[derive(Debug, Default)]
pub struct Tap {
    stream: Option<Stream>,
    buffer: Option<ResponseBuffer>,
    /// The form of an answer of success that is kept; for the look at it in the end.
    kept: Option<Wire>,
}

#[derive(Debug)]
struct Stream {
    reader: EventReader,
    progress: Progress,
    token_events: u64,
}

impl Stream {
    fn new(wire: Wire, reading: Reading) -> Option<Self> {
        let progress = Progress::new(wire, reading);
        let reader = EventReader::default();
        (reading != Reading::Nothing).then_some(Self { reader, progress, token_events: 0 })
    }

    fn chunk(&mut self, chunk: &[u8]) -> Seen {
        let mut token_events = 0;
        let progress = &mut self.progress;
        self.reader.read(chunk, |event| token_events += u32::from(progress.event(event)));
        let first_token = self.token_events == 0 && token_events > 0;
        self.token_events += u64::from(token_events);
        let failed = progress.disguise.is_some();
        Seen { first_token, token_events, failed, ended: progress.ended }
    }
}

impl Tap {
    /// A tap that carries out `plan` on an answer of this shape. `declared` is its length, if its
    /// head says so.
    pub fn new(plan: Plan, shape: &Shape, declared: Option<usize>, budget: &Budget) -> Self {
        let buffer = plan
            .buffer_bytes_max
            .map(|bytes_max| ResponseBuffer::new(bytes_max, declared, budget.clone()));
        let readable = shape.succeeded() && !shape.encoded && !shape.streaming;
        Self {
            stream: Stream::new(shape.wire, plan.reading),
            kept: (readable && buffer.is_some()).then_some(shape.wire),
            buffer,
        }
    }

    /// Looks at a chunk that is being passed on, and appends it if there is a buffer.
    pub fn chunk(&mut self, chunk: &[u8]) -> Seen {
        if let Some(buffer) = &mut self.buffer {
            buffer.append(chunk);
        }
        self.stream.as_mut().map_or_else(Seen::default, |stream| stream.chunk(chunk))
    }

    /// Whether anything of the answer is kept now.
    pub fn keeps(&self) -> bool {
        self.buffer.as_ref().is_some_and(|buffer| buffer.bytes().is_ok())
    }

    /// Frees what was kept, at once: the answer broke off, and no consumer wants a part of one.
    pub fn give_up(&mut self) {
        if let Some(buffer) = &mut self.buffer {
            buffer.give_up(Skip::Incomplete);
        }
    }

    /// The answer has ended, well or not.
    pub fn finish(self) -> Finished {
        let mut finished = Finished {
            usage: None,
            token_events: 0,
            disguise: None,
            end_mark: EndMark::NotRead,
            events_skipped: 0,
            body: self.buffer,
        };
        if let Some(Stream { mut reader, mut progress, mut token_events }) = self.stream {
            reader.end(|event| token_events += u64::from(progress.event(event)));
            finished.usage = progress.usage();
            finished.token_events = token_events;
            finished.disguise = progress.disguise;
            finished.end_mark = if progress.ended { EndMark::Seen } else { EndMark::Missing };
            finished.events_skipped = reader.skipped();
        } else if let (Some(wire), Some(body)) = (self.kept, &finished.body) {
            finished.disguise = body.bytes().ok().and_then(|body| disguise(wire, body));
        }
        finished
    }
}

/// How a whole answer with a status of success says that it failed.
fn disguise(wire: Wire, body: &[u8]) -> Option<Disguise> {
    match wire {
        Wire::Chat | Wire::Completion if was_aborted(body) => Some(Disguise::Aborted),
        Wire::Chat | Wire::Completion | Wire::Pooling if is_error(body) => Some(Disguise::Error),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::hint::black_box;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::need::{Need, plan};
    use super::*;
    use crate::names::Tokens;

    fn shape(wire: Wire, streaming: bool) -> Shape {
        Shape { wire, status: 200, streaming, encoded: false, bodyless: false }
    }

    fn tap(need: Need, shape: Shape) -> Tap {
        Tap::new(plan(need, &shape), &shape, None, &Budget::new(Arc::default(), 1 << 20))
    }

    fn stream(need: Need) -> Tap {
        tap(need, shape(Wire::Chat, true))
    }

    #[test]
    fn a_last_event_without_its_blank_line_is_counted_with_the_others() {
        let mut tap = stream(Need::Nothing);
        let token = event("{\"content\":\"x\"}");
        tap.chunk(token.as_bytes());
        tap.chunk(token.trim_end().as_bytes());
        assert_eq!(tap.finish().token_events, 2);
    }

    fn event(delta: &str) -> String {
        format!(
            "data: {{\"id\":\"chatcmpl-806c642a00238c54\",\"object\":\"chat.completion.chunk\",\
             \"created\":1796124791,\"model\":\"tiny/qwen-tiny\",\"choices\":[{{\"index\":0,\
             \"delta\":{delta},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}}]}}\n\n"
        )
    }

    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":16,\
        \"total_tokens\":22,\"completion_tokens\":6,\"prompt_tokens_details\":null}}\n\n";

    fn whole() -> String {
        [
            event(r#"{"role":"assistant","content":""}"#),
            event(r#"{"content":"漢"}"#),
            event(r#"{"content":"data: [DONE]"}"#),
            ": ping\r\n\r\n".to_owned(),
            USAGE.to_owned(),
            "data: [DONE]".to_owned(),
        ]
        .concat()
    }

    #[test]
    fn the_first_token_is_the_first_event_with_content() {
        let mut tap = stream(Need::Nothing);
        let role = tap.chunk(event(r#"{"role":"assistant","content":""}"#).as_bytes());
        assert_eq!(role, Seen::default());
        let two = [event(r#"{"content":"a"}"#), event(r#"{"content":"b"}"#)].concat();
        let seen = tap.chunk(two.as_bytes());
        assert_eq!(seen, Seen { first_token: true, token_events: 2, ..Seen::default() });
        let seen = tap.chunk(event(r#"{"content":"c"}"#).as_bytes());
        assert_eq!(seen, Seen { token_events: 1, ..Seen::default() });
        assert_eq!(tap.finish().token_events, 3);
    }

    #[test]
    fn a_token_is_seen_when_its_event_ends() {
        let mut tap = stream(Need::Events);
        let event = event(r#"{"content":"a"}"#);
        let (front, back) = event.split_at(event.len() - 1);
        assert_eq!(tap.chunk(front.as_bytes()), Seen::default());
        assert!(tap.chunk(back.as_bytes()).first_token);
    }

    #[test]
    fn the_end_is_known_only_from_the_engines_own_mark() {
        let mut tap = stream(Need::Nothing);
        tap.chunk(event(r#"{"content":"data: [DONE]"}"#).as_bytes());
        assert_eq!(tap.finish().end_mark, EndMark::Missing);
        let mut tap = stream(Need::Nothing);
        assert!(tap.chunk(b"data: [DONE]\n\n").ended);
        assert_eq!(tap.finish().end_mark, EndMark::Seen);
        assert_eq!(
            self::tap(Need::Nothing, shape(Wire::Chat, false)).finish().end_mark,
            EndMark::NotRead
        );
        assert_eq!(Tap::default().finish().end_mark, EndMark::NotRead);
    }

    #[test]
    fn a_failure_in_the_stream_is_told_at_once_and_in_the_end() {
        let mut tap = stream(Need::Nothing);
        assert!(!tap.chunk(event(r#"{"content":"a"}"#).as_bytes()).failed);
        let seen = tap.chunk(b"data: {\"error\": {\"code\": 500}}\n\ndata: [DONE]\n\n");
        assert!(seen.failed && seen.ended);
        assert_eq!(tap.finish().disguise, Some(Disguise::Error));
    }

    #[test]
    fn a_whole_answer_may_have_failed_too() {
        let keep = Need::Whole { bytes_max: 1000 };
        let error = br#"{"error":{"message":"m"}}"#;
        let abort = br#"{"choices":[{"message":{"content":"x"},"finish_reason":"abort"}]}"#;
        let fine = br#"{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}"#;
        for (wire, status, body, expected) in [
            (Wire::Chat, 200, &error[..], Some(Disguise::Error)),
            (Wire::Completion, 200, error, Some(Disguise::Error)),
            (Wire::Pooling, 200, error, Some(Disguise::Error)),
            (Wire::Responses, 200, error, None),
            (Wire::Chat, 500, error, None),
            (Wire::Chat, 200, abort, Some(Disguise::Aborted)),
            (Wire::Completion, 200, abort, Some(Disguise::Aborted)),
            (Wire::Pooling, 200, abort, None),
            (Wire::Chat, 200, fine, None),
        ] {
            let shape = Shape { status, ..shape(wire, false) };
            let mut tap = tap(keep, shape);
            assert_eq!(tap.chunk(body), Seen::default());
            assert_eq!(tap.finish().disguise, expected, "{wire:?} {status}");
        }
        let mut compressed = tap(keep, Shape { encoded: true, ..shape(Wire::Chat, false) });
        compressed.chunk(error);
        assert_eq!(compressed.finish().disguise, None);
        let mut cut = tap(keep, shape(Wire::Chat, false));
        cut.chunk(error);
        cut.give_up();
        assert!(!cut.keeps());
        assert_eq!(cut.finish().disguise, None);
    }

    #[test]
    fn a_stream_that_is_kept_is_read_too() {
        let mut tap = stream(Need::Whole { bytes_max: 10_000 });
        assert!(tap.keeps());
        tap.chunk(whole().as_bytes());
        let finished = tap.finish();
        assert_eq!(finished.body.unwrap().bytes(), Ok(whole().as_bytes()));
        assert_eq!(finished.usage.unwrap().prompt, Some(Tokens(16)));
        assert_eq!(finished.token_events, 2);
    }

    #[test]
    fn a_stream_is_read_on_when_its_copy_is_given_up() {
        let mut tap = stream(Need::Whole { bytes_max: 10 });
        tap.chunk(whole().as_bytes());
        assert!(!tap.keeps());
        let finished = tap.finish();
        assert_eq!(finished.body.unwrap().bytes(), Err(Skip::TooLarge));
        assert_eq!(finished.usage.unwrap().prompt, Some(Tokens(16)));
    }

    #[test]
    fn the_default_tap_does_nothing() {
        let mut tap = Tap::default();
        assert_eq!(tap.chunk(whole().as_bytes()), Seen::default());
        assert!(!tap.keeps());
        tap.give_up();
        assert!(tap.finish().body.is_none());
    }

    #[test]
    fn events_too_large_are_told_in_the_end() {
        let mut tap = stream(Need::Nothing);
        tap.chunk(&vec![b'x'; super::super::EVENT_BYTES_MAX + 10]);
        tap.chunk(b"\n\n");
        tap.chunk(event(r#"{"content":"a"}"#).as_bytes());
        let finished = tap.finish();
        assert_eq!((finished.events_skipped, finished.token_events), (1, 1));
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same_count(cuts in prop::collection::vec(1usize..200, 1..40)) {
            let text = whole();
            let mut rest = text.as_bytes();
            let mut tap = stream(Need::Events);
            let (mut first, mut tokens) = (0, 0);
            for cut in cuts.into_iter().cycle() {
                let (chunk, after) = rest.split_at(cut.min(rest.len()));
                let seen = tap.chunk(chunk);
                first += u32::from(seen.first_token);
                tokens += seen.token_events;
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            let finished = tap.finish();
            prop_assert_eq!((first, tokens, finished.token_events), (1, 2, 2));
            let usage = finished.usage.unwrap();
            prop_assert_eq!((usage.prompt, usage.completion), (Some(Tokens(16)), Some(Tokens(6))));
            prop_assert_eq!(finished.end_mark, EndMark::Seen);
        }
    }

    /// Run with `cargo test --release -- --ignored --nocapture nanoseconds`.
    #[test]
    #[ignore = "tells nanoseconds per event; only of use in release"]
    fn nanoseconds_per_event() {
        let event = event(r#"{"content":" user"}"#);
        let reported = event.replace(
            "]}\n",
            "],\"usage\":{\"prompt_tokens\":16,\
            \"total_tokens\":22,\"completion_tokens\":6,\"prompt_tokens_details\":null}}\n",
        );
        let cut = event.len() / 2;
        let mut report = String::new();
        for (what, need, chunks) in [
            ("progress only", Need::Nothing, vec![event.as_str()]),
            ("usage", Need::Events, vec![event.as_str()]),
            ("usage, reported in each event", Need::Events, vec![reported.as_str()]),
            ("usage, cut in two", Need::Events, vec![&event[..cut], &event[cut..]]),
        ] {
            let mut tap = stream(need);
            let rounds = 1_000_000u32;
            let start = crate::clock::now();
            for _ in 0..rounds {
                for chunk in &chunks {
                    black_box(tap.chunk(black_box(chunk.as_bytes())));
                }
            }
            let nanoseconds = start.elapsed().as_nanos() / u128::from(rounds);
            let _ = writeln!(report, "{what}: {nanoseconds} ns per event of {} bytes", event.len());
        }
        println!("{report}tap: {} bytes", size_of::<Tap>());
    }
}

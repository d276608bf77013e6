//! What came back, and who wants a copy. A router holds nothing that nobody reads: an answer is
//! kept only if a consumer needs the whole of it, streams are read as they pass, and both have
//! limits. Bytes are looked at here, never changed.
//! Nothing here writes to a client or talks to an engine.
//! To add a consumer: a file in `consumers/` and a row in `CONSUMERS`; it states its need for each
//! shape of answer and gets the finished exchange.

mod buffer;
mod consumers;
mod events;
mod exchange;
mod keys;
mod need;
mod options;
mod progress;
mod tap;

use std::fmt::Debug;
use std::sync::Arc;

pub use buffer::{Budget, ResponseBuffer, Skip};
pub use events::{EVENT_BYTES_MAX, Event, EventReader};
pub use exchange::{Ending, Exchange};
pub use need::{Need, Plan, Reading, Shape, plan};
pub use options::{Options, UsageOptions};
pub use progress::Disguise;
pub use tap::{EndMark, Finished, Seen, Tap};

pub use crate::telemetry::{Timings, Usage};

use crate::telemetry::Metrics;

/// Someone who wants finished answers. Slow ones queue what they get, with a bound, and count what
/// they drop: `consume` is called on the path of requests and must not wait.
pub trait Consumer: Debug + Send + Sync {
    /// Its name, under which it is counted.
    fn name(&self) -> &'static str;

    /// What it needs of an answer of this shape. Asked once at the head and once at the end, so the
    /// same shape must give the same need.
    fn need(&self, shape: &Shape) -> Need;

    /// Takes a finished exchange, and the body if it needed the whole of it and the whole of it is
    /// there within its limit. It may add to the story what later consumers shall know. A body that
    /// is held longer stays counted against the budget until the last holder lets go.
    fn consume(&self, exchange: &mut Exchange, body: Option<&Arc<ResponseBuffer>>);
}

/// What consumers are made from.
#[derive(Debug)]
pub struct Setting<'a> {
    /// The section of the configuration.
    pub options: &'a Options,
    /// Where they count.
    pub metrics: &'a Arc<Metrics>,
}

/// One kind of consumer, for the manual and the constructor.
#[derive(Debug)]
pub struct ConsumerRow {
    /// Its name, in the configuration and under `/metrics`.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Makes it, if the operator wants it.
    pub build: fn(&Setting<'_>) -> Option<Arc<dyn Consumer>>,
}

/// All kinds, in the order in which they get an exchange: first those who add to the story, then
/// those who carry it off.
pub static CONSUMERS: &[ConsumerRow] = &[ConsumerRow {
    name: consumers::usage::NAME,
    summary: "counts prompt, completion and cached tokens as the engines report them",
    build: consumers::usage::build,
}];

/// The consumers of one configuration.
#[derive(Debug)]
pub struct Consumers {
    consumers: Vec<Arc<dyn Consumer>>,
    budget: Budget,
    metrics: Arc<Metrics>,
}

impl Consumers {
    /// Those that the operator wants. The bytes they keep are counted in `metrics`, together with
    /// those of the configuration before.
    pub fn new(options: &Options, metrics: &Arc<Metrics>) -> Self {
        let setting = Setting { options, metrics };
        let consumers = CONSUMERS.iter().filter_map(|row| (row.build)(&setting)).collect();
        Self::of(consumers, options, metrics)
    }

    fn of(consumers: Vec<Arc<dyn Consumer>>, options: &Options, metrics: &Arc<Metrics>) -> Self {
        let bytes_max = usize::try_from(options.budget_bytes.as_u64()).unwrap_or(usize::MAX);
        let budget = Budget::new(Arc::clone(metrics.buffered()), bytes_max);
        Self { consumers, budget, metrics: Arc::clone(metrics) }
    }

    /// The need of all together for an answer of this shape.
    pub fn need(&self, shape: &Shape) -> Need {
        Need::fold(self.consumers.iter().map(|consumer| consumer.need(shape)))
    }

    /// The tap for an answer whose head is there. `declared` is its Content-Length, if it has one.
    pub fn tap(&self, shape: &Shape, declared: Option<u64>) -> Tap {
        let declared = declared.map(|length| usize::try_from(length).unwrap_or(usize::MAX));
        Tap::new(plan(self.need(shape), shape), shape, declared, &self.budget)
    }

    /// Hands a finished exchange to every consumer, and counts what was seen and what was missed.
    /// Afterwards `exchange.usage` holds what the engine reported, if somebody wanted to know.
    pub fn deliver(&self, exchange: &mut Exchange, mut finished: Finished) {
        if finished.events_skipped > 0 {
            self.metrics.events_skipped(finished.events_skipped);
        }
        if let Some(disguise) = finished.disguise {
            self.metrics.disguised_failure(disguise.text());
        }
        if let Some(body) = finished.body.as_mut()
            && exchange.ending != Ending::Complete
        {
            body.give_up(Skip::Incomplete);
        }
        exchange.usage = finished.usage;
        let body = finished.body.map(Arc::new);
        for consumer in &self.consumers {
            let share = share(consumer.need(&exchange.shape), body.as_ref());
            if let Err(why) = share {
                self.metrics.consumer_skipped(consumer.name(), why.text());
            }
            consumer.consume(exchange, share.unwrap_or_default());
        }
    }
}

/// The body as one consumer gets it: only if it needs it, only whole, only within its own limit.
fn share(
    need: Need,
    body: Option<&Arc<ResponseBuffer>>,
) -> Result<Option<&Arc<ResponseBuffer>>, Skip> {
    let (Need::Whole { bytes_max }, Some(body)) = (need, body) else { return Ok(None) };
    match body.bytes() {
        Ok(bytes) if bytes.len() <= bytes_max => Ok(Some(body)),
        Ok(_) => Err(Skip::TooLarge),
        Err(why) => Err(why),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::SystemTime;

    use bytesize::ByteSize;

    use super::*;
    use crate::names::{RequestId, Tokens};
    use crate::request::Wire;
    use crate::telemetry::Phase;

    /// Wants the whole of everything, up to its limit, and notes what it got.
    #[derive(Debug)]
    struct Callback {
        bytes_max: usize,
        got: Mutex<Vec<Option<Vec<u8>>>>,
    }

    impl Callback {
        fn new(bytes_max: usize) -> Arc<Self> {
            Arc::new(Self { bytes_max, got: Mutex::default() })
        }
    }

    impl Consumer for Callback {
        fn name(&self) -> &'static str {
            "callback"
        }

        fn need(&self, _: &Shape) -> Need {
            Need::Whole { bytes_max: self.bytes_max }
        }

        fn consume(&self, _: &mut Exchange, body: Option<&Arc<ResponseBuffer>>) {
            let body = body.map(|body| body.bytes().unwrap().to_vec());
            self.got.lock().unwrap().push(body);
        }
    }

    fn metrics() -> Arc<Metrics> {
        Metrics::new(SystemTime::UNIX_EPOCH).unwrap()
    }

    fn shape(streaming: bool) -> Shape {
        Shape { wire: Wire::Chat, status: 200, streaming, encoded: false, bodyless: false }
    }

    fn exchange(shape: Shape, ending: Ending) -> Exchange {
        Exchange {
            id: RequestId::new("r"),
            api: "chat_completions",
            model: None,
            replica: None,
            tenant: None,
            shape,
            attempts: 1,
            timings: Timings::default(),
            usage: None,
            request_bytes: 0,
            response_bytes: 0,
            ending,
        }
    }

    const BODY: &[u8] =
        br#"{"choices":[{"text":"x"}],"usage":{"prompt_tokens":16,"completion_tokens":6}}"#;
    const STREAM: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":6}}\n\n\
        data: [DONE]\n\n";

    fn skipped(metrics: &Metrics, consumer: &str, reason: &str) -> bool {
        let series =
            format!("weir_consumer_skipped_total{{consumer=\"{consumer}\",reason=\"{reason}\"}} 1");
        metrics.encode().contains(&series)
    }

    fn run(consumers: &Consumers, shape: Shape, body: &[u8], ending: Ending) -> Exchange {
        let mut tap = consumers.tap(&shape, Some(body.len() as u64));
        for chunk in body.chunks(7) {
            tap.chunk(chunk);
        }
        let mut exchange = exchange(shape, ending);
        consumers.deliver(&mut exchange, tap.finish());
        exchange
    }

    #[test]
    fn usage_of_a_whole_answer_and_of_a_stream_is_counted_by_default() {
        let metrics = metrics();
        let consumers = Consumers::new(&Options::default(), &metrics);
        for (streaming, body) in [(false, BODY), (true, STREAM)] {
            let exchange = run(&consumers, shape(streaming), body, Ending::Complete);
            let usage = exchange.usage.unwrap();
            assert_eq!((usage.prompt, usage.completion), (Some(Tokens(16)), Some(Tokens(6))));
        }
        assert_eq!(consumers.budget.used(), 0, "nothing is kept after the end");
    }

    #[test]
    fn a_stream_is_counted_without_a_byte_being_kept() {
        let consumers = Consumers::new(&Options::default(), &metrics());
        let mut tap = consumers.tap(&shape(true), None);
        assert!(!tap.keeps());
        tap.chunk(STREAM);
        assert_eq!(consumers.budget.used(), 0);
        assert!(tap.finish().body.is_none());
    }

    #[test]
    fn with_accounting_off_nothing_is_kept_and_progress_is_still_seen() {
        let mut options = Options::default();
        options.usage.enabled = false;
        let consumers = Consumers::new(&options, &metrics());
        assert!(!consumers.tap(&shape(false), Some(100)).keeps());
        let mut tap = consumers.tap(&shape(true), None);
        assert!(tap.chunk(STREAM).first_token);
        assert_eq!(tap.finish().usage, None);
    }

    #[test]
    fn an_answer_that_is_too_large_for_the_buffer_is_counted_as_skipped() {
        let metrics = metrics();
        let options =
            Options { buffer_bytes_max: ByteSize::b(BODY.len() as u64 - 1), ..Options::default() };
        let consumers = Consumers::new(&options, &metrics);
        let exchange = run(&consumers, shape(false), BODY, Ending::Complete);
        assert_eq!(exchange.usage, None);
        assert!(skipped(&metrics, "usage", "too_large"));
    }

    #[test]
    fn a_spent_budget_is_counted_as_skipped_and_shown_while_it_is_spent() {
        let metrics = metrics();
        let options =
            Options { budget_bytes: ByteSize::b(BODY.len() as u64), ..Options::default() };
        let consumers = Consumers::new(&options, &metrics);
        let mut first = consumers.tap(&shape(false), Some(BODY.len() as u64));
        first.chunk(BODY);
        assert!(first.keeps());
        assert!(metrics.encode().contains(&format!("weir_buffered_bytes {}", BODY.len())));
        run(&consumers, shape(false), BODY, Ending::Complete);
        assert!(skipped(&metrics, "usage", "budget_spent"));
        drop(first);
        assert!(run(&consumers, shape(false), BODY, Ending::Complete).usage.is_some());
        assert!(metrics.encode().contains("weir_buffered_bytes 0"));
    }

    #[test]
    fn each_consumer_gets_a_body_only_within_its_own_limit() {
        let metrics = metrics();
        let just = Callback::new(BODY.len());
        let less = Callback::new(BODY.len() - 1);
        let consumers: Vec<Arc<dyn Consumer>> = vec![less.clone(), just.clone()];
        let consumers = Consumers::of(consumers, &Options::default(), &metrics);
        run(&consumers, shape(false), BODY, Ending::Complete);
        assert_eq!(*just.got.lock().unwrap(), [Some(BODY.to_vec())]);
        assert_eq!(*less.got.lock().unwrap(), [None]);
        assert!(skipped(&metrics, "callback", "too_large"));
    }

    #[test]
    fn a_callback_gets_the_whole_stream_and_its_usage_too() {
        let callback = Callback::new(1000);
        let consumers: Vec<Arc<dyn Consumer>> = vec![callback.clone()];
        let consumers = Consumers::of(consumers, &Options::default(), &metrics());
        let exchange = run(&consumers, shape(true), STREAM, Ending::Complete);
        assert_eq!(*callback.got.lock().unwrap(), [Some(STREAM.to_vec())]);
        assert!(exchange.usage.is_some());
    }

    #[test]
    fn half_an_answer_is_given_to_nobody() {
        let metrics = metrics();
        let callback = Callback::new(1000);
        let consumers: Vec<Arc<dyn Consumer>> = vec![callback.clone()];
        let consumers = Consumers::of(consumers, &Options::default(), &metrics);
        let left = Ending::ClientLeft { phase: Phase::Streaming };
        run(&consumers, shape(false), &BODY[..20], left);
        assert_eq!(*callback.got.lock().unwrap(), [None]);
        assert!(skipped(&metrics, "callback", "incomplete"));
    }

    #[test]
    fn a_body_that_is_held_longer_stays_in_the_budget() {
        #[derive(Debug, Default)]
        struct Keeper {
            kept: Mutex<Option<Arc<ResponseBuffer>>>,
        }
        impl Consumer for Keeper {
            fn name(&self) -> &'static str {
                "keeper"
            }
            fn need(&self, _: &Shape) -> Need {
                Need::Whole { bytes_max: 1000 }
            }
            fn consume(&self, _: &mut Exchange, body: Option<&Arc<ResponseBuffer>>) {
                *self.kept.lock().unwrap() = body.cloned();
            }
        }
        let keeper = Arc::new(Keeper::default());
        let consumers: Vec<Arc<dyn Consumer>> = vec![keeper.clone()];
        let consumers = Consumers::of(consumers, &Options::default(), &metrics());
        run(&consumers, shape(false), BODY, Ending::Complete);
        assert_eq!(consumers.budget.used(), BODY.len());
        keeper.kept.lock().unwrap().take();
        assert_eq!(consumers.budget.used(), 0);
    }

    #[test]
    fn a_failure_in_disguise_and_a_skipped_event_are_counted() {
        let metrics = metrics();
        let consumers = Consumers::new(&Options::default(), &metrics);
        run(&consumers, shape(true), b"data: {\"error\": {}}\n\n", Ending::EngineBroke);
        let large = [b"data: ", vec![b'x'; EVENT_BYTES_MAX].as_slice(), b"\n\n"].concat();
        run(&consumers, shape(true), &large, Ending::Complete);
        let text = metrics.encode();
        assert!(text.contains("weir_disguised_failures_total{kind=\"error\"} 1"), "{text}");
        assert!(text.contains("weir_stream_events_skipped_total 1"), "{text}");
    }

    #[test]
    fn every_row_of_the_table_is_described_and_named_once() {
        let mut names = std::collections::HashSet::new();
        for row in CONSUMERS {
            assert!(names.insert(row.name), "{} is there twice", row.name);
            assert!(!row.summary.is_empty());
        }
    }
}

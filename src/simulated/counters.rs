//! What the simulated engine counts: the numbers behind vLLM's metrics. Pure.
//! To add one: a field here, and its line in `metrics.rs`.

use std::time::Duration;

/// Bounds of latencies of a whole request or of one of its phases, in seconds.
pub const REQUEST_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
/// Bounds of the time to the first token, in seconds.
pub const FIRST_TOKEN_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// Bounds of the time between two tokens, in seconds.
pub const TOKEN_SECONDS: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
/// Bounds of the tokens of one request.
pub const REQUEST_TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0];
/// Bounds of the tokens of one step.
pub const STEP_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// Counts per bound, not yet summed up.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    count: u64,
    sum: f64,
}

impl Histogram {
    /// An empty one; `bounds` rise.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len()], count: 0, sum: 0.0 }
    }

    /// Counts one value.
    pub fn observe(&mut self, value: f64) {
        let index = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(index) {
            *count += 1;
        }
        self.count += 1;
        self.sum += value;
    }

    fn observe_time(&mut self, value: Duration) {
        self.observe(value.as_secs_f64());
    }

    /// How many values were at most each bound, in order of the bounds.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let counts = self.counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        self.bounds.iter().copied().zip(counts)
    }

    /// How many values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their sum.
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

/// Why a sequence ended, in vLLM's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model had said all.
    Stop,
    /// The client's or the engine's limit of tokens.
    Length,
    /// The engine gave it up (sleep, pause); a client that leaves is not told anything.
    Abort,
}

impl FinishReason {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Stop, Self::Length, Self::Abort];

    /// As it stands in `finish_reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// When the stations of one sequence's life were, since the engine's start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stations {
    pub(super) arrived: Duration,
    pub(super) scheduled: Option<Duration>,
    pub(super) first_token: Option<Duration>,
    pub(super) last_token: Duration,
}

/// Everything counted since the engine's start.
#[derive(Clone, Debug, PartialEq)]
pub struct Counters {
    /// Prompt tokens looked up in the prefix cache, and those found there.
    pub prefix_queries: u64,
    /// See `prefix_queries`.
    pub prefix_hits: u64,
    /// Sequences that lost their blocks and began again.
    pub preemptions: u64,
    /// Prompt tokens of sequences whose prefill is done.
    pub prompt_tokens: u64,
    /// Of those, the ones that came from the cache.
    pub prompt_tokens_cached: u64,
    /// Tokens made.
    pub generation_tokens: u64,
    /// Sequences that ended with each of [`FinishReason::ALL`].
    pub finished: [u64; 3],
    /// Requests refused because the queue was full.
    pub queue_full: u64,
    /// Steps taken.
    pub steps: u64,
    /// Tokens computed per step.
    pub step_tokens: Histogram,
    /// Prompt tokens per finished request.
    pub request_prompt_tokens: Histogram,
    /// Tokens made per finished request.
    pub request_generation_tokens: Histogram,
    /// Arrival to first token.
    pub first_token: Histogram,
    /// Token to token.
    pub inter_token: Histogram,
    /// Mean time per token after the first, per request.
    pub time_per_token: Histogram,
    /// Arrival to end.
    pub end_to_end: Histogram,
    /// Arrival to first step.
    pub queue: Histogram,
    /// First step to first token.
    pub prefill: Histogram,
    /// First token to end.
    pub decode: Histogram,
    /// First step to end.
    pub inference: Histogram,
}

impl Default for Counters {
    fn default() -> Self {
        let request = || Histogram::new(REQUEST_SECONDS);
        Self {
            prefix_queries: 0,
            prefix_hits: 0,
            preemptions: 0,
            prompt_tokens: 0,
            prompt_tokens_cached: 0,
            generation_tokens: 0,
            finished: [0; 3],
            queue_full: 0,
            steps: 0,
            step_tokens: Histogram::new(STEP_TOKENS),
            request_prompt_tokens: Histogram::new(REQUEST_TOKENS),
            request_generation_tokens: Histogram::new(REQUEST_TOKENS),
            first_token: Histogram::new(FIRST_TOKEN_SECONDS),
            inter_token: Histogram::new(TOKEN_SECONDS),
            time_per_token: Histogram::new(TOKEN_SECONDS),
            end_to_end: request(),
            queue: request(),
            prefill: request(),
            decode: request(),
            inference: request(),
        }
    }
}

impl Counters {
    /// How many ended for this reason.
    pub fn finished(&self, reason: FinishReason) -> u64 {
        self.finished[reason as usize]
    }

    pub(super) fn token(&mut self, stations: &mut Stations, now: Duration) {
        self.generation_tokens += 1;
        if stations.first_token.is_none() {
            stations.first_token = Some(now);
            self.first_token.observe_time(now.saturating_sub(stations.arrived));
        } else {
            self.inter_token.observe_time(now.saturating_sub(stations.last_token));
        }
        stations.last_token = now;
    }

    pub(super) fn end(&mut self, stations: &Stations, tokens: (u32, u32), reason: FinishReason) {
        let (prompt, generated) = tokens;
        self.finished[reason as usize] += 1;
        self.request_prompt_tokens.observe(f64::from(prompt));
        self.request_generation_tokens.observe(f64::from(generated));
        let end = stations.last_token;
        self.end_to_end.observe_time(end.saturating_sub(stations.arrived));
        let Some(scheduled) = stations.scheduled else { return };
        self.queue.observe_time(scheduled.saturating_sub(stations.arrived));
        self.inference.observe_time(end.saturating_sub(scheduled));
        let Some(first) = stations.first_token else { return };
        self.prefill.observe_time(first.saturating_sub(scheduled));
        self.decode.observe_time(end.saturating_sub(first));
        if generated > 1 {
            self.time_per_token.observe_time(end.saturating_sub(first) / (generated - 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_on_a_bound_belongs_below_it() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        [1.0, 1.5, 9.0].into_iter().for_each(|value| histogram.observe(value));
        assert_eq!(histogram.cumulative().collect::<Vec<_>>(), [(1.0, 1), (2.0, 2)]);
        assert_eq!((histogram.count(), histogram.sum()), (3, 11.5));
    }
}

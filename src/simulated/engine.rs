//! The model of one vLLM engine: queue, continuous batching, chunked prefill, paged KV cache with
//! prefix sharing, preemption by recompute. What it answers is *when* each token comes.
//! Pure: the time is an argument, counted from the engine's start; there is no randomness at all,
//! so the same calls give the same trace. May not: know HTTP, text, or what a token says.
//! The order of things in a step follows vLLM: running sequences first, then waiting ones unless
//! somebody had to be preempted.

use std::collections::VecDeque;
use std::time::Duration;

use super::cache::{BlockId, BlockPool};
use super::counters::{Counters, FinishReason};
use super::options::EngineOptions;
use super::sequence::Sequence;
pub use super::sequence::{Event, EventKind, Rejection, Request};

/// The engine. Calls must come with a time that never goes back.
#[derive(Debug)]
pub struct Engine {
    options: EngineOptions,
    pool: BlockPool,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    step_ends: Option<Duration>,
    paused: bool,
    order: u64,
    counters: Counters,
    /// Happened, not yet handed out; at most what one call of `add`, `abort` … makes.
    events: Vec<Event>,
}

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(options: EngineOptions) -> Self {
        Self {
            pool: BlockPool::new(options.blocks),
            options,
            waiting: VecDeque::new(),
            running: Vec::new(),
            step_ends: None,
            paused: false,
            order: 0,
            counters: Counters::default(),
            events: Vec::new(),
        }
    }

    /// Queues a request at `now`.
    pub fn add(&mut self, request: Request, now: Duration) -> Result<(), Rejection> {
        self.catch_up(now);
        if self.blocks_for(request.prompt_tokens + request.output_tokens) > self.pool.total() {
            return Err(Rejection::TooLong);
        }
        if self.options.queued_max.is_some_and(|max| self.waiting.len() >= max as usize) {
            self.counters.queue_full += 1;
            return Err(Rejection::QueueFull);
        }
        self.order += 1;
        self.enqueue(Sequence::new(request, self.order, now));
        self.begin_step_if_idle(now);
        Ok(())
    }

    /// Forgets a request at `now`: its caller left. No event; `false` if there is no such request.
    pub fn abort(&mut self, id: u64, now: Duration) -> bool {
        self.catch_up(now);
        if let Some(index) = self.running.iter().position(|s| s.request.id == id) {
            let mut sequence = self.running.remove(index);
            self.pool.release(&mut sequence.table);
            return true;
        }
        match self.waiting.iter().position(|s| s.request.id == id) {
            Some(index) => self.waiting.remove(index).is_some(),
            None => false,
        }
    }

    /// Ends every request at `now` with [`FinishReason::Abort`].
    pub fn abort_all(&mut self, now: Duration) {
        self.catch_up(now);
        let all = std::mem::take(&mut self.running);
        for mut sequence in all.into_iter().chain(std::mem::take(&mut self.waiting)) {
            sequence.stations.last_token = now;
            self.finish(&mut sequence, now, FinishReason::Abort);
        }
    }

    /// Starts no further step until [`Engine::resume`]; requests are still taken.
    pub fn pause(&mut self, now: Duration) {
        self.catch_up(now);
        self.paused = true;
    }

    /// Ends a pause.
    pub fn resume(&mut self, now: Duration) {
        self.catch_up(now);
        self.paused = false;
        self.begin_step_if_idle(now);
    }

    /// Forgets the prefix cache; `false` while blocks are in use.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.pool.forget_all()
    }

    /// When [`Engine::advance`] will next have something to say. `None`: only after a call.
    pub fn next_event_at(&self) -> Option<Duration> {
        if self.events.is_empty() { self.step_ends } else { Some(Duration::ZERO) }
    }

    /// Runs until `now` and appends what happened, in order.
    pub fn advance(&mut self, now: Duration, events: &mut Vec<Event>) {
        self.catch_up(now);
        events.append(&mut self.events);
    }

    /// Sequences in the batch.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that wait; none are reported during a pause, as vLLM does not either.
    pub fn waiting(&self) -> usize {
        if self.paused { 0 } else { self.waiting.len() }
    }

    /// The block pool.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// What was counted so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What it was made with.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.options.block_tokens.max(1))
    }

    fn enqueue(&mut self, sequence: Sequence) {
        let ranked = self.options.priority_scheduling;
        let index = if ranked {
            self.waiting.partition_point(|other| other.rank() < sequence.rank())
        } else if sequence.preempted {
            0
        } else {
            self.waiting.len()
        };
        self.waiting.insert(index, sequence);
    }

    fn catch_up(&mut self, now: Duration) {
        while let Some(end) = self.step_ends.filter(|end| *end <= now) {
            self.finish_step(end);
            self.begin_step(end);
        }
    }

    fn begin_step_if_idle(&mut self, now: Duration) {
        if self.step_ends.is_none() {
            self.begin_step(now);
        }
    }

    fn begin_step(&mut self, now: Duration) {
        self.step_ends = None;
        if self.paused {
            return;
        }
        let mut budget = self.options.batched_tokens_max.max(1);
        let preempted = self.continue_running(&mut budget, now);
        let anybody = self.running.iter().any(|sequence| sequence.granted > 0);
        if !(preempted && anybody) {
            self.admit_waiting(&mut budget, now);
        }
        let tokens: u32 = self.running.iter().map(|sequence| sequence.granted).sum();
        if tokens > 0 {
            self.counters.steps += 1;
            self.counters.step_tokens.observe(f64::from(tokens));
            self.step_ends = Some(now + self.step_time());
        }
    }

    /// Grants tokens to the running, making room at the cost of the last if need be.
    fn continue_running(&mut self, budget: &mut u32, now: Duration) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let sequence = &self.running[index];
            let wanted = (sequence.tokens() - sequence.computed).min(*budget);
            if self.grow(index, wanted) {
                *budget -= wanted;
                index += 1;
                continue;
            }
            let victim = self.victim();
            *budget += self.preempt(victim, now);
            preempted = true;
            if victim < index {
                index -= 1;
            }
        }
        preempted
    }

    fn victim(&self) -> usize {
        let last = self.running.len() - 1;
        if !self.options.priority_scheduling {
            return last;
        }
        let worst = self.running.iter().enumerate().max_by_key(|(_, sequence)| sequence.rank());
        worst.map_or(last, |(index, _)| index)
    }

    /// Takes the blocks of a running sequence away and lets it wait; the tokens it gives back.
    fn preempt(&mut self, index: usize, now: Duration) -> u32 {
        let mut sequence = self.running.remove(index);
        let granted = std::mem::take(&mut sequence.granted);
        if granted > 0 {
            // Its part of this step will not be computed, so nobody may find it.
            let computed = (sequence.computed / self.options.block_tokens.max(1)) as usize;
            sequence.table.iter().skip(computed).for_each(|block| {
                self.pool.forget(*block);
            });
        }
        self.pool.release(&mut sequence.table);
        sequence.computed = 0;
        sequence.preempted = true;
        self.counters.preemptions += 1;
        self.events.push(Event { id: sequence.request.id, at: now, kind: EventKind::Preempted });
        self.enqueue(sequence);
        granted
    }

    /// Gives a running sequence room for `wanted` more tokens. All or nothing.
    fn grow(&mut self, index: usize, wanted: u32) -> bool {
        let needed = self.blocks_for(self.running[index].computed + wanted);
        let block_tokens = self.options.block_tokens.max(1);
        let sequence = &mut self.running[index];
        let missing = needed.saturating_sub(u32::try_from(sequence.table.len()).unwrap_or(0));
        if !self.pool.take(missing, &mut sequence.table) {
            return false;
        }
        sequence.granted = wanted;
        if self.options.prefix_caching {
            let from = (sequence.computed / block_tokens) as usize;
            let to = ((sequence.computed + wanted) / block_tokens) as usize;
            let named = sequence.table.iter().zip(sequence.request.blocks.iter());
            for (block, content) in named.take(to).skip(from) {
                self.pool.name(*block, *content);
            }
        }
        true
    }

    fn admit_waiting(&mut self, budget: &mut u32, now: Duration) {
        while *budget > 0 && self.running.len() < self.options.sequences_max.max(1) as usize {
            let Some(sequence) = self.waiting.front() else { return };
            let hits = self.prefix_hits(sequence);
            let block_tokens = self.options.block_tokens.max(1);
            let cached = u32::try_from(hits.len()).unwrap_or(0) * block_tokens;
            let wanted = (sequence.tokens() - cached).min(*budget);
            let revived = hits.iter().filter(|hit| self.pool.is_free(**hit)).count();
            let fresh = self.blocks_for(cached + wanted) as usize - hits.len();
            if fresh + revived > self.pool.free() as usize {
                return;
            }
            let Some(mut sequence) = self.waiting.pop_front() else { return };
            hits.iter().for_each(|hit| self.pool.share(*hit));
            sequence.table = hits;
            sequence.computed = cached;
            if !sequence.preempted {
                sequence.cached = cached.min(sequence.request.prompt_tokens);
                self.counters.prefix_queries += u64::from(sequence.request.prompt_tokens);
                self.counters.prefix_hits += u64::from(sequence.cached);
            }
            sequence.stations.scheduled.get_or_insert(now);
            self.running.push(sequence);
            let granted = self.grow(self.running.len() - 1, wanted);
            debug_assert!(granted, "the room was counted just before");
            *budget -= wanted;
        }
    }

    /// The blocks of its beginning that are in the cache; never all, as one token must be computed.
    fn prefix_hits(&self, sequence: &Sequence) -> Vec<BlockId> {
        if !self.options.prefix_caching {
            return Vec::new();
        }
        let most = (sequence.tokens().saturating_sub(1)) / self.options.block_tokens.max(1);
        let blocks = sequence.request.blocks.iter().take(most as usize);
        blocks.map_while(|content| self.pool.find(*content)).collect()
    }

    fn step_time(&self) -> Duration {
        let step = &self.options.step;
        let [prefill, attention, decode, context] =
            [step.prefill_token, step.attention_pair, step.sequence, step.context_token]
                .map(|cost| u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX));
        let mut nanos = 0u64;
        for sequence in self.running.iter().filter(|sequence| sequence.granted > 0) {
            let (granted, before) = (u64::from(sequence.granted), u64::from(sequence.computed));
            let cost = if granted == 1 && sequence.generated > 0 {
                decode.saturating_add(context.saturating_mul(before))
            } else {
                let pairs = granted * before + granted * granted / 2;
                prefill.saturating_mul(granted).saturating_add(attention.saturating_mul(pairs))
            };
            nanos = nanos.saturating_add(cost);
        }
        step.base + Duration::from_nanos(nanos)
    }

    fn finish_step(&mut self, at: Duration) {
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            sequence.computed += std::mem::take(&mut sequence.granted);
            if sequence.computed < sequence.tokens() {
                index += 1;
                continue;
            }
            if sequence.generated == 0 {
                self.counters.prompt_tokens += u64::from(sequence.request.prompt_tokens);
                self.counters.prompt_tokens_cached += u64::from(sequence.cached);
            }
            sequence.generated += 1;
            self.counters.token(&mut sequence.stations, at);
            let kind = match sequence.generated {
                1 => EventKind::FirstToken { cached_tokens: sequence.cached },
                count => EventKind::Token { count },
            };
            self.events.push(Event { id: sequence.request.id, at, kind });
            if sequence.generated >= sequence.request.output_tokens {
                let mut sequence = self.running.remove(index);
                let reason = sequence.request.finish;
                self.finish(&mut sequence, at, reason);
            } else {
                index += 1;
            }
        }
    }

    fn finish(&mut self, sequence: &mut Sequence, at: Duration, reason: FinishReason) {
        self.pool.release(&mut sequence.table);
        let tokens = (sequence.request.prompt_tokens, sequence.generated);
        self.counters.end(&sequence.stations, tokens, reason);
        let kind = EventKind::Finished { reason };
        self.events.push(Event { id: sequence.request.id, at, kind });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::cache::BlockHash;
    use super::*;

    fn request(id: u64, prompt_tokens: u32, output_tokens: u32, family: u64) -> Request {
        let blocks = 0..u64::from((prompt_tokens + output_tokens) / 16);
        Request {
            id,
            prompt_tokens,
            output_tokens,
            blocks: blocks.map(|n| BlockHash(family << 32 | n)).collect(),
            priority: 0,
            finish: FinishReason::Length,
        }
    }

    fn small(blocks: u32) -> EngineOptions {
        EngineOptions { blocks, sequences_max: 4, batched_tokens_max: 64, ..Default::default() }
    }

    fn run(engine: &mut Engine) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(at) = engine.next_event_at() {
            engine.advance(at, &mut events);
        }
        events
    }

    fn first_token(events: &[Event], id: u64) -> (Duration, u32) {
        let found = events.iter().find_map(|event| match event.kind {
            EventKind::FirstToken { cached_tokens } if event.id == id => {
                Some((event.at, cached_tokens))
            }
            _ => None,
        });
        found.unwrap()
    }

    #[test]
    fn a_prefill_of_8192_tokens_takes_about_four_tenths_of_a_second() {
        let mut engine = Engine::new(EngineOptions::default());
        engine.add(request(1, 8192, 1, 1), Duration::ZERO).unwrap();
        let seconds = first_token(&run(&mut engine), 1).0.as_secs_f64();
        assert!((0.38..0.44).contains(&seconds), "{seconds}");
    }

    #[test]
    fn a_prompt_seen_before_is_not_computed_again() {
        let mut engine = Engine::new(EngineOptions::default());
        engine.add(request(1, 4096, 4, 1), Duration::ZERO).unwrap();
        let cold = first_token(&run(&mut engine), 1);
        let start = Duration::from_secs(10);
        engine.add(request(2, 4096, 4, 1), start).unwrap();
        let warm = first_token(&run(&mut engine), 2);
        assert_eq!((cold.1, warm.1), (0, 4080), "the last block is computed, for its token");
        assert!((warm.0 - start) * 5 < cold.0);
        assert!(engine.reset_prefix_cache());
        engine.add(request(3, 4096, 4, 1), Duration::from_secs(20)).unwrap();
        assert_eq!(first_token(&run(&mut engine), 3).1, 0);
    }

    #[test]
    fn a_long_prefill_is_cut_into_steps_and_decodes_go_on_between() {
        let mut engine = Engine::new(small(1000));
        engine.add(request(1, 16, 20, 1), Duration::ZERO).unwrap();
        engine.add(request(2, 640, 1, 2), Duration::ZERO).unwrap();
        let events = run(&mut engine);
        let prefilled = first_token(&events, 2).0;
        let meanwhile = events.iter().filter(|event| event.id == 1 && event.at <= prefilled);
        assert!(meanwhile.count() > 8, "one decode per step of the other's prefill");
    }

    #[test]
    fn out_of_blocks_the_last_comer_gives_way_and_still_finishes() {
        let mut engine = Engine::new(small(12));
        for id in 0..3 {
            engine.add(request(id, 40, 60, id), Duration::ZERO).unwrap();
        }
        let events = run(&mut engine);
        let preempted: Vec<u64> =
            events.iter().filter(|e| e.kind == EventKind::Preempted).map(|e| e.id).collect();
        assert!(!preempted.is_empty() && !preempted.contains(&0), "{preempted:?}");
        assert_eq!(engine.counters().finished(FinishReason::Length), 3);
        assert_eq!(engine.counters().generation_tokens, 180, "no token is counted twice");
    }

    #[test]
    fn a_sequence_that_can_never_fit_and_one_too_many_are_refused() {
        let mut engine = Engine::new(EngineOptions { queued_max: Some(1), ..small(4) });
        assert_eq!(engine.add(request(1, 60, 5, 1), Duration::ZERO), Err(Rejection::TooLong));
        engine.add(request(2, 60, 4, 1), Duration::ZERO).unwrap();
        engine.add(request(3, 60, 4, 1), Duration::ZERO).unwrap();
        assert_eq!(engine.add(request(4, 1, 1, 1), Duration::ZERO), Err(Rejection::QueueFull));
        assert_eq!(engine.counters().queue_full, 1);
    }

    #[test]
    fn with_priorities_the_lowest_number_runs_first() {
        let options = EngineOptions { priority_scheduling: true, sequences_max: 1, ..small(100) };
        let mut engine = Engine::new(options);
        for (id, priority) in [(1, 0), (2, 5), (3, -5)] {
            engine.add(Request { priority, ..request(id, 16, 2, id) }, Duration::ZERO).unwrap();
        }
        let events = run(&mut engine);
        let ends = events.iter().filter(|e| matches!(e.kind, EventKind::Finished { .. }));
        assert_eq!(ends.map(|e| e.id).collect::<Vec<_>>(), [1, 3, 2]);
    }

    #[test]
    fn a_paused_engine_takes_requests_and_says_nothing() {
        let mut engine = Engine::new(small(100));
        engine.pause(Duration::ZERO);
        engine.add(request(1, 16, 2, 1), Duration::ZERO).unwrap();
        assert_eq!((engine.next_event_at(), engine.waiting()), (None, 0));
        engine.resume(Duration::from_secs(1));
        assert_eq!(run(&mut engine).len(), 3);
    }

    #[test]
    fn giving_all_up_tells_everybody_and_frees_everything() {
        let mut engine = Engine::new(small(100));
        (0..9).for_each(|id| engine.add(request(id, 30, 9, id), Duration::ZERO).unwrap());
        engine.abort_all(Duration::from_millis(20));
        let events = run(&mut engine);
        let aborted = EventKind::Finished { reason: FinishReason::Abort };
        assert_eq!(events.iter().filter(|e| e.kind == aborted).count(), 9);
        assert_eq!(engine.pool().free(), 100);
    }

    #[derive(Clone, Debug)]
    enum Call {
        Add { prompt: u32, output: u32, family: u64, priority: i64 },
        Abort(usize),
    }

    fn calls() -> impl Strategy<Value = Vec<(u64, Call)>> {
        let add = (1u32..150, 1u32..60, 0u64..4, -2i64..3).prop_map(
            |(prompt, output, family, priority)| Call::Add { prompt, output, family, priority },
        );
        let call = prop_oneof![4 => add, 1 => (0usize..40).prop_map(Call::Abort)];
        proptest::collection::vec((0u64..200, call), 1..40)
    }

    /// Plays the calls, checking every law on the way; the trace.
    fn play(options: EngineOptions, calls: &[(u64, Call)]) -> Vec<Event> {
        let blocks = options.blocks;
        let mut engine = Engine::new(options);
        let (mut now, mut events) = (Duration::ZERO, Vec::new());
        let (mut added, mut aborted) = (Vec::new(), Vec::new());
        for (number, (pause, call)) in calls.iter().enumerate() {
            now += Duration::from_millis(*pause);
            match call {
                Call::Add { prompt, output, family, priority } => {
                    let id = number as u64;
                    let asked = request(id, *prompt, *output, *family);
                    if engine.add(Request { priority: *priority, ..asked }, now).is_ok() {
                        added.push((id, *prompt, *output));
                    }
                }
                Call::Abort(which) => {
                    let id = added.get(*which).map(|(id, ..)| *id);
                    aborted.extend(id.filter(|id| engine.abort(*id, now)));
                }
            }
            engine.advance(now, &mut events);
            assert!(engine.pool().free() <= blocks);
            assert!(engine.running() <= engine.options().sequences_max as usize);
        }
        while let Some(at) = engine.next_event_at() {
            engine.advance(at, &mut events);
        }
        assert_eq!((engine.running(), engine.waiting()), (0, 0));
        assert_eq!(engine.pool().free(), blocks, "idle: every block is free, if not forgotten");
        for (id, prompt, output) in added {
            let own: Vec<_> = events.iter().filter(|event| event.id == id).collect();
            let ends = own.iter().filter(|e| matches!(e.kind, EventKind::Finished { .. })).count();
            assert_eq!(ends + aborted.iter().filter(|a| **a == id).count(), 1, "one end each");
            let tokens = own.iter().filter_map(|event| match event.kind {
                EventKind::FirstToken { cached_tokens } => {
                    assert!(cached_tokens < prompt, "a hit is shorter than its prompt");
                    Some(1)
                }
                EventKind::Token { count } => Some(count),
                _ => None,
            });
            let tokens: Vec<u32> = tokens.collect();
            assert!(tokens.iter().copied().eq(1..=tokens.len() as u32), "each token once");
            assert!(ends == 0 || tokens.len() == output as usize);
        }
        assert!(events.windows(2).all(|pair| pair[0].at <= pair[1].at), "time never goes back");
        events
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_request_ends_once_and_the_same_calls_give_the_same_trace(
            calls in calls(), blocks in 14u32..40, priority_scheduling: bool, prefix_caching: bool,
        ) {
            let options = EngineOptions { priority_scheduling, prefix_caching, ..small(blocks) };
            prop_assert_eq!(play(options.clone(), &calls), play(options, &calls));
        }
    }
}

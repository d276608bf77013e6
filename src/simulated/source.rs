//! Where the tokens of one request come from: the engine, or a canned answer with an even gap.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::counters::FinishReason;
use super::driver::{Driver, Ticket};
use super::engine::Rejection;
use super::job::Job;
use super::wire::{Piece, Totals};

/// Counts canned requests in flight, which the engine knows nothing of.
pub(super) struct Busy(Arc<AtomicU64>);

impl Busy {
    pub(super) fn new(count: &Arc<AtomicU64>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

enum Kind {
    Engine(Ticket),
    Canned { next: Instant, gap: Duration, given: u32, _busy: Busy },
}

/// Something new.
pub(super) enum News {
    /// Tokens `from..to` of a choice; `finish` if those are its last.
    Tokens { choice: usize, from: u32, to: u32, finish: Option<FinishReason> },
    /// All choices have ended.
    Ended,
    /// The engine died.
    Dead,
}

/// The tokens of one job, as they come.
pub(super) struct Source<'a> {
    job: &'a Job,
    kind: Kind,
    seen: Vec<u32>,
    ended: Vec<Option<FinishReason>>,
    cached_tokens: u32,
}

impl<'a> Source<'a> {
    /// Hands the job to the engine.
    pub(super) fn engine(job: &'a Job, driver: &Arc<Driver>) -> Result<Self, Rejection> {
        let ticket = driver.submit(job.requests())?;
        Ok(Self::new(job, Kind::Engine(ticket)))
    }

    /// Takes the job's tokens from nowhere.
    pub(super) fn canned(job: &'a Job, gap: Duration, busy: Busy) -> Self {
        let next = Instant::now() + gap;
        let given = if gap.is_zero() { u32::MAX } else { 0 };
        Self::new(job, Kind::Canned { next, gap, given, _busy: busy })
    }

    fn new(job: &'a Job, kind: Kind) -> Self {
        let choices = job.choices.len();
        Self { job, kind, seen: vec![0; choices], ended: vec![None; choices], cached_tokens: 0 }
    }

    /// What is new, if anything is.
    pub(super) fn poll(&mut self) -> Option<News> {
        if let Kind::Engine(ticket) = &self.kind
            && ticket.dead()
        {
            return Some(News::Dead);
        }
        for (choice, plan) in self.job.choices.iter().enumerate() {
            let (Some(seen), Some(ended)) = (self.seen.get_mut(choice), self.ended.get_mut(choice))
            else {
                continue;
            };
            if ended.is_some() {
                continue;
            }
            let (to, finish) = match &self.kind {
                Kind::Engine(ticket) => {
                    let (tokens, cached, finish) = ticket.look(choice);
                    if *seen == 0 && tokens > 0 {
                        self.cached_tokens += cached;
                    }
                    (tokens, finish)
                }
                Kind::Canned { given, .. } => {
                    let to = plan.output_tokens.min(*given);
                    (to, (to == plan.output_tokens).then_some(plan.finish))
                }
            };
            if to > *seen || finish.is_some() {
                let from = std::mem::replace(seen, to);
                *ended = finish;
                return Some(News::Tokens { choice, from, to, finish });
            }
        }
        self.ended.iter().all(Option::is_some).then_some(News::Ended)
    }

    /// Until [`Source::poll`] may have something.
    pub(super) async fn wait(&mut self) {
        match &mut self.kind {
            Kind::Engine(ticket) => ticket.changed().await,
            Kind::Canned { next, gap, given, .. } => {
                sleep_until(*next).await;
                *given = given.saturating_add(1);
                *next += *gap;
            }
        }
    }

    /// What was made so far.
    pub(super) fn totals(&self) -> Totals {
        let ends = self.ended.iter().map(|end| end.unwrap_or(FinishReason::Abort));
        Totals {
            choices: self.seen.iter().copied().zip(ends).collect(),
            cached_tokens: self.cached_tokens,
        }
    }

    /// The text of news, token by token.
    pub(super) fn pieces(
        &self,
        choice: usize,
        tokens: std::ops::Range<u32>,
        finish: Option<FinishReason>,
    ) -> impl Iterator<Item = Piece> + use<'a> {
        let plan = self.job.choices.get(choice);
        let last = tokens.end;
        // An end without a token is told with an empty text.
        let empty = tokens.is_empty().then_some(Piece {
            choice,
            text: String::new(),
            tokens: last,
            finish,
        });
        let each = tokens.map(move |n| Piece {
            choice,
            text: plan.map(|plan| plan.text(n, n + 1)).unwrap_or_default(),
            tokens: n + 1,
            finish: finish.filter(|_| n + 1 == last),
        });
        empty.into_iter().chain(each)
    }
}

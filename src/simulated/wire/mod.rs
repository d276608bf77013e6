//! How each API says an answer: the events of a stream, and the body of a plain answer, byte for
//! byte in vLLM's order of fields. Pure. To add an API: a file here and an arm in [`script`].

mod chat;
mod messages;
mod responses;

use super::counters::FinishReason;
use super::job::{Job, Wire};

/// What was made in the end: per choice its tokens and its end; and the cached prompt tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    pub(super) choices: Vec<(u32, FinishReason)>,
    pub(super) cached_tokens: u32,
}

impl Totals {
    fn tokens(&self) -> u32 {
        self.choices.iter().map(|(tokens, _)| tokens).sum()
    }

    fn finish(&self) -> FinishReason {
        self.choices.first().map_or(FinishReason::Stop, |(_, finish)| *finish)
    }
}

/// One more piece of text of one choice.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) choice: usize,
    pub(super) text: String,
    /// Tokens of this choice so far, this piece included.
    pub(super) tokens: u32,
    /// Set on the choice's last piece.
    pub(super) finish: Option<FinishReason>,
}

/// Writes one answer. Events are appended whole, each with the blank line that ends it.
pub(super) trait Script: Send {
    /// Events before the first token.
    fn open(&mut self, events: &mut Vec<String>);
    /// The event of a piece.
    fn piece(&mut self, piece: &Piece, events: &mut Vec<String>);
    /// Events after the last token.
    fn close(&mut self, totals: &Totals, events: &mut Vec<String>);
    /// The whole answer as one body.
    fn whole(&self, totals: &Totals) -> String;
}

/// The script for a job.
pub(super) fn script(job: &Job) -> Box<dyn Script + '_> {
    match job.wire {
        Wire::Chat | Wire::Completion => Box::new(chat::Chat { job }),
        Wire::Responses => Box::new(responses::Responses { job, number: 0 }),
        Wire::Messages => Box::new(messages::Messages { job }),
    }
}

pub(super) const DONE: &str = "data: [DONE]\n\n";
pub(super) const FINGERPRINT: &str = "vllm-0.32.0-00718d88";

/// The text of the whole choice.
fn full_text(job: &Job, choice: usize, tokens: u32) -> String {
    job.choices.get(choice).map(|choice| choice.text(0, tokens)).unwrap_or_default()
}

//! `/v1/messages`, Anthropic's grammar as vLLM speaks it: named events, no `[DONE]`.

use super::super::answer::{one_line, quoted};
use super::super::counters::FinishReason;
use super::super::faults::Usage;
use super::super::job::Job;
use super::{Piece, Script, Totals, full_text};

pub(super) struct Messages<'a> {
    pub(super) job: &'a Job,
}

impl Messages<'_> {
    /// `,"usage":{…}` or nothing.
    fn usage(&self, totals: &Totals) -> String {
        let (prompt, made) = (self.job.prompt_tokens, totals.tokens());
        let cached = totals.cached_tokens;
        let fresh = prompt.saturating_sub(cached);
        match self.job.usage {
            Usage::Missing => String::new(),
            Usage::Null => r#","usage":null"#.to_owned(),
            Usage::Told => format!(
                r#","usage":{{"input_tokens":{fresh},"output_tokens":{made},
                 "cache_creation_input_tokens":0,"cache_read_input_tokens":{cached}}}"#
            ),
        }
    }
}

fn stop_reason(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => r#""end_turn""#,
        FinishReason::Length => r#""max_tokens""#,
        FinishReason::Abort => "null",
    }
}

fn event(name: &str, data: &str) -> String {
    let data = one_line(data);
    format!("event: {name}\ndata: {data}\n\n")
}

impl Script for Messages<'_> {
    fn open(&mut self, events: &mut Vec<String>) {
        let (id, model) = (quoted(&self.job.id), quoted(&self.job.model));
        let prompt = self.job.prompt_tokens;
        events.push(event(
            "message_start",
            &format!(
                r#"{{"type":"message_start","message":{{"id":{id},"type":"message",
                 "role":"assistant","content":[],"model":{model},"stop_reason":null,
                 "stop_sequence":null,"usage":{{"input_tokens":{prompt},"output_tokens":0}}}}}}"#
            ),
        ));
        events.push(event(
            "content_block_start",
            r#"{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}"#,
        ));
    }

    fn piece(&mut self, piece: &Piece, events: &mut Vec<String>) {
        let text = quoted(&piece.text);
        events.push(event(
            "content_block_delta",
            &format!(
                r#"{{"type":"content_block_delta","delta":{{"type":"text_delta","text":{text}}},
                 "index":0}}"#
            ),
        ));
    }

    fn close(&mut self, totals: &Totals, events: &mut Vec<String>) {
        let (reason, usage) = (stop_reason(totals.finish()), self.usage(totals));
        events.push(event("content_block_stop", r#"{"type":"content_block_stop","index":0}"#));
        events.push(event(
            "message_delta",
            &format!(
                r#"{{"type":"message_delta","delta":{{"stop_reason":{reason},
                 "stop_sequence":null}}{usage}}}"#
            ),
        ));
        if !self.job.no_done {
            events.push(event("message_stop", r#"{"type":"message_stop"}"#));
        }
    }

    fn whole(&self, totals: &Totals) -> String {
        let (id, model) = (quoted(&self.job.id), quoted(&self.job.model));
        let text = quoted(&full_text(self.job, 0, totals.tokens()));
        let (reason, usage) = (stop_reason(totals.finish()), self.usage(totals));
        format!(
            r#"{{"id":{id},"type":"message","role":"assistant","content":[{{"type":"text",
             "text":{text}}}],"model":{model},"stop_reason":{reason}{usage}}}"#
        )
    }
}

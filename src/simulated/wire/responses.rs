//! `/v1/responses`: named and numbered events, no `[DONE]`.

use super::super::answer::{one_line, quoted};
use super::super::counters::FinishReason;
use super::super::faults::Usage;
use super::super::job::Job;
use super::{Piece, Script, Totals, full_text};

pub(super) struct Responses<'a> {
    pub(super) job: &'a Job,
    /// Of the next event.
    pub(super) number: u32,
}

impl Responses<'_> {
    fn item_id(&self) -> String {
        quoted(&self.job.id.replacen("resp_", "msg_", 1))
    }

    /// An event: `fields`, then its number and its name, as vLLM orders them.
    fn event(&mut self, name: &str, fields: &str) -> String {
        let (number, fields) = (self.number, one_line(fields));
        self.number += 1;
        format!(
            "event: {name}\ndata: {{{fields},\"sequence_number\":{number},\"type\":\"{name}\"}}\n\n"
        )
    }

    fn part(text: &str, logprobs: &str) -> String {
        let text = quoted(text);
        format!(r#"{{"annotations":[],"text":{text},"type":"output_text","logprobs":{logprobs}}}"#)
    }

    fn item(&self, content: &str, status: &str) -> String {
        let id = self.item_id();
        format!(
            r#"{{"id":{id},"content":[{content}],"role":"assistant","status":"{status}",
             "type":"message","phase":null}}"#
        )
    }

    /// The response object; `totals` once it is done.
    fn object(&self, totals: Option<&Totals>) -> String {
        let (id, model) = (quoted(&self.job.id), quoted(&self.job.model));
        let created = self.job.created;
        let tokens_max = self.job.tokens_max.map_or("null".to_owned(), |max| max.to_string());
        let cut = totals.is_some_and(|totals| totals.finish() == FinishReason::Length);
        let incomplete = if cut { r#"{"reason":"max_output_tokens"}"# } else { "null" };
        let status = match totals.map(Totals::finish) {
            None => "in_progress",
            Some(FinishReason::Stop) => "completed",
            Some(FinishReason::Length) => "incomplete",
            Some(FinishReason::Abort) => "cancelled",
        };
        let output = totals.map_or(String::new(), |totals| {
            let text = full_text(self.job, 0, totals.tokens());
            self.item(&Self::part(&text, "null"), "completed")
        });
        let usage = self.usage(totals);
        format!(
            r#"{{"id":{id},"created_at":{created},"incomplete_details":{incomplete},
             "instructions":null,"metadata":null,"model":{model},"object":"response",
             "output":[{output}],"parallel_tool_calls":true,"temperature":1.0,
             "tool_choice":"none","tools":[],"top_p":1.0,"background":false,
             "max_output_tokens":{tokens_max},"max_tool_calls":null,"previous_response_id":null,
             "prompt":null,"reasoning":null,"service_tier":"auto","status":"{status}","text":null,
             "top_logprobs":null,"truncation":"disabled",{usage}"user":null,
             "presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":null,
             "ec_transfer_params":null,"input_messages":null,"output_messages":null}}"#
        )
    }

    /// `"usage":{…},` or nothing.
    fn usage(&self, totals: Option<&Totals>) -> String {
        let totals = match (self.job.usage, totals) {
            (Usage::Missing, _) => return String::new(),
            (Usage::Null, _) | (_, None) => return r#""usage":null,"#.to_owned(),
            (Usage::Told, Some(totals)) => totals,
        };
        let (prompt, made) = (self.job.prompt_tokens, totals.tokens());
        let (cached, total) = (totals.cached_tokens, prompt + made);
        format!(
            r#""usage":{{"input_tokens":{prompt},"input_tokens_details":{{
             "cached_tokens":{cached},"cache_write_tokens":0,"input_tokens_per_turn":[],
             "cached_tokens_per_turn":[]}},"output_tokens":{made},"output_tokens_details":{{
             "reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],
             "tool_output_tokens_per_turn":[]}},"total_tokens":{total}}},"#
        )
    }
}

impl Script for Responses<'_> {
    fn open(&mut self, events: &mut Vec<String>) {
        let response = format!(r#""response":{}"#, self.object(None));
        events.push(self.event("response.created", &response));
        events.push(self.event("response.in_progress", &response));
        let item = format!(r#""item":{},"output_index":0"#, self.item("", "in_progress"));
        events.push(self.event("response.output_item.added", &item));
        let (id, part) = (self.item_id(), Self::part("", "[]"));
        let part = format!(r#""content_index":0,"item_id":{id},"output_index":0,"part":{part}"#);
        events.push(self.event("response.content_part.added", &part));
    }

    fn piece(&mut self, piece: &Piece, events: &mut Vec<String>) {
        let (id, text) = (self.item_id(), quoted(&piece.text));
        let delta = format!(
            r#""content_index":0,"delta":{text},"item_id":{id},"logprobs":[],"output_index":0"#
        );
        events.push(self.event("response.output_text.delta", &delta));
    }

    fn close(&mut self, totals: &Totals, events: &mut Vec<String>) {
        let id = self.item_id();
        let text = full_text(self.job, 0, totals.tokens());
        // Here, and only here, vLLM puts the number before the text.
        let number = self.number;
        self.number += 1;
        let whole = quoted(&text);
        events.push(format!(
            "event: response.output_text.done\ndata: {{\"content_index\":0,\"item_id\":{id},\
             \"logprobs\":[],\"output_index\":0,\"sequence_number\":{number},\"text\":{whole},\
             \"type\":\"response.output_text.done\"}}\n\n"
        ));
        let part = Self::part(&text, "null");
        let done = format!(r#""content_index":0,"item_id":{id},"output_index":0,"part":{part}"#);
        events.push(self.event("response.content_part.done", &done));
        let item = format!(r#""item":{},"output_index":0"#, self.item(&part, "completed"));
        events.push(self.event("response.output_item.done", &item));
        if !self.job.no_done {
            let response = format!(r#""response":{}"#, self.object(Some(totals)));
            events.push(self.event("response.completed", &response));
        }
    }

    fn whole(&self, totals: &Totals) -> String {
        self.object(Some(totals))
    }
}

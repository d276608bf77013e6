//! `/v1/chat/completions` and `/v1/completions`: two shapes of one grammar.

use std::fmt::Write as _;

use super::super::answer::{one_line, quoted};
use super::super::counters::FinishReason;
use super::super::faults::Usage;
use super::super::job::{Job, Wire};
use super::{DONE, FINGERPRINT, Piece, Script, Totals, full_text};

pub(super) struct Chat<'a> {
    pub(super) job: &'a Job,
}

impl Chat<'_> {
    fn is_chat(&self) -> bool {
        self.job.wire == Wire::Chat
    }

    fn begin(&self, object: &str) -> String {
        let Job { id, created, model, .. } = self.job;
        let (id, model) = (quoted(id), quoted(model));
        format!(r#"{{"id":{id},"object":"{object}","created":{created},"model":{model},"#)
    }

    fn begin_event(&self) -> String {
        let object = if self.is_chat() { "chat.completion.chunk" } else { "text_completion" };
        format!("data: {}", self.begin(object))
    }

    /// `"usage":{…},` or nothing.
    fn usage(&self, totals: &Totals, details: &str) -> String {
        match self.job.usage {
            Usage::Missing => return String::new(),
            Usage::Null => return r#""usage":null,"#.to_owned(),
            Usage::Told => {}
        }
        let (prompt, made) = (self.job.prompt_tokens, totals.tokens());
        let total = prompt + made;
        format!(
            r#""usage":{{"prompt_tokens":{prompt},"total_tokens":{total},
             "completion_tokens":{made}{details}}},"#
        )
    }

    fn final_usage(&self, totals: &Totals) -> String {
        let (cached, chat) = (totals.cached_tokens, self.is_chat());
        let details = match (self.job.details, chat) {
            (false, _) => String::new(),
            (true, true) => format!(
                r#","prompt_tokens_details":{{"cached_tokens":{cached},"created_cache_tokens":0}}"#
            ),
            (true, false) => format!(r#","prompt_tokens_details":{{"cached_tokens":{cached}}}"#),
        };
        self.usage(totals, &details)
    }

    fn whole_usage(&self, totals: &Totals) -> String {
        let created = if self.is_chat() { "0" } else { "null" };
        let cached = totals.cached_tokens;
        let details = if self.job.details {
            format!(
                r#"{{"cached_tokens":{cached},"created_cache_tokens":{created},
                 "multimodal_tokens":null}}"#
            )
        } else {
            "null".to_owned()
        };
        let details =
            format!(r#","prompt_tokens_details":{details},"completion_tokens_details":null"#);
        self.usage(totals, &details)
    }

    /// Token counts so far in every chunk, when asked.
    fn running_usage(&self, tokens: u32) -> String {
        if !self.job.continuous_usage {
            return String::new();
        }
        let totals = Totals { choices: vec![(tokens, FinishReason::Stop)], cached_tokens: 0 };
        let usage = self.usage(&totals, "");
        format!(",{}", usage.trim_end_matches(','))
    }

    fn tool_id(&self) -> String {
        quoted(&self.job.id.replacen("chatcmpl-", "chatcmpl-tool-", 1))
    }

    /// The text of a plain chat answer, or its call of a tool.
    fn content(&self, text: &str) -> String {
        let text = quoted(text);
        match &self.job.tool {
            None => format!(r#""content":{text}"#),
            Some(tool) => {
                let (id, name) = (self.tool_id(), quoted(tool));
                format!(
                    r#""content":"","tool_calls":[{{"id":{id},"type":"function",
                     "function":{{"name":{name},"arguments":{text}}}}}]"#
                )
            }
        }
    }

    fn transfer(&self) -> String {
        if !self.job.remote_decode {
            return "null".to_owned();
        }
        let id = quoted(&self.job.id);
        let tokens = self.job.prompt_tokens;
        format!(
            r#"{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],
             "remote_engine_id":"simulated","remote_request_id":{id},"remote_host":"127.0.0.1",
             "remote_port":5600,"tp_size":1,"remote_num_tokens":{tokens}}}"#
        )
    }
}

impl Script for Chat<'_> {
    fn open(&mut self, events: &mut Vec<String>) {
        if !self.is_chat() {
            return;
        }
        for index in 0..self.job.choices.len() {
            let mut event = self.begin_event();
            let usage = self.running_usage(0);
            let _ = write!(
                event,
                r#""choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},
                 "logprobs":null,"finish_reason":null}}],"prompt_token_ids":null,
                 "prompt_text":null{usage}}}"#
            );
            events.push(one_line(&event) + "\n\n");
        }
        if let Some(tool) = &self.job.tool {
            let (id, name) = (self.tool_id(), quoted(tool));
            let mut event = self.begin_event();
            let _ = write!(
                event,
                r#""choices":[{{"index":0,"delta":{{"content":null,"tool_calls":[{{"id":{id},
                 "type":"function","index":0,"function":{{"name":{name}}}}}]}},
                 "logprobs":null,"finish_reason":null,"token_ids":null}}]}}"#
            );
            events.push(one_line(&event) + "\n\n");
        }
    }

    fn piece(&mut self, piece: &Piece, events: &mut Vec<String>) {
        let (index, text) = (piece.choice, quoted(&piece.text));
        let mut event = self.begin_event();
        let content = match (self.is_chat(), &self.job.tool) {
            (false, _) => format!(r#""text":{text}"#),
            (true, None) => format!(r#""delta":{{"content":{text}}}"#),
            (true, Some(_)) => format!(
                r#""delta":{{"content":null,
                 "tool_calls":[{{"index":0,"function":{{"arguments":{text}}}}}]}}"#
            ),
        };
        let _ = write!(event, r#""choices":[{{"index":{index},{content},"logprobs":null,"#);
        let finish = piece.finish.map(FinishReason::as_str);
        let finish = finish.map_or_else(|| "null".to_owned(), quoted);
        let _ = match (self.is_chat(), piece.finish.is_some()) {
            (true, false) => write!(event, r#""finish_reason":{finish},"token_ids":null}}]"#),
            (true, true) => {
                write!(event, r#""finish_reason":{finish},"stop_reason":null,"token_ids":null}}]"#)
            }
            (false, _) => write!(
                event,
                r#""finish_reason":{finish},"stop_reason":null,"prompt_token_ids":null,
                 "token_ids":null}}]"#
            ),
        };
        if piece.finish.is_some() && !self.job.include_usage {
            let _ = write!(event, r#","system_fingerprint":"{FINGERPRINT}""#);
        }
        event.push_str(&self.running_usage(piece.tokens));
        events.push(one_line(&event) + "}\n\n");
    }

    fn close(&mut self, totals: &Totals, events: &mut Vec<String>) {
        let usage = self.final_usage(totals);
        if self.job.include_usage && !usage.is_empty() {
            let mut event = self.begin_event();
            let _ = write!(event, r#""choices":[],{usage}"system_fingerprint":"{FINGERPRINT}"}}"#);
            events.push(one_line(&event) + "\n\n");
        }
        if !self.job.no_done {
            events.push(DONE.to_owned());
        }
    }

    fn whole(&self, totals: &Totals) -> String {
        let chat = self.is_chat();
        let mut body = self.begin(if chat { "chat.completion" } else { "text_completion" });
        body.push_str(r#""choices":["#);
        for (index, (tokens, finish)) in totals.choices.iter().enumerate() {
            let (text, finish) = (full_text(self.job, index, *tokens), finish.as_str());
            let content = self.content(&text);
            let text = quoted(&text);
            let comma = if index > 0 { "," } else { "" };
            let _ = match chat {
                true => write!(
                    body,
                    r#"{comma}{{"index":{index},"message":{{"role":"assistant",{content},
                     "refusal":null,"annotations":null,"audio":null,"function_call":null,
                     "reasoning":null}},"logprobs":null,"finish_reason":"{finish}",
                     "stop_reason":null,"token_ids":null,"routed_experts":null}}"#
                ),
                false => write!(
                    body,
                    r#"{comma}{{"index":{index},"text":{text},"logprobs":null,
                     "finish_reason":"{finish}","stop_reason":null,"token_ids":null,
                     "prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}}"#
                ),
            };
        }
        let (usage, transfer) = (self.whole_usage(totals), self.transfer());
        let prompt = match chat {
            true => r#""prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"#,
            false => "",
        };
        let _ = write!(
            body,
            r#"],"service_tier":null,
             "system_fingerprint":"{FINGERPRINT}",{usage}{prompt}"kv_transfer_params":{transfer},
             "ec_transfer_params":null,"metrics":null}}"#
        );
        body
    }
}

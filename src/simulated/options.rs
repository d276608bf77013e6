//! What a simulated server can be told when it starts. To add a key: a field with its meaning,
//! unit and default, and its value in `Default`.

use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use super::faults::Faults;

/// How long one step of the engine takes: a sum over the sequences in the batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StepOptions {
    /// Whatever is in the batch. Default 12ms.
    #[serde(with = "humantime_serde")]
    pub base: Duration,
    /// Per prompt token computed. Default 40us 600ns.
    #[serde(with = "humantime_serde")]
    pub prefill_token: Duration,
    /// Per pair of a prompt token computed and a token before it. Default 2ns; with the above,
    /// a prompt of 8,192 tokens takes 0.40 s.
    #[serde(with = "humantime_serde")]
    pub attention_pair: Duration,
    /// Per sequence that makes a token. Default 60us.
    #[serde(with = "humantime_serde")]
    pub sequence: Duration,
    /// Per token before it, of a sequence that makes a token. Default 65ns.
    #[serde(with = "humantime_serde")]
    pub context_token: Duration,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            base: Duration::from_millis(12),
            prefill_token: Duration::from_nanos(40_600),
            attention_pair: Duration::from_nanos(2),
            sequence: Duration::from_micros(60),
            context_token: Duration::from_nanos(65),
        }
    }
}

/// The engine behind the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineOptions {
    /// KV cache blocks. Default 19,208, which is 307,328 tokens.
    pub blocks: u32,
    /// Tokens in a block. Default 16.
    pub block_tokens: u32,
    /// Sequences in a batch at most (vLLM's `--max-num-seqs`). Default 256.
    pub sequences_max: u32,
    /// Tokens computed in a step at most (`--max-num-batched-tokens`). Default 8,192.
    pub batched_tokens_max: u32,
    /// Requests waiting at most (`--max-num-queued-reqs`); more get a 503. Default: no limit.
    pub queued_max: Option<u32>,
    /// Whether full blocks are found again by their content. Default true.
    pub prefix_caching: bool,
    /// Whether `priority` orders the queue (`--scheduling-policy priority`). Default false.
    pub priority_scheduling: bool,
    /// How long a step takes.
    pub step: StepOptions,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            blocks: 19_208,
            block_tokens: 16,
            sequences_max: 256,
            batched_tokens_max: 8_192,
            queued_max: None,
            prefix_caching: true,
            priority_scheduling: false,
            step: StepOptions::default(),
        }
    }
}

/// Where the time of an answer comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// From the engine model.
    #[default]
    Engine,
    /// Nowhere: canned answers at once, or with an even gap between events. For benches.
    Instant,
}

/// Answers of [`Mode::Instant`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InstantOptions {
    /// Tokens of an answer whose request names no limit. Default 16.
    pub tokens: u32,
    /// Time before each token of a stream. Default 0s.
    #[serde(with = "humantime_serde")]
    pub gap: Duration,
}

impl Default for InstantOptions {
    fn default() -> Self {
        Self { tokens: 16, gap: Duration::ZERO }
    }
}

/// One simulated server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Names it serves; the first is used when a request names none. Default `[sim/tiny]`.
    pub models: Vec<String>,
    /// Longest prompt plus answer, in tokens. Default 131,072.
    pub model_tokens_max: u32,
    /// Key that `/v1/*` asks for. Default: none asked.
    pub api_key: Option<String>,
    /// Engine model, or canned answers at once. Default `engine`.
    pub mode: Mode,
    /// The engine of mode `engine`.
    pub engine: EngineOptions,
    /// The answers of mode `instant`.
    pub instant: InstantOptions,
    /// Engine seconds per real second; 20 makes tests quick. Default 1.
    pub speed: f64,
    /// What makes its words differ from those of another server. Default 0.
    pub seed: u64,
    /// An answer without a limit, or with a higher one, is at least so many tokens. Default 16.
    pub answer_tokens_min: u32,
    /// And at most so many. Default 256.
    pub answer_tokens_max: u32,
    /// Whether usage tells cached tokens (`--enable-prompt-tokens-details`). Default true.
    pub prompt_tokens_details: bool,
    /// Whether `X-Request-Id` comes back (`--enable-request-id-headers`). Default false.
    pub request_id_headers: bool,
    /// Whether sleep, wake-up, pause and cache reset exist (`VLLM_SERVER_DEV_MODE`). Default true.
    pub dev_mode: bool,
    /// Data parallel ranks that `X-data-parallel-rank` may name. Default 1.
    pub data_parallel: u32,
    /// A connection without a request is closed after this. Default 5s, as vLLM's.
    #[serde(with = "humantime_serde")]
    pub keep_alive: Duration,
    /// Largest request body. Default 256MiB.
    pub body_bytes_max: ByteSize,
    /// Connections at once; more are closed at once. Default 20,000.
    pub connections_max: u32,
    /// Requests remembered in the log; 0 writes none. Default 4,096.
    pub log_records_max: u32,
    /// Size of the sockets' receive buffer. Default: the system's.
    pub receive_buffer: Option<ByteSize>,
    /// Size of the sockets' send buffer. Default: the system's.
    pub send_buffer: Option<ByteSize>,
    /// Faults from the start.
    pub faults: Faults,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            models: vec!["sim/tiny".to_owned()],
            model_tokens_max: 131_072,
            api_key: None,
            mode: Mode::default(),
            engine: EngineOptions::default(),
            instant: InstantOptions::default(),
            speed: 1.0,
            seed: 0,
            answer_tokens_min: 16,
            answer_tokens_max: 256,
            prompt_tokens_details: true,
            request_id_headers: false,
            dev_mode: true,
            data_parallel: 1,
            keep_alive: Duration::from_secs(5),
            body_bytes_max: ByteSize::mib(256),
            connections_max: 20_000,
            log_records_max: 4_096,
            receive_buffer: None,
            send_buffer: None,
            faults: Faults::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_survive_being_written_and_read() {
        let text = serde_json::to_string(&Options::default()).unwrap();
        assert_eq!(serde_json::from_str::<Options>(&text).unwrap(), Options::default());
        assert!(serde_json::from_str::<Options>(r#"{"model":"x"}"#).is_err(), "unknown key");
    }
}

//! The rows: every path vLLM serves, with and without its flags, and what Weir does with it.
//! To add one: a row in the group it belongs to. Paths without `{…}` are hashed when compiled.
//! Source of the paths: vLLM 0.32 and 0.33, `Route:` lines of its start-up log.

use super::{Api, Methods, ModelSource, Treatment, Wire};

/// The rows, by group.
pub static APIS: &[Api] = ROWS;

/// A path whose percent signs hide a control character, or a letter that would not mean the same
/// without them in a path that reaches a replica. No honest client sends one.
pub(super) static UNSAFE_ENCODING: Api = closed("unsafe_encoding", "");

const ROWS: &[Api] = &[
    // Generation.
    schedule("chat_completions", "/v1/chat/completions", Wire::Chat),
    schedule("chat_completions_batch", "/v1/chat/completions/batch", Wire::Chat),
    schedule("completions", "/v1/completions", Wire::Completion),
    schedule("responses", "/v1/responses", Wire::Responses),
    schedule("messages", "/v1/messages", Wire::Messages),
    schedule("generate", "/inference/v1/generate", Wire::Completion),
    schedule("cohere_chat", "/cohere/v2/chat", Wire::Other),
    schedule("invocations", "/invocations", Wire::Other),
    schedule("decisions", "/v1/decisions", Wire::Other),
    schedule("systemone", "/v1/systemone", Wire::Other),
    schedule("generative_scoring", "/generative_scoring", Wire::Pooling),
    // Pooling.
    schedule("embeddings", "/v1/embeddings", Wire::Pooling),
    schedule("cohere_embed", "/v2/embed", Wire::Pooling),
    schedule("pooling", "/pooling", Wire::Pooling),
    schedule("classify", "/classify", Wire::Pooling),
    schedule("score", "/score", Wire::Pooling),
    schedule("score_v1", "/v1/score", Wire::Pooling),
    schedule("rerank", "/rerank", Wire::Pooling),
    schedule("rerank_v1", "/v1/rerank", Wire::Pooling),
    schedule("rerank_v2", "/v2/rerank", Wire::Pooling),
    // Sound and pictures; some are served by vLLM-Omni only.
    form("audio_transcriptions", "/v1/audio/transcriptions", Wire::Audio),
    form("audio_translations", "/v1/audio/translations", Wire::Audio),
    schedule("audio_speech", "/v1/audio/speech", Wire::Other),
    any_get("audio_voices", "/v1/audio/voices"),
    schedule("images_generations", "/v1/images/generations", Wire::Other),
    form("images_edits", "/v1/images/edits", Wire::Other),
    Api {
        methods: Methods::Get,
        model: ModelSource::Query,
        ..schedule("realtime", "/v1/realtime", Wire::Other)
    },
    // Tokens and templates: no engine step.
    any("tokenize", "/tokenize"),
    any("detokenize", "/detokenize"),
    any_get("tokenizer_info", "/tokenizer_info"),
    any("messages_count_tokens", "/v1/messages/count_tokens"),
    any("chat_completions_render", "/v1/chat/completions/render"),
    any("chat_completions_derender", "/v1/chat/completions/derender"),
    any("completions_render", "/v1/completions/render"),
    any("completions_derender", "/v1/completions/derender"),
    any("responses_render", "/v1/responses/render"),
    any("messages_render", "/v1/messages/render"),
    // Things one replica remembers.
    stateful("response", "/v1/responses/{id}", Methods::Get),
    stateful("response_cancel", "/v1/responses/{id}/cancel", Methods::Post),
    // Answered here.
    answer("models", "/v1/models"),
    Api { model: ModelSource::PathRest, ..answer("model", "/v1/models/{model*}") },
    answer("health", "/health"),
    answer("ready", "/ready"),
    answer("version", "/version"),
    answer("load", "/load"),
    Api { methods: Methods::ReadPost, ..answer("ping", "/ping") },
    // Change an engine.
    admin("lora_load", "/v1/load_lora_adapter", Methods::Post),
    admin("lora_unload", "/v1/unload_lora_adapter", Methods::Post),
    admin("adapters", "/adapters", Methods::Post),
    admin("adapter", "/adapters/{name}", Methods::Delete),
    admin("profile_start", "/start_profile", Methods::Post),
    admin("profile_stop", "/stop_profile", Methods::Post),
    admin("scale_elastic_ep", "/scale_elastic_ep", Methods::Post),
    admin("is_scaling_elastic_ep", "/is_scaling_elastic_ep", Methods::Post),
    admin("fault_tolerance", "/fault_tolerance/{rest*}", Methods::ReadPost),
    admin("generate_abort", "/inference/v1/abort_requests", Methods::Post),
    // Of use to the operator only, who asks the engine itself.
    closed("metrics", "/metrics{rest*}"),
    closed("kv_event_sources", "/kv_event_sources"),
    closed("docs", "/docs"),
    closed("docs_oauth2", "/docs/oauth2-redirect"),
    closed("redoc", "/redoc"),
    closed("openapi", "/openapi.json"),
    // Development mode.
    closed("server_info", "/server_info"),
    closed("reset_prefix_cache", "/reset_prefix_cache"),
    closed("reset_mm_cache", "/reset_mm_cache"),
    closed("reset_encoder_cache", "/reset_encoder_cache"),
    closed("collective_rpc", "/collective_rpc"),
    closed("sleep", "/sleep"),
    closed("wake_up", "/wake_up"),
    closed("is_sleeping", "/is_sleeping"),
    closed("release_kv_cache_memory", "/release_kv_cache_memory"),
    // Reinforcement learning.
    closed("pause", "/pause"),
    closed("resume", "/resume"),
    closed("is_paused", "/is_paused"),
    closed("abort_requests", "/abort_requests"),
    closed("get_world_size", "/get_world_size"),
    closed("weight_transfer_init", "/init_weight_transfer_engine"),
    closed("weight_transfer_shutdown", "/shutdown_weight_transfer_engine"),
    closed("weight_update_start", "/start_weight_update"),
    closed("weight_update_start_draft", "/start_draft_weight_update"),
    closed("weight_update_finish", "/finish_weight_update"),
    closed("update_weights", "/update_weights"),
    closed("update_weight_version", "/update_weight_version"),
    closed("weight_checker", "/weight_checker"),
    closed("weight_info", "/weight_info"),
];

const fn schedule(name: &'static str, path: &'static str, wire: Wire) -> Api {
    Api {
        name,
        path,
        methods: Methods::Post,
        wire,
        treatment: Treatment::Schedule,
        model: ModelSource::JsonField,
    }
}

const fn form(name: &'static str, path: &'static str, wire: Wire) -> Api {
    Api { model: ModelSource::FormField, ..schedule(name, path, wire) }
}

const fn any(name: &'static str, path: &'static str) -> Api {
    Api { treatment: Treatment::Any, ..schedule(name, path, Wire::Tokens) }
}

const fn any_get(name: &'static str, path: &'static str) -> Api {
    Api { methods: Methods::Get, wire: Wire::Other, ..bare(name, path, Treatment::Any) }
}

const fn stateful(name: &'static str, path: &'static str, methods: Methods) -> Api {
    Api { methods, wire: Wire::Responses, ..bare(name, path, Treatment::Stateful) }
}

const fn answer(name: &'static str, path: &'static str) -> Api {
    Api { methods: Methods::Read, ..bare(name, path, Treatment::Answer) }
}

const fn admin(name: &'static str, path: &'static str, methods: Methods) -> Api {
    Api { methods, ..bare(name, path, Treatment::EngineAdmin) }
}

const fn closed(name: &'static str, path: &'static str) -> Api {
    bare(name, path, Treatment::Closed)
}

const fn bare(name: &'static str, path: &'static str, treatment: Treatment) -> Api {
    let (methods, wire, model) = (Methods::Every, Wire::Other, ModelSource::None);
    Api { name, path, methods, wire, treatment, model }
}

/// A row that fits a path.
pub(super) struct Hit {
    pub(super) api: &'static Api,
    /// Where in the path the row's `{…}` stands.
    pub(super) argument: Option<(usize, usize)>,
}

impl Hit {
    /// Whether the decoded `path` can be sent as it is: beyond the row's own letters it has only
    /// those that mean the same with and without a percent sign.
    pub(super) fn is_literal_safe(&self, path: &str) -> bool {
        let Some((start, end)) = self.argument else { return true };
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
        let reaches_a_replica =
            !matches!(self.api.treatment, Treatment::Answer | Treatment::Closed);
        !reaches_a_replica || path.get(start..end).is_some_and(|part| part.bytes().all(plain))
    }
}

/// The row for a normalised path.
pub(super) fn look_up(path: &str) -> Option<Hit> {
    if let Some(api) = literal(path) {
        return Some(Hit { api, argument: None });
    }
    PATTERNS.iter().find_map(|pattern| pattern.fits(path))
}

fn literal(path: &str) -> Option<&'static Api> {
    let mut slot = hash(path.as_bytes()) % SLOTS;
    loop {
        let row = SLOT_ROWS.get(slot).copied().unwrap_or(EMPTY);
        // The table is half empty, so this is soon met.
        let api = APIS.get(usize::from(row))?;
        if api.path == path {
            return Some(api);
        }
        slot = (slot + 1) % SLOTS;
    }
}

const SLOTS: usize = 256;
const EMPTY: u8 = u8::MAX;
const _: () = assert!(ROWS.len() < SLOTS / 2, "the table of paths outgrew its hash");

/// Row numbers by hash of the path; the next slot is taken where two meet.
static SLOT_ROWS: [u8; SLOTS] = slot_rows();

const fn slot_rows() -> [u8; SLOTS] {
    let mut rows = [EMPTY; SLOTS];
    let mut row = 0;
    while row < ROWS.len() {
        if brace(ROWS[row].path).is_none() {
            let mut slot = hash(ROWS[row].path.as_bytes()) % SLOTS;
            while rows[slot] != EMPTY {
                slot = (slot + 1) % SLOTS;
            }
            rows[slot] = row as u8;
        }
        row += 1;
    }
    rows
}

/// FNV-1a.
const fn hash(bytes: &[u8]) -> usize {
    let mut hash = 0x811c_9dc5_u32;
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u32).wrapping_mul(0x0100_0193);
        at += 1;
    }
    (hash ^ hash >> 16) as usize
}

const fn brace(path: &str) -> Option<usize> {
    let bytes = path.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'{' {
            return Some(at);
        }
        at += 1;
    }
    None
}

/// A row whose path has a `{…}`.
struct Pattern {
    api: &'static Api,
    before: &'static str,
    after: &'static str,
    spans_slashes: bool,
}

impl Pattern {
    fn of(api: &'static Api) -> Option<Self> {
        let (before, rest) = api.path.split_once('{')?;
        let (name, after) = rest.split_once('}')?;
        Some(Self { api, before, after, spans_slashes: name.ends_with('*') })
    }

    fn fits(&self, path: &str) -> Option<Hit> {
        let argument = path.strip_prefix(self.before)?.strip_suffix(self.after)?;
        // Only a path that stays here may keep its percent signs: what they hide must not
        // reach a replica unseen.
        let stays = matches!(self.api.treatment, Treatment::Answer | Treatment::Closed);
        let fits = (self.spans_slashes || !argument.is_empty() && !argument.contains('/'))
            && (stays || !argument.contains('%'));
        let start = self.before.len();
        fits.then_some(Hit { api: self.api, argument: Some((start, start + argument.len())) })
    }
}

static PATTERNS: std::sync::LazyLock<Vec<Pattern>> =
    std::sync::LazyLock::new(|| APIS.iter().filter_map(Pattern::of).collect());

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// `Route:` lines of a real vLLM 0.32 with development mode, LoRA and SageMaker paths on.
    const VLLM_ROUTES: &str = "
        /abort_requests /adapters /adapters/a /collective_rpc /detokenize /docs
        /docs/oauth2-redirect /finish_weight_update /generative_scoring /get_world_size /health
        /inference/v1/abort_requests /inference/v1/generate /init_weight_transfer_engine
        /invocations /is_paused /is_scaling_elastic_ep /is_sleeping /kv_event_sources /load
        /metrics /openapi.json /pause /ping /redoc /release_kv_cache_memory /reset_encoder_cache
        /reset_mm_cache /reset_prefix_cache /resume /scale_elastic_ep /server_info
        /shutdown_weight_transfer_engine /sleep /start_draft_weight_update /start_weight_update
        /tokenize /update_weight_version /update_weights /v1/chat/completions
        /v1/chat/completions/batch /v1/chat/completions/derender /v1/chat/completions/render
        /v1/completions /v1/completions/derender /v1/completions/render /v1/load_lora_adapter
        /v1/messages /v1/messages/count_tokens /v1/messages/render /v1/models /v1/responses
        /v1/responses/render /v1/responses/resp_1 /v1/responses/resp_1/cancel /v1/systemone
        /v1/unload_lora_adapter /version /wake_up /weight_checker /weight_info";

    #[test]
    fn every_route_of_a_real_vllm_is_in_the_table() {
        for path in VLLM_ROUTES.split_whitespace() {
            assert!(look_up(path).is_some(), "{path} is not in the table");
        }
    }

    #[test]
    fn every_row_is_found_by_its_own_path() {
        for api in APIS {
            let path = api.path.replace(['{', '}', '*'], "");
            assert_eq!(look_up(&path).map(|hit| hit.api.name), Some(api.name), "{path}");
        }
        assert!(look_up("/").is_none());
        assert!(look_up("").is_none());
    }

    #[test]
    fn names_are_unique_and_fit_for_a_label() {
        let names: HashSet<_> = APIS.iter().map(|api| api.name).collect();
        assert_eq!(names.len(), APIS.len());
        let fit = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        assert!(names.iter().all(|name| name.bytes().all(fit)));
        let paths: HashSet<_> = APIS.iter().map(|api| api.path).collect();
        assert_eq!(paths.len(), APIS.len());
    }

    #[test]
    fn what_costs_engine_work_names_its_model() {
        for api in APIS {
            if api.treatment == Treatment::Schedule {
                assert_ne!(api.model, ModelSource::None, "{}", api.name);
            }
            if matches!(api.treatment, Treatment::Closed | Treatment::EngineAdmin) {
                assert_eq!(api.model, ModelSource::None, "{}", api.name);
            }
        }
    }
}

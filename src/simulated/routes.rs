//! Which path means what. To add a route: a variant, a row, and its arm in `serve.rs`.

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Chat,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    Pooling,
    Score,
    Rerank,
    Classify,
    Tokenize,
    Detokenize,
    Audio,
    Models,
    Health,
    Ping,
    Version,
    Load,
    Metrics,
    Sleep,
    WakeUp,
    IsSleeping,
    Pause,
    Resume,
    IsPaused,
    ResetPrefixCache,
    LoadLora,
    UnloadLora,
    ScaleOut,
    Response,
    CancelResponse,
    Echo,
    Unknown,
}

pub(super) struct Row {
    pub(super) path: &'static str,
    pub(super) method: &'static str,
    pub(super) route: Route,
}

const fn row(path: &'static str, method: &'static str, route: Route) -> Row {
    Row { path, method, route }
}

/// All paths; the busiest first, as they are looked through in order.
pub(super) static ROUTES: &[Row] = &[
    row("/v1/chat/completions", "POST", Route::Chat),
    row("/v1/completions", "POST", Route::Completions),
    row("/v1/responses", "POST", Route::Responses),
    row("/v1/messages", "POST", Route::Messages),
    row("/health", "GET", Route::Health),
    row("/metrics", "GET", Route::Metrics),
    row("/v1/models", "GET", Route::Models),
    row("/is_sleeping", "GET", Route::IsSleeping),
    row("/v1/messages/count_tokens", "POST", Route::CountTokens),
    row("/v1/embeddings", "POST", Route::Embeddings),
    row("/v2/embed", "POST", Route::Embeddings),
    row("/pooling", "POST", Route::Pooling),
    row("/score", "POST", Route::Score),
    row("/v1/score", "POST", Route::Score),
    row("/rerank", "POST", Route::Rerank),
    row("/v1/rerank", "POST", Route::Rerank),
    row("/v2/rerank", "POST", Route::Rerank),
    row("/classify", "POST", Route::Classify),
    row("/tokenize", "POST", Route::Tokenize),
    row("/detokenize", "POST", Route::Detokenize),
    row("/v1/audio/transcriptions", "POST", Route::Audio),
    row("/v1/audio/translations", "POST", Route::Audio),
    row("/ping", "GET, POST", Route::Ping),
    row("/version", "GET", Route::Version),
    row("/load", "GET", Route::Load),
    row("/sleep", "POST", Route::Sleep),
    row("/wake_up", "POST", Route::WakeUp),
    row("/pause", "POST", Route::Pause),
    row("/resume", "POST", Route::Resume),
    row("/is_paused", "GET", Route::IsPaused),
    row("/reset_prefix_cache", "POST", Route::ResetPrefixCache),
    row("/v1/load_lora_adapter", "POST", Route::LoadLora),
    row("/v1/unload_lora_adapter", "POST", Route::UnloadLora),
    row("/inference/v1/generate", "POST", Route::ScaleOut),
    row("/v1/chat/completions/render", "POST", Route::ScaleOut),
    row("/v1/completions/render", "POST", Route::ScaleOut),
    row("/v1/responses/{response_id}", "GET", Route::Response),
    row("/v1/responses/{response_id}/cancel", "POST", Route::CancelResponse),
    row("/sim/echo", "", Route::Echo),
    row("other", "", Route::Unknown),
];

/// The place in [`ROUTES`] of a request's path.
pub(super) fn find(path: &str) -> usize {
    let exact = ROUTES.iter().position(|row| row.path == path);
    exact.unwrap_or_else(|| {
        let route = match path.strip_prefix("/v1/responses/") {
            Some(id) if id.ends_with("/cancel") => Route::CancelResponse,
            Some(_) => Route::Response,
            None if path.starts_with("/sim/echo") => Route::Echo,
            None => Route::Unknown,
        };
        ROUTES.iter().position(|row| row.route == route).unwrap_or(ROUTES.len() - 1)
    })
}

/// The response id in the path of [`Route::Response`] or [`Route::CancelResponse`].
pub(super) fn response_id(path: &str) -> &str {
    let id = path.strip_prefix("/v1/responses/").unwrap_or_default();
    id.strip_suffix("/cancel").unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_find_their_rows() {
        let route = |path| ROUTES[find(path)].route;
        assert_eq!(route("/v1/chat/completions"), Route::Chat);
        assert_eq!(route("/v1/responses/resp_1"), Route::Response);
        assert_eq!(route("/v1/responses/resp_1/cancel"), Route::CancelResponse);
        assert_eq!(route("/sim/echo/x"), Route::Echo);
        assert_eq!(route("/v1/models/tiny"), Route::Unknown, "vLLM has no look-up of one model");
        assert_eq!(response_id("/v1/responses/resp_1/cancel"), "resp_1");
    }
}

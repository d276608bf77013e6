//! Routes about the server itself: models, adapters, sleep, pause, load, stored responses.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::answer::{Answer, JSON, quoted};
use super::generate::json;
use super::http::Models;
use super::routes::{self, Route};
use super::serve::{Call, asleep};

/// Adapters at once.
const ADAPTERS_MAX: usize = 1_024;

/// `GET /v1/models`.
pub(super) fn models(call: &Call<'_>) -> Answer {
    let models = Arc::clone(&call.shared.models.read());
    let parent = models.names.first().map_or("null".to_owned(), |name| quoted(name));
    let now = call.now;
    let entries: Vec<String> = models
        .names
        .iter()
        .map(|name| {
            let adapter = models.adapters.iter().find(|(adapter, _)| adapter == name);
            let (root, parent, max) = match adapter {
                Some((_, path)) => (quoted(path), parent.as_str(), "null".to_owned()),
                None => (quoted(name), "null", call.shared.options.model_tokens_max.to_string()),
            };
            let (id, permission) = (quoted(name), call.shared.fresh_id());
            format!(
                r#"{{"id":{id},"object":"model","created":{now},"owned_by":"vllm","root":{root},
                 "parent":{parent},"max_model_len":{max},"permission":[{{
                 "id":"modelperm-{permission:016x}","object":"model_permission","created":{now},
                 "allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,
                 "allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,
                 "organization":"*","group":null,"is_blocking":false}}]}}"#
            )
        })
        .collect();
    Answer::json(format!(r#"{{"object":"list","data":[{}]}}"#, entries.join(",")))
}

/// `GET /load`: requests being served.
pub(super) fn load(call: &Call<'_>) -> Answer {
    let gauges = call.shared.driver.gauges();
    let canned = call.shared.canned.load(Ordering::Relaxed);
    let load = gauges.running as u64 + gauges.waiting as u64 + canned;
    Answer::json(format!(r#"{{"server_load":{load}}}"#))
}

/// `POST /v1/load_lora_adapter`. A path under `/no/such` is not found.
pub(super) fn load_lora(call: &Call<'_>) -> Answer {
    let body = match json(call) {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    let (Some(name), Some(path)) = (body["lora_name"].as_str(), body["lora_path"].as_str()) else {
        return Answer::error(
            400,
            "InvalidUserInput",
            None,
            "Both 'lora_name' and 'lora_path' must be provided.",
        );
    };
    if path.starts_with("/no/such") {
        let text = format!("Loading lora {name} failed: No adapter found for {path}");
        return Answer::error(404, "NotFoundError", None, &text);
    }
    let mut models = call.shared.models.write();
    if models.names.iter().any(|known| known == name) {
        let text = format!(
            "The lora adapter '{name}' has already been loaded. If you want to load the adapter \
             in place, set 'load_inplace' to True."
        );
        return Answer::error(400, "InvalidUserInput", None, &text);
    }
    if models.adapters.len() >= ADAPTERS_MAX {
        return Answer::error(400, "InvalidUserInput", None, "Too many adapters.");
    }
    let mut next = Models::clone(&models);
    next.names.push(name.to_owned());
    next.adapters.push((name.to_owned(), path.to_owned()));
    *models = Arc::new(next);
    let body = format!("Success: LoRA adapter '{name}' added successfully.");
    Answer { body: body.into(), ..Answer::empty() }
}

/// `POST /v1/unload_lora_adapter`.
pub(super) fn unload_lora(call: &Call<'_>) -> Answer {
    let body = match json(call) {
        Ok(body) => body,
        Err(refusal) => return refusal,
    };
    let name = body["lora_name"].as_str().unwrap_or_default();
    let mut models = call.shared.models.write();
    if !models.adapters.iter().any(|(known, _)| known == name) {
        let text = format!("The lora adapter '{name}' cannot be found.");
        return Answer::error(404, "NotFoundError", None, &text);
    }
    let mut next = Models::clone(&models);
    next.names.retain(|known| known != name);
    next.adapters.retain(|(known, _)| known != name);
    *models = Arc::new(next);
    let body = format!("Success: LoRA adapter '{name}' removed successfully.");
    Answer { body: body.into(), ..Answer::empty() }
}

/// `GET /v1/responses/{id}` and `POST …/cancel`.
pub(super) fn response(call: &Call<'_>) -> Answer {
    let id = routes::response_id(call.head.path());
    let responses = call.shared.responses.lock();
    let found = responses.iter().find(|(known, _)| known == id);
    let kind = "invalid_request_error";
    match (found, call.route) {
        (None, _) => {
            let text = format!("Response with id '{id}' not found.");
            Answer::error(404, kind, Some("response_id"), &text)
        }
        (Some(_), Route::CancelResponse) => {
            let text = "Cannot cancel a synchronous response.";
            Answer::error(400, kind, Some("response_id"), text)
        }
        (Some((_, body)), _) => Answer::json(body.clone()),
    }
}

/// Sleep, wake-up, pause and cache reset.
pub(super) fn engine(call: &Call<'_>, route: Route) -> Answer {
    let shared = call.shared;
    let argument = |name: &str| {
        let pairs = call.head.query().split('&').filter_map(|pair| pair.split_once('='));
        pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    };
    let paused = shared.paused.load(Ordering::Relaxed);
    match route {
        Route::Sleep => {
            let level = argument("level").and_then(|text| text.parse().ok()).unwrap_or(1);
            shared.sleep_level.store(level, Ordering::Relaxed);
            shared.driver.with(|engine, now| {
                if argument("mode") != Some("wait") {
                    engine.abort_all(now);
                }
                engine.pause(now);
                engine.reset_prefix_cache();
            });
            Answer::json(format!(r#"{{"status":"sleeping","level":{level}}}"#))
        }
        Route::WakeUp => {
            shared.sleep_level.store(0, Ordering::Relaxed);
            if !paused {
                shared.driver.with(|engine, now| engine.resume(now));
            }
            Answer::json(r#"{"status":"awake","tags":null}"#)
        }
        Route::IsSleeping => Answer::json(format!(r#"{{"is_sleeping":{}}}"#, asleep(shared))),
        Route::Pause => {
            shared.paused.store(true, Ordering::Relaxed);
            shared.driver.with(|engine, now| {
                if argument("mode") == Some("abort") {
                    engine.abort_all(now);
                }
                engine.pause(now);
            });
            Answer::json(r#"{"status":"paused"}"#)
        }
        Route::Resume => {
            shared.paused.store(false, Ordering::Relaxed);
            if !asleep(shared) {
                shared.driver.with(|engine, now| engine.resume(now));
            }
            Answer::json(r#"{"status":"resumed"}"#)
        }
        Route::IsPaused => Answer::json(format!(r#"{{"is_paused":{paused}}}"#)),
        Route::ResetPrefixCache => {
            let done = shared.driver.with(|engine, _| engine.reset_prefix_cache());
            let status = if done { 200 } else { 503 };
            Answer::new(status, JSON, format!(r#"{{"success":{done}}}"#))
        }
        _ => Answer::not_found(),
    }
}

//! Healthy answers: shapes, framing, refusals, as in the recorded samples of vLLM.

use super::*;

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_chat_is_answered_in_vllms_shape_and_the_connection_is_kept() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let answer = client.post("/v1/chat/completions", "x-request-id: my-1\r\n", HELLO).await;
    assert_eq!(answer.status, 200);
    let lines: Vec<&str> =
        answer.head.lines().map(|line| line.split(':').next().unwrap()).collect();
    assert_eq!(
        lines,
        ["HTTP/1.1 200 OK", "date", "server", "content-length", "content-type", "vary", ""]
    );
    let body = answer.json();
    assert_eq!(body["id"], "chatcmpl-my-1");
    assert_eq!(body["model"], "sim/tiny");
    assert_eq!(body["usage"]["completion_tokens"], 6);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let text = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(text.split_whitespace().count(), 6);
    let again = client.post("/v1/chat/completions", "", HELLO).await.json();
    assert_eq!(again["choices"][0]["message"]["content"], text, "the same prompt, the same words");
    assert_eq!(server.accepted(), 1);
}

#[tokio::test]
async fn a_stream_begins_with_the_role_and_ends_with_usage_and_done() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let body = HELLO_STREAM
        .replace("\"stream\"", "\"stream_options\":{\"include_usage\":true},\"stream\"");
    let answer = client.post("/v1/chat/completions", "x-request-id: s\r\n", &body).await;
    assert_eq!(answer.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let mut events = answer.events();
    assert_eq!(events.pop().unwrap(), "[DONE]");
    let events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    assert_eq!(answer.chunks, events.len() + 1, "one chunk per event");
    assert_eq!(
        events[0]["choices"][0]["delta"],
        serde_json::json!({"role":"assistant","content":""})
    );
    let last = &events[events.len() - 1];
    assert_eq!(
        (&last["choices"], &last["usage"]["completion_tokens"]),
        (&Value::Array(vec![]), &6.into())
    );
    assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "length");
    assert_eq!(events.len(), 8);
    let plain = client.post("/v1/chat/completions", "", HELLO).await.json();
    let words: String =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(plain["choices"][0]["message"]["content"], words);
    let without = client.post("/v1/chat/completions", "", HELLO_STREAM).await;
    assert!(!without.text().contains("usage"));
    assert!(without.text().contains("system_fingerprint"));
}

/// A recorded answer of vLLM, with its first event or body made comparable.
#[track_caller]
fn check_keys(ours: &Value, recorded: &str) {
    fn keys(value: &Value, path: &str, out: &mut Vec<String>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(key, value)| {
                out.push(format!("{path}.{key}"));
                keys(value, &format!("{path}.{key}"), out);
            }),
            Value::Array(list) => {
                list.iter().take(1).for_each(|value| keys(value, &format!("{path}[]"), out));
            }
            _ => {}
        }
    }
    let (mut left, mut right) = (Vec::new(), Vec::new());
    keys(ours, "", &mut left);
    keys(&serde_json::from_str(recorded).unwrap(), "", &mut right);
    assert_eq!(left, right);
}

#[tokio::test]
async fn bodies_have_the_very_fields_of_recorded_ones() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let body = client.post("/v1/completions", "", r#"{"prompt":"Hello","max_tokens":6}"#).await;
    check_keys(
        &body.json(),
        concat!(
            r#"{"id":"","object":"","created":1,"model":"","choices":[{"index":0,"text":"","#,
            r#""logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null,"#,
            r#""prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}],"#,
            r#""service_tier":null,"system_fingerprint":"","usage":{"prompt_tokens":4,"#,
            r#""total_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0,"#,
            r#""created_cache_tokens":null,"multimodal_tokens":null},"#,
            r#""completion_tokens_details":null},"kv_transfer_params":null,"#,
            r#""ec_transfer_params":null,"metrics":null}"#,
        ),
    );
    let messages = r#"{"max_tokens":6,"messages":[{"role":"user","content":"Hello"}]}"#;
    let body = client.post("/v1/messages", "", messages).await;
    check_keys(
        &body.json(),
        concat!(
            r#"{"id":"","type":"message","role":"assistant","content":[{"type":"text","#,
            r#""text":""}],"model":"","stop_reason":"max_tokens","usage":{"input_tokens":16,"#,
            r#""output_tokens":6,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}}"#,
        ),
    );
    assert_eq!(body.json()["stop_reason"], "max_tokens");
    let models = client.get("/v1/models").await.json();
    check_keys(
        &models,
        concat!(
            r#"{"object":"list","data":[{"id":"","object":"model","created":1,"owned_by":"vllm","#,
            r#""root":"","parent":null,"max_model_len":8192,"permission":[{"id":"","object":"","#,
            r#""created":1,"allow_create_engine":false,"allow_sampling":true,"#,
            r#""allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"#,
            r#""allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}]}]}"#,
        ),
    );
}

#[tokio::test]
async fn messages_stream_their_own_events_and_responses_can_be_asked_for_again() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let messages = r#"{"max_tokens":3,"stream":true,"messages":[{"role":"user","content":"Hi"}]}"#;
    let answer = client.post("/v1/messages", "", messages).await;
    let names = |answer: &Response| -> Vec<String> {
        let lines = answer.text().lines().filter_map(|line| line.strip_prefix("event: "));
        lines.map(str::to_owned).collect()
    };
    let mut wanted = vec!["message_start", "content_block_start"];
    wanted.extend(["content_block_delta"; 3]);
    wanted.extend(["content_block_stop", "message_delta", "message_stop"]);
    assert_eq!(names(&answer), wanted);
    let input = r#"{"input":"Hi","max_output_tokens":3,"stream":true}"#;
    let answer = client.post("/v1/responses", "x-request-id: r1\r\n", input).await;
    let events = answer.events();
    let numbers =
        events.iter().map(|e| serde_json::from_str::<Value>(e).unwrap()["sequence_number"].clone());
    assert!(numbers.eq((0..events.len()).map(Value::from)), "events are numbered");
    assert_eq!(names(&answer).last().unwrap(), "response.completed");
    let kept = client.get("/v1/responses/resp_r1").await.json();
    assert_eq!((&kept["status"], &kept["id"]), (&"incomplete".into(), &"resp_r1".into()));
    assert_eq!(client.get("/v1/responses/resp_nope").await.status, 404);
    let cancel = client.post("/v1/responses/resp_r1/cancel", "", "").await;
    assert_eq!(cancel.status, 400);
}

/// Path, body, status and text, as recorded.
const REFUSALS: &[(&str, &str, u16, &str)] = &[
    (
        CHAT,
        r#"{"model":"no/such","messages":[]}"#,
        404,
        concat!(
            r#"{"error":{"message":"The model `no/such` does not exist. Valid aliases: "#,
            r#"tiny/qwen-tiny.","type":"NotFoundError","param":"model","code":404}}"#,
        ),
    ),
    (
        CHAT,
        r#"{"model": "x", "messages": ["#,
        400,
        concat!(
            r#"{"error":{"message":"1 validation error:\n  {'type': 'json_invalid', 'loc': "#,
            r#"'body.28', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {"#,
            r#"'error': 'Expecting value'}}","type":"Bad Request","param":"body.28","#,
            r#""code":400}}"#,
        ),
    ),
    (
        CHAT,
        "",
        400,
        concat!(
            r#"{"error":{"message":"1 validation error:\n  {'type': 'missing', 'loc': 'body',"#,
            r#" 'msg': 'Field required', 'input': 'None'}","type":"Bad Request","#,
            r#""param":"body","code":400}}"#,
        ),
    ),
    (
        CHAT,
        "[]",
        400,
        concat!(
            r#"{"error":{"message":"1 validation error:\n  {'type': 'model_attributes_type', "#,
            r#"'loc': 'body', 'msg': 'Input should be a valid dictionary or object to "#,
            r#"extract fields from', 'input': '<list of 0 items>'}","type":"Bad Request","#,
            r#""param":"body","code":400}}"#,
        ),
    ),
    (
        "/v1/messages",
        r#"{"model":"no/such","max_tokens":6,"messages":[]}"#,
        404,
        concat!(
            r#"{"type":"error","error":{"type":"NotFoundError","message":"The model "#,
            r#"`no/such` does not exist. Valid aliases: tiny/qwen-tiny."}}"#,
        ),
    ),
    ("/v1/nope", "{}", 404, r#"{"detail":"Not Found"}"#),
    ("/v1/models", "{}", 405, r#"{"detail":"Method Not Allowed"}"#),
    (
        "/inference/v1/generate",
        "{}",
        403,
        concat!(
            r#"{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve "#,
            r#"with --enable-scale-out to enable them.","type":"PermissionDeniedError","#,
            r#""param":null,"code":403}}"#,
        ),
    ),
];

#[tokio::test]
async fn refusals_match_the_recorded_ones() {
    let server = start(Options { models: vec!["tiny/qwen-tiny".to_owned()], ..quick() });
    let mut client = Client::to(&server).await;
    for (path, body, status, text) in REFUSALS {
        let answer = client.post(path, "", body).await;
        assert_eq!((answer.status, answer.text()), (*status, *text));
    }
    assert_eq!(client.get(CHAT).await.header("allow"), Some("POST"));
    client.send("HEAD /health HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let head = String::from_utf8(client.until(b"\r\n\r\n").await).unwrap();
    assert!(head.starts_with("HTTP/1.1 405") && head.contains("allow: GET"), "{head}");
    let plain = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: text/plain\r\n\
                 content-length: 2\r\n\r\n{}";
    client.send(plain).await;
    assert!(client.response().await.text().contains("Only 'application/json' is allowed"));
    client
        .send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n\
        content-type: application/json\r\ncontent-length: 3\r\n\r\n\"\xff\"",
        )
        .await;
    assert_eq!(
        client.response().await.text(),
        r#"{"detail":"There was an error parsing the body"}"#
    );
    let rank = client.post(CHAT, "X-data-parallel-rank: 7\r\n", HELLO).await;
    assert!(rank.text().contains("data_parallel_rank 7 is out of range [0, 1)."));
    assert_eq!(client.post(CHAT, "X-data-parallel-rank: abc\r\n", HELLO).await.status, 200);
}

#[tokio::test]
async fn a_key_is_asked_for_under_v1_and_nowhere_else() {
    let server = start(Options { api_key: Some("k".to_owned()), ..quick() });
    let mut client = Client::to(&server).await;
    let answer = client.post("/v1/chat/completions", "", HELLO).await;
    assert_eq!((answer.status, answer.text()), (401, r#"{"error":"Unauthorized"}"#));
    for header in ["authorization: Bearer k\r\n", "x-api-key: k\r\n"] {
        assert_eq!(client.post("/v1/chat/completions", header, HELLO).await.status, 200);
    }
    assert_eq!(client.get("/metrics").await.status, 200);
}

#[tokio::test]
async fn bodies_come_chunked_pipelined_or_after_a_continue() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let head = "POST /sim/echo HTTP/1.1\r\nhost: a\r\n";
    client
        .send(format!(
            "{head}transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nt: 1\r\n\r\n"
        ))
        .await;
    let first = client.response().await.json();
    assert_eq!(
        (&first["body_bytes"], &first["line"]),
        (&5.into(), &"POST /sim/echo HTTP/1.1".into())
    );
    assert_eq!(
        first["body_sha256"],
        "36bbe50ed96841d10443bcb670d6554f0a34b761be67ec9c4a8ad2c0c44ca42c"
    );
    client.send(format!("{head}expect: 100-continue\r\ncontent-length: 2\r\n\r\n")).await;
    assert_eq!(client.until(b"\r\n\r\n").await, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.send("ok").await;
    assert_eq!(client.response().await.json()["body_bytes"], 2);
    let one = format!("{head}content-length: 1\r\n\r\nx");
    client.send(format!("{one}{one}{one}")).await;
    for _ in 0..3 {
        assert_eq!(client.response().await.json()["body_bytes"], 1);
    }
    assert_eq!(server.accepted(), 1);
}

#[tokio::test]
async fn the_mirror_shows_header_lines_in_order_and_gives_bodies_back() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    client.send("PUT /v1/any?q=1 HTTP/1.1\r\nB: 2\r\na: 1\r\nB: 3\r\nX-Sim-Echo: 1\r\n\r\n").await;
    let seen = client.response().await.json();
    let wanted = serde_json::json!([["B", "2"], ["a", "1"], ["B", "3"], ["X-Sim-Echo", "1"]]);
    assert_eq!((&seen["headers"], &seen["target"]), (&wanted, &"/v1/any?q=1".into()));
    let body = "x".repeat(3_000_000);
    let back = client.post("/sim/echo", "x-sim-echo: body\r\n", &body).await;
    assert!(back.text() == body, "three megabytes there and back");
}

#[tokio::test]
async fn routes_without_text_answer_in_their_shapes() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    for (path, body, pointer, wanted) in [
        ("/v1/embeddings", r#"{"input":["a","b"]}"#, "/data/1/object", "embedding".into()),
        ("/pooling", r#"{"input":"a"}"#, "/data/0/object", "pooling".into()),
        ("/score", r#"{"text_1":"a","text_2":["b","c"]}"#, "/data/1/index", Value::from(1)),
        (
            "/rerank",
            r#"{"query":"a","documents":["b","c"]}"#,
            "/results/1/document/text",
            "c".into(),
        ),
        ("/classify", r#"{"input":["a"]}"#, "/data/0/num_classes", Value::from(2)),
        ("/tokenize", r#"{"prompt":"Hello world"}"#, "/count", Value::from(2)),
        ("/detokenize", r#"{"tokens":[0,8]}"#, "/prompt", "river house".into()),
        ("/v1/messages/count_tokens", r#"{"messages":[]}"#, "/input_tokens", Value::from(4)),
        ("/sleep?level=1", "", "/level", Value::from(1)),
        ("/wake_up", "", "/status", "awake".into()),
        ("/reset_prefix_cache", "", "/success", Value::from(true)),
    ] {
        let answer = client.post(path, "", body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        assert_eq!(answer.json().pointer(pointer), Some(&wanted), "{path}: {}", answer.text());
    }
    let base64 = r#"{"input":"a","dimensions":3,"encoding_format":"base64"}"#;
    let answer = client.post("/v1/embeddings", "", base64).await.json();
    assert_eq!(answer["data"][0]["embedding"].as_str().unwrap().len(), 16);
    for path in ["/health", "/ping", "/version", "/load", "/metrics", "/is_sleeping"] {
        assert_eq!(client.get(path).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn an_upload_is_told_by_its_digest_plain_or_streamed() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let form = |extra: &str| {
        let body = format!(
            "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nsim/tiny\r\n\
             {extra}--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
             \r\nabcde\r\n--b--\r\n"
        );
        let length = body.len();
        format!(
            "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: a\r\n\
             content-type: multipart/form-data; boundary=b\r\n\
             content-length: {length}\r\n\r\n{body}"
        )
    };
    client.send(form("")).await;
    let text = client.response().await.json()["text"].as_str().unwrap().to_owned();
    assert!(text.starts_with("sha256:36bbe5") && text.ends_with("bytes:5 name:a.wav"), "{text}");
    client
        .send(form("--b\r\nContent-Disposition: form-data; name=\"stream\"\r\n\r\ntrue\r\n"))
        .await;
    assert_eq!(client.response().await.events().len(), 4);
}

#[tokio::test]
async fn adapters_come_and_go_with_vllms_words() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let load = r#"{"lora_name":"ad","lora_path":"/lora"}"#;
    let loaded = client.post("/v1/load_lora_adapter", "", load).await;
    assert_eq!(loaded.text(), "Success: LoRA adapter 'ad' added successfully.");
    assert_eq!(loaded.header("content-type"), None);
    assert_eq!(client.post("/v1/load_lora_adapter", "", load).await.status, 400);
    let models = client.get("/v1/models").await.json();
    assert_eq!(
        (&models["data"][1]["id"], &models["data"][1]["parent"]),
        (&"ad".into(), &"sim/tiny".into())
    );
    let chat = HELLO.replacen('{', r#"{"model":"ad","#, 1);
    assert_eq!(client.post("/v1/chat/completions", "", &chat).await.json()["model"], "ad");
    assert!(server.metrics().contains("running_lora_adapters=\"ad\""));
    assert_eq!(client.post("/v1/unload_lora_adapter", "", load).await.status, 200);
    assert_eq!(client.post("/v1/unload_lora_adapter", "", load).await.status, 404);
    assert_eq!(client.post("/v1/chat/completions", "", &chat).await.status, 404);
}

#[tokio::test]
async fn metrics_count_tokens_hits_and_ends() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let long = "word ".repeat(100);
    let body = format!(r#"{{"prompt":"{long}","max_tokens":4,"ignore_eos":true}}"#);
    let usage = |answer: &Response| {
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    let first = client.post("/v1/completions", "", &body).await;
    let second = client.post("/v1/completions", "", &body).await;
    assert_eq!((usage(&first), usage(&second)), (0.into(), 96.into()));
    let page = client.get("/metrics").await;
    assert_eq!(page.header("content-type"), Some("text/plain; version=1.0.0; charset=utf-8"));
    let labels = r#"{engine="0",model_name="sim/tiny""#;
    for line in [
        format!("vllm:num_requests_running{labels}}} 0.0"),
        format!("vllm:prefix_cache_queries_total{labels}}} 202.0"),
        format!("vllm:prefix_cache_hits_total{labels}}} 96.0"),
        format!("vllm:generation_tokens_total{labels}}} 8.0"),
        format!(r#"vllm:request_success_total{labels},finished_reason="length"}} 2.0"#),
        format!(r#"vllm:time_to_first_token_seconds_bucket{labels},le="+Inf"}} 2.0"#),
        format!("vllm:kv_cache_usage_perc{labels}}} 0.0"),
    ] {
        assert!(page.text().lines().any(|known| known == line), "{line}\n{}", page.text());
    }
    for line in page.text().lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.starts_with("vllm:") && value.parse::<f64>().is_ok(), "{line}");
    }
}

#[tokio::test]
async fn several_choices_are_streamed_side_by_side() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let body = HELLO_STREAM.replacen('{', r#"{"n":2,"#, 1);
    let events = client.post("/v1/chat/completions", "", &body).await.events();
    assert_eq!(events.len(), 2 + 12 + 1);
    let plain = client.post("/v1/completions", "", r#"{"prompt":["a","b"],"max_tokens":2}"#).await;
    let plain = plain.json();
    assert_eq!(plain["choices"].as_array().unwrap().len(), 2);
    assert_eq!(plain["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn instant_answers_are_whole_and_well_formed() {
    let server = start(Options { mode: Mode::Instant, ..Options::default() });
    let mut client = Client::to(&server).await;
    let plain = client.post("/v1/chat/completions", "x-request-id: i\r\n", HELLO).await.json();
    assert_eq!(
        (&plain["id"], &plain["usage"]["completion_tokens"]),
        (&"chatcmpl-i".into(), &6.into())
    );
    let body = HELLO_STREAM
        .replace("\"stream\"", "\"stream_options\":{\"include_usage\":true},\"stream\"");
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let answer = client.post(path, "", &body).await;
        let mut events = answer.events();
        assert_eq!(events.pop().unwrap(), "[DONE]");
        let events: Vec<Value> = events.iter().map(|e| serde_json::from_str(e).unwrap()).collect();
        assert_eq!(events.len(), if path.contains("chat") { 8 } else { 7 });
        assert_eq!(events[events.len() - 1]["usage"]["completion_tokens"], 6);
    }
    let other = client.post("/v1/responses", "", r#"{"input":"x"}"#).await.json();
    assert_eq!(other["usage"]["output_tokens"], 16, "other routes are canned too");
}

#[tokio::test]
async fn instant_streams_keep_their_gap() {
    let instant = InstantOptions { gap: Duration::from_millis(10), ..InstantOptions::default() };
    let server = start(Options { mode: Mode::Instant, instant, ..Options::default() });
    let mut client = Client::to(&server).await;
    let begun = crate::clock::now();
    client.post("/v1/chat/completions", "", HELLO_STREAM).await;
    assert!(begun.elapsed() >= Duration::from_millis(60));
    client.send(request("/v1/chat/completions", "", HELLO_STREAM)).await;
    client.until(b"role").await;
    assert_eq!(server.running(), 1);
    drop(client);
    eventually("a canned stream ends with its client", || server.running() == 0).await;
}

//! What goes wrong before an engine does any work, and what an engine itself says is wrong.

use std::time::{Duration, Instant};

use crate::kit::{
    End, Framing, Request, Upstream, Way, Weir, answer, answer_with, fleet_of, json, run, until,
};

const CHAT: &str = "/v1/chat/completions";

async fn echo() -> Upstream {
    Upstream::start("m", |_| json("{}")).await
}

#[test]
fn a_body_that_is_no_request_is_a_clients_fault_and_reaches_no_engine() {
    run(async {
        let upstream = echo().await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let deep = format!("{{\"a\":{}", "[".repeat(100_000));
        let deep_closed = format!(
            "{{\"model\":\"m\",\"a\":{}{}}}",
            "{\"a\":".repeat(100_000) + "1",
            "}".repeat(100_000)
        );
        let bodies: &[&[u8]] = &[
            b"",
            b"[]",
            b"\"x\"",
            b"null",
            b"{\"model\":1}",
            b"{\"model\":\"\"}",
            b"{\"model\":[\"m\"]}",
            b"{",
            b"{\"model\":\"m\"",
            b"{\"model\":\"m\"}}",
            b"{\"model\":\"m\",}",
            b"{model:\"m\"}",
            b"{\"model\":\"\\x\"}",
            b"{\"model\":\"m\",\"a\":NaN}",
            b"{\"model\":\"m\",\"a\":01}",
            b"{\"model\":\"m\",\"a\":\"\xff\xfe\"}",
            b"{\"model\":\"m\",\"a\":\"line\nbreak\"}",
            b"{\"model\":\"m\",\"stream\":\"yes\"}",
            deep.as_bytes(),
            deep_closed.as_bytes(),
            b"not json at all",
        ];
        for way in Way::PROTOCOLS {
            for body in bodies {
                let shown = String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
                let reply = way.send(weir.address, &Request::post(CHAT, body)).await;
                assert_eq!(reply.status, 400, "{way:?} {shown}: {reply:?}");
                let error = reply.expect_refusal(400);
                assert_eq!(error["type"], "invalid_request_error", "{shown}");
            }
        }
        assert_eq!(upstream.count(), 0, "{:?}", upstream.seen());
        assert_eq!(weir.replica("r0").await.unwrap()["state"], "up");
        weir.chat("m", false).await.expect(200);
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_byte_order_mark_is_either_read_past_or_refused() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let reply = weir.post(CHAT, "\u{feff}{\"model\":\"m\"}").await;
        assert!([200, 400].contains(&reply.status), "{reply:?}");
    });
}

#[test]
fn a_refusal_speaks_the_language_of_its_api() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let reply = weir.post("/v1/messages", r#"{"model":"nope"}"#).await.expect(404);
        let body = reply.json();
        assert_eq!(body["type"], "error");
        assert_eq!(body["error"]["type"], "not_found_error");
        assert!(reply.headers.has("x-request-id"));
        let error = weir.post(CHAT, r#"{"model":"nope"}"#).await.expect_refusal(404);
        assert_eq!(error["code"], "model_not_found");
        assert_eq!(error["param"], "model");
    });
}

#[test]
fn a_form_without_a_model_or_of_another_kind_is_a_clients_fault() {
    run(async {
        let upstream = Upstream::at(([127, 0, 0, 1], 0).into(), &["a", "b"], |_| json("{}")).await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let path = "/v1/audio/transcriptions";
        let form = "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nx\r\n--b--\r\n";
        for (kind, body) in [
            ("multipart/form-data; boundary=b", form),
            ("multipart/form-data; boundary=b", "--b\r\nno end"),
            ("multipart/form-data; boundary=b", ""),
            ("multipart/form-data", form),
            ("application/json", r#"{"model":"a"}"#),
            ("text/plain", "x"),
        ] {
            let request = Request::new("POST", path).header("Content-Type", kind).body(body);
            let reply = request.send(weir.address).await;
            assert!([400, 415].contains(&reply.status), "{kind} {body}: {reply:?}");
            let status = reply.status;
            reply.expect_refusal(status);
        }
        assert_eq!(upstream.count(), 0);
    });
}

#[test]
fn a_body_over_the_limit_is_refused_with_the_limit() {
    run(async {
        let upstream = echo().await;
        let limit = "{request: {body_bytes_max: 64KiB}}";
        let mut weir = Weir::start(&fleet_of(&[&upstream], limit)).await;
        let fits = format!(r#"{{"model":"m","pad":"{}"}}"#, "x".repeat((64 << 10) - 22));
        assert_eq!(fits.len(), 64 << 10);
        for way in [Way::Length, Way::Chunked(1000), Way::Http2] {
            way.send(weir.address, &Request::post(CHAT, &fits)).await.expect(200);
            for size in [(64 << 10) + 1, 3 << 20] {
                let reply = way.send(weir.address, &Request::post(CHAT, "x".repeat(size))).await;
                let error = reply.expect_refusal(413);
                assert!(error["message"].as_str().unwrap().contains("65536"), "{error}");
            }
        }
        assert_eq!(upstream.count(), 3);
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_compressed_body_is_refused_as_such_and_not_as_bad_json() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let gzip = b"\x1f\x8b\x08\0\0\0\0\0\0\x03";
        let request = Request::post(CHAT, gzip).header("Content-Encoding", "gzip");
        let error = request.send(weir.address).await.expect_refusal(415);
        assert!(error["message"].as_str().unwrap().contains("Content-Encoding"), "{error}");
        let plain = Request::post(CHAT, r#"{"model":"m"}"#).header("Content-Encoding", "identity");
        plain.send(weir.address).await.expect(200);
    });
}

#[test]
fn slow_uploads_end_in_time_and_take_no_engine() {
    run(async {
        let upstream = echo().await;
        let limits = "{request: {upload_timeout: 500ms}, proxy: {timeouts: {request_head: 1s}}}";
        let mut weir = Weir::start(&fleet_of(&[&upstream], limits)).await;
        let began = Instant::now();
        let mut heads = Vec::new();
        let mut bodies = Vec::new();
        for _ in 0..10 {
            let mut raw = weir.connect().await;
            raw.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Half").await;
            heads.push(raw);
            let mut raw = weir.connect().await;
            raw.write(&Request::post(CHAT, "x".repeat(1 << 20)).head()).await;
            raw.write(b"{").await;
            bodies.push(raw);
        }
        let mut client = weir.connect_http2().await;
        let mut stream = client.begin(&Request::post(CHAT, "")).await;
        stream.upload(b"{", false);
        // Others are served meanwhile.
        for _ in 0..5 {
            weir.chat("m", false).await.expect(200);
        }
        for mut raw in bodies {
            raw.reply(false).await.expect_refusal(408);
            raw.closed().await;
        }
        assert_eq!(stream.head().await.status, 408);
        for mut raw in heads {
            let last = raw.closed().await;
            assert!(last.is_empty() || last.starts_with(b"HTTP/1.1 408"), "{last:?}");
        }
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        assert_eq!(upstream.count(), 5);
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_idle_client_is_closed_after_its_time() {
    run(async {
        let upstream = echo().await;
        let limits = "{proxy: {timeouts: {client_idle: 1s}}}";
        let weir = Weir::start(&fleet_of(&[&upstream], limits)).await;
        let mut raw = weir.connect().await;
        raw.send(&Request::get("/v1/models")).await.expect(200);
        let began = Instant::now();
        assert_eq!(raw.closed().await, b"");
        assert!(began.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn an_engines_own_error_reaches_the_client_unchanged() {
    run(async {
        let body =
            "{ \"error\" :{\"message\":\"m\\u00e9\",\"type\":\"t\",\"param\":\"p\",\"code\":7}}";
        let upstream = Upstream::start("m", move |seen| {
            let status = seen.headers.one("x-status").unwrap().parse().unwrap();
            let headers =
                [("content-type", "application/json"), ("retry-after", "3"), ("x-e", "1")];
            answer_with(status, &headers, body.as_bytes())
        })
        .await;
        // One replica: nobody else to ask.
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            for path in [CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses"] {
                for status in [400, 401, 403, 404, 413, 418, 422, 429, 500, 501, 503] {
                    for stream in [false, true] {
                        let sent = format!(r#"{{"model":"m","stream":{stream}}}"#);
                        let request =
                            Request::post(path, sent).header("X-Status", status.to_string());
                        let reply = way.send(weir.address, &request).await;
                        assert_eq!((reply.status, reply.text().as_str()), (status, body));
                        assert_eq!(reply.end, End::Proper);
                        let header = |name: &str| reply.headers.one(name).unwrap();
                        assert_eq!(header("content-type"), "application/json");
                        assert_eq!(header("retry-after"), "3");
                        assert_eq!(header("x-e"), "1");
                    }
                }
            }
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn what_controls_an_engine_is_closed_to_clients() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for path in [
            "/sleep",
            "/wake_up",
            "/sleep?level=2",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/reset_prefix_cache",
            "/collective_rpc",
            "/server_info",
            "/metrics",
            "/fleet",
            "/config",
            "/reload",
            "/docs",
            "/openapi.json",
            "/start_profile",
            "/abort_requests",
            "/V1/models",
            "/workers",
            "//sleep",
            "/v1/..%2fsleep",
            "/%73leep",
            "/v1/../sleep",
            "/sleep/",
            "/v1/models/../../sleep",
            "/v1/responses/%2e%2e%2fsleep",
            "/v1/responses/..",
            "/replicas/r0/drain",
            "/",
        ] {
            for method in ["GET", "POST"] {
                let request = Request::new(method, path).body(r#"{"model":"m"}"#);
                let reply = request.send(weir.address).await;
                assert!([400, 404, 405].contains(&reply.status), "{method} {path}: {reply:?}");
            }
        }
        assert_eq!(upstream.count(), 0, "{:?}", upstream.seen());
    });
}

#[test]
fn what_is_opened_by_config_is_passed_on() {
    run(async {
        let upstream = echo().await;
        let open = "{request: {engine_admin: open, unknown_paths: pass}}";
        let weir = Weir::start(&fleet_of(&[&upstream], open)).await;
        weir.post("/v1/load_lora_adapter", r#"{"lora_name":"x"}"#).await.expect(200);
        weir.post("/some/new/path?x=1", "not even json").await.expect(200);
        weir.get("/some/other").await.expect(200);
        // Development mode stays closed.
        weir.post("/sleep", "{}").await.expect_refusal(404);
        let seen = upstream.seen();
        let targets: Vec<_> = seen.iter().map(|seen| seen.target.as_str()).collect();
        assert_eq!(targets, ["/v1/load_lora_adapter", "/some/new/path?x=1", "/some/other"]);
        assert_eq!(seen[1].text(), "not even json");
        assert_eq!(seen[2].framing, Framing::None);
    });
}

#[test]
fn no_key_and_no_prompt_is_ever_written_down() {
    run(async {
        let busy = Upstream::start("m", |_| answer(500, "{\"error\":\"x\"}")).await;
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("key"), "k-secret-file\n").unwrap();
        let sections = format!(
            "{{telemetry: {{log: {{level: trace}}}}, fleet: {{api_key: k-secret-fleet, replicas: [
                {{id: r0, url: '{}', api_key: {{file: key}}}}]}}}}",
            busy.url()
        );
        let mut weir = Weir::start_in(folder, &sections).await;
        weir.ready().await;
        for body in [
            r#"{"model":"m","messages":[{"role":"user","content":"zebra-prompt"}]}"#,
            r#"{"model":"m","messages":"zebra-prompt""#,
            r#"{"model":"nope","prompt":"zebra-prompt"}"#,
        ] {
            let request = Request::post(CHAT, body)
                .header("Authorization", "Bearer k-secret-client")
                .header("X-Request-Id", "x");
            request.send(weir.address).await;
        }
        weir.reload(&sections).await.expect(200);
        let shown = weir.admin_get("/config").await.expect(200).text()
            + &weir.admin_get("/fleet").await.expect(200).text()
            + weir.metrics().await.text();
        until("the access lines", async || (3 <= weir.access_lines().len()).then_some(())).await;
        let log = weir.log();
        assert!(log.contains("TRACE") || log.contains("DEBUG"), "the level is heeded");
        for text in [log, shown] {
            for secret in ["k-secret", "zebra-prompt"] {
                let line = text.lines().find(|line| line.contains(secret));
                assert_eq!(line, None, "{secret} is written down");
            }
        }
        assert_eq!(busy.seen()[0].headers.all("authorization"), ["Bearer k-secret-file"]);
    });
}

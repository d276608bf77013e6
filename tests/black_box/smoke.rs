//! The thinnest whole: the binary in front of engines, asked as a user would ask.

use crate::kit::{Engine, Request, Way, Weir, fleet, run};

#[test]
fn a_user_can_list_chat_and_stream_and_an_operator_can_look() {
    run(async {
        let engines = [Engine::start("sim/tiny"), Engine::start("sim/tiny")];
        let urls: Vec<_> = engines.iter().map(Engine::url).collect();
        let mut weir = Weir::start(&fleet(&urls, "")).await;

        let models = weir.get("/v1/models").await.expect(200).json();
        assert_eq!(models["object"], "list");
        assert_eq!(models["data"][0]["id"], "sim/tiny");
        assert_eq!(models["data"].as_array().unwrap().len(), 1);
        weir.get("/health").await.expect(200);
        weir.get("/ready").await.expect(200);

        let mut completion_tokens = 0.0;
        for way in Way::PROTOCOLS {
            let body = r#"{"model":"sim/tiny","messages":[{"role":"user","content":"hello"}],
                "max_tokens":8}"#;
            let request = Request::post("/v1/chat/completions", body);
            let answer = way.send(weir.address, &request).await.expect(200).json();
            assert_eq!(answer["object"], "chat.completion");
            assert!(answer["choices"][0]["message"]["content"].is_string());
            completion_tokens += answer["usage"]["completion_tokens"].as_f64().unwrap();

            let body = body.replace("\"max_tokens\":8", "\"max_tokens\":8,\"stream\":true");
            let request = Request::post("/v1/chat/completions", body);
            let reply = way.send(weir.address, &request).await.expect(200);
            let kind = reply.headers.one("content-type").unwrap();
            assert!(kind.starts_with("text/event-stream"), "{kind}");
            let events = reply.events();
            assert_eq!(events.last().unwrap().data, "[DONE]");
            assert_eq!(events[0].json()["object"], "chat.completion.chunk");
        }

        weir.assert_at_rest().await;
        let metrics = weir.metrics().await;
        let counted = metrics.sum("weir_requests_total", &[("api", "chat_completions")]);
        assert_eq!(counted, 4.0);
        let kind = [("kind", "completion"), ("model", "sim/tiny")];
        assert!(completion_tokens <= metrics.sum("weir_tokens_total", &kind));
        let fleet = weir.admin_get("/fleet").await.expect(200).json();
        assert_eq!(fleet["replicas"].as_array().unwrap().len(), 2);
        assert_eq!(fleet["in_flight"], 0);
        let config = weir.admin_get("/config").await.expect(200).text();
        assert!(config.contains("least_load"), "{config}");
        weir.admin_get("/health").await.expect(200);
        weir.admin_get("/ready").await.expect(200);
        assert!(weir.access_lines().iter().any(|line| line["api"] == "models"));
    });
}

#[test]
fn every_request_leaves_one_line_that_tells_its_story() {
    run(async {
        let engine = Engine::start("m");
        let weir = Weir::start(&fleet(&[engine.url()], "")).await;
        let body = r#"{"model":"m","messages":[{"role":"user","content":"zebra"}],"stream":true,
            "stream_options":{"include_usage":true},"max_tokens":5}"#;
        let request = Request::post("/v1/chat/completions", body).header("X-Request-Id", "story");
        let reply = request.send(weir.address).await.expect(200);
        let line = weir.access_line("story").await;
        assert_eq!(line["api"], "chat_completions");
        assert_eq!(line["model"], "m");
        assert_eq!(line["replica"], "r0");
        assert_eq!(line["policy"], "least_load");
        assert_eq!(line["status"], 200);
        assert_eq!(line["attempts"], 1);
        assert_eq!(line["ended"], "complete");
        assert_eq!(line["completion_tokens"], 5);
        assert!(0 < line["prompt_tokens"].as_u64().unwrap());
        assert_eq!(line["request_bytes"], body.len());
        assert_eq!(line["response_bytes"], reply.body.len());
        assert!(!weir.log().contains("zebra"), "a log shows no prompt");
        let lines = weir.access_lines();
        assert_eq!(lines.iter().filter(|line| line["id"] == "story").count(), 1);
    });
}

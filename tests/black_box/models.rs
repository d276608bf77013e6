//! Models: who serves what, under which names, and what a client is told when nobody does.

use std::net::SocketAddr;
use std::process::Command;

use crate::kit::{
    Engine, Request, Upstream, Way, Weir, answer, fleet, fleet_of, free_address, json, run, until,
};

const CHAT: &str = "/v1/chat/completions";

fn anywhere() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

async fn serving(models: &[&str]) -> Upstream {
    Upstream::at(anywhere(), models, |_| json("{}")).await
}

#[test]
fn a_name_is_matched_byte_for_byte_and_nobody_else_answers_for_it() {
    run(async {
        let (a, b) = (serving(&["a"]).await, serving(&["b"]).await);
        let weir = Weir::start(&fleet_of(&[&a, &b], "")).await;
        all_known(&weir, 2).await;
        weir.wait_for_state("r0", "up").await;
        weir.wait_for_state("r1", "up").await;
        for name in ["A", "a ", " a", "b-typo", "a/", "ab", "a\\u0000"] {
            let body = format!(r#"{{"model":"{name}"}}"#);
            let request = Request::post(CHAT, body).header("X-Model", "b");
            let error = request.send(weir.address).await.expect_refusal(404);
            assert_eq!(error["code"], "model_not_found");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains("a, b"), "what exists is listed: {message}");
        }
        assert_eq!(a.count() + b.count(), 0);
        weir.chat("a", false).await.expect(200);
        weir.chat("b", false).await.expect(200);
        assert_eq!((a.count(), b.count()), (1, 1));
    });
}

async fn all_known(weir: &Weir, count: usize) {
    until("all models are known", async || {
        let list = weir.get("/v1/models").await.expect(200).json();
        (list["data"].as_array()?.len() == count).then_some(())
    })
    .await;
}

#[test]
fn a_request_without_a_model_is_served_where_there_is_only_one() {
    run(async {
        let only = serving(&["a"]).await;
        let weir = Weir::start(&fleet_of(&[&only], "")).await;
        weir.post(CHAT, r#"{"messages":[]}"#).await.expect(200);
        assert_eq!(only.only().text(), r#"{"messages":[]}"#);

        let both = serving(&["a", "b"]).await;
        let weir = Weir::start(&fleet_of(&[&both], "")).await;
        let error = weir.post(CHAT, r#"{"messages":[]}"#).await.expect_refusal(400);
        assert_eq!(error["param"], "model");
        assert_eq!(both.count(), 0);
    });
}

#[test]
fn the_list_has_every_model_once_with_all_that_engines_say_of_it() {
    run(async {
        let card = |id: &str| {
            format!(
                r#"{{"id":"{id}","object":"model","created":1700000000,"owned_by":"vllm",
                    "root":"/data/{id}","parent":null,"max_model_len":4096,"odd":{{"x":[1.50]}}}}"#
            )
        };
        let list = move |models: &[&str]| {
            let cards: Vec<_> = models.iter().map(|id| card(id)).collect();
            format!(r#"{{"object":"list","data":[{}]}}"#, cards.join(","))
        };
        let (first, second) = (list(&["org/m1", "lora"]), list(&["org/m1", "org/m2"]));
        let serve = |list: String| {
            move |seen: &crate::kit::Seen| match seen.target.as_str() {
                "/v1/models" => answer(200, &list),
                _ => json("{}"),
            }
        };
        let first = Upstream::at(anywhere(), &[], serve(first)).await;
        let second = Upstream::at(anywhere(), &[], serve(second)).await;
        let aliases = "{fleet: {aliases: {gpt: org/m1}}}";
        let weir = Weir::start(&fleet_of(&[&first, &second], aliases)).await;
        all_known(&weir, 4).await;
        let list = weir.get("/v1/models").await.expect(200).json();
        let mut ids: Vec<_> =
            list["data"].as_array().unwrap().iter().map(|card| card["id"].clone()).collect();
        ids.sort_by_key(ToString::to_string);
        assert_eq!(ids, ["gpt", "lora", "org/m1", "org/m2"]);
        for id in ["org/m1", "lora"] {
            let cards = list["data"].as_array().unwrap();
            let card = cards.iter().find(|card| card["id"] == id).unwrap();
            assert_eq!(card["max_model_len"], 4096);
            assert_eq!(card["odd"]["x"][0], 1.5);
            assert_eq!(card["root"], format!("/data/{id}"));
        }
    });
}

#[test]
fn a_name_with_slashes_can_be_asked_for() {
    run(async {
        let upstream = serving(&["org/my-model"]).await;
        let aliases = "{fleet: {aliases: {gpt: org/my-model}}}";
        let weir = Weir::start(&fleet_of(&[&upstream], aliases)).await;
        all_known(&weir, 2).await;
        let list = weir.get("/v1/models").await.expect(200).json();
        let cards = list["data"].as_array().unwrap();
        let card = cards.iter().find(|card| card["id"] == "org/my-model").unwrap();
        for path in ["/v1/models/org/my-model", "/v1/models/org%2Fmy-model"] {
            let got = weir.get(path).await.expect(200);
            assert_eq!(&got.json(), card, "{path}");
            let mut raw = weir.connect().await;
            let head = raw.send(&Request::new("HEAD", path)).await.expect(200);
            assert_eq!(head.headers.one("content-length"), Some(got.body.len().to_string()));
        }
        assert_eq!(weir.get("/v1/models/gpt").await.expect(200).json()["id"], "gpt");
        for path in ["/v1/models/nope", "/v1/models/org", "/v1/models/org/my-model/x"] {
            let error = weir.get(path).await.expect_refusal(404);
            assert_eq!(error["code"], "model_not_found", "{path}");
        }
    });
}

#[test]
fn an_alias_works_on_every_way_and_aliases_of_aliases_are_followed() {
    run(async {
        let upstream = serving(&["org/m1"]).await;
        let aliases = "{fleet: {aliases: {gpt: mid, mid: org/m1}, list_aliases: false}}";
        let weir = Weir::start(&fleet_of(&[&upstream], aliases)).await;
        for way in Way::ALL {
            way.send(weir.address, &Request::post(CHAT, r#"{"model":"gpt"}"#)).await.expect(200);
        }
        for seen in upstream.seen() {
            assert_eq!(seen.text(), r#"{"model":"org/m1"}"#);
        }
        let list = weir.get("/v1/models").await.expect(200).json();
        assert_eq!(list["data"].as_array().unwrap().len(), 1, "aliases are not to be shown");
    });
}

/// Runs `weir check` on a config; tells its exit code and what it wrote.
fn check(text: &str) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weir.yaml");
    std::fs::write(&path, text).unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_weir")).arg("check").arg(&path).output().unwrap();
    let written = [done.stdout, done.stderr].concat();
    (done.status.code(), String::from_utf8(written).unwrap())
}

#[test]
fn a_config_that_cannot_be_meant_stops_the_start_and_says_every_fault() {
    let replica = "replicas: [{url: 'http://127.0.0.1:1'}]";
    for (text, told) in [
        (format!("fleet: {{{replica}, aliases: {{a: b, b: a}}}}"), vec!["aliases", "circle"]),
        (
            format!("{{fleet: {{{replica}}}, routing: {{policy: foo}}}}"),
            vec!["routing.policy", "foo", "least_load", "session"],
        ),
        (
            "fleet: {replicas: [{url: '127.0.0.1:8001'}, {url: 'ftp://x'}]}".to_owned(),
            vec!["replicas[0].url", "replicas[1].url"],
        ),
        ("fleet: {replicas: [{url: 'http://127.0.0.1:8001 '}]}".to_owned(), vec!["replicas[0]"]),
        (
            format!("{{fleet: {{{replica}}}, proxy: {{timeouts: {{conect: 1s}}}}}}"),
            vec!["conect", "connect"],
        ),
        (
            format!("{{fleet: {{{replica}}}, request: {{body_bytes_max: lots}}}}"),
            vec!["body_bytes_max"],
        ),
        (
            "fleet: {replicas: [{url: 'http://[fe80::1%25eth0]:1'}]}".to_owned(),
            vec!["replicas[0].url"],
        ),
    ] {
        let (code, written) = check(&text);
        assert_eq!(code, Some(1), "{text}:\n{written}");
        for word in told {
            assert!(written.contains(word), "`{word}` is not told of {text}:\n{written}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weir.yaml");
        std::fs::write(&path, &text).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_weir"));
        let done = child.arg("--config").arg(&path).output().unwrap();
        assert!(!done.status.success(), "weir must not start with {text}");
    }
    let (code, written) = check(&format!("fleet: {{{replica}}}"));
    assert_eq!(code, Some(0), "{written}");
}

#[test]
fn weir_starts_without_its_engines_and_serves_them_as_they_come() {
    run(async {
        let addresses = [free_address(), free_address(), free_address()];
        let urls: Vec<_> = addresses.iter().map(|address| format!("http://{address}")).collect();
        let mut weir = Weir::start_live(&fleet(&urls, "")).await;
        weir.get("/health").await.expect(200);
        assert_eq!(weir.get("/ready").await.status, 503);
        let reply = weir.chat("m", false).await;
        assert!(reply.headers.has("retry-after"), "{reply:?}");
        reply.expect_refusal(503);

        let first = Upstream::at(addresses[0], &["m"], |_| json("{}")).await;
        weir.ready().await;
        weir.chat("m", false).await.expect(200);
        let late = Upstream::at(addresses[1], &["m"], |_| json("{}")).await;
        until("the late one gets its share", async || {
            weir.chat("m", false).await.expect(200);
            (0 < late.count()).then_some(())
        })
        .await;
        assert!(0 < first.count());
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_known_model_without_a_live_replica_is_not_an_unknown_one() {
    run(async {
        let mut upstream = serving(&["m"]).await;
        let other = serving(&["n"]).await;
        let weir = Weir::start(&fleet_of(&[&upstream, &other], "")).await;
        all_known(&weir, 2).await;
        weir.wait_for_state("r1", "up").await;
        upstream.stop().await;
        weir.wait_for_state("r0", "down").await;
        let reply = weir.chat("m", false).await;
        assert!(reply.headers.has("retry-after"));
        reply.expect_refusal(503);
        weir.chat("nope", false).await.expect_refusal(404);
        weir.chat("n", false).await.expect(200);
        weir.get("/ready").await.expect(200);
    });
}

#[test]
fn what_one_engine_remembers_is_found_there() {
    run(async {
        let keeper = |own: &'static str| {
            move |seen: &crate::kit::Seen| match seen.target.as_str() {
                target if target.starts_with(&format!("/v1/responses/{own}")) => {
                    json(&format!("{{\"id\":\"{own}\"}}"))
                }
                "/v1/responses" => json(&format!("{{\"id\":\"{own}\"}}")),
                _ => answer(404, r#"{"error":{"message":"not found"}}"#),
            }
        };
        let a = Upstream::start("m", keeper("resp_a")).await;
        let b = Upstream::start("m", keeper("resp_b")).await;
        let mut weir = Weir::start(&fleet_of(&[&a, &b], "")).await;
        for id in ["r0", "r1"] {
            weir.wait_for_state(id, "up").await;
        }
        for _ in 0..10 {
            for id in ["resp_a", "resp_b"] {
                let got = weir.get(&format!("/v1/responses/{id}")).await.expect(200);
                assert_eq!(got.json()["id"], id);
                let cancel = format!("/v1/responses/{id}/cancel");
                weir.post(&cancel, "").await.expect(200);
            }
        }
        // Nobody has it: the engine's own 404, and no hang.
        let missing = weir.get("/v1/responses/resp_c").await.expect(404);
        assert_eq!(missing.json()["error"]["message"], "not found");
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_adapter_loaded_later_is_served_where_it_is() {
    run(async {
        let (with, without) = (Engine::start("base"), Engine::start("base"));
        let often = "{fleet: {probe: {models_every: 200ms}}}";
        let weir = Weir::start(&fleet(&[with.url(), without.url()], often)).await;
        weir.chat("ad1", false).await.expect_refusal(404);
        with.server.set_models(vec!["base".into(), "ad1".into()]);
        all_known(&weir, 2).await;
        for _ in 0..6 {
            weir.chat("ad1", false).await.expect(200);
        }
        assert_eq!((with.requests().len(), without.requests().len()), (6, 0));
        with.server.set_models(vec!["base".into()]);
        all_known(&weir, 1).await;
        weir.chat("ad1", false).await.expect_refusal(404);
    });
}

//! Header lines in both directions: what ends here, what is told, what stays untouched.

use std::collections::BTreeSet;

use crate::kit::{
    Act, Raw, Reply, Request, Upstream, Way, Weir, answer_with, fleet, fleet_of, json, run,
};

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[]}"#;

async fn echo() -> Upstream {
    Upstream::start("m", |_| json("{}")).await
}

#[test]
fn headers_of_the_clients_connection_end_here() {
    run(async {
        let upstream = echo().await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for _ in 0..10 {
            let request = Request::post(CHAT, BODY)
                .header("Connection", "close, X-Drop-Me")
                .header("X-Drop-Me", "1")
                .header("Keep-Alive", "timeout=3")
                .header("TE", "trailers")
                .header("Proxy-Authorization", "x")
                .header("Proxy-Connection", "keep-alive")
                .header("Upgrade", "foo")
                .header("X-Kept", "1");
            let mut raw = weir.connect().await;
            let reply = raw.send(&request).await.expect(200);
            assert_eq!(reply.headers.one("connection").as_deref(), Some("close"));
            assert_eq!(raw.closed().await, b"");
        }
        let seen = upstream.seen();
        let connections: BTreeSet<_> = seen.iter().map(|seen| seen.connection).collect();
        assert_eq!(connections.len(), 1, "the connection to the engine must be kept");
        for seen in seen {
            assert_eq!(seen.headers.one("host"), Some(upstream.address.to_string()));
            assert_eq!(seen.headers.one("x-kept").as_deref(), Some("1"));
            for name in [
                "x-drop-me",
                "keep-alive",
                "te",
                "proxy-authorization",
                "proxy-connection",
                "upgrade",
            ] {
                assert!(!seen.headers.has(name), "{name}: {:?}", seen.headers);
            }
            let connection = seen.headers.one("connection").unwrap_or_default();
            assert!(!connection.contains("close") && !connection.contains("Drop"), "{connection}");
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn the_host_the_client_named_is_kept_only_where_that_is_wanted() {
    run(async {
        let upstream = echo().await;
        let keep = "{proxy: {forwarded: {keep_host: true}}}";
        let weir = Weir::start(&fleet_of(&[&upstream], keep)).await;
        for way in Way::PROTOCOLS {
            let request = Request::post(CHAT, BODY).header("Host", "api.test");
            way.send(weir.address, &request).await.expect(200);
        }
        for seen in upstream.seen() {
            assert_eq!(seen.headers.one("host").as_deref(), Some("api.test"));
        }
    });
}

#[test]
fn all_other_headers_arrive_untouched_and_in_order() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let long = "v".repeat(6 * 1024);
        let mut request = Request::post(CHAT, BODY);
        let mut sent: Vec<(String, Vec<u8>)> = vec![
            ("x-session-id".into(), b"s-1".to_vec()),
            ("X-TENANT".into(), b"t 1; a=\"b\"".to_vec()),
            ("OpenAI-Organization".into(), b"org".to_vec()),
            ("X-Multi".into(), b"a".to_vec()),
            ("x-other".into(), b"between".to_vec()),
            ("x-multi".into(), b"b, c".to_vec()),
            ("X-Multi".into(), b"a".to_vec()),
            ("X-Empty".into(), b"".to_vec()),
            ("X-Long".into(), long.into_bytes()),
            ("Accept".into(), b"*/*".to_vec()),
            ("User-Agent".into(), b"odd/1.0 (x; y)".to_vec()),
            ("Cookie".into(), b"a=1; b=2".to_vec()),
            (
                "traceparent".into(),
                b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_vec(),
            ),
            ("tracestate".into(), b"x=1,y=2".to_vec()),
            ("baggage".into(), b"k=v".to_vec()),
            ("Authorization".into(), "Bearer ключ 音".as_bytes().to_vec()),
            ("X-Latin".into(), b"caf\xe9".to_vec()),
            ("X-Target-Url".into(), b"http://127.0.0.9:1".to_vec()),
            ("anthropic-version".into(), b"2023-06-01".to_vec()),
        ];
        for (name, value) in &sent {
            request = request.header(name, value);
        }
        for way in Way::PROTOCOLS {
            way.send(weir.address, &request).await.expect(200);
        }
        sent.push(("Content-Type".into(), b"application/json".to_vec()));
        let ours = [
            "host",
            "content-length",
            "x-request-id",
            "x-forwarded-for",
            "x-forwarded-proto",
            "x-forwarded-host",
        ];
        assert_eq!(upstream.count(), 2);
        for seen in upstream.seen() {
            let mut names = BTreeSet::new();
            for (name, _) in &sent {
                let name = name.to_ascii_lowercase();
                let values = |lines: &[(String, Vec<u8>)]| -> Vec<Vec<u8>> {
                    let named = lines.iter().filter(|(own, _)| own.eq_ignore_ascii_case(&name));
                    named.map(|(_, value)| value.clone()).collect()
                };
                assert_eq!(values(&seen.headers.0), values(&sent), "{name}");
                names.insert(name);
            }
            for (name, _) in &seen.headers.0 {
                let name = name.to_ascii_lowercase();
                assert!(names.contains(&name) || ours.contains(&name.as_str()), "{name}");
            }
        }
    });
}

#[test]
fn headers_of_an_answer_reach_the_client_untouched_and_once() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            let headers = [
                ("server", "uvicorn"),
                ("date", "Tue, 01 Jan 2030 00:00:00 GMT"),
                ("set-cookie", "a=1"),
                ("set-cookie", "b=2"),
                ("x-a", "1"),
                ("content-type", "application/json"),
                ("x-a", "2"),
                ("connection", "X-Hop"),
                ("x-hop", "1"),
                ("keep-alive", "timeout=5"),
                ("openai-processing-ms", "7"),
                ("x-request-id", "of-the-engine"),
            ];
            answer_with(200, &headers, b"{}")
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            let request = Request::post(CHAT, BODY).header("X-Request-Id", "of-the-client");
            let reply = way.send(weir.address, &request).await.expect(200);
            let all = |name: &str| reply.headers.all(name);
            assert_eq!(all("server"), ["uvicorn"]);
            assert_eq!(all("date").len(), 1);
            assert_eq!(all("set-cookie"), ["a=1", "b=2"]);
            assert_eq!(all("x-a"), ["1", "2"]);
            assert_eq!(all("content-type"), ["application/json"]);
            assert_eq!(all("openai-processing-ms"), ["7"]);
            assert_eq!(all("x-request-id"), ["of-the-client"]);
            assert!(!reply.headers.has("x-hop") && !reply.headers.has("keep-alive"));
        }
    });
}

#[test]
fn what_is_no_header_is_refused_and_never_an_error_of_ours() {
    run(async {
        let upstream = echo().await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let long = "a".repeat(70 * 1024);
        let endless = "a".repeat(3 << 20);
        let many = (0..200).map(|n| format!("X-{n}: {n}\r\n")).collect::<String>();
        let table: &[(&str, &[u16])] = &[
            ("X Bad: 1\r\n", &[400]),
            ("X-Nul: a\0b\r\n", &[400]),
            (": empty\r\n", &[400]),
            ("no colon\r\n", &[400]),
            ("Content-Length: 4\r\n", &[400]),
            ("Content-Length: x\r\n", &[400]),
            ("Content-Length: -1\r\n", &[400]),
            ("Transfer-Encoding: gzip\r\n", &[400, 501]),
            (&many, &[200]),
            (&format!("X-Long: {long}\r\n"), &[200, 431]),
            (&format!("X-Endless: {endless}\r\n"), &[400, 413, 431]),
        ];
        for (lines, allowed) in table {
            let shown = &lines[..lines.len().min(40)];
            let mut raw = weir.connect().await;
            let length = if lines.contains("Length") { "" } else { "Content-Length: 27\r\n" };
            let head = format!(
                "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
                 {length}{lines}\r\n{BODY}"
            );
            raw.write(head.as_bytes()).await;
            let reply = raw.reply(false).await;
            assert!(allowed.contains(&reply.status), "{shown}…: {reply:?}");
        }
        weir.chat("m", false).await.expect(200);
        weir.assert_at_rest().await;
    });
}

#[test]
fn two_lengths_that_disagree_or_a_length_beside_chunks_never_smuggle_a_request() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let inner = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Smuggled: 1\r\nContent-Length: {}\r\n\r\n{BODY}",
            BODY.len()
        );
        let attacks = [
            format!("Content-Length: {}\r\nContent-Length: 5\r\n\r\n{BODY}{inner}", BODY.len()),
            format!(
                "Content-Length: {}\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{BODY}\r\n0\r\n\
                 \r\n",
                BODY.len() + 20,
                BODY.len()
            ),
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n".to_owned(),
        ];
        for attack in attacks {
            let mut raw = weir.connect().await;
            raw.write(format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\n{attack}").as_bytes()).await;
            raw.finish_writing().await;
            let _ = raw.closed().await;
        }
        for seen in upstream.seen() {
            assert_eq!(seen.text(), BODY);
        }
    });
}

#[test]
fn the_engine_is_told_who_the_client_is() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let request = Request::post(CHAT, BODY).header("Host", "api.test:8080");
        request.send(weir.address).await.expect(200);
        request.header("X-Forwarded-For", "9.9.9.9").send(weir.address).await.expect(200);
        let seen = upstream.seen();
        let told = |number: usize, name: &str| seen[number].headers.one(name);
        assert_eq!(told(0, "x-forwarded-for").as_deref(), Some("127.0.0.1"));
        assert_eq!(told(0, "x-forwarded-proto").as_deref(), Some("http"));
        assert_eq!(told(0, "x-forwarded-host").as_deref(), Some("api.test:8080"));
        assert_eq!(told(1, "x-forwarded-for").as_deref(), Some("9.9.9.9, 127.0.0.1"));
    });
}

#[test]
fn every_address_on_the_way_is_told_on() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let request = Request::post(CHAT, BODY)
            .header("X-Forwarded-For", "9.9.9.9, 8.8.8.8")
            .header("X-Forwarded-Proto", "https")
            .header("X-Forwarded-Host", "outer.test")
            .header("X-Forwarded-For", "7.7.7.7");
        request.send(weir.address).await.expect(200);
        let headers = upstream.only().headers;
        let told = headers.all("x-forwarded-for").join(", ");
        assert_eq!(told, "9.9.9.9, 8.8.8.8, 7.7.7.7, 127.0.0.1");
        assert_eq!(headers.all("x-forwarded-proto"), ["https"]);
        assert_eq!(headers.all("x-forwarded-host"), ["outer.test"]);
    });
}

#[test]
fn a_client_that_is_not_trusted_cannot_claim_another_address() {
    run(async {
        let upstream = echo().await;
        let replace = "{proxy: {forwarded: {client: replace}}}";
        let weir = Weir::start(&fleet_of(&[&upstream], replace)).await;
        let request = Request::post(CHAT, BODY)
            .header("X-Forwarded-For", "9.9.9.9")
            .header("X-Forwarded-For", "8.8.8.8");
        request.send(weir.address).await.expect(200);
        assert_eq!(upstream.only().headers.all("x-forwarded-for"), ["127.0.0.1"]);
    });
}

#[test]
fn a_request_id_goes_both_ways_and_stays_the_same_over_attempts() {
    run(async {
        let busy = Upstream::start("m", |_| crate::kit::answer(503, "{}")).await;
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&busy, &upstream], "")).await;
        weir.wait_for_state("r0", "up").await;
        weir.wait_for_state("r1", "up").await;
        let id_of = |reply: Reply| reply.headers.one("x-request-id").unwrap();
        for (sent, kept) in [
            (Some("abc-1".to_owned()), true),
            (None, false),
            (Some("x".repeat(10 * 1024)), false),
            (Some("with space".to_owned()), false),
        ] {
            let mut request = Request::post(CHAT, BODY);
            if let Some(sent) = &sent {
                request = request.header("X-Request-Id", sent);
            }
            let id = id_of(request.send(weir.address).await.expect(200));
            assert!(!id.is_empty() && id.len() <= 128, "{id}");
            assert_eq!(sent.as_ref() == Some(&id), kept, "{sent:?}");
            let told = upstream.seen().last().unwrap().headers.one("x-request-id");
            assert_eq!(told.as_ref(), Some(&id));
            assert_eq!(weir.access_line(&id).await["status"], 200);
            if let Some(tried) = busy.seen().last() {
                // Each request tries the busy one first or not at all.
                let earlier = tried.headers.all("x-request-id");
                assert_eq!(earlier.len(), 1);
            }
        }
        let refused = Request::post(CHAT, "{").header("X-Request-Id", "r-1");
        assert_eq!(id_of(refused.send(weir.address).await), "r-1");
    });
}

#[test]
fn the_clients_key_reaches_the_engine_on_every_path() {
    run(async {
        let upstream = Upstream::start("m", |seen| {
            let key = seen.headers.all("authorization");
            let status = if key == ["Bearer k-alpha"] { 200 } else { 401 };
            crate::kit::answer(status, "{}")
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let json = r#"{"model":"m"}"#;
        let form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n";
        for (path, kind, body) in [
            (CHAT, "application/json", json),
            ("/v1/completions", "application/json", json),
            ("/v1/responses", "application/json", json),
            ("/v1/messages", "application/json", json),
            ("/v1/embeddings", "application/json", json),
            ("/tokenize", "application/json", json),
            ("/score", "application/json", json),
            ("/v1/audio/transcriptions", "multipart/form-data; boundary=b", form),
        ] {
            let request = Request::new("POST", path)
                .header("Content-Type", kind)
                .header("Authorization", "Bearer k-alpha")
                .body(body);
            request.send(weir.address).await.expect(200);
        }
    });
}

#[test]
fn a_replicas_own_key_replaces_the_clients_and_goes_to_no_other() {
    run(async {
        let own = echo().await;
        let other = echo().await;
        let sections = format!(
            "{{fleet: {{replicas: [
                {{id: own, url: '{}', models: [a], api_key: k-worker}},
                {{id: other, url: '{}', models: [b]}}]}}}}",
            own.url(),
            other.url()
        );
        let weir = Weir::start(&sections).await;
        weir.wait_for_state("own", "up").await;
        weir.wait_for_state("other", "up").await;
        for model in ["a", "b"] {
            let request = Request::post(CHAT, format!(r#"{{"model":"{model}"}}"#))
                .header("Authorization", "Bearer k-client")
                .header("X-Target-Url", "http://127.0.0.9:1");
            request.send(weir.address).await.expect(200);
        }
        assert_eq!(own.only().headers.all("authorization"), ["Bearer k-worker"]);
        assert_eq!(other.only().headers.all("authorization"), ["Bearer k-client"]);
    });
}

#[test]
fn probes_show_the_key_of_their_replica_and_a_missing_one_is_told() {
    run(async {
        let guarded = |seen: &crate::kit::Seen| -> Vec<Act> {
            if seen.target == "/health" {
                return answer_with(200, &[], b"");
            }
            match seen.headers.one("authorization").as_deref() {
                Some("Bearer k-alpha") if seen.target == "/v1/models" => {
                    json(r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#)
                }
                Some("Bearer k-alpha") => json("{}"),
                _ => crate::kit::answer(401, r#"{"error":"Unauthorized"}"#),
            }
        };
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
        let upstream = Upstream::at(address, &[], guarded).await;
        let keyed = fleet_of(&[&upstream], "{fleet: {api_key: k-alpha}}");
        let weir = Weir::start(&keyed).await;
        let request = Request::post(CHAT, BODY).header("Authorization", "Bearer k-alpha");
        request.send(weir.address).await.expect(200);
        // The key for discovery is not lent to clients.
        assert_eq!(weir.chat("m", false).await.status, 401);

        let weir = Weir::start_live(&fleet(&[upstream.url()], "")).await;
        crate::kit::until("the missing key is told", async || {
            let replica = weir.replica("r0").await?;
            let trouble = replica["models_trouble"].as_str()?.to_owned();
            (trouble.contains("401") && weir.log().contains("401")).then_some(())
        })
        .await;
    });
}

#[test]
fn an_answer_of_several_interim_heads_is_one_answer() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            let hints = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n";
            let mut acts = vec![Act::Write(hints.to_vec())];
            acts.extend(json("{}"));
            acts
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut raw: Raw = weir.connect().await;
        for _ in 0..2 {
            let reply = raw.send(&Request::post(CHAT, BODY)).await;
            assert_eq!(reply.expect(200).text(), "{}");
        }
    });
}

//! HTTP itself: versions, kept connections, Expect, HEAD and OPTIONS, paths, TLS.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::kit::{
    Certificate, End, Http2, Raw, Request, Upstream, Way, Weir, answer_with, connect_tls, fleet,
    fleet_of, json, run, sse, sse_head,
};

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[]}"#;

async fn echo() -> Upstream {
    Upstream::start("m", |_| json("{}")).await
}

fn streamed() -> Vec<crate::kit::Act> {
    vec![sse_head(), sse("data: {\"a\":1}\n\n"), sse("data: [DONE]\n\n"), last_chunk()]
}

fn last_chunk() -> crate::kit::Act {
    crate::kit::Act::Write(b"0\r\n\r\n".to_vec())
}

#[test]
fn a_client_of_http_1_0_gets_an_answer_it_can_read() {
    run(async {
        let upstream = Upstream::start("m", |_| streamed()).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut raw = weir.connect().await;
        raw.write(b"GET /health HTTP/1.0\r\n\r\n").await;
        raw.reply(false).await.expect(200);
        assert_eq!(raw.closed().await, b"");
        let mut raw = weir.connect().await;
        let length = BODY.len();
        let head = format!(
            "POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{BODY}"
        );
        raw.write(head.as_bytes()).await;
        let reply = raw.reply(false).await.expect(200);
        assert!(!reply.headers.has("transfer-encoding"), "{:?}", reply.headers);
        assert_eq!(reply.text(), "data: {\"a\":1}\n\ndata: [DONE]\n\n");
        weir.assert_at_rest().await;
    });
}

#[test]
fn every_answer_on_a_kept_connection_is_the_right_one() {
    run(async {
        let upstream = Upstream::start("m", |seen| match seen.target.as_str() {
            "/tokenize" => answer_with(204, &[], b""),
            CHAT if seen.text().contains("stream") => streamed(),
            _ => json(&format!("{{\"seen\":{}}}", seen.body.len())),
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut raw = weir.connect().await;
        for round in 0..25 {
            let pad = "x".repeat(round * 5000);
            let padded = format!(r#"{{"model":"m","pad":"{pad}"}}"#);
            // A body that is not read, or came in chunks and was large, may cost the connection.
            let may_close = ["/health", "/no/such/path"];
            let table: Vec<(Request, u16)> = vec![
                (Request::get("/v1/models"), 200),
                (Request::post(CHAT, &padded), 200),
                (Request::new("HEAD", "/v1/models"), 200),
                (Request::post(CHAT, r#"{"model":"m","stream":true}"#), 200),
                (Request::post(CHAT, &padded).chunked(999), 200),
                (Request::post("/tokenize", BODY), 204),
                (Request::get("/health").body("with a body"), 200),
                (Request::post(CHAT, r#"{"model":"nope"}"#), 404),
                (Request::post(CHAT, "{"), 400),
                (Request::post("/no/such/path", &padded), 404),
            ];
            for (request, status) in table {
                let reply = raw.send(&request).await;
                assert_eq!(reply.status, status, "round {round}: {}", request.target());
                if reply.headers.one("connection").as_deref() == Some("close") {
                    let length = request.body_bytes().len();
                    let named = may_close.contains(&request.target());
                    assert!(named || 64_000 < length, "round {round}: {}", request.target());
                    assert_eq!(raw.closed().await, b"");
                    raw = weir.connect().await;
                }
            }
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn pipelined_requests_are_answered_in_order_or_not_at_all() {
    run(async {
        let upstream = Upstream::start("m", |seen| json(&seen.text())).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let body = |number: usize| format!(r#"{{"model":"m","number":{number}}}"#);
        let mut answered = 0;
        while answered < 5 {
            let mut raw = weir.connect().await;
            let left = (answered..5).flat_map(|number| Request::post(CHAT, body(number)).bytes());
            raw.write(&left.collect::<Vec<_>>()).await;
            let before = answered;
            while answered < 5 {
                let reply = raw.reply(false).await;
                if reply.status == 0 {
                    break;
                }
                assert_eq!(reply.expect(200).text(), body(answered));
                answered += 1;
            }
            assert!(before < answered, "each connection must be good for one answer");
        }
        assert_eq!(upstream.count(), 5, "what is not answered must not reach an engine");
        weir.assert_at_rest().await;
    });
}

#[test]
fn trailers_and_extensions_of_chunks_are_no_part_of_the_body() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut raw = weir.connect().await;
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
             Transfer-Encoding: chunked\r\n\r\n"
        );
        raw.write(head.as_bytes()).await;
        let (first, rest) = BODY.split_at(5);
        let chunks =
            format!("5;a=b\r\n{first}\r\n{:X}\r\n{rest}\r\n0\r\nX-T: 1\r\n\r\n", rest.len());
        raw.write(chunks.as_bytes()).await;
        raw.reply(false).await.expect(200);
        assert_eq!(upstream.only().text(), BODY);
    });
}

#[test]
fn an_upload_that_asks_first_is_told_to_go_on_at_once() {
    run(async {
        let upstream = echo().await;
        let limit = "{request: {body_bytes_max: 1MiB}}";
        let weir = Weir::start(&fleet_of(&[&upstream], limit)).await;
        let body = format!(r#"{{"model":"m","pad":"{}"}}"#, "x".repeat(200_000));
        let request = Request::post(CHAT, &body).header("Expect", "100-continue");
        let mut raw = weir.connect().await;
        for _ in 0..2 {
            raw.write(&request.head()).await;
            let asked = Instant::now();
            assert_eq!(raw.any_head().await.status, 100);
            assert!(asked.elapsed() < Duration::from_secs(1));
            raw.write(body.as_bytes()).await;
            raw.reply(false).await.expect(200);
        }
        for seen in upstream.seen() {
            assert!(!seen.headers.has("expect"));
        }
        // A client that does not wait for the word is served as well.
        request.send(weir.address).await.expect(200);
    });
}

#[test]
fn an_upload_that_is_refused_is_not_asked_to_go_on() {
    run(async {
        let upstream = echo().await;
        let limit = "{request: {body_bytes_max: 1KiB}}";
        let weir = Weir::start(&fleet_of(&[&upstream], limit)).await;
        let large = Request::post(CHAT, "x".repeat(5_000)).header("Expect", "100-continue");
        let mut raw = weir.connect().await;
        raw.write(&large.head()).await;
        assert_eq!(raw.any_head().await.status, 413);
        let odd = Request::post(CHAT, BODY).header("Expect", "a miracle");
        odd.send(weir.address).await.expect_refusal(417);
        assert_eq!(upstream.count(), 0);
    });
}

#[test]
fn methods_that_a_path_does_not_take_are_told_which_it_takes() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut raw = weir.connect().await;
        for path in ["/health", "/ready", "/v1/models", "/v1/models/m"] {
            let got = raw.send(&Request::get(path)).await.expect(200);
            let head = raw.send(&Request::new("HEAD", path)).await.expect(200);
            assert_eq!(got.headers.one("content-length"), head.headers.one("content-length"));
            assert_eq!(head.body, b"");
        }
        assert_eq!(raw.send(&Request::new("HEAD", "/v1/models/no")).await.status, 404);
        for (method, path) in [("PUT", CHAT), ("GET", CHAT), ("DELETE", "/v1/models")] {
            let reply = Request::new(method, path).send(weir.address).await;
            assert_eq!(reply.status, 405, "{method} {path}");
            let allowed = reply.headers.one("allow").unwrap();
            let expected = if path == CHAT { "POST" } else { "GET" };
            assert!(allowed.contains(expected), "{allowed}");
            reply.expect_refusal(405);
        }
        assert_eq!(upstream.count(), 0, "none of these is work for an engine");
    });
}

#[test]
fn a_browser_that_asks_first_is_answered_by_the_engine() {
    run(async {
        let upstream = Upstream::start("m", |seen| {
            assert_eq!(seen.method, "OPTIONS");
            let headers = [
                ("access-control-allow-origin", "https://app.test"),
                ("access-control-allow-methods", "POST"),
                ("access-control-allow-headers", "authorization"),
            ];
            answer_with(200, &headers, b"OK")
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            let request = Request::new("OPTIONS", CHAT)
                .header("Origin", "https://app.test")
                .header("Access-Control-Request-Method", "POST")
                .header("Access-Control-Request-Headers", "authorization");
            let reply = way.send(weir.address, &request).await.expect(200);
            let allowed = reply.headers.one("access-control-allow-origin");
            assert_eq!(allowed.as_deref(), Some("https://app.test"));
        }
        let seen = upstream.seen();
        assert_eq!(seen[0].headers.one("origin").as_deref(), Some("https://app.test"));
        for path in ["/sleep", "/v1/load_lora_adapter", "/no/such/path"] {
            let reply = Request::new("OPTIONS", path).send(weir.address).await;
            reply.expect_refusal(404);
        }
        assert_eq!(upstream.count(), 2);
    });
}

#[test]
fn slashes_too_many_are_forgiven_without_a_redirect() {
    run(async {
        let upstream = echo().await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for path in ["/v1/models/", "//v1/models", "/v1//models"] {
            let reply = weir.get(path).await.expect(200);
            assert_eq!(reply.json()["data"][0]["id"], "m", "{path}");
        }
        let paths = ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions"];
        for path in paths {
            weir.post(path, BODY).await.expect(200);
        }
        for seen in upstream.seen() {
            assert_eq!((seen.method.as_str(), seen.target.as_str()), ("POST", CHAT));
        }
        assert_eq!(upstream.count(), paths.len());
    });
}

#[test]
fn many_requests_share_one_connection_of_http_2() {
    run(async {
        let upstream = Upstream::start("m", |seen| json(&seen.text())).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut client = weir.connect_http2().await;
        let mut streams = Vec::new();
        for number in 0..40 {
            let body = format!(r#"{{"model":"m","number":{number}}}"#);
            streams.push((body.clone(), client.open(&Request::post(CHAT, body)).await));
        }
        for (body, mut stream) in streams {
            let head = stream.head().await;
            assert_eq!(head.status, 200);
            assert!(!head.headers.has("transfer-encoding") && !head.headers.has("connection"));
            assert_eq!(stream.rest().await, (body.into_bytes(), End::Proper));
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn http_2_without_tls_can_be_switched_off() {
    run(async {
        let upstream = echo().await;
        let address = crate::kit::free_address();
        let off = format!("{{listen: [{{address: '{address}', h2c: false}}]}}");
        let mut weir = Weir::start_live_at(&fleet_of(&[&upstream], &off), address).await;
        weir.ready().await;
        let mut raw = weir.connect().await;
        raw.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        let answer = raw.closed().await;
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"), "{answer:?}");
        weir.chat("m", false).await.expect(200);
    });
}

#[test]
fn tls_speaks_both_versions_of_http() {
    run(async {
        let upstream = Upstream::start("m", |_| streamed()).await;
        let folder = tempfile::tempdir().unwrap();
        let certificate = Certificate::write(folder.path(), "door", &["localhost"]);
        let (plain, tls) = (crate::kit::free_address(), crate::kit::free_address());
        let listen = format!(
            "{{listen: [{{address: '{plain}'}}, {{address: '{tls}', tls: {{certificate: '{}',
               key: '{}'}}}}]}}",
            certificate.certificate.display(),
            certificate.key.display()
        );
        let mut weir = Weir::start_live_at(&fleet_of(&[&upstream], &listen), plain).await;
        weir.ready().await;
        let (stream, agreed) = connect_tls(tls, &certificate, &["http/1.1"]).await;
        assert_eq!(agreed.as_deref(), Some("http/1.1"));
        let reply = Raw::over(stream).send(&Request::post(CHAT, BODY)).await;
        assert_eq!(reply.expect(200).events().len(), 2);
        let (stream, agreed) = connect_tls(tls, &certificate, &["h2", "http/1.1"]).await;
        assert_eq!(agreed.as_deref(), Some("h2"));
        let mut client = Http2::over(stream).await;
        let reply = client.send(&Request::post(CHAT, BODY)).await;
        assert_eq!(reply.expect(200).events().len(), 2);
        let (stream, _) = connect_tls(tls, &certificate, &[]).await;
        Raw::over(stream).send(&Request::get("/v1/models")).await.expect(200);
        for seen in upstream.seen() {
            assert_eq!(seen.headers.one("x-forwarded-proto").as_deref(), Some("https"));
        }
        assert_eq!(upstream.count(), 2);
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_engine_behind_tls_is_believed_only_with_the_right_certificate() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let named = Certificate::write(folder.path(), "engine", &["engine.test"]);
        let upstream = Upstream::start_tls(&named, "m", |_| json("{}")).await;
        let url = upstream.url();
        let ca = named.certificate.display();
        for (tls, works) in [
            ("{}".to_owned(), false),
            (format!("{{ca: '{ca}'}}"), false),
            (format!("{{ca: '{ca}', server_name: engine.test}}"), true),
            ("{verify: false}".to_owned(), true),
            ("{server_name: engine.test}".to_owned(), false),
        ] {
            let sections =
                format!("{{fleet: {{replicas: [{{id: r0, url: '{url}', tls: {tls}}}]}}}}");
            let mut weir = Weir::start_live(&sections).await;
            if works {
                weir.ready().await;
                weir.chat("m", false).await.expect(200);
            } else {
                weir.wait_for_state("r0", "down").await;
                weir.chat("m", false).await.expect_refusal(503);
            }
        }
        assert_eq!(upstream.count(), 2);
    });
}

#[test]
fn an_engine_on_ipv6_is_one_like_any_other() {
    run(async {
        let address: SocketAddr = "[::1]:0".parse().unwrap();
        let upstream = Upstream::at(address, &["m"], |_| json("{}")).await;
        let shown = upstream.address.to_string();
        assert!(shown.starts_with("[::1]:"));
        let sections = format!("{{fleet: {{replicas: [{{url: '{}'}}]}}}}", upstream.url());
        let weir = Weir::start(&sections).await;
        weir.chat("m", false).await.expect(200);
        assert_eq!(upstream.only().headers.one("host"), Some(shown.clone()));
        assert_eq!(weir.replica(&shown).await.unwrap()["state"], "up");
        assert!(weir.metrics().await.text().contains(&format!("replica=\"{shown}\"")));
    });
}

#[test]
fn a_name_is_looked_up_and_a_prefix_is_joined_once() {
    run(async {
        let upstream = echo().await;
        let port = upstream.address.port();
        for (url, expected) in [
            (format!("http://localhost:{port}"), CHAT.to_owned()),
            (format!("HTTP://127.0.0.1:{port}/"), CHAT.to_owned()),
            (format!("http://127.0.0.1:{port}/m1"), format!("/m1{CHAT}")),
            (format!("http://127.0.0.1:{port}/m1/"), format!("/m1{CHAT}")),
            (format!("http://127.0.0.1:{port}/m1/v1"), format!("/m1{CHAT}")),
            (format!("http://127.0.0.1:{port}/a/b/v1/"), format!("/a/b{CHAT}")),
        ] {
            let weir = Weir::start(&fleet(std::slice::from_ref(&url), "")).await;
            let target = format!("{CHAT}?q=1");
            for way in Way::PROTOCOLS {
                way.send(weir.address, &Request::post(&target, BODY)).await.expect(200);
                let seen = upstream.seen().pop().unwrap();
                assert_eq!(seen.target, format!("{expected}?q=1"), "{url}");
            }
            let prefix = expected.strip_suffix(CHAT).unwrap();
            let asked = upstream.asked();
            let (path, _) = asked.last().unwrap();
            let probes = [format!("{prefix}/health"), format!("{prefix}/v1/models")];
            assert!(probes.contains(path), "{url}: {path}");
        }
    });
}

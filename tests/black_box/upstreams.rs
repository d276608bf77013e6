//! Replicas that are not plain HTTP/1.1 servers: HTTP/2, certificates on both sides, upgrades.

use std::time::Duration;

use crate::kit::{
    Act, Certificate, End, Frame, Http2Upstream, NOTICED_MAX, Request, Upstream, Way, Weir, chat,
    events, fleet_of, json, run,
};

const CHAT: &str = "/v1/chat/completions";
const EVENT: &[u8] = b"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n";

fn http2(upstream: &Http2Upstream, more: &str) -> String {
    format!(
        "{{fleet: {{replicas: [{{id: r0, url: '{}', protocol: http2}}]}}{more}}}",
        upstream.url()
    )
}

#[test]
fn an_engine_that_speaks_http_2_gets_the_same_bytes() {
    run(async {
        let upstream = Http2Upstream::start("m", |seen| vec![Frame::Data(seen.body.clone())]).await;
        let mut weir = Weir::start(&http2(&upstream, "")).await;
        let large = format!(r#"{{"model":"m","pad":"{}"}}"#, "é".repeat(1 << 20));
        for way in Way::ALL {
            for body in [r#"{ "z":1,"model":"m" }"#, &large] {
                let way = if large.len() == body.len() && way == Way::ALL[1] {
                    Way::Chunked(40_000)
                } else {
                    way
                };
                let request = Request::post(&format!("{CHAT}?a=b"), body).header("X-Odd", "é");
                let reply = way.send(weir.address, &request).await.expect(200);
                assert!(reply.body == body.as_bytes(), "{way:?}");
            }
        }
        for seen in upstream.seen() {
            assert_eq!(seen.head.uri.path_and_query().unwrap().as_str(), format!("{CHAT}?a=b"));
            assert_eq!(seen.head.uri.authority().unwrap().as_str(), upstream.address.to_string());
            assert_eq!(seen.head.headers["x-odd"].as_bytes(), "é".as_bytes());
            assert_eq!(seen.head.headers["x-forwarded-for"], "127.0.0.1");
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_stream_over_http_2_that_is_reset_is_told_as_broken() {
    run(async {
        let upstream = Http2Upstream::start("m", |_| {
            let pause = Frame::Pause(Duration::from_millis(50));
            vec![Frame::Data(EVENT.to_vec()), pause, Frame::Reset]
        })
        .await;
        let mut weir = Weir::start(&http2(&upstream, "")).await;
        for way in Way::PROTOCOLS {
            let reply = way.send(weir.address, &Request::post(CHAT, chat("m", true))).await;
            assert_ne!(reply.end, End::Proper);
            assert!(reply.events().last().unwrap().json()["error"].is_object());
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_client_that_leaves_takes_back_its_stream_over_http_2_and_no_other() {
    run(async {
        let upstream = Http2Upstream::start("m", |_| {
            let mut frames = vec![Frame::Data(EVENT.to_vec())];
            frames.push(Frame::Pause(Duration::from_secs(2)));
            frames.push(Frame::Data(EVENT.to_vec()));
            frames
        })
        .await;
        let mut weir = Weir::start(&http2(&upstream, "")).await;
        let request = Request::post(CHAT, chat("m", true));
        let mut stays = Way::Length.open(weir.address, &request).await;
        assert_eq!(stays.head().await.status, 200);
        for (number, way) in Way::PROTOCOLS.into_iter().enumerate() {
            let mut open = way.open(weir.address, &request).await;
            assert_eq!(open.head().await.status, 200);
            open.events(1).await;
            let left = std::time::Instant::now();
            open.leave().await;
            let after = upstream.left(number + 1).await.saturating_duration_since(left);
            assert!(after < NOTICED_MAX, "{way:?}: {after:?}");
        }
        let (body, end) = stays.rest().await;
        let text = String::from_utf8_lossy(&body);
        assert_eq!((events(&body).len(), end), (2, End::Proper), "{text}");
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_time_limit_ends_its_own_stream_over_http_2_and_no_other() {
    run(async {
        let upstream = Http2Upstream::start("m", |seen| {
            if seen.head.headers.contains_key("x-hang") {
                return vec![Frame::Data(EVENT.to_vec()), Frame::Stall];
            }
            let mut frames = Vec::new();
            for _ in 0..15 {
                frames.push(Frame::Data(EVENT.to_vec()));
                frames.push(Frame::Pause(Duration::from_millis(100)));
            }
            frames
        })
        .await;
        // Over shared connections there is one limit for both, the longer of the two.
        let limits = ", proxy: {timeouts: {first_byte: 500ms, between_bytes: 500ms}}";
        let mut weir = Weir::start(&http2(&upstream, limits)).await;
        let request = Request::post(CHAT, chat("m", true));
        let mut stays = Way::Length.open(weir.address, &request).await;
        assert_eq!(stays.head().await.status, 200);
        let hangs = request.header("X-Hang", "1");
        let reply = Way::Length.send(weir.address, &hangs).await;
        assert_eq!(reply.end, End::Cut);
        assert_eq!(reply.events().last().unwrap().json()["error"]["code"], 504);
        let (body, end) = stays.rest().await;
        assert_eq!((events(&body).len(), end), (15, End::Proper), "another request was cut");
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_engine_that_asks_for_a_certificate_is_shown_ours() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let engine = Certificate::write(folder.path(), "engine", &["engine.test"]);
        let ours = Certificate::write(folder.path(), "ours", &["weir.test"]);
        let upstream = Upstream::start_mutual_tls(&engine, &ours, "m", |_| json("{}")).await;
        for shows in [true, false] {
            let pair = format!(
                "certificate: '{}', key: '{}',",
                ours.certificate.display(),
                ours.key.display()
            );
            let sections = format!(
                "{{fleet: {{replicas: [{{id: r0, url: '{}', tls: {{
                    {} ca: '{}', server_name: engine.test}}}}]}}}}",
                upstream.url(),
                if shows { &pair } else { "" },
                engine.certificate.display()
            );
            let mut weir = Weir::start_live(&sections).await;
            if shows {
                weir.ready().await;
                weir.chat("m", false).await.expect(200);
            } else {
                weir.wait_for_state("r0", "down").await;
            }
        }
    });
}

#[test]
fn an_upgrade_to_a_web_socket_is_passed_both_ways() {
    run(async {
        let upstream = Upstream::start("m", |seen| {
            let key = seen.headers.one("sec-websocket-key").unwrap();
            let head = format!(
                "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\
                 connection: Upgrade\r\nsec-websocket-accept: {key}\r\n\r\n"
            );
            let pause = Act::Pause(Duration::from_millis(50));
            vec![pause, Act::Write(head.into_bytes()), Act::Write(b"hello".to_vec()), Act::Echo]
        })
        .await;
        let limits = "{proxy: {timeouts: {first_byte: 300ms, between_bytes: 300ms}}}";
        let mut weir = Weir::start(&fleet_of(&[&upstream], limits)).await;
        let mut raw = weir.connect().await;
        let request = Request::get("/v1/realtime?model=m")
            .header("Connection", "Upgrade")
            .header("Upgrade", "websocket")
            .header("X-Request-Id", "socket")
            .header("Sec-WebSocket-Version", "13")
            .header("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==");
        raw.write(&request.bytes()).await;
        let head = raw.head().await;
        assert_eq!(head.status, 101, "{head:?}");
        assert_eq!(head.headers.one("upgrade").as_deref(), Some("websocket"));
        assert_eq!(raw.take(5).await, b"hello");
        for text in [&b"one"[..], b"\x00\xff", b"after the limit for an answer to begin"] {
            tokio::time::sleep(Duration::from_millis(500)).await;
            raw.write(text).await;
            assert_eq!(raw.take(text.len()).await, text);
        }
        drop(raw);
        upstream.left(0).await;
        assert_eq!(weir.access_line("socket").await["status"], 101);
        weir.assert_at_rest().await;
    });
}

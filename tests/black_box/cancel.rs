//! A client that leaves: noticed in every phase, over every protocol, and told upstream.

use std::time::{Duration, Instant};

use crate::kit::{
    Act, Engine, NOTICED_MAX, Request, Upstream, Way, Weir, blackhole, chat, fleet, fleet_of, run,
    sse, sse_head, until,
};

const CHAT: &str = "/v1/chat/completions";
const EVENT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n";

/// Waits until so many departures in this phase are counted; tells nothing else.
async fn counted(weir: &Weir, phase: &str, count: f64) {
    until(&format!("{count} clients left while {phase}"), async || {
        let metrics = weir.metrics().await;
        (metrics.sum("weir_cancels_total", &[("phase", phase)]) == count).then_some(())
    })
    .await;
}

/// No breaker moves and no error is counted because a client went away.
async fn nobody_is_blamed(weir: &mut Weir) {
    weir.assert_at_rest().await;
    let metrics = weir.metrics().await;
    assert_eq!(metrics.sum("weir_errors_total", &[]), 0.0, "{}", metrics.text());
    assert_eq!(weir.replica("r0").await.unwrap()["state"], "up");
}

#[test]
fn a_client_that_leaves_while_the_connection_is_made_is_noticed() {
    run(async {
        let hole = blackhole().await;
        let sections = format!(
            "{{fleet: {{probe: {{every: 0s}},
                replicas: [{{id: r0, url: 'http://{}', models: [m]}}]}},
              proxy: {{timeouts: {{connect: 30s}}}}}}",
            hole.address
        );
        let mut weir = Weir::start(&sections).await;
        for (number, way) in Way::PROTOCOLS.into_iter().enumerate() {
            let open = way.open(weir.address, &Request::post(CHAT, chat("m", true))).await;
            until("the request is at the replica", async || {
                (weir.replica("r0").await?["in_flight"] == 1).then_some(())
            })
            .await;
            let left = Instant::now();
            open.leave().await;
            counted(&weir, "connecting", number as f64 + 1.0).await;
            assert!(left.elapsed() < NOTICED_MAX, "{way:?}: {:?}", left.elapsed());
            weir.assert_at_rest().await;
        }
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
#[ignore = "known limit: Pingora shakes hands by itself and watches nobody meanwhile; `connect` ends it"]
fn a_client_that_leaves_while_an_engine_does_not_shake_hands_is_noticed() {
    run(async {
        // The system takes the connection; nobody ever speaks TLS on it.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let sections = format!(
            "{{fleet: {{probe: {{every: 0s}}, replicas: [{{id: r0, url: 'https://{}', models: [m],
                tls: {{verify: false}}}}]}}, proxy: {{timeouts: {{connect: 30s}}}}}}",
            silent.local_addr().unwrap()
        );
        let mut weir = Weir::start(&sections).await;
        for (number, way) in Way::PROTOCOLS.into_iter().enumerate() {
            let open = way.open(weir.address, &Request::post(CHAT, chat("m", true))).await;
            until("the request is at the replica", async || {
                (weir.replica("r0").await?["in_flight"] == 1).then_some(())
            })
            .await;
            tokio::time::sleep(Duration::from_millis(100)).await;
            let left = Instant::now();
            open.leave().await;
            counted(&weir, "connecting", number as f64 + 1.0).await;
            assert!(left.elapsed() < NOTICED_MAX, "{way:?}: {:?}", left.elapsed());
        }
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
fn a_client_that_leaves_while_the_engine_is_silent_is_noticed() {
    run(async {
        let upstream = Upstream::start("m", |_| vec![Act::Stall]).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut number = 0;
        for way in Way::ALL {
            for stream in [false, true] {
                let request = Request::post(CHAT, chat("m", stream));
                let open = way.open(weir.address, &request).await;
                upstream.wait_for(number + 1).await;
                let left = Instant::now();
                open.leave().await;
                let noticed = upstream.left(number).await;
                number += 1;
                let after = noticed.saturating_duration_since(left);
                assert!(after < NOTICED_MAX, "{way:?}, stream {stream}: {after:?}");
                counted(&weir, "waiting_for_head", number as f64).await;
            }
        }
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
fn a_client_that_leaves_a_stream_that_has_not_begun_is_noticed() {
    run(async {
        let upstream = Upstream::start("m", |_| vec![sse_head(), Act::Stall]).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for (number, way) in Way::PROTOCOLS.into_iter().enumerate() {
            let mut open = way.open(weir.address, &Request::post(CHAT, chat("m", true))).await;
            assert_eq!(open.head().await.status, 200, "the head does not wait for the body");
            let left = Instant::now();
            open.leave().await;
            let after = upstream.left(number).await.saturating_duration_since(left);
            assert!(after < NOTICED_MAX, "{way:?}: {after:?}");
            counted(&weir, "silent_stream", number as f64 + 1.0).await;
        }
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
fn a_client_that_leaves_in_mid_stream_is_noticed() {
    run(async {
        // Silent after three events, or still talking.
        for talks in [false, true] {
            let upstream = Upstream::start("m", move |_| {
                let mut acts = vec![sse_head(), sse(EVENT), sse(EVENT), sse(EVENT)];
                for _ in 0..if talks { 2000 } else { 0 } {
                    acts.extend([Act::Pause(Duration::from_millis(20)), sse(EVENT)]);
                }
                acts.push(Act::Stall);
                acts
            })
            .await;
            let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
            for (number, way) in Way::PROTOCOLS.into_iter().enumerate() {
                let mut open = way.open(weir.address, &Request::post(CHAT, chat("m", true))).await;
                assert_eq!(open.head().await.status, 200);
                open.events(3).await;
                let left = Instant::now();
                open.leave().await;
                let after = upstream.left(number).await.saturating_duration_since(left);
                assert!(after < NOTICED_MAX, "{way:?}, talks {talks}: {after:?}");
                counted(&weir, "streaming", number as f64 + 1.0).await;
            }
            nobody_is_blamed(&mut weir).await;
        }
    });
}

#[test]
fn a_reset_says_the_same_as_a_close() {
    run(async {
        let upstream = Upstream::start("m", |_| vec![sse_head(), sse(EVENT), Act::Stall]).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let (mut raw, head) = Request::post(CHAT, chat("m", true)).open(weir.address).await;
        assert_eq!(head.status, 200);
        raw.events(1).await;
        raw.reset();
        upstream.left(0).await;
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
fn one_stream_of_a_connection_that_is_taken_back_does_not_disturb_the_others() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            vec![
                sse_head(),
                sse(EVENT),
                Act::Pause(Duration::from_millis(400)),
                sse(EVENT),
                Act::Write(b"0\r\n\r\n".to_vec()),
            ]
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut client = weir.connect_http2().await;
        let request = Request::post(CHAT, chat("m", true));
        let mut streams = Vec::new();
        for _ in 0..6 {
            let mut stream = client.open(&request).await;
            assert_eq!(stream.head().await.status, 200);
            stream.events(1).await;
            streams.push(stream);
        }
        for stream in streams.drain(..3) {
            stream.reset();
        }
        for mut stream in streams {
            let (body, end) = stream.rest().await;
            assert_eq!(end, crate::kit::End::Proper);
            assert_eq!(crate::kit::events(&body).len(), 2);
        }
        counted(&weir, "streaming", 3.0).await;
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
fn a_connection_that_goes_takes_all_its_streams_with_it() {
    run(async {
        let upstream = Upstream::start("m", |_| vec![sse_head(), sse(EVENT), Act::Stall]).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut client = weir.connect_http2().await;
        let mut streams = Vec::new();
        for _ in 0..5 {
            let mut stream = client.open(&Request::post(CHAT, chat("m", true))).await;
            assert_eq!(stream.head().await.status, 200);
            streams.push(stream);
        }
        client.leave();
        drop(streams);
        for number in 0..5 {
            upstream.left(number).await;
        }
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
fn a_client_that_leaves_in_mid_upload_reaches_no_engine() {
    run(async {
        let upstream = Upstream::start("m", |_| crate::kit::json("{}")).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let request = Request::post(CHAT, format!("{}{}", chat("m", true), " ".repeat(100_000)));
        for way in Way::ALL {
            match way {
                Way::Http2 => {
                    let mut client = weir.connect_http2().await;
                    let mut stream = client.begin(&request).await;
                    stream.upload(b"{\"model\":", false);
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    stream.reset();
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                way => {
                    let request = if way == Way::Length {
                        request.clone()
                    } else {
                        request.clone().chunked(9)
                    };
                    let bytes = request.bytes();
                    let mut raw = weir.connect().await;
                    raw.write(&bytes[..bytes.len() / 2]).await;
                    drop(raw);
                }
            }
        }
        counted(&weir, "uploading", 3.0).await;
        assert_eq!(upstream.count(), 0);
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
fn an_engine_stops_working_when_its_client_leaves() {
    run(async {
        let engine = Engine::with("m", |options| options.speed = 1.0);
        let mut weir = Weir::start(&fleet(&[engine.url()], "")).await;
        let body = r#"{"model":"m","stream":true,"max_tokens":4000,"ignore_eos":true,
            "messages":[{"role":"user","content":"x"}]}"#;
        for (number, way) in Way::PROTOCOLS.into_iter().enumerate() {
            let mut open = way.open(weir.address, &Request::post(CHAT, body)).await;
            assert_eq!(open.head().await.status, 200);
            open.events(3).await;
            assert_eq!(engine.server.running(), 1);
            let left = Instant::now();
            open.leave().await;
            let after = engine.left(number).await.saturating_duration_since(left);
            assert!(after < NOTICED_MAX, "{way:?}: {after:?}");
            until("the engine is idle", async || (engine.server.running() == 0).then_some(()))
                .await;
        }
        nobody_is_blamed(&mut weir).await;
    });
}

#[test]
fn the_ledger_reads_zero_after_a_storm() {
    run(async {
        let engine = Engine::with("m", |options| options.speed = 4.0);
        let other = Engine::with("m", |options| options.speed = 4.0);
        let limits = "{proxy: {timeouts: {first_byte: 300ms, between_bytes: 300ms}}}";
        let mut weir = Weir::start(&fleet(&[engine.url(), other.url()], limits)).await;
        let faults = [
            "",
            "",
            "no_answer=rst",
            "no_answer=fin",
            "cut=2:RST",
            "cut=1:FIN",
            "cut=2:stall",
            "status=500",
            "status=503",
            "blackhole=1",
            "garbage=2",
            "short=5",
            "close_after=fin",
        ];
        let address = weir.address;
        let tasks: Vec<_> = (0..120_u64)
            .map(|number| {
                tokio::spawn(async move {
                    let way = Way::PROTOCOLS[number as usize % 2];
                    let fault = faults[number as usize % faults.len()];
                    let request = Request::post(CHAT, chat("m", number % 3 != 0))
                        .header("x-sim-fault", fault);
                    tokio::time::sleep(Duration::from_millis(number * 7 % 400)).await;
                    let mut open = way.open(address, &request).await;
                    if number % 4 == 0 {
                        tokio::time::sleep(Duration::from_millis(number % 50)).await;
                        open.leave().await;
                    } else {
                        open.reply().await;
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        weir.assert_at_rest().await;
        assert_eq!(weir.admin_get("/fleet").await.expect(200).json()["in_flight"], 0);
        until("the engines are idle", async || {
            let idle = engine.server.running() + other.server.running() == 0;
            idle.then_some(())
        })
        .await;
    });
}

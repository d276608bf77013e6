//! The end of the process: not ready at once, still serving for a while, nothing cut that need not
//! be, and gone as soon as it can.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::kit::{
    Act, End, Request, Upstream, Way, Weir, chat, fleet_of, json, run, sse, sse_head, until,
};

const CHAT: &str = "/v1/chat/completions";

async fn slow(go: &Arc<Notify>) -> Upstream {
    let go = Arc::clone(go);
    Upstream::start("m", move |seen| {
        if !seen.text().contains("\"stream\":true") {
            return json("{}");
        }
        vec![
            sse_head(),
            sse("data: 1\n\n"),
            Act::Wait(Arc::clone(&go)),
            sse("data: [DONE]\n\n"),
            Act::Write(b"0\r\n\r\n".to_vec()),
        ]
    })
    .await
}

async fn not_ready(weir: &Weir) {
    until("not ready", async || (weir.get("/ready").await.status == 503).then_some(())).await;
}

#[test]
fn a_stop_in_good_order_finishes_streams_and_serves_until_balancers_have_noticed() {
    run(async {
        let go = Arc::new(Notify::new());
        let upstream = slow(&go).await;
        let times = "{server: {pre_stop: 2s, grace: 30s}}";
        let mut weir = Weir::start(&fleet_of(&[&upstream], times)).await;
        let mut streams = Vec::new();
        for number in 0..8 {
            let way = Way::PROTOCOLS[number % 2];
            let mut open = way.open(weir.address, &Request::post(CHAT, chat("m", true))).await;
            assert_eq!(open.head().await.status, 200);
            open.events(1).await;
            streams.push(open);
        }
        let mut kept = weir.connect().await;
        kept.send(&Request::get("/health")).await.expect(200);
        weir.signal("TERM");
        not_ready(&weir).await;
        assert_eq!(weir.admin_get("/ready").await.status, 503);
        // Alive, and serving old and new connections.
        weir.get("/health").await.expect(200);
        for way in Way::PROTOCOLS {
            let request = Request::post(CHAT, chat("m", false));
            way.send(weir.address, &request).await.expect(200);
        }
        let last = kept.send(&Request::post(CHAT, chat("m", false))).await.expect(200);
        assert_eq!(last.headers.one("connection").as_deref(), Some("close"));
        assert_eq!(kept.closed().await, b"");
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert!(weir.is_running(), "streams are under way");
        for open in &mut streams {
            go.notify_one();
            let (body, end) = open.rest().await;
            assert_eq!(body, b"data: 1\n\ndata: [DONE]\n\n");
            assert_eq!(end, End::Proper);
        }
        let status = weir.ended(Duration::from_secs(25)).await;
        assert!(status.success(), "{status}");
        assert!(!weir.log().contains("panicked"), "{}", weir.log());
    });
}

#[test]
fn an_idle_process_stops_at_once_though_clients_stay_connected() {
    run(async {
        let go = Arc::new(Notify::new());
        let upstream = slow(&go).await;
        let times = "{server: {pre_stop: 300ms, grace: 60s}}";
        let mut weir = Weir::start(&fleet_of(&[&upstream], times)).await;
        let mut idle = Vec::new();
        for _ in 0..10 {
            let mut raw = weir.connect().await;
            raw.send(&Request::get("/health")).await.expect(200);
            idle.push(raw);
        }
        let mut http2 = weir.connect_http2().await;
        http2.send(&Request::get("/health")).await.expect(200);
        let silent = TcpStream::connect(weir.address).await.unwrap();
        weir.signal("TERM");
        let began = Instant::now();
        let status = weir.ended(Duration::from_secs(25)).await;
        assert!(status.success(), "{status}");
        // Far below the grace, which must not be waited for.
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        assert!(!weir.log().contains("panicked"));
        drop((idle, http2, silent));
    });
}

#[test]
fn a_stream_that_does_not_end_is_cut_when_the_grace_is_over() {
    run(async {
        let upstream =
            Upstream::start("m", |_| vec![sse_head(), sse("data: 1\n\n"), Act::Stall]).await;
        let times = "{server: {pre_stop: 0s, grace: 1s}}";
        let mut weir = Weir::start(&fleet_of(&[&upstream], times)).await;
        let mut streams = Vec::new();
        for way in Way::PROTOCOLS {
            let mut open = way.open(weir.address, &Request::post(CHAT, chat("m", true))).await;
            assert_eq!(open.head().await.status, 200);
            streams.push(open);
        }
        weir.signal("TERM");
        let began = Instant::now();
        for mut open in streams {
            let (body, end) = open.rest().await;
            assert_ne!(end, End::Proper, "a cut stream must not look finished");
            assert!(!String::from_utf8_lossy(&body).contains("[DONE]"));
        }
        weir.ended(Duration::from_secs(25)).await;
        let took = began.elapsed();
        assert!((Duration::from_millis(900)..Duration::from_secs(20)).contains(&took), "{took:?}");
    });
}

#[test]
fn a_second_signal_or_an_interrupt_ends_it_at_once() {
    run(async {
        for signals in [&["TERM", "TERM"][..], &["TERM", "INT"], &["INT"]] {
            let upstream = Upstream::start("m", |_| vec![sse_head(), Act::Stall]).await;
            let times = "{server: {pre_stop: 30s, grace: 60s}}";
            let mut weir = Weir::start(&fleet_of(&[&upstream], times)).await;
            let request = Request::post(CHAT, chat("m", true));
            let mut open = Way::Length.open(weir.address, &request).await;
            assert_eq!(open.head().await.status, 200);
            let began = Instant::now();
            for (number, signal) in signals.iter().enumerate() {
                weir.signal(signal);
                if number + 1 < signals.len() {
                    not_ready(&weir).await;
                }
            }
            weir.ended(Duration::from_secs(25)).await;
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
            // The engine need not go on.
            upstream.left(0).await;
        }
    });
}

#[test]
fn a_client_of_http_2_is_told_to_go_elsewhere() {
    run(async {
        let go = Arc::new(Notify::new());
        let upstream = slow(&go).await;
        let times = "{server: {pre_stop: 500ms, grace: 20s}}";
        let mut weir = Weir::start(&fleet_of(&[&upstream], times)).await;
        let mut client = weir.connect_http2().await;
        let mut stream = client.open(&Request::post(CHAT, chat("m", true))).await;
        assert_eq!(stream.head().await.status, 200);
        stream.events(1).await;
        weir.signal("TERM");
        not_ready(&weir).await;
        go.notify_one();
        let (body, end) = stream.rest().await;
        assert_eq!((body.ends_with(b"[DONE]\n\n"), end), (true, End::Proper));
        let status = weir.ended(Duration::from_secs(25)).await;
        assert!(status.success(), "{status}");
        until("the connection is over", async || client.is_over().then_some(())).await;
    });
}

#[test]
fn an_address_in_use_is_told_and_ends_the_start() {
    run(async {
        let upstream = Upstream::start("m", |_| json("{}")).await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let done = tokio::task::spawn_blocking({
            let path = weir.path();
            move || {
                let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_weir"));
                command.arg("--config").arg(path).output().unwrap()
            }
        })
        .await
        .unwrap();
        assert!(!done.status.success());
        let written = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(written.contains(&weir.address.to_string()), "{written}");
        weir.chat("m", false).await.expect(200);
    });
}

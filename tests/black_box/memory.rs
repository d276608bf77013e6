//! What is held while others are slow, in sizes small enough for every run of the tests; the large
//! measurements are in `benches`.

use std::time::{Duration, Instant};

use crate::kit::{Act, Request, Upstream, Way, Weir, chat, fleet_of, run, sse, sse_head, until};

const CHAT: &str = "/v1/chat/completions";
const MIB: u64 = 1 << 20;

/// An event of 16 KiB as one chunk.
fn large_event() -> Vec<u8> {
    let text = format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n",
        "x".repeat(16 << 10)
    );
    let Act::Write(chunk) = sse(text) else { panic!("a chunk") };
    chunk
}

#[test]
fn readers_that_stop_hold_up_their_engine_and_not_the_memory() {
    run(async {
        const CLIENTS: usize = 40;
        let chunk = large_event();
        // 8 MiB for each client.
        let upstream = Upstream::start("m", move |_| {
            vec![sse_head(), Act::Repeat(chunk.clone(), 512), Act::Write(b"0\r\n\r\n".to_vec())]
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        weir.chat("m", true).await.expect(200);
        let before = weir.memory();
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let way = Way::PROTOCOLS[number % 2];
            let mut open = way.open(weir.address, &Request::post(CHAT, chat("m", true))).await;
            assert_eq!(open.head().await.status, 200);
            clients.push(open);
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let grown = weir.memory().saturating_sub(before);
        // All of it would be 320 MiB.
        assert!(grown < 48 * MIB, "{} MiB for {CLIENTS} clients that do not read", grown / MIB);
        for open in clients {
            open.leave().await;
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_body_is_given_up_when_it_cannot_be_sent_again() {
    run(async {
        const CLIENTS: usize = 16;
        let upstream =
            Upstream::start("m", |_| vec![sse_head(), sse("data: 1\n\n"), Act::Stall]).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let body = format!(r#"{{"model":"m","stream":true,"pad":"{}"}}"#, "x".repeat(6 << 20));
        let request = Request::post(CHAT, body);
        let mut first = Way::Length.open(weir.address, &request).await;
        assert_eq!(first.head().await.status, 200);
        let before = weir.memory();
        let mut clients = vec![first];
        for _ in 0..CLIENTS {
            let mut open = Way::Length.open(weir.address, &request).await;
            assert_eq!(open.head().await.status, 200);
            clients.push(open);
        }
        // All of them would be 96 MiB; the allocator gives back what was freed after a while.
        until("the bodies are given up", async || {
            (weir.memory().saturating_sub(before) < 40 * MIB).then_some(())
        })
        .await;
        for open in clients {
            open.leave().await;
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn streams_leave_nothing_behind() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            let chunk = large_event();
            vec![sse_head(), Act::Repeat(chunk, 300), Act::Write(b"0\r\n\r\n".to_vec())]
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for _ in 0..3 {
            weir.chat("m", true).await.expect(200);
        }
        let (before, descriptors) = (weir.memory(), weir.descriptors());
        for number in 0..16 {
            let way = Way::PROTOCOLS[number % 2];
            way.send(weir.address, &Request::post(CHAT, chat("m", true))).await.expect(200);
        }
        weir.assert_at_rest().await;
        let grown = weir.memory().saturating_sub(before);
        assert!(grown < 16 * MIB, "{} MiB after 80 MiB of streams", grown / MIB);
        until("descriptors are given back", async || {
            (weir.descriptors() <= descriptors + 4).then_some(())
        })
        .await;
    });
}

#[test]
fn whether_weir_is_alive_is_told_quickly_while_it_is_busy() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            let mut acts = vec![sse_head()];
            for _ in 0..100 {
                acts.push(sse("data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n"));
                acts.push(Act::Pause(Duration::from_millis(20)));
            }
            acts.push(Act::Write(b"0\r\n\r\n".to_vec()));
            acts
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut streams = Vec::new();
        for _ in 0..60 {
            let request = Request::post(CHAT, chat("m", true));
            streams.push(Way::Length.open(weir.address, &request).await);
        }
        upstream.wait_for(60).await;
        let mut slowest = Duration::ZERO;
        for _ in 0..30 {
            let began = Instant::now();
            weir.get("/health").await.expect(200);
            weir.admin_get("/health").await.expect(200);
            slowest = slowest.max(began.elapsed());
        }
        assert!(slowest < Duration::from_secs(5), "{slowest:?}");
        drop(streams);
        weir.assert_at_rest().await;
    });
}

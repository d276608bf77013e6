//! Engines that stop answering and say so in their own way: nobody listens any more, or they
//! sleep. Those that break off are in `failover.rs`, what probes make of the rest in `health.rs`.

use std::time::{Duration, Instant};

use crate::kit::{
    Act, End, Engine, Request, Upstream, Way, Weir, chat, fleet, fleet_of, json, run, soon, sse,
    sse_head, until,
};

const CHAT: &str = "/v1/chat/completions";
const PROBES: &str = "{fleet: {probe: {every: 100ms, timeout: 1s, down_every_max: 200ms}}}";
const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";

#[test]
fn a_silent_stream_ends_with_an_error_soon_after_nobody_listens_at_its_engine() {
    run(async {
        let mut upstream = Upstream::start("m", |_| vec![sse_head(), sse(TOKEN), Act::Stall]).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], PROBES)).await;
        let mut open = Vec::new();
        for way in Way::PROTOCOLS {
            let mut one = way.open(weir.address, &Request::post(CHAT, chat("m", true))).await;
            assert_eq!(one.head().await.status, 200);
            one.events(1).await;
            open.push(one);
        }
        let began = Instant::now();
        upstream.stop_listening();
        for one in &mut open {
            let (rest, end) = soon("the end of the stream", one.rest()).await;
            let rest = String::from_utf8(rest).unwrap();
            assert!(rest.contains("\"error\"") && rest.contains("broke off"), "{rest}");
            assert!(rest.contains("502"), "{rest}");
            assert_ne!(end, End::Proper);
        }
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        weir.assert_at_rest().await;
        until("both are told as broken by the engine", async || {
            let lines = weir.access_lines();
            let ended = lines.iter().filter(|line| line["ended"] == "engine_broke");
            (ended.count() == 2).then_some(())
        })
        .await;
    });
}

#[test]
fn a_request_that_waits_for_an_engine_nobody_listens_at_is_answered_by_another() {
    run(async {
        let mut silent = Upstream::start("m", |_| vec![Act::Stall]).await;
        let good = Upstream::start("m", |_| json("{}")).await;
        let mut weir = Weir::start(&fleet_of(&[&silent, &good], PROBES)).await;
        for id in ["r0", "r1"] {
            weir.wait_for_state(id, "up").await;
        }
        let address = weir.address;
        let clients: Vec<_> = (0..8)
            .map(|number| {
                let request = Request::post(CHAT, chat("m", number % 4 < 2));
                tokio::spawn(
                    async move { Way::PROTOCOLS[number % 2].send(address, &request).await },
                )
            })
            .collect();
        silent.wait_for(1).await;
        good.wait_for(1).await;
        silent.stop_listening();
        for client in clients {
            soon("an answer", client).await.unwrap().expect(200);
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_request_that_waits_for_the_only_engine_is_told_that_it_failed() {
    run(async {
        let mut silent = Upstream::start("m", |_| vec![Act::Stall]).await;
        let mut weir = Weir::start(&fleet_of(&[&silent], PROBES)).await;
        let address = weir.address;
        let request = Request::post(CHAT, chat("m", false));
        let client = tokio::spawn(async move { request.send(address).await });
        silent.wait_for(1).await;
        silent.stop_listening();
        soon("a refusal", client).await.unwrap().expect_refusal(502);
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_engine_that_takes_nothing_new_may_end_the_streams_it_has() {
    run(async {
        let mut upstream = Upstream::start("m", |_| {
            let mut acts = vec![sse_head()];
            for _ in 0..60 {
                acts.extend([sse(TOKEN), Act::Pause(Duration::from_millis(50))]);
            }
            acts.extend([sse("data: [DONE]\n\n"), Act::Write(b"0\r\n\r\n".to_vec())]);
            acts
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], PROBES)).await;
        let request = Request::post(CHAT, chat("m", true));
        let mut one = Way::Length.open(weir.address, &request).await;
        assert_eq!(one.head().await.status, 200);
        one.events(1).await;
        upstream.stop_listening();
        weir.wait_for_state("r0", "down").await;
        let (rest, end) = soon("the end of the stream", one.rest()).await;
        assert_eq!(end, End::Proper);
        assert!(String::from_utf8(rest).unwrap().contains("[DONE]"));
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_engine_that_was_put_to_sleep_gets_nothing_until_it_wakes() {
    run(async {
        let engines = [Engine::start("m"), Engine::start("m")];
        let urls: Vec<_> = engines.iter().map(Engine::url).collect();
        let mut weir = Weir::start(&fleet(&urls, PROBES)).await;
        for id in ["r0", "r1"] {
            weir.wait_for_state(id, "up").await;
        }
        let order = async |number: usize, target| {
            let address = engines[number].server.addr();
            Request::new("POST", target).body("").send(address).await
        };
        order(0, "/sleep?level=1").await.expect(200);
        weir.wait_for_state("r0", "asleep").await;
        let before = engines[0].requests().len();
        for _ in 0..10 {
            soon("an answer", weir.chat("m", false)).await.expect(200);
        }
        assert_eq!(engines[0].requests().len(), before);
        order(1, "/sleep?level=1").await.expect(200);
        weir.wait_for_state("r1", "asleep").await;
        weir.chat("m", false).await.expect_refusal(503);
        order(0, "/wake_up").await.expect(200);
        weir.wait_for_state("r0", "up").await;
        soon("an answer", weir.chat("m", false)).await.expect(200);
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_engine_that_cannot_sleep_is_asked_once() {
    run(async {
        let engine = Engine::with("m", |options| options.dev_mode = false);
        let mut weir = Weir::start(&fleet(&[engine.url()], PROBES)).await;
        weir.wait_for_state("r0", "up").await;
        let count = |target| engine.server.log().iter().filter(|one| one.target == target).count();
        until("ten probes", async || (10 < count("/health")).then_some(())).await;
        assert_eq!(count("/is_sleeping"), 1);
        weir.assert_at_rest().await;
    });
}

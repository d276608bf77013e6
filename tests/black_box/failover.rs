//! Replicas that fail: what a client notices of it, and what is done twice (nothing).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::kit::{
    Act, End, Engine, EngineProcess, Reply, Request, Upstream, Way, Weir, answer, answer_with,
    be_an_engine, blackhole, chat, fleet, fleet_of, free_address, json, run, sse, sse_head, until,
};

const CHAT: &str = "/v1/chat/completions";

#[test]
#[ignore = "it is started by another test, as an engine in a process of its own"]
fn an_engine_in_a_process_of_its_own() {
    be_an_engine();
}

#[test]
fn killing_one_of_three_engines_costs_no_client_anything_before_the_first_byte() {
    run(async {
        let start = || EngineProcess::start("m", "failover::an_engine_in_a_process_of_its_own");
        let mut engines = [start(), start(), start()];
        let urls: Vec<_> = engines.iter().map(EngineProcess::url).collect();
        let mut weir = Weir::start(&fleet(&urls, "")).await;
        for id in ["r0", "r1", "r2"] {
            weir.wait_for_state(id, "up").await;
        }
        let address = weir.address;
        let done = Arc::new(AtomicUsize::new(0));
        let clients: Vec<JoinHandle<Vec<Reply>>> = (0..12)
            .map(|number: usize| {
                let done = Arc::clone(&done);
                tokio::spawn(async move {
                    let way = Way::PROTOCOLS[number % 2];
                    let mut replies = Vec::new();
                    for round in 0..25 {
                        let request = Request::post(CHAT, chat("m", round % 2 == 0));
                        replies.push(way.send(address, &request).await);
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    replies
                })
            })
            .collect();
        until("load", async || (60 < done.load(Ordering::Relaxed)).then_some(())).await;
        engines[1].kill();
        let mut cut = 0;
        for client in clients {
            for reply in client.await.unwrap() {
                assert_eq!(reply.status, 200, "{reply:?}");
                // A stream that had begun on the killed engine may be cut, and says so.
                if reply.end != End::Proper {
                    cut += 1;
                    assert!(reply.text().contains("\"error\""), "{}", reply.text());
                }
            }
        }
        assert!(cut <= 12, "{cut} answers were cut by the death of one engine");
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_replica_nobody_listens_at_costs_no_client_anything() {
    run(async {
        let good = Upstream::start("m", |_| json("{}")).await;
        let dead = free_address();
        let sections = format!(
            "{{fleet: {{probe: {{every: 0s}}, breaker: {{open_for: 4s}}, replicas: [
                {{id: good, url: '{}', models: [m]}},
                {{id: dead, url: 'http://{dead}', models: [m]}}]}}}}",
            good.url()
        );
        let mut weir = Weir::start(&sections).await;
        weir.wait_for_state("good", "up").await;
        for _ in 0..50 {
            weir.chat("m", false).await.expect(200);
        }
        assert_eq!(good.count(), 50);
        let metrics = weir.metrics().await;
        let tried = metrics.sum("weir_attempts_total", &[("replica", "dead")]);
        assert!((1.0..=10.0).contains(&tried), "the dead one must be left out soon: {tried}");
        assert_eq!(weir.replica("dead").await.unwrap()["state"], "ejected");

        // It comes up and gets its share again, by itself.
        let back = Upstream::at(dead, &["m"], |_| json("{}")).await;
        until("the replica that came back gets its share", async || {
            weir.chat("m", false).await.expect(200);
            (5 < back.count()).then_some(())
        })
        .await;
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_fleet_that_cannot_be_reached_is_a_502_and_an_unanswered_request_a_504() {
    run(async {
        let dead = free_address();
        let sections = format!(
            "{{fleet: {{probe: {{every: 0s}}, replicas: [
                {{id: dead, url: 'http://{dead}', models: [m]}}]}}}}"
        );
        let mut weir = Weir::start(&sections).await;
        let error = weir.chat("m", false).await;
        assert!(!error.text().contains(&dead.to_string()), "no inner address is told");
        error.expect_refusal(502);
        weir.assert_at_rest().await;

        let hung = Upstream::start("m", |_| vec![Act::Stall]).await;
        let limit = "{proxy: {timeouts: {first_byte: 400ms}}}";
        let mut weir = Weir::start(&fleet_of(&[&hung], limit)).await;
        for way in Way::PROTOCOLS {
            for stream in [false, true] {
                let began = Instant::now();
                let request = Request::post(CHAT, chat("m", stream));
                let error = way.send(weir.address, &request).await.expect_refusal(504);
                assert_eq!(error["code"], 504);
                assert!(began.elapsed() < Duration::from_secs(3));
            }
        }
        // The connection to the hung engine is closed: it need not go on.
        for number in 0..hung.count() {
            hung.left(number).await;
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_connect_that_hangs_ends_at_its_limit_and_the_request_goes_elsewhere() {
    run(async {
        let hole = blackhole().await;
        let good = Upstream::start("m", |_| json("{}")).await;
        let sections = format!(
            "{{fleet: {{probe: {{every: 0s}}, breaker: {{open_for: 20s}}, replicas: [
                {{id: hole, url: 'http://{}', models: [m]}},
                {{id: good, url: '{}', models: [m]}}]}},
              proxy: {{timeouts: {{connect: 300ms}}}}}}",
            hole.address,
            good.url()
        );
        let mut weir = Weir::start(&sections).await;
        for _ in 0..12 {
            let began = Instant::now();
            weir.chat("m", false).await.expect(200);
            assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        }
        assert_eq!(good.count(), 12);
        assert_eq!(weir.replica("hole").await.unwrap()["state"], "ejected");
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_hung_engine_is_left_out_after_a_few_requests() {
    run(async {
        let good = Upstream::start("m", |_| json("{}")).await;
        let hung = Upstream::start("m", |_| vec![Act::Stall]).await;
        let sections = "{proxy: {timeouts: {first_byte: 300ms}},
                         fleet: {breaker: {open_for: 20s, open_for_max: 30s}}}";
        let mut weir = Weir::start(&fleet_of(&[&good, &hung], sections)).await;
        for id in ["r0", "r1"] {
            weir.wait_for_state(id, "up").await;
        }
        let mut timed_out = 0;
        for _ in 0..40 {
            let began = Instant::now();
            let reply = weir.chat("m", false).await;
            assert!(began.elapsed() < Duration::from_secs(3));
            match reply.status {
                200 => {}
                504 => timed_out += 1,
                other => panic!("{other}: {reply:?}"),
            }
        }
        // A request that may have been computed is not sent again, so the first ones fail.
        assert!((1..=5).contains(&timed_out), "{timed_out} timeouts");
        assert_eq!(hung.count(), timed_out);
        assert_eq!(weir.replica("r1").await.unwrap()["state"], "ejected");
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_idle_connection_the_engine_closed_costs_nothing_and_nothing_twice() {
    run(async {
        // Closed after a while, just when the next request arrives, or without a word.
        for fault in
            ["idle_close=20ms", "close_on_next=fin", "close_on_next=rst", "close_after=fin"]
        {
            let engine = Engine::start("m");
            // On a busy machine the loss is noticed late; it is one of an unread request all the same.
            let patient = "{proxy: {retry: {reused_reset_within: 10s}}}";
            let mut weir = Weir::start(&fleet(&[engine.url()], patient)).await;
            engine.faults(fault);
            let rounds: u64 = 30;
            for round in 0..rounds {
                let pause = Duration::from_millis(17 + round % 8);
                tokio::time::sleep(pause).await;
                let reply = weir.chat("m", round % 2 == 0).await;
                assert_eq!(reply.status, 200, "{fault}, round {round}: {reply:?}");
            }
            let executed = engine.requests().iter().filter(|one| one.status == 200).count();
            assert_eq!(executed, rounds as usize, "{fault}: each request is executed once");
            weir.assert_at_rest().await;
            assert_eq!(weir.replica("r0").await.unwrap()["state"], "up", "{fault}");
        }
    });
}

#[test]
fn connections_are_given_up_before_the_engine_does() {
    run(async {
        let upstream = Upstream::start("m", |_| json("{}")).await;
        let limit = "{proxy: {timeouts: {replica_idle: 1s}}}";
        let weir = Weir::start(&fleet_of(&[&upstream], limit)).await;
        weir.chat("m", false).await.expect(200);
        weir.chat("m", false).await.expect(200);
        tokio::time::sleep(Duration::from_millis(2500)).await;
        weir.chat("m", false).await.expect(200);
        let connections: Vec<_> = upstream.seen().iter().map(|seen| seen.connection).collect();
        assert_eq!(connections[0], connections[1], "a connection in use is kept");
        assert_ne!(connections[1], connections[2], "an idle one is not kept for long");
    });
}

#[test]
fn a_request_that_may_have_been_computed_is_not_sent_again() {
    run(async {
        // The engine reads all of it, works, and breaks off before the first byte.
        let broken = |_: &crate::kit::Seen| vec![Act::Pause(Duration::from_millis(100)), Act::Rst];
        let a = Upstream::start("m", broken).await;
        let b = Upstream::start("m", broken).await;
        let mut weir = Weir::start(&fleet_of(&[&a, &b], "")).await;
        for id in ["r0", "r1"] {
            weir.wait_for_state(id, "up").await;
        }
        for way in Way::PROTOCOLS {
            let before = a.count() + b.count();
            let reply = way.send(weir.address, &Request::post(CHAT, chat("m", false))).await;
            reply.expect_refusal(502);
            assert_eq!(a.count() + b.count(), before + 1, "one start in total");
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_reset_is_followed_by_one_more_attempt_where_the_operator_wants_that() {
    run(async {
        let a = Upstream::start("m", |_| vec![Act::Rst]).await;
        let b = Upstream::start("m", |_| vec![Act::Rst]).await;
        let c = Upstream::start("m", |_| vec![Act::Rst]).await;
        let again = "{proxy: {retry: {attempts_max: 2, on: [connect_failure, reset]}}}";
        let mut weir = Weir::start(&fleet_of(&[&a, &b, &c], again)).await;
        for id in ["r0", "r1", "r2"] {
            weir.wait_for_state(id, "up").await;
        }
        weir.chat("m", false).await.expect_refusal(502);
        assert_eq!(a.count() + b.count() + c.count(), 2, "exactly one more start");
        for upstream in [&a, &b, &c] {
            assert!(upstream.count() <= 1, "not the same one twice");
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn nothing_is_repeated_once_a_byte_has_gone_out() {
    run(async {
        let event = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"once\"}}]}\n\n";
        let script = move |_: &crate::kit::Seen| {
            vec![sse_head(), sse(event), Act::Pause(Duration::from_millis(50)), Act::Rst]
        };
        let a = Upstream::start("m", script).await;
        let b = Upstream::start("m", script).await;
        let again = "{proxy: {retry: {on: [connect_failure, reset, reused_reset]}}}";
        let weir = Weir::start(&fleet_of(&[&a, &b], again)).await;
        let reply = weir.chat("m", true).await;
        assert_eq!(reply.end, End::Cut);
        assert_eq!(reply.text().matches("once").count(), 1, "{}", reply.text());
        assert_eq!(a.count() + b.count(), 1);
    });
}

#[test]
fn a_large_body_is_sent_whole_to_the_next_replica() {
    run(async {
        let busy = Upstream::start("m", |_| answer(503, "{}")).await;
        let good = Upstream::start("m", |_| json("{}")).await;
        let weir = Weir::start(&fleet_of(&[&busy, &good], "")).await;
        for id in ["r0", "r1"] {
            weir.wait_for_state(id, "up").await;
        }
        let body = format!(r#"{{"model":"m","pad":"{}"}}"#, "xyz".repeat(700_000));
        for way in [Way::Length, Way::Chunked(50_000), Way::Http2] {
            way.send(weir.address, &Request::post(CHAT, &body)).await.expect(200);
        }
        assert!(0 < busy.count(), "the busy one must have been asked");
        for seen in busy.seen().iter().chain(&good.seen()) {
            assert!(seen.body == body.as_bytes(), "{} bytes", seen.body.len());
        }
        assert_eq!(good.count(), 3);
    });
}

#[test]
fn a_replica_that_stops_in_good_order_is_avoided_without_a_word_to_clients() {
    run(async {
        let stays = Engine::start("m");
        let goes = Upstream::start("m", |_| json("{}")).await;
        let mut weir = Weir::start(&fleet(&[stays.url(), goes.url()], "")).await;
        for id in ["r0", "r1"] {
            weir.wait_for_state(id, "up").await;
        }
        for _ in 0..10 {
            weir.chat("m", false).await.expect(200);
        }
        assert!(0 < goes.count());
        let before = goes.count();
        goes.script(|_| {
            let mut acts = answer_with(503, &[("connection", "close")], b"{\"stopping\":1}");
            acts.push(Act::Fin);
            acts
        });
        for _ in 0..60 {
            weir.chat("m", false).await.expect(200);
        }
        let tries = goes.count() - before;
        assert!((1..10).contains(&tries), "{tries} tries at a replica that stops");
        weir.assert_at_rest().await;
    });
}

#[test]
fn what_a_busy_replica_asks_for_is_heeded() {
    run(async {
        let busy = Upstream::start("m", |_| {
            let headers = [("retry-after", "20"), ("content-type", "application/json")];
            answer_with(429, &headers, b"{}")
        })
        .await;
        let good = Upstream::start("m", |_| json("{}")).await;
        let weir = Weir::start(&fleet_of(&[&busy, &good], "")).await;
        for id in ["r0", "r1"] {
            weir.wait_for_state(id, "up").await;
        }
        for _ in 0..30 {
            weir.chat("m", false).await.expect(200);
        }
        assert_eq!(busy.count(), 1, "it asked for 20 seconds");
        assert_eq!(weir.replica("r0").await.unwrap()["state"], "cooling_off");
    });
}

#[test]
fn a_request_that_makes_engines_fail_is_not_tried_everywhere_and_takes_nobody_out() {
    run(async {
        let script = |seen: &crate::kit::Seen| match seen.text().contains("poison") {
            true => answer(500, r#"{"error":{"message":"boom"}}"#),
            false => json("{}"),
        };
        let replicas = [
            Upstream::start("m", script).await,
            Upstream::start("m", script).await,
            Upstream::start("m", script).await,
        ];
        let weir = Weir::start(&fleet_of(&replicas.each_ref(), "")).await;
        for id in ["r0", "r1", "r2"] {
            weir.wait_for_state(id, "up").await;
        }
        for _ in 0..60 {
            let before: usize = replicas.iter().map(Upstream::count).sum();
            let reply = weir.post(CHAT, r#"{"model":"m","x":"poison"}"#).await;
            assert_eq!((reply.status, reply.text().contains("boom")), (500, true));
            let after: usize = replicas.iter().map(Upstream::count).sum();
            assert_eq!(after, before + 1, "the engine's answer is the answer");
        }
        // When everybody looks bad it is the requests: all serve.
        for _ in 0..6 {
            weir.chat("m", false).await.expect(200);
        }
    });
}

#[test]
fn retries_of_all_requests_together_are_bounded() {
    run(async {
        let busy = |_: &crate::kit::Seen| answer(503, "{}");
        let a = Upstream::start("m", busy).await;
        let b = Upstream::start("m", busy).await;
        let c = Upstream::start("m", busy).await;
        let tight = "{proxy: {retry: {budget: {ratio: 0.1, min_per_second: 0, burst: 5}}}}";
        let mut weir = Weir::start(&fleet_of(&[&a, &b, &c], tight)).await;
        for id in ["r0", "r1", "r2"] {
            weir.wait_for_state(id, "up").await;
        }
        for _ in 0..50 {
            assert_eq!(weir.chat("m", false).await.status, 503);
        }
        let starts = a.count() + b.count() + c.count();
        assert!(starts <= 50 + 5 + 5 + 1, "{starts} starts for 50 requests");
        let metrics = weir.metrics().await;
        assert!(metrics.sum("weir_retries_total", &[]) <= 11.0);
        weir.assert_at_rest().await;
    });
}

#[test]
fn garbage_from_an_engine_is_a_502_and_never_passed_on() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            vec![Act::Write(b"SSH-2.0-OpenSSH_9\r\n\r\n".to_vec()), Act::Fin]
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            let reply = way.send(weir.address, &Request::post(CHAT, chat("m", false))).await;
            reply.expect_refusal(502);
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_answer_before_the_upload_is_read_reaches_the_client() {
    run(async {
        for fault in ["early=drain,status=413", "early=close,status=413"] {
            let engine = Engine::start("m");
            let mut weir = Weir::start(&fleet(&[engine.url()], "")).await;
            let body = format!(
                r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}]}}"#,
                "x".repeat(3 << 20)
            );
            for way in Way::PROTOCOLS {
                let request = Request::post(CHAT, &body).header("x-sim-fault", fault);
                let reply = way.send(weir.address, &request).await;
                assert!([413, 502].contains(&reply.status), "{way:?} {fault}: {reply:?}");
            }
            weir.assert_at_rest().await;
        }
    });
}

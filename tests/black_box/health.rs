//! Probes: who counts as well, how often it is asked, and how little it disturbs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::kit::{
    Act, Request, Upstream, Weir, answer_with, fleet, fleet_of, free_address, json, run, sse,
    sse_head, until,
};

const PROBES: &str = "{fleet: {probe: {every: 100ms, timeout: 200ms, down_every_max: 200ms}}}";
const MODELS: &str = r#"{"object":"list","data":[{"id":"m","object":"model"}]}"#;

#[test]
fn a_busy_engine_is_not_a_dead_one() {
    run(async {
        // 0: well, 1: its health check is slow, 2: it says it is not well.
        let mood = Arc::new(AtomicUsize::new(0));
        let shown = Arc::clone(&mood);
        let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let upstream = Upstream::at(anywhere, &[], move |seen| match seen.target.as_str() {
            "/health" => match shown.load(Ordering::Relaxed) {
                0 => answer_with(200, &[], b""),
                1 => {
                    let mut acts = vec![Act::Pause(Duration::from_secs(2))];
                    acts.extend(answer_with(200, &[], b""));
                    acts
                }
                _ => answer_with(503, &[], b""),
            },
            "/v1/models" => json(MODELS),
            _ => {
                let mut acts = vec![sse_head()];
                for _ in 0..40 {
                    acts.extend([sse("data: {}\n\n"), Act::Pause(Duration::from_millis(50))]);
                }
                acts.push(Act::Write(b"0\r\n\r\n".to_vec()));
                acts
            }
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], PROBES)).await;
        mood.store(1, Ordering::Relaxed);
        // For two seconds bytes flow while every probe comes too late.
        let stream = weir.chat("m", true);
        let watch = async {
            for _ in 0..15 {
                assert_eq!(weir.replica("r0").await.unwrap()["state"], "up");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let (reply, ()) = tokio::join!(stream, watch);
        reply.expect(200);
        assert_eq!(weir.replica("r0").await.unwrap()["state"], "up");

        mood.store(2, Ordering::Relaxed);
        let began = Instant::now();
        weir.wait_for_state("r0", "down").await;
        assert!(began.elapsed() < Duration::from_secs(5));
        weir.chat("m", false).await.expect_refusal(503);
        mood.store(0, Ordering::Relaxed);
        weir.wait_for_state("r0", "up").await;
        weir.chat("m", true).await.expect(200);
    });
}

#[test]
fn a_probe_asks_for_health_and_never_for_a_generation() {
    run(async {
        let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let upstream = Upstream::at(anywhere, &[], |seen| match seen.target.as_str() {
            "/v1/models" => json(MODELS),
            _ => answer_with(200, &[], b""),
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], PROBES)).await;
        upstream.wait_for(8).await;
        for seen in upstream.seen() {
            assert_eq!(seen.method, "GET");
            let questions = ["/health", "/is_sleeping", "/v1/models"];
            assert!(questions.contains(&seen.target.as_str()), "{}", seen.target);
            assert_eq!(seen.body, b"");
        }
        drop(weir);
    });
}

#[test]
fn an_outage_is_told_once_for_each_replica_and_not_once_for_each_probe() {
    run(async {
        let mut upstreams = Vec::new();
        for _ in 0..5 {
            upstreams.push(Upstream::start("m", |_| json("{}")).await);
        }
        let refs: Vec<_> = upstreams.iter().collect();
        let weir = Weir::start(&fleet_of(&refs, PROBES)).await;
        for number in 0..5 {
            weir.wait_for_state(&format!("r{number}"), "up").await;
        }
        for upstream in &mut upstreams {
            upstream.stop().await;
        }
        for number in 0..5 {
            weir.wait_for_state(&format!("r{number}"), "down").await;
        }
        for _ in 0..50 {
            weir.chat("m", false).await.expect_refusal(503);
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let log = weir.log();
        let lines: Vec<_> = log.lines().filter(|line| !line.starts_with('{')).collect();
        for number in 0..5 {
            let id = format!("replica=r{number}");
            let down = lines.iter().filter(|line| {
                line.contains(&id) && line.contains("down") && line.contains("WARN")
            });
            assert_eq!(down.count(), 1, "{log}");
        }
        assert!(lines.len() < 60, "{} lines:\n{log}", lines.len());
    });
}

#[test]
fn a_list_of_models_that_never_comes_holds_up_nobody() {
    run(async {
        let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let upstream = Upstream::at(anywhere, &[], move |seen| match seen.target.as_str() {
            "/health" => answer_with(200, &[], b""),
            "/v1/models" if count.fetch_add(1, Ordering::Relaxed) == 0 => json(MODELS),
            "/v1/models" => vec![Act::Stall],
            _ => json("{}"),
        })
        .await;
        let hung = Upstream::at(anywhere, &[], |_| vec![Act::Stall]).await;
        let often = "{fleet: {probe: {models_every: 100ms}}}";
        let weir = Weir::start(&fleet_of(&[&upstream, &hung], often)).await;
        until("the list is asked for again", async || {
            (1 < asked.load(Ordering::Relaxed)).then_some(())
        })
        .await;
        let mut raw = weir.connect().await;
        for _ in 0..100 {
            let began = Instant::now();
            let body = r#"{"model":"m"}"#;
            raw.send(&Request::post("/v1/chat/completions", body)).await.expect(200);
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        }
    });
}

#[test]
fn a_fleet_without_replicas_is_alive_and_not_ready() {
    run(async {
        let weir = Weir::start_live(&fleet(&[], "")).await;
        assert_eq!(weir.get("/ready").await.status, 503);
        let list = weir.get("/v1/models").await.expect(200).json();
        assert_eq!(list["data"].as_array().unwrap().len(), 0);
        let status = weir.chat("m", false).await.status;
        assert!([404, 503].contains(&status), "{status}");
    });
}

#[test]
fn an_address_where_nothing_ever_listened_is_shown_with_its_reason() {
    run(async {
        let dead = free_address();
        let weir = Weir::start_live(&fleet(&[format!("http://{dead}")], "")).await;
        weir.wait_for_state("r0", "down").await;
        let replica = weir.replica("r0").await.unwrap();
        assert!(!replica["reason"].as_str().unwrap().is_empty(), "{replica}");
        let metrics = weir.metrics().await;
        assert_eq!(metrics.sum("weir_replica_up", &[("replica", "r0")]), 0.0);
        assert!(0.0 < metrics.sum("weir_probes_total", &[("result", "unreachable")]));
    });
}

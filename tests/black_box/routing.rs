//! Which replica is chosen, seen from the replicas' side.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::Notify;

use crate::kit::{Act, Request, Seen, Upstream, Weir, fleet_of, json, run, until};

const CHAT: &str = "/v1/chat/completions";

async fn all_up(weir: &Weir, count: usize) {
    for number in 0..count {
        weir.wait_for_state(&format!("r{number}"), "up").await;
    }
}

/// Upstreams that answer when the test says so.
async fn waiting(count: usize, go: &Arc<Notify>) -> Vec<Upstream> {
    let mut upstreams = Vec::new();
    for _ in 0..count {
        let go = Arc::clone(go);
        let script = move |_: &Seen| {
            let mut acts = vec![Act::Wait(Arc::clone(&go))];
            acts.extend(json("{}"));
            acts
        };
        upstreams.push(Upstream::start("m", script).await);
    }
    upstreams
}

fn total(upstreams: &[Upstream]) -> usize {
    upstreams.iter().map(Upstream::count).sum()
}

#[test]
fn a_burst_is_spread_though_nobody_has_answered_yet() {
    run(async {
        for (policy, slack) in [("least_load", 1), ("round_robin", 1), ("power_of_two", 6)] {
            for path in [CHAT, "/v1/completions", "/tokenize", "/v1/messages"] {
                let go = Arc::new(Notify::new());
                let upstreams = waiting(4, &go).await;
                let refs: Vec<_> = upstreams.iter().collect();
                let sections = format!("{{routing: {{policy: {policy}}}}}");
                let mut weir = Weir::start(&fleet_of(&refs, &sections)).await;
                all_up(&weir, 4).await;
                let address = weir.address;
                let clients: Vec<_> = (0..32)
                    .map(|_| {
                        let request = Request::post(path, r#"{"model":"m","messages":[]}"#);
                        tokio::spawn(async move { request.send(address).await })
                    })
                    .collect();
                until("all have begun", async || (total(&upstreams) == 32).then_some(())).await;
                for upstream in &upstreams {
                    let count = upstream.count();
                    assert!(count.abs_diff(8) <= slack, "{policy} {path}: {count} of 32");
                }
                let gauge = weir.metrics().await.sum("weir_replica_in_flight_requests", &[]);
                assert_eq!(gauge, 32.0);
                while total(&upstreams) == 32 && clients.iter().any(|one| !one.is_finished()) {
                    go.notify_waiters();
                    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                }
                for client in clients {
                    client.await.unwrap().expect(200);
                }
                weir.assert_at_rest().await;
            }
        }
    });
}

#[test]
fn a_session_stays_at_home_and_a_hot_one_does_not_drown_it() {
    run(async {
        let go = Arc::new(Notify::new());
        let upstreams = waiting(4, &go).await;
        let refs: Vec<_> = upstreams.iter().collect();
        let sections = "{routing: {policy: session, session: {headers: [x-user-id]}}}";
        let weir = Weir::start(&fleet_of(&refs, sections)).await;
        all_up(&weir, 4).await;
        let address = weir.address;
        let mut clients = Vec::new();
        for number in 0..120 {
            let key = if number % 10 < 6 { "hot".to_owned() } else { format!("light-{number}") };
            let request = Request::post(CHAT, r#"{"model":"m"}"#).header("X-User-Id", key);
            clients.push(tokio::spawn(async move { request.send(address).await }));
            if number % 10 == 9 {
                until("they have begun", async || (total(&upstreams) == number + 1).then_some(()))
                    .await;
            }
        }
        for upstream in &upstreams {
            let count = upstream.count();
            assert!(count <= 38 + 1, "above 1.25 times the mean: {count} of 120");
        }
        while clients.iter().any(|client| !client.is_finished()) {
            go.notify_waiters();
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    });
}

#[test]
fn the_same_key_leads_to_the_same_replica_through_every_weir() {
    run(async {
        let mut upstreams = Vec::new();
        for _ in 0..4 {
            upstreams.push(Upstream::start("m", |_| json("{}")).await);
        }
        let refs: Vec<_> = upstreams.iter().collect();
        let sections = "{routing: {policy: session}}";
        let first = Weir::start(&fleet_of(&refs, sections)).await;
        let second = Weir::start(&fleet_of(&refs, sections)).await;
        all_up(&first, 4).await;
        all_up(&second, 4).await;
        for round in 0..3 {
            for number in 0..24 {
                let weir = if (round + number) % 2 == 0 { &first } else { &second };
                let request = match number % 3 {
                    0 => Request::post(CHAT, r#"{"model":"m"}"#)
                        .header("X-Session-Id", format!("k{number}")),
                    1 => Request::post(CHAT, format!(r#"{{"model":"m","user":"k{number}"}}"#)),
                    _ => Request::post(
                        CHAT,
                        format!(r#"{{"metadata":{{"session_id":"k{number}"}},"model":"m"}}"#),
                    ),
                };
                let request = request.header("X-Key", format!("k{number}"));
                request.send(weir.address).await.expect(200);
            }
        }
        let mut homes: HashMap<String, Vec<usize>> = HashMap::new();
        for (place, upstream) in upstreams.iter().enumerate() {
            for seen in upstream.seen() {
                homes.entry(seen.headers.one("x-key").unwrap()).or_default().push(place);
            }
        }
        assert_eq!(homes.len(), 24);
        for (key, places) in homes {
            assert_eq!(places.len(), 3);
            assert!(places.iter().all(|place| *place == places[0]), "{key}: {places:?}");
        }
    });
}

#[test]
fn no_key_is_no_session() {
    run(async {
        let mut upstreams = Vec::new();
        for _ in 0..4 {
            upstreams.push(Upstream::start("m", |_| json("{}")).await);
        }
        let refs: Vec<_> = upstreams.iter().collect();
        let weir = Weir::start(&fleet_of(&refs, "{routing: {policy: session}}")).await;
        all_up(&weir, 4).await;
        for number in 0..80 {
            let request = match number % 2 {
                0 => Request::post(CHAT, r#"{"model":"m","user":""}"#),
                _ => Request::post(CHAT, r#"{"model":"m"}"#).header("X-Session-Id", " "),
            };
            request.send(weir.address).await.expect(200);
        }
        for upstream in &upstreams {
            let count = upstream.count();
            assert!((15..=25).contains(&count), "{count} of 80 on one of four");
        }
    });
}

#[test]
fn weights_are_heeded() {
    run(async {
        let go = Arc::new(Notify::new());
        let upstreams = waiting(2, &go).await;
        let sections = format!(
            "{{fleet: {{replicas: [{{id: r0, url: '{}', weight: 3}}, {{id: r1, url: '{}'}}]}}}}",
            upstreams[0].url(),
            upstreams[1].url()
        );
        let weir = Weir::start(&sections).await;
        all_up(&weir, 2).await;
        let address = weir.address;
        let clients: Vec<_> = (0..32)
            .map(|_| {
                let request = Request::post(CHAT, r#"{"model":"m"}"#);
                tokio::spawn(async move { request.send(address).await })
            })
            .collect();
        until("all have begun", async || (total(&upstreams) == 32).then_some(())).await;
        let heavy = upstreams[0].count();
        assert!((22..=26).contains(&heavy), "{heavy} of 32 on the one with three quarters");
        drop(clients);
    });
}

#[test]
fn a_drained_replica_finishes_its_work_and_gets_no_more() {
    run(async {
        let go = Arc::new(Notify::new());
        let upstreams = waiting(2, &go).await;
        let refs: Vec<_> = upstreams.iter().collect();
        let mut weir = Weir::start(&fleet_of(&refs, "")).await;
        all_up(&weir, 2).await;
        let address = weir.address;
        let send = || {
            let request = Request::post(CHAT, r#"{"model":"m"}"#);
            tokio::spawn(async move { request.send(address).await })
        };
        let mut clients = vec![send(), send()];
        until("both work", async || (total(&upstreams) == 2).then_some(())).await;
        weir.admin_post("/replicas/r0/drain").await.expect(200);
        weir.wait_for_state("r0", "draining").await;
        clients.extend((0..6).map(|_| send()));
        until("the others have begun", async || (total(&upstreams) == 8).then_some(())).await;
        assert_eq!(upstreams[0].count(), 1, "no new request while it drains");
        assert_eq!(weir.replica("r0").await.unwrap()["in_flight"], 1);
        let release = Arc::clone(&go);
        let releasing = tokio::spawn(async move {
            loop {
                release.notify_waiters();
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        });
        for client in clients {
            client.await.unwrap().expect(200);
        }
        weir.admin_post("/replicas/r0/undrain").await.expect(200);
        until("it is back", async || {
            weir.chat("m", false).await.expect(200);
            (1 < upstreams[0].count()).then_some(())
        })
        .await;
        assert_eq!(weir.admin_post("/replicas/nope/drain").await.status, 404);
        releasing.abort();
        weir.assert_at_rest().await;
    });
}

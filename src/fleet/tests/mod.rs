//! The fleet against small engines over real sockets: what it promises about probes, models,
//! choices, reloads and draining.

mod engine;
mod tls;

use std::collections::BTreeMap;
use std::time::Duration;

use super::health::Verdict;
use super::*;
use crate::names::{ModelName, Tokens};
use crate::routing::{self, Choice, Policy, Question};
use engine::Engine;

/// Probes every few milliseconds, so that tests need not wait.
fn quick() -> Options {
    let every = Duration::from_millis(50);
    let probe = ProbeOptions {
        every,
        timeout: Duration::from_secs(1),
        down_every_max: every,
        models_every: every,
        models_retry: every,
        ..ProbeOptions::default()
    };
    Options { probe, ..Options::default() }
}

fn at(url: impl Into<String>) -> ReplicaOptions {
    ReplicaOptions { url: url.into(), ..ReplicaOptions::default() }
}

fn of(engines: &[&Engine]) -> Options {
    Options { replicas: engines.iter().map(|engine| at(engine.url())).collect(), ..quick() }
}

fn metrics() -> Arc<Metrics> {
    Metrics::new(clock::date()).unwrap()
}

fn build(options: &Options, previous: Option<&Fleet>, metrics: &Arc<Metrics>) -> Arc<Fleet> {
    assert_eq!(options.faults(), []);
    Fleet::new(options, &SlowStartOptions::default(), previous, Arc::clone(metrics)).unwrap()
}

fn started(options: &Options) -> Arc<Fleet> {
    let fleet = build(options, None, &metrics());
    fleet.start(&Handle::current());
    fleet
}

/// Waits for something that must come true soon.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1_000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("never came true: {what}");
}

fn pool(fleet: &Fleet, model: &str) -> Arc<Pool> {
    match fleet.resolve(Some(model)) {
        Resolved::Pool { pool, .. } => pool,
        other => panic!("{model}: {other:?}"),
    }
}

fn live(fleet: &Fleet, model: &str) -> usize {
    match fleet.resolve(Some(model)) {
        Resolved::Pool { pool, .. } => {
            pool.replicas().iter().filter(|one| one.state().can_serve()).count()
        }
        _ => 0,
    }
}

fn policy() -> Box<dyn Policy> {
    routing::build(&routing::Options::default()).unwrap()
}

fn choose(pool: &Pool, tried: &[ReplicaId]) -> Option<(Lease, Choice)> {
    let now = clock::now();
    let dice = fastrand::u64(..);
    let tokens_estimated = Tokens(0);
    let mut question = Question { session_key: None, tokens_estimated, dice, rotation: 0, now };
    pool.choose(policy().as_ref(), &mut question, tried, now)
}

fn report(lease: &Lease, outcome: Outcome) {
    lease.report(outcome, clock::now(), 0);
}

fn snapshot(fleet: &Fleet, id: &str) -> serde_json::Value {
    let whole = serde_json::to_value(fleet.snapshot(clock::now())).unwrap();
    whole["replicas"].as_array().unwrap().iter().find(|one| one["id"] == id).unwrap().clone()
}

#[tokio::test]
async fn a_replica_serves_after_its_first_good_probe_and_not_before() {
    let engine = Engine::start(&["m"]).await;
    engine.set_health(503);
    let fleet = started(&of(&[&engine]));
    until("probed", || 3 < engine.count("/health")).await;
    assert!(!fleet.ready());
    assert_eq!(engine.count("/v1/models"), 0, "nobody is asked for models before it is well");
    assert!(matches!(fleet.resolve(Some("m")), Resolved::NoReplica { .. }), "it may exist");
    engine.set_health(200);
    until("up", || fleet.ready()).await;
    assert!(choose(&pool(&fleet, "m"), &[]).is_some());
    assert_eq!(snapshot(&fleet, &engine.id())["state"], "up");
}

#[tokio::test]
async fn a_fleet_starts_with_nobody_there_and_takes_who_comes() {
    let port = engine::free_port().await;
    let mut options = quick();
    options.replicas = vec![at(format!("http://127.0.0.1:{port}")), at("http://name.invalid:1")];
    let fleet = started(&options);
    let id = format!("127.0.0.1:{port}");
    until("found to be down", || snapshot(&fleet, &id)["state"] == "down").await;
    assert!(!fleet.ready() && fleet.idle());
    let _engine = Engine::start_at(port, &["m"]).await;
    until("up", || live(&fleet, "m") == 1).await;
    assert_eq!(snapshot(&fleet, "name.invalid:1")["state"], "unresolved");
}

#[tokio::test]
async fn an_empty_fleet_is_a_fleet() {
    let fleet = started(&quick());
    assert!(matches!(fleet.resolve(Some("m")), Resolved::NoReplica { .. }));
    assert!(matches!(fleet.resolve(None), Resolved::NoReplica { model: None }));
    assert_eq!(&fleet.models()[..], br#"{"object":"list","data":[]}"#);
}

#[tokio::test]
async fn names_are_compared_byte_for_byte_and_unknown_ones_are_told() {
    let engines = [Engine::start(&["org/a"]).await, Engine::start(&["b"]).await];
    let fleet = started(&of(&[&engines[0], &engines[1]]));
    until("both up", || live(&fleet, "org/a") + live(&fleet, "b") == 2).await;
    for name in ["B", "b ", "org/a/", "", "a"] {
        let Resolved::Unknown { known } = fleet.resolve(Some(name)) else { panic!("{name}") };
        assert_eq!(known.len(), 2);
        assert!(fleet.model(name).is_none(), "the list and the 404 agree");
    }
    assert!(matches!(fleet.resolve(None), Resolved::NeedsModel { .. }));
    assert!(fleet.model("org/a").is_some());
}

#[tokio::test]
async fn the_only_model_needs_no_name() {
    let engine = Engine::start(&["m"]).await;
    let fleet = started(&of(&[&engine]));
    until("up", || live(&fleet, "m") == 1).await;
    let Resolved::Pool { model, rewrite, .. } = fleet.resolve(None) else { panic!() };
    assert_eq!((model.as_str(), rewrite), ("m", None));
}

#[tokio::test]
async fn an_alias_leads_to_its_model_and_is_listed() {
    let engine = Engine::start(&["org/m"]).await;
    let mut options = of(&[&engine]);
    let alias = |(name, target): (&str, &str)| (ModelName::new(name), ModelName::new(target));
    options.aliases = BTreeMap::from([("gpt", "org/m"), ("g", "gpt"), ("later", "x")].map(alias));
    let fleet = started(&options);
    until("up", || live(&fleet, "org/m") == 1).await;
    for name in ["gpt", "g"] {
        let Resolved::Pool { model, rewrite, .. } = fleet.resolve(Some(name)) else { panic!() };
        assert_eq!((model.as_str(), rewrite.as_ref().unwrap().as_str()), ("org/m", "org/m"));
    }
    assert!(matches!(fleet.resolve(Some("later")), Resolved::NoReplica { .. }));
    let cards = models::read(&fleet.models()).unwrap();
    let ids: Vec<_> = cards.iter().map(|card| card.id.as_str()).collect();
    assert_eq!(ids, ["org/m", "g", "gpt"]);
    assert_eq!(fleet.model("g").unwrap(), cards[1].json.as_bytes());
    options.list_aliases = false;
    let fleet = build(&options, Some(&fleet), &metrics());
    assert_eq!(models::read(&fleet.models()).unwrap().len(), 1);
    assert!(fleet.model("gpt").is_some(), "unlisted, but not unknown");
}

#[tokio::test]
async fn an_adapter_is_served_where_it_is_loaded_and_gone_when_unloaded() {
    let engines = [Engine::start(&["base"]).await, Engine::start(&["base"]).await];
    let fleet = started(&of(&[&engines[0], &engines[1]]));
    until("both up", || live(&fleet, "base") == 2).await;
    assert!(matches!(fleet.resolve(Some("ad1")), Resolved::Unknown { .. }));
    engines[0].set_models(&["base", "ad1"]);
    until("loaded", || live(&fleet, "ad1") == 1).await;
    let (lease, _) = choose(&pool(&fleet, "ad1"), &[]).unwrap();
    assert_eq!(lease.id().as_str(), engines[0].id());
    engines[0].set_models(&["base"]);
    until("unloaded", || matches!(fleet.resolve(Some("ad1")), Resolved::Unknown { .. })).await;
}

#[tokio::test]
async fn a_model_whose_replicas_are_down_is_still_known() {
    let engine = Engine::start(&["m"]).await;
    let other = Engine::start(&["other"]).await;
    let fleet = started(&of(&[&engine, &other]));
    until("up", || live(&fleet, "m") == 1 && live(&fleet, "other") == 1).await;
    engine.stop();
    until("down", || live(&fleet, "m") == 0).await;
    let pool = pool(&fleet, "m");
    assert!(!pool.live() && choose(&pool, &[]).is_none() && !pool.any_untried(&[], clock::now()));
    assert!(fleet.model("m").is_some() && fleet.ready());
}

#[tokio::test]
async fn a_model_of_the_config_is_known_before_anybody_is_there() {
    let mut options = quick();
    let fixed = ReplicaOptions { models: vec!["m".into()], ..at("http://127.0.0.1:9") };
    options.replicas = vec![fixed];
    let fleet = build(&options, None, &metrics());
    assert!(choose(&pool(&fleet, "m"), &[]).is_none());
    assert!(matches!(fleet.resolve(Some("n")), Resolved::Unknown { .. }));
    let card: serde_json::Value = serde_json::from_slice(&fleet.model("m").unwrap()).unwrap();
    assert_eq!((&card["id"], &card["owned_by"]), (&"m".into(), &"vllm".into()));
}

#[tokio::test]
async fn a_burst_sees_its_own_load() {
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(Engine::start(&["m"]).await);
    }
    let fleet = started(&of(&engines.iter().collect::<Vec<_>>()));
    until("all up", || live(&fleet, "m") == 4).await;
    let pool = pool(&fleet, "m");
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || -> Vec<Lease> {
                (0..8).map(|_| choose(&pool, &[]).unwrap().0).collect()
            })
        })
        .collect();
    let leases: Vec<_> = threads.into_iter().flat_map(|one| one.join().unwrap()).collect();
    let counts: Vec<_> = fleet.replicas().iter().map(|replica| replica.in_flight()).collect();
    assert_eq!(counts, [16; 4], "counted in the same step as the choice");
    assert!(!fleet.idle() && fleet.in_flight() == 64);
    drop(leases);
    assert!(fleet.idle(), "given back by being dropped");
}

#[tokio::test]
async fn a_tried_replica_is_left_out() {
    let engines = [Engine::start(&["m"]).await, Engine::start(&["m"]).await];
    let fleet = started(&of(&[&engines[0], &engines[1]]));
    until("both up", || live(&fleet, "m") == 2).await;
    let pool = pool(&fleet, "m");
    let (first, _) = choose(&pool, &[]).unwrap();
    let tried = [first.id().clone()];
    for _ in 0..20 {
        assert_ne!(choose(&pool, &tried).unwrap().0.id(), first.id());
    }
    let all = [engines[0].id(), engines[1].id()].map(ReplicaId::new);
    assert!(choose(&pool, &all).is_none() && !pool.any_untried(&all, clock::now()));
}

#[tokio::test]
async fn failures_eject_a_replica_and_one_trial_at_a_time_brings_it_back() {
    let engines = [Engine::start(&["m"]).await, Engine::start(&["m"]).await];
    let mut options = of(&[&engines[0], &engines[1]]);
    options.breaker.open_for = Duration::from_millis(100);
    let fleet = started(&options);
    until("both up", || live(&fleet, "m") == 2).await;
    let pool = pool(&fleet, "m");
    let bad = ReplicaId::new(engines[0].id());
    let good = [ReplicaId::new(engines[1].id())];
    for _ in 0..3 {
        report(&choose(&pool, &good).unwrap().0, Outcome::Reset);
    }
    assert_eq!(snapshot(&fleet, bad.as_str())["state"], "ejected");
    for _ in 0..10 {
        assert_ne!(*choose(&pool, &[]).unwrap().0.id(), bad);
    }
    until("trial due", || snapshot(&fleet, bad.as_str())["state"] == "on_trial").await;
    let idle_first = |pool: &Pool| choose(pool, &good).unwrap().0;
    let trial = idle_first(&pool);
    let held: Vec<_> = (0..6).map(|_| choose(&pool, &[]).unwrap().0).collect();
    assert!(held.iter().all(|lease| *lease.id() != bad), "one trial at a time");
    drop(trial);
    let trial = idle_first(&pool);
    assert_eq!(*trial.id(), bad, "a trial that is dropped is free again");
    trial.answering(clock::now());
    assert_eq!(snapshot(&fleet, bad.as_str())["state"], "up", "long before its stream ends");
}

#[tokio::test]
async fn a_replica_that_asked_for_a_pause_serves_only_for_want_of_others() {
    let engines = [Engine::start(&["m"]).await, Engine::start(&["m"]).await];
    let fleet = started(&of(&[&engines[0], &engines[1]]));
    until("both up", || live(&fleet, "m") == 2).await;
    let pool = pool(&fleet, "m");
    let (busy, _) = choose(&pool, &[]).unwrap();
    report(&busy, Outcome::Backpressure { retry_after: Some(Duration::from_secs(5)) });
    let held: Vec<_> = (0..5).map(|_| choose(&pool, &[]).unwrap().0).collect();
    assert!(held.iter().all(|lease| lease.id() != busy.id()));
    let (last, _) = choose(&pool, &[held[0].id().clone()]).unwrap();
    assert_eq!(last.id(), busy.id(), "better than nobody");
    assert_eq!(snapshot(&fleet, busy.id().as_str())["state"], "cooling_off");
}

#[tokio::test]
async fn a_slow_probe_delays_nobody_and_flowing_bytes_beat_it() {
    let (slow, well) = (Engine::start(&["m"]).await, Engine::start(&["m"]).await);
    let mut options = of(&[&slow, &well]);
    options.probe.timeout = Duration::from_millis(50);
    let fleet = started(&options);
    until("both up", || live(&fleet, "m") == 2).await;
    let state = Arc::clone(fleet.replica(&slow.id()).unwrap().state());
    let (lease, _) = choose(&pool(&fleet, "m"), &[ReplicaId::new(well.id())]).unwrap();
    slow.hang(true);
    let (slow_before, well_before) = (slow.count("/health"), well.count("/health"));
    until("probed on", || {
        lease.alive(clock::now());
        slow_before + 5 < slow.count("/health") && well_before + 5 < well.count("/health")
    })
    .await;
    assert_eq!(state.health().verdict(), Verdict::Up, "a busy engine is not a dead one");
    slow.set_health(503);
    slow.hang(false);
    until("down", || live(&fleet, "m") == 1).await;
}

#[tokio::test]
async fn a_drained_replica_gets_nothing_new_from_that_moment_on() {
    let engine = Engine::start(&["m"]).await;
    let options = of(&[&engine]);
    let metrics = metrics();
    let fleet = build(&options, None, &metrics);
    fleet.start(&Handle::current());
    until("up", || live(&fleet, "m") == 1).await;
    let pool_now = pool(&fleet, "m");
    let (lease, _) = choose(&pool_now, &[]).unwrap();
    fleet.drain(&engine.id(), Draining::On).unwrap();
    assert!(choose(&pool_now, &[]).is_none() && !fleet.ready());
    assert_eq!(lease.in_flight(), 1, "what runs goes on");
    let reloaded = build(&options, Some(&fleet), &metrics);
    reloaded.start(&Handle::current());
    let probes = engine.count("/health");
    until("probed on", || probes + 3 < engine.count("/health")).await;
    assert_eq!(snapshot(&reloaded, &engine.id())["state"], "draining");
    reloaded.drain(&engine.id(), Draining::Off).unwrap();
    until("serves again", || reloaded.ready()).await;
    assert!(matches!(fleet.drain("x", Draining::On), Err(FleetError::UnknownReplica(_))));
}

#[tokio::test]
async fn thirty_reloads_leave_one_prober_and_keep_what_is_known() {
    let engines =
        [Engine::start(&["m"]).await, Engine::start(&["m"]).await, Engine::start(&["m"]).await];
    let [a, b, c] = &engines;
    let metrics = metrics();
    let mut fleet = build(&of(&[a, b]), None, &metrics);
    fleet.start(&Handle::current());
    until("both up", || live(&fleet, "m") == 2).await;
    let (lease, _) = choose(&pool(&fleet, "m"), &[ReplicaId::new(a.id())]).unwrap();
    for round in 0..30 {
        let options = if round % 2 == 0 { of(&[b, c]) } else { of(&[a, b]) };
        let next = build(&options, Some(&fleet), &metrics);
        assert_eq!(next.replica(&b.id()).unwrap().in_flight(), 1, "counts go on");
        assert!(choose(&pool(&next, "m"), &[]).is_some(), "no gap: B never went away");
        next.start(&Handle::current());
        fleet = next;
    }
    let next = build(&of(&[b, c]), Some(&fleet), &metrics);
    next.start(&Handle::current());
    drop(fleet);
    until("both up", || live(&next, "m") == 2).await;
    assert!(!metrics.encode().contains(&a.id()), "no series of what is gone");
    let (began, before) = (clock::now(), [a, b, c].map(|engine| engine.count("/health")));
    let probes = || [0, 1, 2].map(|i| engines[i].count("/health") - before[i]);
    until("probed on", || probes()[1..].iter().all(|count| 6 < *count)).await;
    let most = (clock::now() - began).as_millis() / 40 + 2;
    assert_eq!(probes()[0], 0, "nobody asks for what is gone");
    assert!(probes().iter().all(|count| (*count as u128) <= most), "{:?} of {most}", probes());
    drop(lease);
    assert_eq!(next.in_flight(), 0);
}

#[tokio::test]
async fn two_replicas_at_one_address_stay_two_and_prefix_and_key_reach_the_probes() {
    let engine = Engine::start(&["m"]).await;
    engine.require_key("Bearer k-alpha");
    let mut options = quick();
    let keyed = |prefix: &str| ReplicaOptions {
        api_key: Some(Secret::plain("k-alpha")),
        ..at(format!("{}{prefix}", engine.url()))
    };
    options.replicas = vec![keyed("/m1/v1/"), keyed("/m2"), at(format!("{}/m3", engine.url()))];
    let fleet = started(&options);
    until("two up", || live(&fleet, "m") == 2).await;
    assert!(0 < engine.count("/m1/health") && 0 < engine.count("/m2/v1/models"));
    let keyless = format!("{}/m3", engine.id());
    until("told", || !snapshot(&fleet, &keyless)["models_trouble"].is_null()).await;
    let told = snapshot(&fleet, &keyless);
    assert_eq!(told["models_trouble"], "status 401 with no `api_key`");
    let whole = serde_json::to_string(&fleet.snapshot(clock::now())).unwrap();
    assert!(!whole.contains("k-alpha"), "a key is never shown");
    let (lease, _) = choose(&pool(&fleet, "m"), &[]).unwrap();
    assert_eq!(lease.authority(), engine.id(), "the Host header is the URL's");
}

#[tokio::test]
async fn a_name_is_looked_up_and_the_fleets_key_is_for_probes_only() {
    let engine = Engine::start(&["m"]).await;
    engine.require_key("Bearer k-fleet");
    let mut options = quick();
    options.api_key = Some(Secret::plain("k-fleet"));
    options.replicas = vec![at(format!("http://localhost:{}", engine.port()))];
    let fleet = started(&options);
    until("up", || live(&fleet, "m") == 1).await;
    let (lease, _) = choose(&pool(&fleet, "m"), &[]).unwrap();
    assert_eq!(lease.address().port(), engine.port());
    assert_eq!(lease.authority(), format!("localhost:{}", engine.port()));
    assert!(lease.api_key().is_none(), "traffic keeps the client's key");
}

#[tokio::test]
async fn http2_is_spoken_where_the_config_says_so() {
    let (address, asked) = engine::serve_http2(&["m"]).await;
    let mut options = quick();
    let url = format!("http://{address}");
    options.replicas = vec![ReplicaOptions { protocol: Protocol::Http2, ..at(url) }];
    let fleet = started(&options);
    until("up", || live(&fleet, "m") == 1).await;
    assert!(asked.lock().iter().all(|authority| *authority == address.to_string()));
}

#[tokio::test]
async fn a_request_for_no_model_goes_to_anybody_and_shows_no_series_before() {
    let engines = [Engine::start(&["a"]).await, Engine::start(&["b"]).await];
    let metrics = metrics();
    let fleet = build(&of(&[&engines[0], &engines[1]]), None, &metrics);
    fleet.start(&Handle::current());
    until("both up", || live(&fleet, "a") + live(&fleet, "b") == 2).await;
    let Resolved::Pool { pool, .. } = fleet.everyone() else { panic!() };
    let series = |engine: &Engine| format!("model=\"any\",replica=\"{}\"", engine.id());
    assert!(!metrics.encode().contains(&series(&engines[0])));
    let (one, _) = choose(&pool, &[]).unwrap();
    let (other, _) = choose(&pool, &[]).unwrap();
    assert_ne!(one.id(), other.id());
    assert!(metrics.encode().contains(&series(&engines[0])));
}

#[tokio::test]
async fn ipv6_is_spoken() {
    let Some(engine) = Engine::start_v6(&["m"]).await else { return };
    let fleet = started(&of(&[&engine]));
    until("up", || live(&fleet, "m") == 1).await;
    let id = format!("[::1]:{}", engine.port());
    assert_eq!(snapshot(&fleet, &id)["address"], *id);
}

#[tokio::test]
async fn a_sleeping_replica_gets_nothing_until_somebody_wakes_it() {
    let engine = Engine::start(&["m"]).await;
    engine.sleep(false);
    let fleet = started(&of(&[&engine]));
    until("up", || live(&fleet, "m") == 1).await;
    engine.sleep(true);
    until("asleep", || live(&fleet, "m") == 0).await;
    assert!(choose(&pool(&fleet, "m"), &[]).is_none());
    assert_eq!(snapshot(&fleet, &engine.id())["state"], "asleep");
    engine.sleep(false);
    until("awake", || live(&fleet, "m") == 1).await;
}

#[tokio::test]
async fn a_replica_that_cannot_sleep_is_asked_once_each_time_it_comes_up() {
    let engine = Engine::start(&["m"]).await;
    let fleet = started(&of(&[&engine]));
    for times in 1..3 {
        until("up", || live(&fleet, "m") == 1).await;
        let before = engine.count("/health");
        until("probed", || before + 5 < engine.count("/health")).await;
        assert_eq!(engine.count("/is_sleeping"), times);
        engine.set_health(500);
        until("down", || live(&fleet, "m") == 0).await;
        engine.set_health(200);
    }
}

#[tokio::test]
async fn a_replica_nobody_listens_at_is_gone_and_one_that_is_not_well_is_not() {
    let engine = Engine::start(&["m"]).await;
    let fleet = started(&of(&[&engine]));
    let replica = fleet.replica(&engine.id()).unwrap();
    until("up", || live(&fleet, "m") == 1).await;
    engine.set_health(500);
    until("down", || live(&fleet, "m") == 0).await;
    assert_eq!(replica.gone_since(), None);
    let before = clock::now();
    engine.stop();
    until("gone", || replica.gone_since().is_some()).await;
    // Moments are kept in whole milliseconds.
    assert!(before < replica.gone_since().unwrap() + Duration::from_millis(1));
    let _back = Engine::start_at(engine.port(), &["m"]).await;
    until("back", || live(&fleet, "m") == 1).await;
    assert_eq!(replica.gone_since(), None);
}

#[tokio::test]
async fn a_new_replica_warms_up_to_its_share() {
    let engine = Engine::start(&["m"]).await;
    let window = Duration::from_secs(100);
    let slow_start = SlowStartOptions { window, ..SlowStartOptions::default() };
    let fleet = Fleet::new(&of(&[&engine]), &slow_start, None, metrics()).unwrap();
    fleet.start(&Handle::current());
    until("up", || live(&fleet, "m") == 1).await;
    let replica = fleet.replica(&engine.id()).unwrap();
    let now = clock::now();
    assert!(replica.weight_now(now) < 0.2);
    assert_eq!(replica.weight_now(now + window * 2), 1.0);
}

#[tokio::test]
async fn without_probes_a_replica_serves_at_once() {
    let mut options = quick();
    options.probe.every = Duration::ZERO;
    let fixed = ReplicaOptions { models: vec!["m".into()], ..at("http://127.0.0.1:9") };
    options.replicas = vec![fixed];
    let fleet = started(&options);
    until("serves", || live(&fleet, "m") == 1).await;
}

#[tokio::test]
async fn turning_probes_off_puts_a_replica_that_was_down_into_service() {
    let engine = Engine::start(&["m"]).await;
    let mut options = of(&[&engine]);
    let metrics = metrics();
    let fleet = build(&options, None, &metrics);
    fleet.start(&Handle::current());
    until("up", || live(&fleet, "m") == 1).await;
    engine.set_health(500);
    until("down", || live(&fleet, "m") == 0).await;
    options.probe.every = Duration::ZERO;
    let next = build(&options, Some(&fleet), &metrics);
    next.start(&Handle::current());
    until("serves", || live(&next, "m") == 1).await;
}

#[tokio::test]
async fn what_is_known_stands_when_the_options_of_probes_change() {
    let engine = Engine::start(&["m"]).await;
    let mut options = of(&[&engine]);
    let metrics = metrics();
    let fleet = build(&options, None, &metrics);
    fleet.start(&Handle::current());
    until("up", || live(&fleet, "m") == 1).await;
    options.probe.successes_min = 3;
    options.breaker.failures_max = 1;
    let next = build(&options, Some(&fleet), &metrics);
    next.start(&Handle::current());
    let replica = next.replica(&engine.id()).unwrap();
    assert_eq!(replica.state().health().verdict(), Verdict::Up);
    report(&choose(&pool(&next, "m"), &[]).unwrap().0, Outcome::Reset);
    assert_eq!(snapshot(&next, &engine.id())["state"], "ejected", "the new options hold");
}

#[test]
fn a_choice_for_a_thousand_replicas_is_cheap() {
    let mut options = quick();
    options.replicas = (0..1000)
        .map(|n| ReplicaOptions {
            models: vec!["m".into()],
            ..at(format!("http://10.0.{}.{}:8000", n / 250, n % 250))
        })
        .collect();
    let fleet = build(&options, None, &metrics());
    for replica in fleet.replicas() {
        replica.state().set_ready(true);
    }
    let (pool, policy) = (pool(&fleet, "m"), policy());
    let began = clock::now();
    for _ in 0..100 {
        let now = clock::now();
        let tokens_estimated = Tokens(0);
        let mut question = Question {
            session_key: None,
            tokens_estimated,
            dice: fastrand::u64(..),
            rotation: 0,
            now,
        };
        assert!(pool.choose(policy.as_ref(), &mut question, &[], now).is_some());
    }
    let took = clock::now() - began;
    assert!(took < Duration::from_secs(1), "{took:?} for 100 choices, unoptimised");
}

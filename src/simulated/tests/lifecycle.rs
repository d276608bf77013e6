//! Clients that leave, servers that stop, die, refuse, sleep.

use super::*;

const CHAT: &str = "/v1/chat/completions";
const LONG: &str =
    r#"{"messages":[{"role":"user","content":"Hi"}],"max_tokens":5000,"ignore_eos":true"#;

#[tokio::test]
async fn a_client_that_leaves_takes_its_request_out_of_the_engine() {
    let server = start(Options::default());
    for (stream, reset) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut client = Client::to(&server).await;
        client.send(request(CHAT, "", &format!("{LONG},\"stream\":{stream}}}"))).await;
        eventually("it runs", || server.running() == 1).await;
        if reset {
            client.stream.set_zero_linger().unwrap();
        }
        let left = crate::clock::now();
        drop(client);
        eventually("it is gone", || server.running() == 0).await;
        eventually("it is logged", || server.log().iter().all(|r| r.ended.is_some())).await;
        let record = server.log().pop().unwrap();
        assert_eq!(record.ended, Some(Ended::PeerLeft));
        assert!(record.ended_at.unwrap().duration_since(left) < Duration::from_millis(500));
    }
    assert!(server.metrics().contains(r#"finished_reason="abort"} 0.0"#), "as in vLLM");
}

#[tokio::test]
async fn a_full_queue_answers_503_and_health_stays_well() {
    let mut options = Options::default();
    options.engine.sequences_max = 1;
    options.engine.queued_max = Some(1);
    let server = start(options);
    let mut clients = Vec::new();
    for waiting in [0, 1] {
        let mut client = Client::to(&server).await;
        client.send(request(CHAT, "", &format!("{LONG}}}"))).await;
        eventually("taken", || server.running() == 1 && server.waiting() == waiting).await;
        clients.push(client);
    }
    let mut client = Client::to(&server).await;
    let answer = client.post(CHAT, "", HELLO).await;
    assert_eq!((answer.status, answer.header("Retry-After")), (503, None));
    assert_eq!(client.get("/health").await.status, 200);
    assert!(server.metrics().contains(r#"reason="max_num_queued_reqs"} 1.0"#));
}

#[tokio::test]
async fn a_refusing_server_refuses_at_once_and_comes_back_at_the_same_address() {
    let server = start(quick());
    let mut old = Client::to(&server).await;
    assert_eq!(old.get("/health").await.status, 200, "accepted, so not in the listener's queue");
    for _ in 0..3 {
        server.faults().update(|faults| faults.refuse = true).unwrap();
        assert!(TcpStream::connect(server.addr()).await.is_err());
        assert_eq!(old.get("/health").await.status, 200, "open connections stay");
        server.faults().clear().unwrap();
        assert_eq!(Client::to(&server).await.get("/health").await.status, 200);
    }
}

#[tokio::test]
async fn a_killed_server_resets_everybody() {
    let server = start(Options::default());
    let mut streaming = Client::to(&server).await;
    streaming.send(request(CHAT, "", &format!("{LONG},\"stream\":true}}"))).await;
    streaming.until(b"role").await;
    let mut idle = Client::to(&server).await;
    assert_eq!(idle.get("/health").await.status, 200);
    server.kill();
    assert!(TcpStream::connect(server.addr()).await.is_err());
    assert!(streaming.rest().await.1, "a reset, no orderly end");
    assert!(idle.rest().await.1, "a reset, no orderly end");
    eventually("no connection is left", || server.connections() == 0).await;
}

#[tokio::test]
async fn a_stopped_server_lets_requests_end_and_closes_idle_connections() {
    let server = start(quick());
    let mut idle = Client::to(&server).await;
    assert_eq!(idle.get("/health").await.status, 200);
    let mut busy = Client::to(&server).await;
    busy.send(request(CHAT, "x-sim-fault: gap=5ms\r\n", HELLO_STREAM)).await;
    busy.until(b"\r\n\r\n").await;
    server.stop();
    assert_eq!(idle.rest().await, (vec![], false));
    assert!(TcpStream::connect(server.addr()).await.is_err());
    busy.until(b"data: [DONE]\n\n\r\n0\r\n\r\n").await;
    assert_eq!(busy.rest().await, (vec![], false));
}

#[tokio::test]
async fn servers_share_a_runtime_and_an_address_can_be_taken_over() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let handle = tokio::runtime::Handle::current();
    let one = EngineServer::start_on(&handle, quick(), listener).unwrap();
    let two = EngineServer::start_on(&handle, quick(), one_more()).unwrap();
    for server in [&one, &two] {
        assert_eq!(Client::to(server).await.post(CHAT, "", HELLO).await.status, 200);
    }
    let address = one.addr();
    drop(one);
    tokio::task::yield_now().await;
    let again = EngineServer::start_on(&handle, quick(), address).unwrap();
    assert_eq!(Client::to(&again).await.get("/health").await.status, 200);
}

fn one_more() -> std::net::SocketAddr {
    "[::1]:0".parse().unwrap()
}

#[tokio::test]
async fn a_sleeping_server_looks_well_and_is_silent_until_woken() {
    let server = start(quick());
    let mut admin = Client::to(&server).await;
    admin.post("/sleep?level=1", "", "").await;
    assert_eq!(admin.get("/is_sleeping").await.text(), r#"{"is_sleeping":true}"#);
    assert_eq!(admin.get("/health").await.status, 200);
    assert!(server.metrics().contains(r#"sleep_state="weights_offloaded"} 1.0"#));
    let mut client = Client::to(&server).await;
    client.send(request(CHAT, "", HELLO)).await;
    eventually("it came", || server.log().iter().any(|record| record.target == CHAT)).await;
    assert_eq!((server.running(), server.waiting()), (0, 0), "not even waiting, as in vLLM");
    admin.post("/wake_up", "", "").await;
    assert_eq!(client.response().await.status, 200);
}

#[tokio::test]
async fn going_to_sleep_ends_what_runs_with_an_abort_inside_a_200() {
    let server = start(Options::default());
    let mut client = Client::to(&server).await;
    client.send(request(CHAT, "", &format!("{LONG},\"stream\":true}}"))).await;
    client.until(b"role").await;
    Client::to(&server).await.post("/sleep", "", "").await;
    let rest = client.until(b"data: [DONE]").await;
    assert!(String::from_utf8(rest).unwrap().contains(r#""finish_reason":"abort""#));
    assert!(server.metrics().contains(r#"finished_reason="abort"} 1.0"#));
}

#[tokio::test]
async fn models_can_be_changed_while_it_runs() {
    let server = start(quick());
    server.set_models(vec!["other".to_owned()]);
    let mut client = Client::to(&server).await;
    assert_eq!(client.get("/v1/models").await.json()["data"][0]["id"], "other");
    let old = HELLO.replacen('{', r#"{"model":"sim/tiny","#, 1);
    assert_eq!(client.post(CHAT, "", &old).await.status, 404);
}

#[tokio::test]
async fn nonsense_gets_a_400_and_the_connection_ends() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    client.send("what?\r\n\r\n").await;
    let answer = client.response().await;
    assert_eq!((answer.status, answer.text()), (400, "Invalid HTTP request received."));
    assert_eq!(client.rest().await, (vec![], false));
}

#[tokio::test]
async fn the_log_and_the_counts_tell_what_came() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    client.post(CHAT, "x-request-id: one\r\n", HELLO).await;
    client.get("/no/such").await;
    eventually("ended", || server.log().iter().all(|record| record.ended.is_some())).await;
    let log = server.log();
    assert_eq!(log.len(), 2);
    assert_eq!((log[0].request_id.as_deref(), log[0].status), (Some("one"), 200));
    assert_eq!(log[0].body_bytes, HELLO.len() as u64);
    assert_eq!((log[1].target.as_str(), log[1].connection), ("/no/such", 1));
    assert_eq!((server.requests(CHAT), server.requests("other")), (1, 1));
}

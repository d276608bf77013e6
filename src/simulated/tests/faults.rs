//! Each fault does what its name says, and nothing else.

use super::*;
use crate::simulated::faults::{Early, End};

const CHAT: &str = "/v1/chat/completions";

/// Sends a stream request with a fault and reads until the end.
async fn broken(server: &EngineServer, fault: &str) -> (String, bool) {
    let mut client = Client::to(server).await;
    client.send(request(CHAT, &format!("x-sim-fault: {fault}\r\n"), HELLO_STREAM)).await;
    let (bytes, reset) = client.rest().await;
    (String::from_utf8_lossy(&bytes).into_owned(), reset)
}

#[tokio::test]
async fn a_stream_is_cut_after_so_many_events_by_close_or_reset() {
    let server = start(quick());
    for (fault, reset) in [("cut=3:FIN", false), ("cut=3:RST", true)] {
        let (text, was_reset) = broken(&server, fault).await;
        assert_eq!((text.matches("data: ").count(), was_reset), (3, reset), "{fault}: {text}");
        assert!(!text.contains("0\r\n\r\n"), "no last chunk");
    }
    let (text, _) = broken(&server, "cut=2:FIN,cut_inside=1").await;
    assert_eq!(text.matches("data: ").count(), 3);
    assert!(!text.ends_with("\n\n\r\n"), "the third event is half: {text}");
    let (text, reset) = broken(&server, "cut=0:RST").await;
    assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("\r\n\r\n") && reset);
    let (text, _) = broken(&server, "no_last_chunk=1").await;
    assert!(text.contains("[DONE]") && !text.contains("0\r\n\r\n"));
    let (text, _) = broken(&server, "garbage=1").await;
    assert!(text.ends_with("zz\u{0} this is no chunk\r\n"));
    eventually("nothing is left in the engine", || server.running() == 0).await;
    let cut = || server.log().iter().all(|record| record.ended == Some(Ended::Cut));
    eventually("all are cut", cut).await;
}

#[tokio::test]
async fn a_stalled_stream_is_silent_until_the_client_leaves() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    client.send(request(CHAT, "x-sim-fault: cut=2:stall\r\n", HELLO_STREAM)).await;
    client.until(b"data: ").await;
    client.until(b"data: ").await;
    client.until(b"\n\n\r\n").await;
    let silence = timeout(Duration::from_millis(30), client.stream.readable()).await;
    assert!(silence.is_err());
    drop(client);
    eventually("the stall ends", || server.connections() == 0).await;
}

#[tokio::test]
async fn a_status_can_be_told_with_its_headers_and_body() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let fault = "x-sim-fault: status=503,header=Retry-After:7,header=x-a:1,header=x-a:2\r\n";
    let answer = client.post(CHAT, fault, HELLO).await;
    assert_eq!((answer.status, answer.header("Retry-After")), (503, Some("7")));
    assert_eq!(answer.head.matches("x-a: ").count(), 2, "duplicates stay");
    assert!(answer.text().contains("currently busy"));
    let answer = client.post(CHAT, "x-sim-fault: status=429,body=slow%2C please\r\n", HELLO).await;
    assert_eq!((answer.status, answer.text()), (429, "slow, please"));
    let answer = client.post(CHAT, "x-sim-fault: status=204\r\n", HELLO).await;
    assert_eq!((answer.status, answer.header("content-length")), (204, None));
    assert_eq!(client.post(CHAT, "", HELLO).await.status, 200);
    let misspelt = client.post(CHAT, "x-sim-fault: statsu=1\r\n", HELLO).await;
    assert_eq!(misspelt.status, 400);
}

#[tokio::test]
async fn a_server_fails_so_many_times_and_then_works() {
    let server = start(quick());
    let faults = Faults { status: Some(500), count: Some(2), ..Faults::default() };
    server.faults().set(faults).unwrap();
    let mut client = Client::to(&server).await;
    let mut seen = Vec::new();
    for _ in 0..4 {
        assert_eq!(client.get("/health").await.status, 200, "probes are spared");
        seen.push(client.post(CHAT, "", HELLO).await.status);
    }
    assert_eq!(seen, [500, 500, 200, 200]);
    let paths = vec!["/health".to_owned()];
    server.faults().set(Faults { status: Some(503), paths, ..Faults::default() }).unwrap();
    assert_eq!(client.get("/health").await.status, 503);
    assert_eq!(client.post(CHAT, "", HELLO).await.status, 200);
    server.faults().clear().unwrap();
    assert_eq!(client.get("/health").await.status, 200);
}

#[tokio::test]
async fn delays_are_kept() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    for (fault, least) in [("head_delay=30ms", 30), ("first_token_delay=30ms", 30), ("gap=5ms", 35)]
    {
        let begun = crate::clock::now();
        client.post(CHAT, &format!("x-sim-fault: {fault}\r\n"), HELLO_STREAM).await;
        assert!(begun.elapsed() >= Duration::from_millis(least), "{fault}");
    }
}

#[tokio::test]
async fn framing_is_changed_and_the_content_is_not() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let header = "x-request-id: same\r\n";
    let plain = client.post(CHAT, header, HELLO_STREAM).await;
    for fault in ["split=1", "chunk=7", "split=100:1ms,chunk=1"] {
        let header = format!("{header}x-sim-fault: {fault}\r\n");
        let answer = client.post(CHAT, &header, HELLO_STREAM).await;
        let strip = |text: &str| text.replace(|c: char| c.is_ascii_digit(), "");
        assert_eq!(strip(answer.text()), strip(plain.text()), "{fault}");
    }
    let crlf = client.post(CHAT, "x-sim-fault: crlf=1,comments=1,bom=1\r\n", HELLO_STREAM).await;
    assert_eq!(crlf.text().matches("\r\n\r\n").count(), 8);
    assert_eq!(crlf.text().matches(": keep-alive").count(), 8);
    assert!(crlf.text().starts_with('\u{feff}'));
    let quiet = client.post(CHAT, "x-sim-fault: no_done=1\r\n", HELLO_STREAM).await;
    assert_eq!(quiet.events().len(), 7);
}

#[tokio::test]
async fn answers_can_be_big_and_without_usage() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let body = client.post(CHAT, "x-sim-fault: body_bytes=5000000\r\n", HELLO).await;
    let text = body.json()["choices"][0]["message"]["content"].as_str().unwrap().len();
    assert_eq!(text, 5_000_000);
    let fault = "x-sim-fault: events=500,event_bytes=2000\r\n";
    let stream = client.post(CHAT, fault, HELLO_STREAM).await;
    assert_eq!(stream.events().len(), 502);
    assert!(stream.body.len() > 1_000_000);
    let null = client.post(CHAT, "x-sim-fault: usage=null\r\n", HELLO).await.json();
    assert!(null.as_object().unwrap().contains_key("usage") && null["usage"].is_null());
    let missing = client.post(CHAT, "x-sim-fault: usage=missing\r\n", HELLO).await.json();
    assert!(!missing.as_object().unwrap().contains_key("usage"));
}

#[tokio::test]
async fn answers_of_old_servers_end_with_the_connection() {
    let server = start(quick());
    for (fault, version) in [("http10=1", "HTTP/1.0 200"), ("close_delimited=1", "HTTP/1.1 200")] {
        let (text, reset) = broken(&server, fault).await;
        assert!(text.starts_with(version) && !reset, "{text}");
        assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("chunked"), "{text}");
    }
    let mut client = Client::to(&server).await;
    client.send(request(CHAT, "x-sim-fault: short=10\r\n", HELLO)).await;
    let (bytes, _) = client.rest().await;
    assert!(bytes.ends_with(b"}"), "all that came, though more was promised");
    let mut old = Client::to(&server).await;
    let length = HELLO_STREAM.len();
    let head = format!("POST {CHAT} HTTP/1.0\r\ncontent-type: application/json\r\n");
    old.send(format!("{head}content-length: {length}\r\n\r\n{HELLO_STREAM}")).await;
    assert!(old.rest().await.0.ends_with(b"data: [DONE]\n\n"), "no chunks for an old client");
}

#[tokio::test]
async fn no_answer_comes_in_three_ways() {
    let server = start(quick());
    assert_eq!(broken(&server, "no_answer=rst").await, (String::new(), true));
    assert_eq!(broken(&server, "no_answer=fin").await, (String::new(), false));
    let mut client = Client::to(&server).await;
    client.send(request(CHAT, "x-sim-fault: blackhole=1\r\n", HELLO)).await;
    eventually("read", || server.log().len() == 3 && server.log()[2].body_bytes > 0).await;
    drop(client);
    eventually("left", || server.log()[2].ended == Some(Ended::PeerLeft)).await;
}

#[tokio::test]
async fn an_answer_may_come_before_the_body() {
    let server = start(quick());
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n";
    let mut client = Client::to(&server).await;
    client.send(format!("{head}x-sim-fault: early=drain\r\n\r\n")).await;
    assert_eq!(client.response().await.status, 413);
    client.send("12345").await;
    assert_eq!(client.get("/health").await.status, 200, "the connection goes on");
    server.faults().set(Faults { early: Some(Early::Close), ..Faults::default() }).unwrap();
    client.send(format!("{head}\r\n")).await;
    assert_eq!(client.response().await.status, 413);
    assert_eq!(client.rest().await, (vec![], false));
}

#[tokio::test]
async fn idle_connections_are_closed_in_time_or_just_too_early() {
    let server = start(quick());
    let faults = server.faults();
    faults.update(|faults| faults.idle_close = Some(Duration::from_millis(20))).unwrap();
    let mut client = Client::to(&server).await;
    client.post(CHAT, "", HELLO).await;
    let begun = crate::clock::now();
    assert_eq!(client.rest().await, (vec![], false));
    assert!(begun.elapsed() >= Duration::from_millis(15));
    for (how, reset) in [(End::Fin, false), (End::Rst, true)] {
        faults.set(Faults { close_on_next: Some(how), ..Faults::default() }).unwrap();
        let mut client = Client::to(&server).await;
        client.post(CHAT, "", HELLO).await;
        client.send(request(CHAT, "", HELLO)).await;
        assert_eq!(client.rest().await, (vec![], reset));
    }
    assert_eq!(server.requests(CHAT), 3, "the request that came too late was not executed");
}

#[tokio::test]
async fn a_body_is_read_slowly_so_that_the_sender_must_wait() {
    let kib = Some(bytesize::ByteSize::kib(16));
    let server = start(Options { receive_buffer: kib, ..quick() });
    let mut client = Client::to(&server).await;
    socket2::SockRef::from(&client.stream).set_send_buffer_size(16 * 1024).unwrap();
    let body = "x".repeat(400_000);
    let begun = crate::clock::now();
    let fault = "x-sim-echo: 1\r\nx-sim-fault: slow_read=65536:5ms\r\n";
    let echo = client.post("/x", fault, &body).await.json();
    assert_eq!(echo["body_bytes"], 400_000);
    assert!(begun.elapsed() >= Duration::from_millis(30));
}

#[tokio::test]
async fn an_engine_that_dies_says_so_inside_a_200() {
    let server = start(quick());
    let mut client = Client::to(&server).await;
    let answer = client.post(CHAT, "x-sim-fault: engine_error=3\r\n", HELLO_STREAM).await;
    let events = answer.events();
    assert_eq!((answer.status, events.len()), (200, 5));
    assert!(events[3].starts_with(r#"{"error": {"message": "EngineCore encountered"#));
    server.hang();
    client.send(request(CHAT, "", HELLO_STREAM)).await;
    client.until(b"\r\n\r\n").await;
    let mut other = Client::to(&server).await;
    other.send(request(CHAT, "", HELLO)).await;
    eventually("both are in the engine", || server.running() + server.waiting() == 2).await;
    assert_eq!(Client::to(&server).await.get("/health").await.status, 200, "a hang looks well");
    server.crash();
    assert_eq!(other.response().await.status, 500);
    client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n").await;
    assert_eq!(client.get("/health").await.status, 503);
}

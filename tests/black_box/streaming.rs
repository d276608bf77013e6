//! Streams of events: relayed as they come, byte for byte, counted on the way, and never dressed
//! up as finished when they are not.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::kit::{
    Act, End, Engine, Request, Upstream, Way, Weir, chat, events, fleet, fleet_of, run, soon, sse,
    sse_head, until,
};

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#;

fn event(text: &str) -> String {
    format!(
        "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{{\"index\":0,\
         \"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
    )
}

fn usage(prompt: u32, completion: u32) -> String {
    format!(
        "data: {{\"id\":\"c\",\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\
         \"completion_tokens\":{completion},\"total_tokens\":{}}}}}\n\n",
        prompt + completion
    )
}

const DONE: &str = "data: [DONE]\n\n";

/// One chunk for each piece.
fn stream_of<I: IntoIterator<Item: AsRef<[u8]>>>(pieces: I) -> Vec<Act> {
    let mut acts = vec![sse_head()];
    for piece in pieces {
        if !piece.as_ref().is_empty() {
            acts.push(sse(piece));
        }
    }
    acts.push(Act::Write(b"0\r\n\r\n".to_vec()));
    acts
}

fn chunked(text: &str, size: usize) -> Vec<Vec<u8>> {
    text.as_bytes().chunks(size).map(<[u8]>::to_vec).collect()
}

#[test]
fn a_stream_comes_out_as_it_went_in_however_it_is_cut_and_its_tokens_are_counted() {
    run(async {
        let words = "Grüße 你好 😀 👩‍👩‍👧 é data: [DONE] \\n\\ndata: x";
        let plain = format!("{}{}{}{DONE}", event(words), event("more"), usage(11, 7));
        let crlf = plain.replace('\n', "\r\n");
        let comments = format!(": ping\n\n{}", plain.replace("data: {", ":x\nid: 1\ndata: {"));
        let unfinished = format!("{}{}data: [DONE]", event(words), usage(11, 7));
        let shapes: Vec<(&str, Vec<Vec<u8>>)> = vec![
            ("as it is", vec![plain.clone().into_bytes()]),
            ("single bytes", chunked(&plain, 1)),
            ("pieces of 3", chunked(&plain, 3)),
            ("pieces of 50", chunked(&plain, 50)),
            ("CR LF", chunked(&crlf, 5)),
            ("CR", chunked(&plain.replace('\n', "\r"), 5)),
            ("comments and other fields", chunked(&comments, 17)),
            ("no blank line at the end", chunked(&unfinished, 8)),
        ];
        let count = shapes.len();
        let all: Arc<Vec<_>> = Arc::new(shapes);
        let script = Arc::clone(&all);
        let upstream = Upstream::start("m", move |seen| {
            let number: usize = seen.headers.one("x-shape").unwrap().parse().unwrap();
            stream_of(&script[number].1)
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for (number, (name, pieces)) in all.iter().enumerate() {
            for way in Way::PROTOCOLS {
                let request = Request::post(CHAT, BODY).header("X-Shape", number.to_string());
                let reply = way.send(weir.address, &request).await.expect(200);
                assert!(reply.body == pieces.concat(), "{name}: {}", reply.text());
            }
        }
        weir.assert_at_rest().await;
        let metrics = weir.metrics().await;
        let tokens = |kind: &str| metrics.sum("weir_tokens_total", &[("kind", kind)]);
        let requests = 2.0 * count as f64;
        assert_eq!(tokens("prompt"), 11.0 * requests);
        assert_eq!(tokens("completion"), 7.0 * requests);
    });
}

#[test]
fn odd_deltas_are_relayed_verbatim() {
    run(async {
        let text = concat!(
            "data: {\"choices\":[{\"index\":2,\"delta\":{\"reasoning_content\":\"a\"},",
            "\"logprobs\":{\"x\":[-0.0,1e-7,-1.50]}}]}\n\n",
            "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,",
            "\"function\":{\"arguments\":\"{\\\"a\\\": \"}}]},\"odd\":{\"k\":[]}}]}\n\n",
            "event: odd\ndata: 1\ndata: 2\n\n",
            "data: {\"usage\":null,\"choices\":[{\"index\":1,\"text\":\"t\"}]}\n\n",
            "data: [DONE]\n\n",
        );
        let upstream = Upstream::start("m", move |_| stream_of([text])).await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for path in [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"] {
            for way in Way::PROTOCOLS {
                let reply = way.send(weir.address, &Request::post(path, BODY)).await;
                assert_eq!(reply.expect(200).text(), text, "{path}");
            }
        }
    });
}

#[test]
fn every_event_is_passed_on_before_the_next_one_comes() {
    run(async {
        let go = Arc::new(Notify::new());
        let wait = Arc::clone(&go);
        let upstream = Upstream::start("m", move |_| {
            let mut acts = vec![sse_head()];
            for number in 0..5 {
                acts.push(sse(event(&number.to_string())));
                acts.push(Act::Wait(Arc::clone(&wait)));
            }
            acts.push(Act::Write(b"0\r\n\r\n".to_vec()));
            acts
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            let mut open = way.open(weir.address, &Request::post(CHAT, BODY)).await;
            assert_eq!(soon("the head", open.head()).await.status, 200);
            for number in 1..=5 {
                // The upstream says nothing more until this has arrived.
                assert_eq!(open.events(number).await.len(), number);
                go.notify_one();
            }
            assert_eq!(open.rest().await.1, End::Proper);
        }
    });
}

/// What a client must be able to tell of a stream that was cut.
fn is_told_to_be_cut(body: &[u8], end: &End, way: Way, events_sent: usize) {
    match way {
        Way::Http2 => assert!(matches!(end, End::Reset(_)), "{end:?}"),
        _ => assert_eq!(*end, End::Cut),
    }
    let found = events(body);
    let text = String::from_utf8_lossy(body);
    assert_eq!(found.len(), events_sent + 1, "the events and the error: {text}");
    let error = found.last().unwrap().json();
    assert!(error["error"]["message"].is_string(), "{error}");
    assert!(!text.contains("[DONE]"), "{text}");
    for event in &found[..events_sent] {
        assert!(event.json()["choices"][0]["finish_reason"].is_null());
    }
}

#[test]
fn a_stream_that_breaks_off_is_told_as_such() {
    run(async {
        let inside = event("five");
        let inside = &inside[..40];
        let upstream = Upstream::start("m", |_| Vec::new()).await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut broken = 0.0;
        for last in [Act::Rst, Act::Fin] {
            for half in [false, true] {
                for way in Way::PROTOCOLS {
                    let mut acts = vec![sse_head()];
                    acts.extend((0..4).map(|number| sse(event(&number.to_string()))));
                    if half {
                        acts.push(sse(inside));
                    }
                    // Let what was sent be read; a reset throws away what was not.
                    acts.push(Act::Pause(Duration::from_millis(50)));
                    acts.push(last.clone());
                    upstream.script(move |_| acts.clone());
                    let reply = way.send(weir.address, &Request::post(CHAT, BODY)).await;
                    assert_eq!(reply.status, 200);
                    if half {
                        // The half event is ended before the error begins.
                        let text = String::from_utf8_lossy(&reply.body).into_owned();
                        let after = text.rsplit_once("\n\ndata: {\"error\"");
                        assert!(after.is_some_and(|(before, _)| before.contains(inside)), "{text}");
                    } else {
                        is_told_to_be_cut(&reply.body, &reply.end, way, 4);
                    }
                    assert_ne!(reply.end, End::Proper);
                    broken += 1.0;
                }
            }
        }
        weir.assert_at_rest().await;
        let metrics = weir.metrics().await;
        let counted =
            metrics.sum("weir_attempts_total", &[("outcome", "broken_stream"), ("model", "m")]);
        assert_eq!(counted, broken, "{}", metrics.text());
        assert_eq!(metrics.sum("weir_errors_total", &[("kind", "engine_broke")]), broken);
    });
}

#[test]
fn an_anthropic_stream_that_breaks_off_is_told_in_its_own_words() {
    run(async {
        let start = "event: message_start\ndata: {\"type\":\"message_start\"}\n\n";
        let upstream = Upstream::start("m", move |_| {
            vec![sse_head(), sse(start), Act::Pause(Duration::from_millis(50)), Act::Rst]
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let reply = weir.post("/v1/messages", r#"{"model":"m","stream":true}"#).await;
        assert_eq!(reply.end, End::Cut);
        let events = reply.events();
        assert_eq!(events.last().unwrap().name, "error");
        assert_eq!(events.last().unwrap().json()["type"], "error");
    });
}

#[test]
fn an_answer_that_breaks_off_without_being_a_stream_is_cut_too() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\
                        \r\n\r\n{\"half\":";
            vec![Act::Write(head.into()), Act::Pause(Duration::from_millis(50)), Act::Fin]
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            let reply = way.send(weir.address, &Request::post(CHAT, chat("m", false))).await;
            assert_ne!(reply.end, End::Proper, "{way:?}");
            assert_eq!(reply.text(), "{\"half\":", "nothing is added to JSON");
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_head_without_a_body_is_no_answer() {
    run(async {
        // A 200 whose body never begins: the client must not take it for an empty answer.
        let upstream = Upstream::start("m", |_| {
            vec![sse_head(), Act::Pause(Duration::from_millis(50)), Act::Rst]
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            let reply = way.send(weir.address, &Request::post(CHAT, BODY)).await;
            assert!(reply.status == 502 || reply.end != End::Proper, "{way:?}: {reply:?}");
            assert!(!reply.text().contains("[DONE]"));
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_gap_longer_than_the_limit_ends_a_stream_and_a_shorter_one_does_not() {
    run(async {
        let limits = "{proxy: {timeouts: {between_bytes: 700ms, first_byte: 5s}}}";
        let upstream = Upstream::start("m", |seen| {
            let gap: u64 = seen.headers.one("x-gap").unwrap().parse().unwrap();
            let mut acts = vec![sse_head()];
            for _ in 0..4 {
                acts.push(sse(event("x")));
                acts.push(Act::Pause(Duration::from_millis(gap)));
            }
            acts.extend([sse(DONE), Act::Write(b"0\r\n\r\n".to_vec())]);
            acts
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], limits)).await;
        for way in Way::PROTOCOLS {
            let request = Request::post(CHAT, BODY);
            // All of it takes longer than the limit: the limit is for each gap.
            let reply = way.send(weir.address, &request.clone().header("X-Gap", "300")).await;
            assert_eq!(reply.expect(200).events().len(), 5);
            let reply = way.send(weir.address, &request.header("X-Gap", "4000")).await;
            is_told_to_be_cut(&reply.body, &reply.end, way, 1);
            let error = reply.events().pop().unwrap().json();
            assert_eq!(error["error"]["code"], 504, "{error}");
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn the_time_to_the_first_token_is_not_the_time_to_the_head() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            let role = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\
                        \"content\":\"\"},\"finish_reason\":null}]}\n\n";
            vec![
                sse_head(),
                sse(role),
                Act::Pause(Duration::from_millis(1200)),
                sse(event("first")),
                sse(DONE),
                Act::Write(b"0\r\n\r\n".to_vec()),
            ]
        })
        .await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let request = Request::post(CHAT, BODY).header("X-Request-Id", "timed");
        request.send(weir.address).await.expect(200);
        weir.assert_at_rest().await;
        let metrics = weir.metrics().await;
        let bucket = |name: &str, le: &str| {
            metrics.sum(&format!("{name}_bucket"), &[("le", le), ("model", "m")])
        };
        assert_eq!(bucket("weir_first_byte_seconds", "1"), 1.0, "the head came at once");
        assert_eq!(bucket("weir_first_token_seconds", "1"), 0.0, "the first token did not");
        assert_eq!(bucket("weir_first_token_seconds", "3600"), 1.0, "an hour is in the range");
        assert_eq!(bucket("weir_request_seconds", "3600"), 1.0);
        let line = weir.access_line("timed").await;
        assert!(1100.0 < line["first_token_ms"].as_f64().unwrap(), "{line}");
        assert!(line["first_byte_ms"].as_f64().unwrap() < 1100.0, "{line}");
    });
}

#[test]
fn usage_is_counted_in_every_shape_and_its_absence_is_no_fault() {
    run(async {
        let engine = Engine::start("m");
        let weir = Weir::start(&fleet(&[engine.url()], "")).await;
        let chat = r#"{"model":"m","messages":[{"role":"user","content":"a b"}],"max_tokens":6}"#;
        let responses = r#"{"model":"m","input":"a b","max_output_tokens":6}"#;
        let streamed = |body: &str| body.replacen('{', r#"{"stream":true,"#, 1);
        let with_usage =
            streamed(chat).replacen('{', r#"{"stream_options":{"include_usage":true},"#, 1);
        let cases = [
            (CHAT, chat.to_owned(), 6.0),
            (CHAT, with_usage, 6.0),
            (CHAT, streamed(chat), 0.0),
            ("/v1/messages", chat.to_owned(), 6.0),
            ("/v1/messages", streamed(chat), 6.0),
            ("/v1/responses", responses.to_owned(), 6.0),
            ("/v1/responses", streamed(responses), 6.0),
        ];
        let mut before = 0.0;
        for (path, body, tokens) in cases {
            weir.post(path, &body).await.expect(200);
            let after = until("the request is counted", async || {
                let metrics = weir.metrics().await;
                let idle = metrics.unfinished().is_empty();
                idle.then(|| metrics.sum("weir_tokens_total", &[("kind", "completion")]))
            })
            .await;
            assert_eq!(after - before, tokens, "{path} {body}");
            before = after;
        }
        for fault in ["usage=null", "usage=missing"] {
            let request = Request::post(CHAT, chat).header("x-sim-fault", fault);
            request.send(weir.address).await.expect(200);
        }
        assert_eq!(
            weir.metrics().await.sum("weir_tokens_total", &[("kind", "completion")]),
            before
        );
    });
}

#[test]
fn an_engine_that_says_inside_a_stream_that_it_died_is_not_counted_as_well() {
    run(async {
        let engine = Engine::start("m");
        let mut weir = Weir::start(&fleet(&[engine.url()], "")).await;
        let request = Request::post(CHAT, chat("m", true)).header("x-sim-fault", "engine_error=3");
        let request = request.header("X-Request-Id", "dead");
        // vLLM's own words reach the client as they are, `[DONE]` and all.
        let reply = request.send(weir.address).await.expect(200);
        assert!(reply.text().contains("error"), "{}", reply.text());
        weir.assert_at_rest().await;
        let line = weir.access_line("dead").await;
        assert_eq!(line["ended"], "engine_broke", "{line}");
        let metrics = weir.metrics().await;
        assert_eq!(metrics.sum("weir_disguised_failures_total", &[]), 1.0);
    });
}

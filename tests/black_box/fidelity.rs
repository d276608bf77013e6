//! Bytes are sacred: what a client sends is what an engine gets, and the other way round.

use crate::kit::{
    Act, Framing, Request, Seen, Upstream, Way, Weir, answer_with, fleet_of, json, run,
};

const CHAT: &str = "/v1/chat/completions";

/// Odd but legal: each must arrive as it was sent. `short` stands where the model is.
const ODD_BODIES: &[&str] = &[
    // Key order, numbers that lose something when read and written, escapes, repeated keys.
    r#"{"z":1,"a":2,"model":"short","m":3,"messages":[]}"#,
    r#"{"model":"short","temperature":0.7,"seed":9007199254740993,"x":1e2,"y":1E+2,"w":-0.0}"#,
    r#"{"model":"short","huge":123456789012345678901234567890,"tiny":1e-400,"top_p":1.0}"#,
    r#"{"model":"short","messages":[{"role":"user","content":"\u00e9 \ud83d\ude00 \/ é 😀 \n"}]}"#,
    r#"{"a":1,"a":2,"model":"short","a":{"a":3,"a":4}}"#,
    // Unknown fields at every level, names that look like the ones that matter.
    r#"{"model":"short","x":{"model":"no","stream":true},"messages":[{"model":"no","y":[{}]}]}"#,
    r#"{"metadata":{"model":"no"},"text":"\"model\":\"no\"","model":"short"}"#,
    // White space everywhere it may be.
    "\r\n\t {\n\t\"model\" :\r\n \"short\" ,\n\"messages\" : [ ] , \"n\" : null }\r\n \t",
    // Empty things, other types where a type is not ours to judge.
    r#"{"model":"short","messages":[],"tools":{},"stop":null,"user":"","":""}"#,
    r#"{"model":"short","messages":"not a list","max_tokens":null,"stream":false}"#,
    "{\"model\":\"short\",\"del\":\"\u{7f}\u{2028}\u{feff}\",\"nul\":\"\\u0000\"}",
];

async fn echo(model: &str) -> Upstream {
    Upstream::start(model, |_| json(r#"{"ok":true}"#)).await
}

fn framing_is_right(seen: &Seen) {
    match seen.framing {
        Framing::Length => {
            let length = seen.headers.one("content-length").unwrap();
            assert_eq!(length, seen.body.len().to_string());
        }
        Framing::Chunked => {}
        Framing::None => panic!("the body is gone: {seen:?}"),
    }
}

#[test]
fn an_odd_but_legal_request_arrives_byte_for_byte() {
    run(async {
        let upstream = echo("short").await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let mut sent = Vec::new();
        for way in Way::ALL {
            for body in ODD_BODIES {
                let reply = way.send(weir.address, &Request::post(CHAT, body)).await;
                assert_eq!(reply.expect(200).text(), r#"{"ok":true}"#, "{way:?}");
                sent.push((way, *body));
            }
        }
        let seen = upstream.seen();
        assert_eq!(seen.len(), sent.len());
        for (seen, (way, body)) in seen.iter().zip(sent) {
            assert_eq!(seen.text(), body, "{way:?}");
            framing_is_right(seen);
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn an_alias_changes_the_bytes_of_the_models_name_and_no_other() {
    run(async {
        // Longer, shorter, and of the same length.
        for model in ["a/much/longer-model-name", "s", "other", "with \\\"quotes\\\" \\u00e9"] {
            let upstream = echo(model).await;
            let aliases = format!("{{fleet: {{aliases: {{short: '{}'}}}}}}", plain(model));
            let weir = Weir::start(&fleet_of(&[&upstream], &aliases)).await;
            let mut sent = Vec::new();
            for way in Way::ALL {
                for body in ODD_BODIES {
                    way.send(weir.address, &Request::post(CHAT, body)).await.expect(200);
                    sent.push(*body);
                }
            }
            for (seen, body) in upstream.seen().iter().zip(sent) {
                framing_is_right(seen);
                let text = seen.text();
                let (before, after) = body.split_once(r#""short""#).unwrap();
                let name = text.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
                let name = name.unwrap_or_else(|| panic!("more than the name differs:\n{text}"));
                let name: String = serde_json::from_str(name).unwrap();
                assert_eq!(name, plain(model));
            }
        }
    });
}

fn plain(model: &str) -> String {
    serde_json::from_str(&format!("\"{model}\"")).unwrap()
}

#[test]
fn an_alias_spelt_with_escapes_is_the_same_alias() {
    run(async {
        let upstream = echo("org/long-name").await;
        let aliases = "{fleet: {aliases: {short: org/long-name}}}";
        let weir = Weir::start(&fleet_of(&[&upstream], aliases)).await;
        let body = r#"{ "model" : "\u0073hor\u0074" , "messages":[] }"#;
        weir.post(CHAT, body).await.expect(200);
        assert_eq!(upstream.only().text(), r#"{ "model" : "org/long-name" , "messages":[] }"#);
    });
}

#[test]
fn a_body_of_any_size_arrives_whole() {
    run(async {
        let upstream = echo("m").await;
        let mut weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let (start, end) = (r#"{"model":"m","messages":[],"image":"data:;base64,"#, r#""}"#);
        let around = start.len() + end.len();
        let mut expected = Vec::new();
        for size in [around, 63 << 10, 64 << 10, (64 << 10) + 1, 1 << 20, 8 << 20] {
            let image = "QUJD".repeat(size / 4 + 1);
            let body = format!("{start}{}{end}", &image[..size - around]);
            // Chunks of 7 bytes for what is not too much to make them.
            let chunk = if size < 100_000 { 7 } else { 40_000 };
            for way in [Way::Length, Way::Chunked(chunk), Way::Http2] {
                way.send(weir.address, &Request::post(CHAT, &body)).await.expect(200);
                expected.push((way, body.clone()));
            }
        }
        for (seen, (way, body)) in upstream.seen().iter().zip(expected) {
            assert!(seen.body == body.as_bytes(), "{way:?}, {} bytes", body.len());
            framing_is_right(seen);
        }
        weir.assert_at_rest().await;
    });
}

#[test]
fn a_body_that_comes_in_pieces_and_pauses_arrives_whole() {
    run(async {
        let upstream = echo("m").await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let body = format!(r#"{{"model":"m","pad":"{}"}}"#, "é".repeat(50_000));
        for chunked in [false, true] {
            let request = Request::post(CHAT, &body);
            let request = if chunked { request.chunked(33_333) } else { request };
            let mut raw = weir.connect().await;
            for piece in request.bytes().chunks(20_001) {
                raw.write(piece).await;
                tokio::time::sleep(std::time::Duration::from_millis(3)).await;
            }
            raw.reply(false).await.expect(200);
        }
        let mut http2 = weir.connect_http2().await;
        let mut stream = http2.begin(&Request::post(CHAT, "")).await;
        for piece in body.as_bytes().chunks(20_001) {
            stream.upload(piece, false);
            tokio::time::sleep(std::time::Duration::from_millis(3)).await;
        }
        stream.upload(b"", true);
        assert_eq!(stream.head().await.status, 200);
        for seen in upstream.seen() {
            assert!(seen.body == body.as_bytes(), "{} bytes", seen.body.len());
        }
        assert_eq!(upstream.count(), 3);
    });
}

/// A form as a client may write it: the file first, fields repeated, a name that is not ASCII.
fn form(boundary: &str, model: &str, file: &[u8]) -> Vec<u8> {
    let mut body = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"Ton é 音.wav\"\
         \r\nContent-Type: audio/x-odd; a=b\r\n\r\n"
    )
    .into_bytes();
    body.extend_from_slice(file);
    for (name, value) in [
        ("model", model),
        ("language", "de"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
        ("stream", "true"),
    ] {
        let part = format!(
            "\r\n--{boundary}\r\ncontent-disposition:  form-data;  NAME={name}\r\n\r\n{value}"
        );
        body.extend_from_slice(part.as_bytes());
    }
    body.extend_from_slice(format!("\r\n--{boundary}--\r\nepilogue").as_bytes());
    body
}

fn upload(boundary: &str, body: &[u8]) -> Request {
    Request::new("POST", "/v1/audio/transcriptions")
        .header("Content-Type", format!("multipart/form-data; boundary=\"{boundary}\""))
        .body(body)
}

#[test]
fn a_form_with_a_file_arrives_byte_for_byte() {
    run(async {
        let upstream = echo("short").await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let boundary = "-'()+_,./:=? odd";
        // Bytes of every kind, and things that look like the end of a part.
        let mut file: Vec<u8> = (0..3_000_000_u32).map(|n| ((n * 31) >> 3) as u8).collect();
        file.extend_from_slice(b"\r\n--not the boundary\r\nname=\"model\"\r\n\r\nno\r\n--");
        let body = form(boundary, "short", &file);
        for way in [Way::Length, Way::Chunked(30_000), Way::Http2] {
            way.send(weir.address, &upload(boundary, &body)).await.expect(200);
        }
        let sent = format!("multipart/form-data; boundary=\"{boundary}\"");
        assert_eq!(upstream.count(), 3);
        for seen in upstream.seen() {
            assert!(seen.body == body, "{} bytes of {}", seen.body.len(), body.len());
            assert_eq!(seen.headers.one("content-type"), Some(sent.clone()));
            framing_is_right(&seen);
        }
    });
}

#[test]
fn an_alias_in_a_form_changes_that_one_field() {
    run(async {
        let upstream = echo("org/a-longer-name").await;
        let aliases = "{fleet: {aliases: {short: org/a-longer-name}}}";
        let weir = Weir::start(&fleet_of(&[&upstream], aliases)).await;
        let file = b"\x00\xff short \r\n short";
        let body = form("bound", "short", file);
        weir_sends(&weir, &upload("bound", &body)).await;
        let expected = form("bound", "org/a-longer-name", file);
        assert!(upstream.only().body == expected, "{:?}", upstream.only());
        framing_is_right(&upstream.only());
    });
}

async fn weir_sends(weir: &Weir, request: &Request) {
    request.send(weir.address).await.expect(200);
}

#[test]
fn an_answer_comes_back_byte_for_byte() {
    run(async {
        let body = "{\"z\":1.0,\"a\":1e2,\"a\":9007199254740993,\"t\":\"\\u00e9é\\/\"}\n ";
        let upstream = Upstream::start("m", move |_| json(body)).await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            let reply = way.send(weir.address, &Request::post(CHAT, r#"{"model":"m"}"#)).await;
            let reply = reply.expect(200);
            assert_eq!(reply.text(), body, "{way:?}");
            assert_eq!(reply.headers.one("content-length"), Some(body.len().to_string()));
            assert_eq!(reply.headers.one("content-type").as_deref(), Some("application/json"));
        }
    });
}

#[test]
fn an_answer_that_is_no_text_or_is_compressed_passes_as_it_is() {
    run(async {
        let sound: Vec<u8> = (0..200_000_u32).map(|n| ((n * 7) >> 2) as u8).collect();
        let expected = sound.clone();
        let upstream = Upstream::start("m", move |_| {
            let headers = [("content-type", "audio/wav"), ("content-encoding", "gzip")];
            answer_with(200, &headers, &sound)
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let request = Request::post("/v1/audio/speech", r#"{"model":"m","input":"x"}"#)
            .header("Accept-Encoding", "gzip");
        let reply = request.send(weir.address).await.expect(200);
        assert!(reply.body == expected);
        assert_eq!(reply.headers.one("content-encoding").as_deref(), Some("gzip"));
        let asked = upstream.only().headers.one("accept-encoding");
        assert_eq!(asked.as_deref(), Some("gzip"));
    });
}

#[test]
fn an_answer_without_length_ends_where_its_connection_does() {
    run(async {
        let upstream = Upstream::start("m", |_| {
            let head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n";
            vec![Act::Write(head.to_vec()), Act::Write(b"{\"a\":1}".to_vec()), Act::Fin]
        })
        .await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        for way in Way::PROTOCOLS {
            let reply = way.send(weir.address, &Request::post(CHAT, r#"{"model":"m"}"#)).await;
            assert_eq!(reply.expect(200).text(), r#"{"a":1}"#, "{way:?}");
        }
    });
}

#[test]
fn the_query_string_is_kept_as_it_is() {
    run(async {
        let upstream = echo("m").await;
        let weir = Weir::start(&fleet_of(&[&upstream], "")).await;
        let target = "/v1/chat/completions?a=1&a=2&b=%2F%20+x&c[]=&d=%E9&%65=/v1/models?q";
        for way in Way::PROTOCOLS {
            let request = Request::post(target, r#"{"model":"m"}"#);
            way.send(weir.address, &request).await.expect(200);
        }
        for seen in upstream.seen() {
            assert_eq!(seen.target, target);
        }
    });
}

#[test]
fn every_path_that_generates_carries_the_body_untouched() {
    run(async {
        let upstream = echo("long-name").await;
        let aliases = "{fleet: {aliases: {gpt: long-name}}}";
        let weir = Weir::start(&fleet_of(&[&upstream], aliases)).await;
        let paths = [
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/embeddings",
            "/pooling",
            "/classify",
            "/score",
            "/v1/rerank",
            "/rerank",
            "/tokenize",
            "/detokenize",
            "/v1/messages/count_tokens",
            "/v1/audio/speech",
            "/invocations",
        ];
        for path in paths {
            let body = r#"{"zz":[1,2],"model":"gpt","input":"x","prompt":"x","messages":[]}"#;
            weir.post(path, body).await.expect(200);
        }
        let seen = upstream.seen();
        let targets: Vec<_> = seen.iter().map(|seen| seen.target.as_str()).collect();
        assert_eq!(targets, paths);
        for seen in seen {
            let expected =
                r#"{"zz":[1,2],"model":"long-name","input":"x","prompt":"x","messages":[]}"#;
            assert_eq!(seen.text(), expected, "{}", seen.target);
        }
    });
}

//! How long it takes to read a request body, by its size and kind, beside a parser that keeps
//! nothing at all (`serde_json` into `IgnoredAny`) as a yardstick in the same run.
//! To add a body: a row in `bodies`.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use serde::de::IgnoredAny;
use weir::request::{self, Inference, Limits};

/// A chat whose one message holds `content`, JSON-escaped already.
fn chat(content: &str) -> Bytes {
    let head = r#"{"model": "org/some-model-8b", "messages": [{"role": "user", "content": "#;
    let tail = r#"}], "max_tokens": 256, "temperature": 0.7, "stream": true,
        "stream_options": {"include_usage": true}}"#;
    Bytes::from([head, content, tail].concat())
}

/// Prose with quotes, line breaks and escapes, as a chat client sends it.
fn escaped_text(bytes: usize) -> String {
    let line =
        "She said \\\"caf\\u00e9 au lait, please\\\" and wrote it down.\\n\\tTwice, in fact. ";
    format!("\"{}\"", line.repeat(bytes / line.len() + 1))
}

/// A picture as a data URL.
fn image(bytes: usize) -> String {
    let digits = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ/+Zz0123";
    let data = digits.repeat(bytes / digits.len() + 1);
    let head = r#"[{"type": "image_url", "image_url": {"url": "data:image/png;base64,"#;
    [head, &data, r#""}}]"#].concat()
}

fn bodies() -> Vec<(&'static str, Bytes)> {
    vec![
        ("190B", chat("\"Hello\"")),
        ("1kB", chat(&escaped_text(850))),
        ("100kB_escaped_text", chat(&escaped_text(100_000))),
        ("100kB_chinese", chat(&format!("\"{}\"", "今天天气很好。".repeat(4_762)))),
        ("1MB_image", chat(&image(1_000_000))),
        ("5MB_image", chat(&image(5_000_000))),
    ]
}

fn read_json(criterion: &mut Criterion) {
    let limits = Limits::default();
    let mut group = criterion.benchmark_group("parse");
    for (name, body) in bodies() {
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_with_input(BenchmarkId::new("weir", name), &body, |bencher, body| {
            bencher.iter(|| {
                let found = request::find("POST", "/v1/chat/completions");
                let api = found.api()?;
                let inference =
                    Inference::read(api, Some(b"application/json"), body.clone(), &limits).ok()?;
                black_box((inference.model(), inference.streaming(), inference.tokens_max()));
                Some(inference)
            });
        });
        group.bench_with_input(BenchmarkId::new("serde_ignored", name), &body, |bencher, body| {
            bencher.iter(|| serde_json::from_slice::<IgnoredAny>(black_box(body)).is_ok());
        });
    }
    group.finish();
}

fn edit(criterion: &mut Criterion) {
    let limits = Limits::default();
    let mut group = criterion.benchmark_group("edit_model");
    for (name, body) in bodies() {
        let found = request::find("POST", "/v1/chat/completions");
        let Some(Ok(inference)) =
            found.api().map(|api| Inference::read(api, None, body.clone(), &limits))
        else {
            continue;
        };
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| inference.with_model(black_box("another/name")));
        });
    }
    group.finish();
}

fn read_form(criterion: &mut Criterion) {
    let file: Vec<u8> =
        (0..5_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let head =
        b"--xyz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n";
    let model =
        b"\r\n--xyz\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--xyz--\r\n";
    let body = Bytes::from([&head[..], &file, model].concat());
    let limits = Limits::default();
    let found = request::find("POST", "/v1/audio/transcriptions");
    let Some(api) = found.api() else { return };
    let content_type = Some(&b"multipart/form-data; boundary=xyz"[..]);
    let mut group = criterion.benchmark_group("parse_form");
    group.throughput(Throughput::Bytes(body.len() as u64));
    group.bench_function("5MB_sound", |bencher| {
        bencher.iter(|| Inference::read(api, content_type, body.clone(), &limits).is_ok());
    });
    group.finish();
}

fn look_up(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("find");
    for path in ["/v1/chat/completions", "//v1/chat/completions/", "/v1/models/org%2Fm", "/nope"] {
        group.bench_function(path.replace('/', "_"), |bencher| {
            bencher.iter(|| request::find(black_box("POST"), black_box(path)).api().is_some());
        });
    }
    group.finish();
}

criterion_group!(benches, read_json, edit, read_form, look_up);
criterion_main!(benches);

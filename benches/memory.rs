//! What Weir holds: per open stream, per slow or stopped reader, for a consumer, per upload. The
//! resident memory of the process, over its own at rest; engines and clients are in this process.
//!
//! `cargo bench --bench memory`
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    dead_code,
    missing_docs,
    unreachable_pub,
    reason = "a measuring program"
)]

#[path = "support/cpu.rs"]
mod cpu;
#[path = "support/proxies.rs"]
mod proxies;

use std::net::SocketAddr;
use std::time::Duration;

use proxies::Proxy;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const MODEL: &str = "bench";
const KIB: u64 = 1024;
const LARGE: usize = 8 << 20;

/// How an engine answers and how a client reads; the client asks for it by a header.
#[derive(Clone, Copy, PartialEq)]
enum Plan {
    /// An event, then one each second.
    Trickle,
    /// 8 MiB of events as fast as they are taken.
    Flood,
    /// A whole answer of just under 8 MB, all but its last byte.
    Whole,
    /// The body is not read for a while.
    Deaf,
}

impl Plan {
    fn word(self) -> &'static str {
        match self {
            Self::Trickle => "trickle",
            Self::Flood => "flood",
            Self::Whole => "whole",
            Self::Deaf => "deaf",
        }
    }
}

#[derive(Clone, Copy)]
enum Reader {
    Fast,
    Slow,
    Stopped,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    println!("{:<58} {:>9} {:>12}", "", "RSS, MB", "KiB each");
    streams("1,000 open streams, an event each second", Plan::Trickle, 1000, Reader::Fast).await;
    streams("1 stream of 8 MiB, read at once", Plan::Flood, 1, Reader::Fast).await;
    streams("300 streams of 8 MiB, readers at 100 kB/s", Plan::Flood, 300, Reader::Slow).await;
    streams("300 streams of 8 MiB, readers that stop", Plan::Flood, 300, Reader::Stopped).await;
    streams("100 whole answers of 8 MB, kept for usage", Plan::Whole, 100, Reader::Fast).await;
    uploads(16).await;
}

async fn streams(name: &str, plan: Plan, count: usize, reader: Reader) {
    let proxy = start().await;
    let rest = cpu::resident(proxy.process());
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(tokio::spawn(client(proxy.address(), plan, reader, 128)));
    }
    for seconds in [3, 5] {
        tokio::time::sleep(Duration::from_secs(if seconds == 3 { 3 } else { 2 })).await;
        show(&format!("{name}: after {seconds} s"), &proxy, rest, count);
    }
    for client in clients {
        client.abort();
    }
    // The allocator gives back what was free for a second.
    tokio::time::sleep(Duration::from_secs(4)).await;
    show(&format!("{name}: 4 s after the end"), &proxy, rest, count);
}

async fn uploads(count: usize) {
    let proxy = start().await;
    let rest = cpu::resident(proxy.process());
    let clients: Vec<_> = (0..count)
        .map(|_| tokio::spawn(client(proxy.address(), Plan::Deaf, Reader::Fast, LARGE)))
        .collect();
    tokio::time::sleep(Duration::from_secs(3)).await;
    show(&format!("{count} uploads of 8 MiB under way"), &proxy, rest, count);
    for client in clients {
        client.abort();
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    show(&format!("{count} uploads of 8 MiB: 4 s after the end"), &proxy, rest, count);
}

fn show(name: &str, proxy: &Proxy, rest: u64, count: usize) {
    let grown = cpu::resident(proxy.process()).saturating_sub(rest);
    println!(
        "{name:<58} {:>9.1} {:>12.1}",
        grown as f64 / 1e6,
        grown as f64 / 1024.0 / count as f64
    );
}

async fn start() -> Proxy {
    let mut engines = Vec::new();
    for _ in 0..3 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        engines.push(listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(engine(stream));
            }
        });
    }
    let proxy = Proxy::weir(&engines, MODEL);
    proxy.wait_ready().await;
    // A few requests first, so that what is made once is made.
    for _ in 0..50 {
        let _ = tokio::time::timeout(
            Duration::from_millis(20),
            client(proxy.address(), Plan::Trickle, Reader::Fast, 128),
        )
        .await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    proxy
}

async fn head(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        text.push(stream.read_u8().await?);
    }
    Ok(String::from_utf8_lossy(&text).to_ascii_lowercase())
}

async fn engine(mut stream: TcpStream) -> std::io::Result<()> {
    let request = head(&mut stream).await?;
    if request.starts_with("get") {
        let answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
        return stream.write_all(answer.as_bytes()).await;
    }
    if request.contains("x-plan: deaf") {
        tokio::time::sleep(Duration::from_secs(10)).await;
        return Ok(());
    }
    let length = request
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |length| length.trim().parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    if request.contains("x-plan: whole") {
        let length = 8_000_000;
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(&vec![b' '; length - 1]).await?;
        tokio::time::sleep(Duration::from_secs(30)).await;
        return Ok(());
    }
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\
                Transfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let flood = request.contains("x-plan: flood");
    let text = "x".repeat(if flood { 900 } else { 20 });
    let event = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n");
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    for _ in 0..if flood { LARGE / chunk.len() } else { 3600 } {
        stream.write_all(chunk.as_bytes()).await?;
        if !flood {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    stream.write_all(b"0\r\n\r\n").await
}

async fn client(
    target: SocketAddr,
    plan: Plan,
    reader: Reader,
    body: usize,
) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(target).await?;
    let text = "x".repeat(body.saturating_sub(100));
    let stream_wanted = plan != Plan::Whole;
    let body = format!(
        r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"{text}"}}],"stream":{stream_wanted}}}"#
    );
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n\
         X-Plan: {}\r\nContent-Length: {}\r\n\r\n",
        plan.word(),
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut buffer = vec![0; 10_000];
    loop {
        match reader {
            Reader::Fast => {}
            Reader::Slow => tokio::time::sleep(Duration::from_millis(100)).await,
            Reader::Stopped => tokio::time::sleep(Duration::from_secs(3600)).await,
        }
        if stream.read(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}

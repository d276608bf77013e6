//! The server over real sockets, spoken to byte by byte.

mod answers;
mod faults;
mod lifecycle;

use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::*;

const PATIENCE: Duration = Duration::from_secs(5);
const HELLO: &str = r#"{"messages":[{"role":"user","content":"Hello"}],"max_tokens":6}"#;
const HELLO_STREAM: &str =
    r#"{"messages":[{"role":"user","content":"Hello"}],"max_tokens":6,"stream":true}"#;

/// A quick engine: a step takes 50 us.
fn quick() -> Options {
    Options { speed: 240.0, ..Options::default() }
}

fn start(options: Options) -> EngineServer {
    EngineServer::start(options, Listen::At("127.0.0.1:0".parse().unwrap())).unwrap()
}

struct Client {
    stream: TcpStream,
    inbox: Vec<u8>,
}

#[derive(Debug)]
struct Response {
    status: u16,
    head: String,
    body: Vec<u8>,
    chunks: usize,
}

impl Response {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The data of each event, in order.
    fn events(&self) -> Vec<String> {
        let events = self.text().split("\n\n").filter(|event| !event.is_empty());
        events
            .map(|e| e.lines().find_map(|l| l.strip_prefix("data: ")).unwrap().to_owned())
            .collect()
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }
}

impl Client {
    async fn to(server: &EngineServer) -> Self {
        let stream = TcpStream::connect(server.addr()).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, inbox: Vec::new() }
    }

    async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    async fn post(&mut self, path: &str, headers: &str, body: &str) -> Response {
        self.send(request(path, headers, body)).await;
        self.response().await
    }

    async fn get(&mut self, path: &str) -> Response {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
        self.response().await
    }

    /// Reads more; `Ok(0)` is the end.
    async fn more(&mut self) -> std::io::Result<usize> {
        timeout(PATIENCE, self.stream.read_buf(&mut self.inbox)).await.expect("no silence")
    }

    async fn until(&mut self, mark: &[u8]) -> Vec<u8> {
        loop {
            if let Some(at) = memchr::memmem::find(&self.inbox, mark) {
                let rest = self.inbox.split_off(at + mark.len());
                return std::mem::replace(&mut self.inbox, rest);
            }
            assert_ne!(self.more().await.unwrap(), 0, "closed after {:?}", self.inbox);
        }
    }

    async fn exactly(&mut self, bytes: usize) -> Vec<u8> {
        while self.inbox.len() < bytes {
            assert_ne!(self.more().await.unwrap(), 0, "closed early");
        }
        let rest = self.inbox.split_off(bytes);
        std::mem::replace(&mut self.inbox, rest)
    }

    /// Everything until the end, and whether that was a reset.
    async fn rest(&mut self) -> (Vec<u8>, bool) {
        loop {
            match self.more().await {
                Ok(0) => return (std::mem::take(&mut self.inbox), false),
                Ok(_) => {}
                Err(_) => return (std::mem::take(&mut self.inbox), true),
            }
        }
    }

    async fn response(&mut self) -> Response {
        let head = String::from_utf8(self.until(b"\r\n\r\n").await).unwrap();
        let status = head[9..12].parse().unwrap();
        let mut response = Response { status, head, body: Vec::new(), chunks: 0 };
        if let Some(length) = response.header("content-length") {
            let length = length.parse().unwrap();
            response.body = self.exactly(length).await;
        } else if response.header("transfer-encoding").is_some() {
            loop {
                let size = String::from_utf8(self.until(b"\r\n").await).unwrap();
                let size = usize::from_str_radix(size.trim(), 16).unwrap();
                let chunk = self.exactly(size + 2).await;
                if size == 0 {
                    break;
                }
                response.chunks += 1;
                response.body.extend_from_slice(&chunk[..size]);
            }
        } else if status != 204 {
            response.body = self.rest().await.0;
        }
        response
    }
}

fn request(path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n{headers}\r\n{body}"
    )
}

/// Waits for something that will be so soon, and says what never was.
async fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    for _ in 0..500 {
        if so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("never: {what}");
}

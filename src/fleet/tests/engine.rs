//! A small engine on a socket: enough of vLLM's HTTP for probes, with knobs.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub(super) struct Engine {
    address: SocketAddr,
    knobs: Arc<Mutex<Knobs>>,
    task: JoinHandle<()>,
}

#[derive(Default)]
pub(super) struct Knobs {
    health: u16,
    models: Vec<String>,
    key: Option<String>,
    hang: bool,
    /// `None`: it does not know the question.
    asleep: Option<bool>,
    counts: HashMap<String, usize>,
}

pub(super) async fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap().local_addr().unwrap().port()
}

impl Engine {
    pub(super) async fn start(models: &[&str]) -> Self {
        Self::start_at(0, models).await
    }

    pub(super) async fn start_at(port: u16, models: &[&str]) -> Self {
        Self::serve(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap(), models)
    }

    /// `None` where the machine speaks no IPv6.
    pub(super) async fn start_v6(models: &[&str]) -> Option<Self> {
        let listener = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).await.ok()?;
        Some(Self::serve(listener, models))
    }

    fn serve(listener: TcpListener, models: &[&str]) -> Self {
        let address = listener.local_addr().unwrap();
        let knobs = Arc::new(Mutex::new(knobs(models)));
        let shared = Arc::clone(&knobs);
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let knobs = Arc::clone(&shared);
                tokio::spawn(async move { answer(stream, &knobs).await });
            }
        });
        Self { address, knobs, task }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn id(&self) -> String {
        self.address.to_string()
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    pub(super) fn count(&self, path: &str) -> usize {
        self.knobs.lock().counts.get(path).copied().unwrap_or(0)
    }

    pub(super) fn set_health(&self, status: u16) {
        self.knobs.lock().health = status;
    }

    pub(super) fn set_models(&self, models: &[&str]) {
        self.knobs.lock().models = models.iter().map(|model| (*model).to_owned()).collect();
    }

    pub(super) fn require_key(&self, key: &str) {
        self.knobs.lock().key = Some(key.to_owned());
    }

    pub(super) fn hang(&self, hang: bool) {
        self.knobs.lock().hang = hang;
    }

    pub(super) fn sleep(&self, asleep: bool) {
        self.knobs.lock().asleep = Some(asleep);
    }

    pub(super) fn stop(&self) {
        self.task.abort();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

pub(super) fn knobs(models: &[&str]) -> Knobs {
    let models = models.iter().map(|model| (*model).to_owned()).collect();
    Knobs { health: 200, models, ..Knobs::default() }
}

pub(super) async fn answer(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    knobs: &Mutex<Knobs>,
) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?;
    let path = head.split(' ').nth(1)?.to_owned();
    let (status, body) = {
        let mut knobs = knobs.lock();
        *knobs.counts.entry(path.clone()).or_default() += 1;
        reply(&knobs, &head, &path)
    };
    if knobs.lock().hang {
        std::future::pending::<()>().await;
    }
    let length = body.len();
    let reply = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}");
    stream.write_all(reply.as_bytes()).await.ok()?;
    stream.shutdown().await.ok()
}

fn reply(knobs: &Knobs, head: &str, path: &str) -> (u16, String) {
    if path.ends_with("/health") {
        return (knobs.health, String::new());
    }
    if path.ends_with("/is_sleeping") {
        return match knobs.asleep {
            Some(asleep) => (200, format!(r#"{{"is_sleeping":{asleep}}}"#)),
            None => (404, String::new()),
        };
    }
    if !path.ends_with("/v1/models") {
        return (404, String::new());
    }
    let mut headers = head.lines().filter_map(|line| line.split_once(": "));
    let sent = headers.find(|(name, _)| name.eq_ignore_ascii_case("authorization"));
    if knobs.key.is_some() && sent.map(|(_, value)| value) != knobs.key.as_deref() {
        return (401, r#"{"error":"Unauthorized"}"#.to_owned());
    }
    let card = |model: &String| format!(r#"{{"id":"{model}","object":"model","max_model_len":8}}"#);
    let cards: Vec<_> = knobs.models.iter().map(card).collect();
    (200, format!(r#"{{"object":"list","data":[{}]}}"#, cards.join(",")))
}

/// Serves HTTP/2 in the clear, by prior knowledge. Returns where, and the authorities it was asked
/// by.
pub(super) async fn serve_http2(models: &[&str]) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (knobs, asked) = (Arc::new(knobs(models)), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&asked);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (knobs, seen) = (Arc::clone(&knobs), Arc::clone(&seen));
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    let authority = request.uri().authority().map(ToString::to_string);
                    seen.lock().push(authority.unwrap_or_default());
                    let (status, body) = reply(&knobs, "", request.uri().path());
                    let head = http::Response::builder().status(status).body(()).unwrap();
                    let mut sender = respond.send_response(head, false).unwrap();
                    sender.send_data(body.into(), true).unwrap();
                }
            });
        }
    });
    (address, asked)
}

//! An HTTP/1.1 server that does exactly what a script says, and remembers all it sees.
//! It stands where an engine would; for a server that behaves like one see `engines.rs`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pingora::tls::TlsAcceptor;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::http1::{Wire, find, header_line};
use super::reply::Headers;
use super::tls::Certificate;
use super::until;

/// What a script does next.
#[derive(Clone, Debug)]
pub enum Act {
    /// Writes these bytes.
    Write(Vec<u8>),
    /// Writes these bytes so many times.
    Repeat(Vec<u8>, usize),
    /// Waits.
    Pause(Duration),
    /// Waits until the test says so.
    Wait(Arc<Notify>),
    /// Says nothing more; the connection stays open.
    Stall,
    /// Sends back whatever comes, until the peer leaves.
    Echo,
    /// Closes in good order.
    Fin,
    /// Resets.
    Rst,
}

/// How the body of a request was framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// No body.
    None,
    /// By its length.
    Length,
    /// In chunks.
    Chunked,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Number of the connection.
    pub connection: usize,
    /// Method.
    pub method: String,
    /// Target of the request line.
    pub target: String,
    /// Header lines.
    pub headers: Headers,
    /// The body without its framing.
    pub body: Vec<u8>,
    /// How it was framed.
    pub framing: Framing,
    /// When all of it was there.
    pub at: Instant,
}

impl Seen {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }
}

type Script = Box<dyn Fn(&Seen) -> Vec<Act> + Send + Sync>;

struct Shared {
    /// Probes are answered with these, and that there is no `/is_sleeping`; none: the script does
    /// it.
    models: Option<Vec<String>>,
    script: Mutex<Arc<Script>>,
    seen: Mutex<Vec<Seen>>,
    /// When the peer of a request went away before the script was done.
    left: Mutex<Vec<Option<Instant>>>,
    asked: Mutex<Vec<(String, Instant)>>,
    connections: AtomicUsize,
    tls: Option<TlsAcceptor>,
}

/// A scripted server.
pub struct Upstream {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
    listener: Option<Arc<TcpListener>>,
    scheme: &'static str,
}

impl Upstream {
    /// Healthy, serving this model; the script answers everything else.
    pub async fn start(
        model: &str,
        script: impl Fn(&Seen) -> Vec<Act> + Send + Sync + 'static,
    ) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        Self::at(address, &[model], script).await
    }

    /// The same at an address, with several models; with none the script answers probes, too.
    pub async fn at(
        address: SocketAddr,
        models: &[&str],
        script: impl Fn(&Seen) -> Vec<Act> + Send + Sync + 'static,
    ) -> Self {
        Self::build(address, models, Box::new(script), None).await
    }

    /// Over TLS.
    pub async fn start_tls(
        certificate: &Certificate,
        model: &str,
        script: impl Fn(&Seen) -> Vec<Act> + Send + Sync + 'static,
    ) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let tls = Some(certificate.acceptor());
        Self::build(address, &[model], Box::new(script), tls).await
    }

    /// Over TLS, for clients with this certificate only.
    pub async fn start_mutual_tls(
        certificate: &Certificate,
        client: &Certificate,
        model: &str,
        script: impl Fn(&Seen) -> Vec<Act> + Send + Sync + 'static,
    ) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let tls = Some(certificate.acceptor_for(client));
        Self::build(address, &[model], Box::new(script), tls).await
    }

    async fn build(
        address: SocketAddr,
        models: &[&str],
        script: Script,
        tls: Option<TlsAcceptor>,
    ) -> Self {
        let listener = Arc::new(TcpListener::bind(address).await.unwrap());
        let address = listener.local_addr().unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let models = models.iter().map(|model| (*model).to_owned()).collect::<Vec<_>>();
        let shared = Arc::new(Shared {
            models: Some(models).filter(|models| !models.is_empty()),
            script: Mutex::new(Arc::new(script)),
            seen: Mutex::default(),
            left: Mutex::default(),
            asked: Mutex::default(),
            connections: AtomicUsize::new(0),
            tls,
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(Arc::clone(&listener), Arc::clone(&shared)));
        Self { address, shared, tasks, listener: Some(listener), scheme }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// From now on another script.
    pub fn script(&self, script: impl Fn(&Seen) -> Vec<Act> + Send + Sync + 'static) {
        *self.shared.script.lock() = Arc::new(Box::new(script));
    }

    /// The requests so far, without probes.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().clone()
    }

    /// How many requests there were, without probes.
    pub fn count(&self) -> usize {
        self.shared.seen.lock().len()
    }

    /// The only request there was.
    #[track_caller]
    pub fn only(&self) -> Seen {
        let seen = self.seen();
        assert_eq!(seen.len(), 1, "one request must have come: {seen:?}");
        seen[0].clone()
    }

    /// Waits until so many requests have come.
    pub async fn wait_for(&self, count: usize) {
        until("a request at the upstream", async || (count <= self.count()).then_some(())).await;
    }

    /// Waits until the peer of the request with this number has gone; tells when.
    pub async fn left(&self, number: usize) -> Instant {
        let what = format!("the peer of request {number} leaves");
        until(&what, async || self.shared.left.lock().get(number).copied().flatten()).await
    }

    /// Probes and questions for models, with their time.
    pub fn asked(&self) -> Vec<(String, Instant)> {
        self.shared.asked.lock().clone()
    }

    /// Closes the listener only: from now on connects are refused, and what is open stays open.
    pub fn stop_listening(&mut self) {
        if let Some(listener) = self.listener.take() {
            SockRef::from(&*listener).shutdown(std::net::Shutdown::Both).unwrap();
        }
    }

    /// Closes the listener and all connections.
    pub async fn stop(&mut self) {
        self.listener = None;
        self.tasks.shutdown().await;
    }
}

async fn accept(listener: Arc<TcpListener>, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { break };
        let _ = stream.set_nodelay(true);
        let number = shared.connections.fetch_add(1, Ordering::Relaxed);
        connections.spawn(connection(stream, number, Arc::clone(&shared)));
        while connections.try_join_next().is_some() {}
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn connection(stream: TcpStream, number: usize, shared: Arc<Shared>) {
    let wire: Box<dyn Wire> = match &shared.tls {
        None => Box::new(stream),
        Some(acceptor) => match acceptor.accept(stream).await {
            Ok(stream) => Box::new(stream),
            Err(_) => return,
        },
    };
    let mut peer = Peer { wire, unread: Vec::new() };
    while let Some(seen) = peer.request(number).await {
        if let Some(answer) = control(&seen, &shared) {
            if peer.wire.write_all(&answer).await.is_err() {
                return;
            }
            continue;
        }
        let script = Arc::clone(&shared.script.lock());
        let acts = script(&seen);
        let index = {
            let mut all = shared.seen.lock();
            shared.left.lock().push(None);
            all.push(seen);
            all.len() - 1
        };
        for act in acts {
            match peer.perform(act).await {
                Done::Go => {}
                Done::Ended => return,
                Done::Left => {
                    shared.left.lock()[index] = Some(Instant::now());
                    return;
                }
            }
        }
    }
}

fn control(seen: &Seen, shared: &Shared) -> Option<Vec<u8>> {
    let models = shared.models.as_ref()?;
    let path = seen.target.split('?').next().unwrap();
    if path.ends_with("/is_sleeping") {
        return Some(answer_bytes(404, &[], b""));
    }
    let is_probe = path.ends_with("/health") || path.ends_with("/v1/models");
    if seen.method != "GET" || !is_probe {
        return None;
    }
    shared.asked.lock().push((seen.target.clone(), seen.at));
    if path.ends_with("/health") {
        return Some(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec());
    }
    let card = |id: &String| format!(r#"{{"id":"{id}","object":"model","owned_by":"kit"}}"#);
    let cards: Vec<_> = models.iter().map(card).collect();
    let body = format!(r#"{{"object":"list","data":[{}]}}"#, cards.join(","));
    Some(answer_bytes(200, &[], body.as_bytes()))
}

enum Done {
    Go,
    Ended,
    Left,
}

struct Peer {
    wire: Box<dyn Wire>,
    unread: Vec<u8>,
}

impl Peer {
    async fn fill(&mut self) -> bool {
        let mut piece = vec![0; 64 * 1024];
        let length = self.wire.read(&mut piece).await.unwrap_or(0);
        self.unread.extend_from_slice(&piece[..length]);
        0 < length
    }

    async fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        self.unread.reserve(length.saturating_sub(self.unread.len()));
        while self.unread.len() < length {
            if !self.fill().await {
                return None;
            }
        }
        Some(self.unread.drain(..length).collect())
    }

    async fn until(&mut self, mark: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(end) = find(&self.unread, mark) {
                return self.take(end + mark.len()).await;
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    async fn request(&mut self, connection: usize) -> Option<Seen> {
        let head = self.until(b"\r\n\r\n").await?;
        let mut lines = head[..head.len() - 4].split(|byte| *byte == b'\n');
        let first = String::from_utf8(lines.next()?.trim_ascii().to_vec()).expect("a request line");
        let mut words = first.split(' ');
        let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
        let headers = Headers(lines.map(header_line).collect());
        let (body, framing) =
            match (headers.one("content-length"), headers.has("transfer-encoding")) {
                (Some(_), true) => panic!("two framings: {headers:?}"),
                (Some(length), false) => {
                    (self.take(length.parse().unwrap()).await?, Framing::Length)
                }
                (None, true) => (self.chunks().await?, Framing::Chunked),
                (None, false) => (Vec::new(), Framing::None),
            };
        let at = Instant::now();
        Some(Seen { connection, method, target, headers, body, framing, at })
    }

    async fn chunks(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = self.until(b"\r\n").await?;
            let size = std::str::from_utf8(&line).unwrap().trim();
            let size = usize::from_str_radix(size, 16).expect("the size of a chunk");
            body.extend_from_slice(&self.take(size + 2).await?[..size]);
            if size == 0 {
                return Some(body);
            }
        }
    }

    async fn perform(&mut self, act: Act) -> Done {
        match act {
            Act::Write(bytes) => self.write(&bytes, 1).await,
            Act::Repeat(bytes, times) => self.write(&bytes, times).await,
            Act::Pause(time) => self.unless_left(tokio::time::sleep(time)).await,
            Act::Wait(signal) => self.unless_left(signal.notified()).await,
            Act::Echo => loop {
                let bytes = std::mem::take(&mut self.unread);
                if self.wire.write_all(&bytes).await.is_err() || !self.fill().await {
                    return Done::Left;
                }
            },
            Act::Stall => self.unless_left(std::future::pending()).await,
            Act::Fin => {
                let _ = self.wire.shutdown().await;
                Done::Ended
            }
            Act::Rst => {
                let _ = SockRef::from(self.wire.socket()).set_linger(Some(Duration::ZERO));
                Done::Ended
            }
        }
    }

    async fn write(&mut self, bytes: &[u8], times: usize) -> Done {
        for _ in 0..times {
            if self.wire.write_all(bytes).await.is_err() {
                return Done::Left;
            }
        }
        let _ = self.wire.flush().await;
        Done::Go
    }

    async fn unless_left(&mut self, wait: impl Future<Output = ()>) -> Done {
        tokio::pin!(wait);
        loop {
            tokio::select! {
                () = &mut wait => return Done::Go,
                more = self.fill() => if !more { return Done::Left },
            }
        }
    }
}

/// An answer of JSON.
pub fn json(body: &str) -> Vec<Act> {
    answer(200, body)
}

/// An answer of JSON with this status.
pub fn answer(status: u16, body: &str) -> Vec<Act> {
    answer_with(status, &[("content-type", "application/json")], body.as_bytes())
}

/// An answer with these header lines, and its length.
pub fn answer_with(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Vec<Act> {
    vec![Act::Write(answer_bytes(status, headers, body))]
}

fn answer_bytes(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("HTTP/1.1 {status} Status\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let mut bytes = head.into_bytes();
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(body);
    bytes
}

/// The head of a stream of events, in chunks.
pub fn sse_head() -> Act {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
                transfer-encoding: chunked\r\n\r\n";
    Act::Write(head.as_bytes().to_vec())
}

/// One chunk with this text.
pub fn sse(text: impl AsRef<[u8]>) -> Act {
    let text = text.as_ref();
    let mut chunk = format!("{:x}\r\n", text.len()).into_bytes();
    chunk.extend_from_slice(text);
    chunk.extend_from_slice(b"\r\n");
    Act::Write(chunk)
}

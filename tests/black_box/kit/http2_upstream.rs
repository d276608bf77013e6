//! A server that speaks HTTP/2 without TLS and answers as a script says.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::until;

/// What a script does next.
#[derive(Clone, Debug)]
pub enum Frame {
    /// A piece of the body.
    Data(Vec<u8>),
    /// Waits.
    Pause(Duration),
    /// Says nothing more.
    Stall,
    /// Resets the stream.
    Reset,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Http2Seen {
    /// The head.
    pub head: Arc<http::request::Parts>,
    /// The body.
    pub body: Vec<u8>,
}

type Script = Box<dyn Fn(&Http2Seen) -> Vec<Frame> + Send + Sync>;

struct Shared {
    model: String,
    script: Script,
    seen: Mutex<Vec<Http2Seen>>,
    left: Mutex<Vec<Option<Instant>>>,
}

/// A scripted server that speaks HTTP/2.
pub struct Http2Upstream {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

impl Http2Upstream {
    /// Healthy, serving this model; the script answers everything else with status 200.
    pub async fn start(
        model: &str,
        script: impl Fn(&Http2Seen) -> Vec<Frame> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            model: model.to_owned(),
            script: Box::new(script),
            seen: Mutex::default(),
            left: Mutex::default(),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, Arc::clone(&shared)));
        Self { address, shared, _tasks: tasks }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The requests so far, without probes.
    pub fn seen(&self) -> Vec<Http2Seen> {
        self.shared.seen.lock().clone()
    }

    /// Waits until the request with this number is taken back.
    pub async fn left(&self, number: usize) -> Instant {
        until("a stream is taken back", async || {
            self.shared.left.lock().get(number).copied().flatten()
        })
        .await
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(connection(stream, Arc::clone(&shared)));
    }
}

async fn connection(stream: TcpStream, shared: Arc<Shared>) {
    let Ok(mut connection) = h2::server::handshake(stream).await else { return };
    let mut streams = JoinSet::new();
    while let Some(Ok((request, respond))) = connection.accept().await {
        let shared = Arc::clone(&shared);
        streams.spawn(async move {
            let _ = exchange(request, respond, &shared).await;
        });
    }
}

async fn exchange(
    request: http::Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    shared: &Shared,
) -> Result<(), h2::Error> {
    let (head, mut incoming) = request.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = incoming.data().await {
        let piece = piece?;
        incoming.flow_control().release_capacity(piece.len())?;
        body.extend_from_slice(&piece);
    }
    let kind = if String::from_utf8_lossy(&body).contains("\"stream\":true") {
        "text/event-stream"
    } else {
        "application/json"
    };
    let answer = http::Response::builder().header("content-type", kind).body(()).unwrap();
    let mut send = respond.send_response(answer, false)?;
    match head.uri.path() {
        "/health" | "/is_sleeping" => return send.send_data(Bytes::new(), true),
        "/v1/models" => {
            let list = format!(r#"{{"object":"list","data":[{{"id":"{}"}}]}}"#, shared.model);
            return send.send_data(list.into(), true);
        }
        _ => {}
    }
    let seen = Http2Seen { head: Arc::new(head), body };
    let frames = (shared.script)(&seen);
    let number = {
        let mut all = shared.seen.lock();
        shared.left.lock().push(None);
        all.push(seen);
        all.len() - 1
    };
    for frame in frames {
        let wait = match frame {
            Frame::Data(bytes) => {
                send.send_data(bytes.into(), false)?;
                continue;
            }
            Frame::Reset => {
                send.send_reset(Reason::INTERNAL_ERROR);
                return Ok(());
            }
            Frame::Pause(time) => time,
            Frame::Stall => Duration::from_secs(3600),
        };
        let left = std::future::poll_fn(|cx| send.poll_reset(cx));
        if tokio::time::timeout(wait, left).await.is_ok() {
            shared.left.lock()[number] = Some(Instant::now());
            return Ok(());
        }
    }
    send.send_data(Bytes::new(), true)
}

//! An HTTP/2 client.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

use super::http1::{Request, Wire};
use super::reply::{End, Event, Headers, Reply, events};
use super::soon;

/// A connection of a client that speaks HTTP/2.
pub struct Http2 {
    sender: SendRequest<Bytes>,
    driver: JoinHandle<()>,
}

/// One request under way.
pub struct Stream {
    response: Option<ResponseFuture>,
    body: Option<RecvStream>,
    upload: SendStream<Bytes>,
    collected: Vec<u8>,
}

impl Http2 {
    /// Connects without TLS and begins with HTTP/2.
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self::over(stream).await
    }

    /// Over a stream that is there.
    pub async fn over(wire: impl Wire + 'static) -> Self {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 20);
        let (sender, connection) = soon("HTTP/2", builder.handshake(wire)).await.unwrap();
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Self { sender, driver }
    }

    /// Sends a request and reads the whole answer.
    pub async fn send(&mut self, request: &Request) -> Reply {
        let mut stream = self.start(request, request.body_bytes()).await;
        let mut reply = stream.head().await;
        if reply.status != 0 {
            (reply.body, reply.end) = stream.rest().await;
        }
        reply
    }

    /// Sends a request; its answer is still to come.
    pub async fn open(&mut self, request: &Request) -> Stream {
        self.start(request, request.body_bytes()).await
    }

    /// Sends the head, which promises a body.
    pub async fn begin(&mut self, request: &Request) -> Stream {
        let head = head_of(request);
        let sender = self.sender.clone();
        let mut sender = soon("a free stream", sender.ready()).await.unwrap();
        let (response, upload) = sender.send_request(head, false).unwrap();
        Stream { response: Some(response), body: None, upload, collected: Vec::new() }
    }

    async fn start(&mut self, request: &Request, body: &[u8]) -> Stream {
        let head = head_of(request);
        let sender = self.sender.clone();
        let mut sender = soon("a free stream", sender.ready()).await.unwrap();
        let (response, mut upload) = sender.send_request(head, body.is_empty()).unwrap();
        if !body.is_empty() {
            upload.send_data(Bytes::copy_from_slice(body), true).unwrap();
        }
        Stream { response: Some(response), body: None, upload, collected: Vec::new() }
    }

    /// Whether the connection has ended.
    pub fn is_over(&self) -> bool {
        self.driver.is_finished()
    }

    /// Leaves with all that is under way.
    pub fn leave(self) {
        self.driver.abort();
    }
}

impl Drop for Http2 {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

fn head_of(request: &Request) -> http::Request<()> {
    let mut head = http::Request::builder()
        .method(request.method.as_str())
        .version(http::Version::HTTP_2)
        .uri(format!("http://api.test{}", request.target));
    for (name, value) in &request.headers {
        if !name.eq_ignore_ascii_case("host") {
            head = head.header(name.to_ascii_lowercase(), value.as_slice());
        }
    }
    head.body(()).unwrap()
}

impl Stream {
    /// Reads the head of the answer. Status 0: there is none.
    pub async fn head(&mut self) -> Reply {
        let response = soon("an answer", self.response.take().expect("one head")).await;
        let response = match response {
            Ok(response) => response,
            Err(error) => {
                let (headers, body) = (Headers::default(), Vec::new());
                return Reply { status: 0, headers, body, end: end_of(&error) };
            }
        };
        let (head, body) = response.into_parts();
        self.body = Some(body);
        let lines = head.headers.iter();
        let lines = lines.map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
        let headers = Headers(lines.collect());
        Reply { status: head.status.as_u16(), headers, body: Vec::new(), end: End::Cut }
    }

    /// Sends a piece of the body.
    pub fn upload(&mut self, piece: &[u8], last: bool) {
        let _ = self.upload.send_data(Bytes::copy_from_slice(piece), last);
    }

    /// The next piece of the body, or how the body ended.
    pub async fn piece(&mut self) -> Result<Vec<u8>, End> {
        let body = self.body.as_mut().expect("the head was read");
        match soon("a piece of the answer", body.data()).await {
            Some(Ok(piece)) => {
                let _ = body.flow_control().release_capacity(piece.len());
                Ok(piece.to_vec())
            }
            Some(Err(error)) => Err(end_of(&error)),
            None => Err(match body.trailers().await {
                Ok(_) => End::Proper,
                Err(error) => end_of(&error),
            }),
        }
    }

    /// The rest of the body and how it ended.
    pub async fn rest(&mut self) -> (Vec<u8>, End) {
        let mut body = std::mem::take(&mut self.collected);
        loop {
            match self.piece().await {
                Ok(piece) => body.extend_from_slice(&piece),
                Err(end) => return (body, end),
            }
        }
    }

    /// Reads until so many events have come.
    pub async fn events(&mut self, count: usize) -> Vec<Event> {
        loop {
            let found = events(&self.collected);
            if count <= found.len() {
                return found;
            }
            match self.piece().await {
                Ok(piece) => self.collected.extend_from_slice(&piece),
                Err(end) => panic!("{end:?} after {} events of {count}", found.len()),
            }
        }
    }

    /// Takes the request back; the connection stays.
    pub fn reset(mut self) {
        self.upload.send_reset(Reason::CANCEL);
    }
}

fn end_of(error: &h2::Error) -> End {
    match error.reason() {
        Some(reason) if error.is_reset() => End::Reset(format!("{reason:?}")),
        _ => End::Cut,
    }
}

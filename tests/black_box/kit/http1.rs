//! An HTTP/1.1 client that sends exactly what it is told and believes nothing.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use super::reply::{End, Event, Headers, Reply, events};
use super::soon;

/// A byte stream with a TCP socket underneath.
pub trait Wire: AsyncRead + AsyncWrite + Unpin + Send {
    /// The socket.
    fn socket(&self) -> &TcpStream;
}

impl Wire for TcpStream {
    fn socket(&self) -> &TcpStream {
        self
    }
}

/// How a body is framed.
#[derive(Clone, Debug)]
enum Body {
    None,
    Length(Vec<u8>),
    /// In chunks of so many bytes.
    Chunked(Vec<u8>, usize),
}

/// A request to be sent.
#[derive(Clone, Debug)]
pub struct Request {
    pub(super) method: String,
    pub(super) target: String,
    pub(super) headers: Vec<(String, Vec<u8>)>,
    body: Body,
}

impl Request {
    /// With no header but `Host`, and no body.
    pub fn new(method: &str, target: &str) -> Self {
        let (method, target) = (method.to_owned(), target.to_owned());
        Self { method, target, headers: Vec::new(), body: Body::None }
    }

    /// A GET.
    pub fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// A POST of JSON with its length.
    pub fn post(target: &str, body: impl AsRef<[u8]>) -> Self {
        Self::new("POST", target).header("Content-Type", "application/json").body(body)
    }

    /// Adds a body with its length.
    pub fn body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.body = Body::Length(body.as_ref().to_vec());
        self
    }

    /// Adds a header line.
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Sends the body in chunks of so many bytes.
    pub fn chunked(mut self, size: usize) -> Self {
        self.body = Body::Chunked(self.body_bytes().to_vec(), size);
        self
    }

    /// What is asked for.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// The body.
    pub fn body_bytes(&self) -> &[u8] {
        match &self.body {
            Body::None => &[],
            Body::Length(body) | Body::Chunked(body, _) => body,
        }
    }

    /// The head as it goes over the wire.
    pub fn head(&self) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target).into_bytes();
        if !self.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            head.extend_from_slice(b"Host: api.test\r\n");
        }
        for (name, value) in &self.headers {
            head.extend_from_slice(name.as_bytes());
            head.extend_from_slice(b": ");
            head.extend_from_slice(value);
            head.extend_from_slice(b"\r\n");
        }
        match &self.body {
            Body::None => {}
            Body::Length(body) => {
                head.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
            }
            Body::Chunked(..) => head.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        }
        head.extend_from_slice(b"\r\n");
        head
    }

    /// Head and body as they go over the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head();
        match &self.body {
            Body::None => {}
            Body::Length(body) => bytes.extend_from_slice(body),
            Body::Chunked(body, size) => {
                for chunk in body.chunks(*size) {
                    bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                    bytes.extend_from_slice(chunk);
                    bytes.extend_from_slice(b"\r\n");
                }
                bytes.extend_from_slice(b"0\r\n\r\n");
            }
        }
        bytes
    }

    /// Sends it over a connection of its own and reads the whole answer.
    pub async fn send(&self, address: SocketAddr) -> Reply {
        Raw::connect(address).await.send(self).await
    }

    /// Sends it over a connection of its own and reads the head of the answer.
    pub async fn open(&self, address: SocketAddr) -> (Raw, Reply) {
        let mut raw = Raw::connect(address).await;
        raw.write(&self.bytes()).await;
        let head = raw.head().await;
        (raw, head)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Bytes(usize),
    ChunkHead,
    UntilClose,
    Nothing,
}

/// A connection of a client.
pub struct Raw {
    wire: Box<dyn Wire>,
    unread: Vec<u8>,
    left: Left,
    chunked: bool,
    collected: Vec<u8>,
}

impl Raw {
    /// Connects.
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = soon("connect", TcpStream::connect(address)).await;
        let stream = stream.unwrap_or_else(|error| panic!("connect to {address}: {error}"));
        stream.set_nodelay(true).unwrap();
        Self::over(stream)
    }

    /// Over a stream that is there.
    pub fn over(wire: impl Wire + 'static) -> Self {
        Self {
            wire: Box::new(wire),
            unread: Vec::new(),
            left: Left::Nothing,
            chunked: false,
            collected: Vec::new(),
        }
    }

    /// Writes these bytes. A peer that is gone is no fault here; reading will show it.
    pub async fn write(&mut self, bytes: &[u8]) {
        let _ = soon("write", self.wire.write_all(bytes)).await;
        let _ = soon("flush", self.wire.flush()).await;
    }

    /// Says that nothing more will be written.
    pub async fn finish_writing(&mut self) {
        let _ = self.wire.shutdown().await;
    }

    /// Sends a request and reads the whole answer; the connection can be used again.
    pub async fn send(&mut self, request: &Request) -> Reply {
        self.write(&request.bytes()).await;
        self.reply(request.method == "HEAD").await
    }

    /// Reads an answer; `head_only` for one to `HEAD`.
    pub async fn reply(&mut self, head_only: bool) -> Reply {
        let mut reply = self.head().await;
        if head_only {
            self.left = Left::Nothing;
            reply.end = End::Proper;
        } else if reply.status != 0 {
            (reply.body, reply.end) = self.rest().await;
        }
        reply
    }

    /// Reads the head of an answer, interim answers passed over. Status 0: the peer left.
    pub async fn head(&mut self) -> Reply {
        loop {
            let head = self.any_head().await;
            if head.status == 101 || !(100..200).contains(&head.status) {
                return head;
            }
        }
    }

    /// Reads one head, be it an interim one.
    pub async fn any_head(&mut self) -> Reply {
        self.collected.clear();
        let end = loop {
            if let Some(end) = find(&self.unread, b"\r\n\r\n") {
                break end;
            }
            if !self.fill().await {
                let body = std::mem::take(&mut self.unread);
                return Reply { status: 0, headers: Headers::default(), body, end: End::Cut };
            }
        };
        let head: Vec<u8> = self.unread.drain(..end + 4).collect();
        let mut lines = head[..end].split(|byte| *byte == b'\n');
        let first = String::from_utf8(lines.next().unwrap().to_vec()).unwrap();
        let status = first.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {first}"));
        let headers = Headers(lines.map(header_line).collect());
        self.expect_body(status, &headers);
        Reply { status, headers, body: Vec::new(), end: End::Cut }
    }

    fn expect_body(&mut self, status: u16, headers: &Headers) {
        let length = headers.one("content-length").map(|text| text.parse().expect("a length"));
        let coding = headers.one("transfer-encoding");
        assert!(length.is_none() || coding.is_none(), "two framings: {headers:?}");
        self.chunked = coding.is_some();
        self.left = match (length, coding) {
            _ if (100..200).contains(&status) || status == 204 || status == 304 => Left::Nothing,
            (Some(0), _) => Left::Nothing,
            (Some(length), _) => Left::Bytes(length),
            (None, Some(coding)) => {
                assert_eq!(coding, "chunked");
                Left::ChunkHead
            }
            (None, None) => Left::UntilClose,
        };
    }

    /// The next piece of the body, or how the body ended.
    pub async fn piece(&mut self) -> Result<Vec<u8>, End> {
        loop {
            match self.left {
                Left::Nothing => return Err(End::Proper),
                Left::ChunkHead => {
                    let Some(line) = self.line().await else { return Err(End::Cut) };
                    let size = line.split(';').next().unwrap().trim();
                    let size = usize::from_str_radix(size, 16).expect("the size of a chunk");
                    self.left = Left::Bytes(size);
                    if size == 0 {
                        while let Some(trailer) = self.line().await {
                            if trailer.is_empty() {
                                self.left = Left::Nothing;
                                return Err(End::Proper);
                            }
                        }
                        return Err(End::Cut);
                    }
                }
                Left::Bytes(_) | Left::UntilClose => {
                    if self.unread.is_empty() && !self.fill().await {
                        let proper = self.left == Left::UntilClose;
                        self.left = Left::Nothing;
                        return Err(if proper { End::Proper } else { End::Cut });
                    }
                    return match self.take_bytes().await {
                        Some(bytes) => Ok(bytes),
                        None => Err(End::Cut),
                    };
                }
            }
        }
    }

    async fn take_bytes(&mut self) -> Option<Vec<u8>> {
        let Left::Bytes(left) = self.left else { return Some(std::mem::take(&mut self.unread)) };
        let take = left.min(self.unread.len());
        let bytes: Vec<u8> = self.unread.drain(..take).collect();
        self.left = match left - take {
            0 if self.chunked => {
                let line = self.line().await?;
                assert_eq!(line, "", "a chunk is longer than it says");
                Left::ChunkHead
            }
            0 => Left::Nothing,
            more => Left::Bytes(more),
        };
        Some(bytes)
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

    /// Reads until so many events have come since the head.
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

    /// So many bytes as they come, of whatever.
    pub async fn take(&mut self, length: usize) -> Vec<u8> {
        while self.unread.len() < length && self.fill().await {}
        let length = length.min(self.unread.len());
        self.unread.drain(..length).collect()
    }

    /// Waits until the peer closes; what it still sends is returned.
    pub async fn closed(&mut self) -> Vec<u8> {
        while self.fill().await {}
        std::mem::take(&mut self.unread)
    }

    /// Leaves without a word: the peer sees a reset.
    pub fn reset(self) {
        let _ = SockRef::from(self.wire.socket()).set_linger(Some(Duration::ZERO));
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = find(&self.unread, b"\r\n") {
                let line: Vec<u8> = self.unread.drain(..end + 2).collect();
                return Some(String::from_utf8(line[..end].to_vec()).expect("a line of text"));
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    /// Reads once; false: the peer left.
    async fn fill(&mut self) -> bool {
        let mut piece = vec![0; 64 * 1024];
        let read: io::Result<usize> = soon("an answer", self.wire.read(&mut piece)).await;
        let length = read.unwrap_or(0);
        self.unread.extend_from_slice(&piece[..length]);
        0 < length
    }
}

pub(super) fn header_line(line: &[u8]) -> (String, Vec<u8>) {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let colon = find(line, b":").unwrap_or_else(|| {
        panic!("not a header line: {}", String::from_utf8_lossy(line));
    });
    let name = String::from_utf8(line[..colon].to_vec()).expect("a header name");
    (name, line[colon + 1..].trim_ascii().to_vec())
}

pub(super) fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

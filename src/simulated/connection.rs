//! One accepted connection: bytes in, bytes out, and the news that the peer left, which is heard
//! whatever else is waited for. May not: know routes or answers.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::faults::End;
use super::head::{BodyLength, HEAD_BYTES_MAX, Head, Malformed};

/// Bytes of further requests that are taken in while one is answered.
const PIPELINED_BYTES_MAX: usize = 1024 * 1024;
const READ_BYTES: usize = 16 * 1024;
/// How long an orderly close waits for the peer's own.
const LINGER: Duration = Duration::from_secs(2);

/// Why an exchange ended before its answer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The peer closed or reset.
    PeerLeft,
    /// A fault that was asked for.
    Cut,
    /// The request was no HTTP, or too large.
    Malformed,
}

/// One connection.
pub(super) struct Connection {
    stream: TcpStream,
    inbox: BytesMut,
    /// Bytes to be written with the next [`Connection::flush`].
    pub(super) outbox: Vec<u8>,
    pub(super) id: u64,
    /// Requests answered so far.
    pub(super) answered: u64,
    /// Bytes per write and the pause after each, if a fault wants that.
    pub(super) split: Option<(u32, Duration)>,
    killed: Arc<AtomicBool>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, id: u64, killed: Arc<AtomicBool>) -> Self {
        Self {
            stream,
            inbox: BytesMut::with_capacity(READ_BYTES),
            outbox: Vec::with_capacity(4 * 1024),
            id,
            answered: 0,
            split: None,
            killed,
        }
    }

    /// Waits for the first bytes of a request; `false` if the peer leaves or `patience` ends.
    pub(super) async fn wake(&mut self, patience: Option<Duration>) -> bool {
        if !self.inbox.is_empty() {
            return true;
        }
        match patience {
            None => self.read().await.is_ok(),
            Some(patience) => matches!(timeout(patience, self.read()).await, Ok(Ok(()))),
        }
    }

    /// The next request head.
    pub(super) async fn head(&mut self) -> Result<Head, Stop> {
        loop {
            match Head::cut(&mut self.inbox) {
                Ok(Some(head)) => return Ok(head),
                Ok(None) => self.read().await?,
                Err(Malformed) => return Err(Stop::Malformed),
            }
        }
    }

    /// Reads the whole body of a request; `seen` counts its bytes as they come.
    pub(super) async fn body(
        &mut self,
        length: BodyLength,
        bytes_max: u64,
        slow: Option<(u32, Duration)>,
        seen: &mut u64,
    ) -> Result<Bytes, Stop> {
        match length {
            BodyLength::Exact(0) => Ok(Bytes::new()),
            BodyLength::Exact(bytes) if bytes > bytes_max => Err(Stop::Malformed),
            BodyLength::Exact(bytes) => {
                let bytes = usize::try_from(bytes).map_err(|_| Stop::Malformed)?;
                self.gather(bytes, slow, seen).await?;
                Ok(self.inbox.split_to(bytes).freeze())
            }
            BodyLength::Chunked => self.chunks(bytes_max, slow, seen).await,
        }
    }

    /// Until the inbox holds so many bytes.
    async fn gather(
        &mut self,
        bytes: usize,
        slow: Option<(u32, Duration)>,
        seen: &mut u64,
    ) -> Result<(), Stop> {
        let Some((step, pause)) = slow else {
            while self.inbox.len() < bytes {
                self.inbox.reserve((bytes - self.inbox.len()).min(1024 * 1024));
                self.read().await?;
                *seen = self.inbox.len().min(bytes) as u64;
            }
            *seen = bytes as u64;
            return Ok(());
        };
        let mut piece = vec![0; step as usize];
        while self.inbox.len() < bytes {
            sleep(pause).await;
            let wanted = piece.len().min(bytes - self.inbox.len());
            match self.stream.read(&mut piece[..wanted]).await {
                Ok(0) | Err(_) => return Err(Stop::PeerLeft),
                Ok(read) => self.inbox.extend_from_slice(&piece[..read]),
            }
            *seen = self.inbox.len() as u64;
        }
        Ok(())
    }

    async fn chunks(
        &mut self,
        bytes_max: u64,
        slow: Option<(u32, Duration)>,
        seen: &mut u64,
    ) -> Result<Bytes, Stop> {
        let mut body = BytesMut::new();
        loop {
            let (skip, size) = loop {
                match httparse::parse_chunk_size(&self.inbox) {
                    Ok(httparse::Status::Complete(found)) => break found,
                    Ok(httparse::Status::Partial) => self.read().await?,
                    Err(_) => return Err(Stop::Malformed),
                }
            };
            if size.saturating_add(body.len() as u64) > bytes_max {
                return Err(Stop::Malformed);
            }
            self.inbox.advance(skip);
            if size == 0 {
                return self.trailers().await.map(|()| body.freeze());
            }
            let size = usize::try_from(size).map_err(|_| Stop::Malformed)?;
            self.gather(size + 2, slow, &mut 0).await?;
            body.extend_from_slice(&self.inbox.split_to(size));
            *seen = body.len() as u64;
            if self.inbox.split_to(2) != b"\r\n"[..] {
                return Err(Stop::Malformed);
            }
        }
    }

    /// Reads past the trailers of a chunked body.
    async fn trailers(&mut self) -> Result<(), Stop> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.inbox) {
                let line = self.inbox.split_to(end + 1);
                if line.len() <= 2 {
                    return Ok(());
                }
            } else if self.inbox.len() > HEAD_BYTES_MAX {
                return Err(Stop::Malformed);
            } else {
                self.read().await?;
            }
        }
    }

    async fn read(&mut self) -> Result<(), Stop> {
        self.inbox.reserve(READ_BYTES);
        match self.stream.read_buf(&mut self.inbox).await {
            Ok(0) | Err(_) => Err(Stop::PeerLeft),
            Ok(_) => Ok(()),
        }
    }

    /// The outcome of `work`, unless the peer leaves first.
    pub(super) async fn unless_left<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        tokio::select! {
            biased;
            () = left(&self.stream, &mut self.inbox) => Err(Stop::PeerLeft),
            value = work => Ok(value),
        }
    }

    /// A pause that the peer's leaving ends.
    pub(super) async fn pause(&mut self, duration: Duration) -> Result<(), Stop> {
        if duration.is_zero() { Ok(()) } else { self.unless_left(sleep(duration)).await }
    }

    /// Writes the outbox.
    pub(super) async fn flush(&mut self) -> Result<(), Stop> {
        if self.outbox.is_empty() {
            return Ok(());
        }
        let mut outbox = std::mem::take(&mut self.outbox);
        let written = match self.split {
            None => self.write(&outbox).await,
            Some((bytes, pause)) => self.write_split(&outbox, bytes as usize, pause).await,
        };
        outbox.clear();
        self.outbox = outbox;
        written
    }

    async fn write_split(&mut self, all: &[u8], step: usize, pause: Duration) -> Result<(), Stop> {
        for piece in all.chunks(step) {
            self.write(piece).await?;
            self.pause(pause).await?;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Writes bytes that are not worth copying into the outbox.
    pub(super) async fn write(&mut self, mut bytes: &[u8]) -> Result<(), Stop> {
        while !bytes.is_empty() {
            match self.stream.try_write(bytes) {
                Ok(0) => return Err(Stop::PeerLeft),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    tokio::select! {
                        biased;
                        ready = self.stream.writable() => ready.map_err(|_| Stop::PeerLeft)?,
                        () = left(&self.stream, &mut self.inbox) => return Err(Stop::PeerLeft),
                    }
                }
                Err(_) => return Err(Stop::PeerLeft),
            }
        }
        Ok(())
    }

    /// Ends the connection in a given way; for a stall, when the peer does.
    pub(super) async fn end(&mut self, how: End) -> Stop {
        if self.flush().await.is_err() {
            return Stop::PeerLeft;
        }
        match how {
            End::Fin => self.close().await,
            End::Rst => {
                let _ = self.stream.set_zero_linger();
            }
            End::Stall => left(&self.stream, &mut self.inbox).await,
        }
        Stop::Cut
    }

    /// An orderly close: what the peer still sends is read, as unread bytes would make it a reset.
    pub(super) async fn close(&mut self) {
        if self.killed.load(Ordering::Relaxed) {
            return; // dropping it resets it
        }
        let socket = socket2::SockRef::from(&self.stream);
        if socket.shutdown(std::net::Shutdown::Write).is_err() {
            return;
        }
        let drained = async {
            loop {
                self.inbox.clear();
                if self.read().await.is_err() {
                    return;
                }
            }
        };
        let _ = timeout(LINGER, drained).await;
    }

    /// Until the peer leaves; for peers that must get no answer at all.
    pub(super) async fn left(&mut self) {
        left(&self.stream, &mut self.inbox).await;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.killed.load(Ordering::Relaxed) {
            let _ = self.stream.set_zero_linger();
        }
    }
}

/// Until the peer closes or resets. Bytes of a next request are kept, up to a limit; a peer that
/// sends more is only heard again when it is read again.
async fn left(stream: &TcpStream, inbox: &mut BytesMut) {
    while inbox.len() < PIPELINED_BYTES_MAX {
        if stream.readable().await.is_err() {
            return;
        }
        inbox.reserve(READ_BYTES);
        match stream.try_read_buf(inbox) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
    std::future::pending().await
}

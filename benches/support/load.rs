//! The load: keep-alive connections over plain sockets, each with one request after the other.
//! Cheap on purpose, as it shares the machine with what it measures.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What one run of load came to.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Answers that were whole.
    pub answers: u64,
    /// Events in them.
    pub events: u64,
    /// Requests that were not answered well.
    pub failed: u64,
    /// Times of single requests, sorted.
    pub times: Vec<Duration>,
    /// How long it ran.
    pub took: Duration,
}

impl Run {
    /// The time that this share of the requests did not exceed.
    pub fn quantile(&self, share: f64) -> Duration {
        if self.times.is_empty() {
            return Duration::ZERO;
        }
        let place = ((self.times.len() - 1) as f64 * share) as usize;
        self.times[place]
    }
}

/// Sends `request` over and over on so many connections for so long.
pub async fn run(
    target: SocketAddr,
    request: Vec<u8>,
    connections: usize,
    length: Duration,
) -> Run {
    let stop = Arc::new(AtomicBool::new(false));
    let failed = Arc::new(AtomicU64::new(0));
    let events = Arc::new(AtomicU64::new(0));
    let request = Arc::new(request);
    let began = Instant::now();
    let tasks: Vec<_> = (0..connections)
        .map(|_| {
            let (stop, failed, events) = (stop.clone(), failed.clone(), events.clone());
            let request = request.clone();
            tokio::spawn(async move {
                let mut times = Vec::with_capacity(4096);
                let mut client = Client::default();
                while !stop.load(Ordering::Relaxed) {
                    let sent = Instant::now();
                    match client.ask(target, &request).await {
                        Ok(seen) => {
                            times.push(sent.elapsed());
                            events.fetch_add(seen, Ordering::Relaxed);
                        }
                        Err(_) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                            client = Client::default();
                        }
                    }
                }
                times
            })
        })
        .collect();
    tokio::time::sleep(length).await;
    stop.store(true, Ordering::Relaxed);
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.unwrap_or_default());
    }
    let took = began.elapsed();
    times.sort_unstable();
    Run {
        answers: times.len() as u64,
        events: events.load(Ordering::Relaxed),
        failed: failed.load(Ordering::Relaxed),
        times,
        took,
    }
}

/// A connection and what was read from it.
#[derive(Default)]
struct Client {
    stream: Option<TcpStream>,
    buffer: Vec<u8>,
}

impl Client {
    /// One request and its whole answer. The result is the number of events in it.
    async fn ask(&mut self, target: SocketAddr, request: &[u8]) -> std::io::Result<u64> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(target).await?;
            stream.set_nodelay(true)?;
            self.stream = Some(stream);
        }
        let Some(stream) = self.stream.as_mut() else {
            return Err(std::io::ErrorKind::NotConnected.into());
        };
        stream.write_all(request).await?;
        self.buffer.clear();
        let mut head = None;
        loop {
            if stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            if head.is_none() {
                head = Head::find(&self.buffer)?;
            }
            let Some(found) = &head else { continue };
            if found.is_whole(&self.buffer) {
                let body = &self.buffer[found.length..];
                let events = body.windows(6).filter(|six| six == b"data: ").count();
                return Ok(events as u64);
            }
        }
    }
}

struct Head {
    length: usize,
    body: Option<usize>,
}

impl Head {
    fn find(buffer: &[u8]) -> std::io::Result<Option<Self>> {
        let Some(end) = buffer.windows(4).position(|four| four == b"\r\n\r\n") else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(&buffer[..end]).to_ascii_lowercase();
        if !text.starts_with("http/1.1 200") {
            return Err(std::io::Error::other(text));
        }
        let body = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length:"))
            .and_then(|value| value.trim().parse().ok());
        Ok(Some(Self { length: end + 4, body }))
    }

    fn is_whole(&self, buffer: &[u8]) -> bool {
        match self.body {
            Some(body) => self.length + body <= buffer.len(),
            None => buffer.ends_with(b"0\r\n\r\n"),
        }
    }
}

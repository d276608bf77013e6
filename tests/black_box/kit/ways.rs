//! The ways a client may speak to Weir, for tests that must hold for all of them.

use std::net::SocketAddr;

use super::http1::{Raw, Request};
use super::http2::{Http2, Stream};
use super::reply::{End, Event, Reply};

/// A way to send a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// HTTP/1.1, the body with its length.
    Length,
    /// HTTP/1.1, the body in chunks of so many bytes.
    Chunked(usize),
    /// HTTP/2.
    Http2,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Length, Self::Chunked(7), Self::Http2];

    /// One for each protocol.
    pub const PROTOCOLS: [Self; 2] = [Self::Length, Self::Http2];

    /// Sends a request over a connection of its own and reads the whole answer.
    pub async fn send(self, address: SocketAddr, request: &Request) -> Reply {
        match self {
            Self::Length => request.send(address).await,
            Self::Chunked(size) => request.clone().chunked(size).send(address).await,
            Self::Http2 => Http2::connect(address).await.send(request).await,
        }
    }

    /// Sends a request and does not wait for its answer.
    pub async fn open(self, address: SocketAddr, request: &Request) -> Open {
        let request = match self {
            Self::Length => request.clone(),
            Self::Chunked(size) => request.clone().chunked(size),
            Self::Http2 => {
                let mut connection = Http2::connect(address).await;
                let stream = connection.open(request).await;
                return Open::Http2(connection, stream);
            }
        };
        let mut raw = Raw::connect(address).await;
        raw.write(&request.bytes()).await;
        Open::Http1(raw)
    }
}

/// A request under way.
pub enum Open {
    /// Over HTTP/1.1.
    Http1(Raw),
    /// Over HTTP/2.
    Http2(Http2, Stream),
}

impl Open {
    /// The head of the answer.
    pub async fn head(&mut self) -> Reply {
        match self {
            Self::Http1(raw) => raw.head().await,
            Self::Http2(_, stream) => stream.head().await,
        }
    }

    /// The events since the head, at least so many.
    pub async fn events(&mut self, count: usize) -> Vec<Event> {
        match self {
            Self::Http1(raw) => raw.events(count).await,
            Self::Http2(_, stream) => stream.events(count).await,
        }
    }

    /// The rest of the body and how it ended.
    pub async fn rest(&mut self) -> (Vec<u8>, End) {
        match self {
            Self::Http1(raw) => raw.rest().await,
            Self::Http2(_, stream) => stream.rest().await,
        }
    }

    /// The whole answer.
    pub async fn reply(&mut self) -> Reply {
        let mut reply = self.head().await;
        if reply.status != 0 {
            (reply.body, reply.end) = self.rest().await;
        }
        reply
    }

    /// The client takes its request back: closes, or resets the stream.
    pub async fn leave(self) {
        match self {
            Self::Http1(raw) => drop(raw),
            Self::Http2(connection, stream) => {
                stream.reset();
                // The reset is written by the connection's own task.
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                drop(connection);
            }
        }
    }
}

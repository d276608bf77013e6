//! Our own small questions to an engine: one GET, one bounded answer, one time limit for all of
//! it. Pingora's connector does the connecting, so TLS behaves as it does for traffic. Each
//! question has a connection of its own: a kept one may hide that no new one can be opened.
//! Nothing here knows what is asked, or why. It follows no redirect.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION, CONNECTION, HOST, USER_AGENT};
use pingora::connectors::http::Connector;
use pingora::http::RequestHeader;
use pingora::protocols::http::client::HttpSession;
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, ErrorType};
use tokio::time::Instant;

use super::secret::Secret;
use crate::clock;

/// What is sent as `User-Agent`.
const AGENT: &str = concat!("weir/", env!("CARGO_PKG_VERSION"));

/// A client that shares nothing between questions but its settings.
pub(super) struct Client {
    connector: Connector,
}

/// What to ask, and for how long.
pub(super) struct Query<'a> {
    /// Where to connect.
    pub(super) peer: HttpPeer,
    /// The `Host` header.
    pub(super) authority: &'a str,
    /// The path, prefix included.
    pub(super) path: &'a str,
    /// Sent as `Authorization: Bearer`.
    pub(super) api_key: Option<&'a Secret>,
    /// For connecting, asking and reading together.
    pub(super) timeout: Duration,
    /// A longer body counts as no answer.
    pub(super) body_bytes_max: usize,
}

/// What came back.
#[derive(Debug)]
pub(super) struct Answer {
    /// Status code.
    pub(super) status: u16,
    /// The whole body.
    pub(super) body: Bytes,
}

/// At which point there was no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// No connection.
    Connect,
    /// The same, because nobody listens there.
    Refused,
    /// A connection, and no whole answer on it.
    Answer,
    /// Time ran out while connecting.
    ConnectTime,
    /// Time ran out while waiting for the answer.
    AnswerTime,
}

/// Why there was no answer.
#[derive(Debug)]
pub(super) struct Silence {
    /// At which point.
    pub(super) stage: Stage,
    /// In words, for the admin API and the log.
    pub(super) reason: String,
}

impl Client {
    /// Loads the platform's certificate authorities once.
    pub(super) fn new() -> Self {
        Self { connector: Connector::new(None) }
    }

    /// Asks, and reads the whole answer.
    pub(super) async fn get(&self, query: Query<'_>) -> Result<Answer, Silence> {
        let deadline = Instant::from_std(clock::now()) + query.timeout;
        let connecting = self.connector.get_http_session(&query.peer);
        let session = match tokio::time::timeout_at(deadline, connecting).await {
            Ok(Ok((session, _))) => session,
            Ok(Err(error)) => return Err(Silence::of(Stage::connecting(&error), &error)),
            Err(_) => return Err(Silence::late(Stage::ConnectTime, query.timeout)),
        };
        match tokio::time::timeout_at(deadline, exchange(session, &query)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(Silence::of(Stage::Answer, &error)),
            Err(_) => Err(Silence::late(Stage::AnswerTime, query.timeout)),
        }
    }
}

impl Stage {
    fn connecting(error: &Error) -> Self {
        let refused = error.etype() == &ErrorType::ConnectRefused;
        if refused { Self::Refused } else { Self::Connect }
    }

    /// Whether there was no connection.
    pub(super) fn is_connecting(self) -> bool {
        matches!(self, Self::Connect | Self::Refused | Self::ConnectTime)
    }
}

impl Silence {
    /// There is no address to connect to.
    pub(super) fn nowhere() -> Self {
        Self { stage: Stage::Connect, reason: "no address".to_owned() }
    }

    /// Addresses and keys of the error's own text may be long; its kind and cause are enough.
    fn of(stage: Stage, error: &Error) -> Self {
        let mut reason = error.etype().as_str().to_owned();
        if let Some(context) = &error.context {
            reason = format!("{reason}: {}", context.as_str());
        }
        if let Some(cause) = &error.cause {
            reason = format!("{reason}: {cause}");
        }
        Self { stage, reason }
    }

    fn late(stage: Stage, timeout: Duration) -> Self {
        let what = if stage == Stage::ConnectTime { "connection" } else { "answer" };
        Self { stage, reason: format!("no {what} within {timeout:?}") }
    }
}

async fn exchange(mut session: HttpSession, query: &Query<'_>) -> Result<Answer, Box<Error>> {
    let header = header(&session, query)?;
    session.write_request_header(Box::new(header)).await?;
    session.finish_request_body().await?;
    let status = loop {
        session.read_response_header().await?;
        match session.response_header().map(|header| header.status.as_u16()) {
            Some(100..=199) => {}
            Some(status) => break status,
            None => return Error::e_explain(ErrorType::ReadError, "an answer without a head"),
        }
    };
    let mut body = BytesMut::new();
    while let Some(chunk) = session.read_response_body().await? {
        if query.body_bytes_max < body.len() + chunk.len() {
            return Error::e_explain(ErrorType::ReadError, "the answer is too long");
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Answer { status, body: body.freeze() })
}

fn header(session: &HttpSession, query: &Query<'_>) -> Result<RequestHeader, Box<Error>> {
    let mut header = RequestHeader::build("GET", query.path.as_bytes(), None)?;
    if session.as_http2().is_some() {
        let scheme = if query.peer.is_tls() { "https" } else { "http" };
        let uri = http::Uri::builder()
            .scheme(scheme)
            .authority(query.authority)
            .path_and_query(query.path)
            .build()
            .map_err(|error| {
                Error::because(ErrorType::InvalidHTTPHeader, "while making the URI", error)
            })?;
        header.set_uri(uri);
    } else {
        header.insert_header(HOST, query.authority)?;
        header.insert_header(CONNECTION, "close")?;
    }
    header.insert_header(USER_AGENT, AGENT)?;
    header.insert_header(ACCEPT, "application/json")?;
    if let Some(key) = query.api_key {
        header.insert_header(AUTHORIZATION, format!("Bearer {}", key.reveal()))?;
    }
    Ok(header)
}

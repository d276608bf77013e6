//! Which replica gets the next attempt, and how to connect to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pingora::connectors::l4::Connect;
use pingora::protocols::l4::ext::TcpKeepalive;
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, ErrorType, Result};
use pingora_proxy::Session;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tracing::debug;

use super::Gateway;
use super::context::{Attempt, RequestContext};
use super::outbound::is_http1_only;
use super::refusal::Refusal;
use crate::clock;
use crate::names::Tokens;
use crate::routing::Question;
use crate::telemetry::Phase;

/// How long a client is told to wait when no replica can take its request.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// How long a replica that broke off is given to show that it lives. One that is silent for so
/// long, and has just dropped a request, does not serve.
const ALIVE_MAX: Duration = Duration::from_secs(1);

/// Between two questions to it.
const ALIVE_PAUSE: Duration = Duration::from_millis(50);

/// Bytes of a request body that make about one token of English text in JSON.
const BYTES_PER_TOKEN: u64 = 4;

const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_COUNT: usize = 3;

impl Gateway {
    /// The peer of the next attempt, or of the attempt whose connect is still going on.
    pub(super) async fn choose_peer(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
    ) -> Result<Box<HttpPeer>> {
        if let Some(error) = client_gone(session).await {
            return Err(error);
        }
        if context.attempt.as_ref().is_some_and(|attempt| attempt.connecting_still) {
            return self.peer(context);
        }
        if let Some(doubt) = context.doubt.take() {
            let alive = tokio::select! {
                alive = doubt.is_alive() => alive,
                error = client_left(session) => return Err(error),
            };
            if alive {
                return Err(context.refuse(Refusal::ReplicaFailed));
            }
        }
        self.begin_attempt(context)?;
        self.peer(context)
    }

    /// Chooses a replica and takes its lease, in one step.
    fn begin_attempt(&self, context: &mut RequestContext) -> Result<()> {
        let now = clock::now();
        let state = &context.state;
        let Some(target) = context.target.as_ref() else {
            debug_assert!(false, "an attempt without a target");
            return Err(context.refuse(Refusal::Internal));
        };
        let mut question = Question {
            session_key: context.session_key.as_deref(),
            tokens_estimated: Tokens(context.body_bytes / BYTES_PER_TOKEN),
            dice: fastrand::u64(..),
            rotation: 0,
            now,
        };
        let chosen = target.pool.choose(state.policy.as_ref(), &mut question, &context.tried, now);
        let Some((lease, choice)) = chosen else {
            return Err(context.refuse(Refusal::NoReplica { retry_after: RETRY_AFTER }));
        };
        debug!(replica = %lease.id(), cost = choice.cost, "replica chosen");
        context.attempts += 1;
        context.times.chosen = Some(now);
        context.phase = Phase::Connecting;
        context.replica = Some(lease.id().clone());
        let connector = Arc::clone(&self.shared.connector);
        context.attempt = Some(Attempt::new(lease, connector, now));
        Ok(())
    }

    fn peer(&self, context: &mut RequestContext) -> Result<Box<HttpPeer>> {
        let timeouts = &context.state.options.timeouts;
        let Some(attempt) = context.attempt.as_mut() else {
            return Error::e_explain(ErrorType::InternalError, "a peer without an attempt");
        };
        attempt.connecting_still = false;
        let mut peer = attempt.lease.peer();
        let options = &mut peer.options;
        options.connection_timeout = Some(timeouts.connect);
        options.total_connection_timeout = Some(timeouts.connect);
        options.write_timeout = Some(timeouts.send);
        options.idle_timeout = Some(timeouts.replica_idle);
        options.tcp_keepalive = Some(keepalive());
        options.custom_l4 = Some(Arc::clone(&attempt.connector) as Arc<dyn Connect + Send + Sync>);
        if !is_http1_only(&peer) {
            // The watchdog cannot end one stream of a shared connection: Pingora's own limit,
            // the same for the head and for every gap, has to do.
            peer.options.read_timeout = longest(&[timeouts.first_byte, timeouts.between_bytes]);
        }
        Ok(Box::new(peer))
    }
}

/// TCP keep-alive of connections to replicas and clients: silence of minutes is normal here, and
/// routers on the way forget silent connections.
pub fn keepalive() -> TcpKeepalive {
    TcpKeepalive {
        idle: KEEPALIVE_IDLE,
        interval: KEEPALIVE_INTERVAL,
        count: KEEPALIVE_COUNT,
        #[cfg(target_os = "linux")]
        user_timeout: Duration::ZERO,
    }
}

/// The longest of some limits; none when one of them is off.
fn longest(limits: &[Duration]) -> Option<Duration> {
    if limits.iter().any(Duration::is_zero) {
        return None;
    }
    limits.iter().max().copied()
}

/// Whether the client is gone already; asks once and does not wait. Only after the body is read.
async fn client_gone(session: &mut Session) -> Option<Box<Error>> {
    if session.downstream_session.is_upgrade_req() {
        return None;
    }
    tokio::select! {
        biased;
        error = client_left(session) => Some(error),
        () = std::future::ready(()) => None,
    }
}

/// Waits until the client goes away. Only after the body is read.
pub(super) async fn client_left(session: &mut Session) -> Box<Error> {
    loop {
        if let Err(error) = session.downstream_session.read_body_or_idle(true).await {
            return error.into_down();
        }
    }
}

/// A replica that broke off before it answered. Is it gone, so that nobody works on the request?
pub(super) struct Doubt {
    address: SocketAddr,
    question: Option<String>,
}

impl Doubt {
    /// About the replica of this attempt.
    pub(super) fn of(attempt: &Attempt) -> Self {
        let lease = &attempt.lease;
        let (prefix, host) = (lease.path_prefix(), lease.authority());
        let question =
            format!("GET {prefix}/health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        // Of a replica that speaks TLS, a connection that stays open has to be proof enough.
        let question = (!lease.is_tls()).then_some(question);
        Self { address: lease.address(), question }
    }

    /// Whether somebody still serves there. A connection proves nothing: the kernel makes it as
    /// long as anybody, a child of the dead server for one, holds the listening socket. An answer
    /// does, whatever it says.
    async fn is_alive(&self) -> bool {
        let ask = async {
            loop {
                match self.ask().await {
                    Ok(alive) => return alive,
                    Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                        return false;
                    }
                    // Ended or reset: a process that is going, or one that starts.
                    Err(_) => tokio::time::sleep(ALIVE_PAUSE).await,
                }
            }
        };
        tokio::time::timeout(ALIVE_MAX, ask).await.unwrap_or(false)
    }

    async fn ask(&self) -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(self.address).await?;
        match &self.question {
            Some(question) => {
                stream.write_all(question.as_bytes()).await?;
                stream.read_u8().await.map(|_| true)
            }
            None => match tokio::time::timeout(ALIVE_PAUSE, stream.read_u8()).await {
                Ok(ended) => ended.map(|_| true),
                Err(_) => Ok(true),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn is_alive(address: SocketAddr) -> bool {
        let question = Some("GET /health HTTP/1.1\r\nHost: x\r\n\r\n".to_owned());
        Doubt { address, question }.is_alive().await
    }

    #[tokio::test]
    async fn a_replica_that_answers_is_alive_and_a_closed_port_is_not() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"HTTP/1.1 503 Busy\r\n\r\n").await.unwrap();
            stream.read_u8().await.unwrap();
        });
        assert!(is_alive(address).await);
        server.await.unwrap();
        assert!(!is_alive(address).await);
    }

    #[tokio::test]
    async fn a_socket_that_nobody_accepts_from_is_no_sign_of_life() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_alive(listener.local_addr().unwrap()).await);
    }

    #[tokio::test]
    async fn a_replica_that_drops_what_it_accepts_is_not_alive() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                drop(stream);
            }
        });
        assert!(!is_alive(address).await);
    }

    #[test]
    fn there_is_no_longest_limit_when_one_is_off() {
        let second = Duration::from_secs(1);
        assert_eq!(longest(&[Duration::ZERO, second]), None);
        assert_eq!(longest(&[2 * second, second]), Some(2 * second));
    }
}

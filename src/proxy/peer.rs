//! Which replica gets the next attempt, and how to connect to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pingora::connectors::l4::Connect;
use pingora::protocols::l4::ext::TcpKeepalive;
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, ErrorType, Result};
use pingora_proxy::Session;
use tokio::io::AsyncReadExt;
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

/// How long a replica that broke off is given to take a new connection before it counts as gone.
const ALIVE_CONNECT_MAX: Duration = Duration::from_millis(500);

/// How long that connection must stay open: a dying process still accepts for a moment.
const ALIVE_HOLD: Duration = Duration::from_millis(30);

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
        if let Some(address) = context.doubt.take() {
            let alive = tokio::select! {
                alive = is_alive(address) => alive,
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

/// Whether somebody still serves at this address: takes a connection and keeps it for a moment.
async fn is_alive(address: SocketAddr) -> bool {
    let Ok(Ok(mut stream)) =
        tokio::time::timeout(ALIVE_CONNECT_MAX, TcpStream::connect(address)).await
    else {
        return false;
    };
    // An end or a reset: the process is going. Silence: it lives.
    tokio::time::timeout(ALIVE_HOLD, stream.read_u8()).await.is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_listening_replica_is_alive_and_a_closed_port_is_not() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        assert!(is_alive(address).await);
        drop(listener);
        assert!(!is_alive(address).await);
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

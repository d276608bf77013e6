//! What happens to a client's connection before Pingora's HTTP code gets it.
//!
//! Pingora tells HTTP/2 without TLS from HTTP/1 by the first 24 bytes and waits for all of them,
//! so that a request shorter than that (`GET / HTTP/1.0`) would hang. Three bytes are enough to
//! tell: no method begins with `PRI`. They also must come in time.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pingora::apps::{HttpServerApp, ReusedHttpStream, ServerApp};
use pingora::protocols::Stream;
use pingora::protocols::http::ServerSession;
use pingora::server::ShutdownWatch;
use pingora_proxy::HttpProxy;

use crate::proxy::Door;

/// How long a client may take to send the next piece of a request's head.
const HEAD_PIECE_MAX: Duration = Duration::from_secs(30);

/// Speaks HTTP/1 or HTTP/2, as the client does.
pub(super) struct FrontDoor {
    proxy: Arc<HttpProxy<Door>>,
    http2: bool,
    head_max: Duration,
    draining: ShutdownWatch,
    /// How often one connection is used again.
    reuses_max: Option<u32>,
}

impl FrontDoor {
    /// In front of this proxy; `http2` is for connections without TLS.
    pub(super) fn new(
        proxy: Arc<HttpProxy<Door>>,
        http2: bool,
        head_max: Duration,
        draining: ShutdownWatch,
    ) -> Self {
        let reuses_max =
            proxy.server_options.as_ref().and_then(|options| options.keepalive_request_limit);
        Self { proxy, http2, head_max, draining, reuses_max }
    }

    async fn serve_http1(&self, stream: Stream, shutdown: &ShutdownWatch) {
        let mut session = ServerSession::new_http1(stream);
        if *shutdown.borrow() {
            session.set_keepalive(None);
        } else {
            session.set_keepalive(Some(self.head_max.min(HEAD_PIECE_MAX).as_secs().max(1)));
        }
        session.set_keepalive_reuses_remaining(self.reuses_max);
        let mut next = self.proxy.process_new_http(session, shutdown).await;
        while let Some((stream, settings)) = next.map(ReusedHttpStream::consume) {
            let mut session = ServerSession::new_http1(stream);
            if let Some(settings) = settings {
                settings.apply_to_session(&mut session);
            }
            next = self.proxy.process_new_http(session, shutdown).await;
        }
    }
}

#[async_trait]
impl ServerApp for FrontDoor {
    async fn process_new(
        self: &Arc<Self>,
        mut stream: Stream,
        shutdown: &ShutdownWatch,
    ) -> Option<Stream> {
        // HTTP/2 clients are asked to go when the drain begins, not when it is over.
        let draining = self.draining.clone();
        if stream.get_ssl_digest().is_some() {
            return self.proxy.process_new(stream, &draining).await;
        }
        let mut first = [0_u8; 3];
        match tokio::time::timeout(self.head_max, stream.try_peek(&mut first)).await {
            Ok(Ok(true)) if self.http2 && &first == b"PRI" => {
                self.proxy.process_new(stream, &draining).await
            }
            Ok(Ok(_)) => {
                self.serve_http1(stream, shutdown).await;
                None
            }
            // Closed, or silent for too long.
            Ok(Err(_)) | Err(_) => None,
        }
    }

    async fn cleanup(&self) {
        self.proxy.http_cleanup().await;
    }
}

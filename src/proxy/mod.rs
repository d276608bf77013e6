//! The shell that joins the rooms: one short method per phase of Pingora, each of which asks a
//! room and does what it says. Nothing is decided here that a pure room could decide.
//! To add a step to a request's life: a file here, and a line in docs/life-of-a-request.md.

mod answers;
mod body;
mod connect;
mod context;
mod failure;
mod finish;
mod inbound;
mod options;
mod outbound;
mod peer;
mod refusal;
mod reply;
mod retry;
mod state;
mod watchdog;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use bytes::Bytes;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::modules::http::HttpModules;
use pingora::protocols::Digest;
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, Result};
use pingora_proxy::{FailToProxy, ProxyHttp, ProxyWarnLogContext, Session};

pub use context::RequestContext;
pub use options::{ForwardedClient, ForwardedOptions, Options, TimeoutOptions};
pub use peer::keepalive;
pub use refusal::{ErrorShape, Refusal};
pub use retry::{Budget, BudgetOptions, Condition, RetryOptions};
pub use state::{SessionKeys, Shared, State};

use crate::clock;

/// How often Pingora may come back to `upstream_peer`: Weir itself bounds the attempts, and a
/// connect that takes long comes back once per slice.
pub const PINGORA_TRIES_MAX: usize = 100_000;

/// The proxy.
pub struct Gateway {
    state: ArcSwap<State>,
    shared: Arc<Shared>,
}

impl Gateway {
    /// A proxy that works with this state until it is given another.
    pub fn new(state: Arc<State>, shared: Arc<Shared>) -> Self {
        Self { state: ArcSwap::new(state), shared }
    }

    /// The state new requests begin with.
    pub fn state(&self) -> Arc<State> {
        self.state.load_full()
    }

    /// Requests that begin from now on work with this state; the others keep theirs.
    pub fn swap(&self, state: Arc<State>) -> Arc<State> {
        self.state.swap(state)
    }

    /// What outlives the states.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

/// The gateway as Pingora holds it: shared with the reloader and the admin server.
pub struct Door(pub Arc<Gateway>);

#[async_trait]
impl ProxyHttp for Door {
    // Boxed: Pingora moves it from phase to phase.
    type CTX = Box<RequestContext>;

    fn new_ctx(&self) -> Box<RequestContext> {
        Box::new(RequestContext::new(self.0.state(), &self.0.shared, clock::now()))
    }

    // Pingora's own module would look at every answer, to compress it. Answers stay as they are.
    fn init_downstream_modules(&self, _: &mut HttpModules) {}

    async fn early_request_filter(
        &self,
        session: &mut Session,
        context: &mut Box<RequestContext>,
    ) -> Result<()> {
        self.0.greet(session, context);
        Ok(())
    }

    async fn request_filter(
        &self,
        session: &mut Session,
        context: &mut Box<RequestContext>,
    ) -> Result<bool> {
        self.0.enter(session, context).await
    }

    async fn upstream_peer(
        &self,
        session: &mut Session,
        context: &mut Box<RequestContext>,
    ) -> Result<Box<HttpPeer>> {
        self.0.choose_peer(session, context).await
    }

    async fn connected_to_upstream(
        &self,
        _session: &mut Session,
        reused: bool,
        peer: &HttpPeer,
        descriptor: RawFd,
        _digest: Option<&Digest>,
        context: &mut Box<RequestContext>,
    ) -> Result<()> {
        self.0.connected(peer, reused, descriptor, context);
        Ok(())
    }

    async fn upstream_request_filter(
        &self,
        session: &mut Session,
        request: &mut RequestHeader,
        context: &mut Box<RequestContext>,
    ) -> Result<()> {
        self.0.prepare_head(session, request, context)
    }

    async fn request_body_filter(
        &self,
        _session: &mut Session,
        body: &mut Option<Bytes>,
        _end_of_stream: bool,
        context: &mut Box<RequestContext>,
    ) -> Result<()> {
        if let Some(whole) = &context.body {
            *body = Some(whole.clone());
        }
        Ok(())
    }

    async fn upstream_response_filter(
        &self,
        session: &mut Session,
        response: &mut ResponseHeader,
        context: &mut Box<RequestContext>,
    ) -> Result<()> {
        self.0.judge_head(session, response, context)
    }

    async fn response_filter(
        &self,
        session: &mut Session,
        response: &mut ResponseHeader,
        context: &mut Box<RequestContext>,
    ) -> Result<()> {
        self.0.pass_head(session, response, context)
    }

    fn response_body_filter(
        &self,
        _session: &mut Session,
        body: &mut Option<Bytes>,
        end_of_stream: bool,
        context: &mut Box<RequestContext>,
    ) -> Result<Option<Duration>> {
        self.0.pass_body(body.as_ref(), end_of_stream, context)?;
        Ok(None)
    }

    fn fail_to_connect(
        &self,
        _session: &mut Session,
        _peer: &HttpPeer,
        context: &mut Box<RequestContext>,
        error: Box<Error>,
    ) -> Box<Error> {
        self.0.connect_failed(context, error)
    }

    fn error_while_proxy(
        &self,
        peer: &HttpPeer,
        session: &mut Session,
        error: Box<Error>,
        context: &mut Box<RequestContext>,
        reused: bool,
    ) -> Box<Error> {
        // All streams of an HTTP/2 connection but the first look reused, and being reset says
        // nothing of the connection.
        let reused = reused && outbound::is_http1_only(peer);
        self.0.attempt_failed(session, context, error, reused)
    }

    async fn fail_to_proxy(
        &self,
        session: &mut Session,
        error: &Error,
        context: &mut Box<RequestContext>,
    ) -> FailToProxy {
        let error_code = self.0.tell_failure(session, error, context).await;
        FailToProxy { error_code, can_reuse_downstream: false }
    }

    async fn logging(
        &self,
        session: &mut Session,
        error: Option<&Error>,
        context: &mut Box<RequestContext>,
    ) {
        self.0.finish(session, context, error);
    }

    // Pingora's own lines for failures and retries say what the access log and the metrics say.
    fn suppress_error_log(&self, _: &Session, _: &Box<RequestContext>, _: &Error) -> bool {
        true
    }

    fn suppress_proxy_warn_log(
        &self,
        _: &Session,
        _: &Box<RequestContext>,
        _: &Error,
        _: ProxyWarnLogContext,
    ) -> bool {
        true
    }
}

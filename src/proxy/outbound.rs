//! What a replica is sent: the client's head, less what belongs to the client's connection, plus
//! what the replica must be told.

use std::net::IpAddr;
use std::os::fd::RawFd;

use http::{HeaderName, HeaderValue, header};
use pingora::Result;
use pingora::http::RequestHeader;
use pingora::protocols::ALPN;
use pingora::upstreams::peer::HttpPeer;
use pingora_proxy::Session;

use super::Gateway;
use super::context::RequestContext;
use super::options::ForwardedClient;
use super::refusal::Refusal;
use super::watchdog::Limit;
use crate::clock;
use crate::telemetry::Phase;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Headers that end here, beside those Pingora takes out itself (the hop-by-hop set and what
/// `Connection` names). Source: RFC 9110, 10.1.1 and 11.7.2.
const NOT_FORWARDED: [HeaderName; 2] = [header::EXPECT, header::PROXY_AUTHORIZATION];

/// Whether the connection belongs to this request alone. One that speaks HTTP/2 carries others.
pub(super) fn is_http1_only(peer: &HttpPeer) -> bool {
    peer.options.alpn == ALPN::H1
}

impl Gateway {
    /// A connection stands; the request goes out on it now.
    pub(super) fn connected(
        &self,
        peer: &HttpPeer,
        reused: bool,
        descriptor: RawFd,
        context: &mut RequestContext,
    ) {
        let now = clock::now();
        context.times.connected = Some(now);
        context.phase = Phase::WaitingForHead;
        context.watch.arm(Limit::FirstByte, now, context.state.options.timeouts.first_byte);
        let Some(attempt) = &context.attempt else { return };
        if !reused {
            attempt.lease.connected(now.saturating_duration_since(attempt.began));
        }
        // One that is shared cannot be ended for a single request.
        let own = is_http1_only(peer).then(|| self.shared.connections.get(descriptor)).flatten();
        context.watch.attach(own, attempt.lease.replica());
    }

    /// Makes the head of the request fit for the chosen replica.
    pub(super) fn prepare_head(
        &self,
        session: &Session,
        request: &mut RequestHeader,
        context: &mut RequestContext,
    ) -> Result<()> {
        let Some(attempt) = context.attempt.as_ref() else {
            return Err(context.refuse(Refusal::Internal));
        };
        for name in &NOT_FORWARDED {
            if request.headers.contains_key(name) {
                request.remove_header(name);
            }
        }
        self.tell_client(session, request, context)?;
        request.insert_header(REQUEST_ID, context.id())?;
        let lease = &attempt.lease;
        if !context.state.options.forwarded.keep_host {
            request.insert_header(header::HOST, lease.authority())?;
        }
        if let Some(key) = lease.api_key() {
            request.insert_header(header::AUTHORIZATION, format!("Bearer {}", key.reveal()))?;
            request.remove_header("x-api-key");
        }
        set_path(request, lease.path_prefix(), context)?;
        if let Some(body) = &context.body {
            set_length(request, body.len())?;
        }
        Ok(())
    }

    fn tell_client(
        &self,
        session: &Session,
        request: &mut RequestHeader,
        context: &RequestContext,
    ) -> Result<()> {
        if context.state.options.forwarded.client == ForwardedClient::Replace {
            for name in [FORWARDED_FOR, FORWARDED_HOST, FORWARDED_PROTO] {
                request.remove_header(&name);
            }
        }
        if let Some(address) = session.client_addr().and_then(|address| address.as_inet()) {
            let value = forwarded_for(request.headers.get_all(&FORWARDED_FOR), address.ip());
            request.insert_header(FORWARDED_FOR, value)?;
        }
        let original = session.req_header();
        let host = original
            .headers
            .get(header::HOST)
            .map(HeaderValue::as_bytes)
            .or_else(|| original.uri.authority().map(|name| name.as_str().as_bytes()));
        if let Some(host) = host.filter(|_| !request.headers.contains_key(&FORWARDED_HOST)) {
            request.insert_header(FORWARDED_HOST, host)?;
        }
        if !request.headers.contains_key(&FORWARDED_PROTO) {
            let tls = session.digest().is_some_and(|digest| digest.ssl_digest.is_some());
            request.insert_header(FORWARDED_PROTO, if tls { "https" } else { "http" })?;
        }
        Ok(())
    }
}

/// One framing header, and it fits the body.
fn set_length(request: &mut RequestHeader, length: usize) -> Result<()> {
    let mut declared = request.headers.get_all(header::CONTENT_LENGTH).iter();
    let fits = declared.next().is_some_and(|value| {
        std::str::from_utf8(value.as_bytes()).is_ok_and(|text| text.parse() == Ok(length))
    }) && declared.next().is_none();
    if request.headers.contains_key(header::TRANSFER_ENCODING) {
        request.remove_header(&header::TRANSFER_ENCODING);
    }
    if fits { Ok(()) } else { request.insert_header(header::CONTENT_LENGTH, length) }
}

fn forwarded_for<'a>(
    believed: impl IntoIterator<Item = &'a HeaderValue>,
    address: IpAddr,
) -> Vec<u8> {
    let mut value = Vec::with_capacity(48);
    for believed in believed {
        value.extend_from_slice(believed.as_bytes());
        value.extend_from_slice(b", ");
    }
    value.extend_from_slice(address.to_canonical().to_string().as_bytes());
    value
}

/// Puts the replica's prefix and the path as the table spells it in front of the query string,
/// which stays as it is. Where nothing differs nothing is touched.
fn set_path(request: &mut RequestHeader, prefix: &str, context: &RequestContext) -> Result<()> {
    let path = context.target.as_ref().and_then(|target| target.path.as_deref());
    if prefix.is_empty() && path.is_none() && request.uri.authority().is_none() {
        return Ok(());
    }
    let raw = request.uri.path_and_query().map_or("/", |whole| whole.as_str());
    let (own, query) = match raw.find('?') {
        Some(mark) => raw.split_at(mark),
        None => (raw, ""),
    };
    let whole = format!("{prefix}{}{query}", path.unwrap_or(own));
    request.set_raw_path(whole.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_added_behind_what_is_believed() {
        let before = [HeaderValue::from_static("9.9.9.9"), HeaderValue::from_static("8.8.8.8")];
        let address: IpAddr = "127.0.0.1".parse().unwrap();
        assert_eq!(forwarded_for(&before, address), b"9.9.9.9, 8.8.8.8, 127.0.0.1");
        assert_eq!(forwarded_for(None, address), b"127.0.0.1");
    }

    #[test]
    fn an_address_mapped_into_ipv6_is_told_as_ipv4() {
        let address: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
        assert_eq!(forwarded_for(None, address), b"10.0.0.1");
    }
}

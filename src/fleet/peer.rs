//! How to connect to a replica: Pingora's `HttpPeer`, made once from the options and then cloned.
//! Traffic and probes take it from here, so what holds for one holds for the other. Time limits
//! are set by whoever connects. To add a setting: a key in `options.rs` and its line in
//! [`template`].

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pingora::protocols::TcpKeepalive;
use pingora::tls::{CertificateDer, PrivateKeyDer, RootCertStore};
use pingora::upstreams::peer::{ALPN, HttpPeer};
use pingora::utils::tls::{CertKey, WrappedX509, parse_x509};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::FleetError;
use super::options::{Protocol, ReplicaOptions, TlsOptions};
use super::url::{Host, ReplicaUrl};

/// Streams on one HTTP/2 connection at most.
const H2_STREAMS_MAX: usize = 100;

/// What an HTTP/2 engine may send ahead on one stream; Pingora's own 8 MiB would be held per slow
/// client.
const H2_STREAM_WINDOW_BYTES: u32 = 256 * 1024;

/// What an HTTP/2 engine may send ahead on one connection.
const H2_CONNECTION_WINDOW_BYTES: u32 = 4 * 1024 * 1024;

/// A silent connection is asked for life after this time, as a prefill may be silent for minutes
/// while the host behind it is long gone.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

/// Time between two such questions.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Questions without an answer after which the connection counts as dead.
const KEEPALIVE_COUNT: usize = 3;

/// Everything but the address. Reads the certificate files.
pub(super) fn template(options: &ReplicaOptions, url: &ReplicaUrl) -> Result<HttpPeer, FleetError> {
    let placeholder = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let sni = if url.is_tls() { server_name(options, url) } else { String::new() };
    let mut peer = HttpPeer::new(placeholder, url.is_tls(), sni);
    let settings = &mut peer.options;
    settings.verify_cert = options.tls.verify;
    settings.verify_hostname = options.tls.verify;
    settings.tcp_keepalive = Some(TcpKeepalive {
        idle: KEEPALIVE_IDLE,
        interval: KEEPALIVE_INTERVAL,
        count: KEEPALIVE_COUNT,
        #[cfg(target_os = "linux")]
        user_timeout: Duration::ZERO,
    });
    match options.protocol {
        Protocol::Http1 => settings.alpn = ALPN::H1,
        Protocol::Http2 => {
            settings.alpn = ALPN::H2;
            settings.max_h2_streams = H2_STREAMS_MAX;
            settings.h2_stream_window_size = Some(H2_STREAM_WINDOW_BYTES);
            settings.h2_connection_window_size = Some(H2_CONNECTION_WINDOW_BYTES);
        }
    }
    if url.is_tls() {
        add_certificates(&mut peer, &options.tls)?;
    }
    Ok(peer)
}

/// Never empty: rustls refuses that. An address is a name too, checked against the certificate's
/// addresses and not sent in the handshake.
fn server_name(options: &ReplicaOptions, url: &ReplicaUrl) -> String {
    if let Some(name) = &options.tls.server_name {
        return name.clone();
    }
    match url.host() {
        Host::Ip(ip) => ip.to_string(),
        Host::Name(name) => name.strip_suffix('.').unwrap_or(name).to_owned(),
    }
}

/// Pingora shares idle connections between peers that look alike, and does not look at the
/// authorities for that; the group key makes it do so, also over a reload.
fn add_certificates(peer: &mut HttpPeer, tls: &TlsOptions) -> Result<(), FleetError> {
    let mut group = DefaultHasher::new();
    if let Some(path) = &tls.ca {
        let authorities = read_certificates(path)?;
        authorities.hash(&mut group);
        let mut store = RootCertStore::empty();
        for authority in &authorities {
            let der = CertificateDer::from(authority.as_slice());
            store.add(der).map_err(|error| unfit(path, &error.to_string()))?;
        }
        let wrapped: Vec<WrappedX509> =
            authorities.into_iter().map(|der| WrappedX509::new(der, parse_x509)).collect();
        peer.options.ca = Some(wrapped.into());
    }
    if let (Some(certificate), Some(key)) = (&tls.certificate, &tls.key) {
        let chain = read_certificates(certificate)?;
        let key = read_key(key)?;
        (&chain, &key).hash(&mut group);
        peer.client_cert_key = Some(Arc::new(CertKey::new(chain, key)));
    }
    peer.group_key = group.finish();
    Ok(())
}

/// The certificates of a PEM file as DER, each one checked here, as Pingora panics on a bad one.
fn read_certificates(path: &Path) -> Result<Vec<Vec<u8>>, FleetError> {
    let text = read(path)?;
    let mut certificates = Vec::new();
    for item in rustls_pemfile::certs(&mut text.as_slice()) {
        let der = item.map_err(|error| unfit(path, &error.to_string()))?;
        if let Err(error) = X509Certificate::from_der(&der) {
            return Err(unfit(path, &error.to_string()));
        }
        certificates.push(der.to_vec());
    }
    if certificates.is_empty() {
        return Err(unfit(path, "no certificate in it"));
    }
    Ok(certificates)
}

fn read_key(path: &Path) -> Result<Vec<u8>, FleetError> {
    let text = read(path)?;
    let key = rustls_pemfile::private_key(&mut text.as_slice())
        .map_err(|error| unfit(path, &error.to_string()))?
        .ok_or_else(|| unfit(path, "no private key in it"))?;
    let der = key.secret_der().to_vec();
    match PrivateKeyDer::try_from(der.clone()) {
        Ok(_) => Ok(der),
        Err(reason) => Err(unfit(path, reason)),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, FleetError> {
    std::fs::read(path).map_err(|error| unfit(path, &error.to_string()))
}

fn unfit(path: &Path, reason: &str) -> FleetError {
    FleetError::Certificate { path: path.to_owned(), reason: reason.to_owned() }
}

//! Certificates of its own, and TLS on both sides.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pingora::tls::{
    CertificateDer, ClientConfig, ClientTlsStream, PrivateKeyDer, RootCertStore, ServerConfig,
    ServerName, ServerTlsStream, TlsAcceptor, TlsConnector, WebPkiClientVerifier,
    install_default_crypto_provider,
};
use tokio::net::TcpStream;

use super::http1::Wire;

/// A certificate that signs itself, with its key, also as files.
pub struct Certificate {
    /// PEM file of the certificate.
    pub certificate: PathBuf,
    /// PEM file of the key.
    pub key: PathBuf,
    der: CertificateDer<'static>,
    key_der: Vec<u8>,
}

impl Certificate {
    /// For these names, written into this folder.
    pub fn write(folder: &Path, name: &str, names: &[&str]) -> Self {
        install_default_crypto_provider();
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        let certificate = folder.join(format!("{name}.pem"));
        let key = folder.join(format!("{name}.key"));
        std::fs::write(&certificate, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let (der, key_der) = (made.cert.der().clone(), made.signing_key.serialize_der());
        Self { certificate, key, der, key_der }
    }

    /// The side of the server.
    pub fn acceptor(&self) -> TlsAcceptor {
        let key = PrivateKeyDer::try_from(self.key_der.clone()).unwrap();
        let config = ServerConfig::builder().with_no_client_auth();
        let config = config.with_single_cert(vec![self.der.clone()], key).unwrap();
        TlsAcceptor::from(Arc::new(config))
    }
}

impl Certificate {
    /// The side of a server that asks its clients for this certificate.
    pub fn acceptor_for(&self, client: &Self) -> TlsAcceptor {
        let mut roots = RootCertStore::empty();
        roots.add(client.der.clone()).unwrap();
        let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
        let key = PrivateKeyDer::try_from(self.key_der.clone()).unwrap();
        let config = ServerConfig::builder().with_client_cert_verifier(verifier);
        let config = config.with_single_cert(vec![self.der.clone()], key).unwrap();
        TlsAcceptor::from(Arc::new(config))
    }
}

impl Wire for ClientTlsStream<TcpStream> {
    fn socket(&self) -> &TcpStream {
        self.get_ref().0
    }
}

impl Wire for ServerTlsStream<TcpStream> {
    fn socket(&self) -> &TcpStream {
        self.get_ref().0
    }
}

/// Connects as a client that trusts this certificate and speaks these protocols; tells which one
/// was agreed on.
pub async fn connect(
    address: SocketAddr,
    trusted: &Certificate,
    protocols: &[&str],
) -> (ClientTlsStream<TcpStream>, Option<String>) {
    let stream = shake_hands(address, trusted, protocols).await.unwrap();
    let agreed = stream.get_ref().1.alpn_protocol();
    let agreed = agreed.map(|name| String::from_utf8_lossy(name).into_owned());
    (stream, agreed)
}

/// Whether a client that trusts this certificate alone can connect.
pub async fn try_connect(address: SocketAddr, trusted: &Certificate) -> Option<()> {
    shake_hands(address, trusted, &[]).await.ok().map(|_| ())
}

async fn shake_hands(
    address: SocketAddr,
    trusted: &Certificate,
    protocols: &[&str],
) -> std::io::Result<ClientTlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.der.clone()).unwrap();
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

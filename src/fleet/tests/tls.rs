//! The fleet against an engine behind TLS: what is trusted, what is not, and that the reason is
//! told.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use parking_lot::Mutex;
use pingora::tls::{
    CertificateDer, PrivateKeyDer, RootCertStore, ServerConfig, TlsAcceptor, WebPkiClientVerifier,
    install_default_crypto_provider,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::net::TcpListener;

use super::*;

/// An authority, and what it signed, as PEM files.
struct Papers {
    authority: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

impl Papers {
    fn new() -> Self {
        install_default_crypto_provider();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self { authority, folder: tempfile::tempdir().unwrap() }
    }

    fn sign(&self, names: &[&str]) -> (String, KeyPair) {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(names).unwrap();
        (params.signed_by(&key, &self.authority).unwrap().pem(), key)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn ca(&self) -> PathBuf {
        self.write("ca.pem", &self.authority.pem())
    }

    /// Serves with a certificate for these names; asks for ours if `mutual`.
    async fn serve(&self, names: &[&str], mutual: bool) -> SocketAddr {
        let (pem, key) = self.sign(names);
        let chain: Vec<CertificateDer<'static>> =
            rustls_pemfile::certs(&mut pem.as_bytes()).map(Result::unwrap).collect();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let builder = ServerConfig::builder();
        let builder = if mutual {
            let mut roots = RootCertStore::empty();
            roots.add(self.authority.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let acceptor = TlsAcceptor::from(Arc::new(builder.with_single_cert(chain, key).unwrap()));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let knobs = Arc::new(Mutex::new(engine::knobs(&["m"])));
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (acceptor, knobs) = (acceptor.clone(), Arc::clone(&knobs));
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        engine::answer(stream, &knobs).await;
                    }
                });
            }
        });
        address
    }
}

/// Whether the fleet comes to trust the engine; else the reason it shows.
async fn verdict(address: SocketAddr, tls: TlsOptions) -> Result<(), String> {
    let mut options = quick();
    options.replicas = vec![ReplicaOptions { tls, ..at(format!("https://{address}")) }];
    let fleet = started(&options);
    let state = |fleet: &Fleet| snapshot(fleet, &address.to_string());
    until("decided", || ["up", "down"].iter().any(|one| state(&fleet)["state"] == **one)).await;
    if state(&fleet)["state"] == "down" {
        return Err(state(&fleet)["probe"]["result"].to_string());
    }
    until("models", || live(&fleet, "m") == 1).await;
    Ok(())
}

#[tokio::test]
async fn a_certificate_is_checked_against_the_authority_of_the_replica() {
    let papers = Papers::new();
    let address = papers.serve(&["127.0.0.1"], false).await;
    let reason = verdict(address, TlsOptions::default()).await.unwrap_err();
    assert!(reason.contains("UnknownIssuer"), "{reason}");
    let ca = Some(papers.ca());
    verdict(address, TlsOptions { ca, ..TlsOptions::default() }).await.unwrap();
    verdict(address, TlsOptions { verify: false, ..TlsOptions::default() }).await.unwrap();
}

#[tokio::test]
async fn the_name_of_a_certificate_counts_and_can_be_given() {
    let papers = Papers::new();
    let address = papers.serve(&["engine.internal"], false).await;
    let tls = TlsOptions { ca: Some(papers.ca()), ..TlsOptions::default() };
    let reason = verdict(address, tls.clone()).await.unwrap_err();
    assert!(reason.contains("not valid for name"), "{reason}");
    let server_name = Some("engine.internal".to_owned());
    verdict(address, TlsOptions { server_name, ..tls.clone() }).await.unwrap();
    verdict(address, TlsOptions { verify: false, ..tls }).await.unwrap();
}

#[tokio::test]
async fn our_certificate_is_shown_where_it_is_asked_for() {
    let papers = Papers::new();
    let address = papers.serve(&["127.0.0.1"], true).await;
    let tls = TlsOptions { ca: Some(papers.ca()), ..TlsOptions::default() };
    verdict(address, tls.clone()).await.unwrap_err();
    let (pem, key) = papers.sign(&["weir"]);
    let certificate = Some(papers.write("us.pem", &pem));
    let key = Some(papers.write("us.key", &key.serialize_pem()));
    verdict(address, TlsOptions { certificate, key, ..tls }).await.unwrap();
}

#[test]
fn an_unfit_file_is_named_and_nothing_falls_over() {
    let papers = Papers::new();
    let bad_der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let files = [papers.write("empty.pem", ""), papers.write("bad.pem", bad_der), "/none".into()];
    for file in files {
        let mut options = quick();
        let tls = TlsOptions { ca: Some(file.clone()), ..TlsOptions::default() };
        options.replicas = vec![ReplicaOptions { tls, ..at("https://h") }];
        let slow_start = SlowStartOptions::default();
        let error = Fleet::new(&options, &slow_start, None, metrics()).err().unwrap().to_string();
        assert!(error.contains(file.to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_changed_authority_shares_no_idle_connections_with_the_one_before() {
    use pingora::upstreams::peer::Peer;
    let hash = |papers: &Papers| {
        let tls = TlsOptions { ca: Some(papers.ca()), ..TlsOptions::default() };
        let options = ReplicaOptions { tls, ..at("https://10.0.0.1") };
        let url = ReplicaUrl::parse(&options.url).unwrap();
        peer::template(&options, &url).unwrap().reuse_hash()
    };
    let (one, other) = (Papers::new(), Papers::new());
    assert_eq!(hash(&one), hash(&one));
    assert_ne!(hash(&one), hash(&other));
}

//! The certificates shown to clients, renewed while running: whoever renews them writes the same
//! files, and the next handshake shows what is in them.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tracing::{error, info};

use crate::config::{ListenTlsOptions, certified_key};

/// What one listener shows.
pub struct Certificate {
    files: ListenTlsOptions,
    shown: ArcSwap<CertifiedKey>,
}

impl Certificate {
    /// From its files.
    ///
    /// # Errors
    /// The files cannot be used; the text says why.
    pub fn read(files: &ListenTlsOptions) -> Result<Arc<Self>, String> {
        let shown = ArcSwap::from_pointee(pair(files)?);
        Ok(Arc::new(Self { files: files.clone(), shown }))
    }

    /// Reads the files again; what cannot be used is not shown.
    pub(super) fn renew(&self) {
        let path = self.files.certificate.display();
        match pair(&self.files) {
            Ok(pair) if pair.cert == self.shown.load().cert => {}
            Ok(pair) => {
                self.shown.store(Arc::new(pair));
                info!(certificate = %path, "certificate renewed");
            }
            Err(reason) => error!(certificate = %path, %reason, "certificate not renewed"),
        }
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.shown.load_full())
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("files", &self.files).finish_non_exhaustive()
    }
}

fn pair(files: &ListenTlsOptions) -> Result<CertifiedKey, String> {
    let told = |path: &Path, reason: String| format!("{}: {reason}", path.display());
    certified_key(&files.certificate, &files.key).map_err(|why| told(&files.certificate, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(files: &ListenTlsOptions) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(&files.certificate, made.cert.pem()).unwrap();
        std::fs::write(&files.key, made.signing_key.serialize_pem()).unwrap();
    }

    #[test]
    fn a_renewed_certificate_is_shown_and_a_broken_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let files = ListenTlsOptions {
            certificate: folder.path().join("tls.crt"),
            key: folder.path().join("tls.key"),
        };
        assert!(Certificate::read(&files).is_err());
        write(&files);
        let certificate = Certificate::read(&files).unwrap();
        let first = certificate.shown.load_full();
        write(&files);
        certificate.renew();
        let second = certificate.shown.load_full();
        assert_ne!(first.cert, second.cert);
        std::fs::write(&files.certificate, "half a file").unwrap();
        certificate.renew();
        assert_eq!(certificate.shown.load().cert, second.cert);
    }
}

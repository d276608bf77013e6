//! Whether certificate and key files are such, and belong together. Checked here because the
//! server does not survive starting with files that are not.
//! No connection is made and no chain is verified.

use std::path::Path;

use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use super::load::read_bounded;

/// Largest PEM file, in bytes.
const PEM_BYTES_MAX: u64 = 1024 * 1024;

/// A problem with the file under `key`, told as `problem; advice`.
pub(super) struct PemFault {
    pub(super) key: &'static str,
    pub(super) told: String,
}

/// What is wrong with a certificate and its key.
pub(super) fn pair_faults(certificate: &Path, key: &Path) -> Vec<PemFault> {
    let mut faults = Vec::new();
    let mut keep = |key, told| faults.push(PemFault { key, told });
    let chain = read_certificates(certificate).map_err(|told| keep("certificate", told)).ok();
    let secret = read_key(key).map_err(|told| keep("key", told)).ok();
    if let (Some(chain), Some(secret)) = (chain, secret)
        && let Err(fault) = joined(chain, secret)
    {
        faults.push(fault);
    }
    faults
}

/// A certificate with its key, ready to be shown to clients; or what is wrong with the files.
pub fn certified_key(certificate: &Path, key: &Path) -> Result<CertifiedKey, String> {
    joined(read_certificates(certificate)?, read_key(key)?).map_err(|fault| fault.told)
}

fn joined(
    chain: Vec<CertificateDer<'static>>,
    secret: PrivateKeyDer<'static>,
) -> Result<CertifiedKey, PemFault> {
    let provider = rustls::crypto::ring::default_provider();
    CertifiedKey::from_der(chain, secret, &provider).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => PemFault {
            key: "key",
            told: "not the key of the certificate; name the two files that were made together"
                .to_owned(),
        },
        error => PemFault { key: "certificate", told: format!("cannot be used: {error}") },
    })
}

/// What is wrong with a file of authorities.
pub(super) fn authority_fault(path: &Path) -> Option<String> {
    let chain = match read_certificates(path) {
        Ok(chain) => chain,
        Err(told) => return Some(told),
    };
    let mut store = rustls::RootCertStore::empty();
    let refused = chain.into_iter().find_map(|certificate| store.add(certificate).err());
    refused.map(|error| format!("holds a certificate that cannot be used: {error}"))
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = read(path)?;
    let chain: Result<Vec<_>, _> = rustls_pemfile::certs(&mut text.as_bytes()).collect();
    match chain {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) => {
            Err("no certificate in the file; it must hold `-----BEGIN CERTIFICATE-----`".to_owned())
        }
        Err(_) => Err("the file is broken; write it anew, with whole PEM blocks".to_owned()),
    }
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let text = read(path)?;
    match rustls_pemfile::private_key(&mut text.as_bytes()) {
        Ok(Some(key)) => Ok(key),
        Ok(None) if text.contains("ENCRYPTED") => {
            Err("the key is encrypted; decrypt it, as with `openssl pkey -in FILE`".to_owned())
        }
        Ok(None) => {
            Err("no key in the file; it must hold `-----BEGIN PRIVATE KEY-----`".to_owned())
        }
        Err(_) => Err("the file is broken; write it anew, with whole PEM blocks".to_owned()),
    }
}

fn read(path: &Path) -> Result<String, String> {
    read_bounded(path, PEM_BYTES_MAX).map_err(|fault| match fault.advice {
        Some(advice) => format!("the file {}; {advice}", fault.problem),
        None => format!("the file {}", fault.problem),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A certificate signed by itself and its key, as PEM.
    pub(in crate::config) fn pair() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    fn told(certificate: &str, key: &str) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("a.crt"), folder.path().join("a.key"));
        std::fs::write(&first, certificate).unwrap();
        std::fs::write(&second, key).unwrap();
        let faults = pair_faults(&first, &second);
        faults.into_iter().map(|fault| format!("{}: {}", fault.key, fault.told)).collect()
    }

    #[test]
    fn a_certificate_with_its_key_is_fine() {
        let (certificate, key) = pair();
        assert_eq!(told(&certificate, &key), Vec::<String>::new());
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        assert!(told(&pair().0, &pair().1)[0].starts_with("key: not the key of the certificate"));
    }

    #[test]
    fn files_without_what_they_should_hold_are_refused_both_at_once() {
        let (certificate, key) = pair();
        let faults = told(&key, &certificate);
        assert!(faults[0].starts_with("certificate: no certificate"), "{faults:?}");
        assert!(faults[1].starts_with("key: no key"), "{faults:?}");
        let encrypted =
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAA==\n-----END ENCRYPTED PRIVATE KEY-----";
        assert!(told(&certificate, encrypted)[0].contains("encrypted"));
        let broken = certificate.replace("-----END", "----END");
        assert!(told(&broken, &key)[0].starts_with("certificate: "));
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----";
        assert!(told(garbage, &key)[0].starts_with("certificate: cannot be used"));
        let gone = pair_faults(Path::new("/no/a.crt"), Path::new("/no/a.key"));
        assert_eq!(gone.len(), 2);
        assert!(gone[0].told.contains("`/no/a.crt` does not exist"), "{}", gone[0].told);
    }

    #[test]
    fn authorities_are_checked_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        std::fs::write(&path, pair().0).unwrap();
        assert_eq!(authority_fault(&path), None);
        std::fs::write(&path, "nothing").unwrap();
        assert!(authority_fault(&path).is_some());
    }
}

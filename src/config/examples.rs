//! Every config in `conf/` is loaded, as it stands but for the files and keys it names.
//! Only for tests. To add an example: a file in `conf/examples`; it is found by itself.

use std::path::{Path, PathBuf};

use super::tls::tests::pair;
use super::{Config, Loaded};

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(file!()).ancestors().nth(3).unwrap().to_owned()
}

fn examples() -> Vec<PathBuf> {
    let folder = std::fs::read_dir(root().join("conf/examples")).unwrap();
    let mut paths: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    paths.push(root().join("conf/weir.yaml"));
    paths.sort();
    paths
}

/// The text with its files made in `folder` rather than looked for in /etc/weir, and with a
/// variable that is set rather than the one it names.
fn at_home(text: &str, folder: &Path) -> String {
    let (certificate, key) = pair();
    for (name, content) in [
        ("tls.crt", &certificate),
        ("tls.key", &key),
        ("client.crt", &certificate),
        ("client.key", &key),
        ("engines-ca.pem", &certificate),
        ("engine.key", &"k-1\n".to_owned()),
    ] {
        std::fs::write(folder.join(name), content).unwrap();
    }
    let text = text.replace("/etc/weir/", &format!("{}/", folder.display()));
    let mut parts = text.split("{env: ");
    let mut home = parts.next().unwrap().to_owned();
    for part in parts {
        home.push_str("{env: CARGO_MANIFEST_DIR");
        home.push_str(&part[part.find('}').unwrap()..]);
    }
    home
}

#[test]
fn every_example_loads_without_a_fault_or_warning() {
    let folder = tempfile::tempdir().unwrap();
    for path in examples() {
        let text = std::fs::read_to_string(&path).unwrap();
        let loaded = Loaded::from_text(&at_home(&text, folder.path()));
        assert!(loaded.config.is_ok(), "{}: {:#?}", path.display(), loaded.config);
        assert_eq!(loaded.warnings, [], "{}", path.display());
        assert!(text.starts_with("# "), "{} must begin by saying what it shows", path.display());
    }
}

#[test]
fn every_policy_has_its_example() {
    for policy in crate::routing::POLICIES {
        let path = root().join(policy.example);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let folder = tempfile::tempdir().unwrap();
        let config = Config::parse(&at_home(&text, folder.path())).unwrap();
        assert_eq!(config.routing.policy, policy.name, "{}", path.display());
    }
}

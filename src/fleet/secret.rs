//! A key that is used but never shown.
//! Only the reading and the hiding live here; who sends the key where is the business of others.
//! To add a place a secret may come from: a variant of `Source` and its arm in `read`.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What is shown in place of a secret.
const SHOWN: &str = "***";

/// A secret is a key, not a document.
const SECRET_BYTES_MAX: u64 = 64 * 1024;

/// A key or password. Written `{env: NAME}`, `{file: PATH}` or as the plain text, and read when
/// the config is loaded. `Debug`, `Display` and `Serialize` show `***`; the text comes out
/// through [`Secret::reveal`] alone.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    source: Source,
    text: Arc<str>,
}

#[derive(Clone, PartialEq, Eq)]
enum Source {
    Plain,
    Environment,
    File(PathBuf),
}

impl Secret {
    /// The name under which serde knows this type, by which a reader can tell that what it holds
    /// must not be quoted.
    pub const SERDE_NAME: &'static str = "Secret";

    /// A secret whose text is known already.
    pub fn plain(text: &str) -> Self {
        Self { source: Source::Plain, text: Arc::from(text) }
    }

    /// The text itself. Every call is a place where a key may leak: keep them few.
    pub fn reveal(&self) -> &str {
        &self.text
    }

    /// Whether the text stands in the config file itself, where many eyes may see it.
    pub fn is_plain(&self) -> bool {
        self.source == Source::Plain
    }

    /// The file it was read from, if it was.
    pub fn file(&self) -> Option<&Path> {
        match &self.source {
            Source::File(path) => Some(path),
            Source::Plain | Source::Environment => None,
        }
    }

    fn from_environment(name: &str) -> Result<Self, String> {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if name.is_empty() || !name.chars().all(word) {
            // Not quoted: it may be the key itself, put in the wrong place.
            return Err("what `env` names cannot be an environment variable; `env` takes the \
                        name of a variable, not the key"
                .into());
        }
        // For the same reason only what looks like a variable by custom is quoted.
        let shown = match name.chars().any(|c| c.is_ascii_lowercase()) {
            true => "the environment variable named here".to_owned(),
            false => format!("the environment variable `{name}`"),
        };
        match std::env::var(name) {
            Ok(text) => Self::checked(Source::Environment, &text, &shown),
            Err(std::env::VarError::NotPresent) => {
                Err(format!("{shown} is not set; set it before the start, or use `file`"))
            }
            Err(std::env::VarError::NotUnicode(_)) => Err(format!("{shown} is not UTF-8 text")),
        }
    }

    fn from_file(path: PathBuf) -> Result<Self, String> {
        let rooted = ["/", "./", "../"].iter().any(|start| path.starts_with(start));
        let shown = match rooted {
            true => format!("the file `{}`", path.display()),
            false => "the file named here".to_owned(),
        };
        let told = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound if path.is_absolute() => format!("{shown} does not exist"),
            std::io::ErrorKind::NotFound => format!(
                "{shown} does not exist; a path is taken as seen from the working directory"
            ),
            _ => format!("{shown} cannot be read: {error}"),
        };
        let file = std::fs::File::open(&path).map_err(told)?;
        let mut text = String::new();
        file.take(SECRET_BYTES_MAX + 1).read_to_string(&mut text).map_err(told)?;
        if SECRET_BYTES_MAX < text.len() as u64 {
            return Err(format!("{shown} is longer than {SECRET_BYTES_MAX} bytes"));
        }
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let text = text.strip_suffix('\r').unwrap_or(text);
        Self::checked(Source::File(path), text, &shown)
    }

    fn checked(source: Source, text: &str, whence: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err(format!("{whence} is empty; leave the key out if none is needed"));
        }
        if text.trim() != text {
            return Err(format!("{whence} begins or ends with white space"));
        }
        if text.chars().any(char::is_control) {
            return Err(format!("{whence} holds a line break or another control character"));
        }
        Ok(Self { source, text: Arc::from(text) })
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(SHOWN)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(SHOWN)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(SHOWN)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_newtype_struct(Self::SERDE_NAME, SecretVisitor)
    }
}

/// Where the text of a secret is to be found.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    env: Option<String>,
    file: Option<PathBuf>,
}

struct SecretVisitor;

impl<'de> Visitor<'de> for SecretVisitor {
    type Value = Secret;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a secret")
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<Secret, D::Error> {
        inner.deserialize_any(self)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Secret, E> {
        Secret::checked(Source::Plain, text, "the secret").map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Secret, A::Error> {
        let named = Named::deserialize(MapAccessDeserializer::new(map))?;
        match (named.env, named.file) {
            (Some(name), None) => Secret::from_environment(&name).map_err(A::Error::custom),
            (None, Some(path)) => Secret::from_file(path).map_err(A::Error::custom),
            (None, None) => Err(A::Error::custom("neither `env` nor `file` is given")),
            (Some(_), Some(_)) => Err(A::Error::custom("both `env` and `file` are given")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(yaml: &str) -> Result<Secret, String> {
        serde_yaml::from_str(yaml).map_err(|error| error.to_string())
    }

    #[test]
    fn a_secret_is_never_shown() {
        let secret = Secret::plain("k-secret-123");
        assert_eq!(format!("{secret} {secret:?} {:?}", Some(&secret)), "*** *** Some(***)");
        assert_eq!(serde_json::to_string(&secret).unwrap(), "\"***\"");
        assert_eq!(secret.reveal(), "k-secret-123");
    }

    #[test]
    fn plain_text_is_taken_and_known_as_such() {
        let secret = read("k-1").unwrap();
        assert_eq!((secret.reveal(), secret.is_plain(), secret.file()), ("k-1", true, None));
    }

    #[test]
    fn the_environment_is_read() {
        // Cargo sets this one; setting one here would race with the other tests.
        let secret = read("{env: CARGO_MANIFEST_DIR}").unwrap();
        assert_eq!(secret.reveal(), env!("CARGO_MANIFEST_DIR"));
        assert!(!secret.is_plain());
    }

    #[test]
    fn the_final_newline_of_a_file_is_not_part_of_the_key() {
        for (content, key) in [("k-1\n", "k-1"), ("k-1\r\n", "k-1"), ("k-1", "k-1")] {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), content).unwrap();
            let secret = read(&format!("{{file: {}}}", file.path().display())).unwrap();
            assert_eq!((secret.reveal(), secret.file()), (key, Some(file.path())));
        }
    }

    #[test]
    fn what_cannot_be_a_key_is_refused_without_quoting_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let in_file = |content: &str| {
            std::fs::write(file.path(), content).unwrap();
            read(&format!("{{file: {}}}", file.path().display())).unwrap_err()
        };
        assert!(in_file("").contains("is empty"));
        for broken in ["k-secret\nk-other\n", " k-secret", "k-secret\t"] {
            let told = in_file(broken);
            assert!(!told.contains("k-secret"), "a fault must not show a key: {told}");
        }
        assert!(read("\"k-secret\\u0007\"").unwrap_err().contains("control character"));
    }

    #[test]
    fn a_key_written_in_place_of_a_name_is_not_quoted() {
        for yaml in ["{env: sk-abc123}", "{env: hf_abc123}", "{file: sk-abc123}", "{env: abc123}"] {
            let told = read(yaml).unwrap_err();
            assert!(!told.contains("abc123"), "a fault must not show a key: {told}");
        }
    }

    #[test]
    fn a_missing_source_is_named() {
        assert!(read("{env: WEIR_NO_SUCH_KEY}").unwrap_err().contains("`WEIR_NO_SUCH_KEY`"));
        assert!(read("{file: /no/such/key}").unwrap_err().contains("`/no/such/key`"));
        assert!(read("{}").unwrap_err().contains("neither"));
        assert!(read("{env: PATH, file: /etc/hostname}").unwrap_err().contains("both"));
        assert!(read("{evn: PATH}").unwrap_err().contains("evn"));
    }
}

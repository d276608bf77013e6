//! What the operator may set about reading requests.
//! Only settings and their defaults live here. To add one: a field, its default, its doc comment
//! with meaning, unit and default.

use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

/// Settings of the section `request`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Largest request body taken, in bytes; a longer one is refused with 413. Default `64MiB`.
    pub body_bytes_max: ByteSize,
    /// Most bytes of all request bodies together that are held at one time; what would go beyond
    /// is refused with 503. A body is held until the answer to it begins. Default `4GiB`.
    pub bodies_bytes_max: ByteSize,
    /// Longest time the upload of one request body may take, from its head to its last byte.
    /// Default `60s`.
    #[serde(with = "humantime_serde")]
    pub upload_timeout: Duration,
    /// Most JSON objects and arrays open inside one another, the outermost counted. A deeper body
    /// is refused with 400. Default `256`.
    pub nesting_depth_max: u32,
    /// What happens to a path that no vLLM is known to serve: `refuse` (404) or `pass` (any
    /// replica gets it). Control paths stay closed either way. Default `refuse`.
    pub unknown_paths: UnknownPaths,
    /// Whether clients reach the paths that change an engine (LoRA load and unload, profiling,
    /// elastic scaling): `closed` or `open`. Default `closed`.
    pub engine_admin: EngineAdmin,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            body_bytes_max: ByteSize::mib(64),
            bodies_bytes_max: ByteSize::gib(4),
            upload_timeout: Duration::from_secs(60),
            nesting_depth_max: 256,
            unknown_paths: UnknownPaths::Refuse,
            engine_admin: EngineAdmin::Closed,
        }
    }
}

impl Options {
    /// The part that bounds the reading of one body.
    pub fn limits(&self) -> Limits {
        Limits {
            body_bytes_max: usize::try_from(self.body_bytes_max.as_u64()).unwrap_or(usize::MAX),
            nesting_depth_max: self.nesting_depth_max,
        }
    }
}

/// Bounds on one request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest body, in bytes.
    pub body_bytes_max: usize,
    /// Most JSON containers open at once.
    pub nesting_depth_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Options::default().limits()
    }
}

/// What happens to a path that is not in the table of APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownPaths {
    /// 404, and no replica hears of it.
    Refuse,
    /// Any replica gets it.
    Pass,
}

/// Whether the paths that change an engine are served to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineAdmin {
    /// Refused.
    Closed,
    /// Passed on.
    Open,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_the_default_one() {
        let options: Options = serde_json::from_str("{}").unwrap();
        assert_eq!(options, Options::default());
        assert_eq!(options.limits().body_bytes_max, 64 * 1024 * 1024);
    }

    #[test]
    fn a_section_written_out_is_read_back_the_same() {
        let written = serde_json::to_string(&Options::default()).unwrap();
        assert_eq!(serde_json::from_str::<Options>(&written).unwrap(), Options::default());
        let set = r#"{"body_bytes_max":"1MiB","upload_timeout":"5s","unknown_paths":"pass",
            "engine_admin":"open","nesting_depth_max":9}"#;
        let options: Options = serde_json::from_str(set).unwrap();
        assert_eq!(options.unknown_paths, UnknownPaths::Pass);
        assert_eq!(options.engine_admin, EngineAdmin::Open);
        assert_eq!(options.upload_timeout, Duration::from_secs(5));
        assert_eq!(options.limits(), Limits { body_bytes_max: 1 << 20, nesting_depth_max: 9 });
    }

    #[test]
    fn a_misspelt_key_is_a_fault() {
        assert!(serde_json::from_str::<Options>(r#"{"body_byte_max":1}"#).is_err());
    }
}

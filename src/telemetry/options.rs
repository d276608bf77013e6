//! What an operator may say about counting and showing. Only settings and their defaults live here.
//! To add one: a field with a doc comment (meaning, unit, default) and its line in `Default`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The `telemetry` section of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// One line per request. Default: text on standard output.
    pub access_log: AccessLogOptions,
    /// What Weir says about itself, on standard error. Default: level `info`, as text.
    pub log: LogOptions,
}

/// The most lines `queue_max` may ask for.
const QUEUE_MAX: usize = 1 << 20;

impl Options {
    /// What is wrong with these settings, each beginning with the path of its key inside the
    /// section. Empty when all is well. Opens no file.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let queue = self.access_log.queue_max;
        if !(1..=QUEUE_MAX).contains(&queue) {
            faults.push(format!("access_log.queue_max: {queue} is not in 1..={QUEUE_MAX}"));
        }
        if let Err(error) = super::diagnostics::filter(&self.log.level) {
            faults.push(format!("log.level: {error}"));
        }
        faults
    }
}

/// The `telemetry.access_log` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccessLogOptions {
    /// How a line is written: `text` (`key=value`), `json` (one object), or `off`. Default: `text`.
    pub format: AccessLogFormat,
    /// Where lines go: `stdout`, `stderr`, or the path of a file to append to. Default: `stdout`.
    pub path: PathBuf,
    /// Lines that may wait for the writer, `1..=1048576`; about 350 bytes each. What comes on top
    /// is dropped and counted in `weir_access_log_dropped_lines_total`. Default: 4096.
    pub queue_max: usize,
    /// Whether a line names the client's address. Default: true.
    pub client_address: bool,
}

impl Default for AccessLogOptions {
    fn default() -> Self {
        Self {
            format: AccessLogFormat::Text,
            path: PathBuf::from("stdout"),
            queue_max: 4096,
            client_address: true,
        }
    }
}

/// How an access line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccessLogFormat {
    /// `key=value` pairs, made for eyes and `grep`.
    Text,
    /// One JSON object per line, made for collectors.
    Json,
    /// No line at all.
    Off,
}

/// The `telemetry.log` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogOptions {
    /// The least important level that is shown: `error`, `warn`, `info`, `debug` or `trace`;
    /// single targets may follow, as in `info,weir::fleet=debug`. Default: `info`.
    pub level: String,
    /// How a log line is written. Default: `text`.
    pub format: LogFormat,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}

/// How a log line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Made for eyes.
    Text,
    /// One JSON object per line.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_the_default() {
        let options: Options = serde_json::from_str("{}").unwrap();
        assert_eq!(options, Options::default());
    }

    #[test]
    fn the_default_survives_being_written_and_read() {
        let text = serde_json::to_string(&Options::default()).unwrap();
        assert_eq!(serde_json::from_str::<Options>(&text).unwrap(), Options::default());
    }

    #[test]
    fn a_misspelt_key_is_refused() {
        assert!(serde_json::from_str::<Options>(r#"{"acess_log":{}}"#).is_err());
        assert!(serde_json::from_str::<Options>(r#"{"access_log":{"formats":"off"}}"#).is_err());
        assert!(serde_json::from_str::<Options>(r#"{"access_log":{"format":"xml"}}"#).is_err());
    }

    #[test]
    fn every_fault_is_told_with_its_key() {
        let mut options = Options::default();
        assert_eq!(options.faults(), Vec::<String>::new());
        options.access_log.queue_max = 0;
        options.log.level = "loud".to_owned();
        let faults = options.faults();
        assert!(faults[0].starts_with("access_log.queue_max: 0"), "{faults:?}");
        assert!(faults[1].starts_with("log.level: "), "{faults:?}");
    }
}

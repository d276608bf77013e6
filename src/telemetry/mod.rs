//! Counting and showing: the numbers under `/metrics`, one line per request, Weir's own log.
//! Nothing here decides about a request, and nothing here reads the clock: dates and durations are
//! arguments. No prompt, answer or key ever comes in.
//! To add a number see `metrics.rs`; to add something to the line see `access_log.rs`.

mod access_log;
mod diagnostics;
mod facts;
mod families;
mod labels;
mod line;
mod metrics;
mod options;
mod process;
mod replica;

pub use access_log::AccessLog;
pub use diagnostics::{flush_log, init_tracing};
pub use facts::{Timings, Usage};
pub use labels::{
    AttemptOutcome, BreakerLabel, Ended, Label, Phase, ProbeResult, ReloadResult, StatusClass,
    TokenKind,
};
pub use line::AccessLine;
pub use metrics::{InFlight, Metrics};
pub use options::{AccessLogFormat, AccessLogOptions, LogFormat, LogOptions, Options};
pub use replica::{ModelMetrics, ReplicaMetrics, ReplicaState};

/// What can go wrong with counting and showing; all but the encoding happen at start only.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// Two numbers have one name, or a name is not a good one.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The level of the log is not understood.
    #[error("log level `{level}`: {reason}")]
    Level {
        /// What was asked for.
        level: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Somebody else has taken the log already.
    #[error("log: {0}")]
    Log(String),
    /// The file of the access log cannot be opened.
    #[error("access log `{path}`")]
    AccessLog {
        /// The file.
        path: String,
        /// Why not.
        source: std::io::Error,
    },
}

type Result<T> = std::result::Result<T, TelemetryError>;

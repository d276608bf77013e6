//! Weir's own log: what it says about itself, on standard error. It catches the records of
//! libraries that use the `log` crate too, Pingora's among them.
//! No line of a request is written here (that is the access log). To quieten one more library: a
//! row in `QUIET`.

use std::io::IsTerminal;

use parking_lot::Mutex;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

use super::options::{LogFormat, LogOptions};
use super::{Result, TelemetryError};

/// What libraries may say unless the operator names them. Pingora's proxy writes lines per failed
/// request, which the access log tells already; its core tells of handshakes and of accepting.
const QUIET: &[(&str, LevelFilter)] = &[
    ("pingora_proxy", LevelFilter::OFF),
    ("pingora_core", LevelFilter::ERROR),
    ("pingora_pool", LevelFilter::ERROR),
    ("pingora_load_balancing", LevelFilter::ERROR),
    ("h2", LevelFilter::ERROR),
    ("rustls", LevelFilter::ERROR),
];

/// Weir's own targets.
const OURS: &str = "weir";

/// The most that a library may be asked to tell.
const OTHERS_MAX: LevelFilter = LevelFilter::INFO;

/// Lines of the log that may wait for the writer; what comes on top is let go.
const LINES_WAITING_MAX: usize = 8192;

/// The writer of the log, for as long as the process runs.
static WRITER: Mutex<Option<WorkerGuard>> = Mutex::new(None);

/// Starts the log of the process; fails when it was started before or the level is not understood.
pub fn init_tracing(options: &LogOptions) -> Result<()> {
    let filter = filter(&options.level)?;
    // A thread of its own writes, and lines that find no room are let go: whoever reads standard
    // error, or does not, holds nobody up.
    let (writer, guard) = NonBlockingBuilder::default()
        .buffered_lines_limit(LINES_WAITING_MAX)
        .lossy(true)
        .thread_name("log")
        .finish(std::io::stderr());
    let layer = fmt::layer().with_writer(writer);
    let layer = match options.format {
        LogFormat::Text => layer.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry()
        .with(layer.with_filter(filter))
        .try_init()
        .map_err(|error| TelemetryError::Log(error.to_string()))?;
    *WRITER.lock() = Some(guard);
    Ok(())
}

/// Writes what is still to be written, and no more after that. For the end of the process.
pub fn flush_log() {
    drop(WRITER.lock().take());
}

/// The filter of a level as the operator writes it.
pub(super) fn filter(level: &str) -> Result<Targets> {
    let wrong = |reason: String| TelemetryError::Level { level: level.to_owned(), reason };
    if level.trim().is_empty() {
        return Err(wrong("is empty".to_owned()));
    }
    let mut filter: Targets = level.parse().map_err(|error| wrong(format!("{error}")))?;
    // A word that is no level would be taken for a target, and everything else would fall silent.
    let general = filter.default_level().unwrap_or(LevelFilter::OFF);
    if general == LevelFilter::OFF && !level.contains("off") {
        return Err(wrong("is none of error, warn, info, debug, trace, off".to_owned()));
    }
    // Below info, libraries write whole heads and bodies, keys and prompts among them: a level
    // says how much Weir tells, and nobody may ask a library for more than `OTHERS_MAX`.
    let named: Vec<(String, LevelFilter)> =
        filter.iter().map(|(target, level)| (target.to_owned(), level)).collect();
    if OTHERS_MAX < general {
        filter = filter.with_default(OTHERS_MAX).with_target(OURS, general);
    }
    for (target, level) in &named {
        if !target.starts_with(OURS) && OTHERS_MAX < *level {
            filter = filter.with_target(target.as_str(), OTHERS_MAX);
        }
    }
    for (target, quiet) in QUIET {
        if !named.iter().any(|(name, _)| name.starts_with(target)) {
            filter = filter.with_target(*target, *quiet);
        }
    }
    for (target, level) in named.iter().filter(|(target, _)| target.starts_with(OURS)) {
        filter = filter.with_target(target.as_str(), *level);
    }
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn pingora_is_quiet_at_every_level() {
        let info = filter("info").unwrap();
        assert!(info.would_enable("weir::proxy", &Level::INFO));
        assert!(!info.would_enable("weir::proxy", &Level::DEBUG));
        assert!(!info.would_enable("pingora_proxy::proxy_h1", &Level::ERROR));
        assert!(!info.would_enable("pingora_core::protocols", &Level::WARN));
        assert!(info.would_enable("pingora_core::services::listening", &Level::ERROR));
        let debug = filter("debug").unwrap();
        assert!(debug.would_enable("weir::proxy", &Level::DEBUG));
        assert!(!debug.would_enable("pingora_proxy", &Level::DEBUG));
    }

    #[test]
    fn no_library_can_be_made_to_write_heads_and_bodies() {
        for level in ["trace", "trace,pingora_core=trace,h2=debug", "info,hyper=trace"] {
            let filter = filter(level).unwrap();
            for target in ["pingora_core::protocols::http::v1::client", "h2::codec", "hyper"] {
                assert!(!filter.would_enable(target, &Level::DEBUG), "{target} at {level}");
            }
        }
        assert!(filter("trace").unwrap().would_enable("weir::proxy", &Level::TRACE));
    }

    #[test]
    fn the_operator_may_name_targets() {
        let named = filter("warn,weir::fleet=debug,pingora_proxy=error").unwrap();
        assert!(named.would_enable("weir::fleet::health", &Level::DEBUG));
        assert!(!named.would_enable("weir::proxy", &Level::INFO));
        assert!(named.would_enable("pingora_proxy", &Level::ERROR));
    }

    #[test]
    fn a_word_that_is_no_level_is_refused() {
        for wrong in ["", " ", "loud", "weir=loud", "weir::fleet=debug"] {
            let error = filter(wrong).unwrap_err();
            assert!(error.to_string().starts_with(&format!("log level `{wrong}`")), "{error}");
        }
        assert!(filter("off").is_ok());
    }
}

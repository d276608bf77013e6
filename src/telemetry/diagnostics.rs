//! Weir's own log: what it says about itself, on standard error. It catches the records of
//! libraries that use the `log` crate too, Pingora's among them.
//! No line of a request is written here (that is the access log). To quieten one more library: a
//! row in `QUIET`.

use std::io::IsTerminal;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

use super::options::{LogFormat, LogOptions};
use super::{Result, TelemetryError};

/// What libraries may say unless `debug` is asked for. Pingora's proxy writes lines per failed
/// request, which the access log tells already; its core tells of handshakes and of accepting.
const QUIET: &[(&str, LevelFilter)] = &[
    ("pingora_proxy", LevelFilter::OFF),
    ("pingora_core", LevelFilter::ERROR),
    ("pingora_pool", LevelFilter::ERROR),
    ("pingora_load_balancing", LevelFilter::ERROR),
    ("h2", LevelFilter::ERROR),
    ("rustls", LevelFilter::ERROR),
];

/// Starts the log of the process; fails when it was started before or the level is not understood.
pub fn init_tracing(options: &LogOptions) -> Result<()> {
    let filter = filter(&options.level)?;
    let layer = fmt::layer().with_writer(std::io::stderr);
    let layer = match options.format {
        LogFormat::Text => layer.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    tracing_subscriber::registry()
        .with(layer.with_filter(filter))
        .try_init()
        .map_err(|error| TelemetryError::Log(error.to_string()))
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
    let named: Vec<String> = filter.iter().map(|(target, _)| target.to_owned()).collect();
    for (target, quiet) in QUIET {
        let by_operator = named.iter().any(|name| name.starts_with(target));
        if general < LevelFilter::DEBUG && !by_operator {
            filter = filter.with_target(*target, *quiet);
        }
    }
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn pingora_is_quiet_unless_debug_is_asked_for() {
        let info = filter("info").unwrap();
        assert!(info.would_enable("weir::proxy", &Level::INFO));
        assert!(!info.would_enable("weir::proxy", &Level::DEBUG));
        assert!(!info.would_enable("pingora_proxy::proxy_h1", &Level::ERROR));
        assert!(!info.would_enable("pingora_core::protocols", &Level::WARN));
        assert!(info.would_enable("pingora_core::services::listening", &Level::ERROR));
        let debug = filter("debug").unwrap();
        assert!(debug.would_enable("pingora_proxy", &Level::DEBUG));
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

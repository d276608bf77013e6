//! The binary: reads the command line and does what it says.

use std::process::ExitCode;

use weir::config::cli::Command;
use weir::config::{Loaded, check_file};
use weir::control::Source;
use weir::{demo, server};

// Up to a fifth less CPU per request than the C library's, and memory goes back after a burst.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    match Command::from_arguments() {
        Command::Check { config, print } => {
            let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
            match check_file(&config, print, &mut out, &mut err) {
                Ok(true) => ExitCode::SUCCESS,
                Ok(false) | Err(_) => ExitCode::FAILURE,
            }
        }
        Command::Demo { engines, port, model } => end(demo::run(engines, port, &model)),
        Command::Run { config: path } => {
            let loaded = Loaded::from_file(&path);
            match loaded.config {
                Err(faults) => {
                    for fault in faults {
                        eprintln!("{}: {fault}", path.display());
                    }
                    ExitCode::FAILURE
                }
                Ok(config) => {
                    server::init_log(&config.telemetry);
                    for warning in &loaded.warnings {
                        tracing::warn!(%warning, "in the configuration");
                    }
                    end(server::run(config, Some(Source { path, files: loaded.files })))
                }
            }
        }
    }
}

fn end(result: Result<(), server::StartError>) -> ExitCode {
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "weir cannot start");
            eprintln!("weir cannot start: {error}");
            ExitCode::FAILURE
        }
    };
    weir::telemetry::flush_log();
    code
}

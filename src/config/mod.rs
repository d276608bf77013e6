//! What the operator asked for: one YAML file, checked as a whole, taken whole or not at all.
//!
//! Here the options of all rooms are put together; what an option means is said in the
//! `options.rs` of its room. No other room reads the file, and none sees a raw setting.
//!
//! To add a key: add it to the options of its room, then regenerate the manual and the full
//! example (manual.rs says how). To add a section: a field of [`Config`] and a line in `check`.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{fleet, proxy, request, response, routing, telemetry};

mod address;
mod check;
pub mod cli;
#[cfg(test)]
mod examples;
mod fault;
mod files;
mod load;
#[cfg(test)]
mod manual;
mod options;
mod read;
mod report;
mod show;
mod tls;
mod tree;
pub mod watch;
mod wording;

pub use self::fault::Fault;
pub use self::files::{FILES_MAX, Files};
pub use self::load::{CONFIG_BYTES_MAX, Loaded};
pub use self::options::{
    AdminOptions, LISTENERS_MAX, ListenOptions, ListenTlsOptions, ServerOptions,
};
pub use self::report::check_file;
pub use self::show::{Applies, DIFFERENCES_MAX, Difference, Shown, differences};
pub use self::tls::certified_key;

/// Everything the operator asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where clients connect to. Default: `0.0.0.0:8080`, in the clear.
    pub listen: Vec<ListenOptions>,
    /// Where operators look and act.
    pub admin: AdminOptions,
    /// The vLLM servers and what they serve.
    pub fleet: fleet::Options,
    /// Which replica serves a request.
    pub routing: routing::Options,
    /// What is taken from clients.
    pub request: request::Options,
    /// Time limits, retries and forwarded headers.
    pub proxy: proxy::Options,
    /// What is done with answers besides passing them on.
    pub response: response::Options,
    /// One line per request, and what Weir says about itself.
    pub telemetry: telemetry::Options,
    /// The process as a whole. Changes here take effect at the next start.
    pub server: ServerOptions,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: vec![ListenOptions::default()],
            admin: AdminOptions::default(),
            fleet: fleet::Options::default(),
            routing: routing::Options::default(),
            request: request::Options::default(),
            proxy: proxy::Options::default(),
            response: response::Options::default(),
            telemetry: telemetry::Options::default(),
            server: ServerOptions::default(),
        }
    }
}

impl Config {
    /// Reads and checks the file at `path`, with the secrets and certificates it names. All faults
    /// are told at once.
    pub fn load(path: &Path) -> Result<Self, Vec<Fault>> {
        Loaded::from_file(path).config
    }

    /// The same for a text in memory.
    pub fn parse(text: &str) -> Result<Self, Vec<Fault>> {
        Loaded::from_text(text).config
    }
}

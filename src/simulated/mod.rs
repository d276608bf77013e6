//! A vLLM without a GPU: the model of an engine, and a server in front of it that answers as vLLM
//! answers, byte for byte where that is known, and fails on purpose when told to.
//! It serves the demo, the black-box tests and the benches over real sockets; the engine alone,
//! driven by an invented clock, judges routing policies. It must be honest: what real vLLM does
//! not do, this does only when a fault asks for it.
//! May not: name any other room but `clock` and `names`. `engine`, `sequence`, `cache`,
//! `counters` and `text` are pure. To add a route see `routes`, a fault `faults`, a number of the
//! engine `counters`.

mod admin;
mod answer;
mod audio;
pub mod cache;
mod connection;
pub mod counters;
mod driver;
mod echo;
pub mod engine;
pub mod faults;
mod gate;
mod generate;
mod guided;
mod head;
mod http;
mod instant;
mod job;
mod knobs;
mod log;
mod metrics;
mod options;
mod pooling;
mod routes;
mod sequence;
mod serve;
mod source;
mod stream;
pub mod text;
mod wire;

pub use faults::Faults;
pub use http::{EngineServer, Listen};
pub use knobs::Knobs;
pub use log::{Ended, Record};
pub use options::{EngineOptions, InstantOptions, Mode, Options, StepOptions};

#[cfg(test)]
mod tests;

//! A vLLM server without a GPU.
pub mod cache;
pub mod counters;
pub mod engine;
pub mod faults;
mod options;
pub mod text;

pub use options::{EngineOptions, InstantOptions, Mode, Options, StepOptions};

//! Weir: an edge proxy for fleets of vLLM engines.
pub mod clock;
pub mod names;

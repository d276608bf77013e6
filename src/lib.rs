//! Weir: an edge proxy for fleets of vLLM engines.
//!
//! The rooms of the house, from the ground up; a room knows itself and what lies below it. See
//! docs/architecture.md.

// floor 0: words
pub mod names;

// floor 1: think
pub mod clock;
pub mod request;
pub mod routing;
pub mod telemetry;

// floor 2: touch the world, one subject each
pub mod fleet;
pub mod response;
pub mod simulated;

// floor 3: join
pub mod proxy;

// floor 4: what the operator asked for
pub mod config;

// floor 5: beside the requests
pub mod control;

// floor 6: what operators see and do
pub mod admin;

// floor 7: start and stop
pub mod server;

// floor 8: everything at once
pub mod demo;

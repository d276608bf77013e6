//! The real binary on real sockets, seen from outside: what it promises, one test per promise.
//! Each file is one area. To add a test: a sentence, in the file whose header it fits; what it
//! needs of tools goes into `kit`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    unreachable_pub,
    reason = "a test may"
)]

mod cancel;
mod errors;
mod examples;
mod failover;
mod fidelity;
mod gone;
mod headers;
mod health;
mod kit;
mod limits;
mod memory;
mod models;
mod protocol;
mod reload;
mod routing;
mod shutdown;
mod smoke;
mod streaming;
mod upstreams;

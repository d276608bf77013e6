//! One file for each way to choose. A policy only writes costs; picking is in `choose.rs`.
//! To add one: `<name>.rs` with `NAME`, `build` and a type that implements `Policy`, a `mod` line
//! here, and a row in `POLICIES`.

pub(super) mod least_load;
pub(super) mod power_of_two;
pub(super) mod round_robin;
pub(super) mod session;

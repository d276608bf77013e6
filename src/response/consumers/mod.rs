//! Those who want a copy of answers, one file each. Nothing else lives here.
//! To add one: a file with a type that implements `Consumer`, and its row in `CONSUMERS`
//! (response/mod.rs).

pub(super) mod usage;

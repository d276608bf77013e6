//! Stand-in for `libz-ng-sys`. pingora-core asks for zlib-ng, whose build needs cmake; Weir neither
//! compresses nor decompresses on its way, so plain zlib built by the C compiler serves as well.
#![no_std]

pub use libz_sys::*;

//! The only place that reads the clock. Rooms that think get the time as an argument.

use std::time::{Instant, SystemTime};

/// Now, on the clock that never goes back.
#[allow(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
pub fn now() -> Instant {
    Instant::now()
}

/// Now, as a date; for logs and ids only.
#[allow(clippy::disallowed_methods, reason = "this is the one place that reads the clock")]
pub fn date() -> SystemTime {
    SystemTime::now()
}

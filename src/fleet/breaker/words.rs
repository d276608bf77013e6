//! What goes into a breaker and what comes out, with its text for a person. No decision is made
//! here. To add an outcome: a variant here and an arm in `Breaker::record`.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

/// How an attempt ended. One for each attempt, told when it ends; see `Breaker::answering` too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A whole answer of 2xx to 4xx, but not 429.
    Answered,
    /// 429 or 503: the engine is well and wants no more for now.
    Backpressure {
        /// What the answer's `Retry-After` said.
        retry_after: Option<Duration>,
    },
    /// Another 5xx.
    ServerError,
    /// No connection was made.
    ConnectFailed,
    /// The connection died before an answer.
    Reset,
    /// No answer came in time.
    TimedOut,
    /// The answer began and was cut off.
    BrokenStream,
    /// The client went away first, or nobody knows how it ended; says nothing of the replica.
    ClientLeft,
}

/// Why a replica is ejected: the last failure of the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Connections could not be made.
    ConnectFailed,
    /// Connections died before an answer.
    Reset,
    /// Answers did not come in time.
    TimedOut,
    /// Answers were cut off.
    BrokenStream,
    /// Answers were 5xx.
    ServerErrors,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ConnectFailed => "connect failed",
            Self::Reset => "connection reset before an answer",
            Self::TimedOut => "no answer in time",
            Self::BrokenStream => "answer cut off",
            Self::ServerErrors => "answer was a server error",
        })
    }
}

/// What the breaker says of its replica at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It may serve.
    Ready,
    /// It may serve if nobody else can.
    CoolingOff {
        /// When it is ready again.
        until: Instant,
    },
    /// It was ejected and may serve one request that tries it.
    Trial {
        /// Why it was ejected.
        cause: Cause,
    },
    /// It should not serve.
    Ejected {
        /// When a trial is due.
        until: Instant,
        /// Why it was ejected.
        cause: Cause,
    },
}

/// A change worth a line in the log; told once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The replica was ejected.
    Opened {
        /// The last failure of the row.
        cause: Cause,
        /// Length of the row.
        failures: u32,
        /// For how long.
        open_for: Duration,
    },
    /// The replica serves again.
    Closed,
}

/// The same as [`Admission`], for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It may serve.
    Ready,
    /// It refused work a moment ago.
    CoolingOff {
        /// For how long it is still avoided.
        left: Duration,
    },
    /// A request may try it, or is just trying it.
    OnTrial {
        /// Why it was ejected.
        cause: Cause,
    },
    /// It is left alone.
    Ejected {
        /// The last failure of the row.
        cause: Cause,
        /// Length of the row.
        failures: u32,
        /// Until a trial is due.
        left: Duration,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => f.write_str("ready"),
            Self::CoolingOff { left } => {
                write!(f, "cooling off for {:.1} s after 429 or 503", left.as_secs_f64())
            }
            Self::OnTrial { cause } => write!(f, "on trial after: {cause}"),
            Self::Ejected { cause, failures, left } => {
                let left = left.as_secs_f64();
                write!(f, "ejected for {left:.1} s after {failures} in a row, the last: {cause}")
            }
        }
    }
}

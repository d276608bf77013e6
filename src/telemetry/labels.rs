//! The values a label may take, each set closed and known at build time.
//! No text of a client may become a label; nothing here counts.
//! To add a set: a `labels!` block, and its use in `metrics.rs`.

/// A closed set of label values.
pub trait Label: Copy + 'static {
    /// Every value, in the order of declaration.
    const ALL: &'static [Self];
    /// The value as Prometheus shows it.
    fn text(self) -> &'static str;
    /// The place of the value in `ALL`.
    fn index(self) -> usize;
}

macro_rules! labels {
    ($(#[$meta:meta])* $name:ident {
        $($(#[$value_meta:meta])* $value:ident => $text:literal,)+
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$value_meta])* $value,)+
        }

        impl Label for $name {
            const ALL: &'static [Self] = &[$(Self::$value,)+];

            fn text(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

labels! {
    /// How far a request had come when its client left.
    Phase {
        /// Its body was still arriving.
        Uploading => "uploading",
        /// It waited to be let in.
        Queued => "queued",
        /// A connection to the replica was being made.
        Connecting => "connecting",
        /// The replica had it and had not answered a byte.
        WaitingForHead => "waiting_for_head",
        /// The head was there and no byte of the body yet, or none for a while.
        SilentStream => "silent_stream",
        /// Bytes were flowing.
        Streaming => "streaming",
    }
}
labels! {
    /// How a request ended, in one word.
    Ended {
        /// Answered to the last byte, whatever the status.
        Complete => "complete",
        /// The client left first.
        ClientLeft => "client_left",
        /// The engine went away in the middle of its answer, or said inside it that it broke.
        EngineBroke => "engine_broke",
        /// A time limit was reached.
        TimedOut => "timed_out",
        /// Weir said no: bad request, no room, no replica.
        Refused => "refused",
        /// Every attempt at a replica was in vain, and none had sent a byte to the client.
        Failed => "failed",
    }
}
labels! {
    /// What came of one attempt at a replica.
    AttemptOutcome {
        /// It answered, be it with the client's own fault.
        Answered => "answered",
        /// It asked for a pause: 429 or 503.
        Backpressure => "backpressure",
        /// It answered with another 5xx.
        ServerError => "server_error",
        /// No connection could be made.
        ConnectFailed => "connect_failed",
        /// The connection died before the answer began.
        Reset => "reset",
        /// A time limit was reached.
        TimedOut => "timed_out",
        /// The answer broke off.
        BrokenStream => "broken_stream",
        /// The client left; nothing is known of the replica.
        ClientLeft => "client_left",
        /// A kept connection turned out to be closed.
        Stale => "stale",
    }
}
labels! {
    /// What came of one health probe.
    ProbeResult {
        /// The replica is well.
        Good => "good",
        /// It answered that it is not.
        Bad => "bad",
        /// It did not answer in time.
        TimedOut => "timed_out",
        /// It could not be reached.
        Unreachable => "unreachable",
    }
}
labels! {
    /// Where the breaker of a replica stands.
    BreakerLabel {
        /// Traffic flows.
        Closed => "closed",
        /// One trial at a time.
        HalfOpen => "half_open",
        /// No traffic.
        Open => "open",
    }
}
labels! {
    /// Which tokens.
    TokenKind {
        /// What the client sent, cached or not.
        Prompt => "prompt",
        /// What the engine made.
        Completion => "completion",
        /// The part of the prompt the engine had already in its cache.
        Cached => "cached",
    }
}
labels! {
    /// What came of reading the configuration again.
    ReloadResult {
        /// The new configuration is in use.
        Taken => "taken",
        /// It has faults; the old one stays.
        Refused => "refused",
    }
}
labels! {
    /// The class of a status, as it went to the client.
    StatusClass {
        /// 100 to 199.
        Informational => "1xx",
        /// 200 to 299.
        Success => "2xx",
        /// 300 to 399.
        Redirection => "3xx",
        /// 400 to 499.
        ClientError => "4xx",
        /// 500 to 599.
        ServerError => "5xx",
        /// No status was sent: the client left first; or one that HTTP does not know.
        None => "none",
    }
}

impl StatusClass {
    /// The class of a status; 0 stands for "none was sent".
    pub fn of(status: u16) -> Self {
        match status {
            100..=199 => Self::Informational,
            200..=299 => Self::Success,
            300..=399 => Self::Redirection,
            400..=499 => Self::ClientError,
            500..=599 => Self::ServerError,
            _ => Self::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn check<L: Label + PartialEq + std::fmt::Debug>() {
        let texts: HashSet<_> = L::ALL.iter().map(|label| label.text()).collect();
        assert_eq!(texts.len(), L::ALL.len(), "two values of one label would be one series");
        for (index, label) in L::ALL.iter().enumerate() {
            assert_eq!(label.index(), index);
        }
    }

    #[test]
    fn values_of_a_label_are_distinct_and_in_order() {
        check::<Phase>();
        check::<Ended>();
        check::<AttemptOutcome>();
        check::<ProbeResult>();
        check::<BreakerLabel>();
        check::<TokenKind>();
        check::<ReloadResult>();
        check::<StatusClass>();
    }

    #[test]
    fn a_status_falls_into_its_hundred() {
        for (status, text) in [
            (0, "none"),
            (99, "none"),
            (100, "1xx"),
            (199, "1xx"),
            (200, "2xx"),
            (299, "2xx"),
            (300, "3xx"),
            (399, "3xx"),
            (400, "4xx"),
            (499, "4xx"),
            (500, "5xx"),
            (599, "5xx"),
            (600, "none"),
        ] {
            assert_eq!(StatusClass::of(status).text(), text, "{status}");
        }
    }
}

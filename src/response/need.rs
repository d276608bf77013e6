//! Whether anything of an answer is read or kept: the needs of all consumers folded into one, and
//! the one decision that makes a buffer. Pure: no state, no I/O.
//! To add a reason to keep an answer, write a consumer; this file does not change for it.

use crate::request::Wire;

/// What a consumer needs of one answer. Ordered: each includes the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Not a byte.
    Nothing,
    /// To see each event of a stream once as it passes; nothing is kept.
    Events,
    /// The whole body, if it is at most this long.
    Whole {
        /// The most bytes that are of use to the consumer.
        bytes_max: usize,
    },
}

impl Need {
    /// The hungrier of two needs; of two bodies, the longer.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Whole { bytes_max: one }, Self::Whole { bytes_max: two }) => {
                Self::Whole { bytes_max: one.max(two) }
            }
            (Self::Whole { bytes_max }, _) | (_, Self::Whole { bytes_max }) => {
                Self::Whole { bytes_max }
            }
            (Self::Events, _) | (_, Self::Events) => Self::Events,
            (Self::Nothing, Self::Nothing) => Self::Nothing,
        }
    }

    /// One need out of those of all consumers.
    pub fn fold(needs: impl IntoIterator<Item = Self>) -> Self {
        needs.into_iter().fold(Self::Nothing, Self::and)
    }
}

/// What is known of an answer once its head is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The form of the answer, known from the API that was called.
    pub wire: Wire,
    /// The status of the answer.
    pub status: u16,
    /// Whether it is a stream of events (`text/event-stream`).
    pub streaming: bool,
    /// Whether it is compressed (`content-encoding` other than `identity`): unreadable to us.
    pub encoded: bool,
    /// Whether no body follows: an answer to HEAD, or status 204 or 304.
    pub bodyless: bool,
}

impl Shape {
    /// Whether the status is one of success.
    pub fn succeeded(&self) -> bool {
        (200..=299).contains(&self.status)
    }

    /// Whether it is a stream of tokens that we can read.
    pub fn readable_stream(&self) -> bool {
        self.streaming
            && !self.encoded
            && !self.bodyless
            && self.succeeded()
            && matches!(
                self.wire,
                Wire::Chat | Wire::Completion | Wire::Responses | Wire::Messages | Wire::Audio
            )
    }
}

/// How much is read from the events of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// They are not looked at.
    Nothing,
    /// When tokens come, and whether the stream fails; for every stream, as it costs next to
    /// nothing and keeps nothing.
    Progress,
    /// That, and the usage the engine reports.
    Usage,
}

/// What happens to the chunks of an answer besides being passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How its events are read.
    pub reading: Reading,
    /// The most bytes that are kept; `None`: there is no buffer.
    pub buffer_bytes_max: Option<usize>,
}

/// The decision: an answer is kept if, and only if, somebody needs the whole of it and there is
/// something to keep.
pub fn plan(need: Need, shape: &Shape) -> Plan {
    let reading = match (shape.readable_stream(), need) {
        (false, _) => Reading::Nothing,
        (true, Need::Nothing) => Reading::Progress,
        (true, Need::Events | Need::Whole { .. }) => Reading::Usage,
    };
    let buffer_bytes_max = match need {
        Need::Whole { bytes_max } if bytes_max > 0 && !shape.bodyless => Some(bytes_max),
        Need::Whole { .. } | Need::Events | Need::Nothing => None,
    };
    Plan { reading, buffer_bytes_max }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::response::consumers::usage;

    pub(in crate::response) const WIRES: [Wire; 8] = [
        Wire::Chat,
        Wire::Completion,
        Wire::Responses,
        Wire::Messages,
        Wire::Pooling,
        Wire::Tokens,
        Wire::Audio,
        Wire::Other,
    ];

    const STATUSES: [u16; 10] = [100, 199, 200, 204, 299, 300, 400, 429, 500, 503];

    const USAGE_MAX: usize = 8;
    const CACHE_MAX: usize = 16;
    const CALLBACK_MAX: usize = 4;

    /// A cache wants whole answers of success that are not streamed and not compressed.
    fn cache(shape: &Shape) -> Need {
        if shape.succeeded() && !shape.streaming && !shape.encoded && shape.wire == Wire::Chat {
            Need::Whole { bytes_max: CACHE_MAX }
        } else {
            Need::Nothing
        }
    }

    /// A callback wants everything, streams too.
    fn callback(_: &Shape) -> Need {
        Need::Whole { bytes_max: CALLBACK_MAX }
    }

    pub(in crate::response) fn shapes() -> Vec<Shape> {
        let mut shapes = Vec::new();
        for wire in WIRES {
            for status in STATUSES {
                for bits in 0..8 {
                    shapes.push(Shape {
                        wire,
                        status,
                        streaming: bits & 1 != 0,
                        encoded: bits & 2 != 0,
                        bodyless: bits & 4 != 0,
                    });
                }
            }
        }
        shapes
    }

    /// The table as a person would write it, one consumer set after the other.
    #[test]
    fn the_truth_table_of_what_is_kept_and_read() {
        for set in 0..8 {
            let (with_usage, with_cache, with_callback) =
                (set & 1 != 0, set & 2 != 0, set & 4 != 0);
            for shape in shapes() {
                let mut needs = Vec::new();
                if with_usage {
                    needs.push(usage::need(&shape, USAGE_MAX));
                }
                if with_cache {
                    needs.push(cache(&shape));
                }
                if with_callback {
                    needs.push(callback(&shape));
                }
                let good = (200..300).contains(&shape.status);
                let plain = !shape.encoded && !shape.bodyless;
                let counted =
                    [Wire::Chat, Wire::Completion, Wire::Responses, Wire::Messages, Wire::Pooling]
                        .contains(&shape.wire);
                let stream_of_tokens = shape.streaming
                    && good
                    && plain
                    && (shape.wire == Wire::Audio || counted && shape.wire != Wire::Pooling);
                let whole = good && plain && !shape.streaming;
                let mut kept = None;
                if with_callback && !shape.bodyless {
                    kept = Some(CALLBACK_MAX);
                }
                if with_usage && whole && counted {
                    kept = Some(USAGE_MAX);
                }
                if with_cache && whole && shape.wire == Wire::Chat {
                    kept = Some(CACHE_MAX);
                }
                let reading = if !stream_of_tokens {
                    Reading::Nothing
                } else if with_callback || with_usage && shape.wire != Wire::Audio {
                    Reading::Usage
                } else {
                    Reading::Progress
                };
                assert_eq!(
                    plan(Need::fold(needs), &shape),
                    Plan { reading, buffer_bytes_max: kept },
                    "usage {with_usage}, cache {with_cache}, callback {with_callback}, {shape:?}"
                );
            }
        }
    }

    #[test]
    fn without_consumers_nothing_is_ever_kept() {
        for shape in shapes() {
            assert_eq!(plan(Need::fold([]), &shape).buffer_bytes_max, None, "{shape:?}");
        }
    }

    #[test]
    fn a_need_for_events_keeps_nothing() {
        for shape in shapes() {
            assert_eq!(plan(Need::Events, &shape).buffer_bytes_max, None, "{shape:?}");
        }
    }

    #[test]
    fn a_body_of_no_bytes_needs_no_buffer() {
        let shape = Shape {
            wire: Wire::Chat,
            status: 200,
            streaming: false,
            encoded: false,
            bodyless: false,
        };
        assert_eq!(plan(Need::Whole { bytes_max: 0 }, &shape).buffer_bytes_max, None);
        assert_eq!(plan(Need::Whole { bytes_max: 1 }, &shape).buffer_bytes_max, Some(1));
    }

    #[test]
    fn the_hungriest_need_wins_and_of_two_bodies_the_longer() {
        let whole = |bytes_max| Need::Whole { bytes_max };
        for (one, two, both) in [
            (Need::Nothing, Need::Nothing, Need::Nothing),
            (Need::Nothing, Need::Events, Need::Events),
            (Need::Events, Need::Events, Need::Events),
            (Need::Nothing, whole(3), whole(3)),
            (Need::Events, whole(3), whole(3)),
            (whole(3), whole(3), whole(3)),
            (whole(3), whole(4), whole(4)),
            (whole(0), Need::Events, whole(0)),
        ] {
            assert_eq!(one.and(two), both, "{one:?} and {two:?}");
            assert_eq!(two.and(one), both, "{two:?} and {one:?}");
        }
    }

    fn any_need() -> impl Strategy<Value = Need> {
        prop_oneof![
            Just(Need::Nothing),
            Just(Need::Events),
            (0usize..5).prop_map(|bytes_max| Need::Whole { bytes_max }),
        ]
    }

    proptest! {
        #[test]
        fn the_order_of_consumers_does_not_matter(
            needs in prop::collection::vec(any_need(), 0..6),
            turn in 0usize..6,
        ) {
            let mut turned = needs.clone();
            if !turned.is_empty() {
                let turn = turn % turned.len();
                turned.rotate_left(turn);
            }
            turned.reverse();
            prop_assert_eq!(Need::fold(needs), Need::fold(turned));
        }

        #[test]
        fn a_further_consumer_never_gets_another_one_less(one in any_need(), two in any_need()) {
            for shape in shapes() {
                let (alone, together) = (plan(one, &shape), plan(one.and(two), &shape));
                prop_assert!(alone.buffer_bytes_max <= together.buffer_bytes_max);
                prop_assert!(alone.reading as u8 <= together.reading as u8);
            }
        }
    }
}

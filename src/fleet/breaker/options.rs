//! When a replica that answers badly is left alone: the settings and their checks, nothing else.
//! To add a setting: a field with its doc, its default, and a line in `faults`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Longest pause that the options may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(3_600);

/// When a replica that answers badly is left alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerOptions {
    /// Failed connects, resets, timeouts and broken streams in a row that eject a replica; 0 for
    /// never. Default 3.
    pub failures_max: u32,
    /// Answers of 5xx (but 503) in a row that eject a replica; 0 for never. Higher than
    /// `failures_max`, for one bad request can make every engine answer 500. Default 10.
    pub server_errors_max: u32,
    /// How long the first ejection lasts; each further one lasts twice as long. Default `1s`.
    #[serde(with = "humantime_serde")]
    pub open_for: Duration,
    /// The longest ejection. Default `30s`.
    #[serde(with = "humantime_serde")]
    pub open_for_max: Duration,
    /// After an ejection one request at a time tries the replica. When such a trial has no answer
    /// after this long, another one is let through. Default `5s`.
    #[serde(with = "humantime_serde")]
    pub trial_timeout: Duration,
    /// How long bad outcomes are remembered while nothing new happens. Default `1m`.
    #[serde(with = "humantime_serde")]
    pub forget_after: Duration,
    /// How long a replica that answered 429 or 503 is avoided while others are there; twice as long
    /// each further time. An answer's `Retry-After` goes before it. Default `1s`.
    #[serde(with = "humantime_serde")]
    pub cool_off: Duration,
    /// The longest such time, and the most that is believed of a `Retry-After`. Default `30s`.
    #[serde(with = "humantime_serde")]
    pub cool_off_max: Duration,
    /// The part of a pool that may be left out for bad answers. When more look bad, all serve.
    /// From 0 (nobody) to 1 (everybody). Failed connects are not counted. Default 0.5.
    pub ejected_share_max: f64,
}

impl Default for BreakerOptions {
    fn default() -> Self {
        Self {
            failures_max: 3,
            server_errors_max: 10,
            open_for: Duration::from_secs(1),
            open_for_max: Duration::from_secs(30),
            trial_timeout: Duration::from_secs(5),
            forget_after: Duration::from_secs(60),
            cool_off: Duration::from_secs(1),
            cool_off_max: Duration::from_secs(30),
            ejected_share_max: 0.5,
        }
    }
}

impl BreakerOptions {
    /// What is wrong, as pairs of a path within this section and a message; empty when fine.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        let times = [
            ("open_for", self.open_for),
            ("open_for_max", self.open_for_max),
            ("trial_timeout", self.trial_timeout),
            ("forget_after", self.forget_after),
            ("cool_off", self.cool_off),
            ("cool_off_max", self.cool_off_max),
        ];
        for (path, time) in times {
            if time.is_zero() || PAUSE_MAX < time {
                faults.push((path.to_owned(), format!("{time:?} is not within 1ms to 1h")));
            }
        }
        for (path, first, most) in [
            ("open_for", self.open_for, self.open_for_max),
            ("cool_off", self.cool_off, self.cool_off_max),
        ] {
            if most < first {
                let advice = format!("{first:?} is above its limit {most:?}; raise `{path}_max`");
                faults.push((path.to_owned(), advice));
            }
        }
        if !(0.0..=1.0).contains(&self.ejected_share_max) {
            let advice = format!("{} is not within 0 to 1; 0.5 is usual", self.ejected_share_max);
            faults.push(("ejected_share_max".to_owned(), advice));
        }
        faults
    }
}

//! What the probes of a replica add up to, and when the next one is due. Pure: time and dice are
//! arguments; sending a probe is the fleet's. What traffic shows is in `breaker.rs`, but for one
//! thing: bytes that flow are believed more than a probe that came too late.
//!
//! To add an end of a probe: a variant of [`Probe`], its text, and whether it counts.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::routing::unit_interval;

/// Pause after the first failed probe of a replica that is not up; later ones are longer.
const RETRY_FIRST: Duration = Duration::from_secs(1);
/// Doublings of a pause, at most; its limit is reached long before.
const DOUBLINGS_MAX: u32 = 16;
/// Shortest time between probes.
const EVERY_MIN: Duration = Duration::from_millis(50);
/// Refused probes in a row, at least, that make a replica count as gone: it may be starting anew.
const REFUSALS_MIN: u32 = 2;
/// Longest of all times here.
const EVERY_MAX: Duration = Duration::from_secs(3_600);

/// How replicas are probed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProbeOptions {
    /// Time between two probes of a replica that is up. `0s` turns probes off: then every replica
    /// counts as up from the start, and only the breaker finds out. Default `2s`.
    #[serde(with = "humantime_serde")]
    pub every: Duration,
    /// How long a probe may take. Default `2s`.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// What a probe asks for; only 2xx is a good answer. Default `/health`.
    pub path: String,
    /// Failed probes in a row after which a replica is down. Default 3.
    pub failures_max: u32,
    /// Good probes in a row after which a replica is up. Default 1.
    pub successes_min: u32,
    /// The longest time between two probes of a replica that is not up; the first pauses are
    /// shorter. An engine that comes up waits no longer than this for its first request.
    /// Default `4s`.
    #[serde(with = "humantime_serde")]
    pub down_every_max: Duration,
    /// A probe that gets no answer in time does not count while bytes of other answers came within
    /// this time: a busy engine is not a dead one. Default `10s`.
    #[serde(with = "humantime_serde")]
    pub trust_traffic_for: Duration,
    /// The part of each pause that dice may take away, from 0 to 0.9, so that probes of many
    /// replicas do not come together. Default 0.2.
    pub jitter_share: f64,
    /// Time between two readings of the list of models, `GET /v1/models`. Default `30s`.
    #[serde(with = "humantime_serde")]
    pub models_every: Duration,
    /// Time until the list is asked for again when it could not be read; twice as long each further
    /// time, up to `models_every`. Default `1s`.
    #[serde(with = "humantime_serde")]
    pub models_retry: Duration,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(2),
            timeout: Duration::from_secs(2),
            path: "/health".to_owned(),
            failures_max: 3,
            successes_min: 1,
            down_every_max: Duration::from_secs(4),
            trust_traffic_for: Duration::from_secs(10),
            jitter_share: 0.2,
            models_every: Duration::from_secs(30),
            models_retry: Duration::from_secs(1),
        }
    }
}

impl ProbeOptions {
    /// Whether replicas are probed at all.
    pub fn is_on(&self) -> bool {
        !self.every.is_zero()
    }

    /// Time until the list of models is due, after so many failures to read it in a row.
    pub fn models_delay(&self, failures: u32, dice: u64) -> Duration {
        let whole = match failures.checked_sub(1) {
            None => self.models_every,
            Some(doublings) => doubled(self.models_retry, doublings).min(self.models_every),
        };
        self.less_jitter(whole, dice)
    }

    /// What is wrong, as pairs of a path within this section and a message; empty when fine.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        let mut fault = |path: &str, message: String| faults.push((path.to_owned(), message));
        for (path, time) in [
            ("timeout", self.timeout),
            ("down_every_max", self.down_every_max),
            ("models_every", self.models_every),
            ("models_retry", self.models_retry),
        ] {
            if !(EVERY_MIN..=EVERY_MAX).contains(&time) {
                fault(path, format!("{time:?} is not within 50ms to 1h"));
            }
        }
        if self.is_on() && !(EVERY_MIN..=EVERY_MAX).contains(&self.every) {
            fault("every", format!("{:?} is not within 50ms to 1h, nor 0s for off", self.every));
        }
        if EVERY_MAX < self.trust_traffic_for {
            fault("trust_traffic_for", "is longer than 1h; 10s is usual".to_owned());
        }
        for (path, count) in
            [("failures_max", self.failures_max), ("successes_min", self.successes_min)]
        {
            if count == 0 {
                fault(path, "is 0; one probe must count at least".to_owned());
            }
        }
        if !is_path(&self.path) {
            fault("path", format!("`{}` is not a path; it begins with `/`", self.path));
        }
        if !(0.0..=0.9).contains(&self.jitter_share) {
            fault("jitter_share", format!("{} is not within 0 to 0.9", self.jitter_share));
        }
        faults
    }

    fn less_jitter(&self, pause: Duration, dice: u64) -> Duration {
        pause.mul_f64(1.0 - self.jitter_share.clamp(0.0, 0.9) * unit_interval(dice))
    }
}

/// How a probe ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// 2xx.
    Good,
    /// Another status.
    Status(u16),
    /// Nobody listens at the address.
    Refused,
    /// No connection was made for another reason: there is no way to the address, or no trust.
    Unreachable,
    /// The connection was made, but died or brought something else than an answer.
    Broken,
    /// No connection or no answer in time.
    TimedOut,
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Good => f.write_str("probe was good"),
            Self::Status(status) => write!(f, "probe was answered {status}"),
            Self::Refused => f.write_str("connection refused"),
            Self::Unreachable => f.write_str("no connection"),
            Self::Broken => f.write_str("probe was cut off"),
            Self::TimedOut => f.write_str("probe timed out"),
        }
    }
}

/// Whether the probes think a replica can serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Not yet known; it does not serve.
    Unknown,
    /// It serves.
    Up,
    /// It does not serve.
    Down,
}

/// A change worth a line in the log; told once, however many probes say the same after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It serves from now on.
    CameUp {
        /// How long it was down; `None` when it never was.
        down_for: Option<Duration>,
        /// Probes that failed in that time, or before the first good one.
        failures: u32,
    },
    /// It serves no more, or still does not.
    WentDown {
        /// How the last probe ended.
        last: Probe,
        /// Length of the row of failed probes.
        failures: u32,
    },
}

/// What is known of one replica from its probes.
#[derive(Clone, Debug)]
pub struct Health {
    options: ProbeOptions,
    verdict: Verdict,
    /// How the last probe ended that counted.
    last: Option<Probe>,
    /// Good probes in a row.
    successes: u32,
    /// Probes that failed since a good one, or since the verdict was reached.
    failures: u32,
    down_since: Option<Instant>,
    /// When the present row of refused probes began, and its length.
    refused: Option<(Instant, u32)>,
}

impl Health {
    /// Of a replica that was never probed.
    pub fn new(options: ProbeOptions) -> Self {
        let verdict = if options.is_on() { Verdict::Unknown } else { Verdict::Up };
        Self {
            options,
            verdict,
            last: None,
            successes: 0,
            failures: 0,
            down_since: None,
            refused: None,
        }
    }

    /// Whether it can serve.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Why, for a person.
    pub fn reason(&self) -> String {
        match (self.verdict, self.last) {
            (Verdict::Unknown, None) => "no probe has ended yet".to_owned(),
            (Verdict::Up, None) => "probes are off".to_owned(),
            (_, Some(last)) if self.failures == 0 => last.to_string(),
            (_, Some(last)) => format!("{last}, failures: {}", self.failures),
            (Verdict::Down, None) => "down".to_owned(),
        }
    }

    /// Since when nobody listens there, once that is sure. Whoever has heard nothing from it since
    /// before will hear nothing more.
    pub fn gone_since(&self) -> Option<Instant> {
        let (since, row) = self.refused?;
        let sure = self.options.failures_max.max(REFUSALS_MIN) <= row;
        (sure && self.verdict == Verdict::Down).then_some(since)
    }

    /// Traffic found that somebody listens there.
    pub fn reached(&mut self) {
        self.refused = None;
    }

    /// A probe ended. `heard` is when bytes of an answer last came from the replica.
    pub fn record(&mut self, probe: Probe, heard: Option<Instant>, now: Instant) -> Option<Change> {
        self.refused = (probe == Probe::Refused).then(|| {
            let (since, row) = self.refused.unwrap_or((now, 0));
            (since, row.saturating_add(1))
        });
        if probe == Probe::Good {
            return self.succeeded(now);
        }
        let is_fresh =
            |heard| now.saturating_duration_since(heard) < self.options.trust_traffic_for;
        if probe == Probe::TimedOut && self.verdict == Verdict::Up && heard.is_some_and(is_fresh) {
            return None;
        }
        self.last = Some(probe);
        self.successes = 0;
        self.failures = self.failures.saturating_add(1);
        if self.verdict == Verdict::Down || self.failures < self.options.failures_max {
            return None;
        }
        let failures = std::mem::take(&mut self.failures);
        self.verdict = Verdict::Down;
        self.down_since = Some(now);
        Some(Change::WentDown { last: probe, failures })
    }

    /// Time until the next probe is due. Never more than the options say: jitter only shortens.
    pub fn next_delay(&self, dice: u64) -> Duration {
        let options = &self.options;
        let whole = match self.verdict {
            Verdict::Up => options.every,
            Verdict::Unknown | Verdict::Down => {
                let first = RETRY_FIRST.min(options.every);
                doubled(first, self.failures.saturating_sub(1)).min(options.down_every_max)
            }
        };
        options.less_jitter(whole, dice)
    }

    fn succeeded(&mut self, now: Instant) -> Option<Change> {
        self.last = Some(Probe::Good);
        self.successes = self.successes.saturating_add(1);
        if self.verdict == Verdict::Up {
            self.failures = 0;
            return None;
        }
        if self.successes < self.options.successes_min {
            return None;
        }
        self.verdict = Verdict::Up;
        let down_for = self.down_since.take().map(|since| now.saturating_duration_since(since));
        Some(Change::CameUp { down_for, failures: std::mem::take(&mut self.failures) })
    }
}

fn doubled(first: Duration, doublings: u32) -> Duration {
    first.saturating_mul(1 << doublings.min(DOUBLINGS_MAX))
}

fn is_path(path: &str) -> bool {
    path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock;

    const BAD: [Probe; 5] =
        [Probe::Status(503), Probe::Refused, Probe::Unreachable, Probe::Broken, Probe::TimedOut];

    fn health() -> Health {
        Health::new(ProbeOptions::default())
    }

    fn up(now: Instant) -> Health {
        let mut health = health();
        health.record(Probe::Good, None, now);
        health
    }

    #[test]
    fn a_new_replica_serves_from_its_first_good_probe() {
        let now = clock::now();
        let mut health = health();
        assert_eq!(health.verdict(), Verdict::Unknown);
        assert_eq!(health.record(Probe::Refused, None, now), None);
        let change = health.record(Probe::Good, None, now);
        assert_eq!(change, Some(Change::CameUp { down_for: None, failures: 1 }));
        assert_eq!(health.verdict(), Verdict::Up);
    }

    #[test]
    fn each_way_to_fail_takes_a_replica_down_after_the_stated_number() {
        let now = clock::now();
        for probe in BAD {
            let mut health = up(now);
            assert_eq!(health.record(probe, None, now), None);
            assert_eq!(health.record(probe, None, now), None);
            let change = health.record(probe, None, now);
            assert_eq!(change, Some(Change::WentDown { last: probe, failures: 3 }));
            assert!(health.reason().starts_with(&probe.to_string()));
        }
    }

    #[test]
    fn a_slow_probe_does_not_count_while_answers_flow_but_a_refusal_does() {
        let start = clock::now();
        let mut health = up(start);
        for second in 1..100 {
            let now = start + Duration::from_secs(second);
            assert_eq!(health.record(Probe::TimedOut, Some(now), now), None);
        }
        assert_eq!(health.verdict(), Verdict::Up, "busy is not dead");

        let now = start + Duration::from_secs(100);
        for probe in [Probe::Status(503), Probe::Refused, Probe::Status(500)] {
            health.record(probe, Some(now), now);
        }
        assert_eq!(health.verdict(), Verdict::Down, "what it says itself is believed");

        let mut silent = up(start);
        for _ in 0..3 {
            silent.record(Probe::TimedOut, Some(start), now);
        }
        assert_eq!(silent.verdict(), Verdict::Down, "old traffic proves nothing");
    }

    #[test]
    fn ten_minutes_down_make_one_line_and_coming_back_another() {
        let start = clock::now();
        let mut health = up(start);
        let mut changes = Vec::new();
        for second in 0..600 {
            let now = start + Duration::from_secs(second);
            changes.extend(health.record(Probe::Refused, None, now));
        }
        let back = start + Duration::from_secs(602);
        changes.extend(health.record(Probe::Good, None, back));
        changes.extend(health.record(Probe::Good, None, back));
        let expected = [
            Change::WentDown { last: Probe::Refused, failures: 3 },
            Change::CameUp { down_for: Some(Duration::from_secs(600)), failures: 597 },
        ];
        assert_eq!(changes, expected);
    }

    #[test]
    fn a_replica_is_gone_since_the_first_of_a_row_of_refusals_that_took_it_down() {
        let start = clock::now();
        let second = |number| start + Duration::from_secs(number);
        let mut health = up(start);
        health.record(Probe::TimedOut, None, second(1));
        for number in 2..5 {
            assert_eq!(health.gone_since(), None);
            health.record(Probe::Refused, None, second(number));
        }
        assert_eq!(health.gone_since(), Some(second(2)));
        health.record(Probe::Refused, None, second(5));
        assert_eq!(health.gone_since(), Some(second(2)));
        health.reached();
        health.record(Probe::Refused, None, second(6));
        assert_eq!(health.gone_since(), None, "somebody was there in between");
    }

    #[test]
    fn a_replica_that_fails_in_another_way_is_not_gone() {
        let now = clock::now();
        for probe in BAD.into_iter().filter(|probe| *probe != Probe::Refused) {
            let mut health = up(now);
            for _ in 0..9 {
                health.record(probe, None, now);
            }
            assert_eq!((health.verdict(), health.gone_since()), (Verdict::Down, None));
            health.record(Probe::Refused, None, now);
            assert_eq!(health.gone_since(), None, "one refusal may be a restart");
        }
    }

    #[test]
    fn coming_back_may_take_several_good_probes_in_a_row() {
        let now = clock::now();
        let options = ProbeOptions { successes_min: 2, ..ProbeOptions::default() };
        let mut health = Health::new(options);
        for probe in [Probe::Good, Probe::Refused, Probe::Good] {
            assert_eq!(health.record(probe, None, now), None);
        }
        assert!(health.record(Probe::Good, None, now).is_some());
    }

    #[test]
    fn without_probes_a_replica_counts_as_up() {
        let health = Health::new(ProbeOptions { every: Duration::ZERO, ..ProbeOptions::default() });
        assert_eq!(health.verdict(), Verdict::Up);
    }

    #[test]
    fn the_list_of_models_is_read_again_soon_and_then_more_rarely() {
        let options = ProbeOptions::default();
        let delays =
            [0, 1, 2, 3, 6, 99].map(|failures| options.models_delay(failures, 0).as_secs());
        assert_eq!(delays, [30, 1, 2, 4, 30, 30]);
    }

    #[test]
    fn the_defaults_have_no_fault_and_each_bad_value_is_named() {
        assert_eq!(ProbeOptions::default().faults(), []);
        let text = "{every: 1ms, timeout: 0s, path: health, failures_max: 0, jitter_share: 2}";
        let faults = serde_yaml::from_str::<ProbeOptions>(text).unwrap().faults();
        let paths: Vec<_> = faults.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["timeout", "every", "failures_max", "path", "jitter_share"]);
    }

    proptest! {
        #[test]
        fn a_started_engine_is_probed_again_within_five_seconds(
            probes in prop::collection::vec(prop::sample::select(&BAD[..]), 0..50),
            dice: u64,
        ) {
            let now = clock::now();
            let mut health = health();
            for probe in probes {
                health.record(probe, None, now);
                let delay = health.next_delay(dice);
                prop_assert!(Duration::from_millis(800) <= delay, "no flood: {delay:?}");
                prop_assert!(delay < Duration::from_secs(5));
            }
        }
    }
}

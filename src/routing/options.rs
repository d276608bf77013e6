//! What the operator may say about routing. Only settings and their checks; nothing decides here.
//! To add a setting: a field with its doc, its default, and a line in `faults`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{POLICIES, known, policy};

/// Headers and body fields that may name a session, at most.
const SESSION_SOURCES_MAX: usize = 16;
/// Parts of a dotted path, at most.
const PATH_PARTS_MAX: usize = 8;
/// Largest sensible `load_bound`; more is no bound.
const LOAD_BOUND_MAX: f64 = 1_000.0;
/// Longest ramp of a new replica.
const SLOW_START_MAX: Duration = Duration::from_secs(3_600);

/// Which replica serves a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// How to choose: `round_robin`, `least_load`, `power_of_two` or `session`.
    /// Default `least_load`.
    pub policy: String,
    /// Settings of the policy `session`, and where a session's key is found.
    pub session: SessionOptions,
    /// How a new replica's part of the work grows.
    pub slow_start: SlowStartOptions,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            policy: policy::least_load::NAME.to_owned(),
            session: SessionOptions::default(),
            slow_start: SlowStartOptions::default(),
        }
    }
}

impl Options {
    /// What is wrong, as pairs of a path within this section and a message; empty when fine.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        if !POLICIES.iter().any(|row| row.name == self.policy) {
            let advice =
                format!("no policy is called `{}`; choose one of {}", self.policy, known());
            faults.push(("policy".to_owned(), advice));
        }
        let within = |section: &'static str| {
            move |(path, message): (String, String)| (format!("{section}.{path}"), message)
        };
        faults.extend(self.session.faults().into_iter().map(within("session")));
        faults.extend(self.slow_start.faults().into_iter().map(within("slow_start")));
        faults
    }
}

/// What names a session, and how firmly it is kept at home.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SessionOptions {
    /// Request headers that may carry the key of a session; the first one that is there and not
    /// empty wins, before any body field. Default `x-session-id`, `x-user-id`.
    pub headers: Vec<String>,
    /// Fields of a JSON body that may carry the key, as dotted paths, in order.
    /// Default `session_id`, `metadata.session_id`, `user`.
    pub body_fields: Vec<String>,
    /// A home is passed over when this request would put it above this many times the mean load of
    /// all. At least 1; greater keeps sessions at home more firmly and spreads load less evenly.
    /// Default 1.25.
    pub load_bound: f64,
    /// A home that would hold no more than this many requests is never passed over, whatever the
    /// mean: with little traffic a warm cache is worth more than an idle engine. Default 4.
    pub load_floor: u32,
}

impl Default for SessionOptions {
    fn default() -> Self {
        let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Self {
            headers: texts(&["x-session-id", "x-user-id"]),
            body_fields: texts(&["session_id", "metadata.session_id", "user"]),
            load_bound: 1.25,
            load_floor: 4,
        }
    }
}

impl SessionOptions {
    /// What is wrong, as pairs of a path within this section and a message; empty when fine.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        let many = |name: &str| (name.to_owned(), format!("name at most {SESSION_SOURCES_MAX}"));
        if SESSION_SOURCES_MAX < self.headers.len() {
            faults.push(many("headers"));
        }
        if SESSION_SOURCES_MAX < self.body_fields.len() {
            faults.push(many("body_fields"));
        }
        for (index, name) in self.headers.iter().enumerate() {
            if !is_header_name(name) {
                let advice =
                    "is not a header name; use letters, digits and `-`, as in x-session-id";
                faults.push((format!("headers[{index}]"), format!("`{name}` {advice}")));
            }
        }
        for (index, path) in self.body_fields.iter().enumerate() {
            if !is_field_path(path) {
                let advice = "is not a path of fields; write names with dots between, \
                              as in metadata.session_id";
                faults.push((format!("body_fields[{index}]"), format!("`{path}` {advice}")));
            }
        }
        if !(1.0..=LOAD_BOUND_MAX).contains(&self.load_bound) {
            let advice =
                format!("{} is not within 1 to {LOAD_BOUND_MAX}; 1.25 is usual", self.load_bound);
            faults.push(("load_bound".to_owned(), advice));
        }
        faults
    }
}

/// How a replica that began to serve comes to its full part of the work. An engine that just
/// started has an empty cache and still compiles; least load would give it every new request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SlowStartOptions {
    /// How long a new replica's weight grows to its full value; `0s` gives all of it at once.
    /// Default `0s`.
    #[serde(with = "humantime_serde")]
    pub window: Duration,
    /// The part of its weight that it starts with, above 0 and at most 1. Default 0.1.
    pub share_min: f64,
}

impl Default for SlowStartOptions {
    fn default() -> Self {
        Self { window: Duration::ZERO, share_min: 0.1 }
    }
}

impl SlowStartOptions {
    /// The factor for the weight of a replica that has served for this long: grows evenly from
    /// `share_min` to 1. The fleet multiplies a candidate's weight by it, so every policy heeds it.
    pub fn share(&self, served_for: Duration) -> f32 {
        if self.window <= served_for {
            return 1.0;
        }
        let passed = served_for.as_secs_f64() / self.window.as_secs_f64();
        (self.share_min + (1.0 - self.share_min) * passed) as f32
    }

    /// What is wrong, as pairs of a path within this section and a message; empty when fine.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        if SLOW_START_MAX < self.window {
            faults.push(("window".to_owned(), "is longer than 1h; 30s is usual".to_owned()));
        }
        if !(0.001..=1.0).contains(&self.share_min) {
            let advice = format!("{} is not within 0.001 to 1; 0.1 is usual", self.share_min);
            faults.push(("share_min".to_owned(), advice));
        }
        faults
    }
}

/// A token as HTTP defines it.
fn is_header_name(name: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !name.is_empty() && name.bytes().all(is_token)
}

fn is_field_path(path: &str) -> bool {
    path.split('.').count() <= PATH_PARTS_MAX && path.split('.').all(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_have_no_fault_and_survive_a_round_trip() {
        let options = Options::default();
        assert_eq!(options.faults(), []);
        let text = serde_yaml::to_string(&options).unwrap();
        assert_eq!(serde_yaml::from_str::<Options>(&text).unwrap(), options);
        assert_eq!(serde_yaml::from_str::<Options>("{}").unwrap(), options);
    }

    #[test]
    fn an_unknown_key_is_refused() {
        assert!(serde_yaml::from_str::<Options>("session: {header: x}").is_err());
    }

    #[test]
    fn every_fault_is_told_at_once_with_its_path() {
        let text = "{policy: foo, session: {headers: ['x id', x-ok], body_fields: [a..b, ok],
                     load_bound: 0.5}, slow_start: {window: 2h, share_min: 0}}";
        let faults = serde_yaml::from_str::<Options>(text).unwrap().faults();
        let paths: Vec<_> = faults.iter().map(|(path, _)| path.as_str()).collect();
        let expected = [
            "policy",
            "session.headers[0]",
            "session.body_fields[0]",
            "session.load_bound",
            "slow_start.window",
            "slow_start.share_min",
        ];
        assert_eq!(paths, expected);
        assert!(faults[0].1.contains("round_robin, least_load, power_of_two, session"));
    }

    #[test]
    fn a_new_replica_comes_to_its_full_part_slowly() {
        let slow = SlowStartOptions { window: Duration::from_secs(30), share_min: 0.1 };
        assert_eq!(slow.share(Duration::ZERO), 0.1);
        assert!((slow.share(Duration::from_secs(15)) - 0.55).abs() < 1e-6);
        assert_eq!(slow.share(Duration::from_secs(30)), 1.0);
        assert_eq!(SlowStartOptions::default().share(Duration::ZERO), 1.0, "off by default");
    }
}

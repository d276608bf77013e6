//! What an operator may set of the proxy itself: time limits, retries, forwarded headers.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::retry::RetryOptions;

/// Settings of the proxy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// How long each part of a request may take.
    pub timeouts: TimeoutOptions,
    /// When a request is tried again on another replica.
    pub retry: RetryOptions,
    /// What the engines are told about the client.
    pub forwarded: ForwardedOptions,
}

/// Time limits. `0s` switches a limit off where its text says so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TimeoutOptions {
    /// To open a connection to a replica, TLS included. Default `5s`.
    #[serde(with = "humantime_serde")]
    pub connect: Duration,
    /// From the request sent until the first token of a stream, or until the head of any other
    /// answer: a long prompt in a long queue needs minutes. `0s`: no limit. Default `10m`.
    #[serde(with = "humantime_serde")]
    pub first_byte: Duration,
    /// Between two pieces of an answer that has begun. `0s`: no limit. Default `5m`.
    #[serde(with = "humantime_serde")]
    pub between_bytes: Duration,
    /// For the whole request. `0s`: no limit. Default `0s`, as generations may be long.
    #[serde(with = "humantime_serde")]
    pub total: Duration,
    /// To hand a replica the next piece of the request. Default `60s`.
    #[serde(with = "humantime_serde")]
    pub send: Duration,
    /// How long a client may take no piece of its answer before it counts as gone. `0s`: no
    /// limit. Default `10m`.
    #[serde(with = "humantime_serde")]
    pub client_write: Duration,
    /// For a client to send the head of its first request. Default `30s`.
    #[serde(with = "humantime_serde")]
    pub request_head: Duration,
    /// How long an idle connection of a client is kept. Default `75s`.
    #[serde(with = "humantime_serde")]
    pub client_idle: Duration,
    /// How long an idle connection to a replica is kept. Must stay below the engine's own limit,
    /// which is 5 s in vLLM. Default `4s`.
    #[serde(with = "humantime_serde")]
    pub replica_idle: Duration,
}

impl Default for TimeoutOptions {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            first_byte: Duration::from_secs(600),
            between_bytes: Duration::from_secs(300),
            total: Duration::ZERO,
            send: Duration::from_secs(60),
            client_write: Duration::from_secs(600),
            request_head: Duration::from_secs(30),
            client_idle: Duration::from_secs(75),
            replica_idle: Duration::from_secs(4),
        }
    }
}

/// What the engines are told about the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ForwardedOptions {
    /// Whether the client's own `X-Forwarded-*` are believed and its address added to them
    /// (`append`), or replaced by what is seen here (`replace`). Default `append`.
    pub client: ForwardedClient,
    /// Whether the replica sees the `Host` the client named instead of its own. Default `false`.
    pub keep_host: bool,
}

impl Default for ForwardedOptions {
    fn default() -> Self {
        Self { client: ForwardedClient::Append, keep_host: false }
    }
}

/// What becomes of the client's `X-Forwarded-For`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForwardedClient {
    /// The address seen here is added behind what the client sent.
    Append,
    /// Only the address seen here is told.
    Replace,
}

impl Options {
    /// Every value that cannot work, as (path below this section, what to do).
    pub fn faults(&self) -> Vec<(String, String)> {
        let times = &self.timeouts;
        let needed = [
            ("connect", times.connect),
            ("send", times.send),
            ("request_head", times.request_head),
            ("client_idle", times.client_idle),
            ("replica_idle", times.replica_idle),
        ];
        let mut faults: Vec<_> = needed
            .iter()
            .filter(|(_, limit)| limit.is_zero())
            .map(|(name, _)| {
                (format!("timeouts.{name}"), "must be longer than 0s: this limit has no off".into())
            })
            .collect();
        if Duration::ZERO < times.client_idle && times.client_idle < Duration::from_secs(1) {
            faults.push(("timeouts.client_idle".into(), "must be at least 1s".into()));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_have_no_fault() {
        assert!(Options::default().faults().is_empty());
    }

    #[test]
    fn a_limit_without_an_off_refuses_zero() {
        let mut options = Options::default();
        options.timeouts.connect = Duration::ZERO;
        assert_eq!(options.faults()[0].0, "timeouts.connect");
    }
}

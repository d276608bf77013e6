//! The sections that belong to no room below: where Weir listens, its admin API, the process.
//! To add a key: a field with a doc comment that says meaning, unit and default, its value in
//! `Default`, and its rule in `faults` if not every value is a good one.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Most addresses to listen on.
pub const LISTENERS_MAX: usize = 64;

/// Most threads a process may be given.
const THREADS_MAX: u16 = 1024;

/// Longest time between the wish to stop and the end.
const STOP_MAX: Duration = Duration::from_secs(24 * 3600);

/// Shortest and longest time between two looks at the config file.
const POLL_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));

/// One address clients connect to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ListenOptions {
    /// IP address and port: `0.0.0.0:8080` for all of IPv4, `[::]:8080` for all addresses.
    /// Default: `0.0.0.0:8080`.
    #[serde(with = "super::address")]
    pub address: SocketAddr,
    /// Certificate and key, to speak HTTPS (HTTP/1.1 and HTTP/2). Default: none, that is HTTP in
    /// the clear.
    pub tls: Option<ListenTlsOptions>,
    /// Whether HTTP/2 is also spoken in the clear, with clients that begin with it. Default:
    /// `true`.
    pub h2c: bool,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { address: SocketAddr::from(([0, 0, 0, 0], 8080)), tls: None, h2c: true }
    }
}

/// The certificate shown to clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenTlsOptions {
    /// PEM file with the certificate, followed by its chain. Required.
    pub certificate: PathBuf,
    /// PEM file with the key of the certificate, not encrypted. Required.
    pub key: PathBuf,
}

/// The admin API: state, metrics, reload. Everybody who reaches it may use it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdminOptions {
    /// IP address and port, or `off`. Default: `127.0.0.1:9090`.
    #[serde(with = "super::address::or_off")]
    pub address: Option<SocketAddr>,
}

impl Default for AdminOptions {
    fn default() -> Self {
        Self { address: Some(SocketAddr::from(([127, 0, 0, 1], 9090))) }
    }
}

/// The process as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerOptions {
    /// Threads that serve requests, `1..=1024`. Default: none, that is one for each core.
    pub threads: Option<u16>,
    /// How long after SIGTERM the process goes on at least, while `/ready` says no, so that load
    /// balancers can turn away. Default: `5s`.
    #[serde(with = "humantime_serde")]
    pub pre_stop: Duration,
    /// How long requests under way may then go on before they are cut. New ones are still served
    /// until none is left or this time is over. Default: `60s`.
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
    /// Requests taken over one client connection before it is closed; closing now and then lets
    /// load balancers spread anew. Default: none, that is no limit.
    pub client_requests_max: Option<u32>,
    /// Idle connections to replicas that are kept open, for all replicas together. Default:
    /// `1024`.
    pub replica_connections_idle_max: u32,
    /// Time between two looks at the config file and the files it names, for file systems that
    /// tell no changes; where changes are told they are heeded at once. Default: `5s`.
    #[serde(with = "humantime_serde")]
    pub config_poll: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            threads: None,
            pre_stop: Duration::from_secs(5),
            grace: Duration::from_secs(60),
            client_requests_max: None,
            replica_connections_idle_max: 1024,
            config_poll: Duration::from_secs(5),
        }
    }
}

impl ServerOptions {
    /// What is wrong, as pairs of a path within this section and a message.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Vec::new();
        let mut fault = |key: &str, text: String| faults.push((key.to_owned(), text));
        if self.threads.is_some_and(|threads| threads == 0 || THREADS_MAX < threads) {
            let text = "out of range; leave it out for one thread for each core";
            fault("threads", text.into());
        }
        for (key, time) in [("pre_stop", self.pre_stop), ("grace", self.grace)] {
            if STOP_MAX < time {
                fault(key, "longer than a day; `60s` is usual".into());
            }
        }
        if self.client_requests_max == Some(0) {
            let text = "no request could be served; leave it out for no limit";
            fault("client_requests_max", text.into());
        }
        if self.replica_connections_idle_max == 0 {
            let text = "every request would have to connect anew; write at least 1";
            fault("replica_connections_idle_max", text.into());
        }
        if self.config_poll < POLL_BOUNDS.0 || POLL_BOUNDS.1 < self.config_poll {
            fault("config_poll", "out of range; write `1s` to `1h`".into());
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_have_no_fault() {
        assert_eq!(ServerOptions::default().faults(), []);
    }

    #[test]
    fn what_would_serve_nobody_is_refused() {
        let options = ServerOptions {
            threads: Some(0),
            grace: Duration::from_secs(100_000),
            client_requests_max: Some(0),
            replica_connections_idle_max: 0,
            config_poll: Duration::ZERO,
            ..ServerOptions::default()
        };
        let paths: Vec<_> = options.faults().into_iter().map(|(path, _)| path).collect();
        let expected = [
            "threads",
            "grace",
            "client_requests_max",
            "replica_connections_idle_max",
            "config_poll",
        ];
        assert_eq!(paths, expected);
    }
}

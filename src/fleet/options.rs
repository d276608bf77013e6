//! The `fleet` section of the config: which replicas there are and how Weir talks to them.
//! No file is read and no name is resolved here. To add a key: a field with a doc comment that
//! says meaning, unit and default, the value in `Default`, and its check in [`Options::faults`].

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::breaker::BreakerOptions;
use super::health::ProbeOptions;
use super::secret::Secret;
use super::url::{ReplicaUrl, UrlFault, is_server_name};
use crate::names::{ModelName, ReplicaId};

/// How many replicas a config may name. More than this is a mistake, not a fleet.
pub const REPLICAS_MAX: usize = 4096;

/// The smallest weight a replica may have.
const WEIGHT_MIN: f32 = 0.001;

/// The largest weight a replica may have.
const WEIGHT_MAX: f32 = 1000.0;

/// The `fleet` section.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The vLLM servers. Default: none (Weir starts, and is not ready).
    pub replicas: Vec<ReplicaOptions>,
    /// Names clients may use for a model: `alias: model`. The engine gets the model's name. An
    /// alias of an alias is followed; a circle is refused. An alias that equals a model some
    /// engine serves hides that model. Default: none.
    pub aliases: BTreeMap<ModelName, ModelName>,
    /// Whether `/v1/models` shows the aliases too. Default: `true`.
    pub list_aliases: bool,
    /// How replicas are asked whether they are well.
    pub probe: ProbeOptions,
    /// When a replica that fails is left out.
    pub breaker: BreakerOptions,
    /// How the names in replica URLs become addresses.
    pub dns: DnsOptions,
    /// Key for probes and model lists of the replicas that have no `api_key` of their own. It is
    /// never put on a client's request. Default: none.
    pub api_key: Option<Secret>,
}

/// One vLLM server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReplicaOptions {
    /// Where it is: `http://host:port` or `https://host:port`, with a path prefix if it has one.
    /// API paths are put behind the prefix; slashes at its end and one `/v1` at its end do not
    /// count. Required.
    pub url: String,
    /// Its name in logs, metrics and the admin API. Default: host, port and prefix of the URL.
    pub id: Option<String>,
    /// The models it serves, as clients call them. Default: none, that is ask its `/v1/models`.
    pub models: Vec<ModelName>,
    /// Key sent to it as `Authorization: Bearer`, in place of the client's. Default: none, that
    /// is the client's header passes.
    pub api_key: Option<Secret>,
    /// Its share beside others, `0.001..=1000`: 2 takes twice as much as 1. Default: `1`.
    pub weight: f32,
    /// How its certificate is checked and ours is shown; for `https` only.
    pub tls: TlsOptions,
    /// HTTP version spoken to it. Default: `http1`, the only one vLLM's own server speaks.
    pub protocol: Protocol,
}

/// TLS towards a replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsOptions {
    /// PEM file of the authorities that may have signed its certificate. Default: those of the
    /// platform.
    pub ca: Option<PathBuf>,
    /// Name the certificate must have, and that is asked for in the handshake (SNI). Default: the
    /// host of the URL.
    pub server_name: Option<String>,
    /// Whether its certificate is checked at all. Default: `true`.
    pub verify: bool,
    /// PEM file with our certificate and its chain, where the replica asks for one. Default: none.
    pub certificate: Option<PathBuf>,
    /// PEM file with the key of our certificate. Default: none.
    pub key: Option<PathBuf>,
}

/// HTTP version spoken to a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2, by ALPN over TLS or with prior knowledge in the clear.
    Http2,
}

/// How names become addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DnsOptions {
    /// Time between two look-ups of a name. Default: `5s`.
    #[serde(with = "humantime_serde")]
    pub refresh: Duration,
    /// How long a look-up may take. What is known stays in use meanwhile. Default: `2s`.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            replicas: Vec::new(),
            aliases: BTreeMap::new(),
            list_aliases: true,
            probe: ProbeOptions::default(),
            breaker: BreakerOptions::default(),
            dns: DnsOptions::default(),
            api_key: None,
        }
    }
}

impl Default for ReplicaOptions {
    fn default() -> Self {
        Self {
            url: String::new(),
            id: None,
            models: Vec::new(),
            api_key: None,
            weight: 1.0,
            tls: TlsOptions::default(),
            protocol: Protocol::default(),
        }
    }
}

impl Default for TlsOptions {
    fn default() -> Self {
        Self { ca: None, server_name: None, verify: true, certificate: None, key: None }
    }
}

impl Default for DnsOptions {
    fn default() -> Self {
        Self { refresh: Duration::from_secs(5), timeout: Duration::from_secs(2) }
    }
}

impl Options {
    /// What is wrong, as pairs of a path within this section and a message; empty when fine. Files
    /// are not opened here.
    pub fn faults(&self) -> Vec<(String, String)> {
        let mut faults = Faults::default();
        if REPLICAS_MAX < self.replicas.len() {
            faults.push("replicas", format!("are more than {REPLICAS_MAX}"));
        }
        let mut seen: HashMap<ReplicaId, usize> = HashMap::new();
        for (index, replica) in self.replicas.iter().enumerate() {
            let here = format!("replicas[{index}]");
            replica.push_faults(&here, &mut faults);
            let Ok(id) = replica.replica_id() else { continue };
            if let Some(first) = seen.insert(id.clone(), index) {
                let advice = format!(
                    "`{id}` is the id of replicas[{first}] already; give each an `id` of its own"
                );
                faults.push(format!("{here}.id"), advice);
            }
        }
        self.push_alias_faults(&mut faults);
        for (path, time) in [("dns.refresh", self.dns.refresh), ("dns.timeout", self.dns.timeout)] {
            if time.is_zero() {
                faults.push(path, "must be more than zero");
            }
        }
        faults.extend("probe", self.probe.faults());
        faults.extend("breaker", self.breaker.faults());
        faults.0
    }

    /// The model an alias stands for in the end. `None` when `name` is no alias, or leads in a
    /// circle.
    pub fn alias_target(&self, name: &ModelName) -> Option<&ModelName> {
        let mut target = self.aliases.get(name)?;
        for _ in 0..self.aliases.len() {
            match self.aliases.get(target) {
                Some(next) => target = next,
                None => return Some(target),
            }
        }
        None
    }

    fn push_alias_faults(&self, faults: &mut Faults) {
        for (alias, target) in &self.aliases {
            if alias.as_str().is_empty() || target.as_str().is_empty() {
                faults.push("aliases", format!("an empty name in `{alias}: {target}`"));
            } else if self.alias_target(alias).is_none() {
                faults.push(format!("aliases.\"{alias}\""), "leads in a circle");
            }
        }
    }
}

impl ReplicaOptions {
    /// The name of the replica: its `id`, else host, port and prefix of its URL.
    pub fn replica_id(&self) -> Result<ReplicaId, UrlFault> {
        match &self.id {
            Some(id) => Ok(ReplicaId::new(id)),
            None => Ok(ReplicaId::new(ReplicaUrl::parse(&self.url)?.name())),
        }
    }

    fn push_faults(&self, here: &str, faults: &mut Faults) {
        let url = ReplicaUrl::parse(&self.url);
        if let Err(fault) = &url {
            faults.push(format!("{here}.url"), fault.to_string());
        }
        let unfit = |c: char| c.is_whitespace() || c.is_control();
        if self.id.as_ref().is_some_and(|id| id.is_empty() || id.contains(unfit)) {
            faults.push(format!("{here}.id"), "must not be empty or have white space");
        }
        if !(WEIGHT_MIN..=WEIGHT_MAX).contains(&self.weight) {
            let advice = format!("{} is not within {WEIGHT_MIN} to {WEIGHT_MAX}", self.weight);
            faults.push(format!("{here}.weight"), advice);
        }
        if let Some(index) = self.models.iter().position(|model| model.as_str().is_empty()) {
            faults.push(format!("{here}.models[{index}]"), "is empty");
        }
        let tls = &self.tls;
        if tls.certificate.is_some() != tls.key.is_some() {
            faults.push(format!("{here}.tls"), "has one of `certificate` and `key`; it takes both");
        }
        if let Some(name) = tls.server_name.as_ref().filter(|name| !is_server_name(name)) {
            let advice = format!("`{name}` is neither a host name nor an address");
            faults.push(format!("{here}.tls.server_name"), advice);
        }
        if url.is_ok_and(|url| !url.is_tls()) && *tls != TlsOptions::default() {
            faults.push(format!("{here}.tls"), "is for `https` URLs only");
        }
    }
}

#[derive(Default)]
struct Faults(Vec<(String, String)>);

impl Faults {
    fn push(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push((path.into(), message.into()));
    }

    fn extend(&mut self, section: &str, faults: Vec<(String, String)>) {
        let within = |(path, message)| (format!("{section}.{path}"), message);
        self.0.extend(faults.into_iter().map(within));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Options {
        serde_yaml::from_str(text).unwrap()
    }

    fn paths(text: &str) -> Vec<String> {
        read(text).faults().into_iter().map(|(path, _)| path).collect()
    }

    #[test]
    fn the_defaults_have_no_fault_and_survive_a_round_trip() {
        let options = Options::default();
        assert_eq!(options.faults(), []);
        let text = serde_yaml::to_string(&options).unwrap();
        assert_eq!(read(&text), options);
        assert_eq!(read("{replicas: [{url: 'http://h:1'}]}").faults(), []);
    }

    #[test]
    fn every_fault_is_told_at_once_with_its_path() {
        let text = "{replicas: [
            {url: '127.0.0.1:8001'},
            {url: 'http://h/ '},
            {url: 'http://a', id: 'a b', weight: 0, models: [ok, '']},
            {url: 'http://b', tls: {verify: false}},
            {url: 'https://c', tls: {certificate: c.pem, server_name: 'x y'}},
            {url: 'http://d:80'}, {url: 'HTTP://D:80/v1/'}],
            dns: {timeout: 0s}}";
        let expected = [
            "replicas[0].url",
            "replicas[1].url",
            "replicas[2].id",
            "replicas[2].weight",
            "replicas[2].models[1]",
            "replicas[3].tls",
            "replicas[4].tls",
            "replicas[4].tls.server_name",
            "replicas[6].id",
            "dns.timeout",
        ];
        assert_eq!(paths(text), expected);
    }

    #[test]
    fn an_alias_of_an_alias_is_followed_and_a_circle_refused() {
        let options = read("{aliases: {a: b, b: org/m}}");
        assert_eq!(options.faults(), []);
        assert_eq!(options.alias_target(&"a".into()), Some(&"org/m".into()));
        assert_eq!(options.alias_target(&"org/m".into()), None);
        assert_eq!(paths("{aliases: {a: a}}"), ["aliases.\"a\""]);
        let circle = "{aliases: {a: b, b: c, c: b, ok: m}}";
        assert_eq!(paths(circle), ["aliases.\"a\"", "aliases.\"b\"", "aliases.\"c\""]);
    }

    #[test]
    fn an_unknown_key_is_refused() {
        for text in ["{replica: []}", "{replicas: [{uri: x}]}", "{dns: {ttl: 1s}}"] {
            assert!(serde_yaml::from_str::<Options>(text).is_err(), "{text}");
        }
    }
}

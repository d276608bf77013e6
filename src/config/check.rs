//! What only the whole config can tell: addresses used twice, files that are not there, names that
//! hide one another. What a room knows of its own options it says in its `faults`; all of it is
//! gathered here.
//! To add a check: a function that notes its faults, called from `faults` or `warnings`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path as FilePath;
use std::time::Duration;

use super::Config;
use super::fault::{Fault, Path};
use super::options::LISTENERS_MAX;
use super::read::Findings;
use super::tls;
use super::tree::Node;
use crate::fleet::{ReplicaOptions, ReplicaUrl, Secret, TlsOptions, UrlFault};
use crate::names::ModelName;

/// vLLM's server closes a connection that was idle for this long; an idle connection kept longer
/// here would now and then be used at the very moment it closes.
const ENGINE_IDLE: Duration = Duration::from_secs(5);

/// Notes everything that is wrong with a config that could be read.
pub(super) fn faults(config: &Config, root: &Node, findings: &mut Findings) {
    let mut notes = Notes { root, findings };
    listeners(config, &mut notes);
    let same = replica_urls(&config.fleet.replicas, &mut notes);
    replica_files(&config.fleet.replicas, &mut notes);
    aliases(config, &mut notes);
    // A replica given twice has the same id twice; the first fault says enough.
    let follows = |path: &str| same.iter().any(|index| path == format!("replicas[{index}].id"));
    let fleet = config.fleet.faults().into_iter().filter(|(path, _)| !follows(path));
    notes.section("fleet", fleet);
    notes.section("routing", config.routing.faults());
    notes.section("request", request_faults(config));
    notes.section("proxy", config.proxy.faults());
    notes.section("proxy.retry", config.proxy.retry.faults());
    notes.section("response", config.response.faults());
    notes.section("telemetry", config.telemetry.faults());
    notes.section("server", config.server.faults());
}

/// Notes what is allowed and yet should not stay so.
pub(super) fn warnings(config: &Config, findings: &mut Findings) {
    let mut warn = |path: String, text: &str| {
        findings.note(&Path::parse(&path), Fault::told("", text));
    };
    if config.fleet.replicas.is_empty() {
        warn("fleet.replicas".into(), "no replica; every request is refused until one is named");
    }
    let plain = |secret: &Option<Secret>| secret.as_ref().is_some_and(Secret::is_plain);
    let in_the_open = "the key stands in the config itself; write `{env: NAME}` or `{file: PATH}`";
    if plain(&config.fleet.api_key) {
        warn("fleet.api_key".into(), in_the_open);
    }
    for (index, replica) in config.fleet.replicas.iter().enumerate() {
        if plain(&replica.api_key) {
            warn(format!("fleet.replicas[{index}].api_key"), in_the_open);
        }
        if !replica.tls.verify {
            let text = "the replica's certificate is not checked, so anybody on the way can read \
                        along; name its authority in `ca` and take `verify: false` out";
            warn(format!("fleet.replicas[{index}].tls.verify"), text);
        }
    }
    if config.admin.address.is_some_and(|address| !address.ip().is_loopback()) {
        let text = "the admin API is open to the network, and whoever reaches it may use it; keep \
                    it behind a firewall or on 127.0.0.1";
        warn("admin.address".into(), text);
    }
    if ENGINE_IDLE <= config.proxy.timeouts.replica_idle {
        let text = "vLLM closes idle connections after 5 s, so requests may meet a closing one; \
                    write less than `5s`, or start vLLM with a longer VLLM_HTTP_TIMEOUT_KEEP_ALIVE";
        warn("proxy.timeouts.replica_idle".into(), text);
    }
    alias_warnings(config, &mut warn);
}

struct Notes<'a> {
    root: &'a Node,
    findings: &'a mut Findings,
}

impl Notes<'_> {
    fn note(&mut self, path: &str, fault: Fault) {
        self.findings.note_checked(&Path::parse(path), fault);
    }

    fn told(&mut self, path: &str, text: &str) {
        self.note(path, Fault::told("", text));
    }

    fn section<T: Told>(&mut self, section: &str, faults: impl IntoIterator<Item = T>) {
        for fault in faults {
            let (path, text) = fault.pair();
            let dot = if path.is_empty() || path.starts_with('[') { "" } else { "." };
            self.told(&format!("{section}{dot}{path}"), &text);
        }
    }

    /// The same as `told`, with what stands in the file.
    fn told_found(&mut self, path: &str, text: &str) {
        let place = self.findings.original(&Path::parse(path));
        let mut fault = Fault::told("", text);
        if !place.hides() {
            fault.found = self.root.at(&place).map(Node::describe);
        }
        self.note(path, fault);
    }
}

/// A fault as a room tells it: a path within its section, and `problem; advice`.
trait Told {
    fn pair(self) -> (String, String);
}

impl Told for (String, String) {
    fn pair(self) -> (String, String) {
        self
    }
}

/// Both in one text, `path: problem; advice`.
impl Told for String {
    fn pair(self) -> (String, String) {
        match self.split_once(": ") {
            Some((path, text)) => (path.to_owned(), text.to_owned()),
            None => (Self::new(), self),
        }
    }
}

fn listeners(config: &Config, notes: &mut Notes<'_>) {
    if config.listen.is_empty() {
        notes.told("listen", "nothing to listen on; write `- address: 0.0.0.0:8080` below it");
    }
    if LISTENERS_MAX < config.listen.len() {
        notes.told("listen", &format!("more than {LISTENERS_MAX} addresses"));
    }
    for (index, listen) in config.listen.iter().enumerate() {
        let earlier = config.listen.iter().take(index);
        if earlier.clone().any(|other| collide(other.address, listen.address)) {
            let text = "another entry listens there already; give each its own port";
            notes.told_found(&format!("listen[{index}].address"), text);
        }
        if let Some(tls) = &listen.tls {
            pem_pair(&format!("listen[{index}].tls"), &tls.certificate, &tls.key, notes);
        }
    }
    if let Some(admin) = config.admin.address
        && config.listen.iter().any(|listen| collide(listen.address, admin))
    {
        let text = "clients are listened for there already; give the admin API its own port";
        notes.told_found("admin.address", text);
    }
}

/// Whether both cannot be listened on at once. Port 0 means any free one.
fn collide(one: SocketAddr, other: SocketAddr) -> bool {
    let all = |address: SocketAddr| address.ip().is_unspecified();
    let same_family = one.is_ipv4() == other.is_ipv4();
    // `[::]` takes IPv4 as well.
    let covers = |wide: SocketAddr, _: SocketAddr| all(wide) && (same_family || wide.is_ipv6());
    one.port() != 0
        && one.port() == other.port()
        && (one.ip() == other.ip() || covers(one, other) || covers(other, one))
}

fn pem_pair(section: &str, certificate: &FilePath, key: &FilePath, notes: &mut Notes<'_>) {
    for fault in tls::pair_faults(certificate, key) {
        notes.told(&format!("{section}.{}", fault.key), &fault.told);
    }
}

/// Checks the URLs, and tells which replicas repeat the URL of an earlier one.
fn replica_urls(replicas: &[ReplicaOptions], notes: &mut Notes<'_>) -> BTreeSet<usize> {
    let mut seen = BTreeMap::new();
    let mut same = BTreeSet::new();
    for (index, replica) in replicas.iter().enumerate() {
        let path = format!("fleet.replicas[{index}].url");
        match ReplicaUrl::parse(&replica.url) {
            Err(fault) => {
                let (problem, advice) = url_words(&replica.url, &fault);
                let mut fault = Fault::new("", problem).advise(advice);
                if !replica.url.is_empty() {
                    fault = fault.found(&replica.url);
                }
                notes.note(&path, fault);
            }
            Ok(url) => {
                let place = (url.is_tls(), url.host().clone(), url.port(), url.prefix().to_owned());
                let place = format!("{place:?}");
                if let Some(first) = seen.insert(place, index) {
                    let first = Path::parse(&format!("fleet.replicas[{first}]"));
                    let first = notes.findings.original(&first);
                    let text = format!(
                        "the same place as {first}; name each vLLM server once, and give it a \
                         `weight` if it is to get more"
                    );
                    notes.told_found(&path, &text);
                    same.insert(index);
                }
            }
        }
    }
    same
}

/// What is wrong with a URL and how it should read. The URL itself is quoted elsewhere, without
/// what it may hide.
fn url_words(text: &str, fault: &UrlFault) -> (&'static str, String) {
    let plain = "write `http://HOST:PORT`, as in `http://10.0.0.5:8000`".to_owned();
    let open = !text.contains(['@', '?']) && text.len() <= 200;
    let mended = |mended: String| if open { format!("write `{mended}`") } else { plain.clone() };
    match fault {
        UrlFault::Empty => ("the URL is missing", plain),
        UrlFault::WhiteSpace(_) if !text.trim().contains(char::is_whitespace) => {
            ("white space around the URL", mended(text.trim().to_owned()))
        }
        UrlFault::WhiteSpace(_) => ("white space in the URL", plain),
        UrlFault::NoScheme(_) => {
            ("no scheme", mended(format!("http://{}", text.trim_start_matches('/'))))
        }
        UrlFault::Scheme(_) => ("unknown scheme", "write `http://` or `https://`".to_owned()),
        UrlFault::User => ("a user or password in the URL", "use `api_key` instead".to_owned()),
        UrlFault::Query => ("a query or fragment in the URL", "leave `?…` and `#…` out".to_owned()),
        UrlFault::Brackets(authority) => ("an IPv6 address without brackets", {
            match authority.rsplit_once(':') {
                Some((host, port)) if host.parse::<std::net::Ipv6Addr>().is_ok() => {
                    mended(text.replacen(authority, &format!("[{host}]:{port}"), 1))
                }
                _ => "write `http://[ADDRESS]:PORT`, as in `http://[fd00::5]:8000`".to_owned(),
            }
        }),
        UrlFault::Zone(_) => (
            "an IPv6 address with a zone",
            "use an address that is valid on every interface".to_owned(),
        ),
        UrlFault::Host(_) => ("not a host name or IP address", plain),
        UrlFault::Port(_) => ("not a port from 1 to 65535", plain),
        UrlFault::Path(_) => (
            "characters in the path that a URL cannot hold",
            "write them percent-encoded, a blank as `%20`".to_owned(),
        ),
    }
}

fn replica_files(replicas: &[ReplicaOptions], notes: &mut Notes<'_>) {
    // Many replicas share the same few files.
    let mut checked: BTreeMap<String, Vec<(&'static str, String)>> = BTreeMap::new();
    for (index, replica) in replicas.iter().enumerate() {
        let TlsOptions { ca, certificate, key, .. } = &replica.tls;
        let found = checked.entry(format!("{ca:?} {certificate:?} {key:?}")).or_insert_with(|| {
            let authority = ca.as_deref().and_then(tls::authority_fault).map(|told| ("ca", told));
            let pair = match (certificate, key) {
                (Some(certificate), Some(key)) => tls::pair_faults(certificate, key),
                _ => Vec::new(),
            };
            authority.into_iter().chain(pair.into_iter().map(|f| (f.key, f.told))).collect()
        });
        for (key, told) in found {
            notes.told(&format!("fleet.replicas[{index}].tls.{key}"), told);
        }
    }
}

fn alias_path(alias: &ModelName) -> String {
    Path::default().key("fleet").key("aliases").key(alias.as_str()).to_string()
}

fn fixed_models(config: &Config) -> BTreeSet<&ModelName> {
    config.fleet.replicas.iter().flat_map(|replica| &replica.models).collect()
}

fn aliases(config: &Config, notes: &mut Notes<'_>) {
    let models = fixed_models(config);
    for alias in config.fleet.aliases.keys() {
        if models.contains(alias) {
            let text = "a model of that name is listed under a replica's `models`, and the alias \
                        would hide it; call the alias otherwise";
            notes.told_found(&alias_path(alias), text);
        }
    }
}

fn alias_warnings(config: &Config, warn: &mut impl FnMut(String, &str)) {
    let replicas = &config.fleet.replicas;
    // A replica without a list is asked, and may serve anything.
    if replicas.is_empty() || replicas.iter().any(|replica| replica.models.is_empty()) {
        return;
    }
    let models = fixed_models(config);
    for alias in config.fleet.aliases.keys() {
        if config.fleet.alias_target(alias).is_some_and(|target| !models.contains(target)) {
            let text = "no replica lists the model it stands for; add it to a replica's `models`";
            warn(alias_path(alias), text);
        }
    }
}

fn request_faults(config: &Config) -> Vec<(String, String)> {
    let request = &config.request;
    let mut faults = Vec::new();
    let mut fault = |key: &str, text: &str| faults.push((key.to_owned(), text.to_owned()));
    if request.body_bytes_max.as_u64() == 0 {
        fault("body_bytes_max", "every body would be refused; `64MiB` is usual");
    }
    if request.bodies_bytes_max < request.body_bytes_max {
        fault("bodies_bytes_max", "less than `body_bytes_max`: a body of that size has no room");
    }
    if request.upload_timeout.is_zero() {
        fault("upload_timeout", "this limit has no off; `60s` is usual");
    }
    if request.nesting_depth_max == 0 {
        fault("nesting_depth_max", "every body would be refused; 256 is usual");
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Loaded};

    fn told(text: &str) -> Vec<String> {
        let faults = Config::parse(text).err().unwrap_or_default();
        faults.iter().map(ToString::to_string).collect()
    }

    fn replicas(list: &str) -> Vec<String> {
        told(&format!("fleet: {{replicas: [{list}]}}"))
    }

    #[track_caller]
    fn assert_one(told: &[String], words: &[&str]) {
        assert_eq!(told.len(), 1, "{told:?}");
        for word in words {
            assert!(told[0].contains(word), "`{word}` is not said in: {}", told[0]);
        }
    }

    #[test]
    fn two_of_us_cannot_listen_on_one_address() {
        for (one, other) in [
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("0.0.0.0:80", "127.0.0.1:80"),
            ("[::]:80", "0.0.0.0:80"),
            ("10.0.0.1:80", "[::]:80"),
        ] {
            let told = told(&format!("listen: [{{address: '{one}'}}, {{address: '{other}'}}]"));
            assert_one(&told, &["listen[1].address", "listens there already"]);
        }
        for (one, other) in [
            ("0.0.0.0:80", "0.0.0.0:81"),
            ("10.0.0.1:80", "10.0.0.2:80"),
            ("0.0.0.0:0", "0.0.0.0:0"),
            ("0.0.0.0:80", "[::1]:80"),
        ] {
            assert!(
                told(&format!("listen: [{{address: '{one}'}}, {{address: '{other}'}}]")).is_empty()
            );
        }
        assert_one(&told("admin: {address: '127.0.0.1:8080'}"), &["admin.address", "its own port"]);
        assert!(told("admin: {address: off}").is_empty());
        assert_one(&told("listen: []"), &["nothing to listen on"]);
    }

    #[test]
    fn a_broken_url_is_shown_mended() {
        for (url, words) in [
            ("127.0.0.1:8001", ["no scheme", "`http://127.0.0.1:8001`"]),
            ("//a:8001", ["no scheme", "`http://a:8001`"]),
            ("http://a:8001 ", ["white space around", "`http://a:8001`"]),
            ("http://a b", ["white space in", "`http://HOST:PORT`"]),
            ("ws://a", ["unknown scheme", "`https://`"]),
            ("http://fd00::5:8000", ["without brackets", "`http://[fd00::5]:8000`"]),
            ("http://fd00::5:8000/m", ["without brackets", "`http://[fd00::5]:8000/m`"]),
            ("http://a:0", ["not a port", "`http://HOST:PORT`"]),
            ("http://", ["not a host name", "`http://HOST:PORT`"]),
            ("http://a/?x=1", ["a query or fragment", "leave"]),
            ("http://u:p@a", ["a user or password", "`api_key`"]),
            ("", ["the URL is missing", "`http://HOST:PORT`"]),
        ] {
            let told = replicas(&format!("{{url: 'http://ok'}}, {{url: '{url}'}}"));
            assert_one(&told, &["fleet.replicas[1].url", words[0], words[1]]);
        }
        assert!(replicas("{url: 'HTTP://127.0.0.1:8001'}").is_empty(), "any case is fine");
    }

    #[test]
    fn one_server_named_twice_is_refused() {
        for (one, other) in [
            ("http://a:8000", "http://a:8000"),
            ("http://a", "HTTP://A:80/"),
            ("https://a/m", "https://a:443/m/v1/"),
        ] {
            let told = replicas(&format!("{{url: '{one}'}}, {{url: '{other}', id: b}}"));
            assert_one(&told, &["fleet.replicas[1].url", "the same place as fleet.replicas[0]"]);
            let told = replicas(&format!("{{url: '{one}'}}, {{url: '{other}'}}"));
            assert!(told[0].contains("the same place"), "{told:?}");
        }
        let told = replicas("{url: 'http://a', id: x}, {url: 'http://b', id: x}");
        assert_one(&told, &["fleet.replicas[1].id"]);
        assert!(replicas("{url: 'http://a/m1'}, {url: 'http://a/m2'}").is_empty());
    }

    #[test]
    fn an_alias_may_not_hide_a_model_nor_lead_in_a_circle() {
        let fleet = |aliases: &str| {
            let replica = "{url: 'http://a', models: [m, 'org/n.1']}";
            told(&format!("fleet: {{replicas: [{replica}], aliases: {aliases}}}"))
        };
        assert_one(&fleet("{m: org/n.1}"), &["fleet.aliases.m", "would hide it"]);
        assert_one(&fleet("{org/n.1: m}"), &["fleet.aliases.\"org/n.1\"", "would hide it"]);
        let circle = fleet("{a: b, b: c, c: a}");
        assert!(circle.iter().all(|told| told.contains("circle")), "{circle:?}");
        assert!(!circle.is_empty());
        assert_one(&fleet("{a: a}"), &["circle"]);
        assert!(fleet("{gpt-4: m, short: gpt-4}").is_empty());
        assert_one(&fleet("{a: m, a: org/n.1}"), &["fleet.aliases.a", "a second time"]);
    }

    #[test]
    fn an_unknown_policy_is_told_the_known_ones() {
        let told = told("routing: {policy: random}");
        assert_one(
            &told,
            &["routing.policy", "round_robin", "least_load", "power_of_two", "session"],
        );
    }

    #[test]
    fn certificates_that_are_not_there_are_faults() {
        let text = "listen: [{tls: {certificate: /no/a.crt, key: /no/a.key}}]";
        let faults = told(text);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(
            faults[0].contains("listen[0].tls.certificate: the file `/no/a.crt` does not exist")
        );
        assert_one(
            &told("listen: [{tls: {certificate: /no/a.crt}}]"),
            &["listen[0].tls", "`key` is missing"],
        );
        assert_one(
            &replicas("{url: 'https://a', tls: {ca: /no/ca.pem}}"),
            &["fleet.replicas[0].tls.ca", "`/no/ca.pem` does not exist"],
        );
    }

    #[test]
    fn what_should_not_stay_so_is_a_warning() {
        let text = "
admin: {address: '0.0.0.0:9090'}
fleet:
  replicas:
    - {url: 'https://a', api_key: k-1, tls: {verify: false}, models: [m]}
  aliases: {short: gone}
proxy: {timeouts: {replica_idle: 5s}}
";
        let loaded = Loaded::from_text(text);
        assert!(loaded.config.is_ok(), "{:?}", loaded.config);
        let told: Vec<_> =
            loaded.warnings.iter().map(|w| format!("{} {}", w.line.unwrap(), w.path)).collect();
        let expected = [
            "2 admin.address",
            "5 fleet.replicas[0].api_key",
            "5 fleet.replicas[0].tls.verify",
            "6 fleet.aliases.short",
            "7 proxy.timeouts.replica_idle",
        ];
        assert_eq!(told, expected);
        let fine = "fleet: {replicas: [{url: 'http://a'}], aliases: {x: y}}";
        assert_eq!(Loaded::from_text(fine).warnings, []);
        assert_eq!(Loaded::from_text("server: {}").warnings[0].path, "fleet.replicas");
    }
}

//! Where a replica is, read from its URL, and the one rule by which API paths are joined to it.
//! Pure: no name is looked up here. To accept more, add a case to [`ReplicaUrl::parse`] and a test.
//!
//! The rule, for traffic and probes alike: *prefix of the URL, then the API path*. The prefix is
//! the URL's path without the slashes at its end and, as API paths bring their own, without one
//! `/v1` at its end. So `http://h/m1`, `http://h/m1/` and `http://h/m1/v1` all ask for
//! `/m1/v1/models` and `/m1/health`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Length of a host name at most, from RFC 1035.
const NAME_MAX: usize = 253;

/// Length of one label of a host name at most, from RFC 1035.
const LABEL_MAX: usize = 63;

/// Why a URL cannot name a replica.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlFault {
    /// Nothing there.
    #[error("is missing")]
    Empty,
    /// Blanks, line ends or control characters.
    #[error("has white space or control characters in `{0}`")]
    WhiteSpace(String),
    /// No `http://` or `https://`.
    #[error("needs `http://` or `https://` in front of `{0}`")]
    NoScheme(String),
    /// Some other scheme.
    #[error("has the scheme `{0}`; only `http` and `https` are known")]
    Scheme(String),
    /// `user:password@`.
    #[error("has a user or password in it; use `api_key`")]
    User,
    /// `?` or `#`.
    #[error("has a query or fragment")]
    Query,
    /// A host that is neither an address nor a name.
    #[error("has `{0}` where a host name or address is due")]
    Host(String),
    /// An IPv6 address without brackets.
    #[error("has an IPv6 address without brackets: `{0}`")]
    Brackets(String),
    /// `[fe80::1%eth0]`.
    #[error("has an IPv6 zone id: `{0}`; use an address that is valid on every interface")]
    Zone(String),
    /// A port that is not `1..=65535`.
    #[error("has `{0}` where a port is due")]
    Port(String),
    /// A path with characters that must be percent-encoded.
    #[error("has a path with characters that need percent-encoding: `{0}`")]
    Path(String),
}

/// The host of a URL.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Host {
    /// An address.
    Ip(IpAddr),
    /// A name, in lower case.
    Name(String),
}

/// A checked and normalised replica URL.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReplicaUrl {
    tls: bool,
    host: Host,
    port: u16,
    authority: String,
    prefix: String,
}

impl ReplicaUrl {
    /// Reads `text`; scheme and host in any case.
    pub fn parse(text: &str) -> Result<Self, UrlFault> {
        if text.is_empty() {
            return Err(UrlFault::Empty);
        }
        if text.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(UrlFault::WhiteSpace(text.escape_debug().to_string()));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(UrlFault::NoScheme(text.to_owned()));
        };
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            other => return Err(UrlFault::Scheme(other.to_owned())),
        };
        if rest.contains(['?', '#']) {
            return Err(UrlFault::Query);
        }
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if authority.contains('@') {
            return Err(UrlFault::User);
        }
        let (host, port) = split_port(authority)?;
        let host = parse_host(host)?;
        let number = match port {
            None if tls => 443,
            None => 80,
            Some(port) => parse_port(port)?,
        };
        let authority = match port {
            None => host.to_string(),
            Some(_) => format!("{host}:{number}"),
        };
        Ok(Self { tls, host, port: number, authority, prefix: parse_prefix(path)? })
    }

    /// Whether it is `https`.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    /// The host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The port; 80 or 443 where the URL has none.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What belongs into the `Host` header: the host, and the port where the URL has one.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// What stands in front of every API path: empty, or a path without a slash at its end.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Authority and prefix: what a replica is called that was given no id.
    pub fn name(&self) -> String {
        format!("{}{}", self.authority, self.prefix)
    }

    /// The path to ask this replica for: prefix, then `path`, which opens with a slash.
    pub fn join(&self, path: &str) -> String {
        format!("{}{path}", self.prefix)
    }
}

impl fmt::Display for ReplicaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority, self.prefix)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(IpAddr::V4(ip)) => ip.fmt(f),
            Self::Ip(IpAddr::V6(ip)) => write!(f, "[{ip}]"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

/// Whether `text` may stand for the name in a certificate: a host name or a bare IP address.
pub(super) fn is_server_name(text: &str) -> bool {
    text.parse::<IpAddr>().is_ok() || matches!(parse_host(text), Ok(Host::Name(_)))
}

fn split_port(authority: &str) -> Result<(&str, Option<&str>), UrlFault> {
    if authority.starts_with('[') {
        let Some(end) = authority.find(']') else {
            return Err(UrlFault::Host(authority.to_owned()));
        };
        let (host, rest) = authority.split_at(end + 1);
        return match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err(UrlFault::Port(rest.to_owned())),
        };
    }
    match authority.split_once(':') {
        None => Ok((authority, None)),
        Some((_, rest)) if rest.contains(':') => Err(UrlFault::Brackets(authority.to_owned())),
        Some((host, port)) => Ok((host, Some(port))),
    }
}

fn parse_port(text: &str) -> Result<u16, UrlFault> {
    let fault = || UrlFault::Port(text.to_owned());
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(fault());
    }
    text.parse().ok().filter(|port| *port != 0).ok_or_else(fault)
}

fn parse_host(text: &str) -> Result<Host, UrlFault> {
    if let Some(inner) = text.strip_prefix('[') {
        let inner = inner.strip_suffix(']').unwrap_or(inner);
        if inner.contains('%') {
            return Err(UrlFault::Zone(text.to_owned()));
        }
        let ip: Result<Ipv6Addr, _> = inner.parse();
        return ip.map(|ip| Host::Ip(ip.into())).map_err(|_| UrlFault::Host(text.to_owned()));
    }
    if let Ok(ip) = text.parse::<Ipv4Addr>() {
        return Ok(Host::Ip(ip.into()));
    }
    if is_name(text) {
        Ok(Host::Name(text.to_ascii_lowercase()))
    } else {
        Err(UrlFault::Host(text.to_owned()))
    }
}

/// Underscores are let through: container networks hand out names with them. A last label of
/// digits alone is a mistyped IPv4 address.
fn is_name(text: &str) -> bool {
    let text = text.strip_suffix('.').unwrap_or(text);
    let label_is_good = |label: &str| {
        !label.is_empty()
            && label.len() <= LABEL_MAX
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    let last_is_number =
        || text.rsplit('.').next().is_some_and(|label| label.bytes().all(|b| b.is_ascii_digit()));
    text.len() <= NAME_MAX && text.split('.').all(label_is_good) && !last_is_number()
}

fn parse_prefix(path: &str) -> Result<String, UrlFault> {
    let allowed = |byte: u8| byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte);
    if !path.bytes().all(allowed) {
        return Err(UrlFault::Path(path.to_owned()));
    }
    let path = path.trim_end_matches('/');
    let path = path.strip_suffix("/v1").unwrap_or(path);
    Ok(path.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn url(text: &str) -> ReplicaUrl {
        ReplicaUrl::parse(text).unwrap()
    }

    fn fault(text: &str) -> UrlFault {
        ReplicaUrl::parse(text).unwrap_err()
    }

    #[test]
    fn slashes_and_a_v1_at_the_end_of_a_prefix_do_not_count() {
        for text in ["http://h:8001/m1", "http://h:8001/m1/", "http://h:8001/m1//"] {
            assert_eq!(url(text).join("/v1/models"), "/m1/v1/models", "{text}");
            assert_eq!(url(text).join("/health"), "/m1/health", "{text}");
        }
        for text in ["http://h/m1/v1", "http://h/m1/v1/", "http://h/m1//v1//"] {
            assert_eq!(url(text).join("/v1/models"), "/m1/v1/models", "{text}");
            assert_eq!(url(text).join("/health"), "/m1/health", "{text}");
        }
        for text in ["http://h", "http://h/", "http://h//", "http://h/v1", "http://h/v1/"] {
            assert_eq!(url(text).join("/v1/models"), "/v1/models", "{text}");
        }
        assert_eq!(url("http://h/v1/v1").join("/v1/models"), "/v1/v1/models", "one only");
        assert_eq!(url("http://h/av1").join("/v1/models"), "/av1/v1/models", "whole segments");
    }

    #[test]
    fn scheme_and_host_are_read_in_any_case() {
        let url = url("HTTP://Engine-0.Example.COM:8001");
        assert_eq!(url.to_string(), "http://engine-0.example.com:8001");
        assert!(!url.is_tls());
    }

    #[test]
    fn a_port_is_the_schemes_unless_given() {
        assert_eq!(url("http://h").port(), 80);
        assert_eq!(url("https://h").port(), 443);
        assert_eq!(url("https://h").authority(), "h", "the Host header as in the URL");
        assert_eq!(url("https://h:8443").authority(), "h:8443");
        assert_eq!(url("http://h:080").authority(), "h:80");
    }

    #[test]
    fn ipv6_keeps_its_brackets() {
        let url = url("http://[FD00::0005]:8000/m");
        assert_eq!(url.authority(), "[fd00::5]:8000");
        assert_eq!(url.name(), "[fd00::5]:8000/m");
        assert_eq!(*url.host(), Host::Ip("fd00::5".parse().unwrap()));
    }

    #[test]
    fn each_mistake_has_its_own_words() {
        assert_eq!(fault(""), UrlFault::Empty);
        assert!(matches!(fault("127.0.0.1:8001"), UrlFault::NoScheme(_)));
        assert!(matches!(fault("h/m1"), UrlFault::NoScheme(_)));
        assert!(matches!(fault("ftp://h"), UrlFault::Scheme(_)));
        assert!(matches!(fault("http://h:8001 "), UrlFault::WhiteSpace(_)));
        assert!(matches!(fault("http://h:8001\n"), UrlFault::WhiteSpace(_)));
        assert!(matches!(fault("http://fd00::5:8000"), UrlFault::Brackets(_)));
        assert!(matches!(fault("http://[fe80::1%eth0]:8000"), UrlFault::Zone(_)));
        assert!(matches!(fault("http://[::g]:8000"), UrlFault::Host(_)));
        assert!(matches!(fault("http://[::1]8000"), UrlFault::Port(_)));
        assert!(matches!(fault("http://[::1"), UrlFault::Host(_)));
        assert_eq!(fault("http://u:p@h"), UrlFault::User);
        assert_eq!(fault("http://h/?a=b"), UrlFault::Query);
        for text in ["http://h:0", "http://h:65536", "http://h:", "http://h:80a", "http://h:+80"] {
            assert!(matches!(fault(text), UrlFault::Port(_)), "{text}");
        }
        for text in
            ["http://", "http:///m", "http://256.1.1.1", "http://a..b", "http://-a", "http://ä"]
        {
            assert!(matches!(fault(text), UrlFault::Host(_)), "{text}");
        }
        assert!(matches!(fault("http://h/ä"), UrlFault::Path(_)));
    }

    #[test]
    fn single_labels_and_underscores_are_names() {
        for host in ["vllm", "vllm_1", "vllm-0.vllm.default.svc.cluster.local", "h."] {
            assert_eq!(*url(&format!("http://{host}:8000")).host(), Host::Name(host.to_owned()));
        }
        assert!(is_server_name("engine.internal") && is_server_name("::1"));
        assert!(!is_server_name("[::1]") && !is_server_name("a b") && !is_server_name(""));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_fall_over(text in ".{0,60}") {
            let _ = ReplicaUrl::parse(&text);
            let _ = ReplicaUrl::parse(&format!("http://{text}"));
        }

        #[test]
        fn a_url_reads_the_same_after_being_written(
            text in "https?://[a-z]{1,5}(:[1-9][0-9]{0,3})?(/[a-z0-9]{1,3}){0,4}/{0,2}",
        ) {
            let first = url(&text);
            // One `/v1` is dropped per reading, so the prefix may shrink once more.
            if !first.prefix().ends_with("/v1") {
                prop_assert_eq!(&url(&first.to_string()), &first);
            }
            prop_assert!(!first.prefix().ends_with('/'));
        }
    }
}

//! How an address to listen on is written: an IP address and a port.
//! Pure text. Names are not looked up: what is listened on must not depend on DNS.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

/// Reads an address; the error says what to write instead, behind `; `.
pub(super) fn parse(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let (problem, advice) = match text.rsplit_once(':') {
        _ if text.parse::<Ipv6Addr>().is_ok() => {
            ("an IPv6 address without brackets and port", format!("write `[{text}]:8080`"))
        }
        _ if text.parse::<IpAddr>().is_ok() => ("no port", format!("write `{text}:8080`")),
        _ if text.contains("://") => {
            ("not an address but a URL", "write IP address and port: `0.0.0.0:8080`".to_owned())
        }
        None if text.parse::<u16>().is_ok() => ("no IP address", format!("write `0.0.0.0:{text}`")),
        Some(("" | "*", port)) if port.parse::<u16>().is_ok() => {
            ("no IP address", format!("write `0.0.0.0:{port}`, or `[::]:{port}` for IPv6 too"))
        }
        Some(("localhost", port)) if port.parse::<u16>().is_ok() => {
            ("a name where an IP address is due", format!("write `127.0.0.1:{port}`"))
        }
        Some((host, port)) if host.parse::<IpAddr>().is_ok() && port.parse::<u16>().is_err() => {
            ("the port is not a number from 0 to 65535", format!("write `{host}:8080`"))
        }
        _ => ("not an IP address with a port", "write `0.0.0.0:8080` or `[::]:8080`".to_owned()),
    };
    Err(format!("{problem}; {advice}"))
}

pub(super) fn serialize<S: Serializer>(address: &SocketAddr, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(address)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<SocketAddr, D::Error> {
    from.deserialize_str(Address)
}

struct Address;

impl Visitor<'_> for Address {
    type Value = SocketAddr;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an address such as `0.0.0.0:8080`")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<SocketAddr, E> {
        parse(text).map_err(E::custom)
    }
}

/// The same, where `off` stands for none.
pub(super) mod or_off {
    use std::fmt;
    use std::net::SocketAddr;

    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    const OFF: &str = "off";

    pub(in crate::config) fn serialize<S: Serializer>(
        address: &Option<SocketAddr>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match address {
            Some(address) => to.collect_str(address),
            None => to.serialize_str(OFF),
        }
    }

    pub(in crate::config) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<SocketAddr>, D::Error> {
        from.deserialize_str(AddressOrOff)
    }

    struct AddressOrOff;

    impl Visitor<'_> for AddressOrOff {
        type Value = Option<SocketAddr>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an address such as `127.0.0.1:9090`, nor `off`")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
            match text {
                OFF => Ok(None),
                _ => super::parse(text).map(Some).map_err(E::custom),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_are_read() {
        for text in ["0.0.0.0:8080", "[::]:8080", "127.0.0.1:0", "[::1]:65535"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn every_mistake_is_shown_mended() {
        for (text, mended) in [
            (":8080", "`0.0.0.0:8080`"),
            ("*:8080", "`0.0.0.0:8080`"),
            ("8080", "`0.0.0.0:8080`"),
            ("localhost:8080", "`127.0.0.1:8080`"),
            ("10.0.0.1", "`10.0.0.1:8080`"),
            ("::1", "`[::1]:8080`"),
            ("10.0.0.1:70000", "`10.0.0.1:8080`"),
            ("http://0.0.0.0:8080", "`0.0.0.0:8080`"),
            ("0.0.0.0:8080 ", "`0.0.0.0:8080`"),
        ] {
            let told = parse(text).unwrap_err();
            assert!(told.contains("; write") && told.contains(mended), "{text}: {told}");
        }
    }
}

//! Config files for tests: what the test says, on top of what suits a test.

use std::net::SocketAddr;

use serde_yaml::{Mapping, Value};

use super::upstream::Upstream;

/// Times that make a test quick, and addresses of its own.
pub(super) fn defaults(address: SocketAddr, admin: SocketAddr) -> Value {
    let text = format!(
        "{{listen: [{{address: '{address}'}}], admin: {{address: '{admin}'}},
          server: {{threads: 2, pre_stop: 0s, grace: 20s, config_poll: 1s}},
          fleet: {{probe: {{every: 250ms, timeout: 1s, down_every_max: 250ms}}}},
          telemetry: {{access_log: {{format: json}}}}}}"
    );
    serde_yaml::from_str(&text).unwrap()
}

/// The sections on top of the defaults: maps are merged, all else is replaced.
pub(super) fn merged(mut base: Value, sections: &str) -> String {
    let sections: Value = serde_yaml::from_str(sections)
        .unwrap_or_else(|error| panic!("the test's config: {error}\n{sections}"));
    merge(&mut base, sections);
    serde_yaml::to_string(&base).unwrap()
}

fn merge(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Mapping(base), Value::Mapping(over)) => {
            for (key, value) in over {
                match base.get_mut(&key) {
                    Some(there) => merge(there, value),
                    None => {
                        base.insert(key, value);
                    }
                }
            }
        }
        (_, Value::Null) => {}
        (base, over) => *base = over,
    }
}

/// A config with these sections and a fleet of these replicas, named `r0`, `r1` … , all serving
/// the models they tell.
pub fn fleet_of(upstreams: &[&Upstream], sections: &str) -> String {
    let urls: Vec<_> = upstreams.iter().map(|upstream| upstream.url()).collect();
    fleet(&urls, sections)
}

/// The same for URLs.
pub fn fleet(urls: &[String], sections: &str) -> String {
    let replica = |(number, url): (usize, &String)| {
        let mut replica = Mapping::new();
        replica.insert("id".into(), format!("r{number}").into());
        replica.insert("url".into(), url.as_str().into());
        Value::Mapping(replica)
    };
    let replicas = urls.iter().enumerate().map(replica).collect();
    let mut fleet = Mapping::new();
    fleet.insert("replicas".into(), Value::Sequence(replicas));
    let mut base = Mapping::new();
    base.insert("fleet".into(), Value::Mapping(fleet));
    merged(Value::Mapping(base), sections)
}

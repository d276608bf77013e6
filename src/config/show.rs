//! A config as it may be shown: in full, secrets hidden; its fingerprint; what sets two apart.
//! To say that a key takes effect at the next start only: its section in `FIXED`.

use std::fmt;

use serde::{Serialize, Serializer};
use serde_yaml::Value;

use super::Config;
use super::fault::Path;

/// Most differences that are told.
pub const DIFFERENCES_MAX: usize = 100;

/// Sections that are read once, when the process starts.
const FIXED: [&str; 4] = ["listen", "admin", "telemetry", "server"];

/// The effective config, defaults filled in and secrets hidden. `Display` writes YAML, `Serialize`
/// anything else.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown(Value);

impl Config {
    /// The effective config, every key with its value, secrets as `***`.
    pub fn shown(&self) -> Shown {
        // Options are plain data; there is nothing in them that YAML could not hold.
        let mut value = serde_yaml::to_value(self).unwrap_or(Value::Null);
        tidy(&mut value);
        Shown(value)
    }

    /// Sixteen hex digits that are the same for two configs with the same effect, whatever their
    /// order, comments and spelling. Secrets do not go into it: it is meant for all to see, to
    /// compare the Weirs of one fleet.
    pub fn fingerprint(&self) -> String {
        format!("{:016x}", fnv(self.shown().to_string().as_bytes()))
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match serde_yaml::to_string(&self.0) {
            Ok(text) => f.write_str(&text),
            Err(_) => Err(fmt::Error),
        }
    }
}

impl Serialize for Shown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

#[cfg(test)]
impl Shown {
    pub(super) fn value(&self) -> &Value {
        &self.0
    }
}

/// Where in the config a key of this name is known, if anywhere: `proxy.timeouts` for `timeouts`.
pub(super) fn place_of(key: &str) -> Option<String> {
    // Those nearest to the root first.
    let mut level = vec![(Path::default(), Config::default().shown().0)];
    while !level.is_empty() {
        let mut below = Vec::new();
        for (path, value) in level {
            let Value::Mapping(entries) = value else { continue };
            for (name, value) in entries {
                let Value::String(name) = name else { continue };
                let path = path.key(&name);
                if name == key {
                    return Some(path.to_string());
                }
                below.push((path, value));
            }
        }
        level = below;
    }
    None
}

/// When a changed key takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applies {
    /// With the reload.
    Now,
    /// When Weir is started again: the key is read once.
    AtRestart,
}

/// A key that differs between two configs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Which key, as `server.threads`.
    pub path: String,
    /// Its value before, as YAML; `none` where there was none.
    pub before: String,
    /// Its value after.
    pub after: String,
    /// When it takes effect.
    pub applies: Applies,
}

/// Every key in which two configs differ, at most 100. A changed secret does not show. Those that
/// [`Applies::AtRestart`] stay as they were until Weir is started again.
pub fn differences(old: &Config, new: &Config) -> Vec<Difference> {
    let mut found = Vec::new();
    compare(&Path::default(), Some(&old.shown().0), Some(&new.shown().0), &mut found);
    found
}

fn compare(path: &Path, old: Option<&Value>, new: Option<&Value>, found: &mut Vec<Difference>) {
    if old == new || DIFFERENCES_MAX <= found.len() {
        return;
    }
    match (old, new) {
        (Some(Value::Mapping(old)), Some(Value::Mapping(new))) => {
            let added = new.keys().filter(|key| !old.contains_key(*key));
            for key in old.keys().chain(added) {
                let name = key.as_str().unwrap_or_default();
                compare(&path.key(name), old.get(key), new.get(key), found);
            }
        }
        (Some(Value::Sequence(old)), Some(Value::Sequence(new)))
            if old.iter().chain(new).any(Value::is_mapping) =>
        {
            for index in 0..old.len().max(new.len()) {
                compare(&path.index(index), old.get(index), new.get(index), found);
            }
        }
        _ => {
            let path = path.to_string();
            let fixed = FIXED.iter().any(|section| {
                path.strip_prefix(section)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
            });
            let applies = if fixed { Applies::AtRestart } else { Applies::Now };
            found.push(Difference { path, before: short(old), after: short(new), applies });
        }
    }
}

fn short(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "none".to_owned(),
        // JSON keeps it on one line.
        Some(value) => serde_json::to_string(value).unwrap_or_default(),
    }
}

/// Writes sizes as `64MiB` rather than `64.0 MiB`, and 32-bit fractions without the digits that
/// come of widening them.
fn tidy(value: &mut Value) {
    match value {
        Value::String(text) => {
            if let Some(tidied) = tidy_size(text) {
                *text = tidied;
            }
        }
        Value::Number(number) if number.is_f64() => {
            let wide = number.as_f64().unwrap_or_default();
            let narrow = wide as f32;
            if f64::from(narrow) == wide {
                let exact = narrow.to_string().parse().unwrap_or(wide);
                *value = Value::Number(serde_yaml::Number::from(exact));
            }
        }
        Value::Sequence(items) => items.iter_mut().for_each(tidy),
        Value::Mapping(entries) => entries.iter_mut().for_each(|(_, value)| tidy(value)),
        _ => {}
    }
}

fn tidy_size(text: &str) -> Option<String> {
    let (number, unit) = text.split_once(' ')?;
    let known = matches!(unit, "B" | "KiB" | "MiB" | "GiB" | "TiB" | "PiB");
    let whole = number.strip_suffix(".0").unwrap_or(number);
    (known && whole.bytes().all(|byte| byte.is_ascii_digit())).then(|| format!("{whole}{unit}"))
}

/// FNV-1a: the same on every machine and in every build, which is all that is asked of it.
pub(super) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "fleet: {replicas: [{url: 'http://a:1', api_key: k-secret-123}]}";

    #[test]
    fn what_is_shown_is_complete_and_hides_secrets() {
        let config = Config::parse(SMALL).unwrap();
        let (yaml, json) =
            (config.shown().to_string(), serde_json::to_string(&config.shown()).unwrap());
        for text in [&yaml, &json, &format!("{config:?}")] {
            assert!(!text.contains("k-secret-123"), "a config that is shown must not tell keys");
        }
        assert!(yaml.contains("***") && yaml.contains("body_bytes_max: 64MiB"), "{yaml}");
        assert!(json.contains("\"url\":\"http://a:1\""));
    }

    #[test]
    fn what_is_shown_can_be_loaded_and_has_the_same_effect() {
        let config = Config::parse(SMALL).unwrap();
        let again = Config::parse(&config.shown().to_string()).unwrap();
        assert_eq!(again.shown(), config.shown());
        assert_eq!(again.fingerprint(), config.fingerprint());
    }

    #[test]
    fn the_fingerprint_heeds_meaning_not_spelling() {
        let spelt = "# other\nfleet:\n  replicas:\n  - api_key: k-other\n    url: http://a:1\n";
        let other = SMALL.replace(":1'", ":2'");
        let print = |text: &str| Config::parse(text).unwrap().fingerprint();
        assert_eq!(print(SMALL), print(spelt));
        assert_ne!(print(SMALL), print(&other));
    }

    #[test]
    fn differences_say_what_waits_for_a_restart() {
        let old = Config::parse(SMALL).unwrap();
        let text = "
listen: [{address: '0.0.0.0:8081'}]
server: {threads: 4}
routing: {policy: round_robin}
fleet: {replicas: [{url: 'http://a:1', weight: 0.1}, {url: 'http://b:1'}], aliases: {x: y}}";
        let new = Config::parse(text).unwrap();
        let told: Vec<_> = differences(&old, &new)
            .into_iter()
            .map(|d| {
                format!("{} {} {:?}", d.path, d.after.get(..20).unwrap_or(&d.after), d.applies)
            })
            .collect();
        let expected = [
            "listen[0].address \"0.0.0.0:8081\" AtRestart",
            "fleet.replicas[0].api_key none Now",
            "fleet.replicas[0].weight 0.1 Now",
            "fleet.replicas[1] {\"url\":\"http://b:1\", Now",
            "fleet.aliases.x \"y\" Now",
            "routing.policy \"round_robin\" Now",
            "server.threads 4 AtRestart",
        ];
        assert_eq!(told, expected);
        assert_eq!(differences(&old, &old), []);
    }

    #[test]
    fn sizes_are_written_the_way_they_are_read() {
        assert_eq!(tidy_size("64.0 MiB").as_deref(), Some("64MiB"));
        assert_eq!(tidy_size("0 B").as_deref(), Some("0B"));
        assert_eq!(tidy_size("1.5 MiB"), None);
        assert_eq!(tidy_size("two words"), None);
    }
}

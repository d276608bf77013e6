//! What a fault says: from serde's terse expectations to words an operator can act on.
//! Pure text. To word a new kind of value better: a row in `explain`.

use serde::de::Expected;

use super::fault::{Fault, nearest};
use super::tree::Node;

/// How the type of durations calls what it wants.
const DURATION: &str = "a duration";

/// How the type of sizes calls what it wants, before and after it has seen a text.
const SIZE: &str = "an integer or string";
const SIZE_TEXT: &str = "parsable string";

/// The problem of a key nobody knows.
pub(super) const UNKNOWN: &str = "unknown key";

pub(super) fn is_duration(wanted: &dyn Expected) -> bool {
    wanted.to_string() == DURATION
}

pub(super) fn is_size(wanted: &dyn Expected) -> bool {
    wanted.to_string() == SIZE
}

/// The problem and the advice for a value that is not what was `wanted`.
pub(super) fn explain(wanted: &str, node: &Node) -> (String, Option<String>) {
    if *node == Node::Null {
        return (
            "nothing is given".to_owned(),
            Some("write a value, or leave the key out to get its default".to_owned()),
        );
    }
    let advice = match (wanted, node) {
        (DURATION, Node::Int(number)) => Some(format!(
            "write the unit too: `{number}s` for seconds, `{number}ms` for milliseconds, or \
             `{number}m` for minutes"
        )),
        (SIZE, Node::Int(number)) => Some(format!(
            "write the unit too: `{number}MiB`, `{number}KiB`, or `{number}B` for bytes"
        )),
        ("a string" | "path string", Node::Int(_) | Node::Float(_) | Node::Bool(_)) => {
            Some(format!("put it in quotes: \"{}\"", node.describe()))
        }
        ("a sequence", Node::Text(_) | Node::Int(_)) => {
            Some(format!("write a list: [{}]", node.describe()))
        }
        ("a boolean", Node::Text(text)) => bool_meant(text).map(|meant| format!("write `{meant}`")),
        (_, Node::Text(text)) if range(wanted).is_some() && text.parse::<f64>().is_ok() => {
            Some(format!("write {text} without quotes"))
        }
        _ => advice_unquoted(wanted),
    };
    (problem(wanted, node), advice)
}

/// What to write where `wanted` is wanted, without repeating what was found.
pub(super) fn advice_unquoted(wanted: &str) -> Option<String> {
    let advice = match wanted {
        DURATION => "write a number with its unit: `30s`, `500ms`, `5m`, `1h`",
        SIZE | SIZE_TEXT => "write a number with its unit: `64KiB`, `16MiB`, `1GiB`",
        "a string" | "path string" => "write a text",
        "a boolean" => "write `true` or `false`",
        "a sequence" => "write a list, each item behind `- `",
        "a map" => "write `name: value` pairs below it",
        "a secret" => "write `{env: NAME}`, `{file: PATH}` or the text in quotes",
        _ if wanted.starts_with("struct ") => "write its keys below it, indented",
        _ => {
            return range(wanted).map(|range| match range {
                Some((min, max)) => format!("write a number from {min} to {max}"),
                None => "write a number".to_owned(),
            });
        }
    };
    Some(advice.to_owned())
}

fn problem(wanted: &str, node: &Node) -> String {
    let kind = match wanted {
        DURATION => "not a duration",
        SIZE | SIZE_TEXT => "not a size",
        "a string" | "path string" => "not a text",
        "a boolean" => "neither `true` nor `false`",
        "a sequence" => "not a list",
        "a map" => "not a section of `name: value` pairs",
        "a secret" => "not a secret",
        _ if wanted.starts_with("struct ") => "not a section with keys of its own",
        _ if wanted.starts_with('f') && range(wanted).is_some() => "not a number",
        _ if range(wanted).is_some() => match node {
            Node::Int(_) => "out of range",
            _ => "not a whole number",
        },
        other => return format!("not {other}"),
    };
    kind.to_owned()
}

/// The bounds of the number type that was wanted, if it was one and has such.
fn range(wanted: &str) -> Option<Option<(String, String)>> {
    macro_rules! bounds {
        ($($kind:ident)*) => {
            match wanted.strip_prefix("a nonzero ") {
                $(Some(stringify!($kind)) => Some(Some(("1".to_owned(), $kind::MAX.to_string()))),)*
                _ => match wanted {
                    $(stringify!($kind) => {
                        Some(Some(($kind::MIN.to_string(), $kind::MAX.to_string())))
                    })*
                    "f32" | "f64" => Some(None),
                    _ => None,
                },
            }
        };
    }
    bounds! { u8 u16 u32 u64 usize i8 i16 i32 i64 isize }
}

fn bool_meant(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "yes" | "on" | "true" | "y" => Some(true),
        "no" | "off" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// Which known key an unknown one may stand for.
pub(super) fn meant(key: &str, known: &[&str]) -> String {
    if key == "<<" {
        return "merge keys are not understood; write the keys out".to_owned();
    }
    match nearest(key, known) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("known here: {}", known.join(", ")),
    }
}

pub(super) fn given_twice() -> Fault {
    Fault::new("", "given a second time").advise("keep one; YAML would silently drop the other")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(wanted: &str, node: Node) -> String {
        let (problem, advice) = explain(wanted, &node);
        format!("{problem}; {}", advice.unwrap_or_default())
    }

    #[test]
    fn a_number_without_its_unit_is_shown_with_one() {
        assert!(told("a duration", Node::Int(30)).contains("`30s`"));
        assert!(told("an integer or string", Node::Int(16)).contains("`16MiB`"));
    }

    #[test]
    fn numbers_name_their_bounds() {
        assert_eq!(told("u16", Node::Int(70000)), "out of range; write a number from 0 to 65535");
        assert!(told("a nonzero u32", Node::Int(0)).contains("from 1 to"));
        assert_eq!(
            told("u32", Node::Text("8".into())),
            "not a whole number; write 8 without quotes"
        );
    }

    #[test]
    fn yes_and_no_are_told_as_true_and_false() {
        assert!(told("a boolean", Node::Text("Yes".into())).ends_with("write `true`"));
        assert!(told("a boolean", Node::Text("off".into())).ends_with("write `false`"));
    }

    #[test]
    fn a_number_where_a_text_is_wanted_is_shown_in_quotes() {
        assert!(told("a string", Node::Int(7)).contains("\"7\""));
        assert!(told("a sequence", Node::Text("m".into())).contains("[\"m\"]"));
    }
}

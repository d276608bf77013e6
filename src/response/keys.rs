//! Looks into JSON without parsing it: finds a key by its quoted name and tells what kind of value
//! follows. Pure, no allocation.
//!
//! This is sound because inside a JSON string every quote is escaped: the six bytes `"text"`,
//! quotes included, can be nothing but a key or a whole string value, and only after a key comes a
//! colon. Generated text can therefore not imitate a key. What is not checked is how deep a key
//! lies; where an engine may echo objects that clients chose, the answer is parsed instead.

use memchr::memchr2;
use memchr::memmem::Finder;

/// The value, and all that follows it, of the first key that `finder` finds at or after `from`,
/// with the place where to look for the next one.
pub(super) fn value_after<'a>(
    finder: &Finder<'_>,
    json: &'a [u8],
    from: usize,
) -> Option<(&'a [u8], usize)> {
    let mut at = from;
    loop {
        let rest = json.get(at..)?;
        let found = finder.find(rest)?;
        at += found + finder.needle().len();
        if let Some(value) = after_colon(json.get(at..)?) {
            return Some((value, at));
        }
    }
}

/// What follows the colon, if a colon comes next.
fn after_colon(json: &[u8]) -> Option<&[u8]> {
    match json {
        [b':', value @ ..] => Some(trim(value)),
        _ => trim(json).strip_prefix(b":").map(trim),
    }
}

fn trim(json: &[u8]) -> &[u8] {
    json.trim_ascii_start()
}

/// Whether a value is a string of at least one character.
pub(super) fn is_text(value: &[u8]) -> bool {
    matches!(value, [b'"', next, ..] if *next != b'"')
}

/// Whether a value is this very string. `text` has no character that JSON would escape.
pub(super) fn is_string(value: &[u8], text: &str) -> bool {
    value
        .strip_prefix(b"\"")
        .and_then(|value| value.strip_prefix(text.as_bytes()))
        .is_some_and(|value| value.starts_with(b"\""))
}

/// Whether the object at the start of `json` has a member that `wanted` likes: it gets the key as
/// it is written, without quotes, and the value with all that follows. Members of members are
/// passed over. False for all that is no object, and where the text breaks off.
pub(super) fn any_member(json: &[u8], mut wanted: impl FnMut(&[u8], &[u8]) -> bool) -> bool {
    let Some(mut rest) = json.strip_prefix(b"{") else { return false };
    loop {
        rest = trim(rest);
        let Some(quoted) = rest.strip_prefix(b"\"") else { return false };
        let Some(end) = string_end(quoted) else { return false };
        let (key, after) = quoted.split_at(end);
        let Some(value) = after.get(1..).and_then(after_colon) else { return false };
        if wanted(key, value) {
            return true;
        }
        let Some(after) = skip_value(value) else { return false };
        let Some(next) = trim(after).strip_prefix(b",") else { return false };
        rest = next;
    }
}

/// Where the string that has begun before `json` ends: the place of its closing quote.
fn string_end(json: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let found = at + memchr2(b'"', b'\\', json.get(at..)?)?;
        if json.get(found) == Some(&b'"') {
            return Some(found);
        }
        at = found + 2;
    }
}

/// What follows the value at the start of `json`; `None` where the text breaks off.
fn skip_value(json: &[u8]) -> Option<&[u8]> {
    let mut depth = 0usize;
    let mut rest = json;
    loop {
        match *rest.first()? {
            b'"' => {
                let inside = rest.get(1..)?;
                rest = inside.get(string_end(inside)? + 1..)?;
                if depth == 0 {
                    return Some(rest);
                }
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 0 => return Some(rest),
            b'}' | b']' if depth == 1 => return rest.get(1..),
            b'}' | b']' => depth -= 1,
            b',' if depth == 0 => return Some(rest),
            _ => {}
        }
        rest = rest.get(1..)?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn first<'a>(key: &str, json: &'a str) -> Option<&'a str> {
        let finder = Finder::new(key.as_bytes());
        let (value, _) = value_after(&finder, json.as_bytes(), 0)?;
        Some(std::str::from_utf8(value).unwrap())
    }

    #[test]
    fn a_key_is_found_with_and_without_blanks() {
        assert_eq!(first("\"a\"", r#"{"a":1}"#), Some("1}"));
        assert_eq!(first("\"a\"", "{\"a\" :\n 1}"), Some("1}"));
        assert_eq!(first("\"a\"", r#"{"b":1}"#), None);
        assert_eq!(first("\"a\"", r#"{"a""#), None);
        assert_eq!(first("\"a\"", r#"{"a":"#), Some(""));
    }

    #[test]
    fn a_string_that_reads_like_a_key_is_none() {
        assert_eq!(first("\"a\"", r#"{"b":"a","c":["a"]}"#), None);
        assert_eq!(first("\"a\"", r#"{"b":"a","a":2}"#), Some("2}"));
        assert_eq!(first("\"a\"", r#"{"b":"\"a\":1"}"#), None);
        assert_eq!(first("\"a\"", r#"{"b":"x\\","a":2}"#), Some("2}"));
    }

    #[test]
    fn every_key_of_a_name_is_found_in_turn() {
        let json = br#"{"a":1,"b":{"a":2}}"#;
        let finder = Finder::new(b"\"a\"");
        let (one, from) = value_after(&finder, json, 0).unwrap();
        assert!(one.starts_with(b"1"));
        let (two, from) = value_after(&finder, json, from).unwrap();
        assert!(two.starts_with(b"2"));
        assert_eq!(value_after(&finder, json, from), None);
        assert_eq!(value_after(&finder, json, json.len() + 1), None);
    }

    #[test]
    fn only_a_string_with_a_character_is_text() {
        for (value, expected) in [
            (r#""x""#, true),
            (r#""\"""#, true),
            (r#""""#, false),
            (r#"""#, false),
            ("", false),
            ("null", false),
            ("[\"x\"]", false),
        ] {
            assert_eq!(is_text(value.as_bytes()), expected, "{value}");
        }
    }

    #[test]
    fn a_string_is_compared_whole() {
        assert!(is_string(br#""abort","#, "abort"));
        assert!(!is_string(br#""aborted""#, "abort"));
        assert!(!is_string(br#""abor""#, "abort"));
        assert!(!is_string(b"abort", "abort"));
        assert!(!is_string(b"null", "abort"));
    }

    fn keys(json: &str) -> Vec<String> {
        let mut keys = Vec::new();
        let found = any_member(json.as_bytes(), |key, _| {
            keys.push(String::from_utf8(key.to_vec()).unwrap());
            false
        });
        assert!(!found, "nothing was sought in {json}");
        keys
    }

    #[test]
    fn members_are_visited_in_order_and_not_those_inside_them() {
        let json = r#"{ "a" : "x,}\"" , "b":{"c":[1,{"d":"}"}]},"e":null,"f":[[],"]"] ,"g":-1}"h""#;
        assert_eq!(keys(json), ["a", "b", "e", "f", "g"]);
        assert_eq!(keys(r#"{"":"","a":["",{}],"b":"","c":1}"#), ["", "a", "b", "c"]);
        assert_eq!(keys("{}"), [""; 0]);
        assert_eq!(keys("[]"), [""; 0]);
        assert_eq!(keys(""), [""; 0]);
    }

    #[test]
    fn the_visit_ends_with_the_member_that_was_sought() {
        let mut seen = 0;
        assert!(any_member(br#"{"a":1,"b":2,"c":3}"#, |key, value| {
            seen += 1;
            key == b"b" && value.starts_with(b"2")
        }));
        assert_eq!(seen, 2);
    }

    #[test]
    fn a_text_that_breaks_off_is_no_fault() {
        let json = r#"{"a":"x\\","b":{"c":[1,{"d":"}"}]},"e":null}"#;
        for end in 0..json.len() {
            assert!(keys(&json[..end]).len() <= 3);
        }
    }

    proptest! {
        #[test]
        fn text_that_was_generated_can_not_imitate_a_key(text in "[\\\\\"a:{}, ]{0,40}") {
            let json = serde_json::json!({ "x": text }).to_string();
            prop_assert_eq!(first("\"a\"", &json), None);
            prop_assert_eq!(keys(&json), ["x"]);
        }

        #[test]
        fn no_bytes_at_all_make_it_fail(json in "[\\\\\"a:{}\\[\\], x0-9]{0,60}") {
            let _ = keys(&json);
            let _ = first("\"a\"", &json);
        }
    }
}

//! The JSON scanner: one walk over a body that checks all of it and finds its top-level fields.
//! Strict RFC 8259, no tree, no recursion, no copy. It knows nothing of APIs or field names.
//! To support a new kind of value there would first have to be a new JSON.

mod plain;
mod scanner;

pub(super) use scanner::Scanner;

use super::malformed::Malformed;

/// Where some bytes of a body are: `start..end`. A body is shorter than 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub start: u32,
    /// The byte after the last.
    pub end: u32,
}

impl Span {
    /// The longest body that spans can point into.
    pub(super) const END_MAX: usize = u32::MAX as usize;

    pub(super) fn new(start: usize, end: usize) -> Self {
        debug_assert!(start <= end && end <= Self::END_MAX, "a span beyond 4 GiB");
        Self { start: start as u32, end: end as u32 }
    }

    /// The bytes of `body` it covers; none if `body` is another, shorter one.
    pub fn of(self, body: &[u8]) -> &[u8] {
        body.get(self.start as usize..self.end as usize).unwrap_or_default()
    }

    pub(super) fn moved(self, by: u32) -> Self {
        Self { start: self.start.saturating_add(by), end: self.end.saturating_add(by) }
    }
}

/// What a JSON value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `{…}`
    Object,
    /// `[…]`
    Array,
    /// `"…"`
    Text,
    /// A number.
    Number,
    /// `true`
    True,
    /// `false`
    False,
    /// `null`
    Null,
}

/// One field of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The key between its quotes, as written.
    pub key: Span,
    /// Whether the key is written with escapes.
    pub key_escaped: bool,
    /// The value as written: a string with its quotes, no white space around.
    pub value: Span,
    /// What the value is.
    pub kind: Kind,
}

impl Member {
    /// Whether the key, with its escapes undone, is `name`.
    pub(super) fn is_named(&self, body: &[u8], name: &str) -> bool {
        if !self.key_escaped {
            return self.key.of(body) == name.as_bytes();
        }
        let quoted = Span { start: self.key.start.saturating_sub(1), end: self.key.end + 1 };
        serde_json::from_slice::<String>(quoted.of(body)).is_ok_and(|key| key == name)
    }
}

/// Checks that `body` is one JSON object and nothing else, and shows each of its fields, in order,
/// to `member`. A field named twice is shown twice; engines take the last.
///
/// At most `depth_max` objects and arrays may be open at once, the outermost counted. An error
/// from `member` ends the scan.
pub fn scan(
    body: &[u8],
    depth_max: u32,
    mut member: impl FnMut(Member) -> Result<(), Malformed>,
) -> Result<(), Malformed> {
    if body.len() > Span::END_MAX {
        return Err(Malformed::TooLarge { bytes_max: Span::END_MAX });
    }
    let mut scanner = Scanner::new(body, depth_max);
    scanner.enter_outermost()?;
    let mut first = true;
    while let Some(found) = scanner.next_member(first)? {
        first = false;
        member(found)?;
    }
    scanner.finish()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
    use serde_json::value::RawValue;

    use super::*;

    fn check(body: &[u8]) -> Result<(), Malformed> {
        scan(body, 256, |_| Ok(()))
    }

    fn members(body: &[u8]) -> Result<Vec<Member>, Malformed> {
        let mut members = Vec::new();
        scan(body, u32::MAX, |member| {
            members.push(member);
            Ok(())
        })?;
        Ok(members)
    }

    /// What another parser finds: the keys, and the values as written, in order.
    struct Pairs<'a>(Vec<(String, &'a RawValue)>);

    impl<'de> serde::Deserialize<'de> for Pairs<'de> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Collect;
            impl<'de> Visitor<'de> for Collect {
                type Value = Pairs<'de>;

                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("an object")
                }

                fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<'de>, A::Error> {
                    let mut pairs = Vec::new();
                    while let Some(pair) = map.next_entry()? {
                        pairs.push(pair);
                    }
                    Ok(Pairs(pairs))
                }
            }
            deserializer.deserialize_map(Collect)
        }
    }

    fn agree(body: &[u8]) -> Result<(), TestCaseError> {
        let ours = members(body);
        let text = std::str::from_utf8(body);
        let object = body.trim_ascii_start().first() == Some(&b'{');
        let theirs = object && text.is_ok() && serde_json::from_slice::<IgnoredAny>(body).is_ok();
        prop_assert_eq!(ours.is_ok(), theirs, "{:?} {:?}", ours, String::from_utf8_lossy(body));
        let (Ok(ours), Ok(text)) = (ours, text) else { return Ok(()) };
        // It also refuses keys that are no Unicode text, which is no matter of grammar.
        let Ok(Pairs(theirs)) = serde_json::from_str::<Pairs<'_>>(text) else { return Ok(()) };
        prop_assert_eq!(ours.len(), theirs.len());
        for (member, (key, raw)) in ours.iter().zip(&theirs) {
            let start = raw.get().as_ptr() as usize - body.as_ptr() as usize;
            prop_assert_eq!(member.value, Span::new(start, start + raw.get().len()));
            prop_assert!(member.is_named(body, key));
            let kind = crate::request::Value::new(raw.get().as_bytes()).kind();
            prop_assert_eq!(Some(member.kind), kind);
        }
        Ok(())
    }

    fn json() -> impl Strategy<Value = String> {
        let text = prop_oneof![
            "[a-z é\u{20ac}\u{1f600}]{0,12}",
            r#"(\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}|[a{}:,]){0,8}"#,
            "[a-zA-Z0-9+/]{0,300}",
        ]
        .prop_map(|inner| format!("\"{inner}\""));
        let number = r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,5})?([eE][+-]?[0-9]{1,4})?";
        let leaf = prop_oneof![
            text.clone(),
            number.prop_map(|number| number),
            Just("true".to_owned()),
            Just("false".to_owned()),
            Just("null".to_owned()),
        ];
        let value = leaf.prop_recursive(6, 40, 6, |inner| {
            let pair = ("[ \n\t\r]{0,2}", "\"[a-c]{0,2}\"", "[ \n]{0,2}", inner.clone())
                .prop_map(|(before, key, space, value)| format!("{before}{key}{space}:{value}"));
            let item = ("[ \n\t\r]{0,2}", inner, "[ \n]{0,2}")
                .prop_map(|(before, value, after)| format!("{before}{value}{after}"));
            prop_oneof![
                prop::collection::vec(pair, 0..6).prop_map(|all| format!("{{{}}}", all.join(","))),
                prop::collection::vec(item, 0..6).prop_map(|all| format!("[{}]", all.join(","))),
            ]
        });
        let field = (text, value).prop_map(|(key, value)| format!("{key}:{value}"));
        prop::collection::vec(field, 0..6).prop_map(|all| format!("{{{}}} ", all.join(" , ")))
    }

    #[derive(Clone, Debug)]
    struct Mutation {
        at: prop::sample::Index,
        remove: usize,
        insert: Vec<u8>,
    }

    fn mutation() -> impl Strategy<Value = Mutation> {
        let piece = prop_oneof![
            prop::sample::select(
                b"{}[]:,\"\\ \n\t\r0123456789-+.eEtfnux\x00\x1f\x7f\x80\xc3\xff".to_vec()
            )
            .prop_map(|byte| vec![byte]),
            prop::sample::select(vec!["NaN", "true", "nul", "\\u12", "\u{feff}", "//", "{}", "[]"])
                .prop_map(|text| text.as_bytes().to_vec()),
            Just(Vec::new()),
        ];
        (any::<prop::sample::Index>(), 0..3_usize, piece)
            .prop_map(|(at, remove, insert)| Mutation { at, remove, insert })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn it_takes_and_finds_what_another_parser_takes_and_finds(
            text in json(),
            mutations in prop::collection::vec(mutation(), 0..3),
        ) {
            let mut body = text.into_bytes();
            for Mutation { at, remove, insert } in mutations {
                let at = at.index(body.len() + 1);
                let end = (at + remove).min(body.len());
                body.splice(at..end, insert);
            }
            agree(&body)?;
        }

        #[test]
        fn it_agrees_on_short_noise(body in "[{}\\[\\]\":,\\\\ \n0-9eE.truenlfas-]{0,12}") {
            agree(body.as_bytes())?;
            agree(format!("{{{body}}}").as_bytes())?;
            agree(format!("{{\"a\":{body}}}").as_bytes())?;
        }
    }

    #[test]
    fn odd_bodies_are_refused_with_a_reason() {
        use Malformed::{Empty, NotAnObject};
        for (body, error) in [("", Empty), (" \r\n\t", Empty), ("[]", NotAnObject)] {
            assert_eq!(check(body.as_bytes()), Err(error), "{body}");
        }
        assert_eq!(check(b"\"x\""), Err(NotAnObject));
        for body in [
            "{",
            "{\"a\"",
            "{\"a\":",
            "{\"a\":1",
            "{\"a\":\"",
            "{\"a\":1,}",
            "{,}",
            "{a:1}",
            "{'a':1}",
            "{\"a\":NaN}",
            "{\"a\":Infinity}",
            "{\"a\":-Infinity}",
            "{\"a\":+1}",
            "{\"a\":01}",
            "{\"a\":1.}",
            "{\"a\":.5}",
            "{\"a\":1e}",
            "{\"a\":\"\\x\"}",
            "{\"a\":\"\\u12g4\"}",
            "{\"a\":\"\n\"}",
            "{\"a\":[1,]}",
            "{\"a\":[}",
            "{\"a\":[1}]",
            "{}{}",
            "{} x",
            "\u{feff}{}",
            "{\u{a0}}",
            "{/**/}",
        ] {
            let error = check(body.as_bytes()).unwrap_err();
            assert!(matches!(error, Malformed::Syntax { .. }), "{body} {error}");
        }
        assert_eq!(check(b"{\"a\":\"\xff\"}"), Err(Malformed::NotUtf8 { at: 6 }));
        assert_eq!(check(b"{\"\xc3\":1}"), Err(Malformed::NotUtf8 { at: 2 }));
        let far = [b"{\"a\":\"", &[b'x'; 200][..], b"\xc3(\"}"].concat();
        assert_eq!(check(&far), Err(Malformed::NotUtf8 { at: 206 }));
    }

    #[test]
    fn numbers_and_space_may_be_written_in_all_ways_json_has() {
        check(b" {\"a\" : [ -0, 0.50, 1e3, 1E+3, -12.5e-7, {} , [ ] ] , \"b\":null}\r\n\t ")
            .unwrap();
        check(b"{\"\":{\"\":\"\\ud800 \\\\ \x7f\"}}").unwrap();
    }

    #[test]
    fn nesting_ends_at_the_limit_and_never_in_a_crash() {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let nested = |depth: usize| {
                let inner = if open == "[" { "" } else { "1" };
                format!("{{\"a\":{}{inner}{}}}", open.repeat(depth - 1), close.repeat(depth - 1))
            };
            check(nested(256).as_bytes()).unwrap();
            assert_eq!(check(nested(257).as_bytes()), Err(Malformed::TooDeep { depth_max: 256 }));
            scan(nested(5_000).as_bytes(), 5_000, |_| Ok(())).unwrap();
        }
        let endless = "{\"a\":".repeat(100_000);
        assert_eq!(check(endless.as_bytes()), Err(Malformed::TooDeep { depth_max: 256 }));
        assert_eq!(scan(b"{}", 0, |_| Ok(())), Err(Malformed::TooDeep { depth_max: 0 }));
        scan(b"{}", 1, |_| Ok(())).unwrap();
    }

    #[test]
    fn siblings_do_not_count_as_depth() {
        let wide = format!("{{\"a\":[{}[]]}}", "[{\"b\":[]}],".repeat(10_000));
        scan(wide.as_bytes(), 5, |_| Ok(())).unwrap();
        assert!(scan(wide.as_bytes(), 4, |_| Ok(())).is_err());
    }
}

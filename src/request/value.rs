//! A view of one JSON value inside a body: looked into on demand, never built as a tree.
//! Meant for text that `scan` has checked; on other text it finds less, and never panics.
//! To read one more type of value: a method here.

use std::borrow::Cow;

use super::scan::{Kind, Scanner, Span};

/// One JSON value as written: a string with its quotes, no white space around it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Value<'a> {
    raw: &'a [u8],
}

/// Shows the length only: a value may be a prompt.
impl std::fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Value({} bytes)", self.raw.len())
    }
}

impl<'a> Value<'a> {
    /// A view of `raw`, which should be one JSON value.
    pub fn new(raw: &'a [u8]) -> Self {
        Self { raw }
    }

    /// The bytes as written.
    pub fn raw(self) -> &'a [u8] {
        self.raw
    }

    /// What it is, judged by its first byte; `None` if no value begins with that.
    pub fn kind(self) -> Option<Kind> {
        Some(match self.raw.first()? {
            b'{' => Kind::Object,
            b'[' => Kind::Array,
            b'"' => Kind::Text,
            b'-' | b'0'..=b'9' => Kind::Number,
            b't' => Kind::True,
            b'f' => Kind::False,
            b'n' => Kind::Null,
            _ => return None,
        })
    }

    /// The string's text, escapes undone; borrowed if there are none. `None` if it is no string,
    /// or one that is no Unicode text (half a surrogate pair).
    pub fn text(self) -> Option<Cow<'a, str>> {
        let inner = self.raw.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
        if memchr::memchr(b'\\', inner).is_none() {
            return std::str::from_utf8(inner).ok().map(Cow::Borrowed);
        }
        serde_json::from_slice::<String>(self.raw).ok().map(Cow::Owned)
    }

    /// The whole number it is. `16.0` and `1e2` are whole too, as they are to the engine.
    pub fn integer(self) -> Option<i64> {
        if self.kind()? != Kind::Number {
            return None;
        }
        let text = std::str::from_utf8(self.raw).ok()?;
        if let Ok(number) = text.parse::<i64>() {
            return Some(number);
        }
        /// Up to here every whole number has its own `f64`.
        const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
        let number = text.parse::<f64>().ok()?;
        (number.fract() == 0.0 && number.abs() <= EXACT_MAX).then_some(number as i64)
    }

    /// Whether it is `true`.
    pub fn is_true(self) -> bool {
        self.raw == b"true"
    }

    /// The value of the object's field `name`, the last if there are several.
    pub fn get(self, name: &str) -> Option<Self> {
        let mut scanner = Scanner::inside(self.raw, b'{')?;
        let mut first = true;
        let mut found = None;
        while let Ok(Some(member)) = scanner.next_member(first) {
            first = false;
            if member.is_named(self.raw, name) {
                found = Some(Self::new(member.value.of(self.raw)));
            }
        }
        found
    }

    /// The array's elements in order; nothing if it is no array.
    pub fn elements(self) -> impl Iterator<Item = Value<'a>> {
        self.element_spans().map(move |span| Value::new(span.of(self.raw)))
    }

    /// Where the array's elements are, counted from the start of this value.
    fn element_spans(self) -> impl Iterator<Item = Span> + use<'a> {
        let mut scanner = Scanner::inside(self.raw, b'[');
        let mut first = true;
        std::iter::from_fn(move || {
            let found = scanner.as_mut()?.next_element(first).ok().flatten();
            first = false;
            if found.is_none() {
                scanner = None;
            }
            found
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value(text: &str) -> Value<'_> {
        Value::new(text.as_bytes())
    }

    #[test]
    fn a_string_without_escapes_is_borrowed() {
        assert!(matches!(value(r#""añb""#).text(), Some(Cow::Borrowed("añb"))));
        assert_eq!(value(r#""a\u00e9\n\/""#).text().unwrap(), "aé\n/");
        assert_eq!(value(r#""\ud83d\ude00""#).text().unwrap(), "😀");
        assert_eq!(value(r#""\ud83d""#).text(), None, "half a pair is no text");
        assert_eq!(value("12").text(), None);
        assert_eq!(value("\"").text(), None);
    }

    #[test]
    fn whole_numbers_are_read_however_they_are_spelt() {
        for (text, number) in [
            ("16", Some(16)),
            ("-1", Some(-1)),
            ("16.0", Some(16)),
            ("1e2", Some(100)),
            ("9223372036854775807", Some(i64::MAX)),
            ("1.5", None),
            ("1e999", None),
            ("99999999999999999999", None),
            ("\"16\"", None),
            ("true", None),
        ] {
            assert_eq!(value(text).integer(), number, "{text}");
        }
    }

    #[test]
    fn the_last_of_two_fields_counts_and_escaped_keys_are_known() {
        let object = value(r#"{"a":1,"b":{"a":9},"\u0061":[2]}"#);
        assert_eq!(object.get("a").unwrap().raw(), b"[2]");
        assert_eq!(object.get("b").unwrap().get("a").unwrap().integer(), Some(9));
        assert_eq!(object.get("c"), None);
        assert_eq!(value("[1]").get("a"), None);
    }

    #[test]
    fn elements_come_in_order_without_the_space_around_them() {
        let array = value("[ 1 , \"a,]\" , [2,3] , {\"x\":[]} ]");
        let all: Vec<_> = array.elements().map(Value::raw).collect();
        assert_eq!(all, [&b"1"[..], b"\"a,]\"", b"[2,3]", b"{\"x\":[]}"]);
        assert_eq!(value("[]").elements().count(), 0);
        assert_eq!(value("{}").elements().count(), 0);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_view_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let value = Value::new(&bytes);
            let _ = (value.kind(), value.text(), value.integer(), value.get("a"));
            let _ = value.elements().count();
            let array = [b"[", &bytes[..]].concat();
            let _ = Value::new(&array).elements().count();
            let object = [b"{\"a\":", &bytes[..]].concat();
            let _ = Value::new(&object).get("a");
        }
    }
}

//! The JSON scanner: one walk over a body that checks all of it and finds its top-level fields.
//! Strict RFC 8259, no tree, no recursion, no copy. It knows nothing of APIs or field names.
//! To support a new kind of value there would first have to be a new JSON.

use smallvec::SmallVec;

use super::malformed::Malformed;

/// Levels of nesting remembered without allocating; one bit each.
const LEVELS_INLINE: usize = 256;

/// Where some bytes of a body are: `start..end`. A body is shorter than 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first byte.
    pub start: u32,
    /// The byte after the last.
    pub end: u32,
}

impl Span {
    pub(super) fn new(start: usize, end: usize) -> Self {
        debug_assert!(start <= end && end <= u32::MAX as usize, "a span beyond 4 GiB");
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
    let mut scanner = Scanner::new(body, depth_max);
    scanner.skip_space();
    match scanner.peek() {
        None => return Err(Malformed::Empty),
        Some(b'{') if depth_max == 0 => return Err(Malformed::TooDeep { depth_max }),
        Some(b'{') => scanner.at += 1,
        Some(b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => {
            return Err(Malformed::NotAnObject);
        }
        Some(_) => return Err(scanner.expected("an object")),
    }
    scanner.outer_depth = 1;
    let mut first = true;
    while let Some(found) = scanner.next_member(first)? {
        first = false;
        member(found)?;
    }
    scanner.skip_space();
    if scanner.peek().is_some() {
        return Err(scanner.expected("the end"));
    }
    // Outside of strings only ASCII gets this far, so a body without one high bit needs no look.
    if scanner.bits_seen >= 0x80 {
        std::str::from_utf8(body)
            .map_err(|error| Malformed::NotUtf8 { at: error.valid_up_to() })?;
    }
    Ok(())
}

/// A place in a text, moving forward only.
pub(super) struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    open: Open,
    outer_depth: u32,
    depth_max: u32,
    /// All bytes of all strings, or-ed together.
    bits_seen: u8,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(bytes: &'a [u8], depth_max: u32) -> Self {
        Self { bytes, at: 0, open: Open::default(), outer_depth: 0, depth_max, bits_seen: 0 }
    }

    /// Starts inside a container whose text begins at the first byte; `None` if it does not begin
    /// with `bracket`.
    pub(super) fn inside(bytes: &'a [u8], bracket: u8) -> Option<Self> {
        let mut scanner = Self::new(bytes, u32::MAX);
        if scanner.peek() != Some(bracket) {
            return None;
        }
        scanner.at = 1;
        Some(scanner)
    }

    /// The next field of the object it stands in, `None` at its end, which is passed.
    pub(super) fn next_member(&mut self, first: bool) -> Result<Option<Member>, Malformed> {
        if !self.next_in(b'}', first)? {
            return Ok(None);
        }
        let (key, key_escaped) = self.key()?;
        let start = self.at;
        let kind = self.value()?;
        Ok(Some(Member { key, key_escaped, value: Span::new(start, self.at), kind }))
    }

    /// The next element of the array it stands in, `None` at its end, which is passed.
    pub(super) fn next_element(&mut self, first: bool) -> Result<Option<Span>, Malformed> {
        if !self.next_in(b']', first)? {
            return Ok(None);
        }
        let start = self.at;
        self.value()?;
        Ok(Some(Span::new(start, self.at)))
    }

    /// Moves to the start of the next item; `false` if there is none and `close` was passed.
    fn next_in(&mut self, close: u8, first: bool) -> Result<bool, Malformed> {
        self.skip_space();
        match self.peek() {
            Some(byte) if byte == close => {
                self.at += 1;
                return Ok(false);
            }
            Some(b',') if !first => {
                self.at += 1;
                self.skip_space();
            }
            Some(_) if first => {}
            _ => return Err(self.expected("a comma or a closing bracket")),
        }
        Ok(true)
    }

    /// A key and its colon; stops at the value.
    fn key(&mut self) -> Result<(Span, bool), Malformed> {
        if self.peek() != Some(b'"') {
            return Err(self.expected("a quoted key"));
        }
        let start = self.at + 1;
        let escaped = self.string()?;
        let key = Span::new(start, self.at - 1);
        self.skip_space();
        if self.peek() != Some(b':') {
            return Err(self.expected("a colon"));
        }
        self.at += 1;
        self.skip_space();
        Ok((key, escaped))
    }

    /// Passes one whole value.
    fn value(&mut self) -> Result<Kind, Malformed> {
        match self.peek() {
            Some(b'{') => self.container().map(|()| Kind::Object),
            Some(b'[') => self.container().map(|()| Kind::Array),
            _ => self.scalar(),
        }
    }

    /// Passes an object or array and all that is in it.
    fn container(&mut self) -> Result<(), Malformed> {
        self.enter()?;
        let mut just_entered = true;
        loop {
            self.skip_space();
            if !(just_entered && self.at_close()) {
                if self.open.is_object() {
                    self.key()?;
                }
                if matches!(self.peek(), Some(b'{' | b'[')) {
                    self.enter()?;
                    just_entered = true;
                    continue;
                }
                self.scalar()?;
            }
            just_entered = false;
            if !self.next_item()? {
                return Ok(());
            }
        }
    }

    fn enter(&mut self) -> Result<(), Malformed> {
        if self.outer_depth.saturating_add(self.open.depth) >= self.depth_max {
            return Err(Malformed::TooDeep { depth_max: self.depth_max });
        }
        self.open.push(self.peek() == Some(b'{'));
        self.at += 1;
        Ok(())
    }

    /// Leaves every container that ends here; `false` if that were all, else a comma was passed.
    fn next_item(&mut self) -> Result<bool, Malformed> {
        loop {
            self.skip_space();
            if self.at_close() {
                self.at += 1;
                self.open.pop();
                if self.open.depth == 0 {
                    return Ok(false);
                }
            } else if self.peek() == Some(b',') {
                self.at += 1;
                return Ok(true);
            } else {
                return Err(self.expected("a comma or a closing bracket"));
            }
        }
    }

    fn at_close(&self) -> bool {
        self.peek() == Some(if self.open.is_object() { b'}' } else { b']' })
    }

    fn scalar(&mut self) -> Result<Kind, Malformed> {
        match self.peek() {
            Some(b'"') => self.string().map(|_| Kind::Text),
            Some(b'-' | b'0'..=b'9') => self.number().map(|()| Kind::Number),
            Some(b't') => self.word(b"true", Kind::True),
            Some(b'f') => self.word(b"false", Kind::False),
            Some(b'n') => self.word(b"null", Kind::Null),
            _ => Err(self.expected("a value")),
        }
    }

    fn word(&mut self, word: &'static [u8], kind: Kind) -> Result<Kind, Malformed> {
        if !self.rest().starts_with(word) {
            return Err(self.expected("a value"));
        }
        self.at += word.len();
        Ok(kind)
    }

    fn number(&mut self) -> Result<(), Malformed> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), Malformed> {
        let count = self.rest().iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 {
            return Err(self.expected("a digit"));
        }
        self.at += count;
        Ok(())
    }

    /// Passes a string, quotes included; tells whether it holds escapes.
    fn string(&mut self) -> Result<bool, Malformed> {
        self.at += 1;
        let mut escaped = false;
        loop {
            let (length, bits) = plain_run(self.rest());
            self.at += length;
            self.bits_seen |= bits;
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(escaped);
                }
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                Some(_) => return Err(self.expected("no control character in a string")),
                None => return Err(self.expected("a closing quote")),
            }
        }
    }

    fn escape(&mut self) -> Result<(), Malformed> {
        self.at += 1;
        match self.peek() {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                self.at += 1;
                Ok(())
            }
            Some(b'u') => {
                let digits = self.rest().get(1..5).unwrap_or_default();
                if digits.len() < 4 || !digits.iter().all(u8::is_ascii_hexdigit) {
                    return Err(self.expected("four hexadecimal digits"));
                }
                self.at += 5;
                Ok(())
            }
            _ => Err(self.expected("an escape that JSON knows")),
        }
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(is_space) {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    fn expected(&self, expected: &'static str) -> Malformed {
        Malformed::Syntax { at: self.at, expected }
    }
}

/// The containers now open, one bit each: set for an object.
#[derive(Default)]
struct Open {
    bits: SmallVec<[u64; LEVELS_INLINE / 64]>,
    depth: u32,
}

impl Open {
    fn push(&mut self, object: bool) {
        let (word, bit) = (self.depth as usize / 64, self.depth % 64);
        if word == self.bits.len() {
            self.bits.push(0);
        }
        if let Some(bits) = self.bits.get_mut(word) {
            *bits = *bits & !(1 << bit) | u64::from(object) << bit;
        }
        self.depth += 1;
    }

    fn pop(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }

    fn is_object(&self) -> bool {
        let Some(top) = self.depth.checked_sub(1) else { return false };
        self.bits.get(top as usize / 64).is_some_and(|bits| bits >> (top % 64) & 1 == 1)
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

/// Words looked at one by one before whole blocks are: most strings are short.
const WORDS_FIRST: usize = 4;

/// How many bytes at the start hold neither quote, backslash nor control character, and all those
/// bytes or-ed together.
fn plain_run(bytes: &[u8]) -> (usize, u8) {
    let mut at = 0;
    let mut bits = 0;
    let (words, _) = bytes.as_chunks::<8>();
    for word in words.iter().take(WORDS_FIRST) {
        let word = u64::from_le_bytes(*word);
        if let Some(length) = first_special(word) {
            return (at + length, fold(bits | below(word, length)));
        }
        bits |= word;
        at += 8;
    }
    let mut bits = fold(bits);
    if at == 8 * WORDS_FIRST {
        let (blocks, _) = bytes.get(at..).unwrap_or_default().as_chunks::<64>();
        for block in blocks {
            let (special, block_bits) = block_special(block);
            if special {
                break;
            }
            bits |= block_bits;
            at += 64;
        }
    }
    let (words, _) = bytes.get(at..).unwrap_or_default().as_chunks::<8>();
    for word in words {
        let word = u64::from_le_bytes(*word);
        if let Some(length) = first_special(word) {
            return (at + length, bits | fold(below(word, length)));
        }
        bits |= fold(word);
        at += 8;
    }
    for byte in bytes.get(at..).unwrap_or_default() {
        if is_special(*byte) {
            break;
        }
        bits |= byte;
        at += 1;
    }
    (at, bits)
}

fn is_special(byte: u8) -> bool {
    byte == b'"' || byte == b'\\' || byte < 0x20
}

/// Written so that the compiler turns it into a few vector instructions.
#[inline]
fn block_special(block: &[u8; 64]) -> (bool, u8) {
    let mut special = false;
    let mut bits = 0;
    for byte in block {
        special |= is_special(*byte);
        bits |= byte;
    }
    (special, bits)
}

/// Where the first special byte of eight is. Bytes above it may be judged wrongly, it never is:
/// the borrow of a subtraction only runs upwards from a byte that was special itself.
#[inline]
fn first_special(word: u64) -> Option<usize> {
    const ONES: u64 = u64::from_ne_bytes([0x01; 8]);
    const HIGH: u64 = u64::from_ne_bytes([0x80; 8]);
    const QUOTES: u64 = u64::from_ne_bytes([b'"'; 8]);
    const BACKSLASHES: u64 = u64::from_ne_bytes([b'\\'; 8]);
    const SPACES: u64 = u64::from_ne_bytes([0x20; 8]);
    let quote = word ^ QUOTES;
    let backslash = word ^ BACKSLASHES;
    let found = (quote.wrapping_sub(ONES) & !quote)
        | (backslash.wrapping_sub(ONES) & !backslash)
        | (word.wrapping_sub(SPACES) & !word);
    let found = found & HIGH;
    if found == 0 { None } else { Some(found.trailing_zeros() as usize / 8) }
}

/// The lowest `length` bytes of a word, fewer than eight.
fn below(word: u64, length: usize) -> u64 {
    word & ((1 << (8 * length)) - 1)
}

/// The eight bytes of a word or-ed together, high bits at least.
fn fold(word: u64) -> u8 {
    word.to_le_bytes().into_iter().fold(0, |bits, byte| bits | byte)
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
            let kind = super::super::value::Value::new(raw.get().as_bytes()).kind();
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

        #[test]
        fn a_run_of_plain_bytes_ends_where_a_slow_look_ends_it(
            mut bytes in prop::collection::vec(0x20_u8..=0xff, 0..300),
            specials in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            for (at, byte) in specials {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] = byte;
                }
            }
            let slow = bytes.iter().position(|byte| is_special(*byte)).unwrap_or(bytes.len());
            let bits = bytes[..slow].iter().fold(0, |bits, byte| bits | byte);
            prop_assert_eq!(plain_run(&bytes), (slow, bits));
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

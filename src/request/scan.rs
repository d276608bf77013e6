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

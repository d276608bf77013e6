//! The scanner itself: moves forward over a JSON text, checking every byte of it once.
//! Bounded by a counted depth, never by the stack. To support a new kind of value there would
//! first have to be a new JSON.

use smallvec::SmallVec;

use super::plain::{HIGH_BITS, plain_run};
use super::{Kind, Member, Span};
use crate::request::malformed::Malformed;

/// Levels of nesting remembered without allocating; one bit each.
const LEVELS_INLINE: usize = 256;

/// A place in a text, moving forward only.
pub(in crate::request) struct Scanner<'a> {
    bytes: &'a [u8],
    at: usize,
    open: Open,
    outer_depth: u32,
    depth_max: u32,
    /// All bytes of all strings, or-ed together, eight at a time.
    bits_seen: u64,
}

impl<'a> Scanner<'a> {
    pub(in crate::request) fn new(bytes: &'a [u8], depth_max: u32) -> Self {
        Self { bytes, at: 0, open: Open::new(), outer_depth: 0, depth_max, bits_seen: 0 }
    }

    /// Starts inside a container whose text begins at the first byte; `None` if it does not begin
    /// with `bracket`.
    pub(in crate::request) fn inside(bytes: &'a [u8], bracket: u8) -> Option<Self> {
        let mut scanner = Self::new(bytes, u32::MAX);
        if scanner.peek() != Some(bracket) {
            return None;
        }
        scanner.at = 1;
        Some(scanner)
    }

    /// Passes the opening bracket of the object that a body must be.
    pub(super) fn enter_outermost(&mut self) -> Result<(), Malformed> {
        self.skip_space();
        match self.peek() {
            None => return Err(Malformed::Empty),
            Some(b'{') if self.depth_max == 0 => {
                return Err(Malformed::TooDeep { depth_max: self.depth_max });
            }
            Some(b'{') => self.at += 1,
            Some(b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => {
                return Err(Malformed::NotAnObject);
            }
            Some(_) => return Err(self.expected("an object")),
        }
        self.outer_depth = 1;
        Ok(())
    }

    /// Checks that only white space is left, and that all that was passed is UTF-8.
    pub(super) fn finish(mut self) -> Result<(), Malformed> {
        self.skip_space();
        if self.peek().is_some() {
            return Err(self.expected("the end"));
        }
        // Outside of strings only ASCII gets this far, so without one high bit there is no need.
        if self.bits_seen & HIGH_BITS != 0 {
            std::str::from_utf8(self.bytes)
                .map_err(|error| Malformed::NotUtf8 { at: error.valid_up_to() })?;
        }
        Ok(())
    }

    /// The next field of the object it stands in, `None` at its end, which is passed.
    pub(in crate::request) fn next_member(
        &mut self,
        first: bool,
    ) -> Result<Option<Member>, Malformed> {
        if !self.next_in(b'}', first)? {
            return Ok(None);
        }
        let (key, key_escaped) = self.key()?;
        let start = self.at;
        let kind = self.value()?;
        Ok(Some(Member { key, key_escaped, value: Span::new(start, self.at), kind }))
    }

    /// The next element of the array it stands in, `None` at its end, which is passed.
    pub(in crate::request) fn next_element(
        &mut self,
        first: bool,
    ) -> Result<Option<Span>, Malformed> {
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
                if self.open.closing == b'}' {
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
        self.open.push(self.peek().unwrap_or_default());
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
        self.peek() == Some(self.open.closing)
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
            self.at += plain_run(self.rest(), &mut self.bits_seen);
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
struct Open {
    bits: SmallVec<[u64; LEVELS_INLINE / 64]>,
    depth: u32,
    /// The bracket that closes the innermost.
    closing: u8,
}

impl Open {
    fn new() -> Self {
        Self { bits: SmallVec::new(), depth: 0, closing: 0 }
    }

    fn push(&mut self, bracket: u8) {
        let object = bracket == b'{';
        let (word, bit) = (self.depth as usize / 64, self.depth % 64);
        if word == self.bits.len() {
            self.bits.push(0);
        }
        if let Some(bits) = self.bits.get_mut(word) {
            *bits = *bits & !(1 << bit) | u64::from(object) << bit;
        }
        self.depth += 1;
        self.closing = if object { b'}' } else { b']' };
    }

    fn pop(&mut self) {
        self.depth = self.depth.saturating_sub(1);
        let Some(top) = self.depth.checked_sub(1) else { return };
        let object =
            self.bits.get(top as usize / 64).is_some_and(|bits| bits >> (top % 64) & 1 == 1);
        self.closing = if object { b'}' } else { b']' };
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

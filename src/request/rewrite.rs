//! Edits of a body: single values replaced or added in place, every other byte left alone.
//! The body is copied once, into exactly the room it needs; without an edit, not at all.
//! To add an edit: a method on `Edits` that says which value becomes what.

use bytes::Bytes;
use smallvec::SmallVec;

use super::inference::{Fields, Inference, last_named};
use super::multipart::Content;
use super::scan::{Kind, Scanner, Span};

/// Edits remembered without allocating.
const EDITS_INLINE: usize = 4;

/// A list of edits to one body, made all at once by `apply`.
pub struct Edits<'a> {
    inference: &'a Inference,
    splices: SmallVec<[Splice; EDITS_INLINE]>,
    /// Whether the outermost object has a field by now.
    outer_has_fields: bool,
}

/// Bytes to put in the place of others, or between them.
struct Splice {
    span: Span,
    with: Vec<u8>,
}

/// Where a field of an object is to be written.
enum Place {
    /// Over the value it has.
    Over(Span),
    /// Behind the last field, or behind the opening bracket.
    Behind(u32, HasFields),
}

#[derive(Clone, Copy, PartialEq)]
enum HasFields {
    Yes,
    No,
}

impl<'a> Edits<'a> {
    /// No edits yet.
    pub fn new(inference: &'a Inference) -> Self {
        let outer_has_fields =
            matches!(inference.fields(), Fields::Json(members) if !members.is_empty());
        Self { inference, splices: SmallVec::new(), outer_has_fields }
    }

    /// Names another model. A JSON body that names none gets the field; a form stays as it is.
    ///
    /// For a form `name` must hold no line break: a form has no way to write one safely.
    #[must_use]
    pub fn model(mut self, name: &str) -> Self {
        if let Fields::Form(form) = self.inference.fields() {
            debug_assert!(!name.contains(['\r', '\n']), "a model name with a line break");
            match form.get(self.inference.body(), "model") {
                Some(part) if part.content == Content::Text => {
                    self.replace(part.value, name.as_bytes());
                }
                _ => {}
            }
            return self;
        }
        self.member("model", serde_json::Value::from(name).to_string().as_bytes())
    }

    /// Gives a top-level field of a JSON body the value `json`, adding the field if need be. Of a
    /// field that is there twice, the last and so the one that counts is changed. `name` must need
    /// no escapes and be edited once only. A form stays as it is.
    #[must_use]
    pub fn member(mut self, name: &str, json: &[u8]) -> Self {
        let Fields::Json(members) = self.inference.fields() else { return self };
        let body = self.inference.body();
        let place = match last_named(members, body, name) {
            Some(member) => Place::Over(member.value),
            None => {
                let bracket = memchr::memchr(b'{', body).map_or(0, |at| at + 1);
                let at = members.last().map_or(bracket as u32, |last| last.value.end);
                let has = if self.outer_has_fields { HasFields::Yes } else { HasFields::No };
                self.outer_has_fields = true;
                Place::Behind(at, has)
            }
        };
        self.put(place, name, json);
        self
    }

    /// Asks for the chunk with usage at the end of a stream; the rest of `stream_options` stays.
    /// Does nothing if the answer is not streamed: the engine would refuse.
    #[must_use]
    pub fn include_usage(mut self) -> Self {
        let Fields::Json(members) = self.inference.fields() else { return self };
        if !self.inference.streaming() || self.inference.include_usage() {
            return self;
        }
        let body = self.inference.body();
        match last_named(members, body, "stream_options") {
            Some(options) if options.kind == Kind::Object => {
                let place = place_in(options.value.of(body), options.value.start, "include_usage");
                self.put(place, "include_usage", b"true");
                self
            }
            _ => self.member("stream_options", br#"{"include_usage":true}"#),
        }
    }

    /// The body with all edits made.
    pub fn apply(mut self) -> Bytes {
        let body = self.inference.body();
        if self.splices.is_empty() {
            return body.clone();
        }
        self.splices.sort_by_key(|splice| splice.span.start);
        let added: usize = self.splices.iter().map(|splice| splice.with.len()).sum();
        let removed: usize = self.splices.iter().map(|splice| splice.span.of(body).len()).sum();
        let mut edited = Vec::with_capacity((body.len() + added).saturating_sub(removed));
        let mut copied = 0;
        for splice in &self.splices {
            let (start, end) = (splice.span.start as usize, splice.span.end as usize);
            debug_assert!(copied <= start, "two edits of one place");
            edited.extend_from_slice(body.get(copied..start).unwrap_or_default());
            edited.extend_from_slice(&splice.with);
            copied = end;
        }
        edited.extend_from_slice(body.get(copied..).unwrap_or_default());
        Bytes::from(edited)
    }

    fn put(&mut self, place: Place, name: &str, json: &[u8]) {
        match place {
            Place::Over(span) => self.replace(span, json),
            Place::Behind(at, has_fields) => {
                let comma: &[u8] = if has_fields == HasFields::Yes { b"," } else { b"" };
                let with = [comma, b"\"", name.as_bytes(), b"\":", json].concat();
                self.splices.push(Splice { span: Span { start: at, end: at }, with });
            }
        }
    }

    /// Nothing to do if the bytes are the same already.
    fn replace(&mut self, span: Span, with: &[u8]) {
        if span.of(self.inference.body()) != with {
            self.splices.push(Splice { span, with: with.to_vec() });
        }
    }
}

/// Where the field `name` of the object `text`, which stands at `start`, is to be written.
fn place_in(text: &[u8], start: u32, name: &str) -> Place {
    let mut place = Place::Behind(start + 1, HasFields::No);
    let Some(mut scanner) = Scanner::inside(text, b'{') else { return place };
    while let Ok(Some(member)) =
        scanner.next_member(matches!(place, Place::Behind(_, HasFields::No)))
    {
        if member.is_named(text, name) {
            place = Place::Over(member.value.moved(start));
        } else if !matches!(place, Place::Over(_)) {
            place = Place::Behind(member.value.moved(start).end, HasFields::Yes);
        }
    }
    place
}

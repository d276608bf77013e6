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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::api::find;
    use super::super::options::Limits;
    use super::*;

    const FORM: &[u8] = b"multipart/form-data; boundary=b";

    fn read(body: impl Into<Vec<u8>>) -> Inference {
        let api = find("POST", "/v1/chat/completions").api().unwrap();
        Inference::read(api, None, Bytes::from(body.into()), &Limits::default()).unwrap()
    }

    fn read_form(body: impl Into<Vec<u8>>) -> Inference {
        let api = find("POST", "/v1/audio/transcriptions").api().unwrap();
        Inference::read(api, Some(FORM), Bytes::from(body.into()), &Limits::default()).unwrap()
    }

    fn text(body: Bytes) -> String {
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[test]
    fn only_the_model_changes_whatever_stands_around_it() {
        let body = |model: &str| {
            format!(
                "{{ \"z\":1e2,\"seed\":9007199254740993 , \"model\" :{model}\n,\"t\":0.7,\
                 \"s\":\"\\u00e9\\ud83d\\ude00\\/ñ\",\"a\":1,\"a\":2 }}\n"
            )
        };
        let inference = read(body("\"short\""));
        assert_eq!(text(inference.with_model("a/much longer")), body("\"a/much longer\""));
        assert_eq!(text(inference.with_model("q\"\\\n")), body(r#""q\"\\\n""#));
        let same = inference.with_model("short");
        assert_eq!(same.as_ptr(), inference.body().as_ptr(), "no edit, no copy");
    }

    #[test]
    fn of_two_models_the_one_that_counts_is_changed() {
        let inference = read(r#"{"model":"a","x":{"model":"a"},"mod\u0065l":"a"}"#);
        let edited = text(inference.with_model("b"));
        assert_eq!(edited, r#"{"model":"a","x":{"model":"a"},"mod\u0065l":"b"}"#);
    }

    #[test]
    fn a_missing_model_is_added() {
        assert_eq!(text(read(" { } ").with_model("m")), r#" {"model":"m" } "#);
        assert_eq!(text(read(r#"{"a":[1] }"#).with_model("m")), r#"{"a":[1],"model":"m" }"#);
        assert_eq!(text(read(r#"{"model":null}"#).with_model("m")), r#"{"model":"m"}"#);
    }

    #[test]
    fn several_edits_are_made_in_one_copy() {
        let inference = read(r#"{"stream":true,"model":"a","max_tokens":9}"#);
        let edited = Edits::new(&inference)
            .model("long-name")
            .member("max_tokens", b"1")
            .member("kv_transfer_params", br#"{"do_remote_decode":true}"#)
            .member("stream", b"false")
            .member("x", b"1")
            .apply();
        let want = concat!(
            r#"{"stream":false,"model":"long-name","max_tokens":1,"#,
            r#""kv_transfer_params":{"do_remote_decode":true},"x":1}"#
        );
        assert_eq!(text(edited), want);
        let edited = Edits::new(&read("{}")).member("a", b"1").member("b", b"2").apply();
        assert_eq!(text(edited), r#"{"a":1,"b":2}"#);
    }

    #[test]
    fn usage_is_asked_for_and_the_other_stream_options_stay() {
        for (body, want) in [
            (r#"{"stream":true}"#, r#"{"stream":true,"stream_options":{"include_usage":true}}"#),
            (
                r#"{"stream_options":null,"stream":true}"#,
                r#"{"stream_options":{"include_usage":true},"stream":true}"#,
            ),
            (
                r#"{"stream_options": { } ,"stream":true}"#,
                r#"{"stream_options": {"include_usage":true } ,"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"x":[{}] },"stream":true}"#,
                r#"{"stream_options":{"x":[{}],"include_usage":true },"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"include_usage":false,"x":1},"stream":true}"#,
                r#"{"stream_options":{"include_usage":true,"x":1},"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"include_usage":true,"include_usage":false},"stream":true}"#,
                r#"{"stream_options":{"include_usage":true,"include_usage":true},"stream":true}"#,
            ),
            (
                r#"{"stream_options":{"include_usage":true},"stream":true}"#,
                r#"{"stream_options":{"include_usage":true},"stream":true}"#,
            ),
            (r#"{"stream":false}"#, r#"{"stream":false}"#),
        ] {
            let inference = read(body);
            let edited = Edits::new(&inference).include_usage().apply();
            assert_eq!(text(edited.clone()), want);
            assert_eq!(read(edited).include_usage(), inference.streaming());
        }
    }

    #[test]
    fn of_a_form_only_the_model_part_changes() {
        let body = |model: &str| {
            format!(
                "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\na\r\n\
                 --b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n\
                 \"model\"\0\r\n--b\r\nContent-Disposition: form-data; name=model\r\n\r\n{model}\
                 \r\n--b--\r\nepilogue"
            )
        };
        let inference = read_form(body("a"));
        assert_eq!(text(inference.with_model("org/\"ü\"")), body("org/\"ü\""));
        assert_eq!(read_form(inference.with_model("org/x")).model(), Some("org/x"));
        let none = read_form("--b--");
        assert_eq!(none.with_model("m"), "--b--");
        let unchanged = Edits::new(&inference).member("x", b"1").include_usage().apply();
        assert_eq!(unchanged, inference.body());
    }

    fn key() -> impl Strategy<Value = String> {
        prop_oneof![
            Just("\"model\"".to_owned()),
            Just(r#""mod\u0065l""#.to_owned()),
            r#""[a-c]{0,3}""#
        ]
    }

    fn value() -> impl Strategy<Value = String> {
        prop_oneof![
            r#"-?[1-9][0-9]{0,4}(\.[0-9]{1,3})?"#,
            r#"\[("model", ?)?\{"model":"[a-z]{0,4}"\}\]"#,
            r#""([a-z é]|\\n|\\u00e9){0,9}""#,
        ]
    }

    proptest! {
        #[test]
        fn an_edit_changes_the_named_field_and_nothing_else(
            fields in prop::collection::vec(("[ \n]{0,2}", key(), value()), 0..7),
            name in "[a-z\"\\\\/\n\u{7}é😀]{1,12}",
        ) {
            let mut counts = None;
            let mut body = String::from("{");
            for (number, (space, key, value)) in fields.iter().enumerate() {
                body += if number == 0 { "" } else { "," };
                body += &format!("{space}{key}:{space}");
                let start = body.len();
                if key.contains("mod") {
                    body += "\"m\"";
                    counts = Some(start..body.len());
                } else {
                    body += value;
                }
                body += space;
            }
            body.push('}');
            let once = read(body.clone()).with_model(&name);
            prop_assert_eq!(once.len(), once.to_vec().len());
            prop_assert!(serde_json::from_slice::<serde::de::IgnoredAny>(&once).is_ok());
            let again = read(once.clone());
            prop_assert_eq!(again.model(), Some(name.as_str()));
            prop_assert_eq!(again.with_model(&name), once.clone(), "twice equals once");
            let edited = text(once);
            if let Some(range) = counts {
                let (head, tail) = (&body[..range.start], &body[range.end..]);
                prop_assert!(edited.starts_with(head) && edited.ends_with(tail));
                let middle = &edited[head.len()..edited.len() - tail.len()];
                let decoded = serde_json::from_str::<String>(middle).unwrap();
                prop_assert_eq!(decoded, name);
            } else {
                let json = serde_json::Value::from(name.as_str()).to_string();
                let comma = if fields.is_empty() { "" } else { "," };
                let added = format!("{comma}\"model\":{json}");
                let end = fields.last().map_or(0, |(space, _, _)| space.len()) + 1;
                let at = body.len() - end;
                prop_assert_eq!(edited, format!("{}{added}{}", &body[..at], &body[at..]));
            }
        }
    }
}

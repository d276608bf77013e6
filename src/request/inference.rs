//! One request to a model: its body, and where in it the parts are that Weir needs.
//! Keeps the bytes as they came and owns nothing else of size. What a field means to the engine
//! is the engine's to judge; only what Weir must understand is checked.
//! To read one more field: a method here; to count it as prompt: `prompt_fields`.

use std::borrow::Cow;

use bytes::Bytes;
use smallvec::SmallVec;

use super::api::{Api, ModelSource, Wire};
use super::malformed::Malformed;
use super::multipart::{self, Content, Form, Part};
use super::options::Limits;
use super::rewrite::Edits;
use super::scan::{Kind, Member, Span, scan};
use super::value::Value;
use crate::names::Tokens;

/// Most top-level fields a JSON body may have. Beyond it a second `model` could hide.
pub const MEMBERS_MAX: usize = 1_024;

/// Fields remembered without allocating.
const MEMBERS_INLINE: usize = 16;

/// One request to a model.
#[derive(Clone)]
pub struct Inference {
    api: &'static Api,
    body: Bytes,
    fields: Fields,
    model: Option<Model>,
    streaming: bool,
    include_usage: bool,
}

/// The top-level fields of a body.
#[derive(Clone)]
pub(super) enum Fields {
    Json(SmallVec<[Member; MEMBERS_INLINE]>),
    Form(Form),
}

#[derive(Clone)]
struct Model {
    /// The name in the body, without quotes.
    span: Span,
    /// The name, if it is written with escapes.
    decoded: Option<Box<str>>,
}

/// One piece of a prompt.
#[derive(Clone, Copy)]
pub struct PromptPart<'a> {
    /// The field it stands in.
    pub field: &'static str,
    /// Its bytes as written: JSON, or the bare text of a form's field. `Value` looks into JSON.
    pub raw: &'a [u8],
}

/// Shows the size of the body only: it holds the prompt.
impl std::fmt::Debug for Inference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inference")
            .field("api", &self.api.name)
            .field("model", &self.model())
            .field("body_bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

/// Shows the size only.
impl std::fmt::Debug for PromptPart<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PromptPart({}, {} bytes)", self.field, self.raw.len())
    }
}

impl Inference {
    /// Reads a whole body as what `api` takes: a JSON object, or a multipart form.
    ///
    /// A body without content type is read as JSON; whether it may lack one is the engine's to
    /// say. A body without a model is read too: with one model served, engines take it.
    pub fn read(
        api: &'static Api,
        content_type: Option<&[u8]>,
        body: Bytes,
        limits: &Limits,
    ) -> Result<Self, Malformed> {
        let bytes_max = limits.body_bytes_max.min(Span::END_MAX);
        if body.len() > bytes_max {
            return Err(Malformed::TooLarge { bytes_max });
        }
        if api.model == ModelSource::FormField {
            Self::read_form(api, content_type, body)
        } else {
            Self::read_json(api, content_type, body, limits.nesting_depth_max)
        }
    }

    fn read_json(
        api: &'static Api,
        content_type: Option<&[u8]>,
        body: Bytes,
        depth_max: u32,
    ) -> Result<Self, Malformed> {
        let media_type = media_type(content_type);
        if !is_json(media_type) {
            return Err(Malformed::media_type("application/json", media_type));
        }
        let mut members = SmallVec::new();
        scan(&body, depth_max, |member| {
            if members.len() == MEMBERS_MAX {
                return Err(Malformed::TooManyMembers { members_max: MEMBERS_MAX });
            }
            members.push(member);
            Ok(())
        })?;
        let last = |name| last_named(&members, &body, name);
        let model = last("model").map_or(Ok(None), |member| json_model(member, &body))?;
        let streaming = match last("stream").map(|member| member.kind) {
            Some(Kind::True) => true,
            None | Some(Kind::False | Kind::Null) => false,
            _ => return Err(Malformed::WrongType { param: "stream", expected: "a boolean" }),
        };
        let include_usage = match last("stream_options") {
            Some(Member { kind: Kind::Object, value, .. }) => {
                Value::new(value.of(&body)).get("include_usage").is_some_and(Value::is_true)
            }
            None | Some(Member { kind: Kind::Null, .. }) => false,
            _ => {
                return Err(Malformed::WrongType {
                    param: "stream_options",
                    expected: "an object",
                });
            }
        };
        let fields = Fields::Json(members);
        Ok(Self { api, fields, model, streaming, include_usage, body })
    }

    fn read_form(
        api: &'static Api,
        content_type: Option<&[u8]>,
        body: Bytes,
    ) -> Result<Self, Malformed> {
        let media_type = media_type(content_type);
        if !multipart::is_form(media_type) {
            return Err(Malformed::media_type("multipart/form-data", media_type));
        }
        if body.is_empty() {
            return Err(Malformed::Empty);
        }
        let form = Form::read(content_type.unwrap_or_default(), &body)?;
        let model = form.get(&body, "model").map(|part| form_model(part, &body)).transpose()?;
        let streaming = form.get(&body, "stream").is_some_and(|part| {
            let yes: [&[u8]; 6] = [b"true", b"1", b"on", b"t", b"yes", b"y"];
            yes.iter().any(|yes| part.value.of(&body).eq_ignore_ascii_case(yes))
        });
        let fields = Fields::Form(form);
        Ok(Self { api, fields, model, streaming, include_usage: false, body })
    }

    /// The API it came by.
    pub fn api(&self) -> &'static Api {
        self.api
    }

    /// What will come back. `/invocations` takes several kinds of request and answers in kind.
    pub fn wire(&self) -> Wire {
        if self.api.name != "invocations" {
            return self.api.wire;
        }
        if self.field("messages").is_some() {
            Wire::Chat
        } else if self.field("prompt").is_some() {
            Wire::Completion
        } else {
            Wire::Pooling
        }
    }

    /// The body as it came.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// The model it names, never empty; `None` if it names none (or `null`).
    pub fn model(&self) -> Option<&str> {
        let model = self.model.as_ref()?;
        match &model.decoded {
            Some(decoded) => Some(decoded),
            None => std::str::from_utf8(model.span.of(&self.body)).ok(),
        }
    }

    /// Whether the answer is to be streamed.
    pub fn streaming(&self) -> bool {
        self.streaming
    }

    /// Whether the client asked for the chunk with usage at the end of its stream.
    pub fn include_usage(&self) -> bool {
        self.streaming && self.include_usage
    }

    /// Most tokens the client wants made; `None` if it set no limit that is a whole number.
    pub fn tokens_max(&self) -> Option<Tokens> {
        // The newer field comes first: the engine prefers it, too.
        let limits = ["max_completion_tokens", "max_tokens", "max_output_tokens"];
        let limit = limits.into_iter().find_map(|name| self.field(name)?.integer());
        let nested = || self.field("sampling_params")?.get("max_tokens")?.integer();
        u64::try_from(limit.or_else(nested)?).ok().map(Tokens)
    }

    /// The client's own priority; lower is sooner.
    pub fn priority(&self) -> Option<i64> {
        self.field("priority")?.integer()
    }

    /// The salt that keeps this prompt's cache apart from others'.
    pub fn cache_salt(&self) -> Option<Cow<'_, str>> {
        self.field("cache_salt")?.text()
    }

    /// The pieces of the prompt, those that stand first in what the model reads first.
    pub fn prompt(&self) -> impl Iterator<Item = PromptPart<'_>> {
        prompt_fields(self.wire()).iter().filter_map(|field| {
            let raw = self.raw(field)?;
            (raw != b"null").then_some(PromptPart { field, raw })
        })
    }

    /// The text or number at a dotted path, such as `metadata.session_id`; of a form, the field
    /// of that name.
    pub fn text_at(&self, path: &str) -> Option<Cow<'_, str>> {
        if let Fields::Form(form) = &self.fields {
            let part = form.get(&self.body, path)?;
            let text = (part.content == Content::Text).then(|| part.value.of(&self.body))?;
            return std::str::from_utf8(text).ok().map(Cow::Borrowed);
        }
        let mut names = path.split('.');
        let mut value = self.field(names.next()?)?;
        for name in names {
            value = value.get(name)?;
        }
        match value.kind()? {
            Kind::Text => value.text(),
            Kind::Number => std::str::from_utf8(value.raw()).ok().map(Cow::Borrowed),
            _ => None,
        }
    }

    /// The value of a top-level field of a JSON body; the last if it is there twice.
    pub fn field(&self, name: &str) -> Option<Value<'_>> {
        match &self.fields {
            Fields::Json(members) => {
                let member = last_named(members, &self.body, name)?;
                Some(Value::new(member.value.of(&self.body)))
            }
            Fields::Form(_) => None,
        }
    }

    /// The body with another model named and every other byte as it was. No copy is made if it is
    /// named already; a form that names none stays as it is.
    pub fn with_model(&self, name: &str) -> Bytes {
        Edits::new(self).model(name).apply()
    }

    pub(super) fn fields(&self) -> &Fields {
        &self.fields
    }

    fn raw(&self, name: &str) -> Option<&[u8]> {
        match &self.fields {
            Fields::Json(_) => self.field(name).map(Value::raw),
            Fields::Form(form) => Some(form.get(&self.body, name)?.value.of(&self.body)),
        }
    }
}

/// The last field of that name.
pub(super) fn last_named(members: &[Member], body: &[u8], name: &str) -> Option<Member> {
    members.iter().rev().find(|member| member.is_named(body, name)).copied()
}

/// Where a prompt may stand, by the kind of request; what the engine puts first comes first.
fn prompt_fields(wire: Wire) -> &'static [&'static str] {
    match wire {
        Wire::Chat => &["tools", "documents", "messages"],
        Wire::Completion => &["prompt", "token_ids", "prompt_embeds", "suffix"],
        Wire::Responses => &["tools", "instructions", "input"],
        Wire::Messages => &["tools", "system", "messages"],
        Wire::Pooling => &[
            "instruction",
            "messages",
            "query",
            "queries",
            "text_1",
            "data_1",
            "input",
            "inputs",
            "texts",
            "images",
            "documents",
            "text_2",
            "data_2",
            "items",
        ],
        Wire::Tokens => {
            &["tools", "system", "instructions", "messages", "prompt", "input", "tokens"]
        }
        Wire::Audio => &["prompt"],
        Wire::Other => &[
            "tools",
            "system",
            "documents",
            "messages",
            "prompt",
            "input",
            "query",
            "items",
            "state",
            "questions",
        ],
    }
}

const MODEL_TYPE: Malformed =
    Malformed::WrongType { param: "model", expected: "a string that is not empty" };

fn json_model(member: Member, body: &[u8]) -> Result<Option<Model>, Malformed> {
    // For the engine, too, `null` is as good as nothing.
    if member.kind == Kind::Null {
        return Ok(None);
    }
    match Value::new(member.value.of(body)).text() {
        Some(name) if !name.is_empty() => {
            let span = Span { start: member.value.start + 1, end: member.value.end - 1 };
            let decoded = match name {
                Cow::Borrowed(_) => None,
                Cow::Owned(name) => Some(name.into_boxed_str()),
            };
            Ok(Some(Model { span, decoded }))
        }
        _ => Err(MODEL_TYPE),
    }
}

fn form_model(part: Part, body: &[u8]) -> Result<Model, Malformed> {
    let name = part.value.of(body);
    if part.content == Content::File || name.is_empty() || std::str::from_utf8(name).is_err() {
        return Err(MODEL_TYPE);
    }
    Ok(Model { span: part.value, decoded: None })
}

/// The type of a content type, without its parameters.
fn media_type(content_type: Option<&[u8]>) -> &[u8] {
    let whole = content_type.unwrap_or_default();
    let end = memchr::memchr(b';', whole).unwrap_or(whole.len());
    whole.get(..end).unwrap_or_default().trim_ascii()
}

fn is_json(media_type: &[u8]) -> bool {
    let ends_like = |end: &[u8]| {
        let start = media_type.len().checked_sub(end.len());
        start.and_then(|at| media_type.get(at..)).is_some_and(|tail| tail.eq_ignore_ascii_case(end))
    };
    media_type.is_empty() || ends_like(b"/json") || ends_like(b"+json")
}

#[cfg(test)]
mod tests {
    use super::super::api::find;
    use super::*;

    fn api(path: &'static str) -> &'static Api {
        find("POST", path).api().unwrap()
    }

    fn read_as(path: &'static str, body: &str) -> Result<Inference, Malformed> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        Inference::read(api(path), Some(b"application/json"), body, &Limits::default())
    }

    fn read(body: &str) -> Result<Inference, Malformed> {
        read_as("/v1/chat/completions", body)
    }

    fn pieces(path: &'static str, body: &str) -> Vec<(&'static str, String)> {
        let inference = read_as(path, body).unwrap();
        let text = |raw: &[u8]| String::from_utf8(raw.to_vec()).unwrap();
        inference.prompt().map(|part| (part.field, text(part.raw))).collect()
    }

    #[test]
    fn a_chat_is_understood() {
        let inference = read(
            r#"{"messages":[{"role":"user","content":"model"}],"model":"org/m","stream":true,
            "stream_options":{"include_usage":true},"max_tokens":7,"max_completion_tokens":5,
            "priority":-3,"cache_salt":"s\n","user":"u","metadata":{"session_id":12,"x":[1]}}"#,
        )
        .unwrap();
        assert_eq!(inference.model(), Some("org/m"));
        assert!(inference.streaming() && inference.include_usage());
        assert_eq!(inference.tokens_max(), Some(Tokens(5)));
        assert_eq!(inference.priority(), Some(-3));
        assert_eq!(inference.cache_salt().unwrap(), "s\n");
        assert_eq!(inference.text_at("user").unwrap(), "u");
        assert_eq!(inference.text_at("metadata.session_id").unwrap(), "12");
        for odd in ["metadata", "metadata.x", "metadata.y", "user.x", "", "nope"] {
            assert_eq!(inference.text_at(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_model_that_is_no_name_is_refused() {
        for model in ["1", "\"\"", "[]", "{}", "true", "\"\\ud800\""] {
            let error = read(&format!("{{\"model\":{model}}}")).unwrap_err();
            assert_eq!((error.status(), error.param()), (400, Some("model")), "{model}");
        }
        assert_eq!(read("{}").unwrap().model(), None);
        assert_eq!(read(r#"{"model":null}"#).unwrap().model(), None);
    }

    #[test]
    fn the_last_model_counts_and_escapes_hide_nothing() {
        let inference = read(r#"{"model":"a","mod\u0065l":"b\u002fc"}"#).unwrap();
        assert_eq!(inference.model(), Some("b/c"));
        assert_eq!(read(r#"{"model":"a","model":null}"#).unwrap().model(), None);
        assert_eq!(read(r#"{"x":{"model":"a"}}"#).unwrap().model(), None);
        assert!(read(r#"{"model":"a","model":1}"#).is_err());
        assert!(!read(r#"{"stream":true,"stre\u0061m":false}"#).unwrap().streaming());
    }

    #[test]
    fn only_what_weir_must_understand_has_to_have_its_type() {
        for (body, param) in [
            (r#"{"stream":"true"}"#, "stream"),
            (r#"{"stream":1}"#, "stream"),
            (r#"{"stream_options":true}"#, "stream_options"),
            (r#"{"stream_options":[]}"#, "stream_options"),
        ] {
            assert_eq!(read(body).unwrap_err().param(), Some(param), "{body}");
        }
        let odd = r#"{"stream":null,"stream_options":null,"max_tokens":"5","priority":1.5,
            "cache_salt":7,"messages":"x"}"#;
        let inference = read(odd).unwrap();
        assert!(!inference.streaming() && !inference.include_usage());
        assert_eq!((inference.tokens_max(), inference.priority()), (None, None));
        assert_eq!(inference.cache_salt(), None);
        assert_eq!(read(r#"{"max_tokens":-1}"#).unwrap().tokens_max(), None);
        let unstreamed = read(r#"{"stream_options":{"include_usage":true}}"#).unwrap();
        assert!(!unstreamed.include_usage(), "there is no stream to put the usage in");
    }

    #[test]
    fn a_field_beyond_the_limit_cannot_hide_a_second_model() {
        let fields = |count: usize| (0..count).map(|n| format!("\"f{n}\":0,")).collect::<String>();
        let full = format!("{{{}\"model\":\"m\"}}", fields(MEMBERS_MAX - 1));
        assert_eq!(read(&full).unwrap().model(), Some("m"));
        let over = format!("{{\"model\":\"a\",{}\"model\":\"m\"}}", fields(MEMBERS_MAX));
        let error = read(&over).unwrap_err();
        assert_eq!(error, Malformed::TooManyMembers { members_max: MEMBERS_MAX });
    }

    #[test]
    fn a_prompt_of_any_shape_is_found() {
        for prompt in [r#""a""#, r#"["a","b"]"#, "[1,2,3]", "[[1,2],[3]]"] {
            let body = format!("{{\"prompt\":{prompt},\"model\":\"m\"}}");
            let found = pieces("/v1/completions", &body);
            assert_eq!(found, [("prompt", prompt.to_owned())]);
        }
        let body = r#"{"messages":[{"content":[{"type":"text"}]}],"tools":[{}]}"#;
        let names =
            |path, body| pieces(path, body).into_iter().map(|(field, _)| field).collect::<Vec<_>>();
        assert_eq!(names("/v1/chat/completions", body), ["tools", "messages"]);
        let body = r#"{"system":"s","messages":[],"tools":null}"#;
        assert_eq!(names("/v1/messages", body), ["system", "messages"]);
        let body = r#"{"input":"s","instructions":"i"}"#;
        assert_eq!(names("/v1/responses", body), ["instructions", "input"]);
        let body = r#"{"documents":["d"],"query":"q"}"#;
        assert_eq!(names("/v1/rerank", body), ["query", "documents"]);
        assert_eq!(names("/inference/v1/generate", r#"{"token_ids":[1]}"#), ["token_ids"]);
    }

    #[test]
    fn a_nested_token_limit_is_found() {
        let body = r#"{"token_ids":[1],"sampling_params":{"max_tokens":3}}"#;
        let inference = read_as("/inference/v1/generate", body).unwrap();
        assert_eq!(inference.tokens_max(), Some(Tokens(3)));
        let inference = read_as("/v1/responses", r#"{"max_output_tokens":9}"#).unwrap();
        assert_eq!(inference.tokens_max(), Some(Tokens(9)));
    }

    #[test]
    fn an_invocation_answers_in_kind() {
        for (body, wire) in [
            (r#"{"messages":[]}"#, Wire::Chat),
            (r#"{"prompt":""}"#, Wire::Completion),
            (r#"{"input":""}"#, Wire::Pooling),
        ] {
            assert_eq!(read_as("/invocations", body).unwrap().wire(), wire);
        }
    }

    #[test]
    fn a_body_must_not_be_declared_as_something_else() {
        let read = |path, content_type: Option<&str>| {
            let body = Bytes::from_static(b"{}");
            let content_type = content_type.map(str::as_bytes);
            Inference::read(api(path), content_type, body, &Limits::default())
                .map_or_else(|error| error.status(), |_| 200)
        };
        let chat = "/v1/chat/completions";
        for good in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/json ;x",
            "application/vnd.api+json",
            "text/json",
            "",
        ] {
            assert_eq!(read(chat, Some(good)), 200, "{good}");
        }
        assert_eq!(read(chat, None), 200);
        for bad in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=b",
            "json",
            "application/jsonx",
        ] {
            assert_eq!(read(chat, Some(bad)), 415, "{bad}");
        }
        assert_eq!(read("/v1/audio/transcriptions", Some("application/json")), 415);
        assert_eq!(read("/v1/audio/transcriptions", None), 415);
        assert_eq!(read("/v1/audio/transcriptions", Some("multipart/form-data")), 400);
    }

    #[test]
    fn a_form_is_understood() {
        let form = |fields: &[(&str, &str)]| {
            let mut body = String::from(
                "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"ä\"\r\n\r\nx\r\n",
            );
            for (name, value) in fields {
                body += &format!(
                    "--b\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n"
                );
            }
            let body = Bytes::from(body + "--b--\r\n");
            let content_type = Some(&b"multipart/form-data; boundary=b"[..]);
            let api = api("/v1/audio/transcriptions");
            Inference::read(api, content_type, body, &Limits::default())
        };
        let fields =
            [("model", "a"), ("model", "b"), ("stream", "True"), ("prompt", "p"), ("user", "u")];
        let inference = form(&fields).unwrap();
        assert_eq!(inference.model(), Some("b"));
        assert!(inference.streaming());
        assert_eq!(inference.text_at("user").unwrap(), "u");
        assert_eq!(inference.text_at("file"), None);
        assert_eq!(inference.field("model"), None);
        let parts: Vec<_> = inference.prompt().map(|part| (part.field, part.raw)).collect();
        assert_eq!(parts, [("prompt", &b"p"[..])]);
        let inference = form(&[("stream", "false")]).unwrap();
        assert!(inference.model().is_none() && !inference.streaming());
        assert_eq!(form(&[("model", "")]).unwrap_err().param(), Some("model"));
    }

    #[test]
    fn a_body_over_the_limit_is_refused_by_name() {
        let limits = Limits { body_bytes_max: 10, ..Limits::default() };
        let read = |body: &'static [u8]| {
            Inference::read(api("/tokenize"), None, Bytes::from_static(body), &limits)
        };
        assert!(read(b"{\"a\":1234}").is_ok());
        let error = read(b"{\"a\":12345}").unwrap_err();
        assert_eq!(error, Malformed::TooLarge { bytes_max: 10 });
        assert!(error.to_string().contains("10 bytes"));
    }

    #[test]
    fn nothing_shown_for_debugging_holds_a_prompt() {
        let inference = read(r#"{"model":"m","messages":"secret","x":"secret"}"#).unwrap();
        let part = inference.prompt().next().unwrap();
        let shown = format!("{inference:?} {part:?} {:?}", inference.field("x"));
        assert!(shown.contains("\"m\"") && !shown.contains("secret"), "{shown}");
    }
}

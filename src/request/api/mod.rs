//! The table of API paths: what each is called, what comes back, who answers it, where its model
//! is named; and the look-up of a request in it. Nothing here reads a body.
//! To add a path: a row in `table.rs`.

mod path;
mod table;

use std::borrow::Cow;

pub use table::APIS;

/// What the answer, its usage and its events look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    /// OpenAI chat completions.
    Chat,
    /// OpenAI completions.
    Completion,
    /// OpenAI responses.
    Responses,
    /// Anthropic messages.
    Messages,
    /// Embeddings, scores, ranks: one JSON answer with `usage`.
    Pooling,
    /// Tokenising and rendering: one JSON answer without usage.
    Tokens,
    /// Transcripts of speech.
    Audio,
    /// Anything else: passed on, not understood.
    Other,
}

/// Who answers, and how a replica is found for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Treatment {
    /// Costs engine work: the policy chooses a replica.
    Schedule,
    /// Costs next to nothing: any replica of the model will do.
    Any,
    /// Only the replica that has the named thing can answer.
    Stateful,
    /// Weir answers itself.
    Answer,
    /// Changes an engine: closed to clients unless the operator opened it.
    EngineAdmin,
    /// Never served to clients, whatever the settings and the method.
    Closed,
}

/// Where a request names its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelSource {
    /// The top-level field `model` of a JSON body.
    JsonField,
    /// The field `model` of a multipart form.
    FormField,
    /// The rest of the path; see `Found::model`.
    PathRest,
    /// The parameter `model` of the query string; see `model_in_query`.
    Query,
    /// Nowhere.
    None,
}

/// The methods a path takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Methods {
    /// GET.
    Get,
    /// GET and HEAD.
    Read,
    /// POST.
    Post,
    /// GET, HEAD and POST.
    ReadPost,
    /// DELETE.
    Delete,
    /// Any method at all.
    Every,
}

impl Methods {
    /// The value of the header `Allow`.
    pub fn allow(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Read => "GET, HEAD",
            Self::Post => "POST",
            Self::ReadPost => "GET, HEAD, POST",
            Self::Delete => "DELETE",
            Self::Every => "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS",
        }
    }

    fn takes(self, method: &str) -> bool {
        match self {
            Self::Get => method == "GET",
            Self::Read => matches!(method, "GET" | "HEAD"),
            Self::Post => method == "POST",
            Self::ReadPost => matches!(method, "GET" | "HEAD" | "POST"),
            Self::Delete => method == "DELETE",
            Self::Every => true,
        }
    }
}

/// One row of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Api {
    /// A short name, unique in the table: a metrics label.
    pub name: &'static str,
    /// The path. `{x}` stands for one segment, `{x*}` for all that follows, slashes included.
    pub path: &'static str,
    /// The methods it takes.
    pub methods: Methods,
    /// What comes back.
    pub wire: Wire,
    /// Who answers.
    pub treatment: Treatment,
    /// Where the model is named.
    pub model: ModelSource,
}

impl Api {
    /// Whether a body must be read as an `Inference` before the request can go on.
    pub fn has_inference(&self) -> bool {
        matches!(self.model, ModelSource::JsonField | ModelSource::FormField)
    }

    /// Whether its clients expect errors in Anthropic's shape.
    pub fn speaks_anthropic(&self) -> bool {
        self.path.starts_with("/v1/messages")
    }
}

/// What the table says of a method and path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// This API, by a method it takes.
    Api(&'static Api),
    /// This API, by a method it does not take: 405, with `Methods::allow`.
    WrongMethod(&'static Api),
    /// No API.
    Unknown,
}

/// A request found in the table, or not.
#[derive(Clone, Debug)]
pub struct Found<'p> {
    /// What it is.
    pub route: Route,
    /// The path to use from here on: no double or trailing slash, no dot segment. It, never the
    /// client's own spelling, goes to a replica, so that both sides mean the same path.
    pub path: Cow<'p, str>,
    client_path: &'p str,
    /// Where in `path` the text for the row's `{…}` stands.
    argument: Option<(usize, usize)>,
}

impl Found<'_> {
    /// The API, if path and method fit one.
    pub fn api(&self) -> Option<&'static Api> {
        match self.route {
            Route::Api(api) => Some(api),
            Route::WrongMethod(_) | Route::Unknown => None,
        }
    }

    /// The API's name, or `unknown`: a metrics label.
    pub fn name(&self) -> &'static str {
        match self.route {
            Route::Api(api) | Route::WrongMethod(api) => api.name,
            Route::Unknown => "unknown",
        }
    }

    /// What stands where the row's path has `{…}`: the id of a response, for one.
    pub fn argument(&self) -> Option<&str> {
        let (start, end) = self.argument?;
        self.path.get(start..end)
    }

    /// The model the path names, percent-decoded once. Slashes are part of it, leading ones too
    /// (engines name a model by its folder, `/models/m`, if told nothing else).
    pub fn model(&self) -> Option<Cow<'_, str>> {
        if self.api()?.model != ModelSource::PathRest {
            return None;
        }
        let argument = self.argument()?;
        let prefix = self.path.strip_suffix(argument)?;
        let written = self.client_path.strip_prefix(prefix).map(|rest| rest.trim_end_matches('/'));
        Some(path::decode(written.filter(|written| !written.is_empty()).unwrap_or(argument)))
    }
}

/// Looks a request up. `path` is the request target's path as sent, without the query.
///
/// Case counts, as it does for the engine. Percent-encoded letters do not hide a path: what the
/// engine would decode is decoded before the path is called unknown.
pub fn find<'p>(method: &str, path: &'p str) -> Found<'p> {
    let canonical = path::normalise(path);
    if let Some(hit) = table::look_up(&canonical) {
        return found(method, path, canonical, hit);
    }
    if canonical.contains('%') {
        let decoded = path::decode(&canonical);
        // Engines take `/sleep` followed by a line break for `/sleep`.
        let mut safe = !decoded.bytes().any(|byte| byte.is_ascii_control());
        let decoded = path::normalise(&decoded).into_owned();
        let hit = table::look_up(&decoded);
        safe &= hit.as_ref().is_none_or(|hit| hit.is_literal_safe(&decoded));
        match hit {
            _ if !safe => {
                let hit = table::Hit { api: &table::UNSAFE_ENCODING, argument: None };
                return found(method, path, canonical, hit);
            }
            Some(hit) => return found(method, path, Cow::Owned(decoded), hit),
            None => {}
        }
    }
    Found { route: Route::Unknown, path: canonical, client_path: path, argument: None }
}

fn found<'p>(method: &str, client_path: &'p str, path: Cow<'p, str>, hit: table::Hit) -> Found<'p> {
    let route = if hit.api.methods.takes(method) {
        Route::Api(hit.api)
    } else {
        Route::WrongMethod(hit.api)
    };
    Found { route, path, client_path, argument: hit.argument }
}

/// The parameter `model` of a query string (without its `?`), decoded. The first one counts.
pub fn model_in_query(query: &str) -> Option<Cow<'_, str>> {
    let value = query.split('&').find_map(|pair| pair.strip_prefix("model="))?;
    let value = if value.contains('+') {
        Cow::Owned(path::decode(&value.replace('+', " ")).into_owned())
    } else {
        path::decode(value)
    };
    (!value.is_empty()).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(method: &str, path: &str) -> &'static str {
        match find(method, path).route {
            Route::Api(api) => api.name,
            Route::WrongMethod(_) => "405",
            Route::Unknown => "404",
        }
    }

    #[test]
    fn slashes_doubled_or_trailing_lead_to_the_same_api() {
        for path in [
            "/v1/chat/completions",
            "//v1/chat/completions",
            "/v1//chat/completions",
            "/v1/chat/completions/",
            "///v1/chat///completions//",
            "/./v1/chat/completions",
            "/v1/x/../chat/completions",
        ] {
            let found = find("POST", path);
            assert_eq!(found.name(), "chat_completions", "{path}");
            assert_eq!(found.path, "/v1/chat/completions", "{path}");
        }
        assert!(matches!(find("POST", "/v1/completions").path, Cow::Borrowed(_)));
    }

    #[test]
    fn case_counts() {
        assert_eq!(name("GET", "/V1/models"), "404");
        assert_eq!(name("POST", "/v1/Chat/completions"), "404");
        assert_eq!(name("get", "/v1/models"), "405");
    }

    #[test]
    fn a_wrong_method_is_told_from_an_unknown_path() {
        let Route::WrongMethod(api) = find("GET", "/v1/chat/completions").route else {
            panic!("GET is not for chat");
        };
        assert_eq!(api.methods.allow(), "POST");
        assert_eq!(find("GET", "/v1/chat/completions").name(), "chat_completions");
        assert!(find("GET", "/v1/chat/completions").api().is_none());
        assert_eq!(name("GET", "/v1/nope"), "404");
        assert_eq!(name("HEAD", "/v1/models"), "models");
        assert_eq!(name("POST", "/v1/models"), "405");
        assert_eq!(name("DELETE", "/v1/responses/resp_1"), "405");
    }

    #[test]
    fn no_spelling_reaches_a_closed_path() {
        for path in [
            "/sleep",
            "/sleep/",
            "//sleep",
            "/./sleep",
            "/v1/../sleep",
            "/%73leep",
            "/slee%70/",
            "/v1/%2e%2e/sleep",
            "/v1/%2E./sleep",
            "/x%2f..%2fsleep",
            "/%2Fsleep",
            "/sleep%0a",
            "/sleep%0A",
            "/v1/responses/..%2f..%2f..%2fsleep",
            "/v1/models/../../sleep",
            "/metrics",
            "/metrics/",
            "/metrics/x",
            "/metricsx",
            "/%6detrics/x",
            "/metrics%2fx",
            "/%6detrics%ff",
            "/v1/chat/../../metrics",
            "/pause",
            "/collective_rpc",
            "/docs",
        ] {
            for method in ["GET", "POST", "PUT", "OPTIONS"] {
                let api = find(method, path).api();
                let treatment = api.map(|api| api.treatment);
                assert_eq!(treatment, Some(Treatment::Closed), "{method} {path}");
            }
        }
        let found = find("POST", "/fault_tolerance%2Fapply");
        assert_eq!(found.api().map(|api| api.treatment), Some(Treatment::EngineAdmin));
        assert_eq!(found.path, "/fault_tolerance/apply");
    }

    #[test]
    fn dots_that_climb_too_far_stop_at_the_root() {
        assert_eq!(find("GET", "/../../v1/models").path, "/v1/models");
        assert_eq!(find("GET", "/..").path, "/");
        assert_eq!(find("GET", "").path, "/");
        assert_eq!(find("GET", "/.well-known/x").path, "/.well-known/x");
        assert_eq!(find("GET", "/a/..b/...").path, "/a/..b/...");
        assert_eq!(name("OPTIONS", "*"), "404");
    }

    #[test]
    fn a_model_id_with_slashes_is_found_plain_and_encoded() {
        for (path, model) in [
            ("/v1/models/org/my-model", "org/my-model"),
            ("/v1/models/org%2Fmy-model", "org/my-model"),
            ("/v1/models/org/my-model/", "org/my-model"),
            ("//v1/models/m", "m"),
            ("/v1/models//models/llama", "/models/llama"),
            ("/v1/models/%2Fmodels%2Fllama", "/models/llama"),
            ("/v1/models/a%2520b", "a%20b"),
            ("/v1/models/a%zz", "a%zz"),
            ("/v1/models/gl%C3%BCck", "glück"),
        ] {
            let found = find("GET", path);
            assert_eq!(found.name(), "model", "{path}");
            assert_eq!(found.model().unwrap(), model, "{path}");
        }
        assert_eq!(name("HEAD", "/v1/models/org/m"), "model");
        assert_eq!(name("GET", "/v1/models/"), "models");
        assert_eq!(find("GET", "/v1/models/").model(), None);
    }

    #[test]
    fn a_response_is_known_by_its_id() {
        let found = find("GET", "/v1/responses/resp_1");
        assert_eq!((found.name(), found.argument()), ("response", Some("resp_1")));
        let found = find("POST", "/v1/responses/resp_1/cancel/");
        assert_eq!((found.name(), found.argument()), ("response_cancel", Some("resp_1")));
        assert_eq!(found.api().unwrap().treatment, Treatment::Stateful);
        let found = find("GET", "/v1/responses/resp%5F1");
        assert_eq!((found.argument(), &*found.path), (Some("resp_1"), "/v1/responses/resp_1"));
        assert_eq!(name("POST", "/v1/responses/render"), "responses_render");
        for path in ["/v1/responses/a/b", "/v1/responses/a%2Fb"] {
            assert_eq!(name("GET", path), "404", "{path}");
        }
        assert_eq!(name("GET", "/v1/responses/a%3Fb"), "unsafe_encoding");
        assert_eq!(name("DELETE", "/adapters/a%20b"), "unsafe_encoding");
    }

    #[test]
    fn a_query_may_name_the_model() {
        assert_eq!(model_in_query("a=1&model=org%2Fm").unwrap(), "org/m");
        assert_eq!(model_in_query("model=a+b").unwrap(), "a b");
        assert_eq!(model_in_query("xmodel=a&model="), None);
    }
}

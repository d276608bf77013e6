//! The way in: which API, the body, the model, the pool. What Weir answers itself ends here.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Method, header};
use pingora::Result;
use pingora::http::RequestHeader;
use pingora_proxy::Session;
use tracing::debug;

use super::Gateway;
use super::body::{self, Upload, UploadLimits};
use super::context::{RequestContext, Target};
use super::outbound::REQUEST_ID;
use super::peer::RETRY_AFTER;
use super::refusal::Refusal;
use crate::clock;
use crate::fleet::Resolved;
use crate::names::{ModelName, RequestId};
use crate::request::{
    self, Api, EngineAdmin, Found, Inference, ModelSource, Route, Treatment, UnknownPaths,
};
use crate::telemetry::Phase;

/// Longest request id taken from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// How much of an unknown model's name is repeated to the client and in the log.
const MODEL_SHOWN_CHARACTERS_MAX: usize = 100;

/// Longest session key that is looked at; of a longer one this much counts.
const SESSION_KEY_BYTES_MAX: usize = 1024;

/// Why the way in ends early.
pub(super) enum Stop {
    /// Weir answers no.
    Refused(Refusal),
    /// The connection is in no state to answer, or Pingora has more to say.
    Broken(Box<pingora::Error>),
}

impl From<Box<pingora::Error>> for Stop {
    fn from(error: Box<pingora::Error>) -> Self {
        Self::Broken(error)
    }
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Gateway {
    /// What is set for every request before anything is read of it.
    pub(super) fn greet(&self, session: &mut Session, context: &mut RequestContext) {
        if !is_websocket(session.req_header()) {
            // No other protocol is spoken here, so the offer is let go (RFC 9110, 7.8). Left in,
            // it would make Pingora take the request for one without a body.
            session.req_header_mut().remove_header(&header::UPGRADE);
        }
        // What a client sends behind its request waits for its turn, instead of ending the request.
        session.downstream_session.set_pipelining_enabled(true);
        let times = &context.state.options.timeouts;
        if session.get_keepalive().is_some() {
            let idle =
                if self.shared.draining() { None } else { Some(times.client_idle.as_secs()) };
            session.set_keepalive(idle);
        }
        if !times.client_write.is_zero() {
            session.downstream_session.set_write_timeout(Some(times.client_write));
        }
        context.watch.arm_total(context.started, times.total);
        context.id = Some(RequestId::new(request_id(session.req_header())));
    }

    /// Reads the request and finds its pool. True: it is answered already.
    pub(super) async fn enter(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
    ) -> Result<bool> {
        match self.find_target(session, context).await {
            Ok(answered) => Ok(answered),
            Err(Stop::Broken(error)) => Err(error),
            Err(Stop::Refused(refusal)) => {
                debug!(reason = refusal.reason(), "request refused");
                context.answer.status = refusal.status();
                let shape = context.error_shape();
                context.refusal = Some(refusal.clone());
                let unread = !session.downstream_session.is_body_done();
                if unread {
                    session.set_keepalive(None);
                }
                context.answer.bytes = refusal.send(session, shape, context.id()).await?;
                if unread {
                    body::drain(session).await;
                }
                Ok(true)
            }
        }
    }

    async fn find_target(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
    ) -> Result<bool, Stop> {
        let head = session.req_header();
        let found = request::find(head.method.as_str(), head.uri.path());
        let api = self.admit_path(&head.method, &found, context)?;
        let path = (found.path != head.uri.path()).then(|| Box::from(found.path.as_ref()));
        context.api = api;
        if let Some(api) = api.filter(|api| api.treatment == Treatment::Answer) {
            let named = found.model().map(Cow::into_owned);
            return self.answer(session, context, api, named).await.map(|()| true);
        }
        let upload = self.read_body(session, context).await?;
        context.times.body_read = Some(clock::now());
        context.phase = Phase::Queued;
        match api {
            Some(api) if api.has_inference() => {
                let inference = self.read_inference(session, context, api, upload)?;
                let model = inference.model();
                let rewrite = self.resolve(context, Some(api), model, path)?;
                context.body = Some(match rewrite {
                    Some(served) => inference.with_model(served.as_str()),
                    None => inference.body().clone(),
                });
            }
            _ => {
                context.body = upload;
                context.session_key = session_header(session.req_header(), context);
                let model = model_beside_body(session, api);
                self.resolve(context, api, model.as_deref(), path)?;
            }
        }
        Ok(false)
    }

    /// The row of the path, `None` for an unknown path that may pass.
    fn admit_path(
        &self,
        method: &Method,
        found: &Found<'_>,
        context: &RequestContext,
    ) -> Result<Option<&'static Api>, Refusal> {
        let options = &context.state.request;
        match found.route {
            Route::Unknown if options.unknown_paths == UnknownPaths::Pass => Ok(None),
            Route::Unknown => Err(Refusal::UnknownPath),
            Route::WrongMethod(api) if !is_open(api, options) => Err(Refusal::UnknownPath),
            // A browser asks first: the engines know who may call them from where.
            Route::WrongMethod(_) if method == Method::OPTIONS => Ok(None),
            Route::WrongMethod(api) => Err(Refusal::WrongMethod { allowed: api.methods.allow() }),
            Route::Api(api) if is_open(api, options) => Ok(Some(api)),
            Route::Api(_) => Err(Refusal::UnknownPath),
        }
    }

    async fn read_body(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
    ) -> Result<Option<Bytes>, Stop> {
        let options = &context.state.request;
        let limits = UploadLimits {
            bytes_max: options.limits().body_bytes_max,
            held_max: usize::try_from(options.bodies_bytes_max.as_u64()).unwrap_or(usize::MAX),
            held: Arc::clone(self.shared.metrics.bodies()),
            time_max: options.upload_timeout,
        };
        match body::read(session, limits).await? {
            Upload::None => Ok(None),
            Upload::Whole(body, room) => {
                context.body_bytes = body.len() as u64;
                context.room = Some(room);
                Ok(Some(body))
            }
            Upload::TooLarge => {
                let bytes_max = options.body_bytes_max.as_u64();
                Err(Refusal::BodyTooLarge { bytes_max }.into())
            }
            Upload::NoRoom => Err(Refusal::NoRoom { retry_after: RETRY_AFTER }.into()),
            Upload::TooSlow => Err(Refusal::UploadTooSlow.into()),
            Upload::UnknownExpectation => Err(Refusal::UnknownExpectation.into()),
        }
    }

    /// Reads the body as the API's inference; what is needed of it later goes into the context.
    fn read_inference(
        &self,
        session: &Session,
        context: &mut RequestContext,
        api: &'static Api,
        upload: Option<Bytes>,
    ) -> Result<Inference, Refusal> {
        let head = session.req_header();
        if is_encoded(head) {
            return Err(Refusal::UnknownEncoding);
        }
        let content_type = head.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        let limits = context.state.request.limits();
        let inference = Inference::read(api, content_type, upload.unwrap_or_default(), &limits)
            .map_err(|malformed| Refusal::from(&malformed))?;
        context.wire = inference.wire();
        context.session_key = session_header(head, context).or_else(|| {
            let fields = &context.state.session_keys.body_fields;
            fields.iter().find_map(|field| session_key(inference.text_at(field)?.as_bytes()))
        });
        Ok(inference)
    }

    /// Finds the pool. The result is the name the replicas know the model by, where it is another.
    fn resolve(
        &self,
        context: &mut RequestContext,
        api: Option<&'static Api>,
        model: Option<&str>,
        path: Option<Box<str>>,
    ) -> Result<Option<ModelName>, Refusal> {
        let fleet = &context.state.fleet;
        let named_nowhere = api.is_none_or(|api| api.model == ModelSource::None);
        let resolved =
            if named_nowhere && model.is_none() { fleet.everyone() } else { fleet.resolve(model) };
        match resolved {
            Resolved::Pool { pool, model, rewrite } => {
                context.target = Some(Target { pool, model, path });
                Ok(rewrite)
            }
            Resolved::Unknown { known } => {
                Err(Refusal::UnknownModel { model: shown(model.unwrap_or_default()), known })
            }
            Resolved::NeedsModel { known } => Err(Refusal::ModelMissing { known }),
            Resolved::NoReplica { .. } => Err(Refusal::NoReplica { retry_after: RETRY_AFTER }),
        }
    }
}

/// Whether clients may use the path at all.
fn is_open(api: &Api, options: &request::Options) -> bool {
    match api.treatment {
        Treatment::Closed => false,
        Treatment::EngineAdmin => options.engine_admin == EngineAdmin::Open,
        _ => true,
    }
}

/// The model of a request whose body is not read as an inference.
fn model_beside_body(session: &Session, api: Option<&'static Api>) -> Option<String> {
    if api?.model != ModelSource::Query {
        return None;
    }
    let query = session.req_header().uri.query()?;
    request::model_in_query(query).map(Cow::into_owned)
}

fn session_header(head: &RequestHeader, context: &RequestContext) -> Option<Box<[u8]>> {
    let names = &context.state.session_keys.headers;
    names.iter().find_map(|name| session_key(head.headers.get(name)?.as_bytes()))
}

fn session_key(value: &[u8]) -> Option<Box<[u8]>> {
    let value = value.trim_ascii();
    let value = &value[..value.len().min(SESSION_KEY_BYTES_MAX)];
    (!value.is_empty()).then(|| value.into())
}

fn is_websocket(head: &RequestHeader) -> bool {
    head.method == Method::GET
        && head
            .headers
            .get(header::UPGRADE)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

fn is_encoded(head: &RequestHeader) -> bool {
    head.headers.get_all(header::CONTENT_ENCODING).iter().any(|value| {
        let value = value.as_bytes().trim_ascii();
        !value.is_empty() && !value.eq_ignore_ascii_case(b"identity")
    })
}

fn shown(model: &str) -> String {
    let mut short: String = model.chars().take(MODEL_SHOWN_CHARACTERS_MAX).collect();
    if short.len() < model.len() {
        short.push('…');
    }
    short
}

/// The client's id if it is sane, else one of our own.
fn request_id(head: &RequestHeader) -> String {
    if let Some(id) = head.headers.get(REQUEST_ID).map(HeaderValue::as_bytes) {
        let sane = (1..=REQUEST_ID_BYTES_MAX).contains(&id.len())
            && id.iter().all(|byte| byte.is_ascii_graphic());
        if let (true, Ok(id)) = (sane, std::str::from_utf8(id)) {
            return id.to_owned();
        }
    }
    random_id(fastrand::u128(..))
}

/// 32 hexadecimal digits.
fn random_id(number: u128) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(32);
    for byte in number.to_be_bytes() {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(id: Option<&[u8]>) -> RequestHeader {
        let mut head = RequestHeader::build("GET", b"/", None).unwrap();
        if let Some(id) = id {
            head.insert_header(REQUEST_ID, id).unwrap();
        }
        head
    }

    #[test]
    fn a_sane_request_id_is_kept_and_any_other_replaced() {
        assert_eq!(request_id(&head(Some(b"abc-1"))), "abc-1");
        for odd in [&b""[..], b"a b", "\u{e9}".as_bytes(), &[b'x'; 129]] {
            let id = request_id(&head(Some(odd)));
            assert_eq!(id.len(), 32, "{odd:?}");
        }
        assert_ne!(request_id(&head(None)), request_id(&head(None)));
    }

    #[test]
    fn an_id_of_our_own_is_hexadecimal() {
        assert_eq!(random_id(0x0123_4567_89ab_cdef), "00000000000000000123456789abcdef");
    }

    #[test]
    fn an_empty_session_key_is_no_key() {
        assert_eq!(session_key(b"  "), None);
        assert_eq!(session_key(b" a ").as_deref(), Some(&b"a"[..]));
    }

    #[test]
    fn a_long_name_is_cut_where_a_character_ends() {
        let long = "é".repeat(500);
        assert!(shown(&long).chars().count() <= MODEL_SHOWN_CHARACTERS_MAX + 1);
    }
}

//! What Weir answers itself: whether it is alive, whether it can serve, what models there are.
//! To add one: a row with `Treatment::Answer` in the table of APIs, and its arm in `answer`.

use bytes::Bytes;
use http::header;
use pingora::http::ResponseHeader;
use pingora_proxy::Session;
use serde_json::json;

use super::Gateway;
use super::context::RequestContext;
use super::inbound::Stop;
use super::outbound::REQUEST_ID;
use super::refusal::{Refusal, send_whole};
use crate::request::Api;

impl Gateway {
    pub(super) async fn answer(
        &self,
        session: &mut Session,
        context: &mut RequestContext,
        api: &'static Api,
        named: Option<String>,
    ) -> Result<(), Stop> {
        let fleet = &context.state.fleet;
        let (status, body) = match api.name {
            "health" | "ping" => (200, Bytes::new()),
            "ready" => self.readiness(context),
            "version" => (200, json_bytes(&json!({"version": env!("CARGO_PKG_VERSION")}))),
            "load" => (200, json_bytes(&json!({"server_load": fleet.in_flight()}))),
            "models" => (200, fleet.models()),
            "model" => {
                let name = named.unwrap_or_default();
                // An engine may call a model by its folder, with a slash in front.
                let card = fleet.model(&name).or_else(|| fleet.model(name.trim_start_matches('/')));
                let Some(card) = card else {
                    let known = fleet.known();
                    return Err(Refusal::UnknownModel { model: name, known }.into());
                };
                (200, card)
            }
            _ => return Err(Refusal::UnknownPath.into()),
        };
        let mut head = ResponseHeader::build(status, Some(4)).map_err(Stop::Broken)?;
        if !body.is_empty() {
            head.insert_header(header::CONTENT_TYPE, "application/json")?;
        }
        head.insert_header(header::CONTENT_LENGTH, body.len())?;
        head.insert_header(REQUEST_ID, context.id())?;
        context.answer.status = status;
        context.answer.bytes = body.len() as u64;
        send_whole(session, head, body).await?;
        Ok(())
    }

    fn readiness(&self, context: &RequestContext) -> (u16, Bytes) {
        let (status, word) = if self.shared.draining() {
            (503, "stopping")
        } else if context.state.fleet.ready() {
            (200, "ready")
        } else {
            (503, "no replica can serve")
        };
        (status, json_bytes(&json!({"status": word})))
    }
}

fn json_bytes(value: &serde_json::Value) -> Bytes {
    Bytes::from(value.to_string())
}

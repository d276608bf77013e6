//! The admin API, on an address of its own: metrics, the fleet, the configuration, reload, drain.
//! Everybody who reaches the address may use it. To add a path: an arm in `answer`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, Response, StatusCode, header};
use pingora::apps::http_app::{HttpServer, ServeHttp};
use pingora::protocols::http::ServerSession;
use pingora::services::listening::Service;
use serde::Serialize;
use serde_json::json;

use crate::clock;
use crate::control::Control;
use crate::fleet::Draining;

/// The text format of Prometheus. Source: Prometheus docs, "Exposition formats".
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How long a reload is waited for.
const RELOAD_MAX: Duration = Duration::from_secs(30);

/// The admin API as a service of Pingora.
pub fn service(control: Arc<Control>) -> Service<HttpServer<Admin>> {
    Service::new("admin".to_owned(), HttpServer::new_app(Admin { control }))
}

/// Answers the admin API's requests.
pub struct Admin {
    control: Arc<Control>,
}

#[async_trait]
impl ServeHttp for Admin {
    async fn response(&self, session: &mut ServerSession) -> Response<Vec<u8>> {
        let head = session.req_header();
        let method = head.method.clone();
        let path = head.uri.path().to_owned();
        let mut response = self.answer(&method, &path).await;
        if method == Method::HEAD {
            response.body_mut().clear();
        }
        response
    }
}

impl Admin {
    async fn answer(&self, method: &Method, path: &str) -> Response<Vec<u8>> {
        let reads = method == Method::GET || method == Method::HEAD;
        match path {
            "/metrics" if reads => self.metrics(),
            "/fleet" if reads => {
                json(StatusCode::OK, &self.control.gateway().state().fleet.snapshot(clock::now()))
            }
            "/config" if reads => json(
                StatusCode::OK,
                &json!({"config": self.control.shown(), "reload": self.control.report()}),
            ),
            "/health" if reads => json(StatusCode::OK, &json!({"status": "alive"})),
            "/ready" if reads => self.ready(),
            "/reload" if method == Method::POST => self.reload().await,
            "/metrics" | "/fleet" | "/config" | "/health" | "/ready" => refused("GET"),
            "/reload" => refused("POST"),
            _ => self.replica(method, path),
        }
    }

    fn metrics(&self) -> Response<Vec<u8>> {
        let text = self.control.shared().metrics.encode();
        whole(StatusCode::OK, METRICS_TYPE, text.into_bytes())
    }

    fn ready(&self) -> Response<Vec<u8>> {
        if self.control.shared().draining() {
            return json(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": "stopping"}));
        }
        if self.control.gateway().state().fleet.ready() {
            return json(StatusCode::OK, &json!({"status": "ready"}));
        }
        json(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": "no replica can serve"}))
    }

    async fn reload(&self) -> Response<Vec<u8>> {
        match tokio::time::timeout(RELOAD_MAX, self.control.reload()).await {
            Ok(Some(report)) if report.taken => json(StatusCode::OK, &report),
            Ok(Some(report)) => json(StatusCode::UNPROCESSABLE_ENTITY, &report),
            Ok(None) | Err(_) => json(
                StatusCode::SERVICE_UNAVAILABLE,
                &json!({"error": "the control plane is busy, try again"}),
            ),
        }
    }

    /// `/replicas/{id}/drain` and `/replicas/{id}/undrain`.
    fn replica(&self, method: &Method, path: &str) -> Response<Vec<u8>> {
        let Some((id, verb)) =
            path.strip_prefix("/replicas/").and_then(|rest| rest.rsplit_once('/'))
        else {
            return json(StatusCode::NOT_FOUND, &json!({"error": "no such path"}));
        };
        let draining = match verb {
            "drain" => Draining::On,
            "undrain" => Draining::Off,
            _ => return json(StatusCode::NOT_FOUND, &json!({"error": "no such path"})),
        };
        if method != Method::POST {
            return refused("POST");
        }
        let fleet = Arc::clone(&self.control.gateway().state().fleet);
        match fleet.drain(&decoded(id), draining) {
            Ok(()) => json(StatusCode::OK, &fleet.snapshot(clock::now())),
            Err(error) => json(StatusCode::NOT_FOUND, &json!({"error": error.to_string()})),
        }
    }
}

/// Undoes percent-encoding; an id may hold slashes and colons.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let pair = after.get(..2).and_then(|pair| std::str::from_utf8(pair).ok());
        match pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn json(status: StatusCode, value: &impl Serialize) -> Response<Vec<u8>> {
    let body = serde_json::to_vec_pretty(value).unwrap_or_default();
    whole(status, "application/json", body)
}

fn refused(allowed: &'static str) -> Response<Vec<u8>> {
    let mut response = json(
        StatusCode::METHOD_NOT_ALLOWED,
        &json!({"error": format!("this path takes {allowed} only")}),
    );
    response.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static(allowed));
    response
}

fn whole(status: StatusCode, kind: &'static str, body: Vec<u8>) -> Response<Vec<u8>> {
    let length = body.len();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    headers.insert(header::CONTENT_LENGTH, header::HeaderValue::from(length));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_in_a_path_is_decoded_once() {
        assert_eq!(decoded("127.0.0.1:8000"), "127.0.0.1:8000");
        assert_eq!(decoded("host%2Fm1"), "host/m1");
        assert_eq!(decoded("100%25"), "100%");
        assert_eq!(decoded("%zz%2"), "%zz%2");
    }
}

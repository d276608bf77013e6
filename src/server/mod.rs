//! Starting and stopping: from a checked configuration to a running process. Pingora's services
//! are put together here; what they do is said elsewhere.

mod drain;
mod front_door;
mod sockets;

use std::sync::Arc;
use std::time::Duration;

use pingora::apps::HttpServerOptions;
use pingora::listeners::tls::TlsSettings;
use pingora::listeners::{ListenerConfig, TcpSocketOptions};
use pingora::protocols::http::v2::server::default_h2_options;
use pingora::server::configuration::ServerConf;
use pingora::server::{RunArgs, Server};
use pingora::services::background::GenBackgroundService;
use pingora::services::listening::Service;
use pingora_proxy::http_proxy;
use tracing::{error, info};

use crate::admin;
use crate::clock;
use crate::config::{Config, ListenOptions};
use crate::control::{self, Certificate, Control, Source};
use crate::proxy::{Door, Gateway, PINGORA_TRIES_MAX, Shared, keepalive};
use crate::telemetry::{self, AccessLog, Metrics};

pub use sockets::settle;

/// Streams one client may have open on one HTTP/2 connection.
const HTTP2_STREAMS_MAX: u32 = 1000;

/// What a client may send on one HTTP/2 stream, and on one connection, before it is read.
const HTTP2_STREAM_WINDOW_BYTES: u32 = 1 << 20;
const HTTP2_CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

/// Each stream costs a client's descriptor and two of a replica's connection.
const DESCRIPTORS_WANTED: u64 = 1 << 20;

/// Threads of the control plane and of the admin API.
const CONTROL_THREADS: usize = 1;

/// Why the process does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A listen address cannot be had.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Which.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// A part cannot be built.
    #[error("{0}")]
    Build(String),
}

/// Runs the proxy until it is told to stop.
///
/// `source` is the file the configuration came from; with one, it is watched.
///
/// # Errors
/// The process cannot start. Once it runs, nothing is an error here.
pub fn run(config: Config, source: Option<Source>) -> Result<(), StartError> {
    raise_descriptor_limit();
    let config = settle(config)?;
    let shared = share(&config)?;
    let state = control::state(&config, None, &shared).map_err(StartError::Build)?;
    let gateway = Arc::new(Gateway::new(state, Arc::clone(&shared)));
    let certificates = certificates(&config)?;
    let shown = certificates.iter().flatten().cloned().collect();
    let control = Control::new(Arc::clone(&gateway), config.clone(), source, shown);

    let mut server = Server::new_with_opt_and_conf(None, server_conf(&config));
    server.bootstrap();
    for (number, listen) in config.listen.iter().enumerate() {
        let door = front_door(&server.configuration, &gateway, listen, &config);
        let mut service = Service::new(format!("proxy {number}"), door);
        let certificate = certificates.get(number).cloned().flatten();
        service.add_listener(listener(listen, certificate)?);
        server.add_service(service);
    }
    if let Some(address) = config.admin.address {
        let mut service = admin::service(Arc::clone(&control));
        service.threads = Some(CONTROL_THREADS);
        service.add_tcp(&address.to_string());
        server.add_service(service);
        info!(%address, "admin API");
    }
    let mut background = GenBackgroundService::new("control".to_owned(), Arc::clone(&control));
    background.threads = Some(CONTROL_THREADS);
    server.add_service(background);
    for listen in &config.listen {
        info!(address = %listen.address, tls = listen.tls.is_some(), "listening");
    }
    let drain =
        drain::Drain { shared, pre_stop: config.server.pre_stop, grace: config.server.grace };
    server.run(RunArgs { shutdown_signal: Box::new(drain) });
    Ok(())
}

fn share(config: &Config) -> Result<Arc<Shared>, StartError> {
    let failed = |error: &dyn std::fmt::Display| StartError::Build(error.to_string());
    let metrics = Metrics::new(clock::date()).map_err(|error| failed(&error))?;
    let access_log = AccessLog::new(&config.telemetry.access_log, Arc::clone(&metrics))
        .map_err(|error| failed(&error))?;
    Ok(Shared::new(metrics, access_log))
}

fn server_conf(config: &Config) -> ServerConf {
    ServerConf {
        threads: config.server.threads.map_or_else(cores, usize::from),
        upstream_keepalive_pool_size: config.server.replica_connections_idle_max as usize,
        max_retries: PINGORA_TRIES_MAX,
        // The drain has waited for what is under way; see drain.rs.
        grace_period_seconds: Some(0),
        graceful_shutdown_timeout_seconds: Some(1),
        ..ServerConf::default()
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn front_door(
    conf: &Arc<ServerConf>,
    gateway: &Arc<Gateway>,
    listen: &ListenOptions,
    config: &Config,
) -> front_door::FrontDoor {
    let mut proxy = http_proxy(conf, Door(Arc::clone(gateway)));
    let mut options = HttpServerOptions::default();
    options.h2c = listen.h2c;
    // Pingora counts how often a connection is used *again*.
    options.keepalive_request_limit =
        config.server.client_requests_max.map(|requests| requests.saturating_sub(1));
    options.h2_idle_timeout = Some(config.proxy.timeouts.client_idle);
    proxy.server_options = Some(options);
    let mut http2 = default_h2_options();
    http2
        .max_concurrent_streams(HTTP2_STREAMS_MAX)
        .initial_window_size(HTTP2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_CONNECTION_WINDOW_BYTES);
    proxy.h2_options = Some(http2);
    let head_max = config.proxy.timeouts.request_head;
    let draining = gateway.shared().watch_draining();
    front_door::FrontDoor::new(Arc::new(proxy), listen.h2c, head_max, draining)
}

/// One for each listener, in their order.
fn certificates(config: &Config) -> Result<Vec<Option<Arc<Certificate>>>, StartError> {
    let read = |listen: &ListenOptions| listen.tls.as_ref().map(Certificate::read).transpose();
    config.listen.iter().map(|listen| read(listen).map_err(StartError::Build)).collect()
}

fn listener(
    listen: &ListenOptions,
    certificate: Option<Arc<Certificate>>,
) -> Result<ListenerConfig, StartError> {
    let mut socket = TcpSocketOptions::default();
    socket.tcp_keepalive = Some(keepalive());
    let address = listen.address.to_string();
    let endpoint = ListenerConfig::tcp(address).tcp_socket_options(socket);
    let Some(certificate) = certificate else { return Ok(endpoint) };
    // The resolver has the files.
    let mut settings = TlsSettings::intermediate("", "")
        .map_err(|error| StartError::Build(format!("TLS on {}: {error}", listen.address)))?;
    settings.set_cert_resolver(certificate);
    settings.enable_h2();
    Ok(endpoint.tls(settings))
}

fn raise_descriptor_limit() {
    match rlimit::increase_nofile_limit(DESCRIPTORS_WANTED) {
        Ok(limit) => info!(limit, "open files"),
        Err(error) => error!(error = %error, "the limit of open files stays as it is"),
    }
}

/// Sets up the log; once per process.
pub fn init_log(options: &telemetry::Options) {
    if let Err(error) = telemetry::init_tracing(&options.log) {
        error!(error = %error, "the log is set up already");
    }
}

/// How long a test or a demo waits for a freed port at the most.
pub(super) const BIND_PATIENCE: Duration = Duration::from_secs(2);

//! The yardstick: a Pingora proxy that does nothing but pass on. What Weir costs on top of it is
//! what Weir itself costs.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use pingora::Result;
use pingora::server::Server;
use pingora::server::configuration::ServerConf;
use pingora::upstreams::peer::HttpPeer;
use pingora_proxy::{ProxyHttp, Session, http_proxy_service};

struct Bare {
    engines: Vec<SocketAddr>,
    next: AtomicUsize,
}

#[async_trait]
impl ProxyHttp for Bare {
    type CTX = ();

    fn new_ctx(&self) {}

    async fn upstream_peer(&self, _: &mut Session, (): &mut ()) -> Result<Box<HttpPeer>> {
        let place = self.next.fetch_add(1, Ordering::Relaxed) % self.engines.len();
        let mut peer = HttpPeer::new(self.engines[place], false, String::new());
        peer.options.idle_timeout = Some(Duration::from_secs(4));
        Ok(Box::new(peer))
    }
}

/// Serves until it is killed.
pub fn run(listen: &str, engines: Vec<SocketAddr>) -> ! {
    let conf = ServerConf {
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        upstream_keepalive_pool_size: 1024,
        ..ServerConf::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let bare = Bare { engines, next: AtomicUsize::new(0) };
    let mut service = http_proxy_service(&server.configuration, bare);
    service.add_tcp(listen);
    server.add_service(service);
    server.run_forever()
}

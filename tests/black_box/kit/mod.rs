//! What the black-box tests are made of: the real binary, upstreams, clients that look at bytes.
//! No promise of Weir is tested here. To add a tool: a file, and its name below.

mod config;
mod engines;
mod http1;
mod http2;
mod http2_upstream;
mod metrics;
mod reply;
mod tls;
mod upstream;
mod ways;
mod weir;

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub use config::{fleet, fleet_of};
pub use engines::{Engine, EngineProcess, be_an_engine, blackhole};
pub use http1::{Raw, Request};
pub use http2::Http2;
pub use http2_upstream::{Frame, Http2Upstream};
pub use reply::{End, Reply, events};
pub use tls::{Certificate, connect as connect_tls, try_connect as try_connect_tls};
pub use upstream::{Act, Framing, Seen, Upstream, answer, answer_with, json, sse, sse_head};
pub use ways::Way;
pub use weir::Weir;

/// The longest a test may take.
const TEST_MAX: Duration = Duration::from_secs(90);

/// What "noticed within 100 ms" is given on a machine that does other things at the same time.
pub const NOTICED_MAX: Duration = Duration::from_secs(1);

/// How long an event that must come is waited for.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Runs one test on a runtime of its own.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // Pinned here, so that a test that is stuck still has its processes and logs when the
        // panic below unwinds.
        tokio::pin!(test);
        tokio::select! {
            () = &mut test => {}
            () = tokio::time::sleep(TEST_MAX) => panic!("the test is stuck"),
        }
    });
    runtime.shutdown_background();
}

/// Waits for something to become true.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    within(PATIENCE, what, &mut look).await
}

/// The same with a limit of its own.
pub async fn within<T>(limit: Duration, what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A future that must end soon.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(done) => done,
        Err(_) => panic!("not within {PATIENCE:?}: {what}"),
    }
}

/// An address where nothing listens, and which the system gives to nobody by itself.
pub fn free_address() -> SocketAddr {
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 18_000;
    static NEXT: OnceLock<AtomicU32> = OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU32::new(std::process::id().wrapping_mul(977) % COUNT));
    for _ in 0..COUNT {
        let port = FIRST + next.fetch_add(1, Ordering::Relaxed) % COUNT;
        let address = SocketAddr::from(([127, 0, 0, 1], u16::try_from(port).unwrap()));
        if TcpListener::bind(address).is_ok() {
            return address;
        }
    }
    panic!("no free port");
}

/// The chat most tests send.
pub fn chat(model: &str, stream: bool) -> String {
    let messages = r#"[{"role":"user","content":"hello"}]"#;
    format!(r#"{{"model":"{model}","messages":{messages},"stream":{stream}}}"#)
}

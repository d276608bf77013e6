//! The server itself: accepts connections, knows all that its requests share, and can be stopped
//! or killed. It speaks HTTP/1.1 byte by byte, as faults must be exact.
//! A server runs on a thread of its own, or on a runtime the caller gives.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use parking_lot::{Mutex, RwLock};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::connection::{Connection, Stop};
use super::driver::Driver;
use super::gate::Gate;
use super::head::date;
use super::knobs::Knobs;
use super::log::{Log, Record};
use super::options::Options;
use super::routes::ROUTES;
use super::{metrics, serve};
use crate::clock;

/// Answers of `/v1/responses` that can be asked for again.
const RESPONSES_MAX: usize = 256;
/// A pause after the system refused a connection (no more descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Where a server listens.
pub enum Listen {
    /// At an address; port 0 takes a free one.
    At(SocketAddr),
    /// With a listener that exists.
    With(std::net::TcpListener),
}

impl From<SocketAddr> for Listen {
    fn from(address: SocketAddr) -> Self {
        Self::At(address)
    }
}

impl From<std::net::TcpListener> for Listen {
    fn from(listener: std::net::TcpListener) -> Self {
        Self::With(listener)
    }
}

/// Names that are served: of models, and of adapters on them.
#[derive(Clone, Debug, Default)]
pub(super) struct Models {
    pub(super) names: Vec<String>,
    /// How many of the names, at the end, are adapters; with their paths.
    pub(super) adapters: Vec<(String, String)>,
}

/// An open connection: how to end it, and whether a request runs on it.
struct Open {
    task: Option<AbortHandle>,
    busy: Arc<AtomicBool>,
}

/// What all connections of one server share.
pub(super) struct Shared {
    pub(super) options: Options,
    pub(super) models: RwLock<Arc<Models>>,
    pub(super) knobs: Knobs,
    pub(super) driver: Arc<Driver>,
    pub(super) log: Arc<Log>,
    /// Canned requests in flight.
    pub(super) canned: Arc<AtomicU64>,
    /// 0 awake; 1, 2 asleep.
    pub(super) sleep_level: AtomicU8,
    pub(super) paused: AtomicBool,
    pub(super) responses: Mutex<VecDeque<(String, String)>>,
    counts: Vec<AtomicU64>,
    accepted: AtomicU64,
    ids: AtomicU64,
    date: Mutex<(u64, Arc<str>)>,
    stopping: AtomicBool,
    killed: Arc<AtomicBool>,
    connections: Mutex<HashMap<u64, Open>>,
}

impl Shared {
    fn new(options: Options, gate: Gate) -> Self {
        Self {
            models: RwLock::new(Arc::new(Models {
                names: options.models.clone(),
                adapters: Vec::new(),
            })),
            knobs: Knobs::new(gate, options.faults.clone()),
            driver: Driver::new(options.engine.clone(), options.speed),
            log: Log::new(options.log_records_max),
            canned: Arc::default(),
            sleep_level: AtomicU8::new(0),
            paused: AtomicBool::new(false),
            responses: Mutex::default(),
            counts: ROUTES.iter().map(|_| AtomicU64::new(0)).collect(),
            accepted: AtomicU64::new(0),
            ids: AtomicU64::new(0),
            date: Mutex::new((0, Arc::from(date(0)))),
            stopping: AtomicBool::new(false),
            killed: Arc::default(),
            connections: Mutex::default(),
            options,
        }
    }

    /// Seconds since 1970.
    pub(super) fn seconds(&self) -> u64 {
        clock::date().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }

    /// The value of a `date` line, for this second.
    pub(super) fn date(&self, seconds: u64) -> Arc<str> {
        let mut cached = self.date.lock();
        if cached.0 != seconds {
            *cached = (seconds, Arc::from(date(seconds)));
        }
        Arc::clone(&cached.1)
    }

    /// An id no other request of this server has.
    pub(super) fn fresh_id(&self) -> u64 {
        let number = self.ids.fetch_add(1, Ordering::Relaxed);
        super::text::mix(self.options.seed, number)
    }

    pub(super) fn count(&self, row: usize) {
        if let Some(count) = self.counts.get(row) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn remember_response(&self, id: &str, body: String) {
        let mut responses = self.responses.lock();
        if responses.len() == RESPONSES_MAX {
            responses.pop_front();
        }
        responses.push_back((id.to_owned(), body));
    }

    pub(super) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    pub(super) fn metrics(&self) -> String {
        let models = Arc::clone(&self.models.read());
        metrics::page(&metrics::Snapshot {
            model: models.names.first().map_or("", String::as_str),
            gauges: self.driver.gauges(),
            canned_running: self.canned.load(Ordering::Relaxed),
            sleep_level: self.sleep_level.load(Ordering::Relaxed),
            adapters: models.adapters.iter().map(|(name, _)| name.clone()).collect(),
            engine: &self.options.engine,
            now: self.seconds(),
        })
    }
}

/// Takes a connection out of the list when its task ends, however it ends.
struct Listed {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.shared.connections.lock().remove(&self.id);
    }
}

async fn accept(shared: Arc<Shared>) {
    while let Ok(listener) = shared.knobs.gate.listener() {
        let Some(listener) = listener else {
            shared.knobs.gate.changed().await;
            continue;
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.knobs.gate.changed() => continue,
        };
        match accepted {
            Ok((stream, _)) => begin(&shared, stream),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

fn begin(shared: &Arc<Shared>, stream: TcpStream) {
    let id = shared.accepted.fetch_add(1, Ordering::Relaxed) + 1;
    let _ = stream.set_nodelay(true);
    let mut connections = shared.connections.lock();
    if connections.len() >= shared.options.connections_max as usize {
        return;
    }
    let busy = Arc::new(AtomicBool::new(false));
    let connection = Connection::new(stream, id, Arc::clone(&shared.killed));
    let listed = Listed { shared: Arc::clone(shared), id };
    let task = converse(connection, listed, Arc::clone(&busy));
    connections.insert(id, Open { task: None, busy });
    let task = tokio::spawn(task).abort_handle();
    if let Some(open) = connections.get_mut(&id) {
        open.task = Some(task);
    }
}

/// Answers the requests of one connection, one after the other.
async fn converse(mut connection: Connection, listed: Listed, busy: Arc<AtomicBool>) {
    let shared = &listed.shared;
    loop {
        let faults = shared.knobs.of_connection();
        if faults.deaf {
            return std::future::pending().await;
        }
        let used = connection.answered > 0;
        let keep_alive = used.then_some(shared.options.keep_alive);
        let patience = faults.idle_close.or(keep_alive);
        drop(faults);
        if !connection.wake(patience).await {
            return;
        }
        busy.store(true, Ordering::Relaxed);
        if let Some(how) = shared.knobs.of_connection().close_on_next.filter(|_| used) {
            connection.end(how).await;
            return;
        }
        match exchange(&mut connection, shared).await {
            Ok(true) if !shared.stopping() => connection.answered += 1,
            Ok(_) => return connection.close().await,
            Err(Stop::Malformed) => return serve::refuse(&mut connection, shared).await,
            Err(Stop::PeerLeft | Stop::Cut) => return,
        }
        busy.store(false, Ordering::Relaxed);
    }
}

async fn exchange(connection: &mut Connection, shared: &Arc<Shared>) -> Result<bool, Stop> {
    let head = connection.head().await?;
    serve::exchange(connection, shared, head).await
}

/// One simulated vLLM server. Dropping it kills it.
pub struct EngineServer {
    shared: Arc<Shared>,
    tasks: Vec<AbortHandle>,
    /// Dropping it ends the server's own thread, if it has one.
    _thread: Option<oneshot::Sender<()>>,
}

impl EngineServer {
    /// Starts a server on a thread of its own.
    pub fn start(options: Options, listen: impl Into<Listen>) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let mut server = Self::start_on(&handle, options, listen)?;
        let (ended, end) = oneshot::channel::<()>();
        std::thread::Builder::new().name("simulated".to_owned()).spawn(move || {
            // Ends when the sender is dropped; what still runs is dropped with the runtime.
            let _ = runtime.block_on(end);
        })?;
        server._thread = Some(ended);
        Ok(server)
    }

    /// Starts a server on a runtime that exists.
    pub fn start_on(
        handle: &Handle,
        options: Options,
        listen: impl Into<Listen>,
    ) -> io::Result<Self> {
        let listener = match listen.into() {
            Listen::At(address) => Gate::bind(address)?,
            Listen::With(listener) => listener,
        };
        let size = |size: Option<bytesize::ByteSize>| size.map(|size| size.as_u64() as usize);
        let buffers = (size(options.receive_buffer), size(options.send_buffer));
        let gate = Gate::open_at(listener, handle.clone(), buffers)?;
        let shared = Arc::new(Shared::new(options, gate));
        let driver = Arc::clone(&shared.driver);
        let tasks = vec![
            handle.spawn(driver.run()).abort_handle(),
            handle.spawn(accept(Arc::clone(&shared))).abort_handle(),
        ];
        Ok(Self { shared, tasks, _thread: None })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.shared.knobs.gate.address
    }

    /// Its address as a URL, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// The faults, to look at and to change.
    pub fn faults(&self) -> &Knobs {
        &self.shared.knobs
    }

    /// The requests that came, the oldest first, as many as are remembered.
    pub fn log(&self) -> Vec<Record> {
        self.shared.log.records()
    }

    /// Forgets the requests that came.
    pub fn clear_log(&self) {
        self.shared.log.clear();
    }

    /// Connections accepted since the start.
    pub fn accepted(&self) -> u64 {
        self.shared.accepted.load(Ordering::Relaxed)
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        self.shared.connections.lock().len()
    }

    /// Requests so far by route; paths without a route count as `other`.
    pub fn requests_by_path(&self) -> BTreeMap<&'static str, u64> {
        let counts = self.shared.counts.iter().map(|count| count.load(Ordering::Relaxed));
        ROUTES.iter().map(|row| row.path).zip(counts).filter(|(_, count)| *count > 0).collect()
    }

    /// Requests to one route so far.
    pub fn requests(&self, path: &str) -> u64 {
        self.requests_by_path().get(path).copied().unwrap_or(0)
    }

    /// Requests in the batch, canned ones included.
    pub fn running(&self) -> u64 {
        let canned = self.shared.canned.load(Ordering::Relaxed);
        canned + self.shared.driver.gauges().running as u64
    }

    /// Requests that wait.
    pub fn waiting(&self) -> u64 {
        self.shared.driver.gauges().waiting as u64
    }

    /// The text of `/metrics`.
    pub fn metrics(&self) -> String {
        self.shared.metrics()
    }

    /// Serves these models from now on.
    pub fn set_models(&self, names: Vec<String>) {
        *self.shared.models.write() = Arc::new(Models { names, adapters: Vec::new() });
    }

    /// The engine stands still; probes are still answered.
    pub fn hang(&self) {
        self.shared.driver.hang();
    }

    /// Ends a hang.
    pub fn unhang(&self) {
        self.shared.driver.unhang();
    }

    /// The engine's process dies: requests get an error inside a 200, or a 500; `/health` a 503.
    pub fn crash(&self) {
        self.shared.driver.die();
    }

    /// Takes no more connections, closes idle ones, and lets what runs run to its end.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.knobs.gate.remove();
        self.end_connections(|busy| !busy);
    }

    /// Dies at once: the listener is closed and every connection reset.
    pub fn kill(&self) {
        self.shared.killed.store(true, Ordering::Relaxed);
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.knobs.gate.remove();
        self.end_connections(|_| true);
        self.tasks.iter().for_each(AbortHandle::abort);
    }

    fn end_connections(&self, which: impl Fn(bool) -> bool) {
        let connections = self.shared.connections.lock();
        let chosen: Vec<_> = connections
            .values()
            .filter(|open| which(open.busy.load(Ordering::Relaxed)))
            .filter_map(|open| open.task.clone())
            .collect();
        drop(connections); // an aborted task may take itself out of the list at once
        chosen.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for EngineServer {
    fn drop(&mut self) {
        self.kill();
    }
}

//! Engines: simulated ones in this process, one in a process of its own that can be killed, and
//! an address where connects hang.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;
use weir::simulated::{Ended, EngineServer, Faults, Options, Record};

use super::until;

/// The environment of a process that is an engine and not a test.
const ENGINE_OF_ITS_OWN: &str = "BLACK_BOX_ENGINE";

/// A simulated engine on a thread of its own.
pub struct Engine {
    /// The server.
    pub server: EngineServer,
}

impl Engine {
    /// A quick one that serves this model.
    pub fn start(model: &str) -> Self {
        Self::with(model, |_| {})
    }

    /// The same with other options.
    pub fn with(model: &str, change: impl FnOnce(&mut Options)) -> Self {
        let mut options = options(model);
        change(&mut options);
        Self::at(SocketAddr::from(([127, 0, 0, 1], 0)), options)
    }

    /// At an address.
    pub fn at(address: SocketAddr, options: Options) -> Self {
        Self { server: EngineServer::start(options, address).unwrap() }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        self.server.url()
    }

    /// From now on with these faults, written as for `x-sim-fault`.
    pub fn faults(&self, text: &str) {
        self.server.faults().set(Faults::parse(text).unwrap()).unwrap();
    }

    /// The requests so far, without probes.
    pub fn requests(&self) -> Vec<Record> {
        let mut records = self.server.log();
        let probes = ["/health", "/is_sleeping", "/v1/models"];
        records.retain(|record| !probes.contains(&record.target.as_str()));
        records
    }

    /// Waits until the peer of the request with this number has left; tells when.
    pub async fn left(&self, number: usize) -> Instant {
        until("the peer of a request leaves", async || {
            let record = self.requests().get(number)?.clone();
            (record.ended == Some(Ended::PeerLeft)).then_some(record.ended_at?)
        })
        .await
    }
}

/// A quick engine.
pub fn options(model: &str) -> Options {
    Options { models: vec![model.to_owned()], speed: 20.0, ..Options::default() }
}

/// An engine in a process of its own.
pub struct EngineProcess {
    /// Where it listens.
    pub address: SocketAddr,
    child: Child,
}

impl EngineProcess {
    /// Starts this very program again, as an engine that serves this model; `engine_test` is the
    /// full name of the test that calls [`be_an_engine`].
    pub fn start(model: &str, engine_test: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([engine_test, "--exact", "--ignored", "--nocapture"])
            .env(ENGINE_OF_ITS_OWN, model)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut process = Self { address: SocketAddr::from(([0, 0, 0, 0], 0)), child };
        let lines = BufReader::new(process.child.stdout.take().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            if let Some((_, address)) = line.split_once("engine listens on ") {
                process.address = address.trim().parse().unwrap();
                return process;
            }
        }
        panic!("the engine does not start");
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a process started by [`EngineProcess::start`]: is an engine until it is killed. In any
/// other: does nothing.
pub fn be_an_engine() {
    let Ok(model) = std::env::var(ENGINE_OF_ITS_OWN) else { return };
    let engine = Engine::with(&model, |_| {});
    println!("engine listens on {}", engine.server.addr());
    // Ends when the test that started it ends, however that comes.
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// An address where a connect is neither taken nor refused.
pub struct Blackhole {
    /// The address.
    pub address: SocketAddr,
    _listener: Socket,
    _queue: Vec<TcpStream>,
}

/// A listener that takes no connection and whose queue is full.
pub async fn blackhole() -> Blackhole {
    const QUEUE_MAX: usize = 64;
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let mut queue = Vec::new();
    while queue.len() < QUEUE_MAX {
        let connect = TcpStream::connect(address);
        match tokio::time::timeout(Duration::from_millis(200), connect).await {
            Ok(stream) => queue.push(stream.unwrap()),
            Err(_) => return Blackhole { address, _listener: socket, _queue: queue },
        }
    }
    panic!("the queue of {address} does not fill up");
}

//! The binary under test: started, asked, signalled, and looked at from outside.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpStream;

use super::config::{defaults, merged};
use super::http1::{Raw, Request};
use super::http2::Http2;
use super::metrics::Metrics;
use super::reply::Reply;
use super::{chat, free_address, until, within};

/// How long the ledger may take to read zero after the last client has gone.
const REST_MAX: Duration = Duration::from_secs(3);

/// How many lines of the log a failed test shows.
const LOG_LINES_SHOWN: usize = 60;

/// A running Weir.
pub struct Weir {
    /// Where clients connect.
    pub address: SocketAddr,
    /// Where the admin API is.
    pub admin: SocketAddr,
    child: Child,
    log: Arc<Mutex<String>>,
    folder: TempDir,
}

impl Weir {
    /// Starts with these sections on top of the test's defaults, and waits until it can serve.
    pub async fn start(sections: &str) -> Self {
        let mut weir = Self::start_live(sections).await;
        weir.ready().await;
        weir
    }

    /// The same, but waits only until it is alive.
    pub async fn start_live(sections: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::start_in(folder, sections).await
    }

    /// The same for a config that names the address to listen on itself.
    pub async fn start_live_at(sections: &str, address: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::live(Self::spawn(folder, sections, address, free_address())).await
    }

    /// The same with the config in this folder, too.
    pub async fn start_live_in(folder: TempDir, sections: &str, address: SocketAddr) -> Self {
        Self::live(Self::spawn(folder, sections, address, free_address())).await
    }

    /// The same with the config in this folder.
    pub async fn start_in(folder: TempDir, sections: &str) -> Self {
        Self::live(Self::spawn(folder, sections, free_address(), free_address())).await
    }

    async fn live(mut weir: Self) -> Self {
        until("weir is alive", async || {
            if let Some(status) = weir.child.try_wait().unwrap() {
                panic!("weir ended with {status}:\n{}", weir.log());
            }
            TcpStream::connect(weir.admin).await.ok()?;
            TcpStream::connect(weir.address).await.ok()?;
            (weir.get("/health").await.status == 200).then_some(())
        })
        .await;
        weir
    }

    fn spawn(folder: TempDir, sections: &str, address: SocketAddr, admin: SocketAddr) -> Self {
        let path = folder.path().join("weir.yaml");
        std::fs::write(&path, merged(defaults(address, admin), sections)).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_weir"))
            .arg("--config")
            .arg(&path)
            .current_dir(folder.path())
            .env("ENGINES_KEY", "k-engines")
            .env("ENGINE_6_KEY", "k-engine-6")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        follow(child.stdout.take().unwrap(), Arc::clone(&log));
        follow(child.stderr.take().unwrap(), Arc::clone(&log));
        Self { address, admin, child, log, folder }
    }

    /// Waits until `/ready` says yes.
    pub async fn ready(&mut self) {
        let address = self.address;
        until("weir is ready", async || {
            (Request::get("/ready").send(address).await.status == 200).then_some(())
        })
        .await;
    }

    /// The path of the config file.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("weir.yaml")
    }

    /// The folder of the config file.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The whole text of a config with these sections, for this process.
    pub fn config(&self, sections: &str) -> String {
        merged(defaults(self.address, self.admin), sections)
    }

    /// Writes another config into the file, in one step; nobody is told.
    pub fn write_config(&self, sections: &str) {
        let beside = self.folder.path().join(".weir.yaml.new");
        std::fs::write(&beside, self.config(sections)).unwrap();
        std::fs::rename(beside, self.path()).unwrap();
    }

    /// Writes another config and has it taken over.
    pub async fn reload(&self, sections: &str) -> Reply {
        self.write_config(sections);
        self.admin_post("/reload").await
    }

    /// A GET by a client.
    pub async fn get(&self, target: &str) -> Reply {
        Request::get(target).send(self.address).await
    }

    /// A POST of JSON by a client.
    pub async fn post(&self, target: &str, body: impl AsRef<[u8]>) -> Reply {
        Request::post(target, body).send(self.address).await
    }

    /// A chat by a client.
    pub async fn chat(&self, model: &str, stream: bool) -> Reply {
        self.post("/v1/chat/completions", chat(model, stream)).await
    }

    /// A client's connection.
    pub async fn connect(&self) -> Raw {
        Raw::connect(self.address).await
    }

    /// A client's connection that speaks HTTP/2.
    pub async fn connect_http2(&self) -> Http2 {
        Http2::connect(self.address).await
    }

    /// A GET by the operator.
    pub async fn admin_get(&self, target: &str) -> Reply {
        Request::get(target).send(self.admin).await
    }

    /// A POST by the operator.
    pub async fn admin_post(&self, target: &str) -> Reply {
        Request::new("POST", target).body("").send(self.admin).await
    }

    /// What `/fleet` says of a replica.
    pub async fn replica(&self, id: &str) -> Option<Value> {
        let fleet = self.admin_get("/fleet").await.expect(200).json();
        let replicas = fleet["replicas"].as_array().expect("a list").clone();
        replicas.into_iter().find(|replica| replica["id"] == id)
    }

    /// Waits until a replica stands like this, as in `up`, `down`, `ejected`, and until that is
    /// heeded: who is up can serve, who is down cannot.
    pub async fn wait_for_state(&self, id: &str, state: &str) {
        until(&format!("{id} is {state}"), async || {
            let fleet = self.admin_get("/fleet").await.expect(200).json();
            let replicas = fleet["replicas"].as_array()?;
            let stands = |id: &Value| {
                let replica = replicas.iter().find(|replica| replica["id"] == *id)?;
                replica["state"].as_str()
            };
            let heeded = fleet["models"].as_array()?.iter().all(|model| {
                let own = model["replicas"].as_array().map_or(&[][..], Vec::as_slice);
                let count = |state| own.iter().filter(|id| stands(id) == Some(state)).count();
                let live = model["live"].as_u64().unwrap_or_default() as usize;
                (count("up")..=own.len() - count("down")).contains(&live)
            });
            (heeded && stands(&Value::from(id)) == Some(state)).then_some(())
        })
        .await;
    }

    /// One scrape.
    pub async fn metrics(&self) -> Metrics {
        Metrics::read(self.admin_get("/metrics").await.expect(200).text())
    }

    /// Sends a signal, as in `TERM`.
    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        let status = Command::new("kill").args([format!("-{name}"), id]).status().unwrap();
        assert!(status.success(), "kill -{name}");
    }

    /// Waits for the end of the process.
    pub async fn ended(&mut self, limit: Duration) -> ExitStatus {
        let child = &mut self.child;
        within(limit, "weir ends", async || child.try_wait().unwrap()).await
    }

    /// Whether the process runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// All it has written so far.
    pub fn log(&self) -> String {
        self.log.lock().clone()
    }

    /// The access lines so far.
    pub fn access_lines(&self) -> Vec<Value> {
        let log = self.log();
        let lines = log.lines().filter(|line| line.starts_with('{'));
        lines.map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
    }

    /// Waits for the access line of the request with this id.
    pub async fn access_line(&self, id: &str) -> Value {
        until(&format!("the access line of {id}"), async || {
            self.access_lines().into_iter().find(|line| line["id"] == id)
        })
        .await
    }

    /// Bytes of memory it holds.
    pub fn memory(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        kib * 1024
    }

    /// Descriptors it holds.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Threads it has.
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap().count()
    }

    /// Everything was given back and nothing broke; to be asked after every fault.
    pub async fn assert_at_rest(&mut self) {
        assert!(self.is_running(), "weir ended:\n{}", self.log());
        let mut unfinished = Vec::new();
        let began = std::time::Instant::now();
        loop {
            let now = self.metrics().await.unfinished();
            if now.is_empty() {
                break;
            }
            unfinished = now;
            assert!(began.elapsed() < REST_MAX, "not given back: {unfinished:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let log = self.log();
        let panicked = log.lines().find(|line| line.contains("panicked"));
        assert_eq!(panicked, None, "{unfinished:?}");
    }
}

impl Drop for Weir {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let from = lines.len().saturating_sub(LOG_LINES_SHOWN);
            println!("--- the end of weir's log ---\n{}\n---", lines[from..].join("\n"));
        }
    }
}

fn follow(pipe: impl std::io::Read + Send + 'static, log: Arc<Mutex<String>>) {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n') {
            let Ok(line) = line else { return };
            let mut log = log.lock();
            log.push_str(&String::from_utf8_lossy(&line));
            log.push('\n');
        }
    });
}

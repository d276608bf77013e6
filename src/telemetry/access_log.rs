//! The access log: lines go through a bounded queue to one thread that formats and writes them.
//! A request never waits for it: when the queue is full the line is dropped and counted.
//! What a line says is in `line.rs`. To add a destination: a case in `open`.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::line::AccessLine;
use super::metrics::Metrics;
use super::options::{AccessLogFormat, AccessLogOptions};
use super::{Result, TelemetryError};

/// How long the writer rests between two looks at the queue while requests come. It is not woken
/// by them, so that a request pays for a push and not for waking a thread.
const REST: Duration = Duration::from_millis(10);
/// How many rests without a line before the writer goes to sleep until the next one wakes it.
const IDLE_RESTS: u32 = 100;
/// How long the end of the process may wait for the last lines; a reader that is stuck at the
/// other end of a pipe must not keep it alive.
const LAST_LINES_MAX: Duration = Duration::from_secs(1);
/// Bytes gathered before they are written.
const WRITE_BYTES: usize = 64 * 1024;

/// The access log of the process. Dropping it writes what is queued, waiting a second at most.
#[derive(Debug)]
pub struct AccessLog {
    sender: Option<SyncSender<AccessLine>>,
    writer: Option<JoinHandle<()>>,
    metrics: Arc<Metrics>,
    client_address: bool,
}

impl AccessLog {
    /// Opens the destination and starts the writer; with format `off`, neither.
    pub fn new(options: &AccessLogOptions, metrics: Arc<Metrics>) -> Result<Self> {
        if options.format == AccessLogFormat::Off {
            return Ok(Self { sender: None, writer: None, metrics, client_address: false });
        }
        let out = open(&options.path)?;
        Self::with_writer(options, metrics, out)
    }

    fn with_writer(
        options: &AccessLogOptions,
        metrics: Arc<Metrics>,
        out: Box<dyn Write + Send>,
    ) -> Result<Self> {
        let (sender, receiver) = sync_channel(options.queue_max.max(1));
        let format = options.format;
        let counts = Arc::clone(&metrics);
        let writer = thread::Builder::new()
            .name("access-log".to_owned())
            .spawn(move || {
                let out = BufWriter::with_capacity(WRITE_BYTES, out);
                let text = Vec::new();
                Writer { receiver, format, out, text, metrics: counts, broken: false }.run();
            })
            .map_err(|source| failed(&options.path, source))?;
        let client_address = options.client_address;
        Ok(Self { sender: Some(sender), writer: Some(writer), metrics, client_address })
    }

    /// Whether anybody reads lines; when not, none need be filled.
    pub fn is_on(&self) -> bool {
        self.sender.is_some()
    }

    /// Queues a line, or drops and counts it when the queue is full. Never waits.
    pub fn tell(&self, mut line: AccessLine) {
        let Some(sender) = &self.sender else { return };
        if !self.client_address {
            line.client = None;
        }
        if sender.try_send(line).is_err() {
            self.metrics.log_dropped().inc();
        }
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        drop(self.sender.take());
        let Some(writer) = self.writer.take() else { return };
        let mut left = LAST_LINES_MAX;
        while !writer.is_finished() && !left.is_zero() {
            thread::sleep(REST);
            left = left.saturating_sub(REST);
        }
        if writer.is_finished() {
            // An error says that the writer panicked; it has been told by then.
            let _ = writer.join();
        }
    }
}

fn failed(path: &Path, source: io::Error) -> TelemetryError {
    TelemetryError::AccessLog { path: path.display().to_string(), source }
}

fn open(path: &Path) -> Result<Box<dyn Write + Send>> {
    match path.to_str() {
        Some("stdout") => Ok(Box::new(io::stdout())),
        Some("stderr") => Ok(Box::new(io::stderr())),
        _ => match OpenOptions::new().create(true).append(true).open(path) {
            Ok(file) => Ok(Box::new(file)),
            Err(source) => Err(failed(path, source)),
        },
    }
}

/// The thread that writes.
struct Writer {
    receiver: Receiver<AccessLine>,
    format: AccessLogFormat,
    out: BufWriter<Box<dyn Write + Send>>,
    /// The line being made: a line enters `out` whole or not at all.
    text: Vec<u8>,
    metrics: Arc<Metrics>,
    /// Whether the last write failed: told once, not once per line.
    broken: bool,
}

impl Writer {
    fn run(mut self) {
        let mut rests = 0;
        loop {
            let next = match self.receiver.try_recv() {
                Err(TryRecvError::Empty) if rests < IDLE_RESTS => {
                    self.flush();
                    rests += 1;
                    thread::sleep(REST);
                    continue;
                }
                Err(TryRecvError::Empty) => self.receiver.recv().ok(),
                other => other.ok(),
            };
            let Some(line) = next else { break };
            rests = 0;
            self.text.clear();
            let made = line.write(self.format, &mut self.text);
            let written = made.and_then(|()| self.out.write_all(&self.text));
            self.note(written);
        }
        self.flush();
    }

    fn flush(&mut self) {
        if self.out.buffer().is_empty() {
            return;
        }
        let flushed = self.out.flush();
        self.note(flushed);
    }

    fn note(&mut self, result: io::Result<()>) {
        match result {
            Ok(()) => self.broken = false,
            Err(error) => {
                self.metrics.log_dropped().inc();
                if !std::mem::replace(&mut self.broken, true) {
                    tracing::warn!(%error, "access log cannot be written");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::SystemTime;

    use super::super::line::tests::{line, written};
    use super::*;

    /// A destination that can be held shut, and hands on what it got.
    struct Gate {
        open: Receiver<()>,
        held: bool,
        told: std::sync::mpsc::Sender<Vec<u8>>,
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if std::mem::replace(&mut self.held, false) {
                let _ = self.open.recv();
            }
            let _ = self.told.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::Error::from(io::ErrorKind::StorageFull))
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn metrics() -> Arc<Metrics> {
        Metrics::new(SystemTime::UNIX_EPOCH).unwrap()
    }

    #[test]
    fn lines_are_written_in_order_and_none_is_lost_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.log");
        let options = AccessLogOptions { path: path.clone(), ..AccessLogOptions::default() };
        let log = AccessLog::new(&options, metrics()).unwrap();
        assert!(log.is_on());
        for status in 0..500 {
            log.tell(AccessLine { status, ..line() });
        }
        drop(log);
        let text = std::fs::read_to_string(path).unwrap();
        let expected: String = (0..500)
            .map(|status| written(&AccessLine { status, ..line() }, AccessLogFormat::Text))
            .collect();
        assert_eq!(text, expected);
    }

    #[test]
    fn a_line_is_flushed_when_no_other_follows() {
        let (told, hears) = channel();
        let (_keep, open) = channel();
        let gate = Gate { open, held: false, told };
        let options = AccessLogOptions::default();
        let log = AccessLog::with_writer(&options, metrics(), Box::new(gate)).unwrap();
        log.tell(line());
        let got = hears.recv_timeout(Duration::from_secs(5)).unwrap();
        assert_eq!(got, written(&line(), AccessLogFormat::Text).into_bytes());
    }

    #[test]
    fn a_full_queue_drops_and_counts_and_never_waits() {
        let metrics = metrics();
        let (told, hears) = channel();
        let (let_go, open) = channel();
        let gate = Gate { open, held: true, told };
        let options = AccessLogOptions { queue_max: 2, ..AccessLogOptions::default() };
        let log = AccessLog::with_writer(&options, Arc::clone(&metrics), Box::new(gate)).unwrap();
        for _ in 0..5000 {
            log.tell(line());
        }
        let dropped = metrics.log_dropped().get();
        assert!(dropped > 0);
        let_go.send(()).unwrap();
        drop(log);
        let bytes: Vec<u8> = hears.try_iter().flatten().collect();
        let lines = String::from_utf8(bytes).unwrap().lines().count();
        assert_eq!(lines as u64 + dropped, 5000, "each line is written or counted");
    }

    #[test]
    fn a_full_disk_is_counted_and_the_log_goes_on() {
        let metrics = metrics();
        let options = AccessLogOptions::default();
        let log = AccessLog::with_writer(&options, Arc::clone(&metrics), Box::new(Full)).unwrap();
        log.tell(line());
        drop(log);
        assert!(metrics.log_dropped().get() > 0);
    }

    #[test]
    fn off_opens_nothing() {
        let options = AccessLogOptions {
            format: AccessLogFormat::Off,
            path: "/no/such/folder/access.log".into(),
            ..AccessLogOptions::default()
        };
        let log = AccessLog::new(&options, metrics()).unwrap();
        assert!(!log.is_on());
        log.tell(line());
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named() {
        let path = "/no/such/folder/access.log";
        let options = AccessLogOptions { path: path.into(), ..AccessLogOptions::default() };
        let error = AccessLog::new(&options, metrics()).unwrap_err();
        assert_eq!(error.to_string(), format!("access log `{path}`"));
    }

    #[test]
    fn the_client_stays_unnamed_if_the_operator_wants_so() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("access.log");
        let options = AccessLogOptions {
            path: path.clone(),
            client_address: false,
            ..AccessLogOptions::default()
        };
        let log = AccessLog::new(&options, metrics()).unwrap();
        log.tell(line());
        drop(log);
        assert!(!std::fs::read_to_string(path).unwrap().contains("192.0.2.7"));
    }
}

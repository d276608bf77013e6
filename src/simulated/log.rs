//! What came to a simulated server, for tests to look at: a bounded list of requests, the oldest
//! thrown away, and counts that are not bounded by it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::clock;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The whole answer was written.
    Finished,
    /// The peer left before that; noticed at `Record::ended_at`.
    PeerLeft,
    /// A fault that was asked for ended it.
    Cut,
    /// The server was killed.
    Aborted,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Record {
    /// Target of the request line.
    pub target: String,
    /// Its `X-Request-Id`.
    pub request_id: Option<String>,
    /// Number of the connection it came on, from 1.
    pub connection: u64,
    /// When its head was read.
    pub started_at: Instant,
    /// Bytes of its body, as far as they were read.
    pub body_bytes: u64,
    /// Status of the answer; 0 before there is one.
    pub status: u16,
    /// How it ended; `None` while it runs.
    pub ended: Option<Ended>,
    /// When it ended.
    pub ended_at: Option<Instant>,
}

#[derive(Debug, Default)]
struct Records {
    /// Number of the first record still kept.
    first: u64,
    kept: VecDeque<Record>,
}

/// The list.
#[derive(Debug)]
pub(super) struct Log {
    records_max: usize,
    records: Mutex<Records>,
}

impl Log {
    pub(super) fn new(records_max: u32) -> Arc<Self> {
        Arc::new(Self { records_max: records_max as usize, records: Mutex::default() })
    }

    /// All records still kept, the oldest first.
    pub(super) fn records(&self) -> Vec<Record> {
        self.records.lock().kept.iter().cloned().collect()
    }

    pub(super) fn clear(&self) {
        let mut records = self.records.lock();
        records.first += records.kept.len() as u64;
        records.kept.clear();
    }

    /// Begins a record; it ends as `Aborted` if it is dropped without another word.
    pub(super) fn begin(self: &Arc<Self>, record: impl FnOnce() -> Record) -> Recording {
        if self.records_max == 0 {
            return Recording { log: None, number: 0, ended: Ended::Aborted };
        }
        let record = record();
        let mut records = self.records.lock();
        if records.kept.len() == self.records_max {
            records.kept.pop_front();
            records.first += 1;
        }
        let number = records.first + records.kept.len() as u64;
        records.kept.push_back(record);
        drop(records);
        Recording { log: Some(Arc::clone(self)), number, ended: Ended::Aborted }
    }
}

/// A record being written.
#[derive(Debug)]
pub(super) struct Recording {
    log: Option<Arc<Log>>,
    number: u64,
    ended: Ended,
}

impl Recording {
    pub(super) fn body(&self, bytes: u64) {
        self.write(|record| record.body_bytes = bytes);
    }

    pub(super) fn status(&self, status: u16) {
        self.write(|record| record.status = status);
    }

    pub(super) fn end(mut self, ended: Ended) {
        self.ended = ended;
    }

    fn write(&self, write: impl FnOnce(&mut Record)) {
        let Some(log) = &self.log else { return };
        let mut records = log.records.lock();
        let index = self.number.checked_sub(records.first);
        let record = index.and_then(|index| records.kept.get_mut(index as usize));
        if let Some(record) = record {
            write(record);
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let ended = self.ended;
        self.write(|record| {
            record.ended = Some(ended);
            record.ended_at = Some(clock::now());
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(target: &str) -> Record {
        Record {
            target: target.to_owned(),
            request_id: None,
            connection: 1,
            started_at: clock::now(),
            body_bytes: 0,
            status: 0,
            ended: None,
            ended_at: None,
        }
    }

    #[test]
    fn only_so_many_records_are_kept_and_each_gets_its_own_end() {
        let log = Log::new(2);
        let first = log.begin(|| record("/1"));
        let second = log.begin(|| record("/2"));
        let third = log.begin(|| record("/3"));
        first.end(Ended::PeerLeft);
        second.end(Ended::Finished);
        drop(third);
        let ends: Vec<_> = log.records().into_iter().map(|r| (r.target, r.ended)).collect();
        assert_eq!(
            ends,
            [("/2".to_owned(), Some(Ended::Finished)), ("/3".to_owned(), Some(Ended::Aborted))]
        );
        log.clear();
        log.begin(|| record("/4")).end(Ended::Finished);
        assert_eq!(log.records().len(), 1);
    }
}

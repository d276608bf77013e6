//! The faults of a running server, settable from any thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::RwLock;

use super::faults::Faults;
use super::gate::Gate;

/// The present faults of one server. A change counts from the next request on.
pub struct Knobs {
    faults: RwLock<Arc<Faults>>,
    /// Whether any fault is set; spares the busy path the lock.
    active: AtomicBool,
    /// Requests still to be hit, if the faults have a count.
    left: AtomicU32,
    healthy: Arc<Faults>,
    pub(super) gate: Gate,
}

impl Knobs {
    pub(super) fn new(gate: Gate, faults: Faults) -> Self {
        let knobs = Self {
            faults: RwLock::default(),
            active: AtomicBool::new(false),
            left: AtomicU32::new(0),
            healthy: Arc::default(),
            gate,
        };
        // The gate is open already, so nothing here can go wrong.
        let _ = knobs.set(faults);
        knobs
    }

    /// The present faults.
    pub fn get(&self) -> Faults {
        Faults::clone(&self.faults.read())
    }

    /// Replaces all faults. An error only if the listener cannot be opened again.
    pub fn set(&self, faults: Faults) -> io::Result<()> {
        let refuse = faults.refuse;
        self.left.store(faults.count.unwrap_or(u32::MAX), Ordering::Relaxed);
        self.active.store(faults != Faults::default(), Ordering::Relaxed);
        *self.faults.write() = Arc::new(faults);
        if refuse {
            self.gate.shut();
            return Ok(());
        }
        self.gate.open()
    }

    /// Changes some faults.
    pub fn update(&self, change: impl FnOnce(&mut Faults)) -> io::Result<()> {
        let mut faults = self.get();
        change(&mut faults);
        self.set(faults)
    }

    /// Heals the server.
    pub fn clear(&self) -> io::Result<()> {
        self.set(Faults::default())
    }

    pub(super) fn active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Faults that concern connections, whatever is asked on them.
    pub(super) fn of_connection(&self) -> Arc<Faults> {
        if self.active() { Arc::clone(&self.faults.read()) } else { Arc::clone(&self.healthy) }
    }

    /// The faults of one request: the server's, if they hit it, and its own on top.
    pub(super) fn of_request(
        &self,
        path: &str,
        header: Option<&str>,
    ) -> Result<Arc<Faults>, String> {
        let mut faults = self.of_connection();
        if self.active() && !(faults.hits(path) && self.take_one(&faults)) {
            faults = Arc::clone(&self.healthy);
        }
        match header {
            Some(text) => faults.with(text).map(Arc::new),
            None => Ok(faults),
        }
    }

    fn take_one(&self, faults: &Faults) -> bool {
        let take = |left: u32| left.checked_sub(1);
        let order = Ordering::Relaxed;
        faults.count.is_none() || self.left.fetch_update(order, order, take).is_ok()
    }
}

//! The right to use a replica for one attempt. Taken in the same step as the choice, given back by
//! being dropped, whatever ended the attempt. To act on an outcome, extend [`Lease::report`].

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use pingora::upstreams::peer::HttpPeer;
use tracing::{info, warn};

use super::breaker::{Breaker, Change, Outcome, Ticket};
use super::replica::Replica;
use crate::clock;
use crate::telemetry::{BreakerLabel, ReplicaMetrics};

/// One attempt on one replica.
#[derive(Debug)]
pub struct Lease {
    replica: Arc<Replica>,
    address: SocketAddr,
    series: Arc<ReplicaMetrics>,
    /// Which attempt this is to the breaker; gone once the outcome was told.
    ticket: Mutex<Option<Ticket>>,
}

impl Lease {
    /// Counts the attempt, and takes the breaker's trial if one is due. To be called in the same
    /// step as the choice.
    pub(super) fn new(
        replica: Arc<Replica>,
        address: SocketAddr,
        series: Arc<ReplicaMetrics>,
        now: Instant,
    ) -> Self {
        let state = replica.state();
        state.take();
        let ticket = state.breaker().enter(now);
        Self { address, series, ticket: Mutex::new(Some(ticket)), replica }
    }

    /// The replica.
    pub fn replica(&self) -> &Arc<Replica> {
        &self.replica
    }

    /// Where the replica was when it was chosen.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How to connect, as traffic and probes do; time limits are the caller's to set.
    pub fn peer(&self) -> HttpPeer {
        self.replica.peer(self.address)
    }

    /// The counters of this model on this replica.
    pub fn metrics(&self) -> &Arc<ReplicaMetrics> {
        &self.series
    }

    /// A new connection to it stands, and took so long to make.
    pub fn connected(&self, took: std::time::Duration) {
        let state = self.replica.state();
        state.reached();
        state.series().connected(took);
    }

    /// Bytes came from the replica just now. One atomic store: may be called for every chunk.
    pub fn alive(&self, now: Instant) {
        self.replica.state().seen_alive(now);
    }

    /// The head of a good answer (2xx to 4xx but 429) came. A replica on trial serves again from
    /// here on, however long the stream is.
    pub fn answering(&self, now: Instant) {
        self.alive(now);
        if !self.replica.state().tripped() {
            return;
        }
        if let Some(ticket) = self.ticket.lock().as_mut() {
            self.tell(|breaker| breaker.answering(ticket, now));
        }
    }

    /// How the attempt ended; only the first call counts, and a lease that is dropped without one
    /// counts as `ClientLeft`. `dice` is fresh randomness, by which many Weirs that eject a replica
    /// do not all come back to it at the same moment.
    pub fn report(&self, outcome: Outcome, now: Instant, dice: u64) {
        let Some(ticket) = self.ticket.lock().take() else { return };
        let state = self.replica.state();
        match outcome {
            Outcome::Answered | Outcome::Backpressure { .. } | Outcome::ServerError => {
                state.seen_alive(now);
            }
            Outcome::ConnectFailed if state.unreachable(self.address) => self.replica.wake().wake(),
            _ => {}
        }
        self.tell(|breaker| breaker.record(ticket, outcome, now, dice));
    }

    fn tell(&self, news: impl FnOnce(&mut Breaker) -> Option<Change>) {
        let state = self.replica.state();
        let id = self.replica.id();
        // The lock is let go before anything is written.
        let change = news(&mut state.breaker());
        match change {
            None => {}
            Some(Change::Opened { cause, failures, open_for }) => {
                warn!(replica = %id, %cause, failures, ?open_for, "replica ejected");
                state.series().breaker(BreakerLabel::Open);
            }
            Some(Change::Closed) => {
                info!(replica = %id, "replica serves again");
                state.series().breaker(BreakerLabel::Closed);
            }
        }
    }
}

impl Deref for Lease {
    type Target = Replica;

    fn deref(&self) -> &Replica {
        &self.replica
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let state = self.replica.state();
        if let Some(ticket) = self.ticket.get_mut().take() {
            let _ = state.breaker().record(ticket, Outcome::ClientLeft, clock::now(), 0);
        }
        state.give_back();
    }
}

//! Replicas whose URL holds a name: looked up again and again, beside the traffic. The address in
//! use stays while the name still leads to it; when nobody answers there the next one is taken; a
//! failed look-up changes nothing. Nothing here decides who is well.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pingora::Result;
use pingora_load_balancing::Backend;
use pingora_load_balancing::discovery::ServiceDiscovery;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use crate::fleet::options::DnsOptions;
use crate::fleet::replica::Replica;
use crate::fleet::url::Host;

/// Look-ups under way at one time, in the whole process; each may hold a thread.
const LOOKUPS_MAX: usize = 64;

/// Addresses of one name that are kept.
const ADDRESSES_MAX: usize = 64;

/// The wait before a name that never resolved is tried again, at first; it doubles up to the usual
/// refresh.
const RETRY_MIN: Duration = Duration::from_millis(250);

/// The replicas of the config that have a name in their URL.
pub(super) struct Dns(Vec<Arc<Replica>>);

impl Dns {
    /// Takes its own out of `replicas`.
    pub(super) fn new(replicas: &[Arc<Replica>]) -> Self {
        let named = |replica: &&Arc<Replica>| matches!(replica.url().host(), Host::Name(_));
        Self(replicas.iter().filter(named).cloned().collect())
    }
}

#[async_trait]
impl ServiceDiscovery for Dns {
    async fn discover(&self) -> Result<(BTreeSet<Backend>, HashMap<u64, bool>)> {
        Ok(super::yielded(&self.0))
    }
}

/// How look-ups are made, and the room for them.
#[derive(Clone)]
pub(in crate::fleet) struct Lookups {
    room: Arc<Semaphore>,
}

impl Lookups {
    pub(in crate::fleet) fn new() -> Self {
        Self { room: Arc::new(Semaphore::new(LOOKUPS_MAX)) }
    }

    /// A look-up that goes on until it ends, as the system's resolver cannot be stopped; it keeps
    /// its place that long.
    fn begin(&self, name: String, port: u16) -> JoinHandle<io::Result<Vec<SocketAddr>>> {
        let room = Arc::clone(&self.room);
        tokio::spawn(async move {
            let _place = room.acquire_owned().await.map_err(io::Error::other)?;
            let found = tokio::net::lookup_host((name.as_str(), port)).await?;
            Ok(found.take(ADDRESSES_MAX).collect())
        })
    }
}

/// Keeps the address of a replica up to date, for ever. Ends at once if its URL holds an address.
pub(in crate::fleet) async fn follow(replica: &Replica, options: &DnsOptions, lookups: &Lookups) {
    let Host::Name(name) = replica.url().host() else { return };
    let port = replica.url().port();
    let mut pause = RETRY_MIN;
    let mut running = None;
    loop {
        let lookup = running.get_or_insert_with(|| lookups.begin(name.clone(), port));
        let found = match tokio::time::timeout(options.timeout, &mut *lookup).await {
            // Still running: the next round waits for the same one, and starts no second.
            Err(_) => Err(format!("`{name}` was not found within {:?}", options.timeout)),
            Ok(done) => {
                running = None;
                flatten(name, done)
            }
        };
        note(replica, found);
        pause = match replica.address() {
            Some(_) => options.refresh,
            None => (pause * 2).min(options.refresh),
        };
        tokio::time::sleep(pause).await;
    }
}

fn flatten(
    name: &str,
    done: std::result::Result<io::Result<Vec<SocketAddr>>, tokio::task::JoinError>,
) -> std::result::Result<Vec<SocketAddr>, String> {
    match done {
        Ok(Ok(found)) if found.is_empty() => Err(format!("`{name}` has no address")),
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(format!("`{name}`: {error}")),
        Err(error) => Err(format!("`{name}`: {error}")),
    }
}

fn note(replica: &Replica, found: std::result::Result<Vec<SocketAddr>, String>) {
    let state = replica.state();
    match found {
        Ok(found) => {
            if state.resolved(found) {
                let address = state.address();
                info!(replica = %replica.id(), ?address, "replica has a new address");
                replica.wake().wake();
            }
        }
        Err(trouble) => {
            if state.unresolved(trouble.clone()) {
                let kept = state.address();
                warn!(replica = %replica.id(), ?kept, trouble, "replica name does not resolve");
            }
        }
    }
}

//! Where replicas are found: each source implements Pingora's `ServiceDiscovery` and yields one
//! `Backend` for each of its replicas that has an address.
//!
//! Pingora knows a backend by its address and weight alone. The weight carries the replica's
//! number in the config, so that two replicas behind one address, under two path prefixes, stay
//! two; the share of the traffic is Weir's own business and is kept in the replica.
//!
//! A source must answer at once from what it knows: `discover` is called whenever anything about
//! the fleet changed. What takes time, such as a look-up, runs beside it for each replica.
//! To add a source: a file here, and its line in [`sources`].

mod dns;
mod fixed;

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use async_trait::async_trait;
use http::Extensions;
use pingora::Result;
use pingora::protocols::l4::socket::SocketAddr as PeerAddress;
use pingora_load_balancing::Backend;
use pingora_load_balancing::discovery::ServiceDiscovery;

use super::replica::Replica;
pub(super) use dns::{Lookups, follow};

type Source = Box<dyn ServiceDiscovery + Send + Sync>;

/// Several sources as one.
pub(super) struct Sources(Vec<Source>);

/// The sources that the URLs of these replicas ask for.
pub(super) fn sources(replicas: &[Arc<Replica>]) -> Sources {
    Sources(vec![
        Box::new(fixed::Fixed::new(replicas)) as Source,
        Box::new(dns::Dns::new(replicas)) as Source,
    ])
}

#[async_trait]
impl ServiceDiscovery for Sources {
    async fn discover(&self) -> Result<(BTreeSet<Backend>, HashMap<u64, bool>)> {
        let (mut backends, mut enabled) = (BTreeSet::new(), HashMap::new());
        for source in &self.0 {
            let (more, which) = source.discover().await?;
            backends.extend(more);
            enabled.extend(which);
        }
        Ok((backends, enabled))
    }
}

/// The replica behind a backend.
pub(super) fn replica_of(backend: &Backend) -> Option<&Arc<Replica>> {
    backend.ext.get::<Arc<Replica>>()
}

/// The replica as Pingora sees it; `None` while it has no address.
pub(super) fn backend_of(replica: &Arc<Replica>) -> Option<Backend> {
    let address = replica.address()?;
    let mut ext = Extensions::new();
    ext.insert(Arc::clone(replica));
    Some(Backend { addr: PeerAddress::Inet(address), weight: replica.slot() + 1, ext })
}

/// Those with an address, and which of them may serve: not before their first good probe, and not
/// while they drain.
fn yielded(replicas: &[Arc<Replica>]) -> (BTreeSet<Backend>, HashMap<u64, bool>) {
    let (mut backends, mut enabled) = (BTreeSet::new(), HashMap::new());
    for replica in replicas {
        let Some(backend) = backend_of(replica) else { continue };
        let mut hasher = DefaultHasher::new();
        backend.hash(&mut hasher);
        enabled.insert(hasher.finish(), replica.state().enabled());
        backends.insert(backend);
    }
    (backends, enabled)
}

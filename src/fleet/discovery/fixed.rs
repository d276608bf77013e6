//! Replicas whose URL holds an address: they are where the config says. Nothing is looked up.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use pingora::Result;
use pingora_load_balancing::Backend;
use pingora_load_balancing::discovery::ServiceDiscovery;

use crate::fleet::replica::Replica;
use crate::fleet::url::Host;

/// The replicas of the config that have an address in their URL.
pub(super) struct Fixed(Vec<Arc<Replica>>);

impl Fixed {
    /// Takes its own out of `replicas` and notes their addresses.
    pub(super) fn new(replicas: &[Arc<Replica>]) -> Self {
        let mut own = Vec::new();
        for replica in replicas {
            if let Host::Ip(ip) = replica.url().host() {
                replica.state().resolved(vec![SocketAddr::new(*ip, replica.url().port())]);
                own.push(Arc::clone(replica));
            }
        }
        Self(own)
    }
}

#[async_trait]
impl ServiceDiscovery for Fixed {
    async fn discover(&self) -> Result<(BTreeSet<Backend>, HashMap<u64, bool>)> {
        Ok(super::yielded(&self.0))
    }
}

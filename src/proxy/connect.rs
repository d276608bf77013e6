//! Opening connections to replicas in slices, and a second handle on each open one.
//!
//! Pingora watches the client while it waits for an answer, but not while it opens a connection.
//! So a connect is cut into slices of [`SLICE`]: after each, Pingora asks `upstream_peer` again,
//! which looks whether the client is still there and lets the same connect go on. And Pingora has
//! one read timeout for the head and for every gap. So each connection has a second handle, by
//! which the [watchdog](super::watchdog) can end it when the limit of the present phase is over.
//! The handle goes when Pingora drops the connection: held longer, the replica would not see the
//! close.

use std::collections::HashMap;
use std::future::Future;
use std::net::{Shutdown, SocketAddr as InetAddress};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use pingora::connectors::l4::Connect;
use pingora::protocols::l4::socket::SocketAddr;
use pingora::protocols::l4::stream::Stream;
use pingora::upstreams::peer::{Tracer, Tracing};
use pingora::{Error, ErrorType, Result};
use socket2::{SockRef, Socket};
use tokio::net::TcpStream;

/// How long a connect runs before the client is looked at again.
pub(super) const SLICE: Duration = Duration::from_millis(40);

/// The error that means: the slice is over, the connect goes on.
pub(super) const STILL_CONNECTING: ErrorType = ErrorType::Custom("StillConnecting");

/// The error that means: it is this process, or its machine, that has no socket left.
pub(super) const OUT_OF_SOCKETS: ErrorType = ErrorType::Custom("OutOfSockets");

/// `ENFILE`, `EMFILE`, `EADDRNOTAVAIL`, `ENOBUFS` of Linux.
const OUR_LACKS: [i32; 4] = [23, 24, 99, 105];

fn is_our_lack(error: &std::io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| OUR_LACKS.contains(&code))
}

const SHARDS: usize = 16;

/// The second handles of all open connections, by the descriptor Pingora holds.
#[derive(Debug)]
pub(super) struct Connections {
    shards: [Mutex<HashMap<RawFd, Arc<Connection>>>; SHARDS],
}

impl Connections {
    /// None yet.
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { shards: Default::default() })
    }

    /// The connection Pingora knows by this descriptor.
    pub(super) fn get(&self, descriptor: RawFd) -> Option<Arc<Connection>> {
        self.shard(descriptor).lock().get(&descriptor).cloned()
    }

    fn shard(&self, descriptor: RawFd) -> &Mutex<HashMap<RawFd, Arc<Connection>>> {
        &self.shards[descriptor.unsigned_abs() as usize % SHARDS]
    }

    fn insert(&self, connection: &Arc<Connection>) {
        self.shard(connection.descriptor)
            .lock()
            .insert(connection.descriptor, Arc::clone(connection));
    }

    fn remove(&self, connection: &Arc<Connection>) {
        let mut shard = self.shard(connection.descriptor).lock();
        if shard.get(&connection.descriptor).is_some_and(|held| Arc::ptr_eq(held, connection)) {
            shard.remove(&connection.descriptor);
        }
    }
}

/// One open connection, as far as it must be possible to end it.
#[derive(Debug)]
pub(super) struct Connection {
    descriptor: RawFd,
    handle: Mutex<Option<Socket>>,
}

impl Connection {
    /// Ends the connection in both directions; whoever reads from it sees its end.
    pub(super) fn end(&self) {
        if let Some(handle) = self.handle.lock().as_ref() {
            // An error means that it is ended already.
            let _ = handle.shutdown(Shutdown::Both);
        }
    }

    /// Whether the replica sent something that was not read yet: then it is not the replica that
    /// keeps the client waiting, but the client that does not take what there is.
    pub(super) fn has_unread(&self) -> bool {
        let mut byte = [std::mem::MaybeUninit::<u8>::uninit(); 1];
        let handle = self.handle.lock();
        handle.as_ref().is_some_and(|handle| handle.peek(&mut byte).is_ok_and(|read| 0 < read))
    }
}

type Pending = Pin<Box<dyn Future<Output = std::io::Result<TcpStream>> + Send>>;

/// Opens all connections to replicas. What is still connecting at the end of a slice waits here
/// by its address: whoever asks for that address next goes on with it. So a request that left owes
/// the connector one connect, which it takes back by [`Connector::abandon`].
pub(super) struct Connector {
    connections: Arc<Connections>,
    pending: Mutex<HashMap<InetAddress, Vec<Pending>>>,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connector")
    }
}

impl Connector {
    /// Puts every connection it opens among these.
    pub(super) fn new(connections: &Arc<Connections>) -> Arc<Self> {
        Arc::new(Self { connections: Arc::clone(connections), pending: Mutex::default() })
    }

    /// One request less waits for a connection to this address.
    pub(super) fn abandon(&self, address: InetAddress) {
        drop(self.take(address));
    }

    fn take(&self, address: InetAddress) -> Option<Pending> {
        let mut pending = self.pending.lock();
        let waiting = pending.get_mut(&address)?;
        let one = waiting.pop();
        if waiting.is_empty() {
            pending.remove(&address);
        }
        one
    }

    fn opened(&self, stream: TcpStream) -> std::io::Result<Stream> {
        let connection = Arc::new(Connection {
            descriptor: stream.as_raw_fd(),
            handle: Mutex::new(Some(SockRef::from(&stream).try_clone()?)),
        });
        self.connections.insert(&connection);
        let mut stream = Stream::from(stream);
        let connections = Arc::clone(&self.connections);
        stream.tracer = Some(Tracer(Box::new(Trace { connections, connection })));
        Ok(stream)
    }
}

#[async_trait]
impl Connect for Connector {
    async fn connect(&self, address: &SocketAddr) -> Result<Stream> {
        let SocketAddr::Inet(address) = *address else {
            return Error::e_explain(ErrorType::ConnectError, "not an internet address");
        };
        let mut connect =
            self.take(address).unwrap_or_else(|| Box::pin(TcpStream::connect(address)));
        match tokio::time::timeout(SLICE, connect.as_mut()).await {
            Ok(Ok(stream)) => self.opened(stream).map_err(|error| {
                Error::because(OUT_OF_SOCKETS, "second handle on a connection", error)
            }),
            Ok(Err(error)) if is_our_lack(&error) => {
                Err(Error::because(OUT_OF_SOCKETS, "no socket for a connection", error))
            }
            Ok(Err(error)) => {
                let kind = match error.kind() {
                    std::io::ErrorKind::ConnectionRefused => ErrorType::ConnectRefused,
                    std::io::ErrorKind::HostUnreachable
                    | std::io::ErrorKind::NetworkUnreachable => ErrorType::ConnectNoRoute,
                    std::io::ErrorKind::TimedOut => ErrorType::ConnectTimedout,
                    _ => ErrorType::ConnectError,
                };
                Err(Error::because(kind, "connect to a replica", error))
            }
            Err(_) => {
                self.pending.lock().entry(address).or_default().push(connect);
                Error::e_explain(STILL_CONNECTING, "the connect goes on")
            }
        }
    }
}

/// Told by Pingora of the end of a connection.
#[derive(Clone, Debug)]
struct Trace {
    connections: Arc<Connections>,
    connection: Arc<Connection>,
}

impl Tracing for Trace {
    fn on_connected(&self) {}

    fn on_disconnected(&self) {
        self.connections.remove(&self.connection);
        *self.connection.handle.lock() = None;
    }

    fn boxed_clone(&self) -> Box<dyn Tracing> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn open(connections: &Arc<Connections>) -> (Stream, TcpStream) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = SocketAddr::Inet(listener.local_addr().unwrap());
        let stream = Connector::new(connections).connect(&address).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        (stream, accepted)
    }

    #[tokio::test]
    async fn a_dropped_connection_is_closed_at_once_and_forgotten() {
        let connections = Connections::new();
        let (stream, mut accepted) = open(&connections).await;
        let descriptor = stream.as_raw_fd();
        assert!(connections.get(descriptor).is_some());
        drop(stream);
        let read = tokio::time::timeout(Duration::from_secs(5), accepted.read_u8()).await;
        assert!(read.unwrap().is_err(), "the replica must see the close");
        assert!(connections.get(descriptor).is_none());
    }

    #[tokio::test]
    async fn an_ended_connection_wakes_its_reader() {
        let connections = Connections::new();
        let (mut stream, _accepted) = open(&connections).await;
        let connection = connections.get(stream.as_raw_fd()).unwrap();
        let reader = tokio::spawn(async move { stream.read_u8().await });
        connection.end();
        let read = tokio::time::timeout(Duration::from_secs(5), reader).await.unwrap().unwrap();
        assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn what_was_not_read_yet_is_seen_and_stays() {
        let connections = Connections::new();
        let (mut stream, mut accepted) = open(&connections).await;
        let connection = connections.get(stream.as_raw_fd()).unwrap();
        assert!(!connection.has_unread());
        accepted.write_all(b"x").await.unwrap();
        while !connection.has_unread() {
            tokio::task::yield_now().await;
        }
        assert_eq!(stream.read_u8().await.unwrap(), b'x');
        assert!(!connection.has_unread());
    }

    #[tokio::test]
    async fn a_connect_that_takes_long_goes_on_and_can_be_abandoned() {
        // A listener that accepts nothing: once its queue is full, connects get no answer.
        let socket = Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&InetAddress::from(([127, 0, 0, 1], 0)).into()).unwrap();
        socket.listen(0).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let connector = Connector::new(&Connections::new());
        let waiting = || connector.pending.lock().get(&address).map_or(0, Vec::len);
        let mut opened = Vec::new();
        let mut slices = 0;
        while slices < 3 {
            match connector.connect(&SocketAddr::Inet(address)).await {
                Ok(stream) => opened.push(stream),
                Err(error) => {
                    assert_eq!(error.etype(), &STILL_CONNECTING);
                    assert_eq!(waiting(), 1, "one connect goes on, whatever the slices");
                    slices += 1;
                }
            }
            assert!(opened.len() < 100, "the queue never got full");
        }
        connector.abandon(address);
        assert_eq!(waiting(), 0);
    }

    #[tokio::test]
    async fn a_refused_connect_says_so() {
        let connections = Connections::new();
        let address = {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            listener.local_addr().unwrap()
        };
        let error =
            Connector::new(&connections).connect(&SocketAddr::Inet(address)).await.unwrap_err();
        assert_eq!(error.etype(), &ErrorType::ConnectRefused);
    }
}

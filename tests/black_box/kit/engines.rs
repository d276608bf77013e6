//! Engines: simulated ones in this process, one in a process of its own that can be killed, and
//! an address where connects hang.

use std::net::SocketAddr;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::net::TcpStream;

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

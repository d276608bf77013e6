//! The listener of a simulated server, which can be shut so that connections are refused, and
//! opened again at the same address. Shutting takes effect before the call returns.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::Notify;

const BACKLOG: i32 = 4_096;

enum State {
    Open(Arc<TcpListener>),
    /// Shut, with a socket that keeps the port from being given to somebody else.
    Shut(Option<Socket>),
    Gone,
}

/// See above.
pub(super) struct Gate {
    pub(super) address: SocketAddr,
    handle: Handle,
    buffers: (Option<usize>, Option<usize>),
    state: Mutex<State>,
    changed: Notify,
}

impl Gate {
    /// Opens a gate; `buffers` are the sizes for receiving and sending.
    pub(super) fn open_at(
        listener: std::net::TcpListener,
        handle: Handle,
        buffers: (Option<usize>, Option<usize>),
    ) -> io::Result<Self> {
        let gate = Self {
            address: listener.local_addr()?,
            handle,
            buffers,
            state: Mutex::new(State::Gone),
            changed: Notify::new(),
        };
        let open = gate.listening(listener.into())?;
        *gate.state.lock() = State::Open(open);
        Ok(gate)
    }

    /// Binds a listener whose queue holds more than the usual 128.
    pub(super) fn bind(address: SocketAddr) -> io::Result<std::net::TcpListener> {
        let socket = reserve(address)?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    }

    fn listening(&self, socket: Socket) -> io::Result<Arc<TcpListener>> {
        let (receive, send) = self.buffers;
        if let Some(bytes) = receive {
            socket.set_recv_buffer_size(bytes)?;
        }
        if let Some(bytes) = send {
            socket.set_send_buffer_size(bytes)?;
        }
        socket.set_nonblocking(true)?;
        let _inside = self.handle.enter();
        TcpListener::from_std(socket.into()).map(Arc::new)
    }

    /// The listener, if the gate is open. `Err` once it is gone for good.
    pub(super) fn listener(&self) -> Result<Option<Arc<TcpListener>>, ()> {
        match &*self.state.lock() {
            State::Open(listener) => Ok(Some(Arc::clone(listener))),
            State::Shut(_) => Ok(None),
            State::Gone => Err(()),
        }
    }

    /// Until the gate is opened, shut, or gone.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// From now on connections are refused.
    pub(super) fn shut(&self) {
        let mut state = self.state.lock();
        if let State::Open(listener) = &*state {
            stop_listening(listener);
            *state = State::Shut(reserve(self.address).ok());
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Takes connections again, if it was shut.
    pub(super) fn open(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        if let State::Shut(reserved) = &mut *state {
            let socket = match reserved.take() {
                Some(socket) => socket,
                None => reserve(self.address)?,
            };
            socket.listen(BACKLOG)?;
            *state = State::Open(self.listening(socket)?);
        }
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Shuts it for good and gives the address back.
    pub(super) fn remove(&self) {
        let mut state = self.state.lock();
        if let State::Open(listener) = &*state {
            stop_listening(listener);
        }
        *state = State::Gone;
        drop(state);
        self.changed.notify_one();
    }
}

fn stop_listening(listener: &TcpListener) {
    // Closing would take effect only when the accepting task drops its handle too.
    let _ = SockRef::from(listener).shutdown(std::net::Shutdown::Both);
}

fn reserve(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

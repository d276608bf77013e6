//! The listen addresses before Pingora gets them: a port 0 is settled, and an address that cannot
//! be had is told at once. Pingora itself would try for half a minute and then panic.

use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Protocol, Socket, Type};

use super::StartError;
use crate::clock;
use crate::config::Config;

/// Puts a free port where the configuration says 0 and tries every address once.
///
/// # Errors
/// An address cannot be had.
pub fn settle(mut config: Config) -> Result<Config, StartError> {
    for listen in &mut config.listen {
        listen.address = settled(listen.address)?;
    }
    if let Some(address) = config.admin.address {
        config.admin.address = Some(settled(address)?);
    }
    Ok(config)
}

fn settled(address: SocketAddr) -> Result<SocketAddr, StartError> {
    let began = clock::now();
    loop {
        match bind(address).and_then(|listener| listener.local_addr()) {
            Ok(bound) => return Ok(bound),
            Err(source) if super::BIND_PATIENCE < began.elapsed() => {
                return Err(StartError::Listen { address: address.to_string(), source });
            }
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(50)),
        }
    }
}

fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(1)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_zero_becomes_a_port_that_can_be_listened_on() {
        let address = settled("127.0.0.1:0".parse().unwrap()).unwrap();
        assert_ne!(address.port(), 0);
        assert!(TcpListener::bind(address).is_ok());
    }

    #[test]
    fn an_address_in_use_is_told_with_its_name() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = held.local_addr().unwrap();
        let error = settled(address).unwrap_err().to_string();
        assert!(error.contains(&address.to_string()), "{error}");
    }
}

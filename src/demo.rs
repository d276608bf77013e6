//! `weir demo`: the whole proxy before a fleet of simulated engines, with nothing else installed.

use std::net::{Ipv4Addr, SocketAddr};

use crate::config::{AdminOptions, Config, ListenOptions};
use crate::fleet::ReplicaOptions;
use crate::names::ModelName;
use crate::server::{self, StartError};
use crate::simulated::{EngineServer, Options};

/// Runs until it is interrupted.
///
/// # Errors
/// An engine or the proxy cannot be started, most likely because the port is in use.
pub fn run(engines: u16, port: u16, model: &str) -> Result<(), StartError> {
    let mut config = Config {
        listen: vec![ListenOptions {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            ..ListenOptions::default()
        }],
        admin: AdminOptions { address: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))) },
        ..Config::default()
    };
    config.server.pre_stop = std::time::Duration::ZERO;
    server::init_log(&config.telemetry);
    let servers = (0..engines)
        .map(|_| {
            let options = Options { models: vec![model.to_owned()], ..Options::default() };
            EngineServer::start(options, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| StartError::Build(format!("a simulated engine: {error}")))?;
    for (number, server) in servers.iter().enumerate() {
        config.fleet.replicas.push(ReplicaOptions {
            url: server.url(),
            id: Some(format!("engine-{}", number + 1)),
            models: vec![ModelName::new(model)],
            ..ReplicaOptions::default()
        });
    }
    let config = server::settle(config)?;
    greet(&config, engines, model);
    server::run(config, None)
}

#[allow(clippy::print_stdout, reason = "the demo speaks to the person who started it")]
fn greet(config: &Config, engines: u16, model: &str) {
    let Some(listen) = config.listen.first() else { return };
    let address = listen.address;
    println!("weir demo: {engines} simulated engines serve the model `{model}`.");
    println!("Send a first request from another terminal:\n");
    println!(
        "  curl -N http://{address}/v1/chat/completions -H 'Content-Type: application/json' \\"
    );
    println!("    -d '{}'\n", first_body(model));
    if let Some(admin) = config.admin.address {
        println!("See the fleet:  curl http://{admin}/fleet");
        println!("The numbers:    curl http://{admin}/metrics");
    }
    println!("Stop:           Ctrl-C\n");
}

fn first_body(model: &str) -> serde_json::Value {
    serde_json::json!({
        "model": model,
        "stream": true,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "Hello"}],
    })
}

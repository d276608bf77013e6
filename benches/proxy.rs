//! CPU per request, per event and per megabyte through Weir, side by side in one run with a bare
//! Pingora proxy and, where it is installed, nginx. See benches/README.md for how to read it.
//!
//! `cargo bench --bench proxy -- [--rounds N] [--seconds S] [--no-nginx]`
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::disallowed_methods,
    missing_docs,
    unreachable_pub,
    reason = "a measuring program"
)]

#[path = "support/bare.rs"]
mod bare;
#[path = "support/cpu.rs"]
mod cpu;
#[path = "support/load.rs"]
mod load;
#[path = "support/proxies.rs"]
mod proxies;

use std::net::SocketAddr;
use std::time::Duration;

use load::Run;
use proxies::Proxy;
use weir::simulated::{EngineServer, InstantOptions, Mode, Options};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

const ENGINES: usize = 4;
const MODEL: &str = "bench";

struct Scenario {
    name: &'static str,
    unit: &'static str,
    body: fn() -> String,
    connections: usize,
    tokens: u32,
    gap: Duration,
    units: fn(&Run) -> f64,
}

const SCENARIOS: [Scenario; 4] = [
    Scenario {
        name: "small chat, 64 connections",
        unit: "request",
        body: || chat(false, "Say hello."),
        connections: 64,
        tokens: 8,
        gap: Duration::ZERO,
        units: |run| run.answers as f64,
    },
    Scenario {
        name: "small chat, 1 connection",
        unit: "request",
        body: || chat(false, "Say hello."),
        connections: 1,
        tokens: 8,
        gap: Duration::ZERO,
        units: |run| run.answers as f64,
    },
    Scenario {
        name: "streams, an event each 8 ms, 64 streams",
        unit: "event",
        body: || chat(true, "Tell a story."),
        connections: 64,
        tokens: 100,
        gap: Duration::from_millis(8),
        units: |run| run.events as f64,
    },
    Scenario {
        name: "1 MiB bodies, 4 connections",
        unit: "MiB",
        body: || chat(false, &"x".repeat(1 << 20)),
        connections: 4,
        tokens: 8,
        gap: Duration::ZERO,
        units: |run| run.answers as f64,
    },
];

fn chat(stream: bool, text: &str) -> String {
    format!(
        r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"{text}"}}],"stream":{stream}}}"#
    )
}

fn request(body: &str) -> Vec<u8> {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n\
         Authorization: Bearer k-bench\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

struct Settings {
    rounds: usize,
    length: Duration,
    nginx: bool,
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|one| one == "--bare") {
        let engines = arguments[at + 2].split(',').map(|one| one.parse().unwrap()).collect();
        bare::run(&arguments[at + 1], engines);
    }
    let number = |name: &str, default: usize| {
        let at = arguments.iter().position(|one| one == name);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok()).unwrap_or(default)
    };
    let settings = Settings {
        rounds: number("--rounds", 5),
        length: Duration::from_secs(number("--seconds", 4) as u64),
        nginx: !arguments.iter().any(|one| one == "--no-nginx"),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(measure(&settings));
}

async fn measure(settings: &Settings) {
    for scenario in &SCENARIOS {
        let engines: Vec<EngineServer> = (0..ENGINES).map(|_| engine(scenario)).collect();
        let addresses: Vec<SocketAddr> = engines.iter().map(EngineServer::addr).collect();
        let mut proxies = vec![Proxy::bare(&addresses), Proxy::weir(&addresses, MODEL)];
        if settings.nginx {
            proxies.extend(Proxy::nginx(&addresses));
        }
        for proxy in &proxies {
            proxy.wait_ready().await;
        }
        rounds(scenario, &proxies, settings).await;
    }
}

fn engine(scenario: &Scenario) -> EngineServer {
    let options = Options {
        models: vec![MODEL.to_owned()],
        mode: Mode::Instant,
        instant: InstantOptions { tokens: scenario.tokens, gap: scenario.gap },
        ..Options::default()
    };
    EngineServer::start(options, SocketAddr::from(([127, 0, 0, 1], 0))).unwrap()
}

#[derive(Default)]
struct Column {
    cpu: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
    rate: Vec<f64>,
    failed: u64,
    resident: u64,
}

async fn rounds(scenario: &Scenario, proxies: &[Proxy], settings: &Settings) {
    let request = request(&(scenario.body)());
    let mut columns: Vec<Column> = proxies.iter().map(|_| Column::default()).collect();
    for round in 0..=settings.rounds {
        for (proxy, column) in proxies.iter().zip(&mut columns) {
            let before = cpu::time(proxy.process());
            let run =
                load::run(proxy.address(), request.clone(), scenario.connections, settings.length)
                    .await;
            let used = cpu::time(proxy.process()) - before;
            // The first round warms up.
            if round == 0 {
                continue;
            }
            column.failed += run.failed;
            column.cpu.push(used.as_secs_f64() * 1e6 / (scenario.units)(&run).max(1.0));
            column.p50.push(run.quantile(0.5).as_secs_f64() * 1e6);
            column.p99.push(run.quantile(0.99).as_secs_f64() * 1e6);
            column.rate.push((scenario.units)(&run) / run.took.as_secs_f64());
            column.resident = cpu::resident(proxy.process());
        }
    }
    print(scenario, proxies, &columns);
}

fn print(scenario: &Scenario, proxies: &[Proxy], columns: &[Column]) {
    println!("\n{}", scenario.name);
    println!(
        "  {:<8} {:>12} {:>10} {:>10} {:>10} {:>10} {:>10} {:>7} {:>8}",
        "proxy",
        format!("µs/{}", scenario.unit),
        "/ bare",
        "/ nginx",
        "p50 µs",
        "p99 µs",
        format!("{}/s", scenario.unit),
        "failed",
        "RSS MB"
    );
    let nginx = proxies.iter().position(|proxy| proxy.name() == "nginx");
    for (proxy, column) in proxies.iter().zip(columns) {
        let against = |other: Option<usize>| {
            other.map_or_else(|| "-".to_owned(), |other| ratio(column, &columns[other]))
        };
        println!(
            "  {:<8} {:>12.2} {:>10} {:>10} {:>10.0} {:>10.0} {:>10.0} {:>7} {:>8.1}",
            proxy.name(),
            median(&column.cpu),
            against(Some(0)),
            against(nginx),
            median(&column.p50),
            median(&column.p99),
            median(&column.rate),
            column.failed,
            column.resident as f64 / 1e6,
        );
    }
}

/// The median of the ratios of single rounds: what the machine did beside hits both alike.
fn ratio(one: &Column, other: &Column) -> String {
    let ratios: Vec<f64> =
        one.cpu.iter().zip(&other.cpu).map(|(one, other)| one / other.max(1e-9)).collect();
    format!("{:.3}", median(&ratios))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}

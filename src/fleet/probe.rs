//! Asks one replica whether it is well, at its own pace and beside all others: a slow answer delays
//! nobody. What answers mean is decided in `health.rs`; what requests find out, in `breaker.rs`.

use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::client::{Client, Query, Silence, Stage};
use super::health::{Change, Probe, ProbeOptions};
use super::replica::Replica;
use crate::clock;
use crate::telemetry::ProbeResult;

/// An answer longer than this is not that of a health check.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// A replica without an address is looked at again after this time.
const NOWHERE: Duration = Duration::from_millis(100);

/// Asked beside each good probe: an engine that was put to sleep is well, and answers no request.
/// vLLM knows the question in its development mode only.
const SLEEPING_PATH: &str = "/is_sleeping";

/// What the last probe brought.
#[derive(Clone, Debug)]
pub(super) struct LastProbe {
    pub(super) probe: Probe,
    /// In words, with the cause where there is one.
    pub(super) text: String,
    pub(super) ended: Instant,
    pub(super) took: Duration,
}

/// Probes a replica for ever; ends at once when probes are off.
pub(super) async fn watch(replica: &Replica, options: &ProbeOptions, client: &Client) {
    let state = replica.state();
    if !options.is_on() {
        let woke = state.set_asleep(false);
        if woke || !state.serving() {
            came_up(replica, clock::now());
        }
        return;
    }
    // A reload does not bring the next probe forward, or many reloads would be a flood.
    tokio::time::sleep(state.probe_due_in(clock::now())).await;
    loop {
        if replica.address().is_none() {
            tokio::time::sleep(NOWHERE).await;
            continue;
        }
        let last = ask(replica, options, client).await;
        let good = last.probe == Probe::Good;
        note(replica, last);
        let pause = state.health().next_delay(fastrand::u64(..));
        state.set_probe_due(clock::now() + pause);
        let asked = async {
            if good && !state.sleepless() {
                // Within the pause, so that no probe waits for it.
                let _ = tokio::time::timeout(pause, look_for_sleep(replica, options, client)).await;
            }
        };
        tokio::join!(tokio::time::sleep(pause), asked);
    }
}

async fn ask(replica: &Replica, options: &ProbeOptions, client: &Client) -> LastProbe {
    let began = clock::now();
    let answer = get(replica, &options.path, options, client).await;
    let ended = clock::now();
    let (probe, text) = match answer {
        Ok((200..=299, _)) => (Probe::Good, None),
        Ok((status, _)) => (Probe::Status(status), None),
        Err(silence) => {
            let probe = match silence.stage {
                Stage::Refused => Probe::Refused,
                Stage::Connect => Probe::Unreachable,
                Stage::Answer => Probe::Broken,
                Stage::ConnectTime | Stage::AnswerTime => Probe::TimedOut,
            };
            (probe, Some(silence.reason))
        }
    };
    let text = text.unwrap_or_else(|| probe.to_string());
    LastProbe { probe, text, ended, took: ended.saturating_duration_since(began) }
}

async fn get(
    replica: &Replica,
    path: &str,
    options: &ProbeOptions,
    client: &Client,
) -> Result<(u16, bytes::Bytes), Silence> {
    let Some(address) = replica.address() else { return Err(Silence::nowhere()) };
    let path = replica.url().join(path);
    let query = Query {
        peer: replica.peer(address),
        authority: replica.authority(),
        path: &path,
        api_key: replica.probe_key(),
        timeout: options.timeout,
        body_bytes_max: BODY_BYTES_MAX,
    };
    let answer = client.get(query).await;
    let connected = !answer.as_ref().is_err_and(|silence| silence.stage.is_connecting());
    let state = replica.state();
    if connected {
        // Traffic need not wait to find that out for itself.
        state.breaker().reached(clock::now());
    } else if state.unreachable(address) {
        replica.wake().wake();
    }
    answer.map(|answer| (answer.status, answer.body))
}

fn note(replica: &Replica, last: LastProbe) {
    let state = replica.state();
    state.series().probe(match last.probe {
        Probe::Good => ProbeResult::Good,
        Probe::Status(_) => ProbeResult::Bad,
        Probe::Refused | Probe::Unreachable | Probe::Broken => ProbeResult::Unreachable,
        Probe::TimedOut => ProbeResult::TimedOut,
    });
    let (id, now) = (replica.id(), last.ended);
    debug!(replica = %id, result = last.text, "replica probed");
    let text = last.text.clone();
    let change = state.probed(last.probe, now);
    state.set_last_probe(last);
    match change {
        Some(Change::CameUp { down_for, failures }) => {
            info!(replica = %id, ?down_for, failures, "replica is up");
            if down_for.is_some() {
                state.breaker().reset();
            }
            came_up(replica, now);
        }
        Some(Change::WentDown { failures, .. }) => {
            warn!(replica = %id, failures, last = text, "replica is down");
            state.set_serving(false, now);
            state.series().went_down();
            replica.wake().wake();
        }
        None => {}
    }
}

fn came_up(replica: &Replica, now: Instant) {
    let state = replica.state();
    state.admit();
    state.set_sleepless(false);
    state.set_serving(true, now);
    state.series().went_up();
    state.learn.notify_one();
    replica.wake().wake();
}

/// No answer at all changes nothing: the next good probe asks again.
async fn look_for_sleep(replica: &Replica, options: &ProbeOptions, client: &Client) {
    let state = replica.state();
    let Ok((status, body)) = get(replica, SLEEPING_PATH, options, client).await else { return };
    let said = if (200..300).contains(&status) { says_asleep(&body) } else { None };
    if said.is_none() {
        state.set_sleepless(true);
    }
    // An engine that does not know the question cannot sleep.
    let asleep = said.unwrap_or(false);
    if state.set_asleep(asleep) {
        let id = replica.id();
        if asleep {
            info!(replica = %id, "replica fell asleep");
        } else {
            info!(replica = %id, "replica woke up");
        }
        replica.wake().wake();
    }
}

fn says_asleep(body: &[u8]) -> Option<bool> {
    #[derive(serde::Deserialize)]
    struct Answer {
        is_sleeping: bool,
    }
    serde_json::from_slice::<Answer>(body).ok().map(|answer| answer.is_sleeping)
}

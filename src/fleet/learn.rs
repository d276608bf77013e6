//! Which models a replica serves: asked of its `/v1/models`, quickly until known, at once when it
//! comes up, and now and then after that, as adapters come and go. A list once told stays while
//! the replica is down. Nothing here decides whether it is well.

use std::time::Duration;

use tracing::{debug, info, warn};

use super::client::{Client, Query};
use super::health::{ProbeOptions, Verdict};
use super::models;
use super::replica::Replica;

/// What is asked.
const PATH: &str = "/v1/models";

/// A list longer than this is refused.
const BODY_BYTES_MAX: usize = 4 * 1024 * 1024;

/// How long an answer may take. Not urgent, and an engine under load answers slowly.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Keeps the models of a replica up to date, for ever.
pub(super) async fn learn(replica: &Replica, options: &ProbeOptions, client: &Client) {
    let state = replica.state();
    let mut failures = 0;
    loop {
        // Before it first comes up, and while it is down, there is nobody to ask.
        if !state.admitted() || state.health().verdict() == Verdict::Down {
            state.learn.notified().await;
            failures = 0;
        }
        failures = if ask(replica, client).await { 0 } else { failures + 1 };
        let pause = options.models_delay(failures, fastrand::u64(..));
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = state.learn.notified() => failures = 0,
        }
    }
}

/// Returns whether it told.
async fn ask(replica: &Replica, client: &Client) -> bool {
    let state = replica.state();
    let Some(address) = replica.address() else { return false };
    let path = replica.url().join(PATH);
    let query = Query {
        peer: replica.peer(address),
        authority: replica.authority(),
        path: &path,
        api_key: replica.probe_key(),
        timeout: TIMEOUT,
        body_bytes_max: BODY_BYTES_MAX,
    };
    let trouble = match client.get(query).await {
        Ok(answer) if answer.status == 200 => match models::read(&answer.body) {
            Ok(cards) => {
                note(replica, cards);
                return true;
            }
            Err(fault) => fault.to_string(),
        },
        Ok(answer) if matches!(answer.status, 401 | 403) => {
            let which = if replica.probe_key().is_some() { "the" } else { "no" };
            format!("status {} with {which} `api_key`", answer.status)
        }
        Ok(answer) => format!("status {}", answer.status),
        Err(silence) => silence.reason,
    };
    let news = state.not_learned(trouble.clone());
    let id = replica.id();
    // A replica whose models the config names is asked for the looks of its cards only.
    if news && replica.fixed_models().is_empty() {
        warn!(replica = %id, trouble, "replica does not tell its models");
    } else {
        debug!(replica = %id, trouble, "replica does not tell its models");
    }
    false
}

fn note(replica: &Replica, cards: Vec<models::Card>) {
    let names = |cards: &[models::Card]| -> Vec<String> {
        cards.iter().map(|card| card.id.to_string()).collect()
    };
    let state = replica.state();
    let before = state.cards().as_ref().map(|cards| names(cards));
    let now = names(&cards);
    if state.learned(cards) {
        replica.wake().wake();
    }
    if before.as_ref() != Some(&now) {
        info!(replica = %replica.id(), models = ?now, "replica told its models");
    }
}

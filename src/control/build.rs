//! From a configuration to the state that requests work with.

use std::sync::Arc;

use http::HeaderName;

use crate::clock;
use crate::config::Config;
use crate::fleet::Fleet;
use crate::proxy::{Budget, SessionKeys, Shared, State};
use crate::response::Consumers;
use crate::routing;

/// Builds everything or nothing. Replicas that did not change are carried over from `previous`.
///
/// # Errors
/// A part cannot be built; the text says which and why.
pub fn state(
    config: &Config,
    previous: Option<&Arc<State>>,
    shared: &Arc<Shared>,
) -> Result<Arc<State>, String> {
    let failed = |error: &dyn std::fmt::Display| error.to_string();
    let policy = routing::build(&config.routing).map_err(|error| failed(&error))?;
    let session_keys = session_keys(&config.routing)?;
    let before = previous.map(|state| state.fleet.as_ref());
    let fleet =
        Fleet::new(&config.fleet, &config.routing.slow_start, before, Arc::clone(&shared.metrics))
            .map_err(|error| failed(&error))?;
    let consumers = Consumers::new(&config.response, &shared.metrics);
    Ok(Arc::new(State {
        options: config.proxy.clone(),
        request: config.request.clone(),
        session_keys,
        fleet,
        policy,
        consumers: Arc::new(consumers),
        retry_budget: Budget::new(config.proxy.retry.budget.clone(), clock::now()),
    }))
}

fn session_keys(options: &routing::Options) -> Result<SessionKeys, String> {
    let headers = options
        .session
        .headers
        .iter()
        .map(|name| {
            HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| format!("routing.session.headers: `{name}` is no header name"))
        })
        .collect::<Result<_, _>>()?;
    // Only the policy that uses keys makes requests pay for finding them.
    if options.policy != "session" {
        return Ok(SessionKeys::default());
    }
    Ok(SessionKeys { headers, body_fields: options.session.body_fields.clone() })
}

//! The tasks that watch servers: one per server, so that one that hangs delays no other.
//!
//! *Invariant*: at most one check, one reading of the list of models and one scrape is under way per server; name look-ups happen on
//! the resolver's threads.
//! *Bound and cost*: per server one connection for the check and one for the list, each with its deadline.

use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use tracing::{debug, error, warn};

use super::client::{Request, fetch};
use super::health::scatter;
use super::models::parse_listing;
use super::port::Port;
use super::resolve::Question;
use super::scrape::{load, scrape};
use super::signals::Bell;
use super::state::CheckFailure;
use super::{BODY_BYTES_MAX, Shared};
use crate::clock::Nanos;
use crate::proto::ids::BackendId;

/// Deadline of one reading of a list of models.
const LEARN_TIMEOUT_MS: u64 = 5_000;
/// First pause after a list could not be read; doubles up to the second.
const LEARN_RETRY_MS: u64 = 250;
const LEARN_RETRY_MS_MAX: u64 = 30_000;

/// Sleeps until `then`.
pub async fn sleep_until(now: Nanos, then: Nanos) {
    monoio::time::sleep(Duration::from_nanos(then.since(now))).await;
}

/// Checks one server for as long as this life of it lasts.
pub async fn watch<P: Port + 'static>(shared: Rc<Shared<P>>, id: BackendId, life: u64) {
    loop {
        if shared.state.borrow().life(id) != life {
            return;
        }
        let due = shared.state.borrow().check_due(id);
        sleep_until(shared.clock.now(), due).await;
        if shared.state.borrow().life(id) != life {
            return;
        }
        let started = shared.clock.now();
        look_up(&shared, id, started);
        if shared.state.borrow().addresses(id).is_empty() {
            wait_for_address(&shared, id).await;
        }
        let result = check(&shared, id).await;
        if shared.state.borrow().life(id) != life {
            return;
        }
        let now = shared.clock.now();
        let rtt_ns = result.as_ref().ok().map(|(_, exchange_ns)| *exchange_ns);
        let result = result.map(|(address, _)| address);
        let learning = shared.state.borrow_mut().handle_check(id, started, now, result);
        if let Some(rtt_ns) = rtt_ns {
            shared.state.borrow_mut().handle_round_trip(id, rtt_ns);
        }
        shared.checked.notify();
        if let Some(generation) = learning {
            monoio::spawn(learn(shared.clone(), id, generation));
        }
        let scraping = shared.state.borrow_mut().take_scrape(id, now);
        if let Some((kind, round)) = scraping {
            monoio::spawn(scrape(shared.clone(), id, kind, round));
        }
        let looking = shared.state.borrow_mut().take_load(id, now);
        if let Some(task) = looking {
            monoio::spawn(load::look(shared.clone(), id, task));
        }
        notify_if_changed(&shared);
        // The word that the process is ready may have waited for this.
        shared.moved.notify();
    }
}

pub(super) fn notify_if_changed<P: Port>(shared: &Shared<P>) {
    if shared.state.borrow().changed() {
        shared.changed.notify();
    }
}

/// Sends a question to the resolver if one is due.
fn look_up<P: Port>(shared: &Shared<P>, id: BackendId, now: Nanos) {
    let Some((host, port)) = shared.state.borrow_mut().take_question(id, now) else { return };
    let asked = shared.resolver.borrow_mut().ask(Question { backend: id, host, port });
    if let Err(failure) = asked {
        shared.state.borrow_mut().handle_resolved(id, now, Err(failure));
    }
}

/// Waits for a server's first address, for as long as a check may take.
async fn wait_for_address<P: Port>(shared: &Shared<P>, id: BackendId) {
    let arrival = async {
        let mut seen = shared.resolved.seen();
        while shared.state.borrow().addresses(id).is_empty() {
            seen = shared.resolved.changed(seen).await;
        }
    };
    let _ = monoio::time::timeout(Duration::from_millis(shared.options.health_timeout_ms), arrival).await;
}

/// Which of the addresses answered, and how long the exchange took, in nanoseconds.
async fn check<P: Port>(shared: &Shared<P>, id: BackendId) -> Result<(usize, u64), CheckFailure> {
    let path = shared.options.health_path.clone();
    // What stands behind a trusted listener may expect a gateway's headers of everybody.
    let lines = match shared.state.borrow() {
        state if state.is_trusting() => format!(
            "x-request-id: stargate-health-{}\r\nx-model: stargate-health\r\nx-input-tokens: 0\r\n",
            state.catalog().server(id).name
        ),
        _ => String::new(),
    };
    let response = ask(shared, id, &path, &lines, shared.options.health_timeout_ms).await?;
    match response.is_success() {
        true => Ok((response.address, response.exchange_ns)),
        false => Err(CheckFailure::Status(response.status)),
    }
}

/// Sends a server a GET request, with its own key if it has one.
pub(super) async fn get<P: Port>(
    shared: &Shared<P>,
    id: BackendId,
    path: &str,
    timeout_ms: u64,
) -> Result<super::client::Response, CheckFailure> {
    ask(shared, id, path, "", timeout_ms).await
}

async fn ask<P: Port>(
    shared: &Shared<P>,
    id: BackendId,
    path: &str,
    lines: &str,
    timeout_ms: u64,
) -> Result<super::client::Response, CheckFailure> {
    let (addresses, host, base_path, api_key) = {
        let state = shared.state.borrow();
        let server = state.catalog().server(id);
        (state.addresses(id), server.host.clone(), server.base_path.clone(), server.api_key.clone())
    };
    let request = Request { host: &host, base_path: &base_path, path, api_key: api_key.as_deref(), lines };
    let answer = fetch(&addresses, request, timeout_ms, BODY_BYTES_MAX, &shared.clock).await;
    answer.map_err(CheckFailure::Fetch)
}

/// Reads a server's list of models, trying again until it succeeds or the server goes down.
async fn learn<P: Port + 'static>(shared: Rc<Shared<P>>, id: BackendId, generation: u64) {
    let name = shared.state.borrow().catalog().server(id).name.clone();
    let mut failures = 0u32;
    loop {
        let result = match get(&shared, id, "/v1/models", LEARN_TIMEOUT_MS).await {
            Ok(response) if response.status == 404 => Ok(None),
            Ok(response) if response.is_success() => match parse_listing(&response.body) {
                Ok(listing) => Ok(Some(listing)),
                Err(failure) => Err(failure.to_string()),
            },
            Ok(response) => Err(CheckFailure::Status(response.status).to_string()),
            Err(failure) => Err(failure.to_string()),
        };
        match result {
            Ok(listing) => {
                shared.state.borrow_mut().handle_listing(id, generation, shared.clock.now(), listing);
                return notify_if_changed(&shared);
            }
            Err(failure) if failures == 0 => warn!(server = %name, "models not read, trying on: {failure}"),
            Err(failure) => debug!(server = %name, failures, "models not read: {failure}"),
        }
        monoio::time::sleep(Duration::from_millis(learn_pause_ms(id, failures))).await;
        failures += 1;
        let on = shared.state.borrow_mut().goes_on_learning(id, generation);
        notify_if_changed(&shared);
        if !on {
            return;
        }
    }
}

/// The pause after `failures` + 1 failures: doubling, less up to a fifth so that servers don't fall into step.
fn learn_pause_ms(id: BackendId, failures: u32) -> u64 {
    let pause_ms = LEARN_RETRY_MS.saturating_mul(1 << failures.min(20)).min(LEARN_RETRY_MS_MAX);
    pause_ms - scatter(u64::from(id.0), u64::from(failures)) % (pause_ms / 5)
}

/// Hands the resolver's answers on as they come.
pub async fn take_answers<P: Port + 'static>(shared: Rc<Shared<P>>, bell: UnixStream) {
    let mut bell = match Bell::new(bell) {
        Ok(bell) => bell,
        Err(failure) => return error!("host names will not be resolved: {failure}"),
    };
    while bell.ring().await.is_ok() {
        let now = shared.clock.now();
        loop {
            let Some((id, answer)) = shared.resolver.borrow().answer() else { break };
            shared.state.borrow_mut().handle_resolved(id, now, answer);
        }
        shared.resolved.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_between_readings_doubles_to_its_limit() {
        let pauses: Vec<u64> = (0..12).map(|failures| learn_pause_ms(BackendId(3), failures)).collect();
        assert!((200..=250).contains(&pauses[0]), "{pauses:?}");
        for (n, pause) in pauses.iter().enumerate() {
            let full = (LEARN_RETRY_MS << n).min(LEARN_RETRY_MS_MAX);
            assert!(*pause <= full && *pause > full * 79 / 100, "{n}: {pause} of {full}");
        }
        assert!(learn_pause_ms(BackendId(0), u32::MAX) <= LEARN_RETRY_MS_MAX);
    }
}

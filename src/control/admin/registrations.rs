//! Registrations over the admin API.
//!
//! A first registration is answered once its server has been checked and every shard's ring has it, so that requests sent after the
//! answer find it; a server that hangs holds the answer up for as long as a check may take.
//!
//! *Invariant*: a lease is shown to its holder alone.
//! *Errors*: 400 with every fault, or with what may not change (the registration is closed then); 404 where no listener is trusted or
//! nobody holds the id; 409 where somebody else does; 503 where there is no room for more.
//! *Source*: the configuration reference, admin API; the Stargate rules, section 8.2.

use std::rc::Rc;
use std::time::Duration;

use serde_json::{Value, json};

use super::Shared;
use super::page::Answer;
use super::servers::{refused, unescape};
use super::show::server_json;
use crate::clock::Nanos;
use crate::control::figures::Figures;
use crate::control::port::Port;
use crate::control::registrations::{Refused, body};
use crate::control::state::{Opened, State};
use crate::control::watch;
use crate::proto::config::{Faults, identity};

/// How long an answer waits for a publication, beyond the check.
const PUBLISH_WAIT_MS: u64 = 1_000;

/// `PUT /v1/registrations/{id}`: opens or renews one.
pub(super) async fn put<P: Port + 'static>(shared: &Rc<Shared<P>>, path: &str, bytes: &[u8]) -> Answer {
    let id = id_of(path);
    let Some(trusted) = &shared.options.trusted else { return untrusted() };
    let named = identity::server_id(&id).map_err(|expected| {
        let mut faults = Faults::default();
        faults.push("id", id.chars().take(80).collect::<String>(), expected);
        faults
    });
    let snapshot = match (named, body::parse(bytes, trusted.ttl_ms_max)) {
        (Ok(()), Ok(snapshot)) => snapshot,
        (named, parsed) => {
            let mut faults = named.err().unwrap_or_default();
            faults.0.extend(parsed.err().into_iter().flat_map(|more| more.0));
            return refused("bad_registration", &faults);
        }
    };
    let now = shared.clock.now();
    let registered = shared.state.borrow_mut().register(now, &id, snapshot);
    watch::notify_if_changed(shared);
    shared.moved.notify();
    let opened = match registered {
        Ok(opened) => opened,
        Err(refusal) => return refuse(&id, &refusal),
    };
    if let Some(life) = opened.watch {
        monoio::spawn(watch::watch(shared.clone(), opened.backend, life));
        let wait_ms = shared.options.health_timeout_ms + PUBLISH_WAIT_MS;
        let _ = monoio::time::timeout(Duration::from_millis(wait_ms), settled(shared, &opened, life)).await;
    } else {
        let _ = monoio::time::timeout(Duration::from_millis(PUBLISH_WAIT_MS), published(shared)).await;
    }
    let now_unix_ms = shared.clock.unix_ms();
    let left_ms = opened.expires.since(shared.clock.now()) / 1_000_000;
    Answer::json(
        200,
        &json!({
            "lease": opened.lease, "ttl_ms": opened.ttl_ms,
            "expires_at_unix_ms": now_unix_ms.saturating_add(left_ms),
        }),
    )
}

/// Ends once the server has been checked and what follows from that has gone out.
async fn settled<P: Port>(shared: &Shared<P>, opened: &Opened, life: u64) {
    let mut seen = shared.checked.seen();
    loop {
        let waits = {
            let state = shared.state.borrow();
            state.life(opened.backend) == life && state.unchecked(opened.backend)
        };
        if !waits {
            break;
        }
        seen = shared.checked.changed(seen).await;
    }
    published(shared).await;
}

/// Ends once nothing waits to be published.
async fn published<P: Port>(shared: &Shared<P>) {
    let seen = shared.published.seen();
    // What is published next holds all that has changed by now.
    if shared.state.borrow().changed() {
        shared.published.changed(seen).await;
    }
}

/// `DELETE /v1/registrations/{id}`: closes it; `?lease=`: only if that is its lease.
pub(super) async fn delete<P: Port + 'static>(shared: &Rc<Shared<P>>, path: &str, query: &str) -> Answer {
    let id = id_of(path);
    if shared.options.trusted.is_none() {
        return untrusted();
    }
    let mut lease = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("lease", value)) => lease = Some(unescape(value)),
            _ => {
                let name: String = pair.split('=').next().unwrap_or("").chars().take(80).collect();
                let message = format!("{name}: unknown parameter; expected lease");
                return Answer::error(400, "bad_registration", &message);
            }
        }
    }
    let now = shared.clock.now();
    let closed = shared.state.borrow_mut().deregister(now, &id, lease.as_deref());
    watch::notify_if_changed(shared);
    shared.moved.notify();
    match closed {
        Ok(()) => {
            let _ = monoio::time::timeout(Duration::from_millis(PUBLISH_WAIT_MS), published(shared)).await;
            Answer::json(200, &json!({"closed": id}))
        }
        Err(refusal) => refuse(&id, &refusal),
    }
}

fn id_of(path: &str) -> String {
    unescape(path.strip_prefix("/v1/registrations/").unwrap_or(path))
}

fn untrusted() -> Answer {
    Answer::error(
        404,
        "no_stargate_listener",
        "registrations are for listeners with profile = \"stargate\", and there is none",
    )
}

fn refuse(id: &str, refusal: &Refused) -> Answer {
    let id: String = id.chars().take(80).collect();
    match refusal {
        Refused::Held => Answer::error(
            409,
            "registration_held",
            &format!(
                "\"{id}\" is registered, and this is not its lease; it is free once it has been closed or not renewed"
            ),
        ),
        Refused::Configured => Answer::error(
            409,
            "registration_held",
            &format!("a server of the configuration is called \"{id}\""),
        ),
        Refused::Moved { field, was } => Answer::error(
            400,
            "registration_changed",
            &format!("{field} of \"{id}\" may not change, it was \"{was}\": the registration is closed"),
        ),
        Refused::Full(what) => {
            Answer::error(503, "too_many_registrations", &format!("there is no room for more {what}"))
        }
        Refused::Unknown => {
            Answer::error(404, "no_such_registration", &format!("\"{id}\" is not registered"))
        }
    }
}

/// All registrations, as the state shows them.
pub(super) fn list<P: Port>(figures: &Figures, state: &State<P>, now: Nanos) -> Value {
    let rows = state.registrations().map(|(id, held)| {
        let models: serde_json::Map<String, Value> = held
            .models
            .iter()
            .map(|(model, served)| {
                (model.to_string(), if served.active { "active" } else { "inactive" }.into())
            })
            .collect();
        let server = figures.servers.iter().find(|row| row.id == held.backend).map(server_json);
        json!({
            "id": id, "cluster_id": held.cluster_id, "routing_key": held.routing_key, "models": models,
            "ttl_ms": held.ttl_ms, "expires_in_ms": held.expires.since(now) / 1_000_000, "server": server,
        })
    });
    rows.collect()
}

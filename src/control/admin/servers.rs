//! Live changes of servers over the admin API.
//!
//! A change is answered once every shard works by it: a request that comes in after the answer is placed by the new rules.
//!
//! *Invariant*: a server is called idle only after two rounds of figures from every shard without a request on it: one on its way
//! between shards in the first is counted in the second.
//! *Bound and cost*: a drain looks at the figures every [`LOOK_MS_MAX`] ms at most often once it has waited for long.
//! *Errors*: 400 with every fault, 404 for a server that is not there, 409 where another change overtook a drain.
//! *Source*: the configuration reference, admin API.

use std::time::Duration;

use serde_json::{Value, json};

use super::page::Answer;
use super::show::server_json;
use super::{REPORT_WAIT_MS, Shared};
use crate::control::figures::{Figures, ServerRow};
use crate::control::port::Port;
use crate::proto::config::{Faults, ServerChange};
use crate::proto::ids::BackendId;

/// Pauses between two looks at a server that is being drained: first, doubling up to the last.
const LOOK_MS: u64 = 10;
const LOOK_MS_MAX: u64 = 200;
/// Longest time that a drain may be asked to wait: a day.
const DRAIN_MS_MAX: u64 = 24 * 60 * 60 * 1000;
/// Server names in the answer to a wrong one.
const NAMES_SHOWN_MAX: usize = 20;

/// `PATCH /admin/v1/servers/{name}`: takes the changes over and answers with the server's new state.
pub(super) async fn patch<P: Port>(shared: &Shared<P>, path: &str, body: &[u8]) -> Answer {
    let id = match named(shared, path) {
        Ok(id) => id,
        Err(answer) => return answer,
    };
    let change = match ServerChange::parse(body) {
        Ok(change) => change,
        Err(faults) => return refused("bad_change", &faults),
    };
    if let Err(faults) = apply(shared, id, &change).await {
        return refused("bad_change", &faults);
    }
    let figures = shared.fresh_figures(REPORT_WAIT_MS).await;
    match row(&figures, id) {
        Some(row) => Answer::json(200, &server_json(row)),
        None => gone(),
    }
}

/// `POST /admin/v1/servers/{name}/drain`: weight 0, and an answer when the server is idle or the time is over.
pub(super) async fn drain<P: Port>(shared: &Shared<P>, path: &str, query: &str, body: &[u8]) -> Answer {
    let id = match named(shared, path) {
        Ok(id) => id,
        Err(answer) => return answer,
    };
    if !body.is_empty() {
        return Answer::error(400, "bad_change", "body: expected none: a drain takes ?timeout_ms=N only");
    }
    let limit_ms = match timeout(query, shared.options.drain_timeout_ms) {
        Ok(limit_ms) => limit_ms,
        Err(message) => return Answer::error(400, "bad_change", &message),
    };
    let change = ServerChange { weight: Some(0.0), ..ServerChange::default() };
    if let Err(faults) = apply(shared, id, &change).await {
        return refused("bad_change", &faults);
    }
    let began = shared.clock.now();
    let mut idle_rounds = 0;
    let mut pause_ms = LOOK_MS;
    loop {
        let (figures, all) = shared.newest_figures(REPORT_WAIT_MS).await;
        let Some(row) = row(&figures, id) else { return gone() };
        if row.weight > 0.0 {
            return Answer::error(
                409,
                "drain_overtaken",
                "the server was given a weight again while it drained",
            );
        }
        idle_rounds = if all && row.in_flight == 0 { idle_rounds + 1 } else { 0 };
        let waited_ms = shared.clock.now().since(began) / 1_000_000;
        if idle_rounds >= 2 || waited_ms >= limit_ms {
            let answer = json!({
                "idle": idle_rounds >= 2, "in_flight": row.in_flight, "waited_ms": waited_ms,
                "server": server_json(row),
            });
            return Answer::json(200, &answer);
        }
        if idle_rounds == 0 {
            let pause = Duration::from_millis(pause_ms.min(limit_ms - waited_ms));
            monoio::time::sleep(pause).await;
            pause_ms = (pause_ms * 2).min(LOOK_MS_MAX);
        }
    }
}

/// Takes a change over and brings it to the shards' rings.
async fn apply<P: Port>(shared: &Shared<P>, id: BackendId, change: &ServerChange) -> Result<(), Faults> {
    if change.weight.is_some() {
        // What was placed by the old weight is counted by it.
        shared.fresh_figures(REPORT_WAIT_MS).await;
    }
    let mut state = shared.state.borrow_mut();
    state.change_server(id, change)?;
    state.publish(shared.clock.now());
    // What the rings had no room for is the main task's to send.
    shared.moved.notify();
    Ok(())
}

fn row(figures: &Figures, id: BackendId) -> Option<&ServerRow> {
    figures.servers.iter().find(|row| row.id == id)
}

fn gone() -> Answer {
    Answer::error(404, "no_such_server", "the server was removed meanwhile")
}

/// The server that a path names.
fn named<P: Port>(shared: &Shared<P>, path: &str) -> Result<BackendId, Answer> {
    let rest = path.strip_prefix("/admin/v1/servers/").unwrap_or(path);
    let name = unescape(rest.split('/').next().unwrap_or(rest));
    let state = shared.state.borrow();
    state.find(&name).ok_or_else(|| {
        let names = state.names();
        let mut shown = names.iter().take(NAMES_SHOWN_MAX).copied().collect::<Vec<_>>().join(", ");
        if names.len() > NAMES_SHOWN_MAX {
            shown.push_str(", …");
        }
        let name: String = name.chars().take(128).collect();
        Answer::error(404, "no_such_server", &format!("no server is called \"{name}\"; there are {shown}"))
    })
}

/// A path segment without its percent escapes; what is no escape stays.
pub(super) fn unescape(segment: &str) -> String {
    let bytes = segment.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 3).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        match digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()) {
            Some(byte) if bytes[at] == b'%' => {
                plain.push(byte);
                at += 3;
            }
            _ => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

/// `timeout_ms=N`, or nothing.
fn timeout(query: &str, default_ms: u64) -> Result<u64, String> {
    let mut limit_ms = default_ms;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if key != "timeout_ms" {
            let key: String = key.chars().take(128).collect();
            return Err(format!("{key}: unknown parameter; expected timeout_ms"));
        }
        let digits = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
        limit_ms = value.parse().ok().filter(|ms| digits && *ms <= DRAIN_MS_MAX).ok_or_else(|| {
            let value: String = value.chars().take(128).collect();
            format!("timeout_ms: \"{value}\": expected a whole number from 0 to {DRAIN_MS_MAX}")
        })?;
    }
    Ok(limit_ms)
}

/// 400 with every fault, in words and one by one.
pub(super) fn refused(code: &str, faults: &Faults) -> Answer {
    let lines: Vec<String> = faults.0.iter().map(ToString::to_string).collect();
    let one_by_one: Vec<Value> = faults
        .0
        .iter()
        .map(|fault| json!({"path": fault.path, "value": fault.value, "expected": fault.expected}))
        .collect();
    let param = faults.0.first().map(|fault| fault.path.as_str());
    Answer::json(
        400,
        &json!({"error": {
            "message": lines.join("; "), "type": "invalid_request_error", "code": code, "param": param,
            "faults": one_by_one,
        }}),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_be_escaped() {
        assert_eq!(unescape("127.0.0.1%3A8001"), "127.0.0.1:8001");
        assert_eq!(unescape("%5b::1%5D"), "[::1]");
        assert_eq!(unescape("a%2"), "a%2");
        assert_eq!(unescape("%zz%"), "%zz%");
    }

    #[test]
    fn a_drain_takes_a_time_and_nothing_else() {
        assert_eq!(timeout("", 30_000), Ok(30_000));
        assert_eq!(timeout("timeout_ms=0", 30_000), Ok(0));
        for (query, message) in [
            ("timeout_ms=", "timeout_ms: \"\": expected a whole number"),
            ("timeout_ms=-1", "timeout_ms: \"-1\""),
            ("timeout_ms=+1", "timeout_ms: \"+1\""),
            ("timeout_ms=86400001", "from 0 to 86400000"),
            ("timeout=1", "timeout: unknown parameter; expected timeout_ms"),
        ] {
            let found = timeout(query, 1).unwrap_err();
            assert!(found.contains(message), "{found}");
        }
    }
}

//! `ringway status` and `ringway drain`: a running router, seen and told through its admin listener.
//!
//! *Errors*: on stderr; exit codes 1 (wrong usage, no such server), 2 (no router answers there), 3 (requests were left when the
//! time was over).
//! *Source*: the configuration reference, command line.

use std::fmt::Write;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use serde_json::Value;

use crate::cli::{DrainArgs, StatusArgs, exit};
use crate::demo::client::{Answer, Client};

/// What went wrong: the exit code and what to say.
type Failure = (u8, String);

/// `ringway status`: prints, and says the exit code.
pub fn status(args: &StatusArgs) -> u8 {
    finish("status", || {
        let answer = ask(&args.admin.admin, "GET", "/admin/v1/state", None)?;
        let state = read(&args.admin.admin, &answer, "pools")?;
        Ok((exit::DONE, if args.json { answer.text() } else { table(&state) }))
    })
}

/// `ringway drain`: waits, prints, and says the exit code.
pub fn drain(args: &DrainArgs) -> u8 {
    finish("drain", || {
        let mut path = format!("/admin/v1/servers/{}/drain", escape(&args.name));
        if let Some(ms) = args.timeout_ms {
            write!(path, "?timeout_ms={ms}").expect("writing to a string cannot fail");
        }
        let answer = ask(&args.admin.admin, "POST", &path, args.timeout_ms)?;
        let drained = read(&args.admin.admin, &answer, "idle")?;
        let (name, waited_ms) = (&args.name, &drained["waited_ms"]);
        Ok(match drained["idle"].as_bool() {
            Some(true) => {
                (exit::DONE, format!("{name} is idle after {waited_ms} ms and gets no new requests\n"))
            }
            _ => {
                let left = &drained["in_flight"];
                let still =
                    format!("{name} gets no new requests; {left} still run on it after {waited_ms} ms");
                return Err((exit::FORCED, still));
            }
        })
    })
}

fn finish(command: &str, run: impl FnOnce() -> Result<(u8, String), Failure>) -> u8 {
    use std::io::Write;
    match run() {
        Ok((code, text)) => {
            // A reader that closed the pipe (`| head`) has seen what it wanted.
            let _ = io::stdout().write_all(text.as_bytes());
            code
        }
        Err((code, text)) => {
            eprintln!("ringway: {command}: {text}");
            code
        }
    }
}

/// One request to the admin listener. `waits_ms`: how long its answer may take beyond the ordinary; `None`: it is not known.
fn ask(admin: &str, method: &str, path: &str, waits_ms: Option<u64>) -> Result<Answer, Failure> {
    let addresses: Vec<SocketAddr> = match admin.to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(_) => {
            let expected = "expected HOST:PORT, such as 127.0.0.1:29000";
            return Err((exit::WRONG, format!("--admin (or RINGWAY_ADMIN): \"{admin}\": {expected}")));
        }
    };
    let unreachable = |error: &io::Error| {
        (
            exit::NOT_STARTED,
            format!("no router answers on {admin}: {error}; --admin says where its admin listener is"),
        )
    };
    let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match Client::connect(address) {
            Ok(mut client) => {
                // A drain answers when it is over: without a limit of our own, whenever that is.
                let limit = match (method, waits_ms) {
                    ("GET", _) => Some(crate::demo::client::WAIT_MAX),
                    (_, Some(ms)) => Some(crate::demo::client::WAIT_MAX + Duration::from_millis(ms)),
                    (_, None) => None,
                };
                return client
                    .stream()
                    .set_read_timeout(limit)
                    .and_then(|()| client.call(method, path, "connection: close\r\n", b""))
                    .map_err(|error| unreachable(&error));
            }
            Err(error) => failure = error,
        }
    }
    Err(unreachable(&failure))
}

/// The JSON of a good answer, which has that field.
fn read(admin: &str, answer: &Answer, field: &str) -> Result<Value, Failure> {
    let strange = || (exit::WRONG, format!("what answers on {admin} is not a Ringway admin listener"));
    let value = answer.json().map_err(|_| strange())?;
    if answer.status() == 200 {
        // A listener for clients hands the question on to an engine, which may say 200 to anything.
        return if value.get(field).is_some() { Ok(value) } else { Err(strange()) };
    }
    let message = value.pointer("/error/message").and_then(Value::as_str).ok_or_else(strange)?;
    Err((exit::WRONG, message.to_owned()))
}

/// A name as a path segment.
fn escape(name: &str) -> String {
    let mut path = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' | b'@' => {
                path.push(byte.into());
            }
            other => write!(path, "%{other:02X}").expect("writing to a string cannot fail"),
        }
    }
    path
}

/// The state for people.
fn table(state: &Value) -> String {
    let word = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let mut text = format!(
        "ringway {}, {}, up {}\n",
        word(&state["version"]),
        word(&state["phase"]),
        span(state["uptime_s"].as_f64().unwrap_or(0.0))
    );
    for pool in state["pools"].as_array().into_iter().flatten() {
        let (algorithm, mode) = (word(&pool["algorithm"]), word(&pool["routing_mode"]));
        let name = word(&pool["name"]);
        let queued = &pool["queued"];
        writeln!(text, "\n{name}: {algorithm}, {mode}, {queued} waiting")
            .expect("a string takes every write");
        let heads = ["server", "state", "weight", "in flight", "dispatched", "share", "drift", "cached"];
        let mut rows = vec![heads.map(str::to_owned)];
        for server in pool["servers"].as_array().into_iter().flatten() {
            let percent = |value: &Value, signed: bool| match (value.as_f64(), signed) {
                (None, _) => "-".to_owned(),
                (Some(part), false) => format!("{:.0} %", part * 100.0),
                (Some(part), true) => format!("{:+.0} %", part * 100.0),
            };
            let mut drift = percent(&server["drift"], true);
            if server["drift_badge"] == true {
                drift = format!("{drift}! {}", server["drift_cause"].as_str().unwrap_or(""));
            }
            let kv = &server["kv"];
            let cached = kv["reported_cached_tokens"].as_f64().zip(kv["reported_prompt_tokens"].as_f64());
            let cached = cached
                .filter(|(_, all)| *all > 0.0)
                .map_or("-".to_owned(), |(cached, all)| format!("{:.0} %", cached / all * 100.0));
            rows.push([
                word(&server["name"]),
                word(&server["state"]),
                server["weight"].as_f64().unwrap_or(0.0).to_string(),
                format!("{}/{}", server["in_flight"], server["max_concurrency"]),
                server["dispatched"].to_string(),
                percent(&server["share"], false),
                drift.trim_end().to_owned(),
                cached,
            ]);
        }
        align(&rows, &mut text);
    }
    let registrations = state["registrations"].as_array().filter(|all| !all.is_empty());
    if let Some(registrations) = registrations {
        text.push_str("\nregistered, for Stargate listeners\n");
        let heads = ["server", "state", "in flight", "cluster", "routing key", "models", "renewal due"];
        let mut rows = vec![heads.map(str::to_owned)];
        for one in registrations {
            let models = one["models"].as_object();
            let active = models.map_or(0, |all| all.values().filter(|status| **status == "active").count());
            rows.push([
                word(&one["id"]),
                word(&one["server"]["state"]),
                one["server"]["in_flight"].to_string(),
                word(&one["cluster_id"]),
                one["routing_key"].as_str().filter(|key| !key.is_empty()).unwrap_or("-").to_owned(),
                format!("{active} of {} active", models.map_or(0, serde_json::Map::len)),
                format!("in {}", span(one["expires_in_ms"].as_f64().unwrap_or(0.0) / 1e3)),
            ]);
        }
        align(&rows, &mut text);
    }
    text
}

/// Appends rows as columns.
fn align<const N: usize>(rows: &[[String; N]], text: &mut String) {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    for row in rows {
        let mut line = String::from(" ");
        for (width, cell) in widths.iter().zip(row) {
            write!(line, " {cell:<width$} ").expect("a string takes every write");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

/// Seconds as days, hours, minutes, seconds: the two largest.
fn span(seconds: f64) -> String {
    // Negative and endless times don't come; the cast makes something of them all the same.
    let seconds = seconds as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_state_reads_as_a_table() {
        let server = json!({
            "name": "gpu0", "state": "up", "weight": 1.5, "in_flight": 3, "max_concurrency": 32, "dispatched": 1200,
            "share": 0.25, "drift": -0.5, "drift_badge": true, "drift_cause": "at_capacity",
            "kv": {"reported_cached_tokens": 30, "reported_prompt_tokens": 40},
        });
        let idle = json!({
            "name": "a-longer-name", "state": "drained", "weight": 0.0, "in_flight": 0, "max_concurrency": 0,
            "dispatched": 0, "share": null, "drift": null, "drift_badge": false, "drift_cause": null, "kv": null,
        });
        let pool = json!({
            "name": "chat", "algorithm": "kv-aware", "routing_mode": "queue", "queued": 2, "servers": [server, idle],
        });
        let state = json!({"version": "9.9", "phase": "serving", "uptime_s": 200.4, "pools": [pool]});
        assert_eq!(
            table(&state),
            "ringway 9.9, serving, up 3 min 20 s\n\
             \n\
             chat: kv-aware, queue, 2 waiting\n  \
               server         state    weight  in flight  dispatched  share  drift               cached\n  \
               gpu0           up       1.5     3/32       1200        25 %   -50 %! at_capacity  75 %\n  \
               a-longer-name  drained  0       0/0        0           -      -                   -\n"
        );
    }

    #[test]
    fn registrations_have_a_table_of_their_own() {
        let held = json!({
            "id": "pod/a", "cluster_id": "rack", "routing_key": "", "models": {"m": "active", "n": "inactive"},
            "ttl_ms": 60_000, "expires_in_ms": 59_900, "server": {"state": "up", "in_flight": 2},
        });
        let state = json!({"version": "9.9", "phase": "serving", "uptime_s": 1, "pools": [], "registrations": [held]});
        assert_eq!(
            table(&state),
            "ringway 9.9, serving, up 1 s\n\nregistered, for Stargate listeners\n  \
               server  state  in flight  cluster  routing key  models         renewal due\n  \
               pod/a   up     2          rack     -            1 of 2 active  in 59 s\n"
        );
        let none =
            json!({"version": "9.9", "phase": "serving", "uptime_s": 1, "pools": [], "registrations": []});
        assert_eq!(table(&none), "ringway 9.9, serving, up 1 s\n");
    }

    #[test]
    fn times_show_their_two_largest_parts() {
        let spans = [0.0, 59.9, 61.0, 3_600.0, 90_061.0].map(span);
        assert_eq!(spans, ["0 s", "59 s", "1 min 1 s", "1 h 0 min", "1 d 1 h"]);
    }

    #[test]
    fn names_are_escaped_where_paths_need_it() {
        assert_eq!(escape("127.0.0.1:8001"), "127.0.0.1:8001");
        assert_eq!(escape("[::1] /?"), "%5B::1%5D%20%2F%3F");
    }
}

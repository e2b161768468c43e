//! The `load` command: one URL, one load, one report.
//!
//! Against the measuring backend (or a proxy before it) every answer is compared byte for byte. Against anything else,
//! `--expect length|any` says how much of the answer is known.

use std::net::{SocketAddr, SocketAddrV4, ToSocketAddrs};

use clap::{Args, ValueEnum};

use crate::answer::Expect;
use crate::clock::MS;
use crate::load::{Arrivals, Plan, Report, Traffic};
use crate::payload::{self, Answer, Recipe};
use crate::report;
use crate::rig::RigHandle;
use crate::sched;

#[derive(Args)]
pub struct LoadArgs {
    /// Where to send: http://HOST:PORT/PATH (path default /v1/chat/completions).
    url: String,
    /// Connections kept open.
    #[arg(long, short, default_value_t = 64)]
    connections: u32,
    /// Open loop: requests per second at a constant rate. Without it, a closed loop.
    #[arg(long)]
    rate: Option<f64>,
    /// Length of the request body in bytes.
    #[arg(long, default_value_t = 2048)]
    body_bytes: usize,
    /// Length of the JSON answer to ask the measuring backend for.
    #[arg(long, default_value_t = 1024)]
    answer_bytes: usize,
    /// Delay of the answer to ask for, in milliseconds.
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Ask for a stream of this many events instead (server-sent events).
    #[arg(long, default_value_t = 0)]
    events: u32,
    /// Time between events to ask for, in milliseconds.
    #[arg(long, default_value_t = 10)]
    every_ms: u64,
    /// Time from the head to the first event to ask for, in milliseconds; default half of --every-ms.
    #[arg(long)]
    first_ms: Option<u64>,
    /// Warm-up before the window, in milliseconds.
    #[arg(long, default_value_t = 500)]
    warmup_ms: u64,
    /// Length of the window, in milliseconds.
    #[arg(long, default_value_t = 3000)]
    duration_ms: u64,
    /// Send a body from this file instead (then --expect is length or any).
    #[arg(long)]
    body_file: Option<std::path::PathBuf>,
    /// Further request header, "Name: value"; may be repeated.
    #[arg(long = "header", short = 'H')]
    headers: Vec<String>,
    /// What a good answer is, besides status 200 and sound framing.
    #[arg(long, value_enum, default_value_t = Expected::Exact)]
    expect: Expected,
    /// Core of the generator; default: any allowed.
    #[arg(long)]
    core: Option<usize>,
    /// Poll instead of sleeping: takes the whole core, and the generator's own wake-ups out of the figures.
    #[arg(long)]
    spin: bool,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Expected {
    /// The measuring backend's answer, byte for byte.
    Exact,
    /// A body of --answer-bytes.
    Length,
    /// Any body; with --events, any stream with at least one event.
    Any,
}

/// Runs it. `false` when there were faults.
pub fn run(args: &LoadArgs) -> Result<bool, String> {
    let (target, host, path) = parse_url(&args.url)?;
    let ms = |ms: u64| ms.saturating_mul(MS);
    let answer = if args.events > 0 {
        if args.events > payload::EVENTS_MAX {
            return Err(format!("--events {}: expected at most {}", args.events, payload::EVENTS_MAX));
        }
        let every_ns = ms(args.every_ms);
        Answer::Events { count: args.events, first_ns: args.first_ms.map_or(every_ns / 2, ms), every_ns }
    } else {
        Answer::Json { len: args.answer_bytes, delay_ns: ms(args.delay_ms) }
    };
    if args.connections == 0 {
        return Err("--connections 0: expected at least 1".into());
    }
    if args.rate.is_some_and(|rate| !(rate.is_finite() && rate > 0.0)) {
        return Err("--rate: expected a number of requests per second above 0".into());
    }
    let headers = args.headers.iter().map(|text| parse_header(text)).collect::<Result<Vec<_>, _>>()?;
    let recipe = Recipe { body_len: args.body_bytes, answer };
    let request = match &args.body_file {
        None => payload::request(&host, &path, &recipe, &headers)?,
        Some(file) if args.expect == Expected::Exact => {
            return Err(format!("--body-file {}: give --expect length or any with it", file.display()));
        }
        Some(file) => {
            let body = std::fs::read(file).map_err(|e| format!("--body-file {}: {e}", file.display()))?;
            payload::request_with(&host, &path, &body, &headers)
        }
    };
    let expect = match (args.expect, args.events) {
        (Expected::Exact, 0) => Expect::Exact(payload::answer_body(args.answer_bytes)?.into()),
        (Expected::Exact, count) => Expect::Events(count),
        (Expected::Length, _) => Expect::Length(args.answer_bytes),
        (Expected::Any, 0) => Expect::Any,
        (Expected::Any, _) => Expect::AnyEvents,
    };
    let answer_ns = match answer {
        Answer::Json { .. } | Answer::Chat { .. } => 0,
        Answer::Events { count, first_ns, every_ns } => first_ns + u64::from(count) * every_ns,
    };
    let plan = Plan {
        target,
        connections: args.connections,
        arrivals: args.rate.map_or(Arrivals::Closed, Arrivals::Rate),
        traffic: Traffic::Same { request: request.into(), expect },
        warm_ns: ms(args.warmup_ms) + answer_ns,
        window_ns: ms(args.duration_ms),
        grace_ns: 5_000 * MS + answer_ns,
        stagger_ns: answer_ns,
        requests_max: None,
        in_flight_max: None,
        hold: false,
        spin: args.spin,
        probe: None,
    };
    sched::raise_descriptors(u64::from(args.connections) + 256)?;
    let outcome = RigHandle::start(args.core, &[], recipe)?.run(plan)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&outcome).map_err(|e| format!("write JSON: {e}"))?);
    } else {
        print!("{}", report::load_text(&outcome));
    }
    Ok(clean(&outcome))
}

/// Whether nothing went wrong.
pub fn clean(report: &Report) -> bool {
    report.faults.is_empty() && !report.gave_up
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    let bad = || format!("--header '{text}': expected 'Name: value' without line breaks");
    let (name, value) = text.split_once(':').ok_or_else(bad)?;
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if name.is_empty() || !name.bytes().all(token) || value.contains(['\r', '\n', '\0']) {
        return Err(bad());
    }
    Ok((name.to_owned(), value.trim().to_owned()))
}

/// Address, authority and path of an http URL.
fn parse_url(url: &str) -> Result<(SocketAddrV4, String, String), String> {
    let bad = |why: &str| format!("'{url}': {why}, expected http://HOST:PORT/PATH");
    let rest = url.strip_prefix("http://").ok_or_else(|| bad("not an http:// URL"))?;
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let path = if path.len() <= 1 { "/v1/chat/completions" } else { path };
    if path.bytes().any(|b| b <= b' ' || b >= 0x7f) {
        return Err(bad("a byte in the path that must be percent-encoded"));
    }
    let with_port = if authority.contains(':') { authority.to_owned() } else { format!("{authority}:80") };
    let target = with_port
        .to_socket_addrs()
        .map_err(|e| bad(&format!("cannot resolve '{authority}': {e}")))?
        .find_map(|address| match address {
            SocketAddr::V4(address) => Some(address),
            SocketAddr::V6(_) => None,
        })
        .ok_or_else(|| bad("no IPv4 address"))?;
    Ok((target, authority.to_owned(), path.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let (target, host, path) = parse_url("http://127.0.0.1:8000/v1/x?y=z").expect("good");
        assert_eq!(
            (target.to_string(), host, path),
            ("127.0.0.1:8000".into(), "127.0.0.1:8000".into(), "/v1/x?y=z".into())
        );
        assert_eq!(parse_url("http://127.0.0.1").expect("good").0.port(), 80);
        assert_eq!(parse_url("http://127.0.0.1:1/").expect("good").2, "/v1/chat/completions");
        for bad in ["https://a", "127.0.0.1:80", "http://", "http://127.0.0.1:99999/", "http://127.0.0.1/a b"]
        {
            let error = parse_url(bad).expect_err(bad);
            assert!(error.contains("expected http://"), "{error}");
        }
    }

    #[test]
    fn headers() {
        assert_eq!(parse_header("X-A: b c").expect("good"), ("X-A".into(), "b c".into()));
        for bad in ["X-A", ": b", "X A: b", "X: a\r\nY: b"] {
            assert!(parse_header(bad).expect_err(bad).contains("expected"));
        }
    }
}

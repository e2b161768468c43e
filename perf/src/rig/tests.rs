//! The loop over real sockets: against its own backends, and against servers that do wrong in one way each.

use std::io::{Read, Write};

use std::net::Ipv4Addr;

use super::*;
use crate::answer::Expect;
use crate::clock::{MS, S};
use crate::load::{Arrivals, FAULTS_MAX, Traffic};
use crate::payload::{self, Answer};
use crate::process::Snapshot;
use crate::prompts;

const JSON: Recipe = Recipe { body_len: 300, answer: Answer::Json { len: 400, delay_ns: 0 } };

fn rig() -> RigHandle {
    let any = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0);
    RigHandle::start(None, &[any, any], JSON).expect("io_uring works here")
}

fn plan(target: SocketAddrV4, recipe: Recipe) -> Plan {
    let expect = match recipe.answer {
        Answer::Json { len, .. } => Expect::Exact(payload::answer_body(len).expect("fits").into()),
        Answer::Events { count, .. } => Expect::Events(count),
        Answer::Chat { .. } => panic!("a single request has no next turn"),
    };
    Plan {
        target,
        connections: 4,
        arrivals: Arrivals::Closed,
        traffic: Traffic::Same {
            request: payload::request("test", "/", &recipe, &[]).expect("fits").into(),
            expect,
        },
        warm_ns: 50 * MS,
        window_ns: 200 * MS,
        grace_ns: 2 * S,
        stagger_ns: 0,
        requests_max: None,
        in_flight_max: None,
        hold: false,
        spin: false,
        probe: None,
    }
}

/// A server that reads a request's head, sends `answer` and closes; `None`: never answers.
fn server(answer: Option<Vec<u8>>) -> SocketAddrV4 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let Ok(std::net::SocketAddr::V4(address)) = listener.local_addr() else { panic!("bound to IPv4") };
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming().map_while(Result::ok) {
            let mut stream = stream;
            let _ = stream.read(&mut [0; 4096]);
            match &answer {
                Some(answer) => drop(stream.write_all(answer)),
                None => kept.push(stream),
            }
        }
    });
    address
}

#[test]
fn a_closed_loop_accounts_for_every_request() {
    let rig = rig();
    for spin in [false, true] {
        let report = rig.run(Plan { spin, ..plan(rig.backends[0], JSON) }).expect("runs");
        assert_eq!(report.faults.len(), 0, "{:?}", report.examples);
        assert!(report.completed > 0 && report.completed <= report.completed_in_all);
        assert_eq!((report.backend.requests, report.backend.connections), (report.completed_in_all, 4));
        assert_eq!((report.reconnects, report.idle_closed, report.backend.refused), (0, 0, 0));
        let latency = report.latency.expect("timed");
        assert!(latency.count >= report.completed.saturating_sub(4) && latency.p50_ns > 0);
        assert!(report.window_ns >= 150 * MS, "the edges may be a little late on a busy machine");
    }
}

#[test]
fn an_open_loop_sends_exactly_what_is_due() {
    let rig = rig();
    let slow = Recipe { answer: Answer::Json { len: 400, delay_ns: 3 * MS }, ..JSON };
    let report =
        rig.run(Plan { arrivals: Arrivals::Rate(400.0), ..plan(rig.backends[1], slow) }).expect("runs");
    assert_eq!(report.faults.len(), 0, "{:?}", report.examples);
    // The window opens a little late, and ends later by as much.
    assert!((100..=120).contains(&report.completed_in_all), "400 per second for 50 + 200 ms");
    assert_eq!(report.backend.requests, report.completed_in_all);
    let latency = report.latency.expect("timed");
    assert!(latency.p50_ns >= 3 * MS && (40..=80).contains(&latency.count), "{latency:?}");
    assert!(report.lateness.is_some() && report.backend_lateness.is_some());
}

#[test]
fn streams_are_timed_event_by_event() {
    let rig = rig();
    let stream =
        Recipe { body_len: 300, answer: Answer::Events { count: 5, first_ns: MS, every_ns: 2 * MS } };
    let report = rig.run(Plan { stagger_ns: 10 * MS, ..plan(rig.backends[0], stream) }).expect("runs");
    assert_eq!(report.faults.len(), 0, "{:?}", report.examples);
    let (latency, first) = (report.latency.expect("timed"), report.first_event.expect("timed"));
    let (delay, gap) = (report.event_delay.expect("stamped"), report.event_gap.expect("timed"));
    assert_eq!(first.count, latency.count);
    assert_eq!((delay.count, gap.count), (5 * latency.count, 4 * latency.count));
    assert!(first.p50_ns >= MS && latency.p50_ns >= 9 * MS && delay.p50_ns < first.p50_ns);
    assert!(report.events > 0 && report.event_pieces > 0 && report.event_pieces <= report.events);
}

#[test]
fn conversations_come_back_on_each_connection() {
    let rig = rig();
    let script = std::sync::Arc::new(prompts::Script::new("test", "/", 2048).expect("fits"));
    let talks = Plan {
        connections: 3,
        requests_max: Some(23),
        window_ns: 20 * S,
        traffic: Traffic::Talks(script),
        ..plan(rig.backends[0], JSON)
    };
    let report = rig.run(talks).expect("runs");
    assert_eq!((report.completed_in_all, report.faults.len()), (23, 0), "{:?}", report.examples);
    assert_eq!(report.backend.refused, 0, "{:?}", report.backend.example);
    // Six conversations at a time, of four requests each: of 23 requests, 6 to 10 begin one.
    let later = report.backend.turns_later;
    assert!((13..=17).contains(&later) && report.backend.turns_at_home == later, "{later}");
}

#[test]
fn every_way_to_answer_wrongly_is_counted_as_such() {
    let rig = rig();
    let body = payload::answer_body(400).expect("fits");
    let mut altered = body.clone();
    altered[350] ^= 1;
    let good = payload::response("200 OK", "application/json", &body);
    let cut = good[..good.len() - 10].to_vec();
    for (answer, kind) in [
        (payload::response("502 Bad Gateway", "text/plain", b"no"), "status"),
        (payload::response("200 OK", "application/json", &altered), "body"),
        (payload::response("200 OK", "application/json", &body[..399]), "length"),
        (cut, "closed"),
        (Vec::new(), "closed"),
        (b"220 smtp ready\r\n\r\n".to_vec(), "framing"),
        ([&good[..], b"more"].concat(), "surplus"),
    ] {
        let counted = Plan { connections: 1, requests_max: Some(3), ..plan(server(Some(answer)), JSON) };
        let report = rig.run(counted).expect("runs");
        assert_eq!(report.faults.keys().copied().collect::<Vec<_>>(), [kind], "{:?}", report.examples);
        assert_eq!((report.faults[kind], report.completed_in_all), (3, 0));
        assert!(report.reconnects >= 2, "each fault costs the connection");
    }
}

#[test]
fn a_server_that_closes_after_each_answer_is_no_fault_but_seen() {
    let rig = rig();
    let body = payload::answer_body(400).expect("fits");
    let closing =
        [&b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 400\r\n\r\n"[..], &body].concat();
    let counted = Plan { connections: 1, requests_max: Some(5), ..plan(server(Some(closing)), JSON) };
    let report = rig.run(counted).expect("runs");
    assert_eq!((report.faults.len(), report.completed_in_all), (0, 5), "{:?}", report.examples);
    assert!(report.reconnects >= 4);
}

#[test]
fn what_is_never_answered_or_never_sent_is_unfinished() {
    let rig = rig();
    let stalled = Plan {
        connections: 2,
        arrivals: Arrivals::Rate(100.0),
        warm_ns: 0,
        grace_ns: 100 * MS,
        ..plan(server(None), JSON)
    };
    let report = rig.run(stalled).expect("runs");
    let unfinished = report.faults["unfinished"];
    assert!((20..=24).contains(&unfinished), "two open, eighteen that found no connection: {unfinished}");
    assert_eq!(report.completed_in_all, 0);
}

#[test]
fn a_peer_that_is_not_there_is_an_error_at_once() {
    let rig = rig();
    let nobody = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let Ok(std::net::SocketAddr::V4(address)) = nobody else { panic!("bound to IPv4") };
    let error = rig.run(plan(address, JSON)).expect_err("refused");
    assert!(error.contains("0 of 4 connections") && error.contains("refused"), "{error}");
    assert!(rig.run(plan(rig.backends[0], JSON)).is_ok(), "the next plan is not disturbed");
}

#[test]
fn held_connections_have_one_request_each_and_stay_until_released() {
    let rig = rig();
    let held = Plan {
        connections: 50,
        requests_max: Some(50),
        in_flight_max: Some(2),
        hold: true,
        window_ns: 5 * S,
        ..plan(rig.backends[0], Recipe { answer: Answer::Json { len: 400, delay_ns: 10 * MS }, ..JSON })
    };
    let report = rig.run(held).expect("runs");
    assert_eq!((report.completed_in_all, report.faults.len()), (50, 0), "{:?}", report.examples);
    assert!(report.window_ns < 4 * S, "it ends when all are answered");
    assert!(report.window_ns >= 250 * MS, "50 answers of 10 ms, two at a time");
    assert_eq!(report.backend.connections, 50);
    let other = rig.run(plan(rig.backends[0], JSON)).expect("runs");
    assert_eq!((other.faults.len(), other.idle_closed), (0, 0), "the held ones are not in its way");
    assert_eq!(rig.release(), Ok(50));
    assert_eq!(rig.release(), Ok(0));
}

#[test]
fn large_bodies_arrive_whole() {
    let rig = rig();
    let large = Recipe { body_len: 3 << 20, answer: Answer::Json { len: 1 << 20, delay_ns: 0 } };
    let counted = Plan { requests_max: Some(12), window_ns: 20 * S, ..plan(rig.backends[0], large) };
    let report = rig.run(counted).expect("runs");
    assert_eq!((report.completed_in_all, report.faults.len()), (12, 0), "{:?}", report.examples);
    assert_eq!(report.backend.refused, 0, "{:?}", report.backend.example);
}

#[test]
fn a_server_that_breaks_each_connection_is_given_up() {
    let rig = rig();
    let report = rig.run(Plan { window_ns: 60 * S, ..plan(server(Some(Vec::new())), JSON) }).expect("runs");
    assert!(report.gave_up && report.faults_total() >= FAULTS_MAX, "{:?}", report.faults);
}

#[test]
fn the_probe_is_read_at_both_edges_and_its_failure_ends_the_plan() {
    let rig = rig();
    let mut reads = 0;
    let counting = move || {
        reads += 1;
        Ok(Snapshot { cpu_ns: reads * 1_000, ..Snapshot::default() })
    };
    let report =
        rig.run(Plan { probe: Some(Box::new(counting)), ..plan(rig.backends[0], JSON) }).expect("runs");
    assert_eq!(report.usage.expect("probed").cpu_ns, 1_000);
    let failing = || Err("process 1 has ended".to_owned());
    let error = rig.run(Plan { probe: Some(Box::new(failing)), ..plan(rig.backends[0], JSON) });
    assert!(error.expect_err("no figure without its cost").contains("has ended"));
}

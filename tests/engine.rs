//! The simulated engine over real sockets: API shapes, prefix cache, queue, faults, aborts.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringway::demo::client::{Answer, Client};
use ringway::engine::scheduler::Rates;
use ringway::engine::{EngineHandle, EngineOptions, spawn};
use ringway::proto::http1::Method;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn fast() -> EngineOptions {
    EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 0.0, slots: 64, queue_max: 64 },
        ..EngineOptions::default()
    }
}

fn engine(options: EngineOptions) -> EngineHandle {
    spawn(options).expect("the engine starts")
}

fn client(engine: &EngineHandle) -> Client {
    Client::connect(engine.addr()).expect("the engine accepts")
}

fn post(client: &mut Client, path: &str, body: &Value) -> Answer {
    client.post(path, &body.to_string()).expect("an answer")
}

fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": text}]});
    let more = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(more);
    body
}

/// The events of a stream: name (empty where there is none) and data.
fn events(answer: &Answer) -> Vec<(String, Value)> {
    let text = answer.text();
    assert!(text.ends_with("\n\n"), "{text}");
    assert!(answer.head.field("content-type").is_some_and(|kind| kind.starts_with("text/event-stream")));
    text.trim_end()
        .split("\n\n")
        .map(|event| {
            let mut name = String::new();
            let mut data = Value::Null;
            for line in event.lines() {
                match line.split_once(": ") {
                    Some(("event", text)) => name = text.to_owned(),
                    Some(("data", "[DONE]")) => data = json!("[DONE]"),
                    Some(("data", text)) => data = serde_json::from_str(text).expect(text),
                    _ => panic!("unexpected line {line:?}"),
                }
            }
            (name, data)
        })
        .collect()
}

#[expect(clippy::disallowed_methods, reason = "a test reads the clock to judge the time that things take")]
fn now() -> Instant {
    Instant::now()
}

#[expect(clippy::disallowed_methods, reason = "a test waits for another thread")]
fn pause(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// Waits until `condition` holds, for 2 seconds at most.
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let since = now();
    while !condition() {
        assert!(since.elapsed() < Duration::from_secs(2), "{what}");
        pause(2);
    }
}

#[path = "engine/apis.rs"]
mod apis;
#[path = "engine/cache.rs"]
mod cache;
#[path = "engine/faults.rs"]
mod faults;

#[test]
fn a_client_that_goes_frees_its_slot_at_once() {
    let options = EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 10.0, slots: 1, queue_max: 1 },
        ..EngineOptions::default()
    };
    let engine = engine(options);
    for stream in [true, false] {
        let before = engine.stats();
        let mut first = client(&engine);
        let body = chat("hello", json!({"stream": stream, "max_tokens": 64})).to_string();
        first.send("POST", CHAT, "", body.as_bytes()).expect("sent");
        eventually("the request runs", || engine.stats().in_flight == 1);
        let mut second = client(&engine);
        second
            .send("POST", CHAT, "", chat("x", json!({"max_tokens": 1})).to_string().as_bytes())
            .expect("sent");
        eventually("the second waits", || engine.stats().in_flight == 2);
        let since = now();
        drop(first);
        assert_eq!(second.head(Method::Post).expect("answered").status, 200);
        assert!(since.elapsed() < Duration::from_millis(500), "the slot was free at once");
        let stats = engine.stats();
        assert_eq!((stats.aborted - before.aborted, stats.completed - before.completed), (1, 1));
        assert_eq!(stats.in_flight, 0);
    }
}

#[test]
fn a_waiting_client_that_goes_leaves_the_queue() {
    let options = EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 100.0, slots: 1, queue_max: 1 },
        ..EngineOptions::default()
    };
    let engine = engine(options);
    let long = chat("hello", json!({"max_tokens": 64})).to_string();
    let mut running = client(&engine);
    running.send("POST", CHAT, "", long.as_bytes()).expect("sent");
    eventually("it runs", || engine.stats().in_flight == 1);
    let mut waiting = client(&engine);
    waiting.send("POST", CHAT, "", long.as_bytes()).expect("sent");
    eventually("it waits", || engine.stats().in_flight == 2);
    let full = post(&mut client(&engine), CHAT, &chat("x", json!({})));
    assert_eq!((full.status(), full.head.field("retry-after")), (503, Some("1")));
    drop(waiting);
    eventually("it left", || engine.stats().aborted == 1);
    assert_eq!(post(&mut client(&engine), CHAT, &chat("x", json!({"max_tokens": 1}))).status(), 200);
    let stats = engine.stats();
    assert_eq!((stats.rejected, stats.aborted, stats.running_peak), (1, 1, 1));
}

/// A router that gives up on one connection and at once asks again on another never has two requests in flight, and must
/// not be told that it had, however late the engine notices the close.
#[test]
fn a_closed_request_does_not_count_towards_the_peak() {
    let engine = engine(EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 10.0, slots: 8, queue_max: 8 },
        ..EngineOptions::default()
    });
    let body = chat("hello", json!({"stream": true})).to_string();
    for _ in 0..100 {
        let mut client = client(&engine);
        client.send("POST", CHAT, "", body.as_bytes()).expect("sent");
        client.head(Method::Post).expect("a head");
    }
    eventually("all are gone", || engine.stats().in_flight == 0);
    let stats = engine.stats();
    assert_eq!((stats.requests, stats.aborted, stats.in_flight_peak), (100, 100, 1));
}

#[test]
fn tokens_come_one_by_one_at_the_decode_rate() {
    let options = EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 50.0, slots: 4, queue_max: 4 },
        ..EngineOptions::default()
    };
    let engine = engine(options);
    let mut client = client(&engine);
    let body = chat("hello", json!({"stream": true, "max_tokens": 10})).to_string();
    let since = now();
    client.send("POST", CHAT, "", body.as_bytes()).expect("sent");
    let mut head = client.head(Method::Post).expect("a head");
    let mut arrivals = Vec::new();
    while let Some(piece) = client.piece(&mut head).expect("a piece") {
        arrivals.push((since.elapsed(), piece));
    }
    assert_eq!(arrivals.len(), 10, "one arrival per token, the first with the role, the last with the end");
    let total = arrivals[9].0 - arrivals[0].0;
    assert!((Duration::from_millis(175)..Duration::from_millis(400)).contains(&total), "{total:?}");
}

#[test]
fn prefill_takes_time_and_cached_tokens_do_not() {
    let options = EngineOptions {
        rates: Rates { prefill_tps: 10_000.0, decode_tps: 0.0, slots: 4, queue_max: 4 },
        ..EngineOptions::default()
    };
    let engine = engine(options);
    let mut client = client(&engine);
    let body = chat(&"word".repeat(3000), json!({"max_tokens": 1}));
    let mut spans = Vec::new();
    for _ in 0..2 {
        let since = now();
        assert_eq!(post(&mut client, CHAT, &body).status(), 200);
        spans.push(since.elapsed());
    }
    assert!(spans[0] >= Duration::from_millis(300), "{spans:?}");
    assert!(spans[1] < Duration::from_millis(150), "{spans:?}");
}

#[test]
fn many_clients_at_once_are_all_answered_and_slots_hold() {
    let options = EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 2000.0, slots: 3, queue_max: 100 },
        ..EngineOptions::default()
    };
    let engine = engine(options);
    std::thread::scope(|scope| {
        for number in 0..20 {
            let engine = &engine;
            scope.spawn(move || {
                let mut client = client(engine);
                for turn in 0..10 {
                    let stream = (number + turn) % 2 == 0;
                    let body = chat(&format!("{number} {turn}"), json!({"stream": stream, "max_tokens": 8}));
                    let answer = post(&mut client, CHAT, &body);
                    assert_eq!(answer.status(), 200);
                    if stream {
                        assert_eq!(events(&answer).last().expect("events").1, json!("[DONE]"));
                    }
                }
            });
        }
    });
    let stats = engine.stats();
    assert_eq!((stats.requests, stats.completed, stats.in_flight), (200, 200, 0));
    assert_eq!(stats.running_peak, 3);
    assert_eq!(stats.output_tokens, 200 * 8);
    assert!(stats.in_flight_peak <= 20);
}

#[test]
fn requests_in_one_write_are_answered_in_order() {
    let engine = engine(fast());
    let mut stream = TcpStream::connect(engine.addr()).expect("accepted");
    let body = chat("hello", json!({"max_tokens": 1})).to_string();
    let one = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let last = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    stream.write_all(format!("{one}{one}{last}").as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answered and closed");
    assert_eq!(text.matches("HTTP/1.1 200").count(), 3, "{text}");
    let order: Vec<usize> =
        ["chat.completion", "\"object\":\"list\""].map(|what| text.rfind(what).expect(what)).into();
    assert!(order[0] < order[1]);
}

#[test]
fn bodies_come_in_chunks_in_pieces_and_after_100_continue() {
    let engine = engine(fast());
    let body = chat("hello", json!({"max_tokens": 1})).to_string();
    let mut stream = TcpStream::connect(engine.addr()).expect("accepted");
    stream.set_nodelay(true).expect("set");
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n");
    for part in head.as_bytes().chunks(40) {
        stream.write_all(part).expect("sent");
        pause(1);
    }
    for part in body.as_bytes().chunks(9) {
        stream.write_all(format!("{:x}\r\n", part.len()).as_bytes()).expect("sent");
        stream.write_all(part).expect("sent");
        stream.write_all(b"\r\n").expect("sent");
        pause(1);
    }
    stream.write_all(b"0\r\n\r\n").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answered and closed");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");

    let mut stream = TcpStream::connect(engine.addr()).expect("accepted");
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("sent");
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).expect("told to go on");
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answered and closed");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[test]
fn malformed_and_misplaced_requests_get_clear_answers() {
    let engine = engine(fast());
    let raw = |bytes: &str| {
        let mut stream = TcpStream::connect(engine.addr()).expect("accepted");
        stream.write_all(bytes.as_bytes()).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("answered and closed");
        text
    };
    let text = raw("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n");
    assert!(text.starts_with("HTTP/1.1 400") && text.contains("Content-Length beside"), "{text}");
    let text = raw("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n");
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    let mut client = client(&engine);
    assert_eq!(client.get("/v1/nothing").expect("answered").status(), 404);
    assert_eq!(client.get(CHAT).expect("answered").status(), 405);
    assert_eq!(client.post("/health", "").expect("answered").status(), 405);
    let coded = client.call("POST", CHAT, "content-encoding: gzip\r\n", b"\x1f\x8b").expect("answered");
    assert_eq!(coded.status(), 415);
    assert_eq!(client.get("/health").expect("the connection goes on").status(), 200);
}

#[test]
fn stop_closes_everything_and_frees_the_port() {
    let engine = engine(EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 1.0, slots: 4, queue_max: 4 },
        ..EngineOptions::default()
    });
    let addr = engine.addr();
    let mut idle = client(&engine);
    assert_eq!(idle.get("/health").expect("answered").status(), 200);
    let mut busy = client(&engine);
    busy.send("POST", CHAT, "", chat("x", json!({"stream": true})).to_string().as_bytes()).expect("sent");
    busy.head(Method::Post).expect("a head");
    engine.stop();
    assert_eq!(TcpStream::connect(addr).expect_err("nobody listens").kind(), ErrorKind::ConnectionRefused);
    let mut byte = [0];
    assert!(matches!(idle.stream().read(&mut byte), Ok(0) | Err(_)), "idle connections are closed");
    let again = spawn(EngineOptions { listen: addr, ..fast() }).expect("the port is free again");
    assert_eq!(again.addr(), addr);
}

#[test]
fn idle_connections_are_closed_when_told_to() {
    let engine = engine(EngineOptions { keepalive_ms: 100, ..fast() });
    let mut client = client(&engine);
    assert_eq!(client.get("/health").expect("answered").status(), 200);
    let since = now();
    let mut byte = [0];
    assert_eq!(client.stream().read(&mut byte).expect("closed in good order"), 0);
    assert!((50..1000).contains(&since.elapsed().as_millis()), "{:?}", since.elapsed());
    eventually("it is forgotten", || engine.stats().connections_open == 0);
}

#[test]
fn metrics_follow_what_runs() {
    let engine = engine(EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 20.0, slots: 1, queue_max: 4 },
        kv_blocks: 100,
        ..EngineOptions::default()
    });
    let mut busy: Vec<Client> = (0..3).map(|_| client(&engine)).collect();
    for client in &mut busy {
        let body = chat("hello", json!({"max_tokens": 60})).to_string();
        client.send("POST", CHAT, "", body.as_bytes()).expect("sent");
    }
    eventually("all are there", || engine.stats().in_flight == 3);
    let text = client(&engine).get("/metrics").expect("answered").text();
    let value = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(&format!("vllm:{name}{{"))).expect(name);
        line.rsplit(' ').next().expect("a value").parse().expect("a number")
    };
    assert_eq!((value("num_requests_running"), value("num_requests_waiting")), (1.0, 2.0));
    assert!(value("kv_cache_usage_perc") > 0.0);
    assert!(text.contains(r#"vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0"#));
}

#[test]
fn the_command_says_where_it_listens_and_ends_in_good_order() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ringway"))
        .args(["engine", "--listen", "127.0.0.1:0", "--model", "a", "--model", "b", "--seed", "7"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().expect("piped")));
    let first = lines.next().expect("a line").expect("text");
    let addr = first.strip_prefix("listening engine ").unwrap_or_else(|| panic!("{first}"));
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    let mut client = Client::connect(addr.parse().expect("an address")).expect("accepted");
    let models = client.get("/v1/models").expect("answered").json().expect("json");
    assert_eq!((models["data"][0]["id"].as_str(), models["data"][1]["id"].as_str()), (Some("a"), Some("b")));
    // SAFETY: plain system call; the child is ours and has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let output = child.wait_with_output().expect("ended");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_command_refuses_what_is_wrong_in_words() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    for (args, code, said) in [
        (vec!["--fault", "explode"], 1, "unknown fault `explode`"),
        (vec!["--listen", address.as_str()], 2, "choose another port"),
    ] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_ringway")).arg("engine").args(&args).output().expect("ran");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        assert!(text.contains(said), "{args:?}: {text}");
    }
}

//! Engines that die or freeze under load.

mod support;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use support::*;

/// The built-in engine, in a process of its own so that it can be killed or frozen.
struct OwnProcess {
    child: Child,
    address: SocketAddr,
}

impl OwnProcess {
    /// Serves `m`; each answer takes about 20 ms.
    fn start() -> OwnProcess {
        let pace = ["--slots", "64", "--prefill-tps", "0", "--decode-tps", "250", "--output-tokens", "5"];
        let place = ["engine", "--listen", "127.0.0.1:0", "--model", "m"];
        let mut command = support::router::command(&[&place[..], &pace[..]].concat());
        let mut child = command.stderr(Stdio::null()).spawn().expect("the binary starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let address = lines
            .map_while(Result::ok)
            .find_map(|line| Some(line.strip_prefix("listening engine ")?.parse().expect("an address")))
            .expect("the engine says where it is");
        OwnProcess { child, address }
    }
    fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.child.id()).expect("process ids are positive");
        // SAFETY: sends a signal to our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
    /// As `kill -9`; returns when the process is gone, and its sockets with it: those of a ring are closed by the
    /// kernel some time after the process has been reaped.
    fn kill(&mut self) {
        let mut witnesses: Vec<_> = (0..4).map(|_| Client::connect(self.address)).collect();
        self.child.kill().expect("own child");
        self.child.wait().expect("own child");
        for witness in &mut witnesses {
            let (_, fault) = witness.rest();
            assert!(matches!(fault, Fault::Eof { .. } | Fault::Reset), "{fault}");
        }
        eventually(seconds(5), "connects are refused", || match Client::try_connect(self.address) {
            Ok(_) => Err("connected".into()),
            Err(_) => Ok(()),
        });
    }
}

impl Drop for OwnProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How one request of the load ended.
#[derive(Debug)]
struct Outcome {
    begun: Instant,
    /// What the client saw, where it was not a whole answer of 200.
    failed: Option<String>,
    server: Option<String>,
}

/// Sends requests from `clients` connections, every second one a stream, until `stop`.
fn load(router: &Router, clients: usize, stop: &AtomicBool, outcomes: &Mutex<Vec<Outcome>>) {
    std::thread::scope(|scope| {
        for number in 0..clients {
            scope.spawn(move || {
                let mut client = router.client();
                let mut turn = number;
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    let body = if turn % 2 == 0 { chat_stream("m", "stream") } else { chat("m", "plain") };
                    let begun = now();
                    client.send(&request("POST", CHAT, &[], &body));
                    let (status, head, _) = match client.head() {
                        Ok(head) => head,
                        Err(fault) => panic!("no answer at all: {fault}"),
                    };
                    let server = head.one("X-Lifeboat-Server");
                    let mut framing = Client::framing("POST", status, &head).expect("clean framing");
                    let mut text = Vec::new();
                    let ended = loop {
                        match client.piece(&mut framing) {
                            Ok(Some(piece)) => text.extend(piece),
                            Ok(None) => break Ok(()),
                            Err(fault) => break Err(fault),
                        }
                    };
                    let failed = match (status, ended) {
                        (200, Ok(())) => {
                            let whole = if turn % 2 == 0 {
                                text.ends_with(b"data: [DONE]\n\n")
                            } else {
                                serde_json::from_slice::<serde_json::Value>(&text).is_ok()
                            };
                            assert!(whole, "looks whole: {:?}", String::from_utf8_lossy(&text));
                            None
                        }
                        (200, Err(fault @ (Fault::Eof { .. } | Fault::Reset))) => {
                            Some(format!("cut: {fault}"))
                        }
                        (502, Ok(())) => {
                            let json: serde_json::Value =
                                serde_json::from_slice(&text).expect("a JSON error");
                            assert_eq!(json["error"]["code"], "upstream_error", "{json}");
                            assert_eq!(
                                head.one("X-Lifeboat-Reject-Reason").as_deref(),
                                Some("upstream_error")
                            );
                            Some("502".into())
                        }
                        other => panic!("{other:?}: {}{}", head.text(), String::from_utf8_lossy(&text)),
                    };
                    let cut = failed.as_ref().is_some_and(|f| f.starts_with("cut"));
                    let closes = head.all("connection").iter().any(|v| v.eq_ignore_ascii_case(b"close"));
                    outcomes.lock().expect("no holder panics").push(Outcome { begun, failed, server });
                    if cut || closes {
                        client = router.client();
                    }
                }
            });
        }
    });
}

/// `kill -9` of one of two engines under load, on two shards: only requests that were in flight on it fail, each with a
/// clear error (a JSON 502, or a stream that visibly does not end); none of those that begin afterwards.
#[test]
fn killing_an_engine_fails_only_what_it_had() {
    const CLIENTS: usize = 32;
    let mut victim = OwnProcess::start();
    let healthy = Engine::start(|exchange| {
        if !exchange.body_has("stream")? {
            exchange.pause(ms(15));
            return exchange.reply_ok();
        }
        exchange.stream_head()?;
        for _ in 0..4 {
            exchange.chunk(b"data: x\n\n")?;
            exchange.pause(ms(5));
        }
        exchange.chunk(b"data: [DONE]\n\n")?;
        exchange.end()
    });
    let router = Setup::new()
        .shards(2)
        .server_at("victim", &format!("http://{}", victim.address), &[])
        .server("healthy", &healthy, &[])
        .start();
    let (stop, outcomes) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let (killed, dead) = std::thread::scope(|scope| {
        scope.spawn(|| load(&router, CLIENTS, &stop, &outcomes));
        pause(ms(1000));
        let killed = now();
        victim.kill();
        let dead = now();
        pause(ms(2500));
        stop.store(true, Ordering::Relaxed);
        (killed, dead)
    });
    let outcomes = outcomes.into_inner().expect("no holder panics");
    let failed: Vec<_> = outcomes.iter().filter(|o| o.failed.is_some()).collect();
    let before = outcomes.iter().filter(|o| o.begun < killed).count();
    let after = outcomes.iter().filter(|o| o.begun > dead).count();
    assert!(before > 200 && after > 500, "the load ran: {before} before, {after} after");
    assert!(
        outcomes.iter().any(|o| o.begun < killed && o.server.as_deref() == Some("victim")),
        "the victim had its share"
    );
    assert!(!failed.is_empty(), "requests were in flight on it");
    assert!(failed.len() <= CLIENTS, "more failed than were in flight: {failed:#?}");
    for outcome in &failed {
        assert!(
            // On a busy machine the router's core hears of the death a little later than this one.
            outcome.begun <= dead + ms(10),
            "a request that began {:?} after the death failed: {outcome:?}",
            outcome.begun - dead
        );
        assert_ne!(outcome.server.as_deref(), Some("healthy"), "{outcome:?}");
    }
    router.wait_idle(seconds(2));
    router.wait_not_up("victim");
    assert_eq!(router.server_state("healthy")["state"], "up");
}

/// An engine that freezes (SIGSTOP) holds what it has until the limit, then is left alone by its checks; others go on
/// unharmed; when it thaws it is used again.
#[test]
fn a_frozen_engine_is_left_alone() {
    let frozen = OwnProcess::start();
    let healthy = Engine::answering();
    let router = Setup::new()
        .limit("response_head_timeout_ms = 1000")
        .health("timeout_ms = 200")
        .server_at("frozen", &format!("http://{}", frozen.address), &[])
        .server("healthy", &healthy, &[])
        .start();
    for _ in 0..4 {
        assert_eq!(router.post(CHAT, &chat("m", "x")).status, 200);
    }
    frozen.signal(libc::SIGSTOP);
    router.wait_not_up("frozen");
    for _ in 0..20 {
        let start = now();
        let response = router.post(CHAT, &chat("m", "x"));
        assert_eq!((response.status, response.lifeboat("Server").as_deref()), (200, Some("healthy")));
        assert!(start.elapsed() < ms(500));
    }
    frozen.signal(libc::SIGCONT);
    router.wait_up(&["frozen", "healthy"]);
    eventually(seconds(3), "it is used again", || {
        let response = router.post(CHAT, &chat("m", "x"));
        if response.lifeboat("Server").as_deref() == Some("frozen") {
            Ok(())
        } else {
            Err("the other".into())
        }
    });
    router.wait_idle(seconds(2));
}

/// An engine that stops and starts again and again under load: while another is there, no request that begins while it
/// is down, or up, fails; only those in flight at the moment it stops may.
#[test]
fn an_engine_that_comes_and_goes_costs_only_what_it_had() {
    const CLIENTS: usize = 8;
    let mut flapping = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.pause(ms(3));
        exchange.reply_ok()
    });
    let steady = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.pause(ms(3));
        exchange.reply_ok()
    });
    let router = Setup::new()
        .health("interval_ms = 50")
        .health("bench_ms = 50")
        .server("flapping", &flapping, &[])
        .server("steady", &steady, &[])
        .start();
    let stop = AtomicBool::new(false);
    let failed = Mutex::new(Vec::new());
    let stops = std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            let (router, stop, failed) = (&router, &stop, &failed);
            scope.spawn(move || {
                let mut client = router.client();
                while !stop.load(Ordering::Relaxed) {
                    let response = client.post(CHAT, &chat("m", "x"));
                    if response.status != 200 {
                        response.assert_rejected(502, "upstream_error");
                        failed.lock().expect("no holder panics").push(response.text());
                    }
                    if !response.keeps {
                        client = router.client();
                    }
                }
            });
        }
        let stops = 6;
        for _ in 0..stops {
            pause(ms(250));
            flapping.stop();
            pause(ms(250));
            flapping.listen();
        }
        stop.store(true, Ordering::Relaxed);
        stops
    });
    let failed = failed.into_inner().expect("no holder panics");
    assert!(
        failed.len() <= stops * CLIENTS,
        "{} of at most {} failed: {failed:?}",
        failed.len(),
        stops * CLIENTS
    );
    assert!(flapping.request_count() > 50, "it was used again after each start");
    router.wait_up(&["flapping", "steady"]);
    router.wait_idle(seconds(2));
}

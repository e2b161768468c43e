//! Streams and cancellation, over real sockets: what the client sees while an answer comes, and what the engine sees
//! when the client goes.

mod support;

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::*;

/// How a client leaves.
fn leave(client: Client, number: usize) {
    if number.is_multiple_of(2) { drop(client) } else { client.reset() }
}

/// The sum of all upstream errors counted.
fn upstream_errors(router: &Router) -> f64 {
    router.metrics().sum("ringway_upstream_errors_total", &[])
}

/// A1: a client that goes before its answer takes its request with it. The engine's connection closes within 500 ms,
/// the slot is free again, and it counts as the client's doing: nobody is benched, no server is blamed. 100 times.
#[test]
fn a1_a_cancelled_request_ends_at_the_engine() {
    const TIMES: usize = 100;
    let engine = Engine::start(|exchange| {
        if exchange.body_has("stays")? {
            return exchange.reply_ok();
        }
        exchange.wait_close(seconds(30));
        Ok(Next::Close)
    });
    let router = Setup::new().server("a", &engine, &["max_concurrency = 1"]).start();
    for number in 0..TIMES {
        let mut client = router.client();
        client.send(&request("POST", CHAT, &[], &chat("m", "goes")));
        let connection = engine.wait_requests(number + 1)[number].connection;
        if number < 5 {
            // The first few as a person would: some time into the work, which the gauge shows.
            pause(ms(200));
            router.wait_metric("ringway_in_flight", &[("server", "a")], 1.0, ms(500));
        }
        let left = now();
        leave(client, number);
        let (closed, _) = engine.wait_closed(connection, seconds(5));
        let took = closed.saturating_duration_since(left);
        assert!(took < ms(500), "cancel {number} reached the engine after {took:?}");
    }
    router.wait_idle(ms(500));
    router.wait_metric("ringway_client_aborts_total", &[], TIMES as f64, seconds(2));
    assert_eq!(upstream_errors(&router), 0.0, "a cancelled request is no fault of the server");
    assert_eq!(router.server_state("a")["state"], "up", "not benched");
    assert_eq!(router.post(CHAT, &chat("m", "stays")).status, 200, "the only slot is free");
}

/// A1, streaming: the same while an answer is being streamed, also when the engine is silent between two events.
#[test]
fn a1_a_cancelled_stream_ends_at_the_engine() {
    const TIMES: usize = 100;
    let engine = Engine::start(|exchange| {
        exchange.stream_head()?;
        exchange.chunk(b"data: {\"n\":0}\n\n")?;
        if exchange.body_has("talkative")? {
            // Keeps writing until that fails: a router that reads on for nobody would let it.
            for _ in 0..3000 {
                exchange.pause(ms(10));
                if support::wire::peer_gone(std::os::fd::AsRawFd::as_raw_fd(&exchange.wire.socket)) {
                    break;
                }
                exchange.chunk(b"data: {\"n\":1}\n\n")?;
            }
        }
        exchange.wait_close(seconds(30));
        Ok(Next::Close)
    });
    let router = Setup::new().server("a", &engine, &["max_concurrency = 1"]).start();
    for number in 0..TIMES {
        let mut client = router.client();
        let tag = if number % 4 < 2 { "silent" } else { "talkative" };
        client.send(&request("POST", CHAT, &[], &chat_stream("m", tag)));
        let (status, head, _) = client.head().unwrap();
        assert_eq!(status, 200);
        let mut framing = Client::framing("POST", status, &head).unwrap();
        client.piece(&mut framing).unwrap().expect("the first event");
        let connection = engine.requests()[number].connection;
        let left = now();
        leave(client, number);
        let (closed, _) = engine.wait_closed(connection, seconds(5));
        let took = closed.saturating_duration_since(left);
        assert!(took < ms(500), "cancel {number} ({tag}) reached the engine after {took:?}");
    }
    router.wait_idle(ms(500));
    router.wait_metric("ringway_client_aborts_total", &[], TIMES as f64, seconds(2));
    assert_eq!(upstream_errors(&router), 0.0, "a cancelled stream is no fault of the server");
    assert_eq!(router.server_state("a")["state"], "up", "not benched");
}

/// A client that shuts down only its sending side has gone (`half_close = "abort"`, the default) or still waits
/// (`"allow"`).
#[test]
fn a_half_closed_client_has_gone_or_still_waits_as_configured() {
    let slow = || {
        Engine::start(|exchange| {
            exchange.read_body()?;
            match exchange.work(ms(400)) {
                Some(_) => Ok(Next::Close),
                None => exchange.reply_ok(),
            }
        })
    };
    let engine = slow();
    let router = Setup::new().server("a", &engine, &[]).start();
    let mut client = router.client();
    client.send(&request("POST", CHAT, &[], &chat("m", "x")));
    let connection = engine.wait_requests(1)[0].connection;
    let left = now();
    client.finish_sending();
    let (closed, _) = engine.wait_closed(connection, seconds(2));
    assert!(closed - left < ms(350), "the engine was told after {:?}", closed - left);
    router.wait_metric("ringway_client_aborts_total", &[], 1.0, seconds(2));

    let engine = slow();
    let router = Setup::new().limit("half_close = \"allow\"").server("a", &engine, &[]).start();
    let mut client = router.client();
    client.send(&request("POST", CHAT, &[], &chat("m", "x")));
    engine.wait_requests(1);
    client.finish_sending();
    assert_eq!(client.response().status, 200, "it still waits");
    router.wait_metric("ringway_client_aborts_total", &[], 0.0, seconds(2));
    // A full close in that mode is still noticed, at the latest when something is written to nobody.
    let client = {
        let mut client = router.client();
        client.send(&request("POST", CHAT, &[], &chat("m", "x")));
        engine.wait_requests(2);
        client
    };
    client.reset();
    router.wait_idle(seconds(2));
}

/// Where half-closing is allowed, a client that shuts down its sending side and later resets its connection has gone all
/// the same: its slot is free again, and the engine is told.
#[test]
fn a_half_closed_client_that_resets_frees_its_slot() {
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.wait_close(seconds(20));
        Ok(Next::Close)
    });
    let router = Setup::new().limit("half_close = \"allow\"").server("a", &engine, &[]).start();
    for (number, size) in [2, 60_000, 70_000, 200_000, 900_000].into_iter().enumerate() {
        let mut client = router.client();
        client.send(&request("POST", "/v1/embeddings", &[], &pattern(number, size)));
        let connection = engine.wait_requests(number + 1)[number].connection;
        eventually(seconds(5), "the engine has the whole body", || {
            if engine.requests()[number].complete { Ok(()) } else { Err(format!("{size} bytes")) }
        });
        client.finish_sending();
        pause(ms(120));
        router.wait_metric("ringway_in_flight", &[("server", "a")], 1.0, ms(500));
        assert_eq!(engine.connection(connection).closed, None, "{size} bytes: it still waits");
        client.reset();
        router.wait_metric("ringway_in_flight", &[], 0.0, seconds(1));
        engine.wait_closed(connection, seconds(1));
    }
    router.wait_metric("ringway_client_aborts_total", &[], 5.0, seconds(1));
}

/// How an engine dies in the middle of its answer.
fn dying_engine(head: &'static str, piece: &'static [u8], end: Next) -> Engine {
    Engine::start(move |exchange| {
        exchange.read_body()?;
        exchange.raw(head.as_bytes())?;
        if !piece.is_empty() {
            exchange.raw(piece)?;
        }
        // Let the router pass it on: a reset may overtake data that was not read yet.
        exchange.pause(ms(60));
        Ok(end)
    })
}

/// A2: an engine that dies in the middle of its answer must not look like one that finished. The client never gets a
/// clean end without an error event, the failure is counted, and the request is not sent again.
#[test]
fn a2_an_answer_cut_short_does_not_look_finished() {
    const CHUNKED: &str =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    const SIZED: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n";
    const OPEN: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n";
    const EVENTS: &[u8] = b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n9\r\ndata: 3\n\n\r\n";
    for (what, head, piece, end) in [
        ("chunked, FIN after three events", CHUNKED, EVENTS, Next::Close),
        ("chunked, reset after three events", CHUNKED, EVENTS, Next::Reset),
        ("chunked, FIN inside a chunk", CHUNKED, b"9\r\ndata: 1\n\n\r\n9\r\ndat", Next::Close),
        ("chunked, FIN inside the last chunk", CHUNKED, b"9\r\ndata: 1\n\n\r\n0\r\n", Next::Close),
        ("chunked, FIN right after the head", CHUNKED, b"", Next::Close),
        ("with a length, FIN too early", SIZED, b"{\"half\":", Next::Close),
        ("with a length, reset", SIZED, b"{\"half\":", Next::Reset),
        ("until the close, reset", OPEN, b"data: 1\n\n", Next::Reset),
        ("chunked, a chunk size that is none", CHUNKED, b"9\r\ndata: 1\n\n\r\nzz\r\n", Next::Close),
    ] {
        let engine = dying_engine(head, piece, end);
        let other = dying_engine(head, piece, end);
        let router = Setup::new().server("a", &engine, &[]).server("b", &other, &[]).start();
        let mut client = router.client();
        client.send(&request("POST", CHAT, &[], &chat_stream("m", "x")));
        match client.try_response() {
            Ok(response) => {
                let text = response.text();
                assert!(text.contains("error"), "{what}: a clean end after {text:?}");
            }
            Err((Fault::Eof { .. } | Fault::Reset, body)) => {
                // An error event may follow what the engine sent; it comes after all of that, and whole.
                let text = String::from_utf8_lossy(&body);
                let (own, added) = text.split_once("data: {\"error\"").unwrap_or((&text, "\n\n"));
                let events = own.matches("data: ").count();
                let sent = String::from_utf8_lossy(piece).matches("data: ").count();
                // What arrived in one piece with something malformed may be dropped with it.
                let dropped = if what.ends_with("that is none") { sent } else { 0 };
                assert!(
                    (sent - dropped..=sent).contains(&events),
                    "{what}: what came before the end is passed on; got {text:?}"
                );
                assert!(added.ends_with("\n\n"), "{what}: half an error event: {text:?}");
            }
            Err((fault, _)) => panic!("{what}: {fault}"),
        }
        assert_eq!(engine.request_count() + other.request_count(), 1, "{what}: sent again");
        router.wait_metric("ringway_upstream_errors_total", &[("kind", "truncated")], 1.0, seconds(2));
        router.wait_metric("ringway_retries_total", &[], 0.0, seconds(1));
        router.wait_idle(seconds(1));
    }
}

/// Sends events at a steady pace, each in `pieces` writes, and notes when each was written.
fn metronome(
    events: usize,
    gap: Duration,
    pieces: usize,
    written: &Arc<Mutex<Vec<Instant>>>,
    text: impl Fn(usize) -> Vec<u8> + Send + Sync + 'static,
) -> Engine {
    let written = Arc::clone(written);
    Engine::start(move |exchange| {
        exchange.stream_head()?;
        let start = now();
        for number in 0..events {
            let due = start + gap * u32::try_from(number + 1).expect("few events");
            exchange.pause(due.saturating_duration_since(now()));
            let text = text(number);
            let mut chunk = format!("{:x}\r\n", text.len()).into_bytes();
            let at = chunk.len();
            chunk.extend_from_slice(&text);
            chunk.extend_from_slice(b"\r\n");
            if pieces == 2 {
                // Cut inside a character: see the text's makers.
                let cut = at + text.iter().position(|b| *b >= 0x80).expect("a wide character") + 1;
                exchange.raw(&chunk[..cut])?;
                exchange.pause(ms(5));
                written.lock().unwrap().push(now());
                exchange.raw(&chunk[cut..])?;
            } else {
                written.lock().unwrap().push(now());
                exchange.raw(&chunk)?;
            }
        }
        exchange.end()
    })
}

/// Reads a stream of events that end in an empty line; returns when each was whole, and all the bytes.
fn read_events(client: &mut Client) -> (Vec<Instant>, Vec<u8>) {
    let (status, head, _) = client.head().expect("a head");
    assert_eq!(status, 200);
    assert_eq!(head.one("content-type").as_deref(), Some("text/event-stream"));
    assert!(!head.has("content-encoding"), "streams are not compressed");
    let mut framing = Client::framing("POST", status, &head).expect("clean framing");
    let (mut times, mut bytes) = (Vec::new(), Vec::new());
    while let Some(piece) = client.piece(&mut framing).expect("a whole stream") {
        bytes.extend_from_slice(&piece);
        let whole = bytes.windows(2).filter(|w| w == b"\n\n").count();
        while times.len() < whole {
            times.push(client.wire.last_fill);
        }
    }
    (times, bytes)
}

/// A3 for one way of writing events: all arrive one by one, none later than a few milliseconds after it was written.
fn events_keep_their_pace(pieces: usize, text: impl Fn(usize) -> Vec<u8> + Send + Sync + Copy + 'static) {
    const EVENTS: usize = 20;
    const GAP_MS: u64 = 50;
    let written = Arc::new(Mutex::new(Vec::new()));
    let engine = metronome(EVENTS, ms(GAP_MS), pieces, &written, text);
    let router = Setup::new().server("a", &engine, &[]).start();
    let want: Vec<u8> = (0..EVENTS).flat_map(text).collect();
    attempts(6, || {
        written.lock().unwrap().clear();
        let mut client = router.client();
        client.send(&request("POST", CHAT, &[], &chat_stream("m", "x")));
        let (times, bytes) = read_events(&mut client);
        assert_bytes(&bytes, &want, "the stream");
        assert_eq!(times.len(), EVENTS);
        let distinct = 1 + times.windows(2).filter(|w| w[0] != w[1]).count();
        let written = written.lock().unwrap().clone();
        let lags: Vec<_> = times.iter().zip(&written).map(|(t, w)| t.saturating_duration_since(*w)).collect();
        let gaps = |at: &[Instant]| -> Vec<Duration> { at.windows(2).map(|w| w[1] - w[0]).collect() };
        let (came, went) = (gaps(&times), gaps(&written));
        if distinct != EVENTS {
            return Err(format!("{distinct} arrivals for {EVENTS} events: {came:?}"));
        }
        if lags[0] > ms(5) {
            return Err(format!("the first event took {:?}", lags[0]));
        }
        // 50 ± 10 ms, where the engine itself kept its pace on a busy machine.
        let bad = came.iter().zip(&went).filter(|(c, w)| c.abs_diff(**w) > ms(10)).count();
        if bad > 0 {
            Err(format!("{bad} gaps differ by over 10 ms: {came:?}, written {went:?}"))
        } else {
            Ok(())
        }
    });
}

/// A3: events 50 ms apart arrive 50 ms apart, the first at most 5 ms after the engine wrote it, in 20 arrivals.
#[test]
fn a3_events_arrive_one_by_one() {
    events_keep_their_pace(1, |number| {
        format!("data: {{\"t\":\"event {number:02} xxxxxxxxxxx\"}}\n\n").into_bytes()
    });
}

/// A3, second half: the same with each event written in two halves, cut inside a UTF-8 character.
#[test]
fn a3_events_cut_inside_a_character_arrive_whole_and_on_time() {
    events_keep_their_pace(2, |number| {
        format!("data: {{\"t\":\"naïve 東京 {number:02} 🛶\"}}\n\n").into_bytes()
    });
}

/// The first half of an event is not held back until its second half comes.
#[test]
fn half_an_event_is_passed_on_at_once() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let engine = Engine::start(move |exchange| {
        exchange.stream_head()?;
        exchange.raw(b"12\r\ndata: first")?;
        held.pass(seconds(10));
        exchange.raw(b" half\n\n\r\n")?;
        exchange.end()
    });
    let router = Setup::new().server("a", &engine, &[]).start();
    let mut client = router.client();
    client.send(&request("POST", CHAT, &[], &chat_stream("m", "x")));
    let (status, head, _) = client.head().unwrap();
    let mut framing = Client::framing("POST", status, &head).unwrap();
    let mut got = Vec::new();
    while got != b"data: first" {
        got.extend(
            client.piece(&mut framing).expect("in time, though the engine holds the rest").expect("more"),
        );
        assert!(b"data: first".starts_with(&got), "{got:?}");
    }
    gate.open();
    while let Some(piece) = client.piece(&mut framing).unwrap() {
        got.extend(piece);
    }
    assert_bytes(&got, b"data: first half\n\n", "the stream");
}

/// An answer larger than any buffer, to a client that does not read: the engine is made to wait, the router's memory
/// stays where it was, and every byte arrives once the client reads.
#[test]
fn a_slow_reader_slows_the_engine_and_costs_no_memory() {
    const SIZE: usize = 96 << 20;
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let engine = Engine::start(move |exchange| {
        exchange.read_body()?;
        exchange.raw(format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\n\r\n").as_bytes())?;
        let mut at = 0;
        while at < SIZE {
            let piece = pattern(at, (256 << 10).min(SIZE - at));
            exchange.raw(&piece)?;
            at += piece.len();
            count.store(at, Ordering::Relaxed);
        }
        exchange.leave();
        Ok(Next::Keep)
    });
    let router = Setup::new().server("a", &engine, &[]).start();
    assert_eq!(router.get("/health").status, 200);
    let before = router.memory_bytes("VmRSS");
    let mut client = router.client();
    client.send(&request("POST", CHAT, &[], &chat("m", "x")));
    let mut last = 0;
    eventually(seconds(10), "the engine is made to wait", || {
        pause(ms(200));
        let at = sent.load(Ordering::Relaxed);
        let still = at == last && at > 0;
        last = at;
        if still { Ok(()) } else { Err(format!("{at} bytes sent")) }
    });
    assert!(last < SIZE / 2, "{last} bytes went somewhere though nobody reads");
    let (status, head, _) = client.head().unwrap();
    let mut framing = Client::framing("POST", status, &head).unwrap();
    let mut at = 0;
    while let Some(piece) = client.piece(&mut framing).unwrap() {
        assert!(piece == pattern(at, piece.len()), "the answer differs near byte {at}");
        at += piece.len();
    }
    assert_eq!(at, SIZE);
    let grown = router.memory_bytes("VmHWM").saturating_sub(before);
    assert!(grown < 24 << 20, "memory grew by {grown} bytes");
}

/// 100 MiB in chunks, of a size nobody declared, to an engine that reads slowly: the client is made to wait, and the
/// router's memory stays bounded (bodies beyond `replay_bytes_max` only stream).
#[test]
fn a_slow_engine_slows_the_upload_and_costs_no_memory() {
    const SIZE: usize = 100 << 20;
    let engine = EngineSetup::new().drop_bodies().start(|exchange| {
        let mut at = 0;
        // Slow at first, so that everything between fills up, then as fast as it comes.
        exchange.wire.read_bytes_max = 16 << 10;
        while let Some(piece) = exchange.body_piece()? {
            if piece != pattern(at, piece.len()) {
                return exchange.reply(500, &[], format!("differs near byte {at}").as_bytes());
            }
            at += piece.len();
            if at < 1 << 20 {
                exchange.pause(ms(15));
            } else {
                exchange.wire.read_bytes_max = 256 << 10;
            }
        }
        exchange.reply(200, &[], at.to_string().as_bytes())
    });
    let router = Setup::new().limit("replay_bytes_max = 1048576").server("a", &engine, &[]).start();
    assert_eq!(router.get("/health").status, 200);
    let before = router.memory_bytes("VmRSS");
    let mut client = router.client();
    client.send(b"POST /upload HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n");
    let mut at = 0;
    while at < SIZE {
        let piece = pattern(at, (200_003).min(SIZE - at));
        client.send(format!("{:x}\r\n", piece.len()).as_bytes());
        client.send(&piece);
        client.send(b"\r\n");
        at += piece.len();
    }
    client.send(b"0\r\n\r\n");
    let response = client.response();
    assert_eq!((response.status, response.text()), (200, SIZE.to_string()));
    let grown = router.memory_bytes("VmHWM").saturating_sub(before);
    assert!(grown < 24 << 20, "memory grew by {grown} bytes");
}

/// An engine may answer, and refuse, before it has the whole body: the answer reaches the client at once.
#[test]
fn an_early_answer_is_passed_on_while_the_body_still_comes() {
    let engine = Engine::start(|exchange| {
        let mut got = 0;
        while got < 1 << 20 {
            got += exchange.body_piece()?.map_or(1 << 20, |piece| piece.len());
        }
        exchange.raw(b"HTTP/1.1 422 Early\r\nContent-Length: 5\r\n\r\nearly")?;
        // A polite engine reads on for a while before it closes.
        let deadline = now() + seconds(5);
        while now() < deadline && exchange.wire.fill(now() + ms(500)).is_ok() {
            let count = exchange.wire.buffered().len();
            exchange.wire.take(count);
        }
        Ok(Next::Close)
    });
    let router = Setup::new().server("a", &engine, &[]).start();
    let mut client = router.client();
    let size = 64 << 20;
    client.send(format!("POST /upload HTTP/1.1\r\nHost: r\r\nContent-Length: {size}\r\n\r\n").as_bytes());
    client.send(&pattern(0, 4 << 20));
    // 60 MiB are still to come, and the answer is there.
    let response = client.response();
    assert_eq!((response.status, response.text().as_str()), (422, "early"));
    drop(client);
    router.wait_idle(seconds(2));
    assert_eq!(engine.request_count(), 1);
}

/// An engine that says nothing within `response_head_timeout_ms`: 504, its connection is closed, it is not sent again.
#[test]
fn no_response_head_in_time_is_504() {
    let silent = |exchange: &mut Exchange<'_>| -> io::Result<Next> {
        exchange.read_body()?;
        exchange.wait_close(seconds(20));
        Ok(Next::Close)
    };
    let (engine, other) = (Engine::start(silent), Engine::start(silent));
    let router = Setup::new()
        .limit("response_head_timeout_ms = 300")
        .server("a", &engine, &[])
        .server("b", &other, &[])
        .start();
    let start = now();
    let response = router.post(CHAT, &chat("m", "x"));
    let took = start.elapsed();
    response.assert_rejected(504, "upstream_timeout");
    assert!(took >= ms(290) && took < ms(1500), "after {took:?}");
    assert_eq!(engine.request_count() + other.request_count(), 1, "a generation must not run twice");
    let used = if engine.request_count() == 1 { &engine } else { &other };
    used.wait_closed(used.requests()[0].connection, seconds(1));
    router.wait_metric("ringway_upstream_errors_total", &[("kind", "head_timeout")], 1.0, seconds(2));
    router.wait_metric("ringway_rejections_total", &[("reason", "upstream_timeout")], 1.0, seconds(2));
    router.wait_idle(seconds(1));
}

/// One early byte, an interim answer or half a head is no answer: an engine that says that much and then nothing is
/// given up at `response_head_timeout_ms`, and at `total_timeout_ms`, like one that says nothing at all. So for bodies
/// that go out with the head, behind it, and as they come.
#[test]
fn an_early_byte_does_not_disarm_the_time_limits() {
    const FIRST: [(&[u8], u64); 5] = [
        (b"H", 0),
        (b"H", 60),
        (b"HTTP/1.1 100 Continue\r\n\r\n", 0),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", 60),
        (b"HTTP/1.1 200 OK\r\nA:", 60),
    ];
    for limits in [
        ["response_head_timeout_ms = 400", "total_timeout_ms = 0"],
        ["response_head_timeout_ms = 60000", "total_timeout_ms = 400"],
    ] {
        let engine = EngineSetup::new().drop_bodies().start(|exchange| {
            let number: usize = exchange.request.target[1..].parse().expect("a number");
            let (first, wait) = FIRST[number];
            exchange.read_body()?;
            exchange.pause(ms(wait));
            exchange.raw(first)?;
            exchange.wait_close(seconds(20));
            Ok(Next::Close)
        });
        let router = Setup::new()
            .limit(limits[0])
            .limit(limits[1])
            .health("bench_after = 1000")
            .server("a", &engine, &["max_concurrency = 0"])
            .start();
        std::thread::scope(|scope| {
            for (number, (first, _)) in FIRST.iter().enumerate() {
                for size in [2, 100_000, 2 << 20] {
                    let router = &router;
                    scope.spawn(move || {
                        let what = format!("{:?}, {size}, {limits:?}", String::from_utf8_lossy(first));
                        let mut client = router.client().with_limit(seconds(5));
                        let start = now();
                        client.send(&request("POST", &format!("/{number}"), &[], &pattern(0, size)));
                        let answer = client.try_response();
                        let took = start.elapsed();
                        let response = answer.unwrap_or_else(|(fault, _)| panic!("{what}: {fault}"));
                        assert_eq!(response.status, 504, "{what}");
                        response.assert_rejected(504, "upstream_timeout");
                        assert!(took >= ms(390) && took < ms(2500), "{what}: after {took:?}");
                    });
                }
            }
        });
        eventually(seconds(1), "the engine is told", || match engine.connections_open() {
            0 => Ok(()),
            open => Err(format!("{open} connections open")),
        });
        assert_eq!(engine.request_count(), 3 * FIRST.len(), "each was sent once");
        router.wait_idle(seconds(1));
    }
}

/// An engine that closes in the middle of its head has failed, and is not late: 502, whenever the two come.
#[test]
fn half_a_head_and_the_end_is_502() {
    const WAITS_MS: [(u64, u64); 4] = [(0, 0), (0, 60), (60, 0), (60, 60)];
    let engine = Engine::start(|exchange| {
        let number: usize = exchange.request.target[1..].parse().expect("a number");
        let (before, between) = WAITS_MS[number];
        exchange.read_body()?;
        exchange.pause(ms(before));
        exchange.raw(b"HTTP/1.1 200 OK\r\nA:")?;
        exchange.pause(ms(between));
        Ok(Next::Close)
    });
    let router = Setup::new()
        .limit("response_head_timeout_ms = 20000")
        .limit("total_timeout_ms = 20000")
        .health("bench_after = 1000")
        .server("a", &engine, &[])
        .start();
    for (number, waits) in WAITS_MS.iter().enumerate() {
        for size in [2, 100_000, 2 << 20] {
            let response = router.post(&format!("/{number}"), &pattern(0, size));
            assert_eq!(response.status, 502, "{waits:?}, {size}: {}", response.text());
            response.assert_rejected(502, "upstream_error");
        }
    }
    assert_eq!(engine.request_count(), 3 * WAITS_MS.len(), "none was sent again");
    router.wait_metric("ringway_upstream_errors_total", &[("kind", "head_timeout")], 0.0, seconds(1));
}

/// An engine that falls silent in the middle of a stream for `between_bytes_timeout_ms`: the stream ends visibly cut.
#[test]
fn a_stream_that_falls_silent_is_cut() {
    let engine = Engine::start(|exchange| {
        exchange.stream_head()?;
        for _ in 0..5 {
            // Slow, but each within the limit: the limit is between bytes, not for the whole.
            exchange.chunk(b"data: x\n\n")?;
            exchange.pause(ms(150));
        }
        exchange.wait_close(seconds(20));
        Ok(Next::Close)
    });
    let router = Setup::new().limit("between_bytes_timeout_ms = 400").server("a", &engine, &[]).start();
    let mut client = router.client();
    client.send(&request("POST", CHAT, &[], &chat_stream("m", "x")));
    let start = now();
    let (fault, body) = client.try_response().expect_err("a stream that never ended");
    let took = start.elapsed();
    assert!(matches!(fault, Fault::Eof { .. } | Fault::Reset), "{fault}");
    assert!(body.starts_with(&b"data: x\n\n".repeat(5)), "{:?}", String::from_utf8_lossy(&body));
    assert!(took > ms(900) && took < ms(2500), "after {took:?}");
    engine.wait_closed(engine.requests()[0].connection, seconds(1));
    router.wait_metric("ringway_upstream_errors_total", &[("kind", "between_timeout")], 1.0, seconds(2));
    router.wait_idle(seconds(1));
}

/// `total_timeout_ms` bounds a request as a whole, however steadily it streams: the stream ends visibly cut, and what has
/// no answer yet is 504.
#[test]
fn the_total_limit_cuts_what_takes_too_long() {
    let engine = Engine::start(|exchange| {
        if exchange.body_has("silent")? {
            exchange.wait_close(seconds(20));
            return Ok(Next::Close);
        }
        exchange.stream_head()?;
        for _ in 0..400 {
            exchange.chunk(b"data: x\n\n")?;
            exchange.pause(ms(25));
        }
        exchange.end()
    });
    let router = Setup::new().limit("total_timeout_ms = 600").server("a", &engine, &[]).start();
    let mut client = router.client();
    let start = now();
    client.send(&request("POST", CHAT, &[], &chat_stream("m", "steady")));
    let (fault, body) = client.try_response().expect_err("a stream over the limit");
    let took = start.elapsed();
    assert!(matches!(fault, Fault::Eof { .. } | Fault::Reset), "{fault}");
    assert!(took > ms(500) && took < seconds(2), "after {took:?}");
    assert!(body.starts_with(b"data: x\n\n"));
    engine.wait_closed(engine.requests()[0].connection, seconds(1));
    let start = now();
    let response = router.post(CHAT, &chat("m", "silent"));
    let took = start.elapsed();
    response.assert_rejected(504, "upstream_timeout");
    assert!(took > ms(500) && took < seconds(2), "after {took:?}");
    router.wait_idle(seconds(1));
}

/// Many streams side by side on one shard: nothing is lost, mixed up or held back.
#[test]
fn streams_side_by_side_stay_apart() {
    const STREAMS: usize = 48;
    const EVENTS: usize = 25;
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        let body = exchange.request.body.clone();
        exchange.stream_head()?;
        for number in 0..EVENTS {
            let mut event = format!("data: {number} ").into_bytes();
            event.extend_from_slice(&body);
            event.extend_from_slice(b"\n\n");
            exchange.chunk(&event)?;
            exchange.pause(ms(10));
        }
        exchange.end()
    });
    let router = Setup::new().server("a", &engine, &["max_concurrency = 0"]).start();
    std::thread::scope(|scope| {
        for stream in 0..STREAMS {
            let router = &router;
            scope.spawn(move || {
                let body = chat_stream("m", &format!("stream-{stream}"));
                let mut client = router.client();
                for _ in 0..2 {
                    client.send(&request("POST", CHAT, &[], &body));
                    let (_, bytes) = read_events(&mut client);
                    let text = String::from_utf8(body.clone()).unwrap();
                    let want: String = (0..EVENTS).map(|n| format!("data: {n} {text}\n\n")).collect();
                    assert_bytes(&bytes, want.as_bytes(), "the stream");
                }
            });
        }
    });
    router.wait_idle(seconds(1));
}

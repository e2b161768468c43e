//! What the router costs in memory, seen from outside.

mod support;

use std::sync::Arc;

use support::*;

/// Idle keep-alive connections are cheap: each has carried a request, and pins no buffer while it waits for the next.
/// (The exact figure, on an optimised build and with 10,000 of them, is measured with the load tools.)
#[test]
fn idle_connections_pin_no_buffers() {
    const CONNECTIONS: usize = 1500;
    let engine = Engine::answering();
    let router = Setup::new().limit("connections_max = 4000").server("a", &engine, &[]).start();
    let open = |count: usize| -> Vec<Client> {
        (0..count)
            .map(|_| {
                let mut client = router.client();
                assert_eq!(client.post(CHAT, &chat("m", "x")).status, 200);
                client
            })
            .collect()
    };
    let warm = open(100);
    let before = router.memory_bytes("VmRSS");
    let idle = open(CONNECTIONS);
    let each = router.memory_bytes("VmRSS").saturating_sub(before) / CONNECTIONS as u64;
    // Unoptimised code keeps larger tasks; a pinned read buffer would be 16 KiB.
    let limit = if cfg!(debug_assertions) { 8 << 10 } else { 3 << 10 };
    assert!(each < limit, "{each} bytes for each idle connection");
    drop((warm, idle));
    router.wait_metric("ringway_connections", &[], 0.0, seconds(5));
}

/// A burst of large bodies leaves nothing behind: after 32 × 16 MiB at once the router is back within 10 %, or 8 MiB, of
/// where it was.
#[test]
fn memory_comes_back_after_a_burst_of_large_bodies() {
    const BODIES: usize = 32;
    let engine = EngineSetup::new().drop_bodies().start(|exchange| exchange.reply_ok());
    let router = Setup::new().server("a", &engine, &["max_concurrency = 0"]).start();
    let body = Arc::new(pattern(0, 16 << 20));
    // One body alone, so that what is allocated once and for all is there.
    assert_eq!(router.post("/v1/embeddings", &body).status, 200);
    pause(ms(1500));
    let before = router.memory_bytes("VmRSS");
    std::thread::scope(|scope| {
        for _ in 0..BODIES {
            let (router, body) = (&router, Arc::clone(&body));
            scope.spawn(move || {
                let mut client = router.client().with_limit(seconds(60));
                client.send(&request("POST", "/v1/embeddings", &[], &body));
                assert_eq!(client.response().status, 200);
            });
        }
    });
    router.wait_idle(seconds(2));
    let allowed = before + (before / 10).max(8 << 20);
    eventually(seconds(10), "memory comes back", || {
        let now = router.memory_bytes("VmRSS");
        if now <= allowed { Ok(()) } else { Err(format!("{now} bytes instead of {before}")) }
    });
}

/// Memory for bodies that wait is bounded: with `buffered_bytes_max` at 8 MiB, 24 requests of 4 MiB that wait for room
/// all the same hold no more than that, and their clients are made to wait instead.
#[test]
fn waiting_bodies_are_bounded() {
    let gate = Gate::new();
    let held = Arc::clone(&gate);
    let engine = EngineSetup::new().drop_bodies().start(move |exchange| {
        exchange.read_body()?;
        held.pass(seconds(30));
        exchange.reply_ok()
    });
    let router = Setup::new()
        .limit("buffered_bytes_max = 8388608")
        .server("a", &engine, &["max_concurrency = 1"])
        .start();
    let mut busy = router.client();
    busy.send(&request("POST", CHAT, &[], &chat("m", "x")));
    engine.wait_requests(1);
    let before = router.memory_bytes("VmRSS");
    let body = Arc::new(pattern(0, 4 << 20));
    std::thread::scope(|scope| {
        for _ in 0..24 {
            let (router, body) = (&router, Arc::clone(&body));
            scope.spawn(move || {
                let mut client = router.client().with_limit(seconds(60));
                client.send(&request("POST", "/v1/embeddings", &[], &body));
                let response = client.response();
                assert_eq!(response.status, 200, "{}", response.text());
            });
        }
        router.wait_metric("ringway_queue_depth", &[], 24.0, seconds(10));
        pause(ms(500));
        let grown = router.memory_bytes("VmHWM").saturating_sub(before);
        // 24 MiB wait for routing (1 MiB each, as the limit for that says), 8 MiB are kept, and some slack.
        gate.open();
        assert!(grown < 64 << 20, "memory grew by {grown} bytes");
    });
    assert_eq!(busy.response().status, 200);
    router.wait_idle(seconds(2));
}

/// A chunked body may be nearly all framing: chunks of one byte, each with 4 KB of extensions. What is read before a
/// request is routed is bounded in bytes received, not only in bytes of content; so with 128 MiB received and the requests
/// still open, the router holds little, and it serves them.
#[test]
fn chunk_extensions_do_not_fill_memory() {
    const CONNECTIONS: usize = 4;
    const CHUNKS: usize = 8000;
    const CLASSIFY_BYTES_MAX: u64 = 1 << 20;
    let engine = Engine::start(|exchange| {
        exchange.read_body()?;
        let text = exchange.request.body.len().to_string();
        exchange.reply(200, &[], text.as_bytes())
    });
    let router = Setup::new()
        .limit(&format!("classify_bytes_max = {CLASSIFY_BYTES_MAX}"))
        .server("a", &engine, &["max_concurrency = 0"])
        .start();
    let head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut warm = router.client();
    warm.send(&[head.as_slice(), b"1\r\nx\r\n0\r\n\r\n"].concat());
    assert_eq!(warm.response().text(), "1");
    let before = router.memory_bytes("VmRSS");
    let pieces = [b"1;".as_slice(), &[b'a'; 4000], b"\r\nx\r\n"].concat().repeat(20);
    let received = (CONNECTIONS * CHUNKS / 20 * pieces.len()) as u64;
    let mut clients: Vec<_> = (0..CONNECTIONS).map(|_| router.client()).collect();
    std::thread::scope(|scope| {
        for client in &mut clients {
            let pieces = &pieces;
            scope.spawn(move || {
                client.send(head);
                for _ in 0..CHUNKS / 20 {
                    client.send(pieces);
                }
            });
        }
    });
    // On the way up buffers are moved, and the allocator gives pages back late.
    let peak = router.memory_bytes("VmHWM").saturating_sub(before);
    assert!(peak < received / 2, "memory grew by {peak} bytes for {received} received");
    let limit = 3 * CLASSIFY_BYTES_MAX * CONNECTIONS as u64;
    eventually(seconds(5), "little is held", || {
        let grown = router.memory_bytes("VmRSS").saturating_sub(before);
        if grown < limit { Ok(()) } else { Err(format!("{grown} bytes, over {limit}")) }
    });
    router.wait_metric("ringway_in_flight", &[], CONNECTIONS as f64, seconds(1));
    for client in &mut clients {
        client.send(b"0\r\n\r\n");
        let response = client.response();
        assert_eq!((response.status, response.text()), (200, CHUNKS.to_string()));
    }
}

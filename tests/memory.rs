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

//! Bodies, waits and time on trusted listeners: what streams through, what is sent again, and what ends a request; and what untrusted
//! callers cannot say. The Stargate rules, sections 4.3, 4.5, 5.1 and 5.7.

mod support;

use std::sync::mpsc;

use serde_json::json;
use support::stargate::*;
use support::*;

/// Larger than anything that goes out in one piece.
const LARGE_BYTES: usize = 300_000;

fn head(model: &str, framing: &str) -> Vec<u8> {
    format!(
        "POST /v1/responses HTTP/1.1\r\nHost: h\r\nx-request-id: r\r\nx-input-tokens: 1\r\nx-model: {model}\r\n{framing}\r\n\r\n"
    )
    .into_bytes()
}

fn chunk(data: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat()
}

/// `a`, which is preferred, refuses what it has read whole; `b` takes it.
fn refused_then_taken(router: &Router) -> (Engine, Engine) {
    let a = Engine::start(|exchange| exchange.reply(429, &[("x-stargate-retryable", "true")], b"no"));
    let b = engine();
    let slower = but(json!({"queued_input_size": 500}));
    register(router, &mut [Registration::new("a", &a, "m", idle()), Registration::new("b", &b, "m", slower)]);
    (a, b)
}

#[test]
fn a_large_body_is_sent_again_whole_however_it_came() {
    let router = Gateway::new().start();
    let (a, b) = refused_then_taken(&router);
    let body = pattern(0, LARGE_BYTES);
    for chunked in [false, true] {
        let mut client = router.client();
        match chunked {
            false => {
                client.send(&head("m", &format!("Content-Length: {LARGE_BYTES}")));
                body.chunks(70_001).for_each(|piece| client.send(piece));
            }
            true => {
                client.send(&head("m", "Transfer-Encoding: chunked"));
                body.chunks(70_001).for_each(|piece| client.send(&chunk(piece)));
                client.send(b"0\r\n\r\n");
            }
        }
        assert_eq!(sid(&client.response()), "b", "chunked: {chunked}");
        for (name, engine) in [("a", &a), ("b", &b)] {
            let requests = engine.requests();
            let last = requests.last().expect("it was sent there");
            assert_bytes(&last.body, &body, &format!("{name}, chunked: {chunked}"));
            let length = (!chunked).then(|| LARGE_BYTES.to_string());
            assert_eq!(last.header("content-length"), length);
        }
    }
    assert_eq!((a.request_count(), b.request_count()), (2, 2));
}

#[test]
fn a_body_reaches_its_server_before_it_is_complete() {
    let (seen, first) = mpsc::channel();
    let seen = std::sync::Mutex::new(seen);
    let a = Engine::start(move |exchange| {
        let piece = exchange.body_piece()?.expect("something of the body");
        seen.lock().unwrap().send(piece).expect("the test waits");
        exchange.reply_ok()
    });
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    let mut client = router.client();
    client.send(&head("m", "Content-Length: 10"));
    client.send(b"first");
    assert_eq!(first.recv_timeout(seconds(10)).expect("the first part"), b"first");
    client.send(b"later");
    assert_eq!(sid(&client.response()), "a");
}

/// The body is incomplete, so that it cannot be sent again: the refusal is the client's, and it can read it while it still sends.
#[test]
fn a_refusal_in_the_middle_of_a_body_is_passed_through() {
    let a = Engine::start(|exchange| {
        exchange.leave();
        exchange.raw(
            b"HTTP/1.1 429 Busy\r\nx-stargate-retryable: true\r\nRetry-After: 5\r\nContent-Length: 4\r\n\r\nbusy",
        )?;
        while exchange.body_piece().is_ok_and(|piece| piece.is_some()) {}
        Ok(engine::Next::Close)
    });
    let b = engine();
    let router = Gateway::new().start();
    let slower = but(json!({"queued_input_size": 500}));
    register(
        &router,
        &mut [Registration::new("a", &a, "m", idle()), Registration::new("b", &b, "m", slower)],
    );
    let mut client = router.client();
    client.send(&head("m", &format!("Content-Length: {LARGE_BYTES}")));
    client.send(&pattern(0, 1000));
    let response = client.response();
    assert_eq!((response.status, response.text().as_str()), (429, "busy"));
    assert_eq!(response.header("x-inference-server-id").as_deref(), Some("a"));
    assert_eq!(response.header("retry-after").as_deref(), Some("5"));
    assert_eq!(response.header("x-stargate-retryable"), None);
    // It goes on for a while, and is not cut off before it has read that.
    let _ = client.try_send(&pattern(1000, 1000));
    assert_eq!(b.request_count(), 0);
    let labels = [("reason", "retryable_upstream_response")];
    router.wait_metric("stargate_proxy_retry_exhausted_total", &labels, 1.0, seconds(5));
    router.logged("not retrying because request body replay buffer is incomplete");
}

#[test]
fn a_client_that_waits_to_be_invited_is_once_there_is_a_server() {
    let a = engine();
    let router = Gateway::new().start();
    let mut client = router.client();
    let expecting = "Content-Length: 5\r\nExpect: 100-continue";
    client.send(&head("m", expecting));
    let response = client.response();
    assert_code(&response, 404, "no_eligible_candidates");
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    let mut client = router.client();
    client.send(&head("m", expecting));
    let (status, _) = client.any_head(time::now() + seconds(10)).expect("an interim answer");
    assert_eq!(status, 100);
    client.send(b"hello");
    assert_eq!(sid(&client.response()), "a");
    assert_eq!(a.requests()[0].body, b"hello");
    assert_eq!(a.requests()[0].header("expect"), None, "the router has met it");
}

#[test]
fn a_server_that_does_not_answer_in_time_is_502_and_never_504() {
    let a = Engine::start(|exchange| {
        exchange.read_body()?;
        exchange.wait_close(seconds(20));
        Ok(engine::Next::Close)
    });
    let router = Gateway::new()
        .flag("--quic-request-timeout-ms", "150")
        .flag("--proxy-max-connect-retries", "1")
        .start();
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    assert_bare(&ask(&router, "m", &[]), 502);
    assert_eq!(a.request_count(), 2, "once more on a fresh connection");
    let labels = [("reason", "connect_retries_exhausted")];
    router.wait_metric("stargate_proxy_retry_exhausted_total", &labels, 1.0, seconds(5));
    router.wait_metric("stargate_requests_total", &[("status", "502")], 1.0, seconds(5));
}

/// The limit counts from the attempt's start, upload included: a client that stops sending does not hold its server for longer.
#[test]
fn a_client_that_stops_in_its_body_holds_no_server_for_long() {
    let a = engine();
    let router = Gateway::new().flag("--quic-request-timeout-ms", "200").start();
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    let mut client = router.client();
    client.send(&head("m", "Content-Length: 10"));
    client.send(b"first");
    assert_bare(&client.response(), 502);
    let (_, closed) = a.wait_closed(a.requests()[0].connection, seconds(5));
    assert!(matches!(closed, engine::Closed::Fin | engine::Closed::Reset));
}

#[test]
fn a_broken_answer_never_looks_whole() {
    let a = Engine::start(|exchange| {
        exchange.stream_head()?;
        exchange.chunk(b"data: 1\n\n")?;
        Ok(engine::Next::Close)
    });
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    let mut client = router.client();
    client.send(&wish("m", &[]));
    let (_, seen) = client.try_response().expect_err("an incomplete answer");
    let seen = String::from_utf8_lossy(&seen).into_owned();
    assert!(seen.ends_with("data: 1\n\n"), "no event of the router's own: {seen}");
    router.wait_metric("stargate_requests_total", &[("status", "200")], 1.0, seconds(5));
    assert_eq!(a.request_count(), 1, "what has begun is not sent again");
}

/// Who waits for a route and leaves is forgotten; who stays is let in by the change that helps.
#[test]
fn a_wait_ends_with_its_client_or_with_the_change_that_helps() {
    let a = engine();
    let router = Gateway::new().lb_config(r#"{"default":"wait-and-widen"}"#).start();
    let full = but(json!({"max_engine_concurrency": 1, "num_running_queries": 1}));
    let mut registration = Registration::new("a", &a, "m", full);
    register(&router, std::slice::from_mut(&mut registration));
    let waiting = [("x-max-wait-ms", "60000")];
    let mut leaves = router.client();
    leaves.send(&wish("m", &waiting));
    let mut stays = router.client();
    stays.send(&wish("m", &waiting));
    router.wait_metric("stargate_routing_waiting_requests", &[("model", "m")], 2.0, seconds(5));
    drop(leaves);
    router.wait_metric("stargate_routing_waiting_requests", &[("model", "m")], 1.0, seconds(5));
    registration.report(&router, "m", but(json!({"max_engine_concurrency": 1, "num_running_queries": 0})));
    assert_eq!(sid(&stays.response()), "a");
    assert_eq!(a.request_count(), 1);
}

/// What one shard lets go of, the other hears of: nobody waits until the end of its time.
#[test]
fn requests_that_wait_on_one_shard_are_let_in_by_the_end_of_others_on_another() {
    let a = Engine::start(|exchange| {
        exchange.pause(time::ms(10));
        exchange.reply_ok()
    });
    let router = Gateway::new().shards(2).lb_config(r#"{"default":"wait-and-widen"}"#).start();
    let one = but(json!({"max_engine_concurrency": 1, "num_running_queries": 0}));
    register(&router, &mut [Registration::new("a", &a, "m", one)]);
    let begun = time::now();
    let mut clients: Vec<_> = (0..24).map(|_| router.client()).collect();
    clients.iter_mut().for_each(|client| client.send(&wish("m", &[("x-max-wait-ms", "30000")])));
    for client in &mut clients {
        assert_eq!(sid(&client.response()), "a");
    }
    assert!(begun.elapsed() < seconds(15), "{:?} for 24 requests of 10 ms", begun.elapsed());
    assert!(a.active_max() <= 2, "each shard may let in one before it hears of the other's");
    router.wait_metric("stargate_routing_waiting_requests", &[("model", "m")], 0.0, seconds(5));
}

#[test]
fn the_callers_trace_goes_on_under_a_span_of_the_routers_own() {
    let a = engine();
    let router = Gateway::new().start();
    register(&router, &mut [Registration::new("a", &a, "m", idle())]);
    let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let parent = format!("00-{trace}-{span}-01");
    let state = ("tracestate", "vendor=1");
    let given: [&[(&str, &str)]; 3] =
        [&[("traceparent", &parent), state], &[("traceparent", "00-bad"), state], &[]];
    for headers in given {
        assert_eq!(sid(&ask(&router, "m", headers)), "a");
    }
    let requests = a.requests();
    let parts = |index: usize| -> Vec<String> {
        let value = requests[index].header("traceparent").expect("one trace context");
        value.split('-').map(str::to_owned).collect()
    };
    let known = parts(0);
    assert_eq!((known[0].as_str(), known[1].as_str(), known[3].as_str()), ("00", trace, "01"));
    assert_ne!(known[2], span);
    assert_eq!(requests[0].header("tracestate").as_deref(), Some("vendor=1"));
    for new in [1, 2] {
        assert!(parts(new)[1] != trace && parts(new)[1].len() == 32 && parts(new)[2].len() == 16);
        assert_eq!(requests[new].header("tracestate"), None, "it belongs to no trace that is known");
    }
    assert_ne!(parts(1)[1], parts(2)[1]);
}

/// Who is not trusted cannot say where a request goes, nor say it to whatever stands behind this router.
#[test]
fn an_untrusted_caller_cannot_steer() {
    let (a, b) = (engine(), engine());
    let router = Setup::new()
        .standalone("a", &a, &["models = [\"ma\"]"])
        .standalone("b", &b, &["models = [\"mb\"]"])
        .start();
    let steering = [
        ("x-routing-key", "k"),
        ("x-model", "mb"),
        ("X-Model", "mb"),
        ("x-routing-method", "pulsar"),
        ("x-input-tokens", "1"),
        ("x-cache-affinity-key", "k"),
        ("x-priority", "0"),
        ("x-request-slo-ms", "1"),
        ("x-max-wait-ms", "1"),
        ("x-stargate-max-wait-ms", "1"),
        ("x-stargate-retryable", "true"),
        ("x-stargate-expected-queue-ms", "1"),
        ("x-stargate-cluster-id", "c"),
        ("X-Stargate-Anything", "a"),
    ];
    let kept = [("x-request-id", "r"), ("x-multi-turn-session-id", "s"), ("x-stainless-os", "Linux")];
    let response = router.client().ask("POST", CHAT, &[&steering[..], &kept].concat(), &chat("ma", "t"));
    assert_eq!(response.status, 200);
    assert_eq!((a.request_count(), b.request_count()), (1, 0), "the body alone names the model");
    let request = a.requests().remove(0);
    for (name, _) in steering {
        assert_eq!(request.header(name), None, "{name}\n{}", request.head.text());
    }
    for (name, value) in kept {
        assert_eq!(request.header(name).as_deref(), Some(value), "{name}");
    }
}

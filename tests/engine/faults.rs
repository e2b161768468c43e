//! Faults on demand, each as a client of the engine meets it.

use super::*;

fn faulty(client: &mut Client, fault: &str, body: &Value) -> std::io::Result<Answer> {
    client.call("POST", CHAT, &format!("x-engine-fault: {fault}\r\n"), body.to_string().as_bytes())
}

#[test]
fn status_with_and_without_retry_after() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let body = chat("x", json!({}));
    let answer = faulty(&mut client, "status", &body).expect("answered");
    assert_eq!((answer.status(), answer.head.field("retry-after")), (503, None));
    let answer =
        faulty(&mut client, "status:code=500,retry_after_s=7", &body).expect("the connection goes on");
    assert_eq!((answer.status(), answer.head.field("retry-after")), (500, Some("7")));
    assert_eq!(answer.json().expect("json")["error"]["code"], 500);
    assert_eq!(engine.stats().faulted, 2);
}

#[test]
fn a_stream_dies_after_so_many_events_by_fin_or_reset() {
    let engine = engine(EngineOptions {
        rates: Rates { prefill_tps: 0.0, decode_tps: 500.0, slots: 4, queue_max: 4 },
        ..EngineOptions::default()
    });
    for (fault, events, end) in [
        ("die:after_events=3", 3, ErrorKind::UnexpectedEof),
        ("die:after_events=3,reset=true", 3, ErrorKind::ConnectionReset),
        ("die:after_events=0", 0, ErrorKind::UnexpectedEof),
    ] {
        let mut client = client(&engine);
        let body = chat("x", json!({"stream": true})).to_string();
        client.send("POST", CHAT, &format!("x-engine-fault: {fault}\r\n"), body.as_bytes()).expect("sent");
        let mut head = client.head(Method::Post).expect("a head");
        let mut text = Vec::new();
        let fault_seen = loop {
            match client.piece(&mut head) {
                Ok(Some(piece)) => text.extend(piece),
                Ok(None) => panic!("{fault}: the stream ended well"),
                Err(fault) => break fault,
            }
        };
        assert_eq!(fault_seen.kind(), end, "{fault}");
        assert_eq!(String::from_utf8_lossy(&text).matches("data: ").count(), events, "{fault}");
    }
    eventually("slots are free", || engine.stats().in_flight == 0);
    assert_eq!(engine.stats().faulted, 3);
}

#[test]
fn a_plain_answer_dies_in_the_middle() {
    let engine = engine(fast());
    let fault = faulty(&mut client(&engine), "die", &chat("x", json!({}))).expect_err("cut short");
    assert_eq!(fault.kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_request_is_read_and_reset() {
    let engine = engine(fast());
    let fault = faulty(&mut client(&engine), "reset", &chat("x", json!({}))).expect_err("reset");
    assert_eq!(fault.kind(), ErrorKind::ConnectionReset);
    let stats = engine.stats();
    assert_eq!((stats.requests, stats.faulted), (1, 1));
}

#[test]
fn a_hung_request_ends_with_its_client() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let body = chat("x", json!({})).to_string();
    client.send("POST", CHAT, "x-engine-fault: hang\r\n", body.as_bytes()).expect("sent");
    client.stream().set_read_timeout(Some(Duration::from_millis(200))).expect("set");
    let fault = client.head(Method::Post).expect_err("no answer");
    assert!(matches!(fault.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{fault}");
    assert_eq!(engine.stats().in_flight, 1);
    drop(client);
    eventually("the abort is seen", || engine.stats().aborted == 1 && engine.stats().in_flight == 0);
}

#[test]
fn a_body_is_read_slowly() {
    let engine = engine(fast());
    let body = chat(&"x".repeat(2000), json!({"max_tokens": 1}));
    let since = now();
    let answer = faulty(&mut client(&engine), "slow-read:bytes_per_s=5000", &body).expect("answered");
    assert_eq!(answer.status(), 200);
    // A little over 2,000 bytes at 5,000 a second.
    assert!((400..2000).contains(&since.elapsed().as_millis()), "{:?}", since.elapsed());
    let big = chat(&"x".repeat(40_000), json!({"max_tokens": 1}));
    let since = now();
    assert_eq!(
        faulty(&mut client(&engine), "slow-read:bytes_per_s=100000", &big).expect("answered").status(),
        200
    );
    assert!((300..3000).contains(&since.elapsed().as_millis()), "{:?}", since.elapsed());
}

#[test]
fn a_head_comes_in_two_halves() {
    let engine = engine(fast());
    for stream in [true, false] {
        let since = now();
        let answer = faulty(&mut client(&engine), "slow-head:ms=150", &chat("x", json!({"stream": stream})));
        assert_eq!(answer.expect("answered").status(), 200);
        assert!((150..1000).contains(&since.elapsed().as_millis()), "{:?}", since.elapsed());
    }
    assert_eq!(engine.stats().completed, 2);
}

#[test]
fn a_connection_closes_after_the_answer_without_saying_so() {
    let engine = engine(fast());
    for (fault, least_ms) in [("close-after", 0), ("close-after:ms=100", 100)] {
        let mut client = client(&engine);
        let answer = faulty(&mut client, fault, &chat("x", json!({}))).expect("answered");
        assert!(answer.head.keep_alive && answer.head.field("connection").is_none());
        let since = now();
        assert_eq!(client.stream().read(&mut [0]).expect("closed in good order"), 0);
        assert!(since.elapsed().as_millis() + 20 >= least_ms, "{fault}: {:?}", since.elapsed());
    }
    // Asked again before the time is up, it serves.
    let mut client = client(&engine);
    faulty(&mut client, "close-after:ms=500", &chat("x", json!({}))).expect("answered");
    assert_eq!(client.get("/health").expect("answered").status(), 200);
}

#[test]
fn the_listener_refuses_and_comes_back() {
    let engine = engine(fast());
    let mut open = client(&engine);
    assert_eq!(open.get("/health").expect("answered").status(), 200);
    let refused = || matches!(TcpStream::connect(engine.addr()), Err(fault) if fault.kind() == ErrorKind::ConnectionRefused);
    engine.arm("refuse").expect("armed");
    eventually("connects are refused", refused);
    let listed = open.get("/fault").expect("an open connection still works").json().expect("json");
    assert_eq!(listed[0]["kind"], "refuse");
    engine.clear_faults();
    eventually("it listens again", || TcpStream::connect(engine.addr()).is_ok());
    assert_eq!(client(&engine).get("/health").expect("answered").status(), 200);
    engine.arm("refuse:ms=150").expect("armed");
    eventually("connects are refused", refused);
    eventually("it comes back by itself", || TcpStream::connect(engine.addr()).is_ok());
    assert_eq!(post(&mut client(&engine), CHAT, &chat("x", json!({}))).status(), 200);
}

#[test]
fn an_engine_may_refuse_from_the_start() {
    let faults = vec![ringway::engine::fault::Armed::parse("refuse:ms=200").expect("a fault")];
    let engine = engine(EngineOptions { faults, ..fast() });
    assert!(TcpStream::connect(engine.addr()).is_err());
    eventually("it listens", || TcpStream::connect(engine.addr()).is_ok());
}

#[test]
fn faults_are_armed_listed_counted_and_cleared_live() {
    let engine = engine(fast());
    let mut client = client(&engine);
    let body = chat("x", json!({"max_tokens": 1}));
    let armed = post(&mut client, "/fault", &json!({"kind": "status", "code": 500, "count": 2}));
    assert_eq!(armed.json().expect("json")[0]["count"], 2);
    post(&mut client, "/fault", &json!({"kind": "status", "path": "/health"}));
    let statuses: Vec<u16> = (0..3).map(|_| post(&mut client, CHAT, &body).status()).collect();
    assert_eq!(statuses, [500, 500, 200]);
    assert_eq!(client.get("/health").expect("answered").status(), 503);
    assert_eq!(client.get("/v1/models").expect("answered").status(), 200);
    assert_eq!(client.call("DELETE", "/fault", "", b"").expect("answered").json().expect("json"), json!([]));
    assert_eq!(client.get("/health").expect("answered").status(), 200);
    let wrong = post(&mut client, "/fault", &json!({"kind": "explode"}));
    assert_eq!(wrong.status(), 400);
    assert!(wrong.text().contains("expected refuse, hang"), "{}", wrong.text());
    let wrong = faulty(&mut client, "hang:ms=5", &body).expect("answered");
    assert_eq!(wrong.status(), 400);
    assert!(engine.arm("status:code=5").expect_err("refused").contains("200 to 599"));
}

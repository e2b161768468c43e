use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use super::*;
use crate::runtime;

/// A server that reads one request head per connection and answers with `pieces`, a pause between them; then closes, or
/// keeps silent if the last piece is empty. Returns what it was sent.
fn serve(pieces: &'static [&'static [u8]]) -> (SocketAddr, std::thread::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = Vec::new();
        let mut byte = [0; 1];
        while !asked.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
            asked.push(byte[0]);
        }
        for piece in pieces {
            if piece.is_empty() {
                let _ = stream.read(&mut byte);
                break;
            }
            if stream.write_all(piece).is_err() {
                break;
            }
            pause(2);
        }
        asked
    });
    (address, thread)
}

#[expect(clippy::disallowed_methods, reason = "a test's own server thread may sleep")]
fn pause(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

const REQUEST: Request<'static> = Request {
    host: "gpu0",
    base_path: "/base",
    path: "/health",
    api_key: Some("k1"),
    lines: "x-model: m\r\n",
};

fn ask_at(addresses: Vec<Address>, uring: bool, timeout_ms: u64) -> Result<Response, FetchError> {
    runtime::block_on(uring, async move { fetch(&addresses, REQUEST, timeout_ms, 1000, &Clock::new()).await })
        .unwrap()
}

fn ask(pieces: &'static [&'static [u8]]) -> Result<Response, FetchError> {
    let (address, thread) = serve(pieces);
    let result = ask_at(vec![Address::Tcp(address)], true, 2000);
    thread.join().unwrap();
    result
}

#[test]
fn a_request_is_written_whole_and_its_answer_read_on_both_drivers() {
    for uring in [true, false] {
        let (address, thread) = serve(&[b"HTTP/1.1 200 OK\r\nContent-", b"Length: 5\r\n\r\nhe", b"llo"]);
        let response = ask_at(vec![Address::Tcp(address)], uring, 2000).unwrap();
        assert_eq!((response.status, &response.body[..], response.is_success()), (200, &b"hello"[..], true));
        let asked = String::from_utf8(thread.join().unwrap()).unwrap();
        assert!(
            asked.starts_with("GET /base/health HTTP/1.1\r\nHost: gpu0\r\nUser-Agent: ringway/"),
            "{asked}"
        );
        assert!(
            asked.contains("\r\nAuthorization: Bearer k1\r\nx-model: m\r\n")
                && asked.contains("\r\nConnection: close\r\n")
        );
    }
}

#[test]
fn every_framing_is_read_to_its_end() {
    let chunked =
        ask(&[b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n"]);
    assert_eq!(chunked.unwrap().body, b"abc");
    let until_close = ask(&[b"HTTP/1.0 200 OK\r\n\r\nab", b"c"]);
    assert_eq!(until_close.unwrap().body, b"abc");
    let none = ask(&[b"HTTP/1.1 204 No Content\r\n\r\n"]);
    let none = none.unwrap();
    // The server takes 2 ms after its last piece, and loopback far less than a second before it.
    assert!(none.exchange_ns > 0 && none.exchange_ns < 1_000_000_000, "{}", none.exchange_ns);
    assert_eq!((none.status, none.body.len(), none.address), (204, 0, 0));
    let after_interim =
        ask(&[b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"]);
    let after_interim = after_interim.unwrap();
    assert_eq!((after_interim.status, after_interim.is_success()), (503, false));
}

#[test]
fn a_bad_answer_is_an_error_in_words() {
    let say = |pieces| ask(pieces).unwrap_err().to_string();
    assert!(say(&[b"SSH-2.0-OpenSSH\r\n\r\n"]).starts_with("malformed answer: "));
    assert_eq!(
        say(&[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"]),
        "the server closed before its answer was complete"
    );
    assert_eq!(say(&[b"HTTP/1.1 200 OK\r\nContent-"]), "the server closed before its answer was complete");
    assert!(
        say(&[b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
            .starts_with("malformed body: ")
    );
    static INTERIM: [&[u8]; 9] = [b"HTTP/1.1 102 P\r\n\r\n"; 9];
    assert_eq!(say(&INTERIM), "malformed answer: more interim responses than expected");
}

#[test]
fn a_body_over_the_limit_is_given_up() {
    static BIG: [u8; 2000] = [b'x'; 2000];
    static DECLARED: [&[u8]; 2] = [b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n", &BIG];
    static UNTIL_CLOSE: [&[u8]; 3] = [b"HTTP/1.1 200 OK\r\n\r\n", &BIG, &BIG];
    let (declared, until_close) = (ask(&DECLARED).unwrap_err(), ask(&UNTIL_CLOSE).unwrap_err());
    for error in [declared, until_close] {
        assert_eq!(error.to_string(), "the answer is over 1000 bytes");
    }
}

#[test]
fn silence_ends_at_the_deadline_and_the_connection_is_closed() {
    for uring in [true, false] {
        let (address, thread) = serve(&[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", b""]);
        let error = ask_at(vec![Address::Tcp(address)], uring, 50).unwrap_err();
        assert_eq!(error.to_string(), "no complete answer within 50 ms");
        // The server's read ends only when our side is closed.
        thread.join().unwrap();
    }
}

#[test]
fn the_next_address_is_tried_when_one_refuses() {
    let refused = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Address::Tcp(listener.local_addr().unwrap())
    };
    let (address, thread) = serve(&[b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]);
    let response = ask_at(vec![refused.clone(), Address::Tcp(address)], true, 2000).unwrap();
    assert_eq!(response.address, 1);
    thread.join().unwrap();
    let error = ask_at(vec![refused], true, 2000).unwrap_err().to_string();
    assert!(error.starts_with("connect failed: ") && error.contains("refused"), "{error}");
    assert_eq!(ask_at(vec![], true, 2000).unwrap_err().to_string(), "its host name has no address yet");
}

#[test]
fn a_unix_socket_is_asked_alike() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("engine.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1024]).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
    });
    assert_eq!(ask_at(vec![Address::Unix(path)], true, 2000).unwrap().body, b"ok");
    thread.join().unwrap();
    let missing = ask_at(vec![Address::Unix(dir.path().join("none"))], true, 2000).unwrap_err();
    assert!(missing.to_string().starts_with("connect failed: "), "{missing}");
}

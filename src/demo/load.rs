//! The demo's load: a fixed mix of requests from a few concurrent clients, and what each answer was like.
//!
//! *Invariant*: request `n` is the same in every run. Every request that was begun gives one [`Sample`].
//! *Bound and cost*: one thread and one connection per client; samples of under 100 bytes.
//! *Errors*: a failed request is a sample with its reason; the load goes on.

use std::io;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::client::{Client, Head};
use crate::clock::Clock;
use crate::proto::http1::Method;

/// Name of the router's headers, up to the part that differs.
const PREFIX: &str = "x-lifeboat-";

/// What one request is.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub path: &'static str,
    pub streamed: bool,
    pub body: Value,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The server that answered, as the router names it; empty where none did.
    pub server: String,
    pub streamed: bool,
    /// Time spent waiting in the router's queue, as it reports it.
    pub wait_ms: u64,
    /// To the first byte of the answer's body, and to its end.
    pub first_byte_ns: u64,
    pub total_ns: u64,
    /// Why it failed.
    pub fault: Option<String>,
}

/// The mix: of ten requests four are streamed chats, two plain ones, one completion, two messages (one streamed) and one
/// embedding. A dozen conversations share a few long system texts, as real traffic does.
pub fn request(number: usize) -> Request {
    let assistant = ["support desk", "code review", "travel planner"][number % 3];
    let system = format!(
        "You are the {assistant} of a large company. {}",
        "Be friendly, brief and exact. ".repeat(30)
    );
    let question = format!("Question {number}: what should I know about topic {}?", number * 7 % 50);
    let chat = |streamed: bool| Request {
        path: "/v1/chat/completions",
        streamed,
        body: json!({
            "model": "simulated", "stream": streamed, "max_tokens": 12 + number % 12,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        }),
    };
    let message = |streamed: bool| Request {
        path: "/v1/messages",
        streamed,
        body: json!({
            "model": "simulated", "stream": streamed, "max_tokens": 16, "system": system,
            "messages": [{"role": "user", "content": question}],
        }),
    };
    match number % 10 {
        0 | 2 | 5 | 7 => chat(true),
        1 | 6 => chat(false),
        3 => message(true),
        8 => message(false),
        4 => Request {
            path: "/v1/completions",
            streamed: false,
            body: json!({"model": "simulated", "prompt": question, "max_tokens": 16}),
        },
        _ => Request {
            path: "/v1/embeddings",
            streamed: false,
            body: json!({"model": "simulated", "input": [question, system]}),
        },
    }
}

/// A load in progress.
#[derive(Debug)]
pub struct Load<'a> {
    pub address: SocketAddr,
    pub requests: usize,
    pub clock: Clock,
    /// Set: no further request begins.
    halted: &'a AtomicBool,
    next: AtomicUsize,
    done: AtomicUsize,
    samples: Mutex<Vec<Sample>>,
}

impl<'a> Load<'a> {
    pub fn new(address: SocketAddr, requests: usize, clock: Clock, halted: &'a AtomicBool) -> Self {
        Load {
            address,
            requests,
            clock,
            halted,
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            samples: Mutex::default(),
        }
    }

    /// Requests answered so far.
    pub fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    /// One client: takes requests until there are none left.
    pub fn work(&self) {
        let mut connection = None;
        let mut samples = Vec::new();
        while !self.halted.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= self.requests {
                break;
            }
            samples.push(self.send(&mut connection, &request(number)));
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        self.samples.lock().expect("no client panics while it holds the lock").append(&mut samples);
    }

    /// All samples, once every client has ended.
    pub fn into_samples(self) -> Vec<Sample> {
        self.samples.into_inner().expect("no client panics while it holds the lock")
    }

    fn send(&self, connection: &mut Option<Client>, request: &Request) -> Sample {
        let mut sample = Sample {
            server: String::new(),
            streamed: request.streamed,
            wait_ms: 0,
            first_byte_ns: 0,
            total_ns: 0,
            fault: None,
        };
        // A connection that an error has spoilt is not used again.
        let result =
            connection.take().map_or_else(|| Client::connect(self.address), Ok).and_then(|mut client| {
                let keep = self.exchange(&mut client, request, &mut sample)?;
                *connection = keep.then_some(client);
                Ok(())
            });
        if let Err(error) = result {
            sample.fault = Some(format!("{}: {error}", request.path));
        }
        sample
    }

    /// Whether the connection may be used again.
    fn exchange(&self, client: &mut Client, request: &Request, sample: &mut Sample) -> io::Result<bool> {
        let begun = self.clock.now();
        client.send("POST", request.path, "", request.body.to_string().as_bytes())?;
        let mut head = client.head(Method::Post)?;
        let field = |head: &Head, name: &str| head.field(&format!("{PREFIX}{name}")).map(str::to_owned);
        sample.server = field(&head, "server").unwrap_or_default();
        sample.wait_ms = field(&head, "wait-ms").and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut body = Vec::new();
        while let Some(piece) = client.piece(&mut head)? {
            if body.is_empty() {
                sample.first_byte_ns = self.clock.now().since(begun);
            }
            body.extend(piece);
        }
        sample.total_ns = self.clock.now().since(begun);
        sample.fault = check(request, head.status, &body);
        Ok(head.keep_alive)
    }
}

/// What is wrong with an answer, if anything.
fn check(request: &Request, status: u16, body: &[u8]) -> Option<String> {
    let path = request.path;
    let text = String::from_utf8_lossy(body);
    if status != 200 {
        return Some(format!("{path}: status {status}: {}", text.chars().take(200).collect::<String>()));
    }
    let whole = match (request.streamed, path) {
        (true, "/v1/messages") => text.contains("event: message_stop"),
        (true, _) => text.ends_with("data: [DONE]\n\n"),
        (false, _) => serde_json::from_slice::<Value>(body).is_ok(),
    };
    (!whole).then(|| format!("{path}: the answer is not complete"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_requests_show_every_api_both_ways() {
        let ten: Vec<Request> = (0..10).map(request).collect();
        let count = |path: &str, streamed: bool| {
            ten.iter().filter(|request| request.path == path && request.streamed == streamed).count()
        };
        assert_eq!((count("/v1/chat/completions", true), count("/v1/chat/completions", false)), (4, 2));
        assert_eq!((count("/v1/messages", true), count("/v1/messages", false)), (1, 1));
        assert_eq!((count("/v1/completions", false), count("/v1/embeddings", false)), (1, 1));
        assert_eq!(request(3), request(3));
        assert_ne!(request(3), request(13));
    }

    #[test]
    fn incomplete_answers_are_noticed() {
        let streamed = request(0);
        assert_eq!(check(&streamed, 200, b"data: {}\n\ndata: [DONE]\n\n"), None);
        assert!(check(&streamed, 200, b"data: {}\n\n").is_some_and(|text| text.contains("not complete")));
        assert!(check(&streamed, 503, b"{}").is_some_and(|text| text.contains("status 503")));
        assert_eq!(check(&request(1), 200, b"{}"), None);
        assert!(check(&request(1), 200, b"{").is_some());
    }
}

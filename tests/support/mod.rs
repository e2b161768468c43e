//! Support for the black-box tests: the real binary, scripted engines, raw clients.
//!
//! Everything runs over loopback sockets with blocking calls and threads, so that a test says byte by byte what each
//! side does. Nothing here knows the router's code; what it checks is what goes over the wire, the exit code, the log
//! and the metrics page.
//!
//! *Invariant*: both ends are strict. The scripted engine and the client refuse every doubtful framing, so each test
//! also proves that the router speaks clean HTTP/1.1 in both directions.
//! *Bound*: no wait without a limit; a wait that runs out says what it waited for and what it saw instead.
#![allow(dead_code, reason = "each test binary uses its own part of the support code")]
#![allow(unused_imports, reason = "each test binary uses its own part of the support code")]

pub mod client;
pub mod engine;
pub mod exchange;
pub mod metrics;
pub mod prompts;
pub mod router;
pub mod stargate;
pub mod time;
pub mod wire;

pub use client::{Client, Response, once, request};
pub use engine::{Closed, Engine, EngineSetup, Next, Probe, Request};
pub use exchange::Exchange;
pub use metrics::Metrics;
pub use router::{Router, Setup, run_to_exit};
pub use time::{Gate, attempts, eventually, ms, now, pause, seconds};
pub use wire::{Fault, Framing, Head};

/// A chat request for `model`, with `tag` somewhere in its text so that it can be told from others.
pub fn chat(model: &str, tag: &str) -> Vec<u8> {
    format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"{tag}"}}]}}"#).into_bytes()
}

/// The same, asking for a stream.
pub fn chat_stream(model: &str, tag: &str) -> Vec<u8> {
    format!(r#"{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"{tag}"}}]}}"#)
        .into_bytes()
}

pub const CHAT: &str = "/v1/chat/completions";

/// `len` bytes of a fixed pattern that starts at `offset`: two pieces that follow each other in the pattern make one
/// longer piece, and a byte lost, repeated or swapped shows. The period is a prime, so that it falls in step with no
/// buffer size.
pub fn pattern(offset: usize, len: usize) -> Vec<u8> {
    const PERIOD: usize = 65_521;
    static TABLE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    let table = TABLE.get_or_init(|| {
        let mut x = 0x2545_f491_4f6c_dd1du64;
        (0..PERIOD)
            .map(|_| {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                (x >> 24) as u8
            })
            .collect()
    });
    let mut bytes = Vec::with_capacity(len);
    let mut at = offset % PERIOD;
    while bytes.len() < len {
        let take = (PERIOD - at).min(len - bytes.len());
        bytes.extend_from_slice(&table[at..at + take]);
        at = 0;
    }
    bytes
}

/// Says where two byte strings differ first; prints no megabytes.
#[track_caller]
pub fn assert_bytes(got: &[u8], want: &[u8], what: &str) {
    if got == want {
        return;
    }
    let at = got.iter().zip(want).position(|(a, b)| a != b).unwrap_or(got.len().min(want.len()));
    let near = |bytes: &[u8]| {
        let from = at.saturating_sub(20).min(bytes.len());
        String::from_utf8_lossy(&bytes[from..(at + 40).min(bytes.len())]).into_owned()
    };
    panic!(
        "{what}: {} bytes instead of {}, first difference at byte {at}: got …{:?}…, want …{:?}…",
        got.len(),
        want.len(),
        near(got),
        near(want)
    );
}

/// A small seeded generator (xorshift): the same seed gives the same test.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }
    /// Uniform in `0..bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

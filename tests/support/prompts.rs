//! Prompts that share what a test wants them to share, and what the router says about them.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::client::Response;
use super::engine::Engine;
use super::time::{Gate, seconds};

/// `bytes` bytes of words in no order, distinct from the first byte on for each `seed`, without a character that JSON
/// escapes.
pub fn words(seed: u64, bytes: usize) -> String {
    let mut dice = super::Dice::new(seed.wrapping_add(1));
    let mut text = String::with_capacity(bytes + 12);
    while text.len() < bytes {
        let mut word = dice.next();
        for _ in 0..3 + word % 7 {
            text.push(char::from(b'a' + (word % 26) as u8));
            word /= 26;
        }
        text.push(' ');
    }
    text.truncate(bytes);
    text
}

/// A chat request of these messages, each a role and a text.
pub fn conversation<'a>(model: &str, messages: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<u8> {
    let messages: Vec<_> =
        messages.into_iter().map(|(role, text)| serde_json::json!({"role": role, "content": text})).collect();
    serde_json::json!({"model": model, "messages": messages}).to_string().into_bytes()
}

/// A chat request of one long text that no other seed shares.
pub fn prompt(seed: u64, bytes: usize) -> Vec<u8> {
    conversation("m", [("user", words(seed, bytes).as_str())])
}

/// A chat request that shares `shared` with others and then asks something of its own.
pub fn question(shared: &str, tail: &str) -> Vec<u8> {
    conversation("m", [("system", shared), ("user", tail)])
}

/// What `X-Lifeboat-Sticky-Key` says of a key: the first 16 hex digits of its SHA-256.
pub fn digest(key: &str) -> String {
    Sha256::digest(key.as_bytes())[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `X-Lifeboat-Prefix-Blocks` as matched and total.
#[track_caller]
pub fn prefix_blocks(response: &Response) -> (u64, u64) {
    let value = response
        .lifeboat("Prefix-Blocks")
        .unwrap_or_else(|| panic!("no prefix blocks in\n{}", response.head.text()));
    let (matched, total) = value.split_once('/').unwrap_or_else(|| panic!("prefix blocks {value:?}"));
    (matched.parse().expect("matched"), total.parse().expect("total"))
}

/// The server that answered.
#[track_caller]
pub fn server(response: &Response) -> String {
    assert_eq!(response.status, 200, "{}{}", response.head.text(), response.text());
    response.lifeboat("Server").unwrap_or_else(|| panic!("no server in\n{}", response.head.text()))
}

/// The algorithm that was really used.
#[track_caller]
pub fn algorithm(response: &Response) -> String {
    response.lifeboat("Algorithm").unwrap_or_else(|| panic!("no algorithm in\n{}", response.head.text()))
}

/// An engine that holds every request until the gate lets it go.
pub fn holding(gate: &Arc<Gate>) -> Engine {
    let gate = Arc::clone(gate);
    Engine::start(move |exchange| {
        exchange.read_body()?;
        gate.pass(seconds(30));
        exchange.reply_ok()
    })
}

/// An engine that holds the requests whose body has the word `hold`.
pub fn holding_some(gate: &Arc<Gate>) -> Engine {
    let gate = Arc::clone(gate);
    Engine::start(move |exchange| {
        if exchange.body_has("hold")? {
            gate.pass(seconds(30));
        }
        exchange.reply_ok()
    })
}

//! Conversations: chat requests of realistic JSON text that share a system prompt and come back with more messages, so that
//! a router that remembers prompts has something to recognise, and something new each time.
//!
//! A conversation is [`TURNS`] requests, each the one before it and two more messages. All conversations of one size are
//! the same text but for their number, which stands behind the system prompt: so the prompts of two conversations agree up
//! to there and nowhere behind it. A body is text as clients write it: words, and an escape about every fifty bytes.
//!
//! *Invariant*: a body is a pure function of size, turn and number. The mean length over a conversation's turns is its size.
//! *Bound and cost*: a conversation owns its four requests, and the next one in its place writes its number into them: no
//! copy, no formatting per request. A number is never sent twice within a plan (of fewer than 10^8 conversations).
//! *Errors*: a size too small for its envelope, or too large, is refused with what was expected.

use std::sync::Arc;

use crate::answer::Expect;
use crate::payload::{self, Answer, BODY_BYTES_MAX, Recipe};

/// Requests of one conversation.
pub const TURNS: u32 = 4;
/// Smallest and largest size, in bytes.
pub const SIZE_MIN: usize = 1024;
pub const SIZE_MAX: usize = BODY_BYTES_MAX / 2;
/// Length of the answer to each request, in bytes.
pub const ANSWER_BYTES: usize = 1024;
/// Digits of a conversation's number.
const NUMBER_LEN: usize = 8;
/// Messages are no longer than this, in bytes.
const MESSAGE_BYTES_MAX: usize = 4096;
/// Bytes per token that the answers' reports assume.
const BYTES_PER_TOKEN: usize = 4;

const HEAD: &[u8] = b"{\"model\":\"perf\",\"messages\":[{\"role\":\"system\",\"content\":\"";
const USER: &[u8] = b"\"},{\"role\":\"user\",\"content\":\"";
const ASSISTANT: &[u8] = b"\"},{\"role\":\"assistant\",\"content\":\"";
const NUMBER_MARK: &[u8] = b"Ticket ";
const TAIL: &[u8] = b"\"}],\"temperature\":0.7,\"max_tokens\":64,\"stream\":false}";

const WORDS: [&str; 40] = [
    "the",
    "request",
    "a",
    "server",
    "returns",
    "in",
    "order",
    "of",
    "tokens",
    "which",
    "prompt",
    "is",
    "and",
    "cache",
    "to",
    "model",
    "every",
    "answer",
    "with",
    "latency",
    "for",
    "under",
    "load",
    "we",
    "measure",
    "this",
    "how",
    "often",
    "blocks",
    "are",
    "found",
    "again",
    "when",
    "conversation",
    "continues",
    "on",
    "another",
    "day",
    "please",
    "explain",
];
const ESCAPES: [&str; 8] = ["\\n", "\\\"yes\\\" ", "\\n\\n- ", "\\u2014 ", "\\n", "C:\\\\log ", "\\t", "\\n"];
/// Bytes from one escape to the next, or a word more.
const ESCAPE_EVERY: usize = 45;

/// Length of the system prompt, in bytes: an eighth of the size.
fn system_bytes(size: usize) -> usize {
    size / 8
}

/// Length of the body of `turn`, in bytes: 13, 15, 17 and 19 sixteenths of the size.
pub fn body_bytes(size: usize, turn: u32) -> usize {
    size * (13 + 2 * turn as usize) / 16
}

/// Where the conversation's number stands in each body.
pub fn number_at(size: usize) -> usize {
    HEAD.len() + system_bytes(size) + USER.len() + NUMBER_MARK.len()
}

/// A conversation's number, as it stands in its requests.
pub fn digits(number: u32) -> [u8; NUMBER_LEN] {
    let mut digits = [0; NUMBER_LEN];
    payload::put_digits(&mut digits, u64::from(number));
    digits
}

/// Goes on with text to exactly `end` bytes.
fn write_text(body: &mut Vec<u8>, end: usize, seed: &mut u32) {
    let mut since = 0;
    loop {
        *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let at = (*seed >> 16) as usize;
        let escape = since >= ESCAPE_EVERY;
        let unit = if escape { ESCAPES[at % ESCAPES.len()] } else { WORDS[at % WORDS.len()] };
        if body.len() + unit.len() + 1 > end {
            body.resize(end, b'.');
            return;
        }
        body.extend_from_slice(unit.as_bytes());
        since = if escape { 0 } else { since + unit.len() + 1 };
        if !escape {
            body.push(b' ');
        }
    }
}

/// The body of `turn` of conversation 0. Error when `size` is out of range, or there is no such turn.
pub fn body(size: usize, turn: u32) -> Result<Vec<u8>, String> {
    if !(SIZE_MIN..=SIZE_MAX).contains(&size) {
        return Err(format!("conversation of size {size}: expected {SIZE_MIN} to {SIZE_MAX} bytes"));
    }
    if turn >= TURNS {
        return Err(format!("turn {turn} of a conversation: expected 0 to {}", TURNS - 1));
    }
    let mut seed = 0x2545_f491;
    let mut body = Vec::with_capacity(body_bytes(size, turn));
    body.extend_from_slice(HEAD);
    write_text(&mut body, HEAD.len() + system_bytes(size), &mut seed);
    for now in 0..=turn {
        let end = body_bytes(size, now) - TAIL.len();
        let bytes = end - body.len();
        // User and assistant take turns. The user has the first word, and the last of each request.
        let pairs = bytes / (2 * MESSAGE_BYTES_MAX);
        let messages = if now == 0 { 2 * pairs + 1 } else { 2 * pairs.max(1) };
        for message in 0..messages {
            let left = messages - message;
            let message_end = body.len() + (end - body.len()) / left;
            body.extend_from_slice(if left % 2 == 1 { USER } else { ASSISTANT });
            if now == 0 && message == 0 {
                body.extend_from_slice(NUMBER_MARK);
                body.extend_from_slice(&digits(0));
                body.extend_from_slice(b": ");
            }
            write_text(&mut body, message_end, &mut seed);
        }
    }
    body.extend_from_slice(TAIL);
    Ok(body)
}

/// The answer to `turn`, with the report of an engine that still has what came before: the system prompt, or the
/// conversation's last request.
pub fn answer_body(size: usize, turn: u32) -> Result<Vec<u8>, String> {
    let cached = turn.checked_sub(1).map_or(system_bytes(size), |last| body_bytes(size, last));
    let (prompt, cached) = (body_bytes(size, turn) / BYTES_PER_TOKEN, cached / BYTES_PER_TOKEN);
    let head = b"{\"id\":\"chatcmpl-perf\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"perf\",\
\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"";
    let tail = format!(
        "\"}},\"finish_reason\":\"stop\"}}],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{},\
         \"completion_tokens\":64,\"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}}}}",
        prompt + 64
    );
    payload::envelope("answer body", head, tail.as_bytes(), ANSWER_BYTES)
}

/// One request of a [`Script`].
#[derive(Debug)]
struct Line {
    /// Of conversation 0.
    request: Arc<[u8]>,
    /// Where the number stands: in the recipe header, and in the body.
    numbers_at: [usize; 2],
    expect: Expect,
}

/// What all conversations of one size have in common: their requests, and the answers these must have.
#[derive(Debug)]
pub struct Script {
    lines: Vec<Line>,
}

impl Script {
    /// For the authority `host` and the target `path`. Errors as [`body`]'s.
    pub fn new(host: &str, path: &str, size: usize) -> Result<Script, String> {
        let mut lines = Vec::new();
        for turn in 0..TURNS {
            let recipe = Recipe { body_len: size, answer: Answer::Chat { conversation: 0, turn } };
            let request = payload::request(host, path, &recipe, &[])?;
            let mark = format!("{}: {}", payload::RECIPE_HEADER, recipe.header());
            let header_at = request.windows(mark.len()).position(|w| w == mark.as_bytes());
            let in_mark = mark.find(CONVERSATION).map(|at| at + CONVERSATION.len());
            let (Some(header_at), Some(in_mark)) = (header_at, in_mark) else {
                return Err(format!("a request without '{mark}'"));
            };
            let body_at = request.len() - body_bytes(size, turn);
            lines.push(Line {
                request: request.into(),
                numbers_at: [header_at + in_mark, body_at + number_at(size)],
                expect: Expect::Exact(answer_body(size, turn)?.into()),
            });
        }
        Ok(Script { lines })
    }

    fn talk(&self) -> Talk {
        // Buffers of its own.
        let requests = self.lines.iter().map(|line| Arc::from(&line.request[..])).collect();
        Talk { requests, turn: 0, number: 0 }
    }

    /// What the answer to `turn` must be.
    pub fn expect(&self, turn: u32) -> &Expect {
        &self.lines[turn as usize].expect
    }
}

/// Name of a recipe's field for the conversation's number, and what stands before the number.
pub const CONVERSATION: &str = "conversation=";

/// One conversation at a time: when it is over, the next begins.
#[derive(Debug)]
pub struct Talk {
    requests: Vec<Arc<[u8]>>,
    /// Turn of the next request.
    turn: u32,
    number: u32,
}

/// The conversations of a plan. Each waits until it is drawn, says one request on whatever connection that is for, and
/// waits again when it has its answer.
#[derive(Debug)]
pub struct Talks {
    script: Arc<Script>,
    waiting: Vec<Talk>,
    /// Conversations begun.
    begun: u32,
    seed: u32,
}

impl Talks {
    /// Twice as many as `connections`, so that as many wait as have a request under way.
    pub fn new(script: &Arc<Script>, connections: u32) -> Talks {
        let waiting = (0..2 * connections).map(|_| script.talk()).collect();
        Talks { script: script.clone(), waiting, begun: 0, seed: 0x2545_f491 }
    }

    /// One that waits, drawn by lot (a fixed order would be in step with a proxy that takes its servers in turn), with its
    /// next request and the turn this is.
    pub fn draw(&mut self) -> (Talk, Arc<[u8]>, u32) {
        self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let at = (self.seed >> 8) as usize % self.waiting.len().max(1);
        // None waits when many were lost with their connections.
        let mut talk =
            if self.waiting.is_empty() { self.script.talk() } else { self.waiting.swap_remove(at) };
        let turn = talk.turn;
        if turn == 0 {
            self.begun += 1;
            talk.number = self.begun;
        }
        talk.turn = (turn + 1) % TURNS;
        let request = &mut talk.requests[turn as usize];
        // In place: its last sending is long over. Were it not, this would make a copy.
        let bytes = Arc::make_mut(request);
        for at in self.script.lines[turn as usize].numbers_at {
            bytes[at..at + NUMBER_LEN].copy_from_slice(&digits(talk.number));
        }
        let request = request.clone();
        (talk, request, turn)
    }

    /// It has its answer.
    pub fn put_back(&mut self, talk: Talk) {
        self.waiting.push(talk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 3] = [2 << 10, 32 << 10, 128 << 10];

    fn split(request: &[u8]) -> (&str, &[u8]) {
        let end = request.windows(4).position(|w| w == b"\r\n\r\n").expect("head ends") + 4;
        (std::str::from_utf8(&request[..end]).expect("ascii"), &request[end..])
    }

    #[test]
    fn bodies_are_chats_of_the_length_said() {
        for size in SIZES {
            let lengths: Vec<usize> = (0..TURNS).map(|turn| body_bytes(size, turn)).collect();
            assert_eq!(lengths.iter().sum::<usize>(), size * TURNS as usize, "{lengths:?}");
            for turn in 0..TURNS {
                let body = body(size, turn).expect("fits");
                assert_eq!(body.len(), body_bytes(size, turn));
                let chat: serde_json::Value = serde_json::from_slice(&body).expect("valid JSON");
                let messages = chat["messages"].as_array().expect("a list");
                let roles: Vec<&str> = messages.iter().filter_map(|m| m["role"].as_str()).collect();
                assert_eq!((roles[0], roles[roles.len() - 1]), ("system", "user"));
                for (at, role) in roles.iter().enumerate().skip(1) {
                    assert_eq!(*role, if at % 2 == 1 { "user" } else { "assistant" }, "{size} {turn} {at}");
                }
                let text = |m: &serde_json::Value| m["content"].as_str().map_or(0, str::len);
                assert!(messages.iter().skip(1).all(|m| text(m) > 40 && text(m) <= 3 * MESSAGE_BYTES_MAX));
            }
        }
    }

    #[test]
    fn an_escape_comes_about_every_fifty_bytes() {
        for size in SIZES {
            let body = String::from_utf8(body(size, 3).expect("fits")).expect("text");
            let every =
                body.len() / ESCAPES.iter().map(|e| body.matches(e.trim_end()).count()).sum::<usize>();
            assert!((20..=70).contains(&every), "{size}: every {every} bytes");
        }
    }

    #[test]
    fn each_turn_goes_on_where_the_last_ended() {
        for size in SIZES {
            let bodies: Vec<Vec<u8>> = (0..TURNS).map(|turn| body(size, turn).expect("fits")).collect();
            for pair in bodies.windows(2) {
                let kept = pair[0].len() - TAIL.len();
                assert_eq!(pair[0][..kept], pair[1][..kept]);
                assert_ne!(pair[0][kept..kept + 9], pair[1][kept..kept + 9]);
            }
        }
    }

    #[test]
    fn what_cannot_be_built_says_the_range() {
        for (size, turn) in [(100, 0), (SIZE_MAX + 1, 0), (2048, TURNS)] {
            assert!(body(size, turn).expect_err("out of range").contains("expected"), "{size} {turn}");
        }
    }

    #[test]
    fn answers_report_what_the_turns_share() {
        let report = |turn| {
            let body = answer_body(32 << 10, turn).expect("fits");
            assert_eq!(body.len(), ANSWER_BYTES);
            let answer: serde_json::Value = serde_json::from_slice(&body).expect("valid JSON");
            let usage = &answer["usage"];
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
            (usage["prompt_tokens"].as_u64().expect("a number"), cached)
        };
        assert_eq!(report(0), (6656, 1024), "the system prompt");
        assert_eq!(report(1), (7680, 6656), "the first turn");
        assert_eq!(report(3), (9728, 8704));
    }

    #[test]
    fn talks_take_turns_and_never_share_a_number() {
        let script = Arc::new(Script::new("h", "/v1/chat/completions", 2048).expect("fits"));
        let mut talks = Talks::new(&script, 2);
        let mut turns: Vec<Vec<u32>> = Vec::new();
        let mut order = Vec::new();
        for _ in 0..50 {
            let (talk, request, turn) = talks.draw();
            talks.put_back(talk);
            let (head, sent) = split(&request);
            let recipe = head.lines().find_map(|line| line.strip_prefix("X-Perf: ")).expect("a recipe");
            let recipe = Recipe::parse(recipe).expect("readable");
            let Answer::Chat { conversation, turn: said } = recipe.answer else { panic!("{recipe:?}") };
            let mut expected = body(2048, turn).expect("fits");
            let at = number_at(2048);
            expected[at..at + NUMBER_LEN].copy_from_slice(&digits(conversation));
            assert_eq!((said, sent), (turn, &expected[..]));
            turns.resize(turns.len().max(conversation as usize), Vec::new());
            turns[conversation as usize - 1].push(turn);
            order.push(conversation);
        }
        assert!(turns.iter().all(|turns| *turns == [0, 1, 2, 3][..turns.len()]), "{turns:?}");
        assert!(turns.iter().filter(|turns| turns.len() < 4).count() <= 4, "four at a time: {turns:?}");
        let gap = |n| order.iter().rposition(|&c| c == n).zip(order.iter().position(|&c| c == n));
        let gaps: Vec<usize> = (1..=4).filter_map(gap).map(|(last, first)| last - first).collect();
        assert!(gaps.iter().any(|&g| g != gaps[0]), "drawn by lot: {order:?}");
    }

    #[test]
    fn a_request_still_being_sent_is_not_written_over() {
        let script = Arc::new(Script::new("h", "/", 2048).expect("fits"));
        let mut talks = Talks::new(&script, 1);
        let (talk, first, _) = talks.draw();
        let before = first.to_vec();
        talks.put_back(talk);
        for _ in 0..50 {
            let (talk, ..) = talks.draw();
            talks.put_back(talk);
        }
        assert_eq!(first[..], before[..]);
    }

    #[test]
    fn lost_talks_are_made_good() {
        let script = Arc::new(Script::new("h", "/", 2048).expect("fits"));
        let mut talks = Talks::new(&script, 1);
        let turns: Vec<u32> = (0..5).map(|_| talks.draw().2).collect();
        assert_eq!((turns, talks.begun), (vec![0; 5], 5));
    }
}

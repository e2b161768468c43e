//! What travels: the requests the generator sends, the answers the backend gives, and the recipe header by which a
//! request tells the backend what to answer.
//!
//! *Invariant*: every byte is a pure function of the recipe, but for the event number and the send timestamp, which stand
//! at fixed places in an event of fixed length. So both ends can compare byte for byte without talking to each other.
//! *Bound and cost*: bodies are built once per plan and shared; an event costs one copy of [`EVENT_LEN`] bytes.
//! *Errors*: a length too small for its envelope, or an unreadable recipe, is refused with what was expected.

use crate::prompts;

/// Name of the recipe header, as sent.
pub const RECIPE_HEADER: &str = "X-Perf";

const EVENT_HEAD: &[u8] = b"data: {\"id\":\"chatcmpl-perf\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\
\"model\":\"perf\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"},\"finish_reason\":null}],\"perf\":{\"i\":\"";
const EVENT_MIDDLE: &[u8] = b"\",\"t\":\"";
const EVENT_TAIL: &[u8] = b"\"}}\n\n";
const INDEX_LEN: usize = 5;
const TIME_LEN: usize = 20;
const INDEX_AT: usize = EVENT_HEAD.len();
const TIME_AT: usize = INDEX_AT + INDEX_LEN + EVENT_MIDDLE.len();
const TAIL_AT: usize = TIME_AT + TIME_LEN;
/// Length of one event, blank line included, in bytes.
pub const EVENT_LEN: usize = TAIL_AT + EVENT_TAIL.len();
/// The event that ends a stream, as OpenAI-compatible engines send it.
pub const DONE: &[u8] = b"data: [DONE]\n\n";
/// Most events in one answer: what the five digits of the event number hold.
pub const EVENTS_MAX: u32 = 99_999;
/// Largest body either way: 1 GiB.
pub const BODY_BYTES_MAX: usize = 1 << 30;

/// What the backend is to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// One JSON body of `len` bytes, `delay_ns` after the request has been read whole.
    Json { len: usize, delay_ns: u64 },
    /// A head at once; then `count` events, the k-th due `first_ns + k * every_ns` after the request has been read whole;
    /// then [`DONE`].
    Events { count: u32, first_ns: u64, every_ns: u64 },
    /// One JSON body at once, to a turn of a conversation (see [`prompts`]).
    Chat { conversation: u32, turn: u32 },
}

/// One kind of request: the length of its body and the answer it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Length of the request body in bytes; 0 in a backend's own default means "any body, unchecked". Of a conversation:
    /// the mean length over its turns.
    pub body_len: usize,
    pub answer: Answer,
}

impl Recipe {
    /// Whether the answer is a stream.
    pub fn streams(&self) -> bool {
        matches!(self.answer, Answer::Events { .. })
    }

    /// The request body that goes with it; of a conversation, that of conversation 0.
    pub fn body(&self) -> Result<Vec<u8>, String> {
        match self.answer {
            Answer::Chat { turn, .. } => prompts::body(self.body_len, turn),
            _ => request_body(self.body_len, self.streams()),
        }
    }

    /// The value of the recipe header.
    pub fn header(&self) -> String {
        match self.answer {
            Answer::Json { len, delay_ns } => {
                format!("body={};answer={len};delay_us={}", self.body_len, delay_ns / 1_000)
            }
            Answer::Events { count, first_ns, every_ns } => format!(
                "body={};events={count};first_us={};every_us={}",
                self.body_len,
                first_ns / 1_000,
                every_ns / 1_000
            ),
            // Of fixed length, so that the number can be written over.
            Answer::Chat { conversation, turn } => {
                format!("body={};{}{conversation:08};turn={turn}", self.body_len, prompts::CONVERSATION)
            }
        }
    }

    /// Reads a recipe header's value. Errors name the field and what was expected.
    pub fn parse(value: &str) -> Result<Recipe, String> {
        let (mut body, mut answer, mut delay) = (None, None, None);
        let (mut events, mut first, mut every) = (None, None, None);
        let (mut conversation, mut turn) = (None, None);
        for field in value.split(';') {
            let (name, digits) = field
                .split_once('=')
                .ok_or_else(|| format!("recipe field '{field}': expected name=number"))?;
            let number: u64 = digits
                .trim()
                .parse()
                .map_err(|_| format!("recipe field '{name}': expected a whole number, got '{digits}'"))?;
            match name.trim() {
                "body" => body = Some(number),
                "answer" => answer = Some(number),
                "delay_us" => delay = Some(number),
                "events" => events = Some(number),
                "first_us" => first = Some(number),
                "every_us" => every = Some(number),
                "conversation" => conversation = Some(number),
                "turn" => turn = Some(number),
                other => return Err(format!("recipe field '{other}' is unknown")),
            }
        }
        let body_len = bytes("body", body)?;
        let us = |v: Option<u64>| v.unwrap_or(0).saturating_mul(1_000);
        let answer = match (answer, events, conversation) {
            (Some(_), None, None) => Answer::Json { len: bytes("answer", answer)?, delay_ns: us(delay) },
            (None, Some(count), None) if (1..=u64::from(EVENTS_MAX)).contains(&count) => {
                Answer::Events { count: count as u32, first_ns: us(first), every_ns: us(every) }
            }
            (None, Some(count), None) => {
                return Err(format!("recipe field 'events': {count}, expected 1 to {EVENTS_MAX}"));
            }
            (None, None, Some(number)) => {
                let conversation = u32::try_from(number).map_err(|_| {
                    format!("recipe field 'conversation': {number}, expected at most {}", u32::MAX)
                })?;
                let turn = turn.ok_or("recipe field 'turn' is missing")?;
                let turn =
                    u32::try_from(turn).ok().filter(|&turn| turn < prompts::TURNS).ok_or_else(|| {
                        format!("recipe field 'turn': {turn}, expected 0 to {}", prompts::TURNS - 1)
                    })?;
                Answer::Chat { conversation, turn }
            }
            _ => return Err("recipe: expected exactly one of 'answer', 'events' and 'conversation'".into()),
        };
        Ok(Recipe { body_len, answer })
    }
}

fn bytes(name: &str, value: Option<u64>) -> Result<usize, String> {
    let value = value.ok_or_else(|| format!("recipe field '{name}' is missing"))?;
    usize::try_from(value)
        .ok()
        .filter(|&n| n <= BODY_BYTES_MAX)
        .ok_or_else(|| format!("recipe field '{name}': {value}, expected at most {BODY_BYTES_MAX}"))
}

/// A chat request body of exactly `len` bytes: valid JSON whose prompt is filler text, the same for the same arguments.
/// Error when `len` cannot hold the envelope, or is above [`BODY_BYTES_MAX`].
pub fn request_body(len: usize, stream: bool) -> Result<Vec<u8>, String> {
    let head: &[u8] = if stream {
        b"{\"model\":\"perf\",\"stream\":true,\"max_tokens\":64,\"messages\":[{\"role\":\"user\",\"content\":\""
    } else {
        b"{\"model\":\"perf\",\"stream\":false,\"max_tokens\":64,\"messages\":[{\"role\":\"user\",\"content\":\""
    };
    envelope("request body", head, b"\"}]}", len)
}

/// A JSON answer body of exactly `len` bytes. Error as for [`request_body`].
pub fn answer_body(len: usize) -> Result<Vec<u8>, String> {
    let head = b"{\"id\":\"chatcmpl-perf\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"perf\",\
\"usage\":{\"prompt_tokens\":500,\"completion_tokens\":64,\"total_tokens\":564},\
\"choices\":[{\"index\":0,\"finish_reason\":\"stop\",\"message\":{\"role\":\"assistant\",\"content\":\"";
    envelope("answer body", head, b"\"}}]}", len)
}

/// Filler between `head` and `tail`, `len` bytes in all. Error as for [`request_body`].
pub fn envelope(what: &str, head: &[u8], tail: &[u8], len: usize) -> Result<Vec<u8>, String> {
    let least = head.len() + tail.len();
    if len < least || len > BODY_BYTES_MAX {
        return Err(format!("{what}: {len} bytes asked for, expected {least} to {BODY_BYTES_MAX}"));
    }
    let mut body = Vec::with_capacity(len);
    body.extend_from_slice(head);
    // A linear congruential sequence as words of lower-case letters: no escapes, no long run of one byte, and a piece
    // put back in the wrong place differs.
    let mut seed: u32 = 0x2545_f491;
    while body.len() < len - tail.len() {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let letter = (seed >> 24) % 32;
        body.push(if letter < 26 { b'a' + letter as u8 } else { b' ' });
    }
    body.extend_from_slice(tail);
    Ok(body)
}

/// A whole request by recipe, head and body, ready to send. `host` is the authority for `Host`, `path` the target.
pub fn request(
    host: &str,
    path: &str,
    recipe: &Recipe,
    headers: &[(String, String)],
) -> Result<Vec<u8>, String> {
    let body = recipe.body()?;
    let mut all = vec![(RECIPE_HEADER.to_owned(), recipe.header())];
    all.extend_from_slice(headers);
    Ok(request_with(host, path, &body, &all))
}

/// A whole request with any body. With the recipe header it has nine fields, as a client library would send.
pub fn request_with(host: &str, path: &str, body: &[u8], headers: &[(String, String)]) -> Vec<u8> {
    let mut head = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: ringway-perf\r\nAccept: application/json\r\n\
         Accept-Encoding: identity\r\nAuthorization: Bearer sk-perf-0123456789abcdef\r\nX-Request-Id: perf-000001\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    let mut whole = head.into_bytes();
    whole.extend_from_slice(body);
    whole
}

/// A whole answer with a body of known length.
pub fn response(status: &str, content_type: &str, body: &[u8]) -> Vec<u8> {
    let mut whole = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    whole.extend_from_slice(body);
    whole
}

/// The head of a streamed answer.
pub const EVENTS_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";

/// Event number `index` as one chunk, stamped with `sent_ns` (CLOCK_MONOTONIC).
pub fn event_chunk(index: u32, sent_ns: u64) -> Vec<u8> {
    let mut chunk = Vec::with_capacity(EVENT_LEN + 8);
    chunk.extend_from_slice(format!("{EVENT_LEN:x}\r\n").as_bytes());
    let start = chunk.len();
    chunk.extend_from_slice(EVENT_HEAD);
    chunk.extend_from_slice(&[b'0'; INDEX_LEN]);
    chunk.extend_from_slice(EVENT_MIDDLE);
    chunk.extend_from_slice(&[b'0'; TIME_LEN]);
    chunk.extend_from_slice(EVENT_TAIL);
    put_digits(&mut chunk[start + INDEX_AT..start + INDEX_AT + INDEX_LEN], u64::from(index));
    put_digits(&mut chunk[start + TIME_AT..start + TIME_AT + TIME_LEN], sent_ns);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

/// [`DONE`] as a chunk, and the end of the chunked body.
pub fn done_chunks() -> Vec<u8> {
    let mut chunks = format!("{:x}\r\n", DONE.len()).into_bytes();
    chunks.extend_from_slice(DONE);
    chunks.extend_from_slice(b"\r\n0\r\n\r\n");
    chunks
}

/// Reads one event of exactly [`EVENT_LEN`] bytes back: its number and send timestamp. `None` when any byte differs from
/// what [`event_chunk`] writes.
pub fn read_event(event: &[u8]) -> Option<(u32, u64)> {
    if event.len() != EVENT_LEN
        || &event[..INDEX_AT] != EVENT_HEAD
        || &event[INDEX_AT + INDEX_LEN..TIME_AT] != EVENT_MIDDLE
        || &event[TAIL_AT..] != EVENT_TAIL
    {
        return None;
    }
    let index = digits(&event[INDEX_AT..INDEX_AT + INDEX_LEN])?;
    Some((index as u32, digits(&event[TIME_AT..TAIL_AT])?))
}

/// Overwrites the send timestamps in a stream of events, so that two answers can be compared.
pub fn mask_times(stream: &mut [u8]) {
    for event in stream.chunks_exact_mut(EVENT_LEN) {
        if read_event(event).is_some() {
            event[TIME_AT..TAIL_AT].fill(b'0');
        }
    }
}

/// Writes `value` in decimal, with leading zeros; what does not fit is cut off in front.
pub fn put_digits(place: &mut [u8], mut value: u64) {
    for digit in place.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

fn digits(text: &[u8]) -> Option<u64> {
    text.iter().try_fold(0u64, |sum, &c| {
        c.is_ascii_digit().then(|| sum.checked_mul(10)?.checked_add(u64::from(c - b'0'))).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_the_length_asked_for_and_are_json() {
        for len in [200, 2048, 131_072] {
            for stream in [false, true] {
                let body = request_body(len, stream).expect("fits");
                assert_eq!(body.len(), len);
                let value: serde_json::Value = serde_json::from_slice(&body).expect("valid JSON");
                assert_eq!(value["stream"], stream);
            }
        }
        let body = answer_body(1024).expect("fits");
        assert_eq!(body.len(), 1024);
        serde_json::from_slice::<serde_json::Value>(&body).expect("valid JSON");
    }

    #[test]
    fn too_small_a_body_says_the_range() {
        let error = request_body(10, false).expect_err("too small");
        assert!(error.contains("10 bytes") && error.contains("expected"), "{error}");
    }

    #[test]
    fn recipes_survive_the_header() {
        for recipe in [
            Recipe { body_len: 2048, answer: Answer::Json { len: 1024, delay_ns: 3_000_000 } },
            Recipe {
                body_len: 300,
                answer: Answer::Events { count: 32, first_ns: 5_000_000, every_ns: 10_000_000 },
            },
            Recipe { body_len: 2048, answer: Answer::Chat { conversation: 12_345_678, turn: 3 } },
        ] {
            assert_eq!(Recipe::parse(&recipe.header()), Ok(recipe));
        }
    }

    #[test]
    fn bad_recipes_name_the_field() {
        for (text, part) in [
            ("body=1", "exactly one"),
            ("body=1;answer=2;events=3", "exactly one"),
            ("answer=2", "'body' is missing"),
            ("body=x;answer=2", "'body'"),
            ("body=1;events=0", "expected 1 to"),
            ("body=1;answer=2;conversation=3;turn=0", "exactly one"),
            ("body=1;conversation=3", "'turn' is missing"),
            ("body=1;conversation=3;turn=4", "expected 0 to 3"),
            ("body=1;conversation=99999999999;turn=0", "expected at most"),
            ("body=1;colour=2", "'colour' is unknown"),
            ("body", "expected name=number"),
            ("body=99999999999;answer=1", "at most"),
        ] {
            let error = Recipe::parse(text).expect_err(text);
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn events_are_json_of_fixed_length_and_read_back() {
        for (index, t) in [(0, 0), (31, 123_456_789_012), (EVENTS_MAX, u64::MAX)] {
            let chunk = event_chunk(index, t);
            let size_end = chunk.iter().position(|&b| b == b'\r').expect("size line");
            let size = usize::from_str_radix(std::str::from_utf8(&chunk[..size_end]).expect("hex"), 16)
                .expect("hex");
            let event = &chunk[size_end + 2..size_end + 2 + size];
            assert_eq!(event.len(), EVENT_LEN);
            assert_eq!(read_event(event), Some((index, t)));
            serde_json::from_slice::<serde_json::Value>(&event[6..]).expect("the data is JSON");
        }
    }

    #[test]
    fn a_changed_byte_is_noticed_anywhere() {
        let chunk = event_chunk(7, 42);
        let start = chunk.len() - 2 - EVENT_LEN;
        let event = &chunk[start..start + EVENT_LEN];
        for at in 0..EVENT_LEN {
            let mut bad = event.to_vec();
            bad[at] ^= 0x40;
            assert_ne!(read_event(&bad), Some((7, 42)), "byte {at}");
        }
        assert_eq!(read_event(&event[1..]), None);
    }

    #[test]
    fn masked_streams_of_different_times_are_equal() {
        let stream = |t| {
            let mut all = Vec::new();
            for i in 0..3 {
                let chunk = event_chunk(i, t + u64::from(i));
                let start = chunk.len() - 2 - EVENT_LEN;
                all.extend_from_slice(&chunk[start..start + EVENT_LEN]);
            }
            all.extend_from_slice(DONE);
            mask_times(&mut all);
            all
        };
        assert_eq!(stream(1), stream(99_999));
    }

    #[test]
    fn a_request_declares_its_own_length() {
        let recipe = Recipe { body_len: 2048, answer: Answer::Json { len: 1024, delay_ns: 0 } };
        let whole = request("h:1", "/v1/chat/completions", &recipe, &[]).expect("fits");
        let end = whole.windows(4).position(|w| w == b"\r\n\r\n").expect("head ends") + 4;
        assert_eq!(whole.len() - end, 2048);
        assert!(std::str::from_utf8(&whole[..end]).expect("ascii").contains("Content-Length: 2048\r\n"));
    }
}

//! How an answer is written: the face that the four API shapes share, and the event stream they write to.
//!
//! *Invariant*: an event is appended whole, as one chunk of a chunked body, or not at all.
//! *Bound and cost*: one copy of each event; buffers are reused over the stream.
//! *Source*: the server-sent events format of the HTML standard; RFC 9112 section 7.1 for chunks.

use std::io::Write;

/// Token counts of one request, as an engine reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All of the prompt, cached or not.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By itself.
    Stop,
    /// At the caller's limit.
    Length,
}

impl Finish {
    pub const fn name(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// Writes one answer in an API's shape.
pub trait Wire {
    /// The events before the first token.
    fn begin(&mut self, events: &mut Events, usage: Usage);
    /// One token; `text` needs no escaping in JSON.
    fn token(&mut self, events: &mut Events, text: &str);
    /// The events after the last token. `text` is the whole answer.
    fn end(&mut self, events: &mut Events, text: &str, finish: Finish, usage: Usage);
    /// The whole answer as one JSON body.
    fn whole(&mut self, text: &str, finish: Finish, usage: Usage) -> Vec<u8>;
}

/// Events waiting to be sent.
#[derive(Debug)]
pub struct Events {
    out: Vec<u8>,
    event: Vec<u8>,
    chunked: bool,
    written: u64,
    /// Events after this many are dropped: the stream is to die there.
    limit: u64,
}

impl Events {
    /// `chunked`: each event becomes a chunk of the body. After `limit` events nothing is appended any more.
    pub fn new(chunked: bool, limit: Option<u64>) -> Self {
        Events { out: Vec::new(), event: Vec::new(), chunked, written: 0, limit: limit.unwrap_or(u64::MAX) }
    }

    /// Appends the event that `write` writes, its blank line included.
    pub fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        if self.cut() {
            return;
        }
        self.written += 1;
        self.event.clear();
        write(&mut self.event);
        if self.chunked {
            write!(self.out, "{:x}\r\n", self.event.len()).expect("a vector takes every write");
            self.out.extend_from_slice(&self.event);
            self.out.extend_from_slice(b"\r\n");
        } else {
            self.out.extend_from_slice(&self.event);
        }
    }

    /// Appends `data: TEXT`.
    pub fn data(&mut self, text: &str) {
        self.push(|out| {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(text.as_bytes());
            out.extend_from_slice(b"\n\n");
        });
    }

    /// Appends `event: NAME` with `data: TEXT`.
    pub fn named(&mut self, name: &str, text: &str) {
        self.push(|out| {
            for part in ["event: ", name, "\ndata: ", text, "\n\n"] {
                out.extend_from_slice(part.as_bytes());
            }
        });
    }

    /// Ends the body.
    pub fn finish(&mut self) {
        if self.chunked && !self.cut() {
            self.out.extend_from_slice(b"0\r\n\r\n");
        }
    }

    /// The limit is reached.
    pub fn cut(&self) -> bool {
        self.written >= self.limit
    }

    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// What is to be sent, after `before`. Give the buffer back with [`Events::reuse`].
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.out)
    }

    /// Puts a sent buffer back.
    pub fn reuse(&mut self, mut buffer: Vec<u8>) {
        if self.out.is_empty() {
            buffer.clear();
            self.out = buffer;
        }
    }

    /// Puts `head` in front of what is to be sent.
    pub fn prepend(&mut self, head: &[u8]) {
        self.out.splice(0..0, head.iter().copied());
    }
}

/// `text` as a JSON string, quotes included.
pub fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_is_a_chunk_and_the_end_is_there_once() {
        let mut events = Events::new(true, None);
        events.data("{}");
        events.named("ping", "{}");
        events.finish();
        assert_eq!(
            events.take(),
            b"a\r\ndata: {}\n\n\r\n16\r\nevent: ping\ndata: {}\n\n\r\n0\r\n\r\n".to_vec()
        );
    }

    #[test]
    fn a_limited_stream_stops_after_that_many_events_and_never_ends_well() {
        let mut events = Events::new(true, Some(1));
        events.data("1");
        assert!(events.cut());
        events.data("2");
        events.finish();
        assert_eq!(events.take(), b"9\r\ndata: 1\n\n\r\n".to_vec());
    }
}

//! Reads one answer as a client sees it, and checks it against what was expected, byte by byte as it comes in.
//!
//! *Invariant*: an answer counts as good only when its status, its framing and all its bytes were as expected.
//! *Bound and cost*: one comparison per byte; a copy only of an event or head that arrives in pieces.
//! *Errors*: [`Fault`]; the connection is of no more use after one.

use std::sync::Arc;

use crate::http::{self, Fault, Framing};
use crate::payload::{self, DONE, EVENT_LEN};

/// What a good answer is. The status must be 200 in any case.
#[derive(Clone, Debug)]
pub enum Expect {
    /// Exactly these body bytes.
    Exact(Arc<[u8]>),
    /// A body of this many bytes.
    Length(usize),
    /// So many of the bench's own events in order, then [`DONE`].
    Events(u32),
    /// Any well-framed body.
    Any,
    /// Any well-framed body; it is read as a stream of events, ended by blank lines, of which there must be at least one.
    AnyEvents,
}

/// An event seen in the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Position in the answer, from 0.
    pub index: u32,
    /// When the backend sent it (CLOCK_MONOTONIC, ns); `None` for events that carry no timestamp.
    pub sent_ns: Option<u64>,
}

/// How far the answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    More,
    /// Whole and as expected.
    Done {
        keep_alive: bool,
    },
}

#[derive(Debug)]
enum State {
    Head,
    Body { framing: Framing, keep_alive: bool },
    Done,
}

/// Reader of one answer. [`AnswerReader::reset`] makes it ready for the next on the same connection.
#[derive(Debug)]
pub struct AnswerReader {
    state: State,
    /// A head, or an event, of which only a part has come.
    partial: Vec<u8>,
    /// Body bytes seen, decoded.
    seen: usize,
    events: u32,
    /// Events of unknown make: the last byte seen was a line end.
    after_newline: bool,
    fault: Option<Fault>,
}

impl AnswerReader {
    pub fn new() -> AnswerReader {
        AnswerReader {
            state: State::Head,
            partial: Vec::new(),
            seen: 0,
            events: 0,
            after_newline: false,
            fault: None,
        }
    }

    /// Forgets the last answer.
    pub fn reset(&mut self) {
        self.state = State::Head;
        self.partial.clear();
        self.seen = 0;
        self.events = 0;
        self.after_newline = false;
        self.fault = None;
    }

    /// Takes what has arrived. `on_event` is called once for each event that became whole.
    pub fn feed(
        &mut self,
        mut input: &[u8],
        expect: &Expect,
        on_event: &mut impl FnMut(Arrival),
    ) -> Result<Progress, Fault> {
        if matches!(self.state, State::Done) {
            return Err(Fault::Surplus);
        }
        while let State::Head = self.state {
            let (head, length) = if self.partial.is_empty() {
                match http::response_head(input)? {
                    Some(found) => found,
                    None => {
                        self.partial.extend_from_slice(input);
                        return Ok(Progress::More);
                    }
                }
            } else {
                let before = self.partial.len();
                self.partial.extend_from_slice(input);
                match http::response_head(&self.partial)? {
                    // The head ends in this piece, as it was incomplete without it.
                    Some((head, length)) => (head, length - before),
                    None => return Ok(Progress::More),
                }
            };
            self.partial.clear();
            input = &input[length..];
            if (100..200).contains(&head.status) {
                continue;
            }
            if head.status != 200 {
                return Err(Fault::Status(head.status));
            }
            self.state = State::Body { framing: head.framing, keep_alive: head.keep_alive };
        }
        let State::Body { mut framing, keep_alive } = std::mem::replace(&mut self.state, State::Done) else {
            unreachable!("the head has been read and the answer is not done");
        };
        let (taken, done) = framing.feed(input, &mut |piece| self.take(piece, expect, on_event))?;
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        if !done {
            self.state = State::Body { framing, keep_alive };
            return Ok(Progress::More);
        }
        if taken < input.len() {
            return Err(Fault::Surplus);
        }
        self.finish(expect)?;
        Ok(Progress::Done { keep_alive })
    }

    /// The server closed. Good only for a body that ends with the connection.
    pub fn close(&mut self, expect: &Expect) -> Result<Progress, Fault> {
        match self.state {
            State::Body { framing: Framing::Close, .. } => {
                self.finish(expect)?;
                Ok(Progress::Done { keep_alive: false })
            }
            State::Head if self.partial.is_empty() => Err(Fault::Closed("no byte of an answer".into())),
            State::Head => Err(Fault::Closed("within the head".into())),
            _ => Err(Fault::Closed(format!("after {} bytes of the body", self.seen))),
        }
    }

    fn take(&mut self, piece: &[u8], expect: &Expect, on_event: &mut impl FnMut(Arrival)) {
        if self.fault.is_some() {
            return;
        }
        match expect {
            Expect::Exact(body) => {
                let end = self.seen + piece.len();
                if end > body.len() {
                    self.fault = Some(Fault::Length { expected: body.len(), got: end });
                } else if &body[self.seen..end] != piece {
                    let same = body[self.seen..end].iter().zip(piece).take_while(|(a, b)| a == b).count();
                    self.fault = Some(Fault::Body { offset: self.seen + same });
                }
            }
            Expect::Events(count) => self.take_own_events(piece, *count, on_event),
            Expect::AnyEvents => {
                for &byte in piece {
                    if byte == b'\n' {
                        if self.after_newline {
                            on_event(Arrival { index: self.events, sent_ns: None });
                            self.events += 1;
                        }
                        self.after_newline = !self.after_newline;
                    } else if byte != b'\r' {
                        self.after_newline = false;
                    }
                }
            }
            Expect::Length(_) | Expect::Any => {}
        }
        self.seen += piece.len();
    }

    fn take_own_events(&mut self, mut piece: &[u8], count: u32, on_event: &mut impl FnMut(Arrival)) {
        while !piece.is_empty() {
            let wanted = if self.events < count { EVENT_LEN } else { DONE.len() };
            if self.events > count {
                self.fault = Some(Fault::Event("bytes after [DONE]".into()));
                return;
            }
            let taken = (wanted - self.partial.len()).min(piece.len());
            let event = if self.partial.is_empty() && taken == wanted {
                &piece[..taken]
            } else {
                self.partial.extend_from_slice(&piece[..taken]);
                if self.partial.len() < wanted {
                    return;
                }
                &self.partial[..]
            };
            if self.events < count {
                match payload::read_event(event) {
                    Some((index, sent_ns)) if index == self.events => {
                        on_event(Arrival { index, sent_ns: Some(sent_ns) });
                    }
                    Some((index, _)) => {
                        self.fault =
                            Some(Fault::Event(format!("number {index} where {} was due", self.events)));
                        return;
                    }
                    None => {
                        self.fault = Some(Fault::Event(format!("number {} is altered", self.events)));
                        return;
                    }
                }
            } else if event != DONE {
                self.fault = Some(Fault::Event("[DONE] is altered".into()));
                return;
            }
            self.events += 1;
            self.partial.clear();
            piece = &piece[taken..];
        }
    }

    fn finish(&mut self, expect: &Expect) -> Result<(), Fault> {
        match expect {
            Expect::Exact(body) if self.seen != body.len() => {
                Err(Fault::Length { expected: body.len(), got: self.seen })
            }
            Expect::Length(length) if self.seen != *length => {
                Err(Fault::Length { expected: *length, got: self.seen })
            }
            Expect::Events(count) if self.events != *count + 1 => {
                Err(Fault::Event(format!("{} of {} events, then the end", self.events, *count + 1)))
            }
            Expect::AnyEvents if self.events == 0 => Err(Fault::Event("no event in the answer".into())),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(wire: &[u8], cuts: &[usize], expect: &Expect) -> Result<(Progress, Vec<Arrival>), Fault> {
        let mut reader = AnswerReader::new();
        let mut seen = Vec::new();
        let mut progress = Progress::More;
        let mut from = 0;
        for &cut in cuts.iter().chain([&wire.len()]) {
            if from == cut {
                continue;
            }
            progress = reader.feed(&wire[from..cut], expect, &mut |a| seen.push(a))?;
            from = cut;
        }
        Ok((progress, seen))
    }

    fn stream(count: u32) -> Vec<u8> {
        let mut wire = payload::EVENTS_HEAD.to_vec();
        for i in 0..count {
            wire.extend_from_slice(&payload::event_chunk(i, 1_000 + u64::from(i)));
        }
        wire.extend_from_slice(&payload::done_chunks());
        wire
    }

    #[test]
    fn exact_bodies_in_every_split() {
        let body = payload::answer_body(400).expect("fits");
        let wire = payload::response("200 OK", "application/json", &body);
        let expect = Expect::Exact(body.into());
        for cut in 0..wire.len() {
            assert_eq!(read(&wire, &[cut], &expect).expect("good").0, Progress::Done { keep_alive: true });
        }
        let bytewise: Vec<usize> = (0..wire.len()).collect();
        assert!(read(&wire, &bytewise, &expect).is_ok());
    }

    #[test]
    fn each_way_to_be_wrong_is_its_own_fault() {
        let body = payload::answer_body(400).expect("fits");
        let expect = Expect::Exact(body.clone().into());
        let mut altered = body.clone();
        altered[333] ^= 1;
        let wire = |body: &[u8]| payload::response("200 OK", "a/b", body);
        assert_eq!(read(&wire(&altered), &[], &expect), Err(Fault::Body { offset: 333 }));
        assert_eq!(read(&wire(&body[..399]), &[], &expect), Err(Fault::Length { expected: 400, got: 399 }));
        let mut longer = body.clone();
        longer.push(b'x');
        assert_eq!(read(&wire(&longer), &[], &expect), Err(Fault::Length { expected: 400, got: 401 }));
        assert_eq!(read(&payload::response("502 Bad", "a/b", &body), &[], &expect), Err(Fault::Status(502)));
        let mut surplus = wire(&body);
        surplus.push(b'x');
        assert_eq!(read(&surplus, &[], &expect), Err(Fault::Surplus));
        assert_eq!(read(&surplus, &[surplus.len() - 1], &expect), Err(Fault::Surplus));
        assert!(matches!(read(b"garbage\r\n\r\n", &[], &expect), Err(Fault::Framing(_))));
    }

    #[test]
    fn streams_in_every_split_and_rechunked() {
        let wire = stream(3);
        let times = |seen: &[Arrival]| seen.iter().map(|a| a.sent_ns.expect("stamped")).collect::<Vec<_>>();
        for cut in 0..wire.len() {
            let (progress, seen) = read(&wire, &[cut], &Expect::Events(3)).expect("good");
            assert_eq!(progress, Progress::Done { keep_alive: true });
            assert_eq!(times(&seen), [1_000, 1_001, 1_002]);
        }
        // A proxy may merge chunks.
        let mut body = Vec::new();
        for i in 0..3 {
            let chunk = payload::event_chunk(i, 7);
            body.extend_from_slice(&chunk[chunk.len() - 2 - EVENT_LEN..chunk.len() - 2]);
        }
        body.extend_from_slice(DONE);
        let merged = payload::response("200 OK", "text/event-stream", &body);
        assert_eq!(read(&merged, &[], &Expect::Events(3)).expect("good").1.len(), 3);
        assert_eq!(read(&merged, &[500], &Expect::AnyEvents).expect("good").1.len(), 4);
    }

    #[test]
    fn lost_repeated_and_altered_events_are_faults() {
        let head = payload::EVENTS_HEAD;
        let chunk = |i| payload::event_chunk(i, 5);
        let done = payload::done_chunks();
        let bad = |parts: &[Vec<u8>]| {
            let wire = [head.to_vec(), parts.concat()].concat();
            read(&wire, &[], &Expect::Events(2)).map(|(progress, _)| progress)
        };
        assert!(bad(&[chunk(0), chunk(1), done.clone()]).is_ok());
        for parts in [
            vec![chunk(0), chunk(2), done.clone()],
            vec![chunk(0), chunk(0), done.clone()],
            vec![chunk(1), chunk(0), done.clone()],
            vec![chunk(0), done.clone()],
            vec![chunk(0), chunk(1), chunk(2), done.clone()],
            vec![chunk(0), chunk(1), b"0\r\n\r\n".to_vec()],
        ] {
            assert!(
                matches!(bad(&parts), Err(Fault::Event(_))),
                "{:?}",
                String::from_utf8_lossy(&parts.concat())
            );
        }
    }

    #[test]
    fn close_is_good_only_when_the_body_ends_so() {
        let expect = Expect::Length(3);
        let mut reader = AnswerReader::new();
        assert!(matches!(reader.close(&expect), Err(Fault::Closed(_))));
        let mut none = |_| {};
        reader.feed(b"HTTP/1.1 200 OK\r\n\r\nabc", &expect, &mut none).expect("good so far");
        assert_eq!(reader.close(&expect), Ok(Progress::Done { keep_alive: false }));
        reader.reset();
        reader
            .feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab", &expect, &mut none)
            .expect("good so far");
        assert!(matches!(reader.close(&expect), Err(Fault::Closed(_))));
    }

    #[test]
    fn interim_answers_are_passed_over() {
        let wire = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        for cut in 0..wire.len() {
            assert!(matches!(read(wire, &[cut], &Expect::Length(2)).expect("good").0, Progress::Done { .. }));
        }
    }
}

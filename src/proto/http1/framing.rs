//! Where a body ends: decided from the head, then followed through the bytes.
//!
//! *Invariant*: `request_framing` and `response_framing` are the only places that decide. [`BodyReader`] never takes a
//! byte that lies behind the body's end.
//! *Bound and cost*: a length or a close costs O(1) per call; chunked O(framing bytes), never O(data).
//! *Errors*: a head with two possible ends is refused here, in words.
//! *Source*: RFC 9112 section 6; the order of section 6.3.

use std::ops::Range;

use super::chunked::{ChunkError, ChunkedDecoder};
use super::encode::push_trailers;
use super::field::{Field, FieldKind, is};
use super::head::{Method, ResponseHead};
use super::lines::Seen;

/// Where a body ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    /// There is no body.
    #[default]
    None,
    /// After that many bytes; 0 is a body that is there and empty.
    Length(u64),
    /// After the last chunk and its trailers.
    Chunked,
    /// When the connection closes. Responses only.
    UntilClose,
}

/// What a head declares, before its meaning.
struct Declared {
    length: Option<u64>,
    chunked: bool,
}

/// Reads Content-Length and Transfer-Encoding as strictly in both directions: one plain number or one `chunked`.
fn declared(buf: &[u8], minor: u8, seen: &Seen, fields: &[Field]) -> Result<Declared, &'static str> {
    let length = match seen.first(FieldKind::ContentLength, fields) {
        Some(value) => Some(parse_length(value.of(buf))?),
        None => None,
    };
    if seen.is_repeated(FieldKind::ContentLength) {
        return Err("more than one Content-Length");
    }
    let Some(coding) = seen.first(FieldKind::TransferEncoding, fields) else {
        return Ok(Declared { length, chunked: false });
    };
    if !is(coding.of(buf), b"chunked") {
        return Err("Transfer-Encoding is not exactly `chunked`");
    }
    if seen.is_repeated(FieldKind::TransferEncoding) {
        return Err("more than one Transfer-Encoding");
    }
    if length.is_some() {
        return Err("Content-Length beside Transfer-Encoding");
    }
    if minor == 0 {
        return Err("Transfer-Encoding in HTTP/1.0");
    }
    Ok(Declared { length, chunked: true })
}

/// Digits only: no sign, no list, no white space inside, no overflow.
fn parse_length(value: &[u8]) -> Result<u64, &'static str> {
    if value.is_empty() {
        return Err("empty Content-Length");
    }
    let mut length = 0u64;
    for &b in value {
        if !b.is_ascii_digit() {
            return Err("malformed Content-Length; expected decimal digits only");
        }
        length = length
            .checked_mul(10)
            .and_then(|l| l.checked_add((b - b'0') as u64))
            .ok_or("Content-Length is over 2^64 - 1")?;
    }
    Ok(length)
}

/// The end of a request's body. Without a declaration there is none.
pub(super) fn request_framing(
    buf: &[u8],
    minor: u8,
    seen: &Seen,
    fields: &[Field],
) -> Result<Framing, &'static str> {
    let declared = declared(buf, minor, seen, fields)?;
    Ok(match declared.length {
        _ if declared.chunked => Framing::Chunked,
        Some(length) => Framing::Length(length),
        None => Framing::None,
    })
}

/// The end of a response's body, and whether another response can follow it on the same connection.
pub(super) struct ResponseFraming {
    pub framing: Framing,
    pub reusable: bool,
}

/// The end of the body of a response to `method`.
pub(super) fn response_framing(
    buf: &[u8],
    minor: u8,
    status: u16,
    method: Method,
    seen: &Seen,
    fields: &[Field],
) -> Result<ResponseFraming, &'static str> {
    let declared = declared(buf, minor, seen, fields)?;
    let never = matches!(status, 100..200 | 204);
    if never || status == 304 || method == Method::Head {
        // A status that never has a body but declares one: nobody knows what its sender puts on the wire next.
        let promises = declared.chunked || declared.length.unwrap_or(0) > 0;
        return Ok(ResponseFraming { framing: Framing::None, reusable: !(never && promises) });
    }
    Ok(match declared.length {
        _ if declared.chunked => ResponseFraming { framing: Framing::Chunked, reusable: true },
        Some(length) => ResponseFraming { framing: Framing::Length(length), reusable: true },
        None => ResponseFraming { framing: Framing::UntilClose, reusable: false },
    })
}

/// How to frame this response towards a client of HTTP/1.`client_minor` when its body streams through: as it came where
/// the client can read that, else chunked (a body that ended with the connection) or until close (chunked to 1.0).
pub fn downstream_framing(head: &ResponseHead, client_minor: u8) -> Framing {
    match (head.framing, client_minor) {
        (Framing::Chunked, 0) => Framing::UntilClose,
        (Framing::UntilClose, 1..) => Framing::Chunked,
        (same, _) => same,
    }
}

/// What [`BodyReader::advance`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advance {
    /// How many bytes of the input belong to this body.
    pub consumed: usize,
    /// How many of those go on as they are: all of them, except trailer fields, which [`BodyReader::push_tail`] writes.
    pub forward: usize,
    /// The body is complete; the bytes after `consumed` are the next message's.
    pub done: bool,
}

/// What [`BodyReader::decode`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// How many bytes of the input are dealt with; above 0 unless the input is empty or the body is complete.
    pub consumed: usize,
    /// Where in the input the body's own bytes are; ends at or before `consumed`; may be empty.
    pub data: Range<usize>,
    /// The body is complete; the bytes after `consumed` are the next message's.
    pub done: bool,
}

/// Follows one body through the bytes of its connection.
#[derive(Clone, Debug)]
pub struct BodyReader {
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    Length { remaining: u64 },
    Chunked(ChunkedDecoder),
    UntilClose,
}

impl Default for BodyReader {
    fn default() -> BodyReader {
        BodyReader::new(Framing::None)
    }
}

impl BodyReader {
    pub fn new(framing: Framing) -> BodyReader {
        let state = match framing {
            Framing::None => State::Length { remaining: 0 },
            Framing::Length(remaining) => State::Length { remaining },
            Framing::Chunked => State::Chunked(ChunkedDecoder::default()),
            Framing::UntilClose => State::UntilClose,
        };
        BodyReader { state }
    }

    /// The body is complete. (A body that ends with its connection never is; see [`BodyReader::may_end`].)
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Length { remaining } => *remaining == 0,
            State::Chunked(decoder) => decoder.is_done(),
            State::UntilClose => false,
        }
    }

    /// Whether the connection may close here without cutting the body short.
    pub fn may_end(&self) -> bool {
        matches!(self.state, State::UntilClose) || self.is_done()
    }

    /// More content could be put here without breaking the framing.
    pub fn between_pieces(&self) -> bool {
        match &self.state {
            State::Length { .. } => false,
            State::Chunked(decoder) => decoder.between_chunks(),
            State::UntilClose => true,
        }
    }

    /// Bytes of the body still to come, where its length was declared.
    pub fn remaining(&self) -> Option<u64> {
        match self.state {
            State::Length { remaining } => Some(remaining),
            _ => None,
        }
    }

    /// Takes this body's share of `input`, for a peer that gets the same framing: chunk lines are checked and go on as
    /// they are, trailer fields are filtered. After `done`, call [`BodyReader::push_tail`].
    pub fn advance(&mut self, input: &[u8]) -> Result<Advance, ChunkError> {
        if let State::Chunked(decoder) = &mut self.state {
            return decoder.advance(input);
        }
        let consumed = self.take(input.len());
        Ok(Advance { consumed, forward: consumed, done: self.is_done() })
    }

    /// Takes this body's share of `input` up to the end of one run of data, for a peer that gets another framing.
    pub fn decode(&mut self, input: &[u8]) -> Result<Decoded, ChunkError> {
        if let State::Chunked(decoder) = &mut self.state {
            return decoder.decode(input);
        }
        let consumed = self.take(input.len());
        Ok(Decoded { consumed, data: 0..consumed, done: self.is_done() })
    }

    fn take(&mut self, available: usize) -> usize {
        match &mut self.state {
            State::Length { remaining } => {
                let taken = (*remaining).min(available as u64);
                *remaining -= taken;
                taken as usize
            }
            _ => available,
        }
    }

    /// Trailer lines, filtered, each with its CRLF; empty unless a chunked body is complete and had some.
    pub fn trailers(&self) -> &[u8] {
        match &self.state {
            State::Chunked(decoder) if decoder.is_done() => decoder.trailers(),
            _ => b"",
        }
    }

    /// After [`BodyReader::advance`] said `done`: writes what `forward` left out, which is nothing unless there were
    /// trailer fields. Fields with the router's own prefix are left out.
    pub fn push_tail(&self, out: &mut Vec<u8>, router_prefix: &[u8]) {
        if let State::Chunked(decoder) = &self.state
            && decoder.is_done()
            && decoder.had_trailers()
        {
            push_trailers(out, decoder.trailers(), router_prefix);
            out.extend_from_slice(b"\r\n");
        }
    }
}

#[cfg(test)]
mod tests;

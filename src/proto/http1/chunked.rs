//! Chunked transfer coding, read strictly.
//!
//! *Invariant*: one reading. CRLF ends every line; a size is hexadecimal digits and nothing else, up to 2^64 − 1; an
//! extension begins with `;` right after the size and follows the grammar to its end. Trailers are checked as fields, and those
//! that could change a message's meaning are dropped (RFC 9110 section 6.5.1).
//! *Bound and cost*: [`CHUNK_LINE_BYTES_MAX`] per size line, [`TRAILER_BYTES_MAX`] for all trailers, the only bytes that
//! are kept. O(framing bytes): data is skipped, not looked at. 48 bytes of state, allocated memory only for trailers.
//! *Errors*: [`ChunkError`]; the connection must be closed, and the decoder says so again if it is called again.
//! *Source*: RFC 9112 section 7.1.

use super::field::{FieldKind, classify, is_token_byte, is_value_byte};
use super::framing::{Advance, Decoded};
use crate::limits::{CHUNK_LINE_BYTES_MAX, TRAILER_BYTES_MAX};

/// Why a chunked body cannot be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkError {
    /// What was wrong and what was expected.
    pub what: &'static str,
}

impl std::fmt::Display for ChunkError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.what)
    }
}
impl std::error::Error for ChunkError {}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// First digit of a size.
    #[default]
    Size,
    SizeMore,
    /// After `;`: a name follows.
    ExtBegin,
    ExtName,
    /// White space after a name.
    ExtNameEnd,
    /// After `=`: a token or a quoted string follows.
    ExtEquals,
    ExtToken,
    ExtQuoted,
    /// After a backslash in a quoted string.
    ExtEscaped,
    /// After a quoted string.
    ExtEnd,
    /// White space after a value.
    ExtValueEnd,
    /// LF that ends a size line.
    SizeLf,
    Data,
    DataCr,
    DataLf,
    /// First byte of a trailer line or of the blank line, no trailer field seen yet.
    TrailersBegin,
    /// First byte of a further trailer line or of the blank line.
    TrailerBegin,
    Trailer,
    TrailerLf,
    EndLf,
    Done,
    Failed,
}

/// The decoder of one body.
#[derive(Clone, Debug, Default)]
pub struct ChunkedDecoder {
    /// Kept trailer lines with their CRLF, and the line being read.
    trailers: Vec<u8>,
    /// Bytes of the current chunk still to come; its size while that is being read.
    remaining: u64,
    /// Bytes of the size line, then of the trailers, that have been read.
    line_bytes: u32,
    /// Where in `trailers` the line being read begins.
    line_start: u32,
    state: State,
    had_trailers: bool,
}

const _: () = assert!(std::mem::size_of::<ChunkedDecoder>() <= 48);

impl ChunkedDecoder {
    /// The last chunk and the blank line behind the trailers have been read.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// A chunk has just ended, or none has begun: another one could be put here.
    pub fn between_chunks(&self) -> bool {
        self.state == State::Size
    }

    /// Kept trailer lines, each with its CRLF; complete once [`ChunkedDecoder::is_done`].
    pub fn trailers(&self) -> &[u8] {
        &self.trailers
    }

    /// There was at least one trailer field, kept or not.
    pub fn had_trailers(&self) -> bool {
        self.had_trailers
    }

    /// See [`super::BodyReader::advance`].
    pub fn advance(&mut self, input: &[u8]) -> Result<Advance, ChunkError> {
        let mut at = 0;
        let mut forward = if self.had_trailers { Some(0) } else { None };
        while at < input.len() && !self.is_done() {
            if self.state == State::Data {
                at += self.take_data(input.len() - at);
                continue;
            }
            at += self.step(&input[at..])?;
            if self.had_trailers && forward.is_none() {
                forward = Some(at);
            }
        }
        Ok(Advance { consumed: at, forward: forward.unwrap_or(at), done: self.is_done() })
    }

    /// See [`super::BodyReader::decode`].
    pub fn decode(&mut self, input: &[u8]) -> Result<Decoded, ChunkError> {
        let mut at = 0;
        while at < input.len() && !self.is_done() {
            if self.state == State::Data {
                let data = at..at + self.take_data(input.len() - at);
                at = data.end;
                // The line end behind a chunk is taken along, so that one call per chunk is enough. A wrong one is left to
                // the next call: this one's data is good.
                if self.state == State::DataCr && input[at..].starts_with(b"\r\n") {
                    at += 2;
                    self.state = State::Size;
                }
                return Ok(Decoded { consumed: at, data, done: false });
            }
            at += self.step(&input[at..])?;
        }
        Ok(Decoded { consumed: at, data: at..at, done: self.is_done() })
    }

    fn take_data(&mut self, available: usize) -> usize {
        let taken = self.remaining.min(available as u64);
        self.remaining -= taken;
        if self.remaining == 0 {
            self.state = State::DataCr;
        }
        taken as usize
    }

    /// Reads framing bytes up to the next data, the first trailer field (whose first byte it leaves), the end, or the
    /// end of `input`. Returns how many.
    fn step(&mut self, input: &[u8]) -> Result<usize, ChunkError> {
        for (i, &b) in input.iter().enumerate() {
            match self.state {
                State::Data | State::Done => return Ok(i),
                State::Size | State::SizeMore => self.size_byte(b)?,
                State::ExtBegin
                | State::ExtName
                | State::ExtNameEnd
                | State::ExtEquals
                | State::ExtToken
                | State::ExtQuoted
                | State::ExtEscaped
                | State::ExtEnd
                | State::ExtValueEnd => {
                    let Some(next) = extension_byte(self.state, b) else {
                        return self.fail("malformed chunk extension; expected ;name or ;name=value");
                    };
                    self.state = next;
                    if next != State::SizeLf {
                        self.count_line()?;
                    }
                }
                State::SizeLf => {
                    if b != b'\n' {
                        return self.fail("bare CR in a chunk size line");
                    }
                    self.line_bytes = 0;
                    self.state = if self.remaining == 0 { State::TrailersBegin } else { State::Data };
                }
                State::DataCr if b == b'\r' => self.state = State::DataLf,
                State::DataLf if b == b'\n' => self.state = State::Size,
                State::DataCr | State::DataLf => return self.fail("chunk data is not followed by CRLF"),
                State::TrailersBegin if b != b'\r' => {
                    self.had_trailers = true;
                    self.state = State::TrailerBegin;
                    return Ok(i);
                }
                State::TrailersBegin | State::TrailerBegin if b == b'\r' => self.state = State::EndLf,
                State::TrailersBegin | State::TrailerBegin | State::Trailer => self.trailer_byte(b)?,
                State::TrailerLf => {
                    if b != b'\n' {
                        return self.fail("bare CR in a trailer");
                    }
                    self.end_trailer()?;
                }
                State::EndLf => {
                    if b != b'\n' {
                        return self.fail("bare CR after the last chunk");
                    }
                    self.state = State::Done;
                    return Ok(i + 1);
                }
                State::Failed => return self.fail("chunked body was malformed before"),
            }
        }
        Ok(input.len())
    }

    fn size_byte(&mut self, b: u8) -> Result<(), ChunkError> {
        let digit = match b {
            b'0'..=b'9' => b - b'0',
            b'a'..=b'f' => b - b'a' + 10,
            b'A'..=b'F' => b - b'A' + 10,
            b'\r' if self.state == State::SizeMore => {
                self.state = State::SizeLf;
                return Ok(());
            }
            b';' if self.state == State::SizeMore => {
                self.state = State::ExtBegin;
                return self.count_line();
            }
            _ => {
                return self
                    .fail("malformed chunk size; expected hexadecimal digits, then CRLF or an extension");
            }
        };
        if self.remaining > u64::MAX >> 4 {
            return self.fail("chunk size is over 2^64 - 1");
        }
        self.remaining = self.remaining << 4 | digit as u64;
        self.state = State::SizeMore;
        self.count_line()
    }

    fn count_line(&mut self) -> Result<(), ChunkError> {
        self.line_bytes += 1;
        if self.line_bytes as usize > CHUNK_LINE_BYTES_MAX {
            return self.fail("chunk size line is over 4096 bytes");
        }
        Ok(())
    }

    fn trailer_byte(&mut self, b: u8) -> Result<(), ChunkError> {
        self.line_bytes += 1;
        if self.line_bytes as usize > TRAILER_BYTES_MAX {
            return self.fail("trailers are over 16384 bytes");
        }
        if b == b'\r' {
            self.state = State::TrailerLf;
            return Ok(());
        }
        if !is_value_byte(b) {
            return self.fail("control byte or bare LF in a trailer");
        }
        self.trailers.push(b);
        self.state = State::Trailer;
        Ok(())
    }

    /// A trailer line is complete: checks it, and keeps it if it may be forwarded.
    fn end_trailer(&mut self) -> Result<(), ChunkError> {
        let line = &self.trailers[self.line_start as usize..];
        let name_len = line.iter().position(|&b| !is_token_byte(b)).unwrap_or(line.len());
        if name_len == 0 || line.get(name_len) != Some(&b':') {
            return self.fail("malformed trailer; expected `name: value`");
        }
        if may_trail(&line[..name_len]) {
            self.trailers.extend_from_slice(b"\r\n");
            self.line_start = self.trailers.len() as u32;
        } else {
            self.trailers.truncate(self.line_start as usize);
        }
        self.state = State::TrailerBegin;
        Ok(())
    }

    #[cold]
    fn fail<T>(&mut self, what: &'static str) -> Result<T, ChunkError> {
        self.state = State::Failed;
        Err(ChunkError { what })
    }
}

/// The next state within a chunk extension, `None` where the grammar has no such byte. An unfinished quoted string is
/// refused rather than ended by CRLF: readers exist that would let it run on into the data.
fn extension_byte(state: State, b: u8) -> Option<State> {
    let blank = matches!(b, b' ' | b'\t');
    Some(match (state, b) {
        (State::ExtBegin, _) if blank => State::ExtBegin,
        (State::ExtBegin | State::ExtName, _) if is_token_byte(b) => State::ExtName,
        (State::ExtName | State::ExtNameEnd, _) if blank => State::ExtNameEnd,
        (State::ExtName | State::ExtNameEnd, b'=') => State::ExtEquals,
        (State::ExtEquals, _) if blank => State::ExtEquals,
        (State::ExtEquals, b'"') => State::ExtQuoted,
        (State::ExtEquals | State::ExtToken, _) if is_token_byte(b) => State::ExtToken,
        (State::ExtToken | State::ExtEnd | State::ExtValueEnd, _) if blank => State::ExtValueEnd,
        (State::ExtQuoted, b'"') => State::ExtEnd,
        (State::ExtQuoted, b'\\') => State::ExtEscaped,
        (State::ExtQuoted | State::ExtEscaped, _) if is_value_byte(b) => State::ExtQuoted,
        (State::ExtName | State::ExtNameEnd, b';') => State::ExtBegin,
        (State::ExtToken | State::ExtEnd | State::ExtValueEnd, b';') => State::ExtBegin,
        (State::ExtName | State::ExtToken | State::ExtEnd, b'\r') => State::SizeLf,
        _ => return None,
    })
}

/// Whether a field may go on as a trailer: not what frames, routes, authenticates or describes a message, or says how
/// to treat it, since a recipient may merge trailers into the head it has already acted on.
fn may_trail(name: &[u8]) -> bool {
    const NEVER: [&[u8]; 22] = [
        b"age",
        b"cache-control",
        b"content-location",
        b"content-range",
        b"cookie",
        b"date",
        b"expires",
        b"if-match",
        b"if-modified-since",
        b"if-none-match",
        b"if-range",
        b"if-unmodified-since",
        b"location",
        b"max-forwards",
        b"pragma",
        b"range",
        b"retry-after",
        b"set-cookie",
        b"vary",
        b"warning",
        b"www-authenticate",
        b"accept-encoding",
    ];
    classify(name, b"") == FieldKind::Other && !NEVER.iter().any(|n| name.eq_ignore_ascii_case(n))
}

#[cfg(test)]
mod tests;

//! Splits a head into its parts: start line, then field lines, each byte looked at once.
//!
//! The usual way would be `httparse`. It is more lenient than we may be (line ends, the target), so that what it read had
//! to be checked again: a search for every line end, a choice of instruction set for every field, a second walk for the
//! kinds. One walk that checks, splits and classifies, in plain words of eight bytes, costs under half: 3,117 instructions
//! instead of 7,498 for a request of 11 fields in 407 bytes, 1,532 instead of 3,335 for a response of 5
//! (`scripts/bench-instructions`). `httparse` stays as the judge in `tests/http1.rs`: what is accepted here it accepts
//! too, with the same parts.
//!
//! *Invariant*: a line is accepted only as the grammar has it: token, colon, value without controls but HTAB, CRLF.
//! Nothing behind the blank line decides anything.
//! *Bound and cost*: O(head), [`HEADERS_MAX`] fields; allocates only where `fields` grows.
//! *Errors*: [`Fault`]; [`Fault::Unfinished`] where the bytes end before the head does.
//! *Source*: RFC 9112 sections 2.2, 3, 4, 5; RFC 9110 sections 5.5, 5.6.2.

use super::field::{self, Field, FieldKind, Span, is_token_byte};
use crate::limits::HEADERS_MAX;

/// Why these bytes are no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// They may still become one.
    Unfinished,
    /// They never will: what was wrong.
    Bad(&'static str),
    TooManyFields,
}

const BARE_CR: Fault = Fault::Bad("bare CR in the head; expected CRLF");
const FIELD_LINE: Fault =
    Fault::Bad("malformed header line; expected `name: value`, no space before the colon, no folded line");
const FIELD_VALUE: Fault = Fault::Bad("control byte (bare CR, NUL or other) in a header value");
const START_LINE: Fault =
    Fault::Bad("malformed start line; expected three parts with one space between them");
const STATUS: Fault = Fault::Bad("malformed status code; expected three digits");
const TARGET: Fault = Fault::Bad("request target holds a byte that must be percent-encoded");
const VERSION: Fault = Fault::Bad("HTTP version is not 1.0 or 1.1");

/// Which kinds of fields a head has, and where the first of each is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    kinds: u32,
    repeated: u32,
    first: [u8; FieldKind::COUNT],
}

const _: () = assert!(HEADERS_MAX <= u8::MAX as usize);

impl Seen {
    #[inline]
    fn note(&mut self, kind: FieldKind, index: usize) {
        let bit = kind.bit();
        if self.kinds & bit == 0 {
            self.first[kind as usize] = index as u8;
        } else {
            self.repeated |= bit;
        }
        self.kinds |= bit;
    }
    #[inline]
    pub(super) fn has(&self, kind: FieldKind) -> bool {
        self.kinds & kind.bit() != 0
    }
    /// There is more than one of that kind.
    #[inline]
    pub(super) fn is_repeated(&self, kind: FieldKind) -> bool {
        self.repeated & kind.bit() != 0
    }
    /// Where among the fields those of `kind` can be: from the first on, which is the only one unless there are more.
    #[inline]
    pub(super) fn places(&self, kind: FieldKind, fields: &[Field]) -> std::ops::Range<usize> {
        let first = self.first[kind as usize] as usize;
        match (self.has(kind), self.is_repeated(kind)) {
            (false, _) => 0..0,
            (true, false) => first..first + 1,
            (true, true) => first..fields.len(),
        }
    }
    /// Value of the first field of `kind`, which is not [`FieldKind::Other`] (those are not noted).
    #[inline]
    pub(super) fn first(&self, kind: FieldKind, fields: &[Field]) -> Option<Span> {
        self.has(kind).then(|| fields[self.first[kind as usize] as usize].value)
    }
}

/// Parts of a request line.
pub(super) struct RequestLine {
    pub method: Span,
    /// Not empty; visible ASCII without `#`.
    pub target: Span,
    pub minor: u8,
    /// Bytes up to and with its CRLF.
    pub end: usize,
}

/// Parts of a status line.
pub(super) struct StatusLine {
    /// 0 to 999.
    pub status: u16,
    pub reason: Span,
    pub minor: u8,
    /// Bytes up to and with its CRLF.
    pub end: usize,
}

/// Splits the request line at `start`.
#[inline]
pub(super) fn request_line(buf: &[u8], start: usize) -> Result<RequestLine, Fault> {
    let method_end = find(buf, start, |b| !is_token_byte(b));
    match buf.get(method_end) {
        Some(b' ') if method_end > start => {}
        None => return Err(Fault::Unfinished),
        Some(_) => return Err(START_LINE),
    }
    let target_start = method_end + 1;
    let target_end = find(buf, target_start, |b| !field::is_target_byte(b));
    match buf.get(target_end) {
        Some(b' ') if target_end > target_start => {}
        None => return Err(Fault::Unfinished),
        Some(b'#' | 0x80..) => return Err(TARGET),
        Some(_) => return Err(START_LINE),
    }
    let rest = &buf[target_end + 1..];
    // Compared as words, which a pattern would not be.
    let version = rest.first_chunk::<10>();
    let minor = if version == Some(b"HTTP/1.1\r\n") {
        1
    } else if version == Some(b"HTTP/1.0\r\n") {
        0
    } else {
        return Err(version_fault(rest));
    };
    Ok(RequestLine {
        method: Span::new(start, method_end),
        target: Span::new(target_start, target_end),
        minor,
        end: target_end + 11,
    })
}

#[cold]
fn version_fault(rest: &[u8]) -> Fault {
    let version = rest.starts_with(b"HTTP/1.0") || rest.starts_with(b"HTTP/1.1");
    match rest.get(8) {
        Some(b'\r') if version && rest.len() == 9 => Fault::Unfinished,
        Some(b'\r') if version => BARE_CR,
        None if !rest.contains(&b'\r') => Fault::Unfinished,
        _ => VERSION,
    }
}

/// Splits the status line at the start of `buf`.
#[inline]
pub(super) fn status_line(buf: &[u8]) -> Result<StatusLine, Fault> {
    let Some(&[b'H', b'T', b'T', b'P', b'/', b'1', b'.', minor, space, a, b, c]) = buf.first_chunk() else {
        return Err(if buf.len() < 12 { Fault::Unfinished } else { VERSION });
    };
    if !matches!(minor, b'0' | b'1') {
        return Err(VERSION);
    }
    if space != b' ' || !(a.is_ascii_digit() && b.is_ascii_digit() && c.is_ascii_digit()) {
        return Err(STATUS);
    }
    let digit = |b: u8| u16::from(b - b'0');
    let reason_start = match buf.get(12) {
        Some(b' ') => 13,
        Some(b'\r') => 12,
        Some(_) => return Err(STATUS),
        None => return Err(Fault::Unfinished),
    };
    let line_end = value_end(buf, reason_start);
    let end = after_crlf(buf, line_end)?;
    Ok(StatusLine {
        status: digit(a) * 100 + digit(b) * 10 + digit(c),
        reason: Span::new(reason_start, line_end),
        minor: minor - b'0',
        end,
    })
}

/// Splits and classifies the field lines from `at` to the blank line, into `fields` and, by kind,
/// `seen` (new for each head). Returns how long the head is with its blank line.
#[inline]
pub(super) fn field_lines(
    buf: &[u8],
    mut at: usize,
    router_prefix: &[u8],
    fields: &mut Vec<Field>,
    seen: &mut Seen,
) -> Result<usize, Fault> {
    fields.clear();
    loop {
        let colon = find(buf, at, |b| !is_token_byte(b));
        if buf.get(colon) != Some(&b':') || colon == at {
            return blank_line(buf, at, colon);
        }
        let mut value_start = colon + 1;
        while let Some(&b) = buf.get(value_start)
            && b <= b' '
            && matches!(b, b' ' | b'\t')
        {
            value_start += 1;
        }
        let line_end = value_end(buf, value_start);
        let next = after_crlf(buf, line_end)?;
        let mut value_end = line_end;
        // Of the bytes a value may hold only HTAB and SP are not above SP.
        while value_end > value_start && buf[value_end - 1] <= b' ' {
            value_end -= 1;
        }
        if fields.len() == HEADERS_MAX {
            return Err(Fault::TooManyFields);
        }
        let kind = field::classify(&buf[at..colon], router_prefix);
        if kind != FieldKind::Other {
            seen.note(kind, fields.len());
        }
        fields.push(Field { name: Span::new(at, colon), value: Span::new(value_start, value_end), kind });
        at = next;
    }
}

/// Where the head ends, if the line at `at`, whose first byte that is no name's is at `stop`, is the blank line.
fn blank_line(buf: &[u8], at: usize, stop: usize) -> Result<usize, Fault> {
    match buf.get(stop..).unwrap_or_default() {
        [b'\r', b'\n', ..] if stop == at => Ok(at + 2),
        [] => Err(Fault::Unfinished),
        [b'\r'] if stop == at => Err(Fault::Unfinished),
        [b'\r', ..] if stop == at => Err(BARE_CR),
        _ => Err(FIELD_LINE),
    }
}

/// The byte after the CRLF at `line_end`, which is no byte of a value.
#[inline]
fn after_crlf(buf: &[u8], line_end: usize) -> Result<usize, Fault> {
    match buf.get(line_end..line_end + 2) {
        Some(b"\r\n") => Ok(line_end + 2),
        _ => Err(value_fault(&buf[line_end..])),
    }
}

#[cold]
fn value_fault(rest: &[u8]) -> Fault {
    if matches!(rest, [] | [b'\r']) { Fault::Unfinished } else { FIELD_VALUE }
}

/// The first byte from `at` on that `stop` holds for; the length of `buf` where there is none. `at` is at most that.
#[inline(always)]
pub(super) fn find(buf: &[u8], mut at: usize, stop: impl Fn(u8) -> bool) -> usize {
    // Eight at a time, so that the end is asked for once in eight bytes.
    while let Some(chunk) = buf.get(at..at + 8) {
        for (i, &b) in chunk.iter().enumerate() {
            if stop(b) {
                return at + i;
            }
        }
        at += 8;
    }
    while at < buf.len() && !stop(buf[at]) {
        at += 1;
    }
    at
}

/// The first byte from `at` on that a field value cannot hold; the length of `buf` where there is none. `at` is at most that.
#[inline(always)]
fn value_end(buf: &[u8], mut at: usize) -> usize {
    while let Some(chunk) = buf.get(at..at + 8) {
        let unusual = not_printable(u64::from_le_bytes(chunk.try_into().expect("eight bytes")));
        if unusual == 0 {
            at += 8;
            continue;
        }
        at += unusual.trailing_zeros() as usize / 8;
        // Nearly always the line's end.
        if buf[at] == b'\r' || !field::is_value_byte(buf[at]) {
            return at;
        }
        at += 1;
    }
    while at < buf.len() && field::is_value_byte(buf[at]) {
        at += 1;
    }
    at
}

/// The high bit of each byte outside 0x20 to 0x7e, exact up to the first such byte (in memory order): a borrow or carry
/// runs only from there to later ones.
#[inline(always)]
const fn not_printable(word: u64) -> u64 {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    // Below 0x20 the first goes under zero, 0x7f goes over in the second, and of 0x80 to 0xff one or the other stays over.
    (word.wrapping_sub(ONES * 0x20) | word.wrapping_add(ONES)) & (ONES * 0x80)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_end_at_the_first_byte_they_cannot_hold() {
        // Every byte at every place of a word, with obs-text, HTAB and letters around it, and in the tail.
        for filler in [b'a', b' ', b'\t', 0x80, 0xff, b'~', b'}'] {
            for len in 0..20 {
                for place in 0..len {
                    for b in 0..=255u8 {
                        let mut bytes = vec![filler; len];
                        bytes[place] = b;
                        let expected = if field::is_value_byte(b) { len } else { place };
                        assert_eq!(value_end(&bytes, 0), expected, "{}", bytes.escape_ascii());
                        // A second one behind it changes nothing.
                        bytes.extend_from_slice(b"\0\x7f");
                        assert_eq!(value_end(&bytes, 0), expected);
                    }
                }
            }
        }
        assert_eq!((value_end(b"abc", 3), value_end(b"abc", 1)), (3, 3));
    }

    #[test]
    fn find_stops_at_the_first_wherever_it_is() {
        for len in 0..20 {
            for start in 0..=len {
                for place in start..=len {
                    let mut bytes = vec![b'a'; len];
                    if place < len {
                        bytes[place] = b':';
                    }
                    assert_eq!(find(&bytes, start, |b| b == b':'), place);
                }
            }
        }
    }

    #[test]
    fn every_prefix_of_a_head_is_unfinished() {
        let request = b"POST /a HTTP/1.1\r\nHost: a\r\nX:\t1 \r\n\r\n";
        let response = b"HTTP/1.0 200 OK\r\nA: b\r\n\r\n";
        let mut fields = Vec::new();
        let mut whole = |buf: &[u8], is_request: bool| {
            let at = if is_request { request_line(buf, 0)?.end } else { status_line(buf)?.end };
            field_lines(buf, at, b"", &mut fields, &mut Seen::default())
        };
        for (text, is_request) in [(&request[..], true), (response, false)] {
            for cut in 0..text.len() {
                let prefix = &text[..cut];
                assert_eq!(whole(prefix, is_request), Err(Fault::Unfinished), "{}", prefix.escape_ascii());
            }
            assert_eq!(whole(text, is_request), Ok(text.len()));
            assert_eq!(
                whole(&[text, b"\0\0\0"].concat(), is_request),
                Ok(text.len()),
                "what follows is not read"
            );
        }
    }
}

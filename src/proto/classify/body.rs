//! Finds `model` and `stream` at the top level of a JSON body, lazily.
//!
//! The top-level object is walked from quote to quote: keys are compared, values skipped. A string ends at the first
//! quote with an even run of backslashes before it, so long strings cost one SIMD search however many escapes they
//! hold; nested values are skipped by counting brackets outside strings, eight bytes at a time.
//!
//! *Invariant*: for every body that is a JSON object the result is what a full parser finds. Of a repeated key the last
//! value counts, as it does in the engines' parsers; so the walk goes to the end. Keys inside nested values or strings
//! are never taken.
//! *Bound and cost*: O(bytes), no recursion; no allocation but for a model name with escapes in it.
//! *Errors*: none. Of a body whose top level is no well-formed object nothing is reported: half-read values are not to
//! be trusted. What is nested is not validated; an engine refuses such a body anyway.
//! *Source*: RFC 8259.

use std::borrow::Cow;

use memchr::memchr;

/// What a body says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peek<'a> {
    /// The requested model, unescaped. `None`: none named, not a string, or not known.
    pub model: Option<Cow<'a, [u8]>>,
    /// Whether the answer shall be streamed. `None`: not said, not a boolean, or not known.
    pub stream: Option<bool>,
    /// The body was read to its end and is whole. Otherwise a part still to come may name another model.
    pub complete: bool,
}

/// Reads a body that is all there. One that breaks off says nothing.
pub fn peek(body: &[u8]) -> Peek<'_> {
    let mut found = Peek::default();
    match walk(body, &mut found) {
        Ok(()) => found,
        Err(_) => Peek::default(),
    }
}

/// Reads the beginning of a body: `complete` says whether it was the whole of it; if not, the rest is assumed to be well
/// formed and to name no other model.
pub fn peek_prefix(body: &[u8]) -> Peek<'_> {
    let mut found = Peek::default();
    match walk(body, &mut found) {
        Ok(()) | Err(Stop::Truncated) => found,
        Err(Stop::Malformed) => Peek::default(),
    }
}

/// Why a walk did not reach the object's end.
enum Stop {
    Truncated,
    Malformed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Key {
    Model,
    Stream,
    Other,
}

fn walk<'a>(body: &'a [u8], found: &mut Peek<'a>) -> Result<(), Stop> {
    let mut walker = Walker { body, at: if body.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 } };
    walker.expect(b'{')?;
    if walker.peek_byte()? == b'}' {
        walker.at += 1;
    } else {
        loop {
            walker.expect(b'"')?;
            let key = key(walker.string()?);
            walker.expect(b':')?;
            // What was found for this key before no longer counts, even if its new value is not all there.
            match key {
                Key::Model => found.model = None,
                Key::Stream => found.stream = None,
                Key::Other => {}
            }
            match walker.peek_byte()? {
                b'"' => {
                    walker.at += 1;
                    let raw = walker.string()?;
                    if key == Key::Model {
                        found.model = Some(unescape(raw).ok_or(Stop::Malformed)?);
                    }
                }
                b'{' | b'[' => walker.skip_nested()?,
                _ => {
                    let scalar = walker.scalar()?;
                    if key == Key::Stream {
                        found.stream = match scalar {
                            b"true" => Some(true),
                            b"false" => Some(false),
                            _ => None,
                        };
                    }
                }
            }
            match walker.peek_byte()? {
                b',' => walker.at += 1,
                b'}' => {
                    walker.at += 1;
                    break;
                }
                _ => return Err(Stop::Malformed),
            }
        }
    }
    if walker.peek_byte().is_ok() {
        return Err(Stop::Malformed);
    }
    found.complete = true;
    Ok(())
}

struct Walker<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Walker<'a> {
    /// The next byte that is no white space; the walker stands on it.
    #[inline]
    fn peek_byte(&mut self) -> Result<u8, Stop> {
        while let Some(&byte) = self.body.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(byte);
            }
            self.at += 1;
        }
        Err(Stop::Truncated)
    }

    /// Steps over `byte`, which must come next.
    #[inline]
    fn expect(&mut self, byte: u8) -> Result<(), Stop> {
        if self.peek_byte()? != byte {
            return Err(Stop::Malformed);
        }
        self.at += 1;
        Ok(())
    }

    /// From behind an opening quote to behind the closing one; the bytes between them as they stand.
    #[inline]
    fn string(&mut self) -> Result<&'a [u8], Stop> {
        let start = self.at;
        let end = string_end(self.body, start).ok_or(Stop::Truncated)?;
        self.at = end + 1;
        Ok(&self.body[start..end])
    }

    /// From an opening bracket to behind the one that closes it. Kinds of brackets are not told apart.
    fn skip_nested(&mut self) -> Result<(), Stop> {
        let body = self.body;
        let mut at = self.at;
        let mut depth = 0_usize;
        loop {
            at = find_structural(body, at).ok_or(Stop::Truncated)?;
            match body[at] {
                b'"' => at = string_end(body, at + 1).ok_or(Stop::Truncated)? + 1,
                b'{' | b'[' => {
                    depth += 1;
                    at += 1;
                }
                _ => {
                    depth -= 1;
                    at += 1;
                    if depth == 0 {
                        self.at = at;
                        return Ok(());
                    }
                }
            }
        }
    }

    /// A number or literal, as it stands; not validated.
    fn scalar(&mut self) -> Result<&'a [u8], Stop> {
        let rest = &self.body[self.at..];
        let ends = |byte: &u8| {
            matches!(byte, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t' | b'"' | b':' | b'{' | b'[')
        };
        let end = rest.iter().position(ends).ok_or(Stop::Truncated)?;
        if end == 0 {
            return Err(Stop::Malformed);
        }
        self.at += end;
        Ok(&rest[..end])
    }
}

const ONES: u64 = 0x0101_0101_0101_0101;
const HIGHS: u64 = ONES << 7;

/// High bit set in the lowest byte of `word` that is zero (and perhaps in later ones).
#[inline]
const fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(ONES) & !word & HIGHS
}

#[inline]
fn word_at(bytes: &[u8], at: usize) -> Option<u64> {
    let word = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// Where the string that begins at `start` has its closing quote: the first one with an even run of backslashes before.
#[inline]
fn string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let mut from = start;
    loop {
        let quote = find_quote(bytes, from)?;
        // Each backslash is counted for one quote only, so this stays linear.
        let mut run = quote;
        while run > start && bytes[run - 1] == b'\\' {
            run -= 1;
        }
        if (quote - run) % 2 == 0 {
            return Some(quote);
        }
        from = quote + 1;
    }
}

/// Where the first `"` is, from `from` on. Most strings of a request are short: the first bytes are looked at in place,
/// and only a long string pays for the call of the SIMD search.
#[inline]
fn find_quote(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    for _ in 0..2 {
        let Some(word) = word_at(bytes, at) else { break };
        let hits = zero_bytes(word ^ (ONES * b'"' as u64));
        if hits != 0 {
            return Some(at + hits.trailing_zeros() as usize / 8);
        }
        at += 8;
    }
    memchr(b'"', bytes.get(at..)?).map(|quote| at + quote)
}

/// Where the first quote or bracket is, from `from` on and outside strings.
#[inline]
fn find_structural(bytes: &[u8], from: usize) -> Option<usize> {
    let structural = |byte: u8| matches!(byte, b'"' | b'{' | b'[' | b'}' | b']');
    let mut at = from;
    // Between two strings there are mostly one or two bytes.
    for _ in 0..3 {
        if structural(*bytes.get(at)?) {
            return Some(at);
        }
        at += 1;
    }
    while let Some(word) = word_at(bytes, at) {
        // With the bits 0x26 set all four brackets become 0x7f, and so do only "Y", "_", "y" and DEL, which stand outside
        // strings in no valid body; they are told apart below.
        let mut hits =
            zero_bytes(word ^ (ONES * b'"' as u64)) | zero_bytes((word | (ONES * 0x26)) ^ (ONES * 0x7f));
        while hits != 0 {
            let hit = at + hits.trailing_zeros() as usize / 8;
            if structural(bytes[hit]) {
                return Some(hit);
            }
            hits &= hits - 1;
        }
        at += 8;
    }
    (at..bytes.len()).find(|at| structural(bytes[*at]))
}

/// Which key this is, written plainly or with escapes.
#[inline]
fn key(raw: &[u8]) -> Key {
    // A spelling of one of the two with an escape has 10 to 36 bytes: `\u006d` stands for one.
    match raw {
        b"model" => Key::Model,
        b"stream" => Key::Stream,
        _ if (10..=36).contains(&raw.len()) && memchr(b'\\', raw).is_some() => {
            let spells = |word: &[u8]| {
                let mut letters = word.iter();
                Unescape { raw }
                    .all(|part| part.is_some_and(|c| letters.next().is_some_and(|l| *l as u32 == c)))
                    && letters.next().is_none()
            };
            if spells(b"model") {
                Key::Model
            } else if spells(b"stream") {
                Key::Stream
            } else {
                Key::Other
            }
        }
        _ => Key::Other,
    }
}

/// A string's value. `None`: an escape or a control character that JSON does not allow.
fn unescape(raw: &[u8]) -> Option<Cow<'_, [u8]>> {
    if raw.iter().any(|byte| *byte < 0x20) {
        return None;
    }
    let Some(first) = memchr(b'\\', raw) else { return Some(Cow::Borrowed(raw)) };
    let mut value = raw[..first].to_vec();
    let mut rest = &raw[first..];
    while !rest.is_empty() {
        let plain = memchr(b'\\', rest).unwrap_or(rest.len());
        value.extend_from_slice(&rest[..plain]);
        let mut escapes = Unescape { raw: &rest[plain..] };
        if plain < rest.len() {
            let c = char::from_u32(escapes.next()??)?;
            value.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        }
        rest = escapes.raw;
    }
    Some(Cow::Owned(value))
}

/// The units of a string: code points of escapes, plain bytes as they are. `None` inside: a bad escape.
struct Unescape<'a> {
    raw: &'a [u8],
}

impl Iterator for Unescape<'_> {
    type Item = Option<u32>;

    fn next(&mut self) -> Option<Option<u32>> {
        let (&first, rest) = self.raw.split_first()?;
        self.raw = rest;
        Some(if first == b'\\' { self.escape() } else { Some(first.into()) })
    }
}

impl Unescape<'_> {
    /// From behind a backslash.
    fn escape(&mut self) -> Option<u32> {
        let (&kind, rest) = self.raw.split_first()?;
        self.raw = rest;
        Some(match kind {
            b'"' | b'\\' | b'/' => kind.into(),
            b'b' => 0x08,
            b'f' => 0x0c,
            b'n' => 0x0a,
            b'r' => 0x0d,
            b't' => 0x09,
            b'u' => {
                let unit = self.hex()?;
                match unit {
                    0xd800..=0xdbff => {
                        self.raw = self.raw.strip_prefix(b"\\u")?;
                        let low = self.hex().filter(|low| (0xdc00..=0xdfff).contains(low))?;
                        0x1_0000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
                    }
                    // Half of a pair stands for nothing.
                    0xdc00..=0xdfff => return None,
                    unit => unit,
                }
            }
            _ => return None,
        })
    }

    fn hex(&mut self) -> Option<u32> {
        let (digits, rest) = self.raw.split_first_chunk::<4>()?;
        self.raw = rest;
        digits.iter().try_fold(0, |unit, digit| Some(unit << 4 | char::from(*digit).to_digit(16)?))
    }
}

#[cfg(test)]
mod tests;

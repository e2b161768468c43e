//! Walks a JSON text from quote to quote, without a tree: what [`super::body`] and [`super::prompt`] share.
//!
//! A string ends at the first quote with an even run of backslashes before it, so long strings cost one SIMD search
//! however many escapes they hold; nested values are skipped by counting brackets outside strings.
//!
//! *Invariant*: a walk never leaves the text, and never goes back.
//! *Bound and cost*: O(bytes), no recursion; no allocation but for a value with escapes in it.
//! *Errors*: [`Stop`]: the text breaks off, or is no JSON. What is skipped is not validated.
//! *Source*: RFC 8259.

use std::borrow::Cow;

use memchr::memchr;

use super::simd::{self, Level, Nested};

/// Why a walk did not reach the object's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The text ends before the value does.
    Truncated,
    /// The text is no JSON.
    Malformed,
}

/// Walks the one object that `body` must be, a byte order mark in front allowed. `member` is called at the first byte of
/// each value with its key as it stands, and leaves the walker behind the value.
///
/// *Errors*: `member`'s, and the object's own.
#[inline(always)]
pub(super) fn object<'a>(
    body: &'a [u8],
    mut member: impl FnMut(&mut Walker<'a>, &'a [u8]) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let at = if let [0xef, 0xbb, 0xbf, ..] = body { 3 } else { 0 };
    let mut walker = Walker { body, at, level: Level::detect() };
    walker.members(&mut member)?;
    match walker.peek_byte() {
        Ok(_) => Err(Stop::Malformed),
        Err(_) => Ok(()),
    }
}

/// Where a walk stands.
pub(super) struct Walker<'a> {
    pub body: &'a [u8],
    pub at: usize,
    pub level: Level,
}

impl<'a> Walker<'a> {
    /// The members of the object that comes next; see [`object`].
    #[inline(always)]
    pub fn members(
        &mut self,
        mut member: impl FnMut(&mut Walker<'a>, &'a [u8]) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        self.expect(b'{')?;
        if self.peek_byte()? == b'}' {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.expect(b'"')?;
            let key = self.string()?;
            self.expect(b':')?;
            self.peek_byte()?;
            member(self, key)?;
            match self.peek_byte()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Ok(());
                }
                _ => return Err(Stop::Malformed),
            }
        }
    }

    /// Steps over the value that begins here.
    #[inline]
    pub fn skip_value(&mut self) -> Result<(), Stop> {
        match self.peek_byte()? {
            b'"' => {
                self.at += 1;
                self.string().map(drop)
            }
            b'{' | b'[' => self.skip_nested::<false>().map(drop),
            _ => self.scalar().map(drop),
        }
    }

    /// The value of a string that begins here, unescaped; any other value is stepped over and `None`.
    pub fn string_value(&mut self) -> Result<Option<Cow<'a, [u8]>>, Stop> {
        if self.peek_byte()? != b'"' {
            self.skip_value()?;
            return Ok(None);
        }
        self.at += 1;
        let raw = self.string()?;
        unescape(raw).map(Some).ok_or(Stop::Malformed)
    }

    /// The value of a boolean that begins here; any other value is stepped over and `None`.
    pub fn boolean_value(&mut self) -> Result<Option<bool>, Stop> {
        if matches!(self.peek_byte()?, b'"' | b'{' | b'[') {
            self.skip_value()?;
            return Ok(None);
        }
        Ok(match self.scalar()? {
            b"true" => Some(true),
            b"false" => Some(false),
            _ => None,
        })
    }

    /// The next byte that is no white space; the walker stands on it.
    #[inline]
    pub fn peek_byte(&mut self) -> Result<u8, Stop> {
        while let Some(&byte) = self.body.get(self.at) {
            // Most bytes are above all white space.
            if byte > b' ' || !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(byte);
            }
            self.at += 1;
        }
        Err(Stop::Truncated)
    }

    /// Steps over `byte`, which must come next.
    #[inline]
    pub fn expect(&mut self, byte: u8) -> Result<(), Stop> {
        if self.peek_byte()? != byte {
            return Err(Stop::Malformed);
        }
        self.at += 1;
        Ok(())
    }

    /// From behind an opening quote to behind the closing one; the bytes between them as they stand.
    #[inline]
    pub fn string(&mut self) -> Result<&'a [u8], Stop> {
        let start = self.at;
        let end = string_end(self.level, self.body, start).ok_or(Stop::Truncated)?;
        self.at = end + 1;
        Ok(&self.body[start..end])
    }

    /// From an opening bracket to behind the one that closes it; answers whether white space stands between tokens, if
    /// `SPACED` asks. Kinds of brackets are not told apart.
    #[inline]
    pub fn skip_nested<const SPACED: bool>(&mut self) -> Result<bool, Stop> {
        let nested = nested::<SPACED>(self.level, self.body, self.at);
        self.at = nested.end.ok_or(Stop::Truncated)?;
        Ok(nested.spaced)
    }

    /// A number or literal, as it stands; not validated.
    pub fn scalar(&mut self) -> Result<&'a [u8], Stop> {
        let rest = &self.body[self.at..];
        let end = rest.iter().position(|byte| ENDS_SCALAR[*byte as usize]).ok_or(Stop::Truncated)?;
        if end == 0 {
            return Err(Stop::Malformed);
        }
        self.at += end;
        Ok(&rest[..end])
    }
}

/// Bytes behind a number or literal.
const ENDS_SCALAR: [bool; 256] = {
    let (mut table, ends, mut at) = ([false; 256], b",}] \n\r\t\":{[", 0);
    while at < ends.len() {
        table[ends[at] as usize] = true;
        at += 1;
    }
    table
};

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

/// The end of the nested value that begins with the bracket at `start`. Whether it is spaced is told if `SPACED` asks.
#[inline]
pub(super) fn nested<const SPACED: bool>(level: Level, bytes: &[u8], start: usize) -> Nested {
    #[cfg(target_arch = "x86_64")]
    if let Level::Avx2(proof) = level
        && let Some(nested) = proof.nested::<SPACED>(bytes, start)
    {
        return nested;
    }
    let _ = level;
    nested_plain(bytes, start)
}

fn nested_plain(bytes: &[u8], start: usize) -> Nested {
    let (mut at, mut depth, mut spaced) = (start, 0_usize, false);
    let mut end = || {
        loop {
            let gap = at;
            at = find_structural(bytes, at)?;
            spaced = spaced || bytes[gap..at].iter().any(|b| matches!(b, b' ' | b'\n' | b'\r' | b'\t'));
            match bytes[at] {
                b'"' => at = string_end_plain(bytes, at + 1, at + 1)?,
                b'{' | b'[' => depth += 1,
                _ if depth == 1 => return Some(at + 1),
                _ => depth -= 1,
            }
            at += 1;
        }
    };
    Nested { end: end(), spaced }
}

/// Where the string that begins at `start` has its closing quote: the first one with an even run of backslashes before.
/// Most strings of a request are short: the first bytes are looked at in place.
#[inline]
pub(super) fn string_end(level: Level, bytes: &[u8], start: usize) -> Option<usize> {
    if let Some(chunk) = bytes.get(start..).and_then(|rest| rest.first_chunk::<16>()) {
        let quotes = simd::equal_16(chunk, b'"');
        if quotes != 0 {
            let quote = quotes.trailing_zeros() as usize;
            if quote == 0 || chunk[quote - 1] != b'\\' {
                return Some(start + quote);
            }
        }
    }
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(proof) => proof.string_end(bytes, start),
        Level::Plain => string_end_plain(bytes, start, start),
    }
}

/// [`string_end`], for a string that does not end before `from`.
pub(super) fn string_end_plain(bytes: &[u8], start: usize, mut from: usize) -> Option<usize> {
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

/// Whether the raw string `raw` is `word`, written plainly or with escapes.
#[inline]
pub(super) fn spells(raw: &[u8], word: &[u8]) -> bool {
    raw == word || (raw.len() > word.len() && memchr(b'\\', raw).is_some() && spells_escaped(raw, word))
}

/// [`spells`], for a string with escapes in it.
pub(super) fn spells_escaped(raw: &[u8], word: &[u8]) -> bool {
    let mut letters = word.iter();
    Unescape { raw }.all(|part| part.is_some_and(|c| letters.next().is_some_and(|l| *l as u32 == c)))
        && letters.next().is_none()
}

/// Whether the raw string holds neither escapes nor control characters.
#[inline]
pub(super) fn is_plain(raw: &[u8]) -> bool {
    let (words, rest) = raw.as_chunks::<8>();
    words.iter().all(|word| {
        let word = u64::from_le_bytes(*word);
        // Behind a byte below 0x20 there may be marks that are none; then there is one that is.
        zero_bytes(word ^ (ONES * b'\\' as u64)) | (word.wrapping_sub(ONES * 0x20) & !word & HIGHS) == 0
    }) && rest.iter().all(|byte| *byte >= 0x20 && *byte != b'\\')
}

/// A string's value. `None`: an escape or a control character that JSON does not allow.
pub(super) fn unescape(raw: &[u8]) -> Option<Cow<'_, [u8]>> {
    if is_plain(raw) {
        return Some(Cow::Borrowed(raw));
    }
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

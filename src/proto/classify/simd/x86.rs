//! The vector code itself, for AVX2; see [`super`], whose functions call it where the processor has what it needs.
//!
//! *Invariant*: a function that needs a feature is called with a [`Proof`] that it is there, and every load is of bytes whose
//! number its type tells.
//! *Bound and cost*, *Source*: as [`super`].

use std::arch::x86_64::*;

use super::super::walk::string_end_plain;
use super::{Key, Keys, Marks, Nested, marked_quote_plain};

/// That this processor has AVX2, BMI1, BMI2, POPCNT and PCLMULQDQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof(());

#[inline(always)]
pub fn equal_16(chunk: &[u8; 16], byte: u8) -> u32 {
    // SAFETY: the load reads the sixteen bytes of `chunk`, in any alignment; SSE2 is part of x86-64.
    unsafe {
        let bytes = _mm_loadu_si128(chunk.as_ptr().cast());
        _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8))) as u32
    }
}

impl Proof {
    #[inline]
    pub fn look() -> Option<Proof> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt")
            && is_x86_feature_detected!("pclmulqdq");
        has.then_some(Proof(()))
    }

    /// As [`super::super::walk::string_end`].
    #[inline]
    pub(in crate::proto::classify) fn string_end(self, bytes: &[u8], start: usize) -> Option<usize> {
        // SAFETY: a `Proof` exists only where the processor has what the function needs.
        unsafe { string_end(bytes, start) }
    }

    /// As [`super::marked_quote_plain`].
    #[inline]
    pub fn marked_quote(self, bytes: &[u8], at: usize, marks: &Marks) -> Option<usize> {
        // SAFETY: as above.
        unsafe { marked_quote(bytes, at, marks) }
    }

    /// As [`super::nh_plain`], for chunks of whole 32 bytes.
    #[inline]
    pub(in crate::proto::classify) fn nh(self, key: &Key, chunk: &[u8]) -> u64 {
        // SAFETY: as above.
        unsafe { nh(key, chunk) }
    }

    /// As [`super::identities`], for blocks of whole 32 bytes up to 256.
    #[inline]
    pub(in crate::proto::classify) fn identities(
        self,
        keys: &Keys,
        bytes: &[u8],
        block_bytes: usize,
        before: u64,
        identities: &mut [u64],
    ) -> u64 {
        // SAFETY: as above.
        unsafe { self::identities(keys, bytes, block_bytes, before, identities) }
    }

    /// The end of the nested value that begins with a bracket at `start`. `None`: a backslash outside strings, which
    /// no JSON has; plain code shall tell.
    /// `SPACED`: whether white space stands between its tokens is asked for.
    #[inline]
    pub(in crate::proto::classify) fn nested<const SPACED: bool>(
        self,
        bytes: &[u8],
        start: usize,
    ) -> Option<Nested> {
        // SAFETY: as above.
        unsafe { nested::<SPACED>(bytes, start) }
    }

    /// As [`super::compact_plain`]. False: as for [`Proof::nested`], and some of it may have been appended.
    #[inline]
    pub(in crate::proto::classify) fn compact(self, bytes: &[u8], out: &mut Vec<u8>) -> bool {
        // SAFETY: as above.
        unsafe { compact(bytes, out) }
    }
}

#[target_feature(enable = "avx2,bmi1")]
fn marked_quote(bytes: &[u8], at: usize, marks: &Marks) -> Option<usize> {
    let (one, six) = (twice(&marks.one), twice(&marks.six));
    let mut rest = bytes.get(at..)?;
    while let Some(window) = rest.first_chunk::<134>() {
        let (a, b) = (marked::<0, 134>(window, one, six), marked::<1, 134>(window, one, six));
        let (c, d) = (marked::<2, 134>(window, one, six), marked::<3, 134>(window, one, six));
        let any = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
        if _mm256_testz_si256(any, any) == 0 {
            let (low, high) = (!mask(equal(a, 0), equal(b, 0)), !mask(equal(c, 0), equal(d, 0)));
            let first = if low != 0 { low.trailing_zeros() } else { 64 + high.trailing_zeros() };
            return Some(bytes.len() - rest.len() + first as usize);
        }
        rest = &rest[128..];
    }
    while let Some(window) = rest.first_chunk::<38>() {
        let found = !_mm256_movemask_epi8(equal(marked::<0, 38>(window, one, six), 0)) as u32;
        if found != 0 {
            return Some(bytes.len() - rest.len() + found.trailing_zeros() as usize);
        }
        rest = &rest[32..];
    }
    // The last 38 bytes, if there are as many from `at` on: those of them that were looked at above hold nothing.
    match bytes[at..].last_chunk::<38>() {
        Some(window) => {
            let found = !_mm256_movemask_epi8(equal(marked::<0, 38>(window, one, six), 0)) as u32;
            (found != 0).then(|| bytes.len() - 38 + found.trailing_zeros() as usize)
        }
        None => marked_quote_plain(bytes, bytes.len() - rest.len(), marks),
    }
}

/// Bits of the keys that may begin at each of 32 bytes of `window`: the tables are those of [`Marks`].
#[target_feature(enable = "avx2")]
#[inline]
fn marked<const INDEX: usize, const LEN: usize>(window: &[u8; LEN], one: __m256i, six: __m256i) -> __m256i {
    // Where the index is no ASCII the answer is 0.
    let one = _mm256_shuffle_epi8(one, load_at::<INDEX, 1, LEN>(window));
    let six = _mm256_shuffle_epi8(six, load_at::<INDEX, 6, LEN>(window));
    let quotes = equal(load_at::<INDEX, 0, LEN>(window), b'"');
    _mm256_and_si256(_mm256_and_si256(one, six), quotes)
}

/// A table for both halves of a shuffle.
#[target_feature(enable = "avx2")]
#[inline]
fn twice(table: &[u8; 16]) -> __m256i {
    // SAFETY: the load reads the sixteen bytes of `table`, in any alignment.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

/// The `INDEX`th 32 bytes of `bytes`.
#[target_feature(enable = "avx2")]
#[inline]
fn load<const INDEX: usize, const LEN: usize>(bytes: &[u8; LEN]) -> __m256i {
    const { assert!((INDEX + 1) * 32 <= LEN) };
    // SAFETY: the load reads 32 bytes within `bytes`, as just asserted, in any alignment.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().add(INDEX * 32).cast()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn equal(bytes: __m256i, byte: u8) -> __m256i {
    _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(byte as i8))
}

#[target_feature(enable = "avx2")]
#[inline]
fn mask(low: __m256i, high: __m256i) -> u64 {
    u64::from(_mm256_movemask_epi8(low) as u32) | u64::from(_mm256_movemask_epi8(high) as u32) << 32
}

#[target_feature(enable = "avx2,bmi1")]
fn string_end(bytes: &[u8], start: usize) -> Option<usize> {
    // Each byte is looked at with the two before it. In a JSON text these are there, and no backslash opens a string.
    if start < 2 || bytes.get(start - 1)? == &b'\\' {
        return string_end_plain(bytes, start, start);
    }
    let mut rest = &bytes[start - 2..];
    while let Some(window) = rest.first_chunk::<130>() {
        let (a, b) = (quotes::<0>(window), quotes::<1>(window));
        let (c, d) = (quotes::<2>(window), quotes::<3>(window));
        let any = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
        if _mm256_movemask_epi8(any) != 0 {
            let (a, b) = (may_end::<0, 130>(window, a), may_end::<1, 130>(window, b));
            let (c, d) = (may_end::<2, 130>(window, c), may_end::<3, 130>(window, d));
            let any = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
            // Out of line, for the sake of this loop: nearly always the string's last turn.
            if _mm256_movemask_epi8(any) != 0
                && let Some(quote) = first_that_ends(bytes, start, rest.len(), mask(a, b), mask(c, d))
            {
                return Some(quote);
            }
        }
        rest = &rest[128..];
    }
    while let Some(window) = rest.first_chunk::<34>() {
        let quotes = equal(load_at::<0, 2, 34>(window), b'"');
        let quotes = _mm256_movemask_epi8(may_end::<0, 34>(window, quotes));
        if quotes != 0
            && let Some(quote) = first_that_ends(bytes, start, rest.len(), quotes as u32 as u64, 0)
        {
            return Some(quote);
        }
        rest = &rest[32..];
    }
    string_end_plain(bytes, start, bytes.len() - rest.len() + 2)
}

/// The first quote that ends the string begun at `start`, of those marked in `low` and `high`, bits for the bytes behind the
/// first two of the last `rest` ones of `bytes`.
#[target_feature(enable = "avx2,bmi1")]
#[inline(never)]
fn first_that_ends(bytes: &[u8], start: usize, rest: usize, low: u64, high: u64) -> Option<usize> {
    let at = bytes.len() - rest + 2;
    for (at, mut quotes) in [(at, low), (at + 64, high)] {
        while quotes != 0 {
            let quote = at + quotes.trailing_zeros() as usize;
            if bytes[quote - 1] != b'\\' || ends(bytes, start, quote) {
                return Some(quote);
            }
            quotes &= quotes - 1;
        }
    }
    None
}

/// 32 bytes of `window` from the `INDEX`th of them on, and `OFFSET` more.
#[target_feature(enable = "avx2")]
#[inline]
fn load_at<const INDEX: usize, const OFFSET: usize, const LEN: usize>(window: &[u8; LEN]) -> __m256i {
    const { assert!((INDEX + 1) * 32 + OFFSET <= LEN) };
    // SAFETY: the load reads 32 bytes within `window`, as just asserted, in any alignment.
    unsafe { _mm256_loadu_si256(window.as_ptr().add(INDEX * 32 + OFFSET).cast()) }
}

/// Marks the quotes among 32 of the bytes behind the first two of `window`.
#[target_feature(enable = "avx2")]
#[inline]
fn quotes<const INDEX: usize>(window: &[u8; 130]) -> __m256i {
    equal(load_at::<INDEX, 2, 130>(window), b'"')
}

/// Those of the marked quotes that have not one backslash before them: with one they end nothing. Where there are more, their
/// number decides.
#[target_feature(enable = "avx2")]
#[inline]
fn may_end<const INDEX: usize, const LEN: usize>(window: &[u8; LEN], quotes: __m256i) -> __m256i {
    let backslash = equal(load_at::<INDEX, 1, LEN>(window), b'\\');
    let one = _mm256_andnot_si256(equal(load_at::<INDEX, 0, LEN>(window), b'\\'), backslash);
    _mm256_andnot_si256(one, quotes)
}

/// An even run of backslashes stands before the quote at `quote`. Each is counted for one quote only.
#[cold]
fn ends(bytes: &[u8], start: usize, quote: usize) -> bool {
    let run = bytes[start..quote].iter().rev().take_while(|byte| **byte == b'\\').count();
    run.is_multiple_of(2)
}

#[target_feature(enable = "avx2")]
#[inline]
fn nh(key: &Key, chunk: &[u8]) -> u64 {
    if let Ok(chunk) = chunk.try_into() {
        return nh_256(key, chunk);
    }
    let mut sum = _mm256_setzero_si256();
    for (eight, key) in chunk.as_chunks::<32>().0.iter().zip(key.as_chunks::<8>().0) {
        sum = _mm256_add_epi64(sum, products(key, load::<0, 32>(eight)));
    }
    total(sum)
}

#[target_feature(enable = "avx2")]
#[inline]
fn nh_256(key: &Key, chunk: &[u8; 256]) -> u64 {
    let (key, _) = key.as_chunks::<8>();
    let mut sum = products(&key[0], load::<0, 256>(chunk));
    sum = _mm256_add_epi64(sum, products(&key[1], load::<1, 256>(chunk)));
    sum = _mm256_add_epi64(sum, products(&key[2], load::<2, 256>(chunk)));
    sum = _mm256_add_epi64(sum, products(&key[3], load::<3, 256>(chunk)));
    sum = _mm256_add_epi64(sum, products(&key[4], load::<4, 256>(chunk)));
    sum = _mm256_add_epi64(sum, products(&key[5], load::<5, 256>(chunk)));
    sum = _mm256_add_epi64(sum, products(&key[6], load::<6, 256>(chunk)));
    total(_mm256_add_epi64(sum, products(&key[7], load::<7, 256>(chunk))))
}

#[target_feature(enable = "avx2")]
#[inline]
fn products(key: &[u32; 8], words: __m256i) -> __m256i {
    // SAFETY: the load reads the 32 bytes of `key`, in any alignment.
    let key = unsafe { _mm256_loadu_si256(key.as_ptr().cast()) };
    let words = _mm256_add_epi32(words, key);
    _mm256_mul_epu32(words, _mm256_srli_epi64::<32>(words))
}

#[target_feature(enable = "avx2")]
#[inline]
fn total(sums: __m256i) -> u64 {
    let sum = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
    let sum = _mm_add_epi64(sum, _mm_unpackhi_epi64(sum, sum));
    _mm_cvtsi128_si64(sum) as u64
}

#[target_feature(enable = "avx2,bmi2")]
fn identities(keys: &Keys, bytes: &[u8], block_bytes: usize, before: u64, identities: &mut [u64]) -> u64 {
    let mut identity = before;
    if block_bytes == 256 {
        for (chunk, slot) in bytes.as_chunks::<256>().0.iter().zip(identities) {
            identity = keys.chain(identity, keys.join(0, nh_256(&keys.words, chunk)));
            *slot = identity;
        }
    } else {
        for (chunk, slot) in bytes.chunks_exact(block_bytes).zip(identities) {
            identity = keys.chain(identity, keys.join(0, nh(&keys.words, chunk)));
            *slot = identity;
        }
    }
    identity
}

/// Bits of the bytes that a backslash escapes, and whether the byte behind the last is.
#[inline(always)]
fn escaped(backslashes: u64, carry: &mut bool) -> u64 {
    if backslashes == 0 {
        return u64::from(std::mem::take(carry));
    }
    const EVEN: u64 = 0x5555_5555_5555_5555;
    // A backslash that is itself escaped escapes nothing.
    let backslashes = backslashes & !u64::from(*carry);
    let follows = backslashes << 1 | u64::from(*carry);
    let odd_starts = backslashes & !EVEN & !follows;
    let (sequences, over) = odd_starts.overflowing_add(backslashes);
    *carry = over;
    (EVEN ^ (sequences << 1)) & follows
}

/// Which bytes are inside strings, chunk by chunk.
#[derive(Default)]
struct Strings {
    /// The next chunk's first byte is escaped.
    escape_carry: bool,
    /// All ones: it is inside a string.
    string_carry: u64,
}

impl Strings {
    /// Bits for the bytes of a chunk from each opening quote up to its closing one. `None`: a backslash stands outside.
    #[target_feature(enable = "avx2,pclmulqdq")]
    #[inline]
    fn inside(&mut self, low: __m256i, high: __m256i) -> Option<u64> {
        let backslashes = mask(equal(low, b'\\'), equal(high, b'\\'));
        let quotes =
            mask(equal(low, b'"'), equal(high, b'"')) & !escaped(backslashes, &mut self.escape_carry);
        let inside = _mm_clmulepi64_si128::<0>(_mm_set_epi64x(0, quotes as i64), _mm_set1_epi8(-1));
        let inside = _mm_cvtsi128_si64(inside) as u64 ^ self.string_carry;
        self.string_carry = ((inside as i64) >> 63) as u64;
        (backslashes & !inside == 0).then_some(inside)
    }
}

/// Bits for the bytes of a chunk that are white space.
#[target_feature(enable = "avx2")]
#[inline]
fn white_space(low: __m256i, high: __m256i) -> u64 {
    // By the low half of a byte the one that is white space, or one that no byte is equal to that is looked up there.
    const N: i8 = i8::MIN;
    let spaces = _mm256_setr_epi8(
        0x20, N, N, N, N, N, N, N, N, 0x09, 0x0a, N, N, 0x0d, N, N, 0x20, N, N, N, N, N, N, N, N, 0x09, 0x0a,
        N, N, 0x0d, N, N,
    );
    mask(
        _mm256_cmpeq_epi8(_mm256_shuffle_epi8(spaces, low), low),
        _mm256_cmpeq_epi8(_mm256_shuffle_epi8(spaces, high), high),
    )
}

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,pclmulqdq")]
fn compact(bytes: &[u8], out: &mut Vec<u8>) -> bool {
    let (start, mut filled) = (out.len(), out.len());
    // What is kept is copied 32 bytes at a time, the last of them perhaps beyond what is kept.
    out.resize(start + bytes.len() + 2 * 32, 0);
    let mut strings = Strings::default();
    let mut tail = [0; 64 + 32];
    let mut at = 0;
    while at < bytes.len() {
        let window = match bytes[at..].first_chunk::<96>() {
            Some(window) => window,
            None => {
                let rest = &bytes[at..bytes.len().min(at + 96)];
                tail[..rest.len()].copy_from_slice(rest);
                tail[rest.len()..].fill(0);
                &tail
            }
        };
        let (low, high) = (load::<0, 96>(window), load::<1, 96>(window));
        let Some(inside) = strings.inside(low, high) else { return false };
        let mut space = white_space(low, high) & !inside;
        let len = (bytes.len() - at).min(64);
        let mut run = 0;
        while run < len {
            let end = (space.trailing_zeros() as usize).min(len);
            space &= space.wrapping_sub(1);
            // Runs of 32 bytes and less are nearly all.
            out[filled..][..32].copy_from_slice(&window[run..][..32]);
            if end - run > 32 {
                out[filled + 32..][..32].copy_from_slice(&window[run + 32..][..32]);
            }
            filled += end - run;
            run = end + 1;
        }
        at += 64;
    }
    out.truncate(filled);
    true
}

#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,pclmulqdq")]
fn nested<const SPACED: bool>(bytes: &[u8], start: usize) -> Option<Nested> {
    let mut at = start;
    let mut depth = 0_u64;
    let mut spaced = false;
    let mut strings = Strings::default();
    let mut tail = [0; 64];
    loop {
        let chunk = match bytes.get(at..).and_then(|rest| rest.first_chunk::<64>()) {
            Some(chunk) => chunk,
            None if at < bytes.len() => {
                tail[..bytes.len() - at].copy_from_slice(&bytes[at..]);
                &tail
            }
            None => return Some(Nested { end: None, spaced }),
        };
        let (low, high) = (load::<0, 64>(chunk), load::<1, 64>(chunk));
        let inside = strings.inside(low, high)?;
        // A long text: its end is found sooner than its brackets are told from others.
        if inside == u64::MAX {
            let from = at + 64 + usize::from(std::mem::take(&mut strings.escape_carry));
            let Some(quote) = string_end(bytes, from) else {
                return Some(Nested { end: None, spaced });
            };
            strings.string_carry = 0;
            at = quote + 1;
            continue;
        }
        let space = if SPACED { white_space(low, high) & !inside } else { 0 };
        // With this bit set `[` is `{` and `]` is `}`, and nothing else is either.
        let bit = _mm256_set1_epi8(0x20);
        let (low, high) = (_mm256_or_si256(low, bit), _mm256_or_si256(high, bit));
        let opens = mask(equal(low, b'{'), equal(high, b'{')) & !inside;
        let mut closes = mask(equal(low, b'}'), equal(high, b'}')) & !inside;
        let closing = u64::from(closes.count_ones());
        if closing < depth {
            depth = depth + u64::from(opens.count_ones()) - closing;
            spaced |= space != 0;
        } else {
            let mut passed = 0;
            while closes != 0 {
                let before = (closes & closes.wrapping_neg()) - 1;
                passed += 1;
                if depth + u64::from((opens & before).count_ones()) == passed {
                    let end = at + closes.trailing_zeros() as usize + 1;
                    return Some(Nested { end: Some(end), spaced: spaced || space & before != 0 });
                }
                closes &= closes - 1;
            }
            depth = depth + u64::from(opens.count_ones()) - closing;
            spaced |= space != 0;
        }
        at += 64;
    }
}

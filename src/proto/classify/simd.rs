//! Vector code: the end of a string, the end of a nested value, a value without its white space, the beginning of a key, and the
//! hash of blocks; chosen at run time.
//!
//! This is the one module of `proto` that holds `unsafe`, in `x86`: loads of vectors, and calls of functions that need AVX2. Each
//! function has plain code beside it, which runs where AVX2 is missing.
//!
//! *Invariant*: vector and plain code give the same result for any input; tests compare them.
//! *Bound and cost*: O(bytes). With AVX2 about an eighth of an instruction per byte of a string without quotes, also where it
//! is part of a nested value, else one and a half per byte of that; a quarter per byte searched for keys, a fifth per byte hashed. No allocation.
//! *Errors*: none.
//! *Source*: Langdale, Lemire, "Parsing Gigabytes of JSON per Second" (VLDB Journal 28, 2019), for finding escaped quotes
//! and the inside of strings with bit masks; NH in [`super::prompt`].

use memchr::memchr;

use super::prompt::Keys;
use super::walk::string_end_plain;

/// Words of the key of a hashed chunk.
pub(super) type Key = [u32; 64];

/// What the processor can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto) enum Level {
    Plain,
    /// AVX2, BMI1, BMI2, POPCNT and PCLMULQDQ. Only [`Level::detect`] makes it, having looked.
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Proof),
}

impl Level {
    #[inline]
    pub fn detect() -> Level {
        #[cfg(target_arch = "x86_64")]
        if let Some(proof) = x86::Proof::look() {
            return Level::Avx2(proof);
        }
        Level::Plain
    }
}

/// How a nested value ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Nested {
    /// Behind the closing bracket. `None`: the text ends first.
    pub end: Option<usize>,
    /// White space stands between its tokens. Says nothing where the text ends first.
    pub spaced: bool,
}

/// Sixteen bits: which bytes of `chunk` are `byte`.
#[inline(always)]
pub(in crate::proto) fn equal_16(chunk: &[u8; 16], byte: u8) -> u32 {
    #[cfg(target_arch = "x86_64")]
    return x86::equal_16(chunk, byte);
    #[cfg(not(target_arch = "x86_64"))]
    return chunk.iter().enumerate().fold(0, |mask, (at, b)| mask | u32::from(*b == byte) << at);
}

/// What tells a few keys from nearly all other strings: the bytes one and six behind the opening quote.
#[derive(Clone, Copy, Debug)]
pub(in crate::proto) struct Marks {
    /// By the low half of the byte one behind the quote: a bit for each key that it may begin.
    one: [u8; 16],
    /// By the low half of the byte six behind it: the same.
    six: [u8; 16],
}

impl Marks {
    /// Of at most eight keys in ASCII, each with its opening quote, of at least seven bytes.
    pub(in crate::proto) const fn of(keys: &[&[u8]]) -> Marks {
        assert!(keys.len() <= 8);
        let (mut marks, mut at) = (Marks { one: [0; 16], six: [0; 16] }, 0);
        while at < keys.len() {
            marks.one[keys[at][1] as usize & 15] |= 1 << at;
            marks.six[keys[at][6] as usize & 15] |= 1 << at;
            at += 1;
        }
        marks
    }

    fn fit(&self, bytes: &[u8; 7]) -> bool {
        let look = |table: &[u8; 16], byte: u8| if byte < 0x80 { table[byte as usize & 15] } else { 0 };
        look(&self.one, bytes[1]) & look(&self.six, bytes[6]) != 0
    }
}

/// Where the first quote is, from `at` on, that `marks` fit: one of their keys may begin there.
#[inline]
pub(in crate::proto) fn marked_quote(level: Level, bytes: &[u8], at: usize, marks: &Marks) -> Option<usize> {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(proof) => proof.marked_quote(bytes, at, marks),
        Level::Plain => marked_quote_plain(bytes, at, marks),
    }
}

fn marked_quote_plain(bytes: &[u8], mut at: usize, marks: &Marks) -> Option<usize> {
    loop {
        at += memchr(b'"', bytes.get(at..)?)?;
        if marks.fit(bytes[at..].first_chunk()?) {
            return Some(at);
        }
        at += 1;
    }
}

/// Appends `bytes` to `out` without the white space outside its strings.
#[inline]
pub(super) fn compact(level: Level, bytes: &[u8], out: &mut Vec<u8>) {
    #[cfg(target_arch = "x86_64")]
    if let Level::Avx2(proof) = level {
        let start = out.len();
        if proof.compact(bytes, out) {
            return;
        }
        out.truncate(start);
    }
    let _ = level;
    compact_plain(bytes, out);
}

fn compact_plain(bytes: &[u8], out: &mut Vec<u8>) {
    let (mut run, mut at) = (0, 0);
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => at = string_end_plain(bytes, at + 1, at + 1).map_or(bytes.len(), |quote| quote + 1),
            b' ' | b'\n' | b'\r' | b'\t' => {
                out.extend_from_slice(&bytes[run..at]);
                at += 1;
                run = at;
            }
            _ => at += 1,
        }
    }
    out.extend_from_slice(&bytes[run..]);
}

/// Names each block of `block_bytes` of `bytes`, one to a chunk, behind a block of the identity `before`; `identities` has one place
/// for each. Answers the last identity.
#[inline]
pub(super) fn identities(
    keys: &Keys,
    bytes: &[u8],
    block_bytes: usize,
    before: u64,
    identities: &mut [u64],
) -> u64 {
    match keys.level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(proof) if block_bytes.is_multiple_of(32) => {
            proof.identities(keys, bytes, block_bytes, before, identities)
        }
        _ => {
            let mut identity = before;
            for (chunk, slot) in bytes.chunks_exact(block_bytes).zip(identities) {
                identity = keys.chain(identity, keys.join(0, nh_plain(&keys.words, chunk)));
                *slot = identity;
            }
            identity
        }
    }
}

/// NH of a chunk of whole 8-byte words, at most 256 bytes: words of 32 bits are added to the key's, multiplied in pairs
/// and summed.
#[inline]
pub(super) fn nh(level: Level, key: &Key, chunk: &[u8]) -> u64 {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(proof) if chunk.len().is_multiple_of(32) => proof.nh(key, chunk),
        _ => nh_plain(key, chunk),
    }
}

fn nh_plain(key: &Key, chunk: &[u8]) -> u64 {
    let mut sum = 0_u64;
    for (pair, key) in chunk.chunks_exact(8).zip(key.chunks_exact(2)) {
        let low = u32::from_le_bytes([pair[0], pair[1], pair[2], pair[3]]).wrapping_add(key[0]);
        let high = u32::from_le_bytes([pair[4], pair[5], pair[6], pair[7]]).wrapping_add(key[1]);
        sum = sum.wrapping_add(u64::from(low) * u64::from(high));
    }
    sum
}

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

//! Cuts the bytes of a prompt into blocks and names each by a 64-bit chained hash.
//!
//! A chunk of at most [`CHUNK_BYTES`] is hashed as NH does: 32-bit words are added to a secret key, multiplied in pairs and
//! summed. A block's content is the folded product of its chunks' sums, and its identity that of its content with the
//! identity before it.
//!
//! *Invariant*: the same bytes with the same key and seed give the same identities, however they are handed over and on
//! any processor.
//! *Bound and cost*: about a fifth of an instruction per byte with AVX2; only bytes of a block that lies in several pieces
//! are copied. Two different chunks of one length agree with a probability of at most 2^-32 for any one who does not know
//! the key; chains of unlike random blocks with about 2^-64.
//! *Errors*: none.
//! *Source*: Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC: Fast and Secure Message Authentication" (CRYPTO 1999), for
//! NH and its bound.

use super::super::simd::{self, Key, Level};

/// Bytes hashed with one key.
pub(super) const CHUNK_BYTES: usize = 256;
/// Up to so many bytes are copied as if they were as many.
const SHORT_BYTES: usize = 16;

/// Secret keys of the hash, derived from a seed.
#[derive(Clone, Debug)]
pub(in super::super) struct Keys {
    pub seed: u64,
    pub level: Level,
    pub words: Key,
    pub fold: [u64; 4],
}

impl Keys {
    pub fn new(seed: u64) -> Keys {
        let mut state = seed;
        // SplitMix64: every seed gives another stream, and no word of it shows the seed.
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = state;
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            word ^ (word >> 31)
        };
        let mut keys = Keys { seed, level: Level::detect(), words: [0; CHUNK_BYTES / 4], fold: [0; 4] };
        for pair in keys.words.chunks_exact_mut(2) {
            let word = next();
            pair[0] = word as u32;
            pair[1] = (word >> 32) as u32;
        }
        // Odd, so that no factor loses information to its own trailing zeros.
        keys.fold = std::array::from_fn(|_| next() | 1);
        keys
    }

    pub fn is_of(&self, seed: u64) -> bool {
        self.seed == seed
    }

    /// The name that `bytes` give to what `state` named before. `tag` keeps kinds of bytes apart.
    pub fn absorb(&self, state: u64, tag: u64, bytes: &[u8]) -> u64 {
        let mut state = fold(state ^ self.fold[0], self.fold[1] ^ tag);
        let mut chunks = bytes.chunks_exact(8);
        for word in &mut chunks {
            let word = u64::from_le_bytes(word.try_into().expect("a chunk of eight"));
            state = fold(state ^ word, self.fold[2]);
        }
        let mut last = [0; 8];
        last[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
        state = fold(state ^ u64::from_le_bytes(last), self.fold[2]);
        fold(state ^ bytes.len() as u64, self.fold[3])
    }

    /// A digest of `bytes`.
    pub fn digest(&self, bytes: &[u8]) -> u64 {
        let mut chunks = bytes.chunks_exact(CHUNK_BYTES);
        let mut state = bytes.len() as u64;
        for chunk in &mut chunks {
            state = self.content(state, chunk);
        }
        let mut last = [0; CHUNK_BYTES];
        last[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
        self.content(state, &last)
    }

    /// The content of a block from that of its chunks so far and the next chunk, which has whole 8-byte words.
    #[inline(always)]
    fn content(&self, so_far: u64, chunk: &[u8]) -> u64 {
        self.join(so_far, simd::nh(self.level, &self.words, chunk))
    }

    #[inline(always)]
    pub fn join(&self, so_far: u64, sum: u64) -> u64 {
        fold(so_far ^ sum ^ self.fold[0], self.fold[1])
    }

    /// The identity of a block from that before it and its own content.
    #[inline(always)]
    pub fn chain(&self, before: u64, content: u64) -> u64 {
        fold(before.rotate_left(23) ^ content ^ self.fold[2], self.fold[3])
    }
}

/// Both halves of the product.
#[inline(always)]
pub(super) fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Takes a prompt's bytes piece by piece and writes down each full block's identity.
pub(super) struct Cutter<'a> {
    keys: &'a Keys,
    identities: &'a mut [u64],
    /// Blocks written down.
    count: usize,
    block_bytes: usize,
    /// Bytes of the block that are hashed already, and their content.
    hashed: usize,
    content: u64,
    identity: u64,
    /// The chunk being put together, how much of it there is, and how much it takes.
    chunk: [u8; CHUNK_BYTES + SHORT_BYTES],
    filled: usize,
    chunk_bytes: usize,
    /// A block is one chunk of whole words.
    whole: bool,
}

impl<'a> Cutter<'a> {
    /// `identities` must have room for all blocks to come.
    pub fn new(keys: &'a Keys, block_bytes: usize, seed: u64, identities: &'a mut [u64]) -> Cutter<'a> {
        Cutter {
            keys,
            identities,
            count: 0,
            block_bytes,
            hashed: 0,
            content: 0,
            identity: seed,
            chunk: [0; CHUNK_BYTES + SHORT_BYTES],
            filled: 0,
            chunk_bytes: block_bytes.min(CHUNK_BYTES),
            whole: block_bytes <= CHUNK_BYTES && block_bytes.is_multiple_of(8),
        }
    }

    /// How many blocks there were.
    pub fn count(&self) -> usize {
        self.count
    }

    #[inline]
    pub fn push_byte(&mut self, byte: u8) {
        self.chunk[self.filled] = byte;
        self.filled += 1;
        if self.filled == self.chunk_bytes {
            self.take_chunk();
        }
    }

    /// Takes `all[start..start + len]`; what stands behind is not taken, but may be copied.
    #[inline]
    pub fn push_part(&mut self, all: &[u8], start: usize, len: usize) {
        if len <= SHORT_BYTES
            && self.filled + len < self.chunk_bytes
            && let Some(short) = all[start..].first_chunk::<SHORT_BYTES>()
            && let Some(place) = self.chunk[self.filled..].first_chunk_mut::<SHORT_BYTES>()
        {
            *place = *short;
            self.filled += len;
        } else {
            self.push(&all[start..start + len]);
        }
    }

    pub fn push(&mut self, mut bytes: &[u8]) {
        if self.filled > 0 {
            let missing = self.chunk_bytes - self.filled;
            let Some((some, rest)) = bytes.split_at_checked(missing) else {
                self.chunk[self.filled..][..bytes.len()].copy_from_slice(bytes);
                self.filled += bytes.len();
                return;
            };
            self.chunk[self.filled..][..missing].copy_from_slice(some);
            self.take_chunk();
            bytes = rest;
        }
        if self.whole {
            // The common case.
            let count = bytes.len() / self.block_bytes;
            if count > 0 {
                let (whole, rest) = bytes.split_at(count * self.block_bytes);
                let slots = &mut self.identities[self.count..];
                self.identity = simd::identities(self.keys, whole, self.block_bytes, self.identity, slots);
                self.count += count;
                bytes = rest;
            }
        }
        while let Some((chunk, rest)) = bytes.split_at_checked(self.chunk_bytes) {
            self.chunk[..chunk.len()].copy_from_slice(chunk);
            self.take_chunk();
            bytes = rest;
        }
        self.chunk[..bytes.len()].copy_from_slice(bytes);
        self.filled = bytes.len();
    }

    /// Hashes the chunk that is put together now; one of odd length with zeros behind it, all chunks of one place in a
    /// block being of one length.
    fn take_chunk(&mut self) {
        self.filled = 0;
        if self.whole {
            let sum = simd::nh(self.keys.level, &self.keys.words, &self.chunk[..self.block_bytes]);
            self.write_down(self.keys.join(0, sum));
            return;
        }
        let mut padded = self.chunk_bytes;
        if !padded.is_multiple_of(8) {
            padded = padded.next_multiple_of(8);
            self.chunk[self.chunk_bytes..padded].fill(0);
        }
        let sum = simd::nh(self.keys.level, &self.keys.words, &self.chunk[..padded]);
        self.content = self.keys.join(self.content, sum);
        self.hashed += self.chunk_bytes;
        if self.hashed == self.block_bytes {
            self.write_down(self.content);
            (self.hashed, self.content) = (0, 0);
        }
        self.chunk_bytes = (self.block_bytes - self.hashed).min(CHUNK_BYTES);
    }
    #[inline(always)]
    fn write_down(&mut self, content: u64) {
        self.identity = self.keys.chain(self.identity, content);
        self.identities[self.count] = self.identity;
        self.count += 1;
    }
}

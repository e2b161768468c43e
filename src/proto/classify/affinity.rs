//! Affinity ids: what keeps the requests of a conversation together under Stargate's affinity-aware algorithms in pools.
//!
//! A request names its conversation by `x-multi-turn-session-id`, else by its body's `prompt_cache_key`, `conversation` or `user`; one
//! that names none gets a new one. Its answer says in `x-multi-turn-session-id` what to send back. That value is the id itself in a
//! form of its own, `rw-` and 32 hex digits, and means the same id when it comes back; any other text means the first 128 bits of its
//! digest.
//!
//! *Invariant*: no text that a caller sent goes into an answer, only its digest. Ids of different kinds never meet: a cache key that
//! equals somebody's session id is another id. The same text is the same id on every router with the same digest secret.
//! *Bound and cost*: one digest of 256 bits, or one reading of 35 bytes; no allocation.
//! *Errors*: none; a value of another form is a text like any other.
//! *Source*: the Lifeboat rules, section 8.

use sha2::{Digest as _, Sha256};

use super::caller::push_hex;

/// The field that carries an id, lower-case.
pub const FIELD: &[u8] = b"x-multi-turn-session-id";
/// How values of our own begin.
const PREFIX: &[u8] = b"rw-";

/// One conversation's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AffinityId([u8; 16]);

impl AffinityId {
    pub(super) const fn new(bytes: [u8; 16]) -> AffinityId {
        AffinityId(bytes)
    }

    /// What algorithms hash.
    pub const fn key(&self) -> &[u8] {
        &self.0
    }

    /// Appends the value that means this id when it is sent back.
    pub fn push_value(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(PREFIX);
        let (high, low) = self.0.split_at(8);
        for half in [high, low] {
            push_hex(out, u64::from_be_bytes(half.try_into().expect("half of 16 bytes")));
        }
    }

    /// The id that [`AffinityId::push_value`] wrote; `None`: the text has another form.
    pub fn of_value(value: &[u8]) -> Option<AffinityId> {
        let digits = value.strip_prefix(PREFIX).filter(|digits| digits.len() == 32)?;
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
        }
        Some(AffinityId(bytes))
    }
}

/// Capitals are no digits here: one id has one value.
const fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

/// Makes ids for those that bring none.
#[derive(Clone, Debug)]
pub struct AffinityIds {
    seed: [u8; 16],
    shard: u8,
    next: u64,
}

impl AffinityIds {
    /// `seed` is the process's: nobody who does not know it can tell its next id.
    pub const fn new(seed: [u8; 16], shard: u8) -> AffinityIds {
        AffinityIds { seed, shard, next: 0 }
    }

    /// One that was never given before.
    pub fn generate(&mut self) -> AffinityId {
        let digest = Sha256::new()
            .chain_update(self.seed)
            .chain_update([self.shard])
            .chain_update(self.next.to_be_bytes())
            .finalize();
        self.next += 1;
        AffinityId(digest[..16].try_into().expect("digests have 32 bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(id: AffinityId) -> String {
        let mut out = Vec::new();
        id.push_value(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_value_means_its_id() {
        let id = AffinityId([0x00, 0x1f, 2, 3, 4, 5, 6, 7, 0x80, 9, 10, 11, 12, 13, 14, 0xff]);
        assert_eq!(value(id), "rw-001f02030405060780090a0b0c0d0eff");
        assert_eq!(AffinityId::of_value(value(id).as_bytes()), Some(id));
        for other in [
            "",
            "rw-",
            "rw-001f",
            "RW-001f02030405060780090a0b0c0d0eff",
            "rw-001F02030405060780090a0b0c0d0eff",
        ] {
            assert_eq!(AffinityId::of_value(other.as_bytes()), None, "{other}");
        }
        assert_eq!(AffinityId::of_value(b"rw-001f02030405060780090a0b0c0d0eff0"), None);
        assert_eq!(AffinityId::of_value(b"rw-g01f02030405060780090a0b0c0d0eff"), None);
    }

    #[test]
    fn generated_ids_differ_by_call_shard_and_process() {
        let mut seen = std::collections::HashSet::new();
        for (seed, shard) in [([1; 16], 0), ([1; 16], 1), ([2; 16], 0)] {
            let mut ids = AffinityIds::new(seed, shard);
            assert!((0..100).all(|_| seen.insert(ids.generate())));
        }
    }
}

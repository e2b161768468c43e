//! Which affinity keys are remembered, and under what number: the longest unused goes when there are too many.
//!
//! *Invariant*: numbers are below the limit; each remembered key has one, and no two the same.
//! *Bound and cost*: at most as many keys as the limit, each of at most [`AFFINITY_KEY_BYTES_MAX`] bytes. Constant time; once the limit
//! is reached nothing is allocated but, once in a while, the bytes of a key longer than its predecessor.
//! *Source*: the Stargate rules, sections 2.5 and 9.2 (S15).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use twox_hash::XxHash3_64;

use crate::limits::AFFINITY_KEY_BYTES_MAX;

/// Neither newer nor older.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Slot {
    hash: u64,
    key: Vec<u8>,
    newer: u32,
    older: u32,
}

/// See the module's text.
#[derive(Debug)]
pub struct Keys {
    limit: usize,
    slots: Vec<Slot>,
    /// By hash of the key. Of two keys with one hash the later pushes the earlier out.
    places: HashMap<u64, u32, BuildHasherDefault<Hashed>>,
    newest: u32,
    oldest: u32,
}

/// Passes on what is a hash already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write(&mut self, _: &[u8]) {
        unreachable!("only 64-bit hashes are keys here");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Keys {
    /// Remembers nothing yet. `limit` is at least 1.
    pub fn new(limit: usize) -> Keys {
        Keys {
            limit: limit.max(1),
            slots: Vec::new(),
            places: HashMap::default(),
            newest: NONE,
            oldest: NONE,
        }
    }

    pub const fn limit(&self) -> usize {
        self.limit
    }

    /// The number of a key, and whether it has just got it. What was kept under that number belongs to another key then. `None`: the key is
    /// too long to be remembered.
    pub fn number(&mut self, key: &[u8]) -> Option<(usize, bool)> {
        if key.len() > AFFINITY_KEY_BYTES_MAX {
            return None;
        }
        let hash = XxHash3_64::oneshot(key);
        Some(self.number_hashed(key, hash))
    }

    fn number_hashed(&mut self, key: &[u8], hash: u64) -> (usize, bool) {
        if let Some(place) = self.places.get(&hash).copied() {
            let slot = &mut self.slots[place as usize];
            let same = slot.key == key;
            if !same {
                slot.key.clear();
                slot.key.extend_from_slice(key);
            }
            if self.newest != place {
                self.unlink(place);
                self.link(place);
            }
            return (place as usize, !same);
        }
        let place = if self.slots.len() < self.limit {
            self.slots.push(Slot { hash, key: key.to_vec(), newer: NONE, older: NONE });
            self.slots.len() as u32 - 1
        } else {
            let place = self.oldest;
            self.unlink(place);
            let slot = &mut self.slots[place as usize];
            self.places.remove(&slot.hash);
            slot.hash = hash;
            slot.key.clear();
            slot.key.extend_from_slice(key);
            place
        };
        self.link(place);
        self.places.insert(hash, place);
        (place as usize, true)
    }

    fn unlink(&mut self, place: u32) {
        let Slot { newer, older, .. } = self.slots[place as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.slots[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.slots[older as usize].newer = newer,
        }
    }

    /// Makes it the one used last.
    fn link(&mut self, place: u32) {
        let slot = &mut self.slots[place as usize];
        slot.newer = NONE;
        slot.older = self.newest;
        match self.newest {
            NONE => self.oldest = place,
            newest => self.slots[newest as usize].newer = place,
        }
        self.newest = place;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_key_goes() {
        let mut keys = Keys::new(3);
        assert_eq!(keys.number(b"a"), Some((0, true)));
        assert_eq!(keys.number(b"b"), Some((1, true)));
        assert_eq!(keys.number(b""), Some((2, true)));
        assert_eq!(keys.number(b"a"), Some((0, false)));
        assert_eq!(keys.number(b"c"), Some((1, true)), "b was unused for longest");
        assert_eq!(keys.number(b""), Some((2, false)));
        assert_eq!(keys.number(b"b"), Some((0, true)));
        assert_eq!(keys.number(b"a"), Some((1, true)));
    }

    #[test]
    fn a_naive_list_agrees() {
        let mut keys = Keys::new(8);
        // Oldest first: a key and its number.
        let mut model: Vec<(u8, usize)> = Vec::new();
        let mut rng = crate::proto::stargate::random::Rng::new(3);
        for _ in 0..10_000 {
            let key = rng.below(12) as u8;
            let (number, fresh) = keys.number(&[key]).unwrap();
            let known = model.iter().position(|(k, _)| *k == key).map(|at| model.remove(at));
            let expected = match known {
                Some((_, number)) => (number, false),
                None if model.len() < 8 => (model.len(), true),
                None => (model.remove(0).1, true),
            };
            assert_eq!((number, fresh), expected);
            model.push((key, number));
        }
        assert_eq!((keys.slots.len(), keys.places.len()), (8, 8));
    }

    #[test]
    fn long_keys_have_no_number() {
        let mut keys = Keys::new(3);
        assert!(keys.number(&[b'k'; 256]).is_some());
        assert_eq!(keys.number(&[b'k'; 257]), None);
    }

    #[test]
    fn keys_with_one_hash_take_each_others_place() {
        let mut keys = Keys::new(3);
        assert_eq!(keys.number_hashed(b"a", 7), (0, true));
        assert_eq!(keys.number_hashed(b"b", 7), (0, true));
        assert_eq!(keys.number_hashed(b"b", 7), (0, false));
        assert_eq!(keys.number_hashed(b"a", 7), (0, true));
        assert_eq!(keys.places.len(), 1);
    }
}

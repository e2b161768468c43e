//! Sets of servers that hold a block, one word each: equal words mean equal sets.
//!
//! A domain's servers are numbered by small *slots*. A set of slots below 31 is its own bit mask, a single slot above is
//! written as such, and any other set is interned: kept once, however many blocks it belongs to. Blocks of one prompt mostly
//! have the same holders, so to add a server to the sets of a whole prompt, or to take it away, is found once and then
//! remembered for the next block.
//!
//! *Invariant*: an interned set has at least two members, one of them 31 or more, and as many references as there are
//! words that name it; a freed one is named by nobody.
//! *Bound and cost*: up to 31 servers nothing but bit operations. Beyond, O(1) per block while blocks have equal sets, else
//! O(servers / 64). At most `sets_max` interned sets of servers / 8 + 24 bytes: where one more is wanted, [`Holders::with`]
//! answers with the set as it was, so that a match is overlooked, which costs a guess.

/// Slots below it are bits.
const INLINE_SLOTS: u16 = 31;
/// A word with this bit is no mask: a single slot, or an interned set.
const OTHER: u32 = 1 << 31;
const INTERNED: u32 = 1 << 30;
const NONE: u32 = u32::MAX;

/// See the module's text. `Set(0)` is the empty set, and the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Set(u32);

impl Set {
    pub(super) const EMPTY: Set = Set(0);
    pub(super) const fn is_empty(self) -> bool {
        self.0 == 0
    }
    pub(super) const fn single(slot: u16) -> Set {
        if slot < INLINE_SLOTS { Set(1 << slot) } else { Set(OTHER | slot as u32) }
    }
    /// The mask, where the set is written as one.
    pub(super) const fn mask(self) -> Option<u32> {
        if self.0 & OTHER == 0 { Some(self.0) } else { None }
    }
    const fn interned(self) -> Option<usize> {
        if self.0 & (OTHER | INTERNED) == (OTHER | INTERNED) {
            Some((self.0 & !(OTHER | INTERNED)) as usize)
        } else {
            None
        }
    }
}

/// The last change that was looked up: `from`, with (or without) `slot`, is `to`.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    from: Set,
    slot: u16,
    to: Set,
}

/// What is kept of an interned set beside its words.
#[derive(Clone, Copy, Debug)]
struct Record {
    hash: u64,
    references: u32,
    /// Next of the same bucket, or of the free ones.
    next: u32,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Holders {
    /// Words per interned set.
    stride: usize,
    words: Vec<u64>,
    records: Vec<Record>,
    buckets: Vec<u32>,
    free: Option<u32>,
    live: usize,
    sets_max: usize,
    added: Step,
    removed: Step,
    scratch: Vec<u64>,
}

/// A fixed random word per slot; a set's hash is those of its members together, so it changes with one operation.
fn word_of(slot: u16) -> u64 {
    let z = (u64::from(slot) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 27)
}

impl Holders {
    /// Makes room for slots below `slots`, and for `sets_max` interned sets.
    pub(super) fn configure(&mut self, slots: usize, sets_max: usize) {
        self.sets_max = sets_max;
        let stride =
            if slots <= usize::from(INLINE_SLOTS) { 0 } else { slots.div_ceil(64).next_power_of_two() };
        if stride > self.stride {
            let mut words = vec![0; self.records.len() * stride];
            if self.stride > 0 {
                for (new, old) in words.chunks_exact_mut(stride).zip(self.words.chunks_exact(self.stride)) {
                    new[..old.len()].copy_from_slice(old);
                }
            }
            self.words = words;
            self.stride = stride;
            self.scratch = vec![0; stride];
        }
    }

    /// Bytes of one interned set with its part of the buckets, at most, for a domain of so many slots.
    pub(super) const fn set_bytes_max(slots: usize) -> usize {
        if slots <= INLINE_SLOTS as usize {
            return 0;
        }
        // Vectors grow by an eighth, see `grow`.
        (slots.div_ceil(64).next_power_of_two() * 8 + size_of::<Record>() + size_of::<u32>()) * 9 / 8 + 1
    }

    pub(super) fn bytes(&self) -> usize {
        (self.words.capacity() + self.scratch.capacity()) * 8
            + self.records.capacity() * size_of::<Record>()
            + self.buckets.capacity() * size_of::<u32>()
    }

    /// Words of the set, as many as the domain's slots need; 1 for a mask.
    pub(super) fn width(&self) -> usize {
        self.stride.max(1)
    }

    /// Word `at` of a set: members `64 × at` and the 63 after it.
    #[inline]
    pub(super) fn word(&self, set: Set, at: usize) -> u64 {
        if let Some(interned) = set.interned() {
            return self.words[interned * self.stride + at];
        }
        match set.mask() {
            Some(mask) => {
                if at == 0 {
                    u64::from(mask)
                } else {
                    0
                }
            }
            None => {
                let slot = (set.0 & 0xffff) as usize;
                if slot / 64 == at { 1 << (slot % 64) } else { 0 }
            }
        }
    }

    #[inline]
    pub(super) fn has(&self, set: Set, slot: u16) -> bool {
        match set.mask() {
            Some(mask) => slot < INLINE_SLOTS && mask >> slot & 1 == 1,
            None => {
                set == Set::single(slot) || self.word(set, usize::from(slot / 64)) >> (slot % 64) & 1 == 1
            }
        }
    }

    /// `set` and `slot`. Takes the caller's reference to `set` and gives one to the answer.
    #[inline]
    pub(super) fn with(&mut self, set: Set, slot: u16) -> Set {
        match set.mask() {
            Some(mask) if slot < INLINE_SLOTS => Set(mask | 1 << slot),
            Some(0) => Set::single(slot),
            _ => self.changed(set, slot, true),
        }
    }

    /// `set` without `slot`; the same for a set that lacks it. References as in [`Holders::with`].
    #[inline]
    pub(super) fn without(&mut self, set: Set, slot: u16) -> Set {
        match set.mask() {
            Some(mask) if slot < INLINE_SLOTS => Set(mask & !(1 << slot)),
            Some(_) => set,
            None if set == Set::single(slot) => Set(0),
            None => self.changed(set, slot, false),
        }
    }

    #[inline(never)]
    fn changed(&mut self, set: Set, slot: u16, add: bool) -> Set {
        let step = if add { self.added } else { self.removed };
        let to = if step.from == set && step.slot == slot && !set.is_empty() {
            if let Some(interned) = step.to.interned() {
                self.records[interned].references += 1;
            }
            step.to
        } else {
            let (at, bit) = (usize::from(slot / 64), 1 << (slot % 64));
            if (self.word(set, at) & bit != 0) == add {
                return set;
            }
            for word in 0..self.stride {
                self.scratch[word] = self.word(set, word);
            }
            self.scratch[at] ^= bit;
            let Some(to) = self.intern() else { return set };
            let step = Step { from: set, slot, to };
            match add {
                true => self.added = step,
                false => self.removed = step,
            }
            to
        };
        self.release(set);
        to
    }

    /// The set of the scratch words, with a reference to it; `None`: it would be one too many.
    fn intern(&mut self) -> Option<Set> {
        let mut members = 0;
        let mut hash = 0;
        let mut last = 0;
        for (at, word) in self.scratch.iter().enumerate() {
            let mut left = *word;
            members += left.count_ones();
            while left != 0 {
                last = (at * 64) as u16 + left.trailing_zeros() as u16;
                hash ^= word_of(last);
                left &= left - 1;
            }
        }
        if members == 0 || last < INLINE_SLOTS {
            return Some(Set(self.scratch[0] as u32));
        }
        if members == 1 {
            return Some(Set::single(last));
        }
        if !self.buckets.is_empty() {
            let mut at = self.buckets[self.bucket(hash)];
            while at != NONE {
                let record = &mut self.records[at as usize];
                let words = at as usize * self.stride;
                if record.hash == hash && self.words[words..words + self.stride] == self.scratch[..] {
                    record.references += 1;
                    return Some(Set(OTHER | INTERNED | at));
                }
                at = record.next;
            }
        }
        if self.live >= self.sets_max {
            return None;
        }
        let at = match self.free {
            Some(at) => {
                let next = self.records[at as usize].next;
                self.free = (next != NONE).then_some(next);
                at
            }
            None => self.grow(),
        };
        let bucket = self.bucket(hash);
        self.records[at as usize] = Record { hash, references: 1, next: self.buckets[bucket] };
        self.buckets[bucket] = at;
        let words = at as usize * self.stride;
        self.words[words..words + self.stride].copy_from_slice(&self.scratch);
        self.live += 1;
        Some(Set(OTHER | INTERNED | at))
    }

    fn bucket(&self, hash: u64) -> usize {
        super::reduce(hash, self.buckets.len())
    }

    /// One more record; from time to time room for an eighth more.
    fn grow(&mut self) -> u32 {
        let at = self.records.len();
        if at == self.records.capacity() {
            let more = (at / 8).max(8);
            self.records.reserve_exact(more);
            self.words.reserve_exact(more * self.stride);
            self.buckets = vec![NONE; at + more];
            // Nothing is free when this grows: every record is in a bucket.
            for i in 0..at {
                let bucket = self.bucket(self.records[i].hash);
                self.records[i].next = self.buckets[bucket];
                self.buckets[bucket] = i as u32;
            }
        }
        self.records.push(Record { hash: 0, references: 0, next: NONE });
        self.words.resize(self.records.len() * self.stride, 0);
        at as u32
    }

    fn release(&mut self, set: Set) {
        let Some(interned) = set.interned() else { return };
        let record = &mut self.records[interned];
        record.references -= 1;
        if record.references > 0 {
            return;
        }
        let (hash, next) = (record.hash, record.next);
        let bucket = self.bucket(hash);
        if self.buckets[bucket] == interned as u32 {
            self.buckets[bucket] = next;
        } else {
            let mut at = self.buckets[bucket] as usize;
            while self.records[at].next != interned as u32 {
                at = self.records[at].next as usize;
            }
            self.records[at].next = next;
        }
        self.records[interned].next = self.free.unwrap_or(NONE);
        self.free = Some(interned as u32);
        self.live -= 1;
        // The number may come to name another set.
        for step in [&mut self.added, &mut self.removed] {
            if step.from == set || step.to == set {
                *step = Step::default();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn members(holders: &Holders, set: Set) -> BTreeSet<u16> {
        (0..holders.width() as u16 * 64)
            .filter(|slot| holders.word(set, usize::from(slot / 64)) >> (slot % 64) & 1 == 1)
            .collect()
    }

    /// Random changes of many sets: each has the members it should, equal sets are equal words, and none is kept when all
    /// are empty.
    #[test]
    fn sets_are_what_was_put_in_them() {
        for slots in [31, 32, 64, 65, 200] {
            let mut holders = Holders::default();
            holders.configure(slots, 10_000);
            let mut sets = vec![(Set(0), BTreeSet::new()); 24];
            let mut state = 7_u64;
            for round in 0..1_500 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let slot = (state >> 33) as u16 % slots as u16;
                // Runs of neighbours, as the blocks of a prompt.
                let from = (state >> 50) as usize % sets.len();
                let to = (from + (state >> 58) as usize % 8).min(sets.len());
                for (set, wanted) in &mut sets[from..to] {
                    if round % 5 < 2 {
                        *set = holders.with(*set, slot);
                        wanted.insert(slot);
                    } else {
                        *set = holders.without(*set, slot);
                        wanted.remove(&slot);
                    }
                }
                for (set, wanted) in &sets {
                    assert_eq!(&members(&holders, *set), wanted);
                }
                for pair in sets.windows(2) {
                    assert_eq!(pair[0].0 == pair[1].0, pair[0].1 == pair[1].1);
                }
            }
            for (set, wanted) in &mut sets {
                for slot in std::mem::take(wanted) {
                    *set = holders.without(*set, slot);
                }
                assert!(set.is_empty());
            }
            assert_eq!(holders.live, 0);
        }
    }

    #[test]
    fn one_set_too_many_is_not_made() {
        let mut holders = Holders::default();
        holders.configure(100, 1);
        let a = holders.with(Set(0), 70);
        let a = holders.with(a, 71);
        let b = holders.with(Set(0), 70);
        assert_eq!(holders.with(b, 72), b, "there is room for one interned set");
        assert_eq!(holders.with(b, 71), a, "which is this one");
    }

    #[test]
    fn sets_outlive_a_growing_domain() {
        let mut holders = Holders::default();
        holders.configure(70, 100);
        let set = holders.with(Set(0), 3);
        let set = holders.with(set, 69);
        holders.configure(300, 100);
        let set = holders.with(set, 299);
        assert_eq!(members(&holders, set), BTreeSet::from([3, 69, 299]));
    }
}

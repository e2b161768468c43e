//! Which servers of a domain hold a block: one probe per block, however many servers there are.
//!
//! A chained hash table in 64 parts by the identity's top bits, so that growing stops the shard for a 64th of the table at a
//! time. Identities are random already and place themselves: their next bits, multiplied by the number of buckets, are the bucket.
//! Chains cost fewer instructions than open addressing here, as each new block pushes an old one out, and to take one out of an
//! open table moves others.
//!
//! *Invariant*: a block is in the table if and only if its set of holders is not empty.
//! *Bound and cost*: 20 bytes per block, parts grow by an eighth. A lookup takes one probe per block until no server is left,
//! and bit operations only where the holders change. Nothing is allocated but by growing.

use super::holders::{Holders, Set};
use super::{NONE, reduce};

const PARTS: usize = 64;
const PART_BITS: u32 = PARTS.trailing_zeros();
/// Entries by which a part grows at least.
const GROWTH_MIN: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Entry {
    identity: u64,
    holders: Set,
    /// Next of the same bucket, or of the free ones.
    next: u32,
}

/// Servers that hold just so many leading blocks of a prompt: the slots `64 × word` and the 63 after it, as a mask.
#[derive(Clone, Copy, Debug)]
pub(super) struct Level {
    pub(super) blocks: u32,
    word: u32,
    members: u64,
}

impl Level {
    /// The slots, lowest first.
    #[inline]
    pub(super) fn slots(self) -> impl Iterator<Item = u16> + Clone {
        let Level { word, mut members, .. } = self;
        std::iter::from_fn(move || {
            let bit = members.trailing_zeros();
            members &= members.wrapping_sub(1);
            (bit < 64).then(|| (word * 64 + bit) as u16)
        })
    }
}

/// As many buckets as there is room for entries.
#[derive(Debug)]
struct Part {
    buckets: Box<[u32]>,
    entries: Vec<Entry>,
    free: u32,
    taken: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Index {
    parts: Box<[Part; PARTS]>,
    holders: Holders,
    /// Servers still in the run, where they are not a mask.
    running: Vec<u64>,
}

impl Part {
    fn new() -> Self {
        Part { buckets: Box::default(), entries: Vec::new(), free: NONE, taken: 0 }
    }

    #[inline]
    fn bucket(&self, identity: u64) -> usize {
        reduce(identity << PART_BITS, self.buckets.len())
    }

    #[inline]
    fn holders(&self, identity: u64) -> Set {
        let Some(mut at) = self.buckets.get(self.bucket(identity)).copied() else { return Set::default() };
        // NONE is beyond every length, so the end of the chain needs no look of its own.
        while let Some(entry) = self.entries.get(at as usize) {
            if entry.identity == identity {
                return entry.holders;
            }
            at = entry.next;
        }
        Set::default()
    }

    /// Room for an eighth more.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        self.resize(self.buckets.len() + (self.buckets.len() / 8).max(GROWTH_MIN));
    }

    /// Room for `entries`, at least as many as are taken.
    fn resize(&mut self, entries: usize) {
        let old = std::mem::replace(&mut self.entries, Vec::with_capacity(entries));
        self.buckets = vec![NONE; entries].into_boxed_slice();
        self.free = NONE;
        for entry in old.into_iter().filter(|entry| !entry.holders.is_empty()) {
            let bucket = self.bucket(entry.identity);
            let next = self.buckets[bucket];
            self.buckets[bucket] = self.push(Entry { next, ..entry });
        }
    }

    #[cold]
    #[inline(never)]
    fn push(&mut self, entry: Entry) -> u32 {
        self.entries.push(entry);
        self.entries.len() as u32 - 1
    }
}

impl Index {
    pub(super) fn new() -> Self {
        Index {
            parts: Box::new(std::array::from_fn(|_| Part::new())),
            holders: Holders::default(),
            running: Vec::new(),
        }
    }

    /// Makes room for slots below `slots`, and for `sets_max` different sets of holders that are no mask.
    pub(super) fn configure(&mut self, slots: usize, sets_max: usize) {
        self.holders.configure(slots, sets_max);
        self.running.clear();
        self.running.reserve_exact(self.holders.width());
    }

    /// Bytes that an index of `blocks` takes at most, interned sets aside. Parts fill unevenly, and never give back what they
    /// once needed: six standard deviations are allowed for that.
    pub(super) fn bytes_max(blocks: usize) -> usize {
        if blocks == 0 {
            return 0;
        }
        let mean = blocks.div_ceil(PARTS);
        let fullest = (mean + 6 * mean.isqrt() + 6).min(blocks);
        let entries = fullest + fullest / 8 + GROWTH_MIN;
        PARTS * (size_of::<Part>() + entries * (size_of::<Entry>() + size_of::<u32>())) + size_of::<Index>()
    }

    pub(super) fn bytes(&self) -> usize {
        let parts = self.parts.iter().map(|part| {
            size_of::<Part>()
                + part.entries.capacity() * size_of::<Entry>()
                + part.buckets.len() * size_of::<u32>()
        });
        size_of::<Index>() + parts.sum::<usize>() + self.holders.bytes() + self.running.capacity() * 8
    }

    /// The server now holds the block.
    #[inline]
    pub(super) fn add(&mut self, identity: u64, slot: u16) {
        let part = &mut self.parts[(identity >> (64 - PART_BITS)) as usize];
        // Full, or has no buckets yet.
        if part.taken as usize == part.buckets.len() {
            part.grow();
        }
        let bucket = part.bucket(identity);
        let first = part.buckets[bucket];
        let mut at = first;
        while let Some(entry) = part.entries.get_mut(at as usize) {
            if entry.identity == identity {
                entry.holders = self.holders.with(entry.holders, slot);
                return;
            }
            at = entry.next;
        }
        let entry = Entry { identity, holders: Set::single(slot), next: first };
        let at = part.free;
        part.taken += 1;
        part.buckets[bucket] = match part.entries.get_mut(at as usize) {
            Some(free) => {
                part.free = free.next;
                *free = entry;
                at
            }
            None => part.push(entry),
        };
    }

    /// The server holds the block no more.
    #[inline]
    pub(super) fn remove(&mut self, identity: u64, slot: u16) {
        let part = &mut self.parts[(identity >> (64 - PART_BITS)) as usize];
        let bucket = part.bucket(identity);
        let Some(first) = part.buckets.get_mut(bucket) else { return };
        let mut before = NONE;
        let mut at = *first;
        while let Some(entry) = part.entries.get_mut(at as usize) {
            if entry.identity != identity {
                before = at;
                at = entry.next;
                continue;
            }
            entry.holders = self.holders.without(entry.holders, slot);
            if entry.holders.is_empty() {
                let next = std::mem::replace(&mut entry.next, part.free);
                part.free = at;
                part.taken -= 1;
                match part.entries.get_mut(before as usize) {
                    Some(before) => before.next = next,
                    None => *first = next,
                }
            }
            return;
        }
    }

    /// Gives back the room of parts that are less than a quarter full.
    pub(super) fn shrink(&mut self) {
        for part in self.parts.iter_mut() {
            let taken = part.taken as usize;
            if taken * 4 < part.buckets.len() {
                part.resize(taken + taken / 8);
            }
        }
    }

    /// Fills `levels` (emptied first) with the servers that hold the first block and how many leading blocks they hold: fewest
    /// blocks first, of equals the highest slots first.
    #[inline]
    pub(super) fn lookup(&mut self, blocks: &[u64], levels: &mut Vec<Level>) {
        levels.clear();
        let Some(first) = blocks.first() else { return };
        let mut holders = holders_of(&self.parts, *first);
        let Some(mask) = holders.mask() else {
            return self.lookup_wide(holders, blocks, levels);
        };
        let mut running = u64::from(mask);
        let mut at = 0;
        while running != 0 && at < blocks.len() {
            let same;
            (same, holders) = same_holders(&self.parts, &blocks[at..], holders);
            at += same;
            // Past the end nobody holds anything.
            let keep = running & self.holders.word(holders, 0);
            if keep != running {
                levels.push(Level { blocks: at as u32, word: 0, members: running & !keep });
            }
            running = keep;
        }
    }

    /// The same when the first block's holders are more than a mask.
    fn lookup_wide(&mut self, first: Set, blocks: &[u64], levels: &mut Vec<Level>) {
        let mut running = std::mem::take(&mut self.running);
        running.clear();
        running.extend((0..self.holders.width()).map(|word| self.holders.word(first, word)));
        let mut holders = first;
        let mut at = 0;
        while at < blocks.len() {
            let same;
            (same, holders) = same_holders(&self.parts, &blocks[at..], holders);
            at += same;
            let mut left = 0;
            for (word, running) in running.iter_mut().enumerate().rev() {
                let keep = *running & self.holders.word(holders, word);
                if keep != *running {
                    levels.push(Level { blocks: at as u32, word: word as u32, members: *running & !keep });
                }
                *running = keep;
                left |= keep;
            }
            if left == 0 {
                break;
            }
        }
        self.running = running;
    }
}

#[inline]
fn holders_of(parts: &[Part; PARTS], identity: u64) -> Set {
    parts[(identity >> (64 - PART_BITS)) as usize].holders(identity)
}

/// How many blocks have these holders, and those of the block after; the empty set at the end. Apart from its caller, as it is
/// most of a lookup: a dozen registers are few.
#[inline(never)]
fn same_holders(parts: &[Part; PARTS], blocks: &[u64], holders: Set) -> (usize, Set) {
    for (at, block) in blocks.iter().enumerate() {
        let next = holders_of(parts, *block);
        if next != holders {
            return (at, next);
        }
    }
    (blocks.len(), Set::default())
}

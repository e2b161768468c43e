//! Which servers of a domain hold a block: one probe per block, however many servers there are.
//!
//! An open-addressing table in 64 parts by the identity's top bits, so that growing stops the shard for a 64th of the table
//! at a time. Identities are random already and place themselves: their next bits, multiplied by the part's length, are the
//! home of a block, and what follows it is searched in line.
//!
//! *Invariant*: a block is in the table if and only if its set of holders is not empty, and every place between its home and
//! itself is taken.
//! *Bound and cost*: 16 bytes per place, at most 0.7 of the places taken, parts grow by a quarter. A lookup takes one probe per
//! block until no server is left, and bit operations only where the holders change. Nothing is allocated but by growing.
//! *Source*: linear probing with deletion by moving back, Knuth, volume 3, section 6.4, algorithm R.

use super::holders::{Holders, Set};
use super::reduce;

const PARTS: usize = 64;
const PART_BITS: u32 = PARTS.trailing_zeros();
const PLACES_MIN: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    identity: u64,
    /// Empty: the place is free.
    holders: Set,
}

#[derive(Debug, Default)]
struct Part {
    places: Box<[Place]>,
    taken: usize,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Index {
    parts: Box<[Part; PARTS]>,
    pub(super) holders: Holders,
    /// Servers still in the run, where they are not a mask.
    running: Vec<u64>,
}

fn home(identity: u64, places: usize) -> usize {
    reduce(identity << PART_BITS, places)
}

impl Part {
    /// Where the block is, or the free place where it would be; there is always one.
    #[inline]
    fn find(&self, identity: u64) -> usize {
        let mut at = home(identity, self.places.len());
        loop {
            let place = &self.places[at];
            if place.identity == identity || place.holders.is_empty() {
                return at;
            }
            at += 1;
            if at == self.places.len() {
                at = 0;
            }
        }
    }

    #[inline]
    fn holders(&self, identity: u64) -> Set {
        if self.places.is_empty() { Set(0) } else { self.places[self.find(identity)].holders }
    }

    fn resize(&mut self, places: usize) {
        let old = std::mem::replace(&mut self.places, vec![Place::default(); places].into_boxed_slice());
        for place in old.into_iter().filter(|place| !place.holders.is_empty()) {
            let at = self.find(place.identity);
            self.places[at] = place;
        }
    }

    /// Frees a place, and moves back what was pushed past it.
    fn free(&mut self, mut hole: usize) {
        let places = self.places.len();
        let mut at = hole;
        loop {
            at = if at + 1 == places { 0 } else { at + 1 };
            let place = self.places[at];
            if place.holders.is_empty() {
                break;
            }
            // It may not move before its home: how far it is from home, against how far the hole is behind it.
            let from_home = distance(home(place.identity, places), at, places);
            if from_home >= distance(hole, at, places) {
                self.places[hole] = place;
                hole = at;
            }
        }
        self.places[hole] = Place::default();
        self.taken -= 1;
    }
}

/// From `from` forward to `to`, round the end.
fn distance(from: usize, to: usize, places: usize) -> usize {
    if to >= from { to - from } else { to + places - from }
}

impl Index {
    pub(super) fn new() -> Self {
        Index {
            parts: Box::new(std::array::from_fn(|_| Part::default())),
            holders: Holders::default(),
            running: Vec::new(),
        }
    }

    /// Bytes that an index of `blocks` takes at most, interned sets aside. Parts fill unevenly, and never give back what they
    /// once needed: six standard deviations are allowed for that.
    pub(super) fn bytes_max(blocks: usize) -> usize {
        if blocks == 0 {
            return 0;
        }
        let mean = blocks.div_ceil(PARTS);
        let fullest = (mean + 6 * mean.isqrt() + 6).min(blocks);
        let places = (fullest * 10 / 7 + 1) * 5 / 4 + PLACES_MIN;
        PARTS * (size_of::<Part>() + places * size_of::<Place>()) + size_of::<Index>()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<Index>()
            + self
                .parts
                .iter()
                .map(|p| size_of::<Part>() + p.places.len() * size_of::<Place>())
                .sum::<usize>()
            + self.holders.bytes()
            + self.running.capacity() * 8
    }

    #[inline]
    fn part(&mut self, identity: u64) -> &mut Part {
        &mut self.parts[(identity >> (64 - PART_BITS)) as usize]
    }

    /// The server now holds the block.
    #[inline]
    pub(super) fn add(&mut self, identity: u64, slot: u16) {
        let part = &mut self.parts[(identity >> (64 - PART_BITS)) as usize];
        if (part.taken + 1) * 10 > part.places.len() * 7 {
            part.resize(PLACES_MIN.max(part.places.len() * 5 / 4 + 2));
        }
        let at = part.find(identity);
        let place = &mut part.places[at];
        part.taken += usize::from(place.holders.is_empty());
        *place = Place { identity, holders: self.holders.with(place.holders, slot) };
    }

    /// The server holds the block no more.
    #[inline]
    pub(super) fn remove(&mut self, identity: u64, slot: u16) {
        let part = &mut self.parts[(identity >> (64 - PART_BITS)) as usize];
        if part.places.is_empty() {
            return;
        }
        let at = part.find(identity);
        let place = &mut part.places[at];
        if place.holders.is_empty() {
            return;
        }
        place.holders = self.holders.without(place.holders, slot);
        if place.holders.is_empty() {
            part.free(at);
        }
    }

    /// Gives back the room of parts that are less than a quarter full.
    pub(super) fn shrink(&mut self) {
        for part in self.parts.iter_mut() {
            let fitting = if part.taken == 0 { 0 } else { PLACES_MIN.max(part.taken * 2) };
            if fitting * 2 < part.places.len() {
                match fitting {
                    0 => part.places = Box::default(),
                    places => part.resize(places),
                }
            }
        }
    }

    /// Calls `out` with every server that holds the first block and how many leading blocks it holds, shortest first, of
    /// equals the highest slot first.
    #[inline]
    pub(super) fn lookup(&mut self, blocks: &[u64], mut out: impl FnMut(u16, u32)) {
        let Some(first) = blocks.first() else { return };
        let mut last = self.part(*first).holders(*first);
        let Some(mask) = last.mask() else {
            return self.lookup_wide(last, blocks, out);
        };
        let mut running = mask;
        for (at, block) in blocks.iter().enumerate().skip(1) {
            let holders = self.part(*block).holders(*block);
            if holders != last {
                last = holders;
                let keep = running & self.holders.word(holders, 0);
                each(running & !keep, 0, at as u32, &mut out);
                running = keep;
                if running == 0 {
                    return;
                }
            }
        }
        each(running, 0, blocks.len() as u32, &mut out);
    }

    /// The same when the first block's holders are more than a mask.
    fn lookup_wide(&mut self, first: Set, blocks: &[u64], mut out: impl FnMut(u16, u32)) {
        let mut running = std::mem::take(&mut self.running);
        running.clear();
        running.extend((0..self.holders.width()).map(|word| self.holders.word(first, word)));
        let mut last = first;
        for (at, block) in blocks.iter().enumerate().skip(1) {
            let holders = self.part(*block).holders(*block);
            if holders != last {
                last = holders;
                let mut left = 0;
                for (word, running) in running.iter_mut().enumerate().rev() {
                    let keep = *running & self.holders.word(holders, word);
                    each(*running & !keep, word, at as u32, &mut out);
                    *running = keep;
                    left |= keep;
                }
                if left == 0 {
                    break;
                }
            }
        }
        for (word, running) in running.iter().enumerate().rev() {
            each(*running, word, blocks.len() as u32, &mut out);
        }
        self.running = running;
    }
}

/// The members of one word, the highest first.
#[inline]
fn each(mut members: u64, word: usize, blocks: u32, out: &mut impl FnMut(u16, u32)) {
    while members != 0 {
        let bit = 63 - members.leading_zeros();
        out((word * 64) as u16 + bit as u16, blocks);
        members ^= 1 << bit;
    }
}

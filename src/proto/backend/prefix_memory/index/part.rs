//! A part of the index: a table of cache lines, four blocks each.
//!
//! A block's home is one line. Where that is full the block is in one of the next, and each line that it passed by counts it; so a
//! search ends at the first line that nothing passed by. When a place becomes free in a line that something passed by, that is pulled
//! back into it: otherwise, as blocks come and go, ever more of them would be away from home.
//!
//! *Invariant*: each line counts the blocks that are behind it for want of room, and where there are any no place of it is free.
//! *Bound and cost*: 16 bytes per place, two thirds of them taken at most. O(1): mostly one line.

use crate::proto::backend::prefix_memory::holders::Set;
use crate::proto::backend::prefix_memory::prefetch::prefetch;
use crate::proto::backend::prefix_memory::server::CAPACITY_MAX;

use super::{PART_BITS, PARTS};

/// Entries by which a part grows at least.
const GROWTH_MIN: usize = 8;
/// Places of a line.
pub(super) const WAYS: usize = 4;
/// Bits of a node's number; those above count, in the line's first place.
const NODE_BITS: u32 = 25;
pub(super) const NODE_MASK: u32 = (1 << NODE_BITS) - 1;
/// No line is passed by more often. With random identities it is never more than a few times.
pub(super) const PASSED_MAX: u32 = u32::MAX >> NODE_BITS;
const _: () =
    assert!(CAPACITY_MAX / 16 * 17 + 64 < NODE_MASK, "every node has a number, and NONE one of its own");

#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Line {
    pub(super) identities: [u64; WAYS],
    /// Empty: the place is free, and its identity is none of this part's.
    pub(super) holders: [Set; WAYS],
    /// One holder's node of each block, or [`NONE`], in the lower bits.
    pub(super) nodes: [u32; WAYS],
}

/// A block's place in its part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) line: usize,
    pub(super) way: usize,
}

#[derive(Debug)]
pub(super) struct Part {
    pub(super) lines: Box<[Line]>,
    /// Entries that it has room for.
    pub(super) room: u32,
    pub(super) taken: u32,
    /// Entries that it will have at most, in all likelihood.
    pub(super) expected: u32,
    /// In free places: no block of this part.
    pub(super) nobody: u64,
}

/// Entries of the fullest part where there are so many blocks in all: six standard deviations above the mean.
pub(super) fn expected_in_part(blocks: usize) -> usize {
    let mean = blocks.div_ceil(PARTS);
    (mean + 6 * mean.isqrt() + 6).min(blocks)
}

/// Lines of a part with room for so many entries: fuller, searches and removals would take in more lines than they save.
pub(super) const fn lines_for(room: usize) -> usize {
    (room * 20).div_ceil(13 * WAYS)
}

impl Line {
    /// The way of a block that is in this line, else [`WAYS`]. No branch depends on which it is, as that cannot be foreseen.
    #[inline]
    pub(super) fn way_of(&self, identity: u64) -> usize {
        let mut found = WAYS;
        for way in 0..WAYS {
            found = if self.identities[way] == identity { way } else { found };
        }
        found
    }

    #[inline]
    pub(super) fn has(&self, identity: u64) -> bool {
        // One after the other: mostly it has none of them.
        let [a, b, c, d] = self.identities;
        a == identity || b == identity || c == identity || d == identity
    }

    /// A free way, else [`WAYS`].
    #[inline]
    pub(super) fn free_way(&self) -> usize {
        let mut free = 1_u32 << WAYS;
        for way in 0..WAYS {
            free |= u32::from(self.holders[way].is_empty()) << way;
        }
        free.trailing_zeros() as usize
    }

    #[inline]
    pub(super) fn fill(&mut self, way: usize, identity: u64, holders: Set, node: u32) {
        self.identities[way] = identity;
        self.holders[way] = holders;
        self.set_node(way, node);
    }

    /// How many blocks are behind this line for want of room.
    #[inline]
    pub(super) const fn passed(&self) -> u32 {
        self.nodes[0] >> NODE_BITS
    }

    #[inline]
    pub(super) const fn node(&self, way: usize) -> u32 {
        self.nodes[way] & NODE_MASK
    }

    #[inline]
    pub(super) const fn set_node(&mut self, way: usize, node: u32) {
        self.nodes[way] = self.nodes[way] & !NODE_MASK | node & NODE_MASK;
    }
}

impl Part {
    pub(super) fn new(number: usize) -> Self {
        Part {
            lines: Box::default(),
            room: 0,
            taken: 0,
            expected: 0,
            nobody: !((number as u64) << (64 - PART_BITS)),
        }
    }

    /// Asks for the line of a block that will be searched for.
    #[inline]
    pub(super) fn prefetch(&self, identity: u64) {
        prefetch(&self.lines, self.home(identity));
    }

    /// By the 32 bits after those of the part.
    #[inline]
    pub(super) fn home(&self, identity: u64) -> usize {
        ((((identity << PART_BITS) >> 32) * self.lines.len() as u64) >> 32) as usize
    }

    #[inline]
    pub(super) fn next(&self, line: usize) -> usize {
        if line + 1 < self.lines.len() { line + 1 } else { 0 }
    }

    #[inline]
    pub(super) fn find(&self, identity: u64) -> Option<Place> {
        let mut line = self.home(identity);
        loop {
            let of = self.lines.get(line)?;
            let way = of.way_of(identity);
            if way < WAYS {
                return Some(Place { line, way });
            }
            if of.passed() == 0 {
                return None;
            }
            line = self.next(line);
        }
    }

    /// Whether a block is not there, as it mostly is not.
    #[inline]
    pub(super) fn lacks(&self, identity: u64) -> bool {
        let Some(of) = self.lines.get(self.home(identity)) else { return true };
        !of.has(identity) && (of.passed() == 0 || self.find(identity).is_none())
    }

    #[inline]
    pub(super) fn holders(&self, identity: u64) -> Set {
        let Some(of) = self.lines.get(self.home(identity)) else { return Set::EMPTY };
        let way = of.way_of(identity);
        if way < WAYS {
            return of.holders[way];
        }
        if of.passed() == 0 { Set::EMPTY } else { self.holders_behind(identity) }
    }

    /// [`Part::holders`] where that takes more than one line.
    #[inline(never)]
    pub(super) fn holders_behind(&self, identity: u64) -> Set {
        self.find(identity).map_or(Set::EMPTY, |Place { line, way }| self.lines[line].holders[way])
    }

    /// Room for an eighth more, and from half of what is to be expected on for all of that.
    #[cold]
    #[inline(never)]
    pub(super) fn grow(&mut self) {
        let room = self.room as usize;
        let more = room + (room / 8).max(GROWTH_MIN);
        let expected = self.expected as usize;
        self.resize(if room < expected && more * 2 > expected { expected } else { more });
    }

    /// Room for `room` entries, at least as many as are taken.
    pub(super) fn resize(&mut self, mut room: usize) {
        let old = std::mem::take(&mut self.lines);
        let free = Line { identities: [self.nobody; WAYS], holders: [Set::EMPTY; WAYS], nodes: [0; WAYS] };
        loop {
            self.lines = vec![free; lines_for(room)].into_boxed_slice();
            self.room = room as u32;
            self.taken = 0;
            let places = old.iter().flat_map(|line| (0..WAYS).map(move |way| (line, way)));
            let mut taken = places.filter(|(line, way)| !line.holders[*way].is_empty());
            if taken.all(|(of, way)| self.put(of.identities[way], of.holders[way], of.node(way))) {
                return;
            }
            room += (room / 8).max(GROWTH_MIN);
        }
    }

    /// Puts in a block that is not there.
    #[inline]
    pub(super) fn insert(&mut self, identity: u64, holders: Set, node: u32) {
        if self.taken >= self.room {
            self.grow();
        }
        while !self.put(identity, holders, node) {
            self.grow();
        }
    }

    /// As [`Part::insert`], where there is room; false: it would be one block too many behind a line.
    #[inline]
    pub(super) fn put(&mut self, identity: u64, holders: Set, node: u32) -> bool {
        let home = self.home(identity);
        let mut line = home;
        loop {
            let of = &mut self.lines[line];
            let way = of.free_way();
            if way < WAYS {
                of.fill(way, identity, holders, node);
                self.taken += 1;
                return true;
            }
            if of.passed() == PASSED_MAX {
                self.unpass(home, line);
                return false;
            }
            of.nodes[0] += 1 << NODE_BITS;
            line = self.next(line);
        }
    }

    /// [`Part::insert`] for a block that is mostly not there; false: it is.
    #[inline]
    pub(super) fn insert_new(&mut self, identity: u64, holders: Set, node: u32) -> bool {
        let home = self.home(identity);
        if let Some(of) = self.lines.get_mut(home) {
            if of.has(identity) {
                return false;
            }
            if of.passed() == 0 {
                let way = of.free_way();
                if way < WAYS && self.taken < self.room {
                    of.identities[way] = identity;
                    of.holders[way] = holders;
                    // Nothing is counted beside it.
                    of.nodes[way] = node;
                    self.taken += 1;
                    return true;
                }
            }
        }
        self.insert_new_behind(identity, holders, node)
    }

    /// [`Part::insert_new`] where that takes more than one line.
    #[inline(never)]
    pub(super) fn insert_new_behind(&mut self, identity: u64, holders: Set, node: u32) -> bool {
        let new = self.find(identity).is_none();
        if new {
            self.insert(identity, holders, node);
        }
        new
    }

    /// One block less is behind the lines from `line` to the one before `end`.
    #[inline]
    pub(super) fn unpass(&mut self, mut line: usize, end: usize) {
        while line != end {
            self.lines[line].nodes[0] -= 1 << NODE_BITS;
            line = self.next(line);
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, identity: u64, Place { line, way }: Place) {
        self.taken -= 1;
        let of = &mut self.lines[line];
        of.identities[way] = self.nobody;
        of.holders[way] = Set::EMPTY;
        let passed = of.passed() > 0;
        let home = self.home(identity);
        if home != line {
            self.unpass(home, line);
        }
        if passed {
            self.pull(Place { line, way });
        }
    }

    /// Fills a free place of a line with one of the blocks behind it, and the place of that one in turn.
    #[inline(never)]
    pub(super) fn pull(&mut self, mut free: Place) {
        while self.lines[free.line].passed() > 0 {
            let mut line = self.next(free.line);
            let way = loop {
                let apart = self.apart(free.line, line);
                let of = &self.lines[line];
                let passed_by = |way: &usize| {
                    let identity = of.identities[*way];
                    identity != self.nobody && self.apart(self.home(identity), line) >= apart
                };
                match (0..WAYS).find(passed_by) {
                    Some(way) => break way,
                    None => line = self.next(line),
                }
            };
            let of = self.lines[line];
            let to = &mut self.lines[free.line];
            to.fill(free.way, of.identities[way], of.holders[way], of.node(way));
            self.lines[line].identities[way] = self.nobody;
            self.lines[line].holders[way] = Set::EMPTY;
            self.unpass(free.line, line);
            free = Place { line, way };
        }
    }

    /// Lines from one to another.
    #[inline]
    pub(super) fn apart(&self, from: usize, to: usize) -> usize {
        if from <= to { to - from } else { to + self.lines.len() - from }
    }
}

#[cfg(test)]
mod tests;

//! Which servers of a domain hold a block: one probe per block, however many servers there are. For one of them, mostly the only
//! one, it also tells the node, so that a block which one server holds is in no other table.
//!
//! A memory is far larger than a processor's caches, and waiting for it is most of the cost. So this is a table of cache lines of four
//! blocks each (see [`part`]), and what is searched for soon is asked for ahead. Identities are random already and place themselves: their
//! top bits are the number of one of 64 parts, so that growing stops the shard for a 64th of the table at a time, and the next bits,
//! multiplied by the number of its lines, are a line of it.
//!
//! *Invariant*: a block is in the table if and only if its set of holders is not empty.
//! *Bound and cost*: 16 bytes per place, two thirds of them taken at most; parts grow by an eighth, and from half of what they
//! are expected to hold on to all of that: six standard deviations more than the mean. A lookup takes one probe per block until no
//! server is left, and bit operations only where the holders change. Nothing is allocated but by growing.

mod part;

use super::NONE;
use super::holders::{Holders, Set};
use part::{Line, NODE_MASK, Part, Place, expected_in_part, lines_for};

const PARTS: usize = 64;
const PART_BITS: u32 = PARTS.trailing_zeros();
/// Blocks by which a search is asked for ahead.
pub(super) const AHEAD: usize = 8;

/// What became of a node that was put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    /// The index tells it.
    Told,
    /// The index tells another server's.
    Apart,
    /// The server was among the holders before: nothing was changed.
    Known,
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

/// See the module's text.
#[derive(Debug)]
pub(super) struct Index {
    parts: Box<[Part; PARTS]>,
    holders: Holders,
    /// Nodes of servers that could not be put among the holders.
    overlooked: usize,
    /// Servers still in the run, where they are not a mask.
    running: Vec<u64>,
}

/// The part of a block.
#[inline]
const fn part_of(identity: u64) -> usize {
    (identity >> (64 - PART_BITS)) as usize
}

impl Index {
    pub(super) fn new() -> Self {
        Index {
            parts: Box::new(std::array::from_fn(Part::new)),
            holders: Holders::default(),
            overlooked: 0,
            running: Vec::new(),
        }
    }

    /// Makes room for slots below `slots`, and for `sets_max` different sets of holders that are no mask; at most `blocks` blocks will be
    /// held. Gives back room beyond that, and that of parts that are less than a quarter full.
    pub(super) fn configure(&mut self, slots: usize, sets_max: usize, blocks: usize) {
        for part in self.parts.iter_mut() {
            part.expected = expected_in_part(blocks) as u32;
        }
        self.shrink();
        self.holders.configure(slots, sets_max);
        self.running.clear();
        self.running.reserve_exact(self.holders.width());
    }

    /// Bytes that an index of `blocks` takes at most, interned sets aside.
    pub(super) fn bytes_max(blocks: usize) -> usize {
        if blocks == 0 {
            return 0;
        }
        let lines = lines_for(expected_in_part(blocks));
        PARTS * (size_of::<Part>() + lines * size_of::<Line>()) + size_of::<Index>()
    }

    pub(super) fn bytes(&self) -> usize {
        let parts = self.parts.iter().map(|part| size_of::<Part>() + size_of_val(&*part.lines));
        size_of::<Index>() + parts.sum::<usize>() + self.holders.bytes() + self.running.capacity() * 8
    }

    /// Asks for the line of a block that will be searched for.
    #[inline]
    pub(super) fn prefetch(&self, identity: u64) {
        self.parts[part_of(identity)].prefetch(identity);
    }

    /// The node told of a block that this server may hold: its own or another server's, or none. `None`: it does not hold it.
    #[inline]
    pub(super) fn find(&self, identity: u64, slot: u16) -> Option<u32> {
        let part = &self.parts[part_of(identity)];
        if let Some(Place { line, way }) = part.find(identity)
            && self.holders.has(part.lines[line].holders[way], slot)
        {
            return Some(part.lines[line].node(way));
        }
        (self.overlooked > 0).then_some(NONE)
    }

    /// How many of the last blocks certainly nobody holds. Apart from its caller, as [`same_holders`].
    #[inline(never)]
    pub(super) fn absent_at_end(&self, blocks: &[u64]) -> usize {
        if self.overlooked > 0 {
            return 0;
        }
        let mut absent = 0;
        for (left, block) in blocks.iter().enumerate().rev() {
            if let Some(ahead) = left.checked_sub(AHEAD) {
                self.prefetch(blocks[ahead]);
            }
            if !self.parts[part_of(*block)].lacks(*block) {
                break;
            }
            absent += 1;
        }
        absent
    }

    /// The server now holds the block, in that node.
    #[inline]
    pub(super) fn add(&mut self, identity: u64, slot: u16, node: u32) -> Added {
        let part = &mut self.parts[part_of(identity)];
        if let Some(place) = part.find(identity) {
            return self.share(part_of(identity), place, slot, node);
        }
        part.insert(identity, Set::single(slot), node);
        Added::Told
    }

    /// [`Index::add`] for a block that mostly nobody holds; false: somebody does, or may, and nothing was changed.
    #[inline]
    pub(super) fn add_new(&mut self, identity: u64, slot: u16, node: u32) -> bool {
        self.overlooked == 0 && self.parts[part_of(identity)].insert_new(identity, Set::single(slot), node)
    }

    /// Adds a server to the holders of a block that others hold.
    #[inline(never)]
    fn share(&mut self, part: usize, Place { line, way }: Place, slot: u16, node: u32) -> Added {
        let line = &mut self.parts[part].lines[line];
        let holders = &mut line.holders[way];
        if self.holders.has(*holders, slot) {
            return Added::Known;
        }
        *holders = self.holders.with(*holders, slot);
        if !self.holders.has(*holders, slot) {
            self.overlooked += 1;
            return Added::Apart;
        }
        if line.node(way) != NONE & NODE_MASK {
            return Added::Apart;
        }
        line.set_node(way, node);
        Added::Told
    }

    /// Tells this node of a block from now on, where `instead` was told; false: something else is.
    pub(super) fn tell(&mut self, identity: u64, node: u32, instead: u32) -> bool {
        let part = &mut self.parts[part_of(identity)];
        let Some(Place { line, way }) = part.find(identity) else { return false };
        let line = &mut part.lines[line];
        let told = line.node(way) == instead & NODE_MASK;
        if told {
            line.set_node(way, node);
        }
        told
    }

    /// [`Index::remove`] for many blocks, whose nodes were told.
    #[inline(never)]
    pub(super) fn remove_told(&mut self, identities: &[u64], slot: u16) {
        let alone = Set::single(slot);
        for identity in identities {
            let part = &mut self.parts[part_of(*identity)];
            match part.find(*identity) {
                Some(place) if part.lines[place.line].holders[place.way] == alone => {
                    part.remove(*identity, place)
                }
                _ => self.remove(*identity, slot, true),
            }
        }
    }

    /// The server holds the block no more; `told`: it was its node that was told.
    #[inline]
    pub(super) fn remove(&mut self, identity: u64, slot: u16, told: bool) {
        let part = &mut self.parts[part_of(identity)];
        if let Some(place) = part.find(identity) {
            let Place { line, way } = place;
            let of = &mut part.lines[line];
            if of.holders[way] == Set::single(slot) {
                part.remove(identity, place);
                return;
            }
            if self.holders.has(of.holders[way], slot) {
                of.holders[way] = self.holders.without(of.holders[way], slot);
                if of.holders[way].is_empty() {
                    part.remove(identity, place);
                } else if told {
                    of.set_node(way, NONE);
                }
                return;
            }
        }
        self.overlooked = self.overlooked.saturating_sub(1);
    }

    /// Gives back the room of parts that are less than a quarter full, or larger than is to be expected.
    pub(super) fn shrink(&mut self) {
        for part in self.parts.iter_mut() {
            let (taken, expected) = (part.taken as usize, part.expected as usize);
            if taken * 4 < part.room as usize {
                part.resize((taken + taken / 8).min(expected.max(taken)));
            } else if part.room as usize > expected.max(taken) {
                part.resize(expected.max(taken));
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
    parts[part_of(identity)].holders(identity)
}

/// How many blocks have these holders, and those of the block after; the empty set at the end. Apart from its caller, as it is
/// most of a lookup: a dozen registers are few.
#[inline(never)]
fn same_holders(parts: &[Part; PARTS], blocks: &[u64], holders: Set) -> (usize, Set) {
    for (at, block) in blocks.iter().enumerate() {
        if let Some(ahead) = blocks.get(at + 2 * AHEAD) {
            parts[part_of(*ahead)].prefetch(*ahead);
        }
        let next = holders_of(parts, *block);
        if next != holders {
            return (at, next);
        }
    }
    (blocks.len(), Set::EMPTY)
}

#[cfg(test)]
mod tests;

//! Who of a group's live servers has room, and how busy they are in all: kept in step with each change, so that a decision
//! does not look at everyone.
//!
//! *Invariant*: `count` and the sums are those of the servers with room; nobody else is ranked.
//! *Bound and cost*: 8 bytes per slot and the tree's; a changed figure O(log servers); [`Roster::loads`] O(distinct weights).

use super::kv_aware::Loads;
use super::tournament::{Key, Tournament};

/// One server, by slot.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    in_flight: u32,
    room: bool,
}

/// What the servers of one weight that have room add up to.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    count: u32,
    in_flight: u64,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Roster {
    entries: Vec<Entry>,
    /// By requests in flight.
    ranks: Tournament<u32>,
    /// By weight, as in `ranks`.
    sums: Vec<Sum>,
    count: usize,
    /// Sum of the weights of those with room.
    weights: u64,
}

impl Roster {
    pub fn new(slots: usize) -> Self {
        Roster {
            entries: vec![Entry::default(); slots],
            ranks: Tournament::new(slots),
            sums: Vec::new(),
            count: 0,
            weights: 0,
        }
    }

    /// Who is live from now on: weights by slot, 0 for those that are not. All of them are idle and have room until [`Roster::set`]
    /// says otherwise.
    pub fn set_weights(&mut self, weights: &[u64]) {
        self.ranks.set_weights(weights);
        self.ranks.set_all(|_| 0);
        self.sums.clear();
        self.sums.resize(self.ranks.weights(), Sum::default());
        (self.count, self.weights) = (0, 0);
        for ((slot, entry), weight) in (0..).zip(&mut self.entries).zip(weights) {
            *entry = Entry { in_flight: 0, room: *weight > 0 };
            if *weight > 0 {
                self.sums[self.ranks.weight_index(slot)].count += 1;
                self.count += 1;
                self.weights += weight;
            }
        }
    }

    /// How many have room.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    #[inline]
    pub fn has_room(&self, slot: u16) -> bool {
        self.entries[usize::from(slot)].room
    }

    /// What is on record of a live server: its requests in flight, and whether it has room.
    pub fn entry(&self, slot: u16) -> (u32, bool) {
        let entry = self.entries[usize::from(slot)];
        (entry.in_flight, entry.room)
    }

    /// A live server has that many requests in flight, and room or none. True: as to room that is new.
    #[inline]
    pub fn set(&mut self, slot: u16, weight: u64, in_flight: u32, room: bool) -> bool {
        let entry = &mut self.entries[usize::from(slot)];
        let old = std::mem::replace(entry, Entry { in_flight, room });
        if old.in_flight == in_flight && old.room == room {
            return false;
        }
        let sum = &mut self.sums[self.ranks.weight_index(slot)];
        if old.room {
            sum.in_flight -= u64::from(old.in_flight);
        }
        if room {
            sum.in_flight += u64::from(in_flight);
        }
        if old.room || room {
            self.ranks.set(slot, if room { in_flight } else { u32::LAST });
        }
        if old.room == room {
            return false;
        }
        if room {
            sum.count += 1;
            self.count += 1;
            self.weights += weight;
        } else {
            sum.count -= 1;
            self.count -= 1;
            self.weights -= weight;
        }
        true
    }

    /// The loads of those with room. `None`: nobody has.
    #[inline]
    pub fn loads(&self) -> Option<Loads> {
        if self.count == 0 {
            return None;
        }
        let count = self.count as f64;
        let weight_mean = self.weights as f64 / count;
        let (mut least, mut sum) = (f64::INFINITY, 0.0);
        for (index, of) in self.sums.iter().enumerate().filter(|(_, of)| of.count > 0) {
            let first = self.ranks.least(index);
            let load = |in_flight: f64| in_flight * weight_mean / first.weight as f64;
            least = load(first.key.into()).min(least);
            sum += load(of.in_flight as f64);
        }
        Some(Loads { count: self.count, weight_mean, least, mean: sum / count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_those_of_a_pass_over_all_with_room() {
        let mut random = 3_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for kinds in [1, 2, 5] {
            let weights: Vec<u64> = (0..40).map(|i| i % 10 * 500_000 * (1 + i % kinds)).collect();
            let mut roster = Roster::new(40);
            roster.set_weights(&weights);
            let mut state: Vec<(u32, bool)> = weights.iter().map(|weight| (0, *weight > 0)).collect();
            for _ in 0..5_000 {
                let slot = next(40) as usize;
                if weights[slot] == 0 {
                    continue;
                }
                let (in_flight, room) = (next(30) as u32, next(3) > 0);
                let news = roster.set(slot as u16, weights[slot], in_flight, room);
                assert_eq!(news, state[slot].1 != room);
                state[slot] = (in_flight, room);
                assert_eq!(roster.entry(slot as u16), state[slot]);
                let with_room = (0..40).filter(|slot| state[*slot].1);
                let naive = Loads::of(with_room.map(|slot| (weights[slot], state[slot].0)));
                let (Some(naive), Some(loads)) = (naive, roster.loads()) else {
                    assert_eq!((naive, roster.count()), (None, 0));
                    continue;
                };
                assert_eq!((loads.count, roster.count()), (naive.count, naive.count));
                let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * (1.0 + b.abs());
                assert_eq!((loads.least, loads.weight_mean), (naive.least, naive.weight_mean));
                assert!(close(loads.mean, naive.mean), "{loads:?} {naive:?}");
            }
        }
    }
}

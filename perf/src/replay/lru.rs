//! A cache of blocks that forgets the least recently used: what an engine holds, and what a router remembers of one.
//!
//! A prompt is touched from its tail to its head, so that of two blocks of one prompt the one nearer the tail goes first: a
//! head outlives its tails, and no block is ever held behind a missing one.
//!
//! *Invariant*: at most `capacity` blocks; blocks held of any prompt are a leading run of it, if all prompts are chained and none is
//! forgotten by name.
//! *Bound and cost*: eight bytes per distinct block of the trace; a touch is O(blocks of the prompt), without allocation.

/// No neighbour: the block is not held.
const NONE: u32 = u32::MAX;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Lru {
    capacity: usize,
    len: usize,
    /// Towards the most recent, towards the least recent. The last entry is the ring's anchor.
    links: Vec<[u32; 2]>,
}

impl Lru {
    /// For blocks numbered below `distinct_blocks`.
    pub fn new(capacity: usize, distinct_blocks: usize) -> Lru {
        let anchor = distinct_blocks as u32;
        let mut links = vec![[NONE; 2]; distinct_blocks + 1];
        links[distinct_blocks] = [anchor; 2];
        Lru { capacity, len: 0, links }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.len
    }

    pub fn holds(&self, block: u32) -> bool {
        self.links[block as usize][0] != NONE
    }

    /// Length of the leading run of `blocks` that is held.
    pub fn matched(&self, blocks: &[u32]) -> usize {
        blocks.iter().take_while(|&&block| self.holds(block)).count()
    }

    /// All of `blocks` are used now, the head last; then the oldest go until the rest fits.
    pub fn touch(&mut self, blocks: &[u32]) {
        self.touch_without_eviction(blocks);
        self.evict();
    }

    /// As [`Lru::touch`], for caches that are swept now and then.
    pub fn touch_without_eviction(&mut self, blocks: &[u32]) {
        let anchor = self.anchor();
        for &block in blocks.iter().rev() {
            if self.holds(block) {
                self.remove(block);
            }
            let newest = self.links[anchor as usize][1];
            self.links[block as usize] = [anchor, newest];
            self.links[newest as usize][0] = block;
            self.links[anchor as usize][1] = block;
            self.len += 1;
        }
    }

    /// The oldest go until the rest fits.
    pub fn evict(&mut self) {
        while self.len > self.capacity {
            self.remove(self.links[self.anchor() as usize][0]);
        }
    }

    /// Those of `blocks` that are held go at once. What stands behind them stays, and is out of reach until they are back.
    pub fn forget(&mut self, blocks: &[u32]) {
        for &block in blocks {
            if self.holds(block) {
                self.remove(block);
            }
        }
    }

    fn anchor(&self) -> u32 {
        (self.links.len() - 1) as u32
    }

    fn remove(&mut self, block: u32) {
        let [newer, older] = self.links[block as usize];
        self.links[newer as usize][1] = older;
        self.links[older as usize][0] = newer;
        self.links[block as usize] = [NONE; 2];
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::rng::Rng;

    #[test]
    fn tails_go_before_heads() {
        let mut lru = Lru::new(4, 10);
        lru.touch(&[0, 1, 2]);
        assert_eq!(lru.matched(&[0, 1, 2, 3]), 3);
        lru.touch(&[0, 4, 5]);
        // 2, the tail of the older prompt, is gone; 1 is the next to go.
        assert_eq!((lru.len(), lru.matched(&[0, 1, 2]), lru.matched(&[0, 4, 5])), (4, 2, 3));
        lru.touch(&[6]);
        assert_eq!((lru.matched(&[0, 1]), lru.matched(&[0, 4, 5])), (1, 3));
    }

    #[test]
    fn what_is_forgotten_by_name_makes_room() {
        let mut lru = Lru::new(4, 10);
        lru.touch(&[0, 1, 2]);
        lru.forget(&[1, 2, 9]);
        assert_eq!((lru.len(), lru.matched(&[0, 1, 2])), (1, 1));
        lru.touch(&[5, 6, 7]);
        assert_eq!((lru.matched(&[0]), lru.matched(&[5, 6, 7])), (1, 3));
        lru.touch(&[0, 1]);
        assert_eq!((lru.matched(&[0, 1]), lru.matched(&[5, 6, 7])), (2, 2));
    }

    #[test]
    fn a_prompt_longer_than_the_cache_leaves_its_head() {
        let mut lru = Lru::new(2, 10);
        lru.touch(&[0, 1, 2, 3]);
        assert_eq!((lru.len(), lru.matched(&[0, 1, 2, 3])), (2, 2));
        let mut none = Lru::new(0, 10);
        none.touch(&[0, 1]);
        assert_eq!((none.len(), none.matched(&[0, 1])), (0, 0));
    }

    /// Blocks in order of last use, newest first; every step spelt out.
    fn naive(list: &mut Vec<u32>, capacity: usize, blocks: &[u32]) {
        for block in blocks.iter().rev() {
            list.retain(|held| held != block);
            list.insert(0, *block);
        }
        list.truncate(capacity);
    }

    #[test]
    fn as_the_naive_list_does() {
        for seed in 0..20 {
            let mut rng = Rng::new(seed);
            let capacity = rng.below(30) as usize;
            let (mut lru, mut list) = (Lru::new(capacity, 64), Vec::new());
            for step in 0..400 {
                // Chained: the parent of block b is b / 2.
                let mut blocks = vec![rng.below(64) as u32];
                while blocks[blocks.len() - 1] > 1 {
                    blocks.push(blocks[blocks.len() - 1] / 2);
                }
                blocks.reverse();
                let matched = blocks.iter().take_while(|block| list.contains(*block)).count();
                assert_eq!(lru.matched(&blocks), matched, "seed {seed}, step {step}");
                lru.touch(&blocks);
                naive(&mut list, capacity, &blocks);
                let held = (0..64).filter(|&block| lru.holds(block)).count();
                assert_eq!((lru.len(), held), (list.len(), list.len()), "seed {seed}, step {step}");
                assert!(list.iter().all(|&block| lru.holds(block)), "seed {seed}, step {step}");
                for &block in &list {
                    assert!(block <= 1 || list.contains(&(block / 2)), "no block behind a missing one");
                }
            }
        }
    }
}

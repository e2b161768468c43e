//! Who is least of many: a tournament tree for every distinct weight of a group.
//!
//! Servers of one weight stay in the same order while only what all of them share moves on (steps of the wheel, the mean
//! weight), so that one key per server and a tree per weight answer "who is next" and "who is least busy" without a look at all.
//!
//! *Invariant*: every inner node is the lesser of its two children, of equals the left one, which stands for the lower slot.
//! *Bound and cost*: two nodes (8 or 16 bytes each) per server, and per weight up to as many again; a changed key O(log servers of
//! that weight), less where it changes nobody's rank; the least of each weight O(1). New weights: O(servers × distinct weights),
//! off the request path. No allocation but for new weights.

/// What servers are ranked by; the least wins.
pub trait Key: Copy + Ord {
    /// Of a server that is not ranked at present: more than any other.
    const LAST: Self;
}

impl Key for u32 {
    const LAST: u32 = u32::MAX;
}

impl Key for i64 {
    const LAST: i64 = i64::MAX;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node<K> {
    key: K,
    leaf: u16,
}

/// The servers of one weight.
#[derive(Clone, Debug)]
struct Tree<K> {
    weight: u64,
    /// By leaf, ascending.
    slots: Vec<u16>,
    /// The root is 1, the children of `i` are `2 × i` and the one behind it, the leaves are the second half.
    nodes: Vec<Node<K>>,
}

impl<K: Key> Tree<K> {
    fn new(weight: u64, slots: Vec<u16>) -> Self {
        let leaves = slots.len().next_power_of_two();
        let node = |i: usize| Node { key: K::LAST, leaf: i.saturating_sub(leaves) as u16 };
        let mut tree = Tree { weight, slots, nodes: (0..2 * leaves).map(node).collect() };
        tree.rank();
        tree
    }

    fn leaves(&self) -> usize {
        self.nodes.len() / 2
    }

    #[inline]
    fn lesser(&self, node: usize) -> Node<K> {
        let (left, right) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
        if right.key < left.key { right } else { left }
    }

    fn rank(&mut self) {
        for node in (1..self.leaves()).rev() {
            self.nodes[node] = self.lesser(node);
        }
    }

    #[inline]
    fn set(&mut self, leaf: u16, key: K) {
        let mut node = self.leaves() + usize::from(leaf);
        self.nodes[node].key = key;
        while node > 1 {
            node /= 2;
            let lesser = self.lesser(node);
            if self.nodes[node] == lesser {
                break;
            }
            self.nodes[node] = lesser;
        }
    }
}

/// The least of the servers of one weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Least<K> {
    pub weight: u64,
    pub slot: u16,
    pub key: K,
}

/// Where a slot stands.
#[derive(Clone, Copy, Debug)]
struct Place {
    tree: u16,
    leaf: u16,
}

/// In no tree.
const NOWHERE: Place = Place { tree: u16::MAX, leaf: 0 };

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Tournament<K> {
    places: Vec<Place>,
    trees: Vec<Tree<K>>,
}

impl<K: Key> Tournament<K> {
    pub fn new(slots: usize) -> Self {
        Tournament { places: vec![NOWHERE; slots], trees: Vec::new() }
    }

    /// Who takes part from now on: weights by slot, 0 for those that do not. Nobody is ranked.
    pub fn set_weights(&mut self, weights: &[u64]) {
        let mut distinct: Vec<u64> = weights.iter().copied().filter(|weight| *weight > 0).collect();
        distinct.sort_unstable();
        distinct.dedup();
        self.places.fill(NOWHERE);
        self.trees.clear();
        for weight in distinct {
            let slots = (0..).zip(weights).filter(|(_, w)| **w == weight).map(|(slot, _)| slot);
            let slots: Vec<u16> = slots.collect();
            let tree = self.trees.len() as u16;
            for (leaf, slot) in (0..).zip(&slots) {
                self.places[usize::from(*slot)] = Place { tree, leaf };
            }
            self.trees.push(Tree::new(weight, slots));
        }
    }

    /// Which of the weights, in ascending order, a slot that takes part has.
    #[inline]
    pub fn weight_index(&self, slot: u16) -> usize {
        usize::from(self.places[usize::from(slot)].tree)
    }

    /// Ranks a slot that takes part.
    #[inline]
    pub fn set(&mut self, slot: u16, key: K) {
        let Place { tree, leaf } = self.places[usize::from(slot)];
        self.trees[usize::from(tree)].set(leaf, key);
    }

    /// Ranks all that take part anew. O(slots).
    pub fn set_all(&mut self, key: impl Fn(u16) -> K) {
        for tree in &mut self.trees {
            let leaves = tree.leaves();
            for (node, slot) in tree.nodes[leaves..].iter_mut().zip(&tree.slots) {
                node.key = key(*slot);
            }
            tree.rank();
        }
    }

    /// How many distinct weights there are.
    #[inline]
    pub fn weights(&self) -> usize {
        self.trees.len()
    }

    /// The least of the `index`th weight, in ascending order; of equals the lowest slot. Its key is [`Key::LAST`] where none of that
    /// weight is ranked.
    #[inline]
    pub fn least(&self, index: usize) -> Least<K> {
        let tree = &self.trees[index];
        let Node { key, leaf } = tree.nodes[1];
        Least { weight: tree.weight, slot: tree.slots[usize::from(leaf)], key }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_each_weight_is_that_of_a_plain_search() {
        let mut random = 7_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for slots in [1, 2, 3, 7, 8, 9, 100] {
            let weights: Vec<u64> = (0..slots).map(|_| next(4)).collect();
            let mut keys = vec![u32::MAX; slots];
            let mut tournament = Tournament::<u32>::new(slots);
            tournament.set_weights(&weights);
            for round in 0..2_000 {
                let slot = next(slots as u64) as usize;
                // Few keys, so that many are equal; now and then not ranked at all.
                let key = if next(8) == 0 { u32::MAX } else { next(5) as u32 };
                if weights[slot] > 0 {
                    keys[slot] = key;
                    tournament.set(slot as u16, key);
                }
                if round % 500 == 499 {
                    tournament.set_all(|slot| keys[usize::from(slot)]);
                }
                for index in 0..tournament.weights() {
                    let least = tournament.least(index);
                    let of_weight = (0..slots).filter(|slot| weights[*slot] == least.weight);
                    let wanted =
                        of_weight.min_by_key(|slot| (keys[*slot], *slot)).expect("a weight is someone's");
                    assert_eq!((usize::from(least.slot), least.key), (wanted, keys[wanted]));
                    assert_eq!(tournament.weight_index(least.slot), index);
                }
            }
        }
    }
}

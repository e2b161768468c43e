//! The hash ring of wait-and-widen: which clusters are an affinity key's group.
//!
//! Every cluster has as many nodes on a circle of 64-bit positions as the configuration says. A key's group are the first distinct
//! clusters met from the key's position on, upwards and around. Clusters that a request must not use stay on the ring: a group depends
//! on the key and the membership alone.
//!
//! *Invariant*: nodes are sorted by position, then cluster id.
//! *Bound and cost*: 16 bytes per node. A membership change hashes the new clusters' nodes and merges them in one pass; the others
//! are kept. A group costs one hash, a binary search, and a walk of a few nodes, longer as the group nears all clusters; no allocation.
//! *Source*: the Stargate rules, sections 2.4 and 2.6; Karger et al., "Consistent hashing and random trees", 1997.

use super::hash::Text;
use super::members::{Change, Members};
use super::stats::Cluster;

/// See the module's text.
#[derive(Debug)]
pub struct Ring {
    text: Text,
    nodes_per_cluster: u32,
    members: Members,
    /// Position and cluster index.
    nodes: Vec<(u64, u32)>,
    /// By cluster: the walk that met it last.
    met: Vec<u32>,
    walks: u32,
    group: Vec<u32>,
}

impl Ring {
    /// An empty ring. `nodes_per_cluster` is at least 1.
    pub fn new(text: Text, nodes_per_cluster: u32) -> Ring {
        Ring {
            text,
            nodes_per_cluster: nodes_per_cluster.max(1),
            members: Members::default(),
            nodes: Vec::new(),
            met: Vec::new(),
            walks: 0,
            group: Vec::new(),
        }
    }

    /// Takes note of the clusters.
    #[inline]
    pub fn look(&mut self, clusters: &[Cluster], version: u64) {
        if let Change::Clusters { moved } = self.members.look(clusters, version) {
            self.rebuild(clusters, &moved);
        }
    }

    #[cold]
    fn rebuild(&mut self, clusters: &[Cluster], moved: &[Option<u32>]) {
        // Both sets of ids are sorted, so what stays keeps its order.
        self.nodes.retain_mut(|(_, cluster)| {
            let place = moved[*cluster as usize];
            *cluster = place.unwrap_or(u32::MAX);
            place.is_some()
        });
        let mut kept = vec![false; clusters.len()];
        moved.iter().flatten().for_each(|place| kept[*place as usize] = true);
        let old = self.nodes.len();
        for (i, cluster) in clusters.iter().enumerate().filter(|(i, _)| !kept[*i]) {
            self.text.set_cluster(&cluster.id);
            let text = &mut self.text;
            self.nodes.extend((0..self.nodes_per_cluster).map(|n| (text.node(u64::from(n)), i as u32)));
        }
        self.nodes[old..].sort_unstable();
        // Two sorted runs: the stable sort merges them.
        self.nodes.sort();
        self.met.clear();
        self.met.resize(clusters.len(), 0);
        self.walks = 0;
    }

    /// The group of a key: indices of `min(size, clusters)` clusters in the order in which they are met.
    pub fn group(&mut self, key: &[u8], size: u64) -> &[u32] {
        let size = size.min(self.met.len() as u64) as usize;
        self.group.clear();
        if size == self.met.len() || size == 0 {
            // The order does not matter to who uses a group, and a walk until the last cluster is met is long.
            self.group.extend(0..size as u32);
            return &self.group;
        }
        if self.walks == u32::MAX {
            self.met.fill(0);
            self.walks = 0;
        }
        self.walks += 1;
        let position = self.text.key(key);
        let start = self.nodes.partition_point(|(node, _)| *node < position);
        let (before, after) = self.nodes.split_at(start);
        for (_, cluster) in after.iter().chain(before) {
            let met = &mut self.met[*cluster as usize];
            if *met != self.walks {
                *met = self.walks;
                self.group.push(*cluster);
                if self.group.len() == size {
                    break;
                }
            }
        }
        &self.group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clusters(letters: &str) -> Vec<Cluster> {
        letters.chars().map(|c| Cluster { id: format!("inst-{c}").into(), ..Cluster::default() }).collect()
    }

    fn ring(nodes: u32) -> Ring {
        Ring::new(Text::new(b"seed-1", b"rk-1", b"model-a"), nodes)
    }

    fn letters(group: &[u32], of: &str) -> String {
        group.iter().map(|i| of.as_bytes()[*i as usize] as char).collect()
    }

    #[test]
    fn walks_of_the_rules() {
        for (key, with_8, with_150) in [
            ("prefix-123", "cbda", "dcba"),
            ("prefix-a", "bdac", "cdba"),
            ("session-0", "cbda", "bacd"),
            ("session-1", "bcad", "adcb"),
            ("session-2", "acbd", "dacb"),
            ("session-3", "cdab", "dcab"),
        ] {
            for (nodes, walk) in [(8, with_8), (150, with_150)] {
                let mut ring = ring(nodes);
                ring.look(&clusters("abcd"), 1);
                for size in 0..4 {
                    let group = ring.group(key.as_bytes(), size as u64);
                    assert_eq!(letters(group, "abcd"), walk[..size], "{key}, {nodes} nodes, {size}");
                }
                // A walk of three names the last one; a group of all is not walked.
                assert_eq!(ring.group(key.as_bytes(), 4), [0, 1, 2, 3]);
                assert_eq!(ring.group(key.as_bytes(), u64::MAX).len(), 4);
            }
        }
    }

    #[test]
    fn a_ring_that_grew_and_shrank_is_the_ring_built_at_once() {
        let mut grown = ring(150);
        for (version, set) in ["bd", "abcd", "", "acxyz", "abcdef", "abdef", "bdefg"].iter().enumerate() {
            let set = clusters(set);
            grown.look(&set, version as u64);
            let mut fresh = ring(150);
            fresh.look(&set, 0);
            assert_eq!(grown.nodes, fresh.nodes);
            assert_eq!(grown.nodes.len(), set.len() * 150);
            for key in 0..50_u8 {
                let size = u64::from(key) % (set.len() as u64 + 1);
                assert_eq!(grown.group(&[key], size), fresh.group(&[key], size));
            }
        }
    }

    #[test]
    fn a_group_names_each_cluster_once_even_when_its_walk_counter_starts_over() {
        let mut ring = ring(150);
        ring.look(&clusters("abcdef"), 1);
        let expected = ring.group(b"key", 5).to_vec();
        ring.walks = u32::MAX;
        ring.met.fill(1);
        assert_eq!(ring.group(b"key", 5), expected);
        let mut sorted = expected;
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 5);
    }
}

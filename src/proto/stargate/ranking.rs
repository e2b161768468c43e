//! Pulsar's rankings: the order in which an affinity key prefers clusters.
//!
//! Weighted rendezvous hashing: a key's hash at a cluster gives `u = (hash + 1) / 2^64`, and the cluster's score is `w / -ln(u)` with w
//! its weight: the greatest or the mean input rate, as configured. The greatest score comes first, the lower id among equals. A
//! cluster has a share of all keys in proportion to its weight; one without a valid weight is left out.
//!
//! *Invariant*: a ranking in use was computed from the membership and the weights that [`Rankings::look`] saw last. Logarithms of
//! a key's hashes depend on the membership alone.
//! *Bound and cost*: of at most [`AFFINITY_KEYS_MAX`] keys, fewer where there are so many clusters that [`AFFINITY_DRAWS_MAX`] would be
//! passed, logarithms and order are kept, 12 bytes per cluster; the longest unused key goes. A known key costs one hash of the key. When
//! weights move, its first cluster costs a division per cluster, its whole order a sort; when clusters come or go, or for a new key,
//! a hash and a logarithm per cluster as well. Keys over [`AFFINITY_KEY_BYTES_MAX`] bytes are hashed each time. No
//! allocation once the keys kept have reached their limit.
//! *Source*: the Stargate rules, section 2.5; Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
//!
//! [`AFFINITY_KEY_BYTES_MAX`]: crate::limits::AFFINITY_KEY_BYTES_MAX

use super::estimate::is_rate;
use super::hash::Text;
use super::keys::Keys;
use super::members::{Change, Members};
use super::stats::Cluster;
use crate::limits::{AFFINITY_DRAWS_MAX, AFFINITY_KEYS_MAX};
use crate::proto::config::lb_config::RendezvousWeight;

/// A hash as a number above 0 and up to 1: the `u` of the module's text, to the letter.
fn unit(hash: u64) -> f64 {
    (hash as f64 + 1.0) / (u64::MAX as f64 + 2.0)
}

/// What a score divides a weight by: `-ln(u)`. Not above 0: the key does not rank the cluster.
fn draw(hash: u64) -> f64 {
    -unit(hash).ln()
}

/// The weight that a cluster is ranked by; `None`: it is left out.
#[inline]
pub fn weight(of: RendezvousWeight, cluster: &Cluster) -> Option<f64> {
    let tps = match of {
        RendezvousWeight::MaxInputTps => cluster.stats.max_input_tps,
        RendezvousWeight::LastMeanInputTps => cluster.stats.last_mean_input_tps,
    };
    is_rate(tps).then_some(tps)
}

/// One key's.
#[derive(Debug, Default)]
struct Ranked {
    /// By cluster.
    draws: Vec<f64>,
    /// Indices of the clusters, best first.
    order: Vec<u32>,
    first: Option<u32>,
    /// The generations that these were computed from; 0: none.
    drawn_at: u64,
    first_at: u64,
    ordered_at: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Rankings {
    text: Text,
    weight: RendezvousWeight,
    members: Members,
    /// By cluster; 0: not valid.
    weights: Vec<f64>,
    /// Changes whenever weights or members do; above 0 once there were clusters.
    generation: u64,
    keys: Keys,
    /// By number of the key.
    ranked: Vec<Ranked>,
    /// For a key that has no number.
    loose: Ranked,
    by_score: Vec<(u64, u32)>,
}

/// A key whose ranking may be asked for, until the next one is taken.
#[derive(Clone, Copy, Debug)]
pub struct Key(Option<usize>);

impl Rankings {
    pub fn new(text: Text, weight: RendezvousWeight) -> Rankings {
        Rankings {
            text,
            weight,
            members: Members::default(),
            weights: Vec::new(),
            generation: 0,
            keys: Keys::new(AFFINITY_KEYS_MAX),
            ranked: Vec::new(),
            loose: Ranked::default(),
            by_score: Vec::new(),
        }
    }

    /// Takes note of the clusters and their weights.
    #[inline]
    pub fn look(&mut self, clusters: &[Cluster], version: u64) {
        match self.members.look(clusters, version) {
            Change::None => {}
            Change::Figures => self.take_weights(clusters),
            Change::Clusters { .. } => {
                let keys_max = (AFFINITY_DRAWS_MAX / clusters.len().max(1)).clamp(1, AFFINITY_KEYS_MAX);
                if self.keys.limit() != keys_max {
                    self.keys = Keys::new(keys_max);
                    self.ranked.clear();
                }
                self.weights.clear();
                self.take_weights(clusters);
            }
        }
    }

    fn take_weights(&mut self, clusters: &[Cluster]) {
        let weight = self.weight;
        let now = || clusters.iter().map(|cluster| self::weight(weight, cluster).unwrap_or(0.0));
        if self.weights.len() != clusters.len() || !now().eq(self.weights.iter().copied()) {
            self.weights.clear();
            self.weights.extend(now());
            self.generation += 1;
        }
    }

    /// Takes a key (empty: none), whose ranking is asked for next. `clusters` are those looked at last.
    pub fn take(&mut self, clusters: &[Cluster], key: &[u8]) -> Key {
        let number = self.keys.number(key);
        let ranked = match number {
            Some((number, _)) => {
                if number == self.ranked.len() {
                    self.ranked.push(Ranked::default());
                }
                &mut self.ranked[number]
            }
            None => &mut self.loose,
        };
        let known = number.is_some_and(|(_, fresh)| !fresh);
        if !known || ranked.drawn_at != self.members.generation() {
            self.text.set_key(key);
            ranked.draws.clear();
            let text = &mut self.text;
            ranked.draws.extend(clusters.iter().map(|cluster| draw(text.key_at(&cluster.id))));
            ranked.drawn_at = self.members.generation();
            ranked.first_at = 0;
            ranked.ordered_at = 0;
        }
        Key(number.map(|(number, _)| number))
    }

    /// The key's first cluster. `None`: it ranks none.
    pub fn first(&mut self, key: Key) -> Option<u32> {
        let ranked = match key.0 {
            Some(number) => &mut self.ranked[number],
            None => &mut self.loose,
        };
        if ranked.first_at != self.generation {
            let mut best = 0;
            ranked.first = None;
            for (cluster, (weight, draw)) in self.weights.iter().zip(&ranked.draws).enumerate() {
                let score = score(*weight, *draw);
                if score > best {
                    best = score;
                    ranked.first = Some(cluster as u32);
                }
            }
            ranked.first_at = self.generation;
        }
        ranked.first
    }

    /// The key's whole ranking: indices of clusters, best first.
    pub fn order(&mut self, key: Key) -> &[u32] {
        let ranked = match key.0 {
            Some(number) => &mut self.ranked[number],
            None => &mut self.loose,
        };
        if ranked.ordered_at != self.generation {
            self.by_score.clear();
            for (cluster, (weight, draw)) in self.weights.iter().zip(&ranked.draws).enumerate() {
                let score = score(*weight, *draw);
                if score > 0 {
                    self.by_score.push((!score, cluster as u32));
                }
            }
            self.by_score.sort_unstable();
            ranked.order.clear();
            ranked.order.extend(self.by_score.iter().map(|(_, cluster)| *cluster));
            ranked.ordered_at = self.generation;
        }
        &ranked.order
    }
}

/// Bits of the score of a cluster, which order as scores do; 0: it is not ranked.
#[inline]
fn score(weight: f64, draw: f64) -> u64 {
    // A hash that rounds to 2^64 draws 0.
    if weight > 0.0 && draw > 0.0 && draw <= f64::MAX {
        // A quotient that underflows to 0 is still ranked, behind all others.
        (weight / draw).to_bits() + 1
    } else {
        0
    }
}

#[cfg(test)]
mod tests;

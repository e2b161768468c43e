//! How fast servers read input, measured on their own requests by all shards together: the plain mean, and the greatest.
//!
//! Each shard tells its peers count, mean and greatest of its own samples. These are absolute, so that the newest may replace what was
//! lost, and every shard adds them up in the same order: once quiet, all have the same figures to the last bit, and affinity follows
//! them alike. There is no window and no decay, as affinity weights must not wander while nothing is learnt.
//!
//! *Invariant*: nothing is published of a server before it has [`SAMPLES_MIN`] samples; what was published stays until a restarted
//! server has as many new ones.
//! *Bound and cost*: 24 bytes per server and shard, 24 more per server; a sample or a peer's figure costs O(shards).
//! *Source*: the Stargate rules, section 6.2; Welford, "Note on a method for calculating corrected sums of squares and products", 1962.

use crate::proto::ids::{BackendId, ShardId};
use crate::proto::stargate::estimate::is_rate;
use crate::proto::stargate::estimator::SAMPLES_MIN;

/// What one shard measured of one server, in tokens per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    pub samples: u64,
    pub mean: f64,
    pub greatest: f64,
}

/// What is known of a server, in tokens per second; 0: not enough.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Published {
    pub mean: f64,
    pub greatest: f64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Rates {
    shards: usize,
    /// By server, then shard, this one included.
    measured: Vec<Rate>,
    published: Vec<Published>,
    /// Servers whose own figure the peers lack, each once.
    unsaid: Vec<BackendId>,
}

impl Rates {
    pub fn new(shards: usize) -> Rates {
        Rates { shards, measured: Vec::new(), published: Vec::new(), unsaid: Vec::new() }
    }

    pub fn ensure(&mut self, servers: usize) {
        self.measured.resize(self.measured.len().max(servers * self.shards), Rate::default());
        self.published.resize(self.published.len().max(servers), Published::default());
    }

    #[inline]
    pub fn of(&self, id: BackendId) -> Published {
        self.published[id.index()]
    }

    /// Counts a sample of this shard; what is no rate counts as nothing. Whether what is published changed.
    pub fn note(&mut self, me: ShardId, id: BackendId, tps: f64) -> bool {
        if !is_rate(tps) {
            return false;
        }
        let rate = &mut self.measured[id.index() * self.shards + me.index()];
        rate.samples += 1;
        rate.mean += (tps - rate.mean) / rate.samples as f64;
        rate.greatest = rate.greatest.max(tps);
        self.mark(id);
        self.publish(id)
    }

    /// What a peer has measured in all. Whether what is published changed.
    pub fn hear(&mut self, from: ShardId, id: BackendId, rate: Rate) -> bool {
        self.measured[id.index() * self.shards + from.index()] = rate;
        self.publish(id)
    }

    /// Another engine serves there, or the same one anew: samples start over.
    pub fn restart(&mut self, me: ShardId, id: BackendId) {
        let own = self.measured[id.index() * self.shards + me.index()];
        self.measured[id.index() * self.shards..][..self.shards].fill(Rate::default());
        if own.samples > 0 {
            self.mark(id);
        }
    }

    fn publish(&mut self, id: BackendId) -> bool {
        let (mut samples, mut sum, mut greatest) = (0_u64, 0.0, 0.0_f64);
        for rate in &self.measured[id.index() * self.shards..][..self.shards] {
            samples += rate.samples;
            sum += rate.mean * rate.samples as f64;
            greatest = greatest.max(rate.greatest);
        }
        if samples < SAMPLES_MIN {
            return false;
        }
        let now = Published { mean: sum / samples as f64, greatest };
        is_rate(now.mean) && std::mem::replace(&mut self.published[id.index()], now) != now
    }

    fn mark(&mut self, id: BackendId) {
        // Alone there is nobody to tell.
        if self.shards > 1 && !self.unsaid.contains(&id) {
            self.unsaid.push(id);
        }
    }

    pub fn has_changes(&self) -> bool {
        !self.unsaid.is_empty()
    }

    /// The next figure that peers lack.
    pub fn pop_change(&mut self, me: ShardId) -> Option<(BackendId, Rate)> {
        let id = self.unsaid.pop()?;
        Some((id, self.measured[id.index() * self.shards + me.index()]))
    }

    /// Has that figure sent once more.
    pub fn resend(&mut self, id: BackendId) {
        self.mark(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: BackendId = BackendId(1);

    fn rates(shards: usize) -> Rates {
        let mut rates = Rates::new(shards);
        rates.ensure(2);
        rates
    }

    #[test]
    fn the_mean_of_all_samples_is_published_from_the_fifth_on() {
        let mut rates = rates(1);
        for tps in [10.0, 20.0, f64::NAN, 30.0, 0.0, 40.0] {
            assert!(!rates.note(ShardId(0), ID, tps));
        }
        assert_eq!(rates.of(ID), Published::default());
        assert!(rates.note(ShardId(0), ID, 50.0));
        assert_eq!(rates.of(ID), Published { mean: 30.0, greatest: 50.0 });
        assert!(!rates.note(ShardId(0), ID, 30.0), "nothing moved");
        assert_eq!(rates.of(BackendId(0)), Published::default());
        assert!(!rates.has_changes(), "alone there is nobody to tell");
    }

    #[test]
    fn shards_that_heard_each_other_publish_the_same() {
        let mut shards: Vec<Rates> = (0..3).map(|_| rates(3)).collect();
        for i in 0..40_u32 {
            let at = (i * 7 % 3) as usize;
            shards[at].note(ShardId(at as u8), ID, 100.0 / f64::from(1 + i % 11) + 0.1);
        }
        // What is told twice, or late, does not matter: the last word counts.
        for from in (0..3).chain(0..3) {
            if shards[from].has_changes() {
                let (id, rate) = shards[from].pop_change(ShardId(from as u8)).unwrap();
                (0..3).filter(|to| *to != from).for_each(|to| {
                    shards[to].hear(ShardId(from as u8), id, Rate { samples: 1, ..rate });
                    shards[to].hear(ShardId(from as u8), id, rate);
                });
            }
        }
        assert!(shards[0].of(ID).mean > 0.0);
        assert!(shards.iter().all(|rates| rates.of(ID) == shards[0].of(ID) && !rates.has_changes()));
    }

    #[test]
    fn a_restart_keeps_what_is_published_until_it_knows_better() {
        let mut rates = rates(2);
        for _ in 0..3 {
            rates.note(ShardId(0), ID, 100.0);
        }
        rates.hear(ShardId(1), ID, Rate { samples: 3, mean: 200.0, greatest: 300.0 });
        assert_eq!(rates.of(ID), Published { mean: 150.0, greatest: 300.0 });
        rates.pop_change(ShardId(0));
        rates.restart(ShardId(0), ID);
        assert_eq!(rates.pop_change(ShardId(0)), Some((ID, Rate::default())), "peers hear of it");
        for _ in 0..4 {
            assert!(!rates.note(ShardId(0), ID, 10.0));
            assert_eq!(rates.of(ID).mean, 150.0);
        }
        assert!(rates.note(ShardId(0), ID, 10.0));
        assert_eq!(rates.of(ID), Published { mean: 10.0, greatest: 10.0 });
    }
}

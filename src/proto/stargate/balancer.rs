//! One algorithm at work for one target: a request and the target's clusters in, a choice out.
//!
//! A balancer remembers what its algorithm does between requests: whose turn it is, the hash ring, the rankings of affinity keys. It is
//! made for one target and one configuration entry and is asked with that entry alone; another entry, or another target, has a balancer
//! of its own. Nothing about the clusters' figures is remembered: they are read anew for each choice.
//!
//! *Invariant*: the same calls with the same seed make the same choices. A choice is never an excluded cluster.
//! *Bound and cost*: an algorithm without affinity holds next to nothing; see `ring` and `ranking`. In instructions (`benches/selection`):
//! round-robin and random 130, power-of-n 390, pulsar for a known key 320, an affinity group 1,120, all at any number of clusters;
//! wait-and-widen over 64 clusters 1,760 where they have free slots, 5,100 where queue times are looked up, 6,300 where all are full.
//! No allocation in the steady state.
//! *Errors*: [`Choice::Unavailable`], [`InputWork`].
//! *Source*: the Stargate rules, sections 1.6 and 2.

use super::admission;
use super::choose::pulsar_wait_and_widen::Settings;
use super::choose::sample::Drawn;
use super::choose::widen::Scratch;
use super::choose::{pulsar, pulsar_wait_and_widen, sample, wait_and_widen};
use super::hash::Text;
use super::random::Rng;
use super::ranking::Rankings;
use super::ring::Ring;
use super::stats::Cluster;
use crate::proto::config::lb_config::{Entry, MethodSettings};

pub use super::admission::InputWork;
pub use super::estimate::expected_queue_ms;

/// What a request asks of a balancer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ask<'a> {
    pub input_tokens: u64,
    /// Lower is more urgent.
    pub priority: u32,
    /// Since the request's arrival.
    pub elapsed_ns: u64,
    /// The request's objective, which bounds on queue times follow. `None` and 0: none.
    pub slo_ms: Option<u64>,
    /// Empty: none.
    pub affinity_key: &'a [u8],
    /// Clusters that failed this request: indices, few, in any order.
    pub excluded: &'a [usize],
    /// By index: clusters that take nothing just now and count as excluded; they may be many. Empty: none.
    pub shut: &'a [bool],
}

impl Ask<'_> {
    /// Whether the cluster with that index failed the request, or is shut.
    #[inline]
    pub fn excludes(&self, index: usize) -> bool {
        !self.excluded.is_empty() && self.excluded.contains(&index)
            || self.shut.get(index).is_some_and(|shut| *shut)
    }

    /// Whether any cluster may not be chosen for such a reason.
    #[inline]
    pub fn excludes_some(&self) -> bool {
        !self.excluded.is_empty() || !self.shut.is_empty()
    }
}

/// A cluster was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection {
    /// Of the clusters that were shown.
    pub index: usize,
    /// 1-based; above 1 the choice is a fallback from what affinity preferred.
    pub rank_depth: u32,
    /// A cluster that affinity preferred, and that had not failed the request, had too little room in its KV cache.
    pub after_kv_skip: bool,
    /// How many clusters were compared for it: the effective sample.
    pub considered: u32,
}

/// The answer to an [`Ask`].
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Selected(Selection),
    /// Nothing can be chosen yet. After so many nanoseconds, at least 1, the clock alone has opened more.
    Wait {
        ns: u64,
    },
    /// Nothing can be chosen while the clusters are as they are. See [`Balancer::bounds_open_ns`].
    Unavailable,
}

/// What an algorithm remembers.
#[derive(Debug)]
enum Memory {
    Nothing,
    Turn(u64),
    Ring(Box<Ring>),
    Rankings(Box<Rankings>),
}

/// See the module's text.
#[derive(Debug)]
pub struct Balancer {
    memory: Memory,
    drawn: Drawn,
    scratch: Scratch,
}

impl Balancer {
    /// A balancer that has chosen nothing yet, for a target and an entry.
    pub fn new(entry: &Entry, routing_key: &[u8], model: &[u8]) -> Balancer {
        let text = |seed: &str| Text::new(seed.as_bytes(), routing_key, model);
        let memory = match &entry.method {
            MethodSettings::PowerOfN(_) | MethodSettings::Random => Memory::Nothing,
            MethodSettings::RoundRobin => Memory::Turn(0),
            MethodSettings::WaitAndWiden(rules) => {
                Memory::Ring(Box::new(Ring::new(text(&rules.seed), rules.virtual_nodes)))
            }
            MethodSettings::Pulsar(pulsar) | MethodSettings::PulsarWaitAndWiden { pulsar, .. } => {
                Memory::Rankings(Box::new(Rankings::new(text(&pulsar.seed), pulsar.weight)))
            }
        };
        Balancer { memory, drawn: Drawn::default(), scratch: Scratch::default() }
    }

    /// Chooses a cluster. `clusters` are the target's, sorted by id; `version` grows when clusters come or go or their input rates
    /// change, and may stand for all other changes.
    pub fn choose(
        &mut self,
        entry: &Entry,
        clusters: &[Cluster],
        version: u64,
        ask: &Ask<'_>,
        rng: &mut Rng,
    ) -> Choice {
        self.scratch.bounds_ns = None;
        match (&entry.method, &mut self.memory) {
            (MethodSettings::PowerOfN(rules), Memory::Nothing) => {
                sample::power_of_n(rules, &mut self.drawn, clusters, ask, rng)
            }
            (MethodSettings::Random, Memory::Nothing) => sample::random(&mut self.drawn, clusters, ask, rng),
            (MethodSettings::RoundRobin, Memory::Turn(turn)) => {
                sample::round_robin(turn, &mut self.drawn, clusters, ask)
            }
            (MethodSettings::WaitAndWiden(rules), Memory::Ring(ring)) => {
                wait_and_widen::choose(rules, ring, &mut self.scratch, clusters, version, ask, rng)
            }
            (MethodSettings::Pulsar(rules), Memory::Rankings(rankings)) => {
                rankings.look(clusters, version);
                pulsar::choose(rules, rankings, clusters, ask)
            }
            (MethodSettings::PulsarWaitAndWiden { .. }, Memory::Rankings(rankings)) => {
                rankings.look(clusters, version);
                pulsar_wait_and_widen::choose(
                    &settings(&entry.method).expect("that method's"),
                    rankings,
                    &mut self.scratch,
                    clusters,
                    ask,
                    rng,
                )
            }
            (method, memory) => panic!("{memory:?} was not made for {method:?}"),
        }
    }

    /// The cluster that is first for an affinity key, whatever room it has; other arguments as for [`Balancer::choose`]. `None`: the
    /// algorithm ranks none.
    pub fn first(&mut self, clusters: &[Cluster], version: u64, affinity_key: &[u8]) -> Option<usize> {
        let Memory::Rankings(rankings) = &mut self.memory else { return None };
        rankings.look(clusters, version);
        let key = rankings.take(clusters, affinity_key);
        rankings.first(key).map(|first| first as usize)
    }

    /// After [`Choice::Unavailable`]: in how many nanoseconds bounds on queue times, which grow as the request's objective nears, let in a
    /// cluster that is too busy for them now. `None`: time alone changes nothing. A [`Choice::Wait`] has it included.
    pub const fn bounds_open_ns(&self) -> Option<u64> {
        self.scratch.bounds_ns
    }

    /// Says whether the request may be routed at all, which comes before [`Balancer::choose`].
    pub fn admit(&self, entry: &Entry, clusters: &[Cluster], ask: &Ask<'_>) -> Result<(), InputWork> {
        admission::admit(entry, clusters, ask)
    }

    /// Whether a cluster that has more room than before could be the choice for this request now, whatever its figures are: false for
    /// what failed the request, for what affinity has not opened yet, and for what a ranking leaves out. Other arguments as for
    /// [`Balancer::choose`].
    pub fn concerns(
        &mut self,
        entry: &Entry,
        clusters: &[Cluster],
        version: u64,
        ask: &Ask<'_>,
        index: usize,
    ) -> bool {
        if ask.excludes(index) || index >= clusters.len() {
            return false;
        }
        match (&entry.method, &mut self.memory) {
            (MethodSettings::WaitAndWiden(rules), Memory::Ring(ring)) => {
                if !wait_and_widen::has_group(rules, ask)
                    || ask.elapsed_ns >= wait_and_widen::group_only_ns(rules)
                {
                    return true;
                }
                ring.look(clusters, version);
                ring.group(ask.affinity_key, rules.group).contains(&(index as u32))
            }
            (MethodSettings::Pulsar(pulsar), Memory::Rankings(_)) => {
                super::ranking::weight(pulsar.weight, &clusters[index]).is_some()
            }
            (MethodSettings::PulsarWaitAndWiden { .. }, Memory::Rankings(rankings)) => {
                rankings.look(clusters, version);
                let key = rankings.take(clusters, ask.affinity_key);
                let order = rankings.order(key);
                let settings = settings(&entry.method).expect("that method's");
                let opening = settings.opening(ask.elapsed_ns, order.len());
                order[..opening.open].contains(&(index as u32))
            }
            _ => true,
        }
    }
}

fn settings(method: &MethodSettings) -> Option<Settings<'_>> {
    match method {
        MethodSettings::PulsarWaitAndWiden {
            pulsar,
            widen,
            group,
            band_widen_interval_ms,
            fallback_max_queued,
        } => Some(Settings {
            pulsar,
            widen,
            group: *group,
            band_widen_interval_ms: *band_widen_interval_ms,
            fallback_max_queued: *fallback_max_queued,
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests;

//! power-of-n, round-robin and random: a few clusters drawn, or the next in turn.
//!
//! * power-of-n: so many distinct clusters drawn uniformly; the lowest score wins, each of equals with the same probability.
//! * round-robin: the cluster whose turn it is among those that may be chosen, in the order of ids.
//! * random: each with the same probability.
//!
//! None looks at limits, queue bounds or caches.
//!
//! *Invariant*: an excluded cluster is never chosen; with any other cluster left, one is.
//! *Bound and cost*: independent of the number of clusters where none is shut. A draw costs one random number; excluded clusters are
//! stepped over by rank, not redrawn. No allocation in the steady state.
//! *Source*: the Stargate rules, section 2.3; Floyd's sampling (Bentley and Floyd, "A sample of brilliance", 1987).

use super::super::balancer::{Ask, Choice, Selection};
use super::super::estimate::score;
use super::super::random::Rng;
use super::super::stats::Cluster;
use crate::proto::config::lb_config::PowerOfN;

/// Room for a choice to work in, kept between choices.
#[derive(Debug, Default)]
pub struct Drawn {
    excluded: Vec<usize>,
    ranks: Vec<usize>,
}

/// The clusters that may be chosen, counted through.
struct Rest<'a> {
    count: usize,
    /// Ascending, each once.
    excluded: &'a [usize],
}

impl<'a> Rest<'a> {
    fn new(clusters: usize, ask: &Ask<'_>, excluded: &'a mut Vec<usize>) -> Rest<'a> {
        excluded.clear();
        if ask.excludes_some() {
            excluded.extend(ask.excluded.iter().filter(|index| **index < clusters));
            let shut = ask.shut.iter().take(clusters).enumerate().filter(|(_, shut)| **shut);
            excluded.extend(shut.map(|(index, _)| index));
            excluded.sort_unstable();
            excluded.dedup();
        }
        Rest { count: clusters - excluded.len(), excluded }
    }

    /// The index of the cluster with that rank among those that are left.
    fn nth(&self, rank: usize) -> usize {
        let mut index = rank;
        for excluded in self.excluded {
            if *excluded > index {
                break;
            }
            index += 1;
        }
        index
    }
}

fn selected(index: usize, considered: usize) -> Choice {
    Choice::Selected(Selection { index, rank_depth: 1, after_kv_skip: false, considered: considered as u32 })
}

/// The element whose turn it is; the counter moves on when there is one.
pub fn round_robin(turn: &mut u64, drawn: &mut Drawn, clusters: &[Cluster], ask: &Ask<'_>) -> Choice {
    let rest = Rest::new(clusters.len(), ask, &mut drawn.excluded);
    if rest.count == 0 {
        return Choice::Unavailable;
    }
    let rank = (*turn % rest.count as u64) as usize;
    *turn = turn.wrapping_add(1);
    selected(rest.nth(rank), 1)
}

/// Any one.
pub fn random(drawn: &mut Drawn, clusters: &[Cluster], ask: &Ask<'_>, rng: &mut Rng) -> Choice {
    let rest = Rest::new(clusters.len(), ask, &mut drawn.excluded);
    if rest.count == 0 {
        return Choice::Unavailable;
    }
    selected(rest.nth(rng.below(rest.count)), 1)
}

/// The best of a sample.
pub fn power_of_n(
    rules: &PowerOfN,
    drawn: &mut Drawn,
    clusters: &[Cluster],
    ask: &Ask<'_>,
    rng: &mut Rng,
) -> Choice {
    let rest = Rest::new(clusters.len(), ask, &mut drawn.excluded);
    let sample = rest.count.min(usize::from(rules.sample_count));
    let mut best: Option<(u64, usize)> = None;
    let mut equals = 1;
    let mut show = |rank: usize, rng: &mut Rng| {
        let index = rest.nth(rank);
        let score = score(rules.comparator, &clusters[index], ask.input_tokens, ask.priority);
        match best {
            Some((least, _)) if score > least => {}
            Some((least, _)) if score == least => {
                equals += 1;
                if rng.below(equals) == 0 {
                    best = Some((score, index));
                }
            }
            _ => {
                best = Some((score, index));
                equals = 1;
            }
        }
    };
    if sample == rest.count {
        (0..sample).for_each(|rank| show(rank, rng));
    } else {
        // Of the ranks up to `last`, a new one, or, if that was drawn before, `last` itself: each set is as likely as any other.
        drawn.ranks.clear();
        for last in rest.count - sample..rest.count {
            let rank = rng.below(last + 1);
            let rank = if drawn.ranks.contains(&rank) { last } else { rank };
            drawn.ranks.push(rank);
            show(rank, rng);
        }
    }
    match best {
        Some((_, index)) => selected(index, sample),
        None => Choice::Unavailable,
    }
}

#[cfg(test)]
mod tests;

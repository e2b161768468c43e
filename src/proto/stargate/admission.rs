//! Whether a target's clusters have too much input to read already: `max_input_work_seconds`.
//!
//! The seconds of work are the request's input tokens and all queued ones over the sum of the mean input rates of those clusters that
//! the algorithm could choose; a request is let in while they are at most the limit. A cluster without a valid rate adds its queue
//! and no rate.
//!
//! *Invariant*: a configuration without a limit lets every request in, and so does a target none of whose clusters may be asked: what
//! becomes of such a request is not a matter of work.
//! *Bound and cost*: one pass over the clusters where there is a limit, nothing where there is none.
//! *Errors*: [`InputWork`].
//! *Source*: the Stargate rules, section 2.8.

use super::balancer::Ask;
use super::estimate::{is_rate, kv_fits};
use super::ranking::weight;
use super::stats::Cluster;
use crate::proto::config::lb_config::{Entry, MethodSettings, Pulsar};

/// Too much input work, or, with `capacity`, no rate by which to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputWork {
    pub capacity: bool,
}

/// Says whether a request may be routed at all.
pub fn admit(entry: &Entry, clusters: &[Cluster], ask: &Ask<'_>) -> Result<(), InputWork> {
    let Some(limit) = entry.max_input_work_seconds else { return Ok(()) };
    let ranked_by = match &entry.method {
        MethodSettings::Pulsar(pulsar) | MethodSettings::PulsarWaitAndWiden { pulsar, .. } => Some(pulsar),
        _ => None,
    };
    let could_choose = |pulsar: &Pulsar, cluster: &Cluster| {
        weight(pulsar.weight, cluster).is_some()
            && (!pulsar.consider_kv_free_tokens || kv_fits(&cluster.stats.kv, ask.input_tokens))
    };
    let (mut tokens, mut tps, mut candidates) = (ask.input_tokens, 0.0, false);
    for (index, cluster) in clusters.iter().enumerate() {
        if ask.excludes(index) {
            continue;
        }
        candidates = true;
        if ranked_by.is_some_and(|pulsar| !could_choose(pulsar, cluster)) {
            continue;
        }
        tokens = tokens.saturating_add(cluster.stats.queued_input_size);
        if is_rate(cluster.stats.last_mean_input_tps) {
            tps += cluster.stats.last_mean_input_tps;
        }
    }
    if !candidates {
        return Ok(());
    }
    if !is_rate(tps) {
        return Err(InputWork { capacity: true });
    }
    if tokens as f64 / tps <= limit { Ok(()) } else { Err(InputWork { capacity: false }) }
}

#[cfg(test)]
mod tests {
    use super::super::stats::{KvCache, Stats};
    use super::*;
    use crate::proto::config::lb_config::{Method, RendezvousWeight};

    fn entry(method: Method, limit: f64) -> Entry {
        Entry { max_input_work_seconds: Some(limit), ..Entry::new(method) }
    }

    fn cluster(queued_input_size: u64, tps: f64) -> Cluster {
        let stats =
            Stats { queued_input_size, last_mean_input_tps: tps, max_input_tps: tps, ..Stats::default() };
        Cluster { stats, ..Cluster::default() }
    }

    fn ask(input_tokens: u64) -> Ask<'static> {
        Ask { input_tokens, ..Ask::default() }
    }

    const FULL: Result<(), InputWork> = Err(InputWork { capacity: false });
    const NO_RATE: Result<(), InputWork> = Err(InputWork { capacity: true });

    #[test]
    fn examples_of_the_rules() {
        let one = [cluster(300, 100.0)];
        assert_eq!(admit(&entry(Method::PowerOfN, 3.0), &one, &ask(50)), FULL);
        assert_eq!(admit(&entry(Method::PowerOfN, 3.5), &one, &ask(50)), Ok(()));
        let two = [cluster(300, 100.0), cluster(120, 50.0)];
        assert_eq!(admit(&entry(Method::WaitAndWiden, 3.0), &two, &ask(30)), Ok(()));
        assert_eq!(admit(&entry(Method::WaitAndWiden, 2.999), &two, &ask(30)), FULL);

        let mut two = [cluster(50, 100.0), cluster(900, 1000.0)];
        two[0].stats.kv = KvCache { capacity_tokens: 200, used_tokens: 0, free_tokens: 200 };
        two[1].stats.kv = KvCache { capacity_tokens: 200, used_tokens: 150, free_tokens: 50 };
        let seconds = 1050.0 / 1100.0;
        assert_eq!(admit(&entry(Method::Pulsar, seconds), &two, &ask(100)), Ok(()));
        assert_eq!(admit(&entry(Method::Pulsar, seconds - 1e-9), &two, &ask(100)), FULL);
        let mut checked = entry(Method::Pulsar, 1.5);
        let MethodSettings::Pulsar(pulsar) = &mut checked.method else { unreachable!() };
        pulsar.consider_kv_free_tokens = true;
        assert_eq!(admit(&checked, &two, &ask(100)), Ok(()));
        checked.max_input_work_seconds = Some(1.499);
        assert_eq!(admit(&checked, &two, &ask(100)), FULL);
    }

    #[test]
    fn no_rate_is_another_reason_than_too_much_work() {
        let idle = [cluster(0, 0.0), cluster(0, f64::NAN)];
        for method in Method::ALL {
            assert_eq!(admit(&entry(method, 1e9), &idle, &ask(0)), NO_RATE, "{method:?}");
        }
        let unbounded = [cluster(0, f64::MAX), cluster(0, f64::MAX)];
        assert_eq!(admit(&entry(Method::Random, 1.0), &unbounded, &ask(1)), NO_RATE, "the sum is not finite");
    }

    #[test]
    fn a_cluster_without_a_rate_adds_its_queue_where_it_could_be_chosen() {
        let two = [cluster(100, 100.0), cluster(200, 0.0)];
        assert_eq!(admit(&entry(Method::RoundRobin, 2.9), &two, &ask(0)), FULL);
        assert_eq!(admit(&entry(Method::RoundRobin, 3.0), &two, &ask(0)), Ok(()));
        assert_eq!(
            admit(&entry(Method::PulsarWaitAndWiden, 1.0), &two, &ask(0)),
            Ok(()),
            "not in the ranking"
        );
    }

    #[test]
    fn pulsar_takes_part_by_its_own_weight_and_counts_by_the_mean() {
        let mut by_max = cluster(100, 100.0);
        by_max.stats.last_mean_input_tps = 0.0;
        assert_eq!(admit(&entry(Method::Pulsar, 1.0), &[by_max.clone()], &ask(0)), NO_RATE);
        let mut by_mean = entry(Method::Pulsar, 1.0);
        let MethodSettings::Pulsar(pulsar) = &mut by_mean.method else { unreachable!() };
        pulsar.weight = RendezvousWeight::LastMeanInputTps;
        by_max.stats.max_input_tps = 0.0;
        by_max.stats.last_mean_input_tps = 100.0;
        assert_eq!(admit(&by_mean, &[by_max.clone()], &ask(0)), Ok(()));
        assert_eq!(admit(&entry(Method::Pulsar, 1.0), &[by_max], &ask(0)), NO_RATE, "no maximum");
    }

    #[test]
    fn excluded_clusters_count_for_nothing() {
        let two = [cluster(1000, 1.0), cluster(0, 100.0)];
        let tight = entry(Method::PowerOfN, 1.0);
        assert_eq!(admit(&tight, &two, &ask(0)), FULL);
        assert_eq!(admit(&tight, &two, &Ask { excluded: &[0], ..ask(0) }), Ok(()));
        assert_eq!(admit(&tight, &two, &Ask { excluded: &[1, 0], ..ask(0) }), Ok(()), "nobody is asked");
        assert_eq!(admit(&tight, &[], &ask(9)), Ok(()));
        let unlimited = Entry::new(Method::PowerOfN);
        assert_eq!(admit(&unlimited, &two, &ask(u64::MAX)), Ok(()));
    }
}

//! The bench: a server that failed several times in a row gets no requests for a while.
//!
//! Each shard counts failures of its own requests; the verdict it comes to holds on every shard. A verdict is a
//! last-writer-wins register: the latest `judged`, then the highest shard, so copies agree whatever the order of arrival.
//! Once benched, a server is on probation: after the bench ends a single failure, on any shard, benches it again, for
//! twice as long. One success clears everything.
//!
//! *Invariant*: merging is commutative, associative and idempotent.
//! *Bound and cost*: a few words per server; O(1).
//! *Source*: the Lifeboat rules, section 9.

use crate::clock::Nanos;
use crate::proto::ids::ShardId;

/// When and how long servers are benched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchRules {
    /// Consecutive failures that bench; 0 never benches.
    pub after: u32,
    /// First time, in milliseconds.
    pub ms: u64,
    /// Longest time, in milliseconds.
    pub ms_max: u64,
}

/// What the shards hold of a server. The default is a clean sheet, older than any verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub until: Nanos,
    /// When it was passed; zero: never.
    pub judged: Nanos,
    /// Benchings since the last success.
    pub level: u8,
    /// Who passed it.
    pub by: Option<ShardId>,
}

impl Verdict {
    pub const fn benched(&self, now: Nanos) -> bool {
        self.until.0 > now.0
    }

    /// Takes the newer of the two; true when that changed something.
    pub fn merge(&mut self, other: Verdict) -> bool {
        let newer = (other.judged, other.by) > (self.judged, self.by);
        if newer {
            *self = other;
        }
        newer
    }

    /// The next bench after this state, and its length in milliseconds.
    pub fn again(&self, now: Nanos, by: ShardId, rules: &BenchRules) -> (Verdict, u64) {
        let doubled = rules.ms.checked_shl(self.level.into()).filter(|ms| ms >> self.level == rules.ms);
        let ms = doubled.unwrap_or(u64::MAX).min(rules.ms_max);
        let verdict = Verdict {
            until: now.plus_ms(ms),
            judged: Nanos(now.0.max(self.judged.0 + 1)),
            level: self.level.saturating_add(1),
            by: Some(by),
        };
        (verdict, ms)
    }

    /// The state after a success.
    pub fn cleared(now: Nanos, by: ShardId) -> Verdict {
        Verdict { until: Nanos::ZERO, judged: now, level: 0, by: Some(by) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: BenchRules = BenchRules { after: 3, ms: 1000, ms_max: 30_000 };

    #[test]
    fn each_bench_doubles_up_to_the_bound() {
        let mut verdict = Verdict::default();
        let mut lengths = Vec::new();
        for _ in 0..70 {
            let (next, ms) = verdict.again(Nanos(5), ShardId(0), &RULES);
            verdict = next;
            lengths.push(ms);
        }
        assert_eq!(lengths[..6], [1000, 2000, 4000, 8000, 16_000, 30_000]);
        assert!(lengths[6..].iter().all(|ms| *ms == 30_000));
    }

    #[test]
    fn merging_in_any_order_gives_the_latest() {
        let a = Verdict::default().again(Nanos(10), ShardId(2), &RULES).0;
        let b = Verdict::cleared(Nanos(10), ShardId(3));
        let c = Verdict::default().again(Nanos(9), ShardId(7), &RULES).0;
        for order in [[a, b, c], [a, c, b], [b, a, c], [b, c, a], [c, a, b], [c, b, a]] {
            let mut held = Verdict::default();
            for verdict in order {
                held.merge(verdict);
                assert!(!held.merge(verdict), "a second copy changes nothing");
            }
            assert_eq!(held, b);
        }
    }
}

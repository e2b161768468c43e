//! Times in the queue by priority: from the work that is queued, and from a report with what was sent since.
//!
//! A map says, for each priority that has work, when a request of that priority would be through; between keys the greatest below
//! counts. So it is a staircase, and a request of priority p that takes d adds a step of d at p.
//!
//! *Invariant*: keys ascend; what is added saturates.
//! *Bound and cost*: linear in the priorities of both sides; into space that is used again.
//! *Source*: the Stargate rules, sections 6.3 and 6.4.

use super::by_priority::ByPriority;
use super::estimate::{delta_ms, is_rate};
use super::stats::QueueTimes;

/// Requests sent since a report, as steps of its staircase, for one rate.
#[derive(Clone, Debug, Default)]
pub struct Reserved {
    tps: f64,
    steps: ByPriority<Step>,
    /// Requests whose time is not known.
    unknown: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Step {
    requests: u32,
    /// Whole milliseconds of each request, together; up to 2^64 each.
    ms: u128,
}

impl Reserved {
    /// Whether the steps are those of that rate.
    pub fn is_of(&self, tps: f64) -> bool {
        self.tps.to_bits() == tps.to_bits()
    }

    /// Nothing is reserved, and the rate is that.
    pub fn reset(&mut self, tps: f64) {
        self.tps = tps;
        self.steps.clear();
        self.unknown = 0;
    }

    pub fn add(&mut self, priority: u32, tokens: u64) {
        match delta_ms(tokens, self.tps) {
            Some(ms) => {
                let step = self.steps.entry(priority);
                step.requests += 1;
                step.ms += u128::from(ms);
            }
            None => self.unknown += 1,
        }
    }

    /// Takes back what [`Reserved::add`] added since the last reset.
    pub fn remove(&mut self, priority: u32, tokens: u64) {
        let Some(ms) = delta_ms(tokens, self.tps) else {
            self.unknown -= 1;
            return;
        };
        let step = self.steps.entry(priority);
        step.requests -= 1;
        step.ms -= u128::from(ms);
        if step.requests == 0 {
            self.steps.remove(priority);
        }
    }

    /// Adds the steps to a reported staircase. One without entries stays so, and one cannot be told any more becomes so.
    pub fn apply(&self, times: &mut QueueTimes) {
        if times.is_empty() {
            return;
        }
        if self.unknown > 0 {
            times.clear();
            return;
        }
        for (priority, step) in self.steps.iter() {
            add_step(times, priority, u64::try_from(step.ms).unwrap_or(u64::MAX));
        }
    }
}

/// A step of `ms` at `priority`, in a staircase that has some.
pub fn add_step(times: &mut QueueTimes, priority: u32, ms: u64) {
    let at = times.partition_point(|(key, _)| *key < priority);
    if times.get(at).is_none_or(|(key, _)| *key != priority) {
        let below = if at == 0 { 0 } else { times[at - 1].1 };
        times.insert(at, (priority, below));
    }
    for (_, time) in &mut times[at..] {
        *time = time.saturating_add(ms);
    }
}

/// The staircase of queued tokens by ascending priority, of which those without tokens are left out. An unknown rate gives none.
pub fn staircase(work: impl Iterator<Item = (u32, u64)>, tps: f64, times: &mut QueueTimes) {
    times.clear();
    if !is_rate(tps) {
        return;
    }
    let mut ahead = 0_u64;
    for (priority, tokens) in work.filter(|(_, tokens)| *tokens > 0) {
        ahead = ahead.saturating_add(tokens);
        times.push((priority, delta_ms(ahead, tps).unwrap_or(u64::MAX)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserved(tps: f64, requests: &[(u32, u64)]) -> Reserved {
        let mut reserved = Reserved::default();
        reserved.reset(tps);
        for (priority, tokens) in requests {
            reserved.add(*priority, *tokens);
        }
        reserved
    }

    fn applied(base: &[(u32, u64)], tps: f64, requests: &[(u32, u64)]) -> QueueTimes {
        let mut times = base.to_vec();
        reserved(tps, requests).apply(&mut times);
        times
    }

    #[test]
    fn reservations_are_steps_of_the_reported_staircase() {
        // 10 tokens at 100 tokens per second: 100 ms.
        assert_eq!(applied(&[(2, 5)], 100.0, &[(3, 10)]), [(2, 5), (3, 105)]);
        assert_eq!(applied(&[(1, 10), (4, 40)], 100.0, &[(2, 10)]), [(1, 10), (2, 110), (4, 140)]);
        let three = [(1, 10), (2, 100), (4, 400)];
        assert_eq!(applied(&three, 100.0, &[(2, 10)]), [(1, 10), (2, 200), (4, 500)]);
        assert_eq!(applied(&[(4, 5)], 100.0, &[(0, 10)]), [(0, 100), (4, 105)]);
        assert_eq!(applied(&[(4, 5)], 0.0, &[(0, 10)]), []);
    }

    #[test]
    fn several_reservations_add_up_each_rounded_by_itself() {
        // Three tokens at 1000 per second and a half: each 2.99… ms, so 3 ms each, and not 6 together.
        assert_eq!(applied(&[(0, 0)], 1001.0, &[(1, 3), (1, 3)]), [(0, 0), (1, 6)]);
        assert_eq!(applied(&[(0, 0)], 400.0, &[(1, 1), (0, 1)]), [(0, 3), (1, 6)]);
        assert_eq!(applied(&[], 100.0, &[(1, 10)]), [], "no entry: none is made");
        assert_eq!(applied(&[(5, u64::MAX - 1)], 100.0, &[(5, 10)]), [(5, u64::MAX)]);
        // Reserved for nothing: the key is there, the stairs are the same.
        assert_eq!(applied(&[(0, 7)], 100.0, &[(3, 0)]), [(0, 7), (3, 7)]);
    }

    #[test]
    fn what_ends_is_taken_back_whole() {
        let mut reserved = reserved(100.0, &[(2, 10), (2, 7), (1, 3)]);
        reserved.remove(2, 10);
        reserved.remove(1, 3);
        let mut times = vec![(0, 1)];
        reserved.apply(&mut times);
        assert_eq!(times, [(0, 1), (2, 71)]);
        reserved.remove(2, 7);
        let mut times = vec![(0, 1)];
        reserved.apply(&mut times);
        assert_eq!(times, [(0, 1)]);
        reserved.reset(0.0);
        reserved.add(1, 1);
        reserved.remove(1, 1);
        reserved.apply(&mut times);
        assert_eq!(times, [(0, 1)]);
    }

    #[test]
    fn stairs_are_what_is_queued_up_to_each_priority() {
        let stairs = |work: &[(u32, u64)], tps| {
            let mut times = vec![(9, 9)];
            staircase(work.iter().copied(), tps, &mut times);
            times
        };
        assert_eq!(stairs(&[(0, 25), (4, 10)], 100.0), [(0, 250), (4, 350)]);
        assert_eq!(stairs(&[(1, 1), (2, 0), (3, 1)], 3.0), [(1, 334), (3, 667)]);
        assert_eq!(stairs(&[], 100.0), []);
        assert_eq!(stairs(&[(0, 25)], 0.0), []);
        assert_eq!(stairs(&[(0, u64::MAX), (1, 1)], 1.0), [(0, u64::MAX), (1, u64::MAX)]);
    }
}

//! Active health checks: when each server is asked next, and what its answers add up to.
//!
//! A server starts down and unknown; the first answer that is fine brings it up at once, so that a start does not take
//! `rise` intervals. From then on `fall` failures in a row take it down and `rise` successes in a row bring it back.
//!
//! *Invariant*: pure: no I/O and no clock; `now` is an argument. A server's state changes in [`Check::record`] alone.
//! *Bound and cost*: O(1) and no allocation per check.
//! *Source*: the Lifeboat rules on benching (active checks are separate), the configuration reference, `[health]`.

use crate::clock::Nanos;

/// `[health]` of the configuration, counts at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// From the start of one check to the start of the next, in milliseconds.
    pub interval_ms: u64,
    /// Failures in a row that take a server down.
    pub fall: u32,
    /// Successes in a row that bring a server back.
    pub rise: u32,
}

/// Starts of the very first checks lie this far apart, so that many servers are not asked in one burst.
const STAGGER_MS: u64 = 1;
/// The last of the first checks starts no later than this.
const STAGGER_MS_MAX: u64 = 500;
/// Two checks of one server are at least this far apart, however long the first took.
const GAP_MS_MIN: u64 = 10;

/// The checks of one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    up: bool,
    /// Some check has ended.
    known: bool,
    /// Results in a row that speak against the present state.
    against: u32,
    /// Checks ended so far.
    rounds: u64,
    /// When the next check is to start.
    due: Nanos,
    seed: u64,
}

impl Check {
    /// A server that was never asked: down, and due almost at once. `index` is its place among the servers.
    pub fn new(index: usize, now: Nanos) -> Self {
        let stagger_ms = (index as u64 * STAGGER_MS).min(STAGGER_MS_MAX);
        Check {
            up: false,
            known: false,
            against: 0,
            rounds: 0,
            due: now.plus_ms(stagger_ms),
            seed: index as u64,
        }
    }

    /// A server that somebody waits for: due now.
    pub fn at_once(index: usize, now: Nanos) -> Self {
        Check { due: now, ..Check::new(index, now) }
    }

    pub const fn up(&self) -> bool {
        self.up
    }

    /// No check has ended yet.
    pub const fn unknown(&self) -> bool {
        !self.known
    }

    pub const fn due(&self) -> Nanos {
        self.due
    }

    /// Takes in the result of the check that ran from `started` to `now`. Returns the new state if it changed.
    pub fn record(&mut self, rules: &Rules, started: Nanos, now: Nanos, ok: bool) -> Option<bool> {
        let first = !self.known;
        self.known = true;
        self.due = started.plus_ms(self.delay_ms(rules.interval_ms)).max(now.plus_ms(GAP_MS_MIN));
        self.rounds += 1;
        if ok == self.up {
            self.against = 0;
            return None;
        }
        self.against += 1;
        let enough = if ok { rules.rise } else { rules.fall };
        if first || self.against >= enough {
            self.up = ok;
            self.against = 0;
            return Some(ok);
        }
        None
    }

    /// The interval, shortened: after the first check by up to a half, which spreads the servers over the interval, then
    /// by up to a tenth, which keeps them from falling into step. Never lengthened, so that a change of state is seen
    /// within the interval.
    fn delay_ms(&self, interval_ms: u64) -> u64 {
        let share = if self.rounds == 0 { 2 } else { 10 };
        let range = interval_ms / share;
        if range == 0 { interval_ms } else { interval_ms - scatter(self.seed, self.rounds) % range }
    }
}

/// A repeatable number that looks random (the finisher of SplitMix64 over both arguments).
pub fn scatter(seed: u64, round: u64) -> u64 {
    let mut z =
        seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(round.wrapping_mul(0xd1b5_4a32_d192_ed03));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { interval_ms: 2000, fall: 2, rise: 3 };

    /// Runs `results` one interval apart and gives back the changes.
    fn run(rules: &Rules, results: &[bool]) -> Vec<Option<bool>> {
        let mut check = Check::new(0, Nanos::ZERO);
        results
            .iter()
            .map(|ok| {
                let started = check.due();
                check.record(rules, started, started.plus_ms(1), *ok)
            })
            .collect()
    }

    #[test]
    fn the_first_success_brings_a_server_up_at_once() {
        assert_eq!(run(&RULES, &[true]), [Some(true)]);
    }

    #[test]
    fn a_server_that_was_down_at_first_needs_rise_successes() {
        assert_eq!(run(&RULES, &[false, true, true, true]), [None, None, None, Some(true)]);
    }

    #[test]
    fn fall_failures_in_a_row_take_it_down_and_a_success_between_starts_the_count_again() {
        assert_eq!(
            run(&RULES, &[true, false, true, false, false, true, true, false, true, true, true]),
            [Some(true), None, None, None, Some(false), None, None, None, None, None, Some(true)]
        );
    }

    #[test]
    fn rise_and_fall_of_one_act_on_the_first_result() {
        let rules = Rules { interval_ms: 100, fall: 1, rise: 1 };
        assert_eq!(run(&rules, &[false, true, false, true]), [None, Some(true), Some(false), Some(true)]);
    }

    #[test]
    fn checks_never_start_later_than_the_interval_and_not_in_step() {
        let mut offsets = std::collections::BTreeSet::new();
        for index in 0..64 {
            let mut check = Check::new(index, Nanos::ZERO);
            assert!(check.due() <= Nanos::from_ms(STAGGER_MS_MAX));
            for _ in 0..20 {
                let started = check.due();
                check.record(&RULES, started, started, true);
                let gap_ms = check.due().since(started) / 1_000_000;
                assert!((1000..=2000).contains(&gap_ms), "{gap_ms}");
            }
            offsets.insert(check.due().0 / 20_000_000);
        }
        assert!(offsets.len() > 32, "64 servers fall into only {} slots of 20 ms", offsets.len());
    }

    #[test]
    fn a_check_that_takes_longer_than_the_interval_is_followed_by_a_pause() {
        let mut check = Check::new(0, Nanos::ZERO);
        check.record(&RULES, Nanos::ZERO, Nanos::from_ms(9000), false);
        assert_eq!(check.due(), Nanos::from_ms(9000 + GAP_MS_MIN));
    }

    #[test]
    fn many_servers_start_within_the_stagger_limit() {
        assert_eq!(Check::new(60_000, Nanos::ZERO).due(), Nanos::from_ms(STAGGER_MS_MAX));
    }
}

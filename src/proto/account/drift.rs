//! How far each server's share of its pool's requests is from its share of the weight, over a sliding window.
//!
//! `drift = share / weight share − 1`, where a server's weight share is taken with the weights in force when the requests
//! were placed: a weight that was just changed does not count against anybody. For a server at weight 0 the drift is its
//! share itself. More than [`BADGE_DRIFT`] over at least [`BADGE_DISPATCHES`] requests raises the badge, with the likely
//! cause: what the server went through in the window, or, where it got more than its share, what a server that got less
//! went through.
//!
//! *Invariant*: a round leaves the window whole; counters that go back count as standing still.
//! *Bound and cost*: window / round rounds (60 by default) of 32 bytes per server; a sample is O(servers), a judgement
//! O(rounds × servers). For the control thread, not for a request's path.
//! *Errors*: none.
//! *Source*: the Lifeboat rules, section 7.

use std::collections::VecDeque;

use crate::clock::Nanos;

/// Length of the window, in milliseconds.
pub const WINDOW_MS: u64 = 60_000;
/// Samples closer together than this share a round, in milliseconds.
pub const ROUND_MS: u64 = 1_000;
/// Drift up to this, either way, is nothing to speak of.
pub const BADGE_DRIFT: f64 = 0.10;
/// What sums of fractions may be off by: a tenth is not more than a tenth.
const ROUNDING: f64 = 1e-9;
/// Fewer requests than this in a cohort's window say nothing.
pub const BADGE_DISPATCHES: u64 = 100;

/// One server at the time of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Servers that share one stream of requests: those of a pool and tier. `None`: it is compared with nobody.
    pub cohort: Option<u32>,
    /// Whether drift within its cohort means trouble: not where the algorithm weighs more than weights, or where the
    /// servers differ in what they take.
    pub judged: bool,
    /// Requests sent to it since the process started.
    pub dispatched: u64,
    /// Finite and ≥ 0.
    pub weight: f64,
    /// It is down or benched, or requests failed since the sample before.
    pub erroring: bool,
    /// It runs as many requests as it may.
    pub full: bool,
}

/// Why a server drifts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Erroring,
    AtCapacity,
    WeightZero,
}

impl Cause {
    /// As the state shows it.
    pub const fn name(self) -> &'static str {
        match self {
            Cause::Erroring => "erroring",
            Cause::AtCapacity => "at_capacity",
            Cause::WeightZero => "weight_0",
        }
    }
}

/// What the window says of one server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Drift {
    /// Part of its cohort's requests, 0 to 1; `None`: there were none.
    pub share: Option<f64>,
    /// Part of its cohort's weight now, 0 to 1; `None`: all weights are 0.
    pub weight_share: Option<f64>,
    /// See the module's text; `None` where either share is unknown.
    pub drift: Option<f64>,
    /// As the sample said.
    pub judged: bool,
    pub badge: bool,
    /// Only with a badge; `None`: none of the known causes.
    pub cause: Option<Cause>,
}

/// One server in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    dispatched: u64,
    /// What would have been its part by weight.
    due: f64,
    erroring: bool,
    full: bool,
}

#[derive(Debug)]
struct Round {
    begun: Nanos,
    parts: Vec<Part>,
}

/// See the module's text.
#[derive(Debug)]
pub struct DriftWindow {
    window_ms: u64,
    rounds: VecDeque<Round>,
    /// The newest sample of each server.
    last: Vec<Sample>,
}

impl Default for DriftWindow {
    fn default() -> Self {
        DriftWindow::new(WINDOW_MS)
    }
}

impl DriftWindow {
    /// `window_ms` at least [`ROUND_MS`].
    pub fn new(window_ms: u64) -> Self {
        DriftWindow { window_ms, rounds: VecDeque::new(), last: Vec::new() }
    }

    /// Takes in all servers at `now`, in the order of their ids; there may be more than before, never fewer. All that was sent to
    /// a server before its first sample counts as sent just now: take the first one when the process starts.
    pub fn sample(&mut self, now: Nanos, samples: &[Sample]) {
        if self.rounds.back().is_none_or(|round| now.since(round.begun) >= Nanos::from_ms(ROUND_MS).0) {
            self.rounds.push_back(Round { begun: now, parts: Vec::new() });
        }
        let window_ns = Nanos::from_ms(self.window_ms).0;
        while self.rounds.front().is_some_and(|round| now.since(round.begun) >= window_ns) {
            self.rounds.pop_front();
        }
        let news: Vec<u64> = samples
            .iter()
            .enumerate()
            .map(|(i, sample)| {
                let before = self.last.get(i).map_or(0, |last| last.dispatched);
                sample.dispatched.saturating_sub(before)
            })
            .collect();
        // Requests since the last sample were placed by the weights of then.
        let before = |i: usize, sample: &Sample| self.last.get(i).map_or(sample.weight, |last| last.weight);
        let weights: Vec<f64> = samples.iter().enumerate().map(|(i, sample)| before(i, sample)).collect();
        let mut cohorts: Vec<(u64, f64)> = Vec::new();
        for (i, (sample, dispatched)) in samples.iter().zip(&news).enumerate() {
            let Some(cohort) = sample.cohort else { continue };
            let cohort = cohort as usize;
            if cohorts.len() <= cohort {
                cohorts.resize(cohort + 1, (0, 0.0));
            }
            cohorts[cohort].0 += dispatched;
            cohorts[cohort].1 += weights[i];
        }
        if let Some(round) = self.rounds.back_mut() {
            round.parts.resize(samples.len().max(round.parts.len()), Part::default());
            let parts = round.parts.iter_mut().zip(samples).zip(news).zip(weights);
            for (((part, sample), dispatched), of_then) in parts {
                part.dispatched += dispatched;
                part.erroring |= sample.erroring;
                part.full |= sample.full;
                let Some(cohort) = sample.cohort else { continue };
                let (all, weight) = cohorts[cohort as usize];
                if weight > 0.0 {
                    part.due += all as f64 * of_then / weight;
                }
            }
        }
        self.last.clear();
        self.last.extend_from_slice(samples);
    }

    /// The window's word on every server, in the order of the samples.
    pub fn judge(&self) -> Vec<Drift> {
        let mut sums = vec![Sum::default(); self.last.len()];
        for part in self.rounds.iter().flat_map(|round| round.parts.iter().enumerate()) {
            let (i, part) = part;
            if let Some(sum) = sums.get_mut(i) {
                sum.dispatched += part.dispatched;
                sum.due += part.due;
                sum.erroring += u32::from(part.erroring);
                sum.full += u32::from(part.full);
            }
        }
        let cohorts = self.last.iter().filter_map(|sample| sample.cohort).max().map_or(0, |max| max + 1);
        let mut totals = vec![Total::default(); cohorts as usize];
        for (sample, sum) in self.last.iter().zip(&sums) {
            let Some(cohort) = sample.cohort else { continue };
            let total = &mut totals[cohort as usize];
            total.dispatched += sum.dispatched;
            total.weight += sample.weight;
            if sum.drift() < -BADGE_DRIFT && total.cause.is_none() {
                total.cause = sum.trouble();
            }
        }
        let judged = self.last.iter().zip(&sums).map(|(sample, sum)| {
            let Some(cohort) = sample.cohort else { return Drift::default() };
            let total = &totals[cohort as usize];
            let share = (total.dispatched > 0).then(|| sum.dispatched as f64 / total.dispatched as f64);
            let weight_share = (total.weight > 0.0).then(|| sample.weight / total.weight);
            let drift = share.zip(weight_share).map(|(share, _)| match sample.weight > 0.0 {
                true => sum.drift(),
                false => share,
            });
            let badge = sample.judged
                && total.dispatched >= BADGE_DISPATCHES
                && drift.is_some_and(|drift| drift.abs() > BADGE_DRIFT + ROUNDING);
            let cause = match badge {
                false => None,
                true if sample.weight == 0.0 => Some(Cause::WeightZero),
                true if drift < Some(0.0) => sum.trouble(),
                true => total.cause,
            };
            Drift { share, weight_share, drift, judged: sample.judged, badge, cause }
        });
        judged.collect()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    dispatched: u64,
    due: f64,
    /// Rounds in which it was so.
    erroring: u32,
    full: u32,
}

impl Sum {
    /// 0 where nothing was due: a server that had no weight in any round owes nothing.
    fn drift(&self) -> f64 {
        if self.due > 0.0 { self.dispatched as f64 / self.due - 1.0 } else { 0.0 }
    }

    /// What it went through most.
    fn trouble(&self) -> Option<Cause> {
        match (self.erroring, self.full) {
            (0, 0) => None,
            (erroring, full) if erroring >= full => Some(Cause::Erroring),
            _ => Some(Cause::AtCapacity),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Total {
    dispatched: u64,
    weight: f64,
    /// Of the first server that got less than its part.
    cause: Option<Cause>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(weight: f64, dispatched: u64) -> Sample {
        Sample { cohort: Some(0), judged: true, dispatched, weight, erroring: false, full: false }
    }

    fn at(s: u64) -> Nanos {
        Nanos::from_ms(s * 1000)
    }

    /// The window after samples one second apart.
    fn run(rounds: &[&[Sample]]) -> DriftWindow {
        let mut window = DriftWindow::default();
        for (s, samples) in rounds.iter().enumerate() {
            window.sample(at(s as u64), samples);
        }
        window
    }

    #[test]
    fn shares_like_weights_drift_by_nothing() {
        let window = run(&[&[server(3.0, 3), server(1.0, 1)], &[server(3.0, 300), server(1.0, 100)]]);
        let judged = window.judge();
        let expected = Drift {
            share: Some(0.75),
            weight_share: Some(0.75),
            drift: Some(0.0),
            judged: true,
            badge: false,
            cause: None,
        };
        assert_eq!(judged[0], expected);
        assert_eq!((judged[1].share, judged[1].drift), (Some(0.25), Some(0.0)));
    }

    /// Lifeboat rules: "More than 10 % under steady load (≥ 100 dispatches in the window) raises the badge, with the likely
    /// cause".
    #[test]
    fn the_badge_needs_more_than_a_tenth_and_a_hundred_requests() {
        let judge = |a: u64, b: u64| {
            let mut window = run(&[&[server(1.0, 0), server(1.0, 0)]]);
            window.sample(at(1), &[Sample { full: true, ..server(1.0, a) }, server(1.0, b)]);
            window.judge()
        };
        let drifts = |judged: &[Drift]| judged.iter().map(|d| (d.badge, d.cause)).collect::<Vec<_>>();
        assert_eq!(
            drifts(&judge(44, 56)),
            [(true, Some(Cause::AtCapacity)), (true, Some(Cause::AtCapacity))]
        );
        assert_eq!(
            drifts(&judge(45, 55)),
            [(false, None), (false, None)],
            "a tenth is not more than a tenth"
        );
        assert_eq!(drifts(&judge(43, 56)), [(false, None), (false, None)], "99 requests");
        assert_eq!(judge(0, 0)[0], Drift { weight_share: Some(0.5), judged: true, ..Drift::default() });
        // Too much without anybody who went short for a known reason.
        let mut window = run(&[&[server(1.0, 0), server(1.0, 0)], &[server(1.0, 30), server(1.0, 90)]]);
        assert_eq!(drifts(&window.judge()), [(true, None), (true, None)]);
        window.sample(at(2), &[Sample { erroring: true, ..server(1.0, 30) }, server(1.0, 90)]);
        assert_eq!(drifts(&window.judge())[1], (true, Some(Cause::Erroring)));
    }

    #[test]
    fn the_drift_of_weight_zero_is_its_share() {
        let window = run(&[
            &[server(1.0, 0), server(1.0, 0)],
            &[server(0.0, 100), server(1.0, 100)],
            &[server(0.0, 110), server(1.0, 190)],
        ]);
        let judged = window.judge();
        assert_eq!((judged[0].share, judged[0].weight_share), (Some(110.0 / 300.0), Some(0.0)));
        assert_eq!(judged[0].drift, judged[0].share);
        assert_eq!((judged[0].badge, judged[0].cause), (true, Some(Cause::WeightZero)));
        // 100 of 200 by the old weights and all of 100 by the new: it got 190 of 200.
        assert_eq!(judged[1].drift, Some(190.0 / 200.0 - 1.0));
        assert!(!judged[1].badge, "that its neighbour was drained is no fault of its own");
    }

    #[test]
    fn what_is_over_leaves_the_window_and_close_samples_share_a_round() {
        let mut window = run(&[&[server(1.0, 0), server(1.0, 0)], &[server(1.0, 500), server(1.0, 0)]]);
        for tenth in 0..600 {
            let now = Nanos::from_ms(1000 + tenth * 100);
            window.sample(now, &[server(1.0, 500), server(1.0, 0)]);
            assert_eq!(window.judge()[0].share, Some(1.0), "{tenth}");
        }
        assert!(window.rounds.len() <= 60, "{}", window.rounds.len());
        window.sample(at(61), &[server(1.0, 500), server(1.0, 0)]);
        assert_eq!(window.judge()[0].share, None);
    }

    #[test]
    fn cohorts_are_apart_and_some_are_only_shown() {
        let apart = |cohort, judged, dispatched| Sample { cohort, judged, ..server(1.0, dispatched) };
        let window = run(&[
            &[
                apart(Some(0), true, 0),
                apart(Some(1), false, 0),
                apart(Some(1), false, 0),
                apart(None, true, 0),
            ],
            &[
                apart(Some(0), true, 900),
                apart(Some(1), false, 900),
                apart(Some(1), false, 100),
                apart(None, true, 7),
            ],
        ]);
        let judged = window.judge();
        assert_eq!((judged[0].share, judged[0].drift), (Some(1.0), Some(0.0)));
        assert_eq!(judged[1].share, Some(0.9));
        assert!(judged[1].drift.is_some_and(|drift| (drift - 0.8).abs() < 1e-9) && !judged[1].badge);
        assert_eq!(judged[3], Drift::default());
    }

    #[test]
    fn servers_may_come_and_counters_go_back() {
        let mut window = run(&[&[server(1.0, 50)], &[server(1.0, 49), server(1.0, 25)]]);
        assert_eq!((window.judge()[0].share, window.judge()[1].share), (Some(2.0 / 3.0), Some(1.0 / 3.0)));
        window.sample(at(2), &[server(1.0, 50), server(1.0, 26)]);
        assert_eq!(
            (window.judge()[0].share, window.judge()[1].share),
            (Some(51.0 / 77.0), Some(26.0 / 77.0))
        );
    }
}

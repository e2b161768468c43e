//! Figures and their spread: histograms of one run, medians over repeats, ratios pair by pair.
//!
//! *Invariant*: a spread is over whole runs, never over requests; a ratio is taken within one repeat, between runs that
//! stood next to each other in time, and only then summarised.
//! *Bound and cost*: a histogram is about 200 KiB, three significant digits from 1 ns to 60 s; recording is O(1).

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::clock::S;

/// Longest time recorded as such; longer ones count as this.
pub const RECORD_NS_MAX: u64 = 60 * S;

/// Times of one run.
#[derive(Clone, Debug)]
pub struct Times(Histogram<u64>);

/// What is published of [`Times`]; all in nanoseconds, within 0.1 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    pub count: u64,
    pub mean_ns: f64,
    pub p50_ns: u64,
    pub p90_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub max_ns: u64,
}

impl Times {
    pub fn new() -> Times {
        Times(
            Histogram::new_with_bounds(1, RECORD_NS_MAX, 3)
                .expect("1 to 60e9 with three digits is a valid range"),
        )
    }

    pub fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns.max(1));
    }

    /// `None` when nothing was recorded.
    pub fn quantiles(&self) -> Option<Quantiles> {
        (!self.0.is_empty()).then(|| Quantiles {
            count: self.0.len(),
            mean_ns: self.0.mean(),
            p50_ns: self.0.value_at_quantile(0.5),
            p90_ns: self.0.value_at_quantile(0.9),
            p99_ns: self.0.value_at_quantile(0.99),
            p999_ns: self.0.value_at_quantile(0.999),
            max_ns: self.0.max(),
        })
    }
}

/// One figure over the repeats.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub repeats: usize,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// First and third quartile, by linear interpolation between the sorted values.
    pub q1: f64,
    pub q3: f64,
}

/// `None` when there is no value, or one that is no number.
pub fn spread(values: &[f64]) -> Option<Spread> {
    if values.is_empty() || values.iter().any(|v| !v.is_finite()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |q: f64| {
        let place = q * (sorted.len() - 1) as f64;
        let below = place.floor() as usize;
        let above = place.ceil() as usize;
        sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
    };
    Some(Spread {
        repeats: sorted.len(),
        median: at(0.5),
        min: sorted[0],
        max: sorted[sorted.len() - 1],
        q1: at(0.25),
        q3: at(0.75),
    })
}

/// Ratios `a / b` repeat by repeat; a repeat where either is missing, or `b` is zero, has none.
pub fn ratios(a: &[Option<f64>], b: &[Option<f64>]) -> Vec<f64> {
    pairs(a, b, |a, b| (b != 0.0).then_some(a / b))
}

/// Differences `a - b` repeat by repeat.
pub fn differences(a: &[Option<f64>], b: &[Option<f64>]) -> Vec<f64> {
    pairs(a, b, |a, b| Some(a - b))
}

fn pairs(a: &[Option<f64>], b: &[Option<f64>], join: impl Fn(f64, f64) -> Option<f64>) -> Vec<f64> {
    a.iter().zip(b).filter_map(|(a, b)| join((*a)?, (*b)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quartiles() {
        let s = spread(&[4.0, 1.0, 3.0, 2.0]).expect("four values");
        assert_eq!((s.median, s.min, s.max, s.q1, s.q3, s.repeats), (2.5, 1.0, 4.0, 1.75, 3.25, 4));
        let one = spread(&[7.0]).expect("one value");
        assert_eq!((one.median, one.min, one.max, one.q1, one.q3), (7.0, 7.0, 7.0, 7.0, 7.0));
        let odd = spread(&[9.0, 1.0, 5.0]).expect("three values");
        assert_eq!((odd.median, odd.q1, odd.q3), (5.0, 3.0, 7.0));
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn ratios_are_per_repeat() {
        // The machine got twice slower in the second repeat: the ratio of each pair is still 0.8, though the ratio of
        // medians of unpaired runs need not be.
        let (a, b) = ([Some(8.0), Some(16.0), None], [Some(10.0), Some(20.0), Some(10.0)]);
        assert_eq!(ratios(&a, &b), [0.8, 0.8]);
        assert_eq!(differences(&a, &b), [-2.0, -4.0]);
        assert_eq!(ratios(&[Some(1.0)], &[Some(0.0)]), [] as [f64; 0]);
    }

    #[test]
    fn quantiles_are_within_a_thousandth() {
        let mut times = Times::new();
        assert_eq!(times.quantiles(), None);
        for us in 1..=1000 {
            times.record(us * 1_000);
        }
        let q = times.quantiles().expect("recorded");
        let near =
            |got: u64, wanted: f64| assert!((got as f64 / wanted - 1.0).abs() < 0.001, "{got} {wanted}");
        assert_eq!(q.count, 1000);
        near(q.p50_ns, 500e3);
        near(q.p90_ns, 900e3);
        near(q.p99_ns, 990e3);
        near(q.p999_ns, 999e3);
        near(q.max_ns, 1000e3);
        times.record(u64::MAX);
        assert!(times.quantiles().expect("recorded").max_ns >= RECORD_NS_MAX);
    }
}

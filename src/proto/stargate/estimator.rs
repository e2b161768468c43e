//! The input rate of a slot, measured on its own requests: the plain mean of all samples, and the greatest of them.
//!
//! There is no window and no decay: affinity weights are made of the mean, and must not wander while nothing is learnt.
//!
//! *Invariant*: what is published changes only on a sample, and only once there are [`SAMPLES_MIN`] of the present generation.
//! *Bound and cost*: a few instructions per sample; the mean is kept by steps, so that no sum grows.
//! *Source*: the Stargate rules, section 6.2; Welford, "Note on a method for calculating corrected sums of squares and products", 1962.

use super::estimate::is_rate;

/// Samples before anything is published.
pub const SAMPLES_MIN: u64 = 5;
/// Shorter times are not measured, or count as this long.
const SAMPLE_NS_MIN: u64 = 10_000_000;

/// See the module's text. Rates in tokens per second; 0: none published.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimator {
    samples: u64,
    mean_so_far: f64,
    greatest_so_far: f64,
    mean: f64,
    greatest: f64,
}

impl Estimator {
    /// One that starts from a rate as if it had been measured as often as is needed.
    pub fn with_prior(tps: f64) -> Estimator {
        Estimator { samples: SAMPLES_MIN, mean_so_far: tps, greatest_so_far: tps, mean: tps, greatest: tps }
    }

    /// Counts a sample; what is no rate counts as nothing. Whether anything published changed.
    pub fn note(&mut self, tps: f64) -> bool {
        if !is_rate(tps) {
            return false;
        }
        self.samples += 1;
        self.mean_so_far += (tps - self.mean_so_far) / self.samples as f64;
        self.greatest_so_far = self.greatest_so_far.max(tps);
        if self.samples < SAMPLES_MIN || !is_rate(self.mean_so_far) {
            return false;
        }
        let before = (self.mean, self.greatest);
        (self.mean, self.greatest) = (self.mean_so_far, self.greatest_so_far);
        before != (self.mean, self.greatest)
    }

    /// A new generation of the model: samples start over, what is published stays until there are enough of them.
    pub fn restart(&mut self) {
        (self.samples, self.mean_so_far, self.greatest_so_far) = (0, 0.0, 0.0);
    }

    pub fn mean(&self) -> f64 {
        self.mean
    }

    pub fn greatest(&self) -> f64 {
        self.greatest
    }
}

/// The sample of a request that read `tokens` in `ns`. `None`: too few or too short to tell. The times of embeddings are short by
/// nature, and count as ten milliseconds at least.
pub fn sample(tokens: u64, ns: u64, embeddings: bool) -> Option<f64> {
    if tokens == 0 || !embeddings && ns < SAMPLE_NS_MIN {
        return None;
    }
    Some(tokens as f64 / (ns.max(SAMPLE_NS_MIN) as f64 / 1e9))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(samples: &[f64]) -> Estimator {
        let mut estimator = Estimator::default();
        for tps in samples {
            estimator.note(*tps);
        }
        estimator
    }

    #[test]
    fn the_mean_of_all_samples_is_published_from_the_fifth_on() {
        let mut estimator = noted(&[10.0, 20.0, 30.0, 40.0]);
        assert_eq!((estimator.mean(), estimator.greatest()), (0.0, 0.0));
        assert!(estimator.note(50.0));
        assert_eq!((estimator.mean(), estimator.greatest()), (30.0, 50.0));
        assert!(estimator.note(90.0));
        assert_eq!((estimator.mean(), estimator.greatest()), (40.0, 90.0));
    }

    #[test]
    fn what_is_no_rate_counts_as_nothing() {
        let mut estimator = noted(&[10.0, 20.0, 30.0, 40.0]);
        for tps in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(!estimator.note(tps));
        }
        estimator.note(50.0);
        assert_eq!(estimator.mean(), 30.0);
        assert!(!estimator.note(30.0), "neither figure moved");
    }

    #[test]
    fn a_prior_is_five_samples() {
        let mut estimator = Estimator::with_prior(100.0);
        assert_eq!(estimator.mean(), 100.0);
        estimator.note(160.0);
        assert_eq!((estimator.mean(), estimator.greatest()), (110.0, 160.0));
    }

    #[test]
    fn a_new_generation_keeps_what_is_published_until_it_knows_better() {
        let mut estimator = noted(&[100.0; 6]);
        estimator.restart();
        for _ in 0..4 {
            assert!(!estimator.note(10.0));
            assert_eq!((estimator.mean(), estimator.greatest()), (100.0, 100.0));
        }
        assert!(estimator.note(10.0));
        assert_eq!((estimator.mean(), estimator.greatest()), (10.0, 10.0));
    }

    #[test]
    fn short_times_are_no_samples_but_of_embeddings() {
        assert_eq!(sample(100, 9_999_999, false), None);
        assert_eq!(sample(100, 10_000_000, false), Some(10_000.0));
        assert_eq!(sample(0, 10_000_000, false), None);
        assert_eq!(sample(100, 1, true), Some(10_000.0));
        assert_eq!(sample(0, 1, true), None);
        assert_eq!(sample(500, 2_000_000_000, true), Some(250.0));
    }
}

//! Seeded random numbers for choices between equals.
//!
//! The generator steps a 64-bit counter by an odd constant and mixes it (SplitMix64); a number below a bound comes from the upper half of
//! a widening product, with the few draws thrown away that would favour some results.
//!
//! *Invariant*: the same seed gives the same numbers; every result below a bound is equally likely.
//! *Bound and cost*: some 15 instructions per number, no allocation. Not for secrets.
//! *Source*: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014; Lemire, "Fast random integer generation
//! in an interval", 2019.

/// See the module's text.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub const fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// Any 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number from 0 to `bound - 1`. `bound` is above 0.
    pub const fn below(&mut self, bound: usize) -> usize {
        debug_assert!(bound > 0);
        let bound = bound as u64;
        let mut product = self.next_u64() as u128 * bound as u128;
        if (product as u64) < bound {
            // So many of the lowest products have one fellow too many.
            let surplus = bound.wrapping_neg() % bound;
            while (product as u64) < surplus {
                product = self.next_u64() as u128 * bound as u128;
            }
        }
        (product >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_replays_and_the_published_sequence_comes_out() {
        let mut rng = Rng::new(1_234_567);
        // The sequence that the generator's public test vectors list for this seed.
        assert_eq!(rng.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next_u64(), 3_203_168_211_198_807_973);
        let (mut a, mut b) = (Rng::new(7), Rng::new(7));
        assert!((0..100).all(|n| a.below(n + 1) == b.below(n + 1)));
    }

    #[test]
    fn every_result_below_a_bound_is_as_likely_as_the_others() {
        let mut rng = Rng::new(42);
        for bound in [1, 2, 3, 7, 64] {
            let mut hits = vec![0_i32; bound];
            for _ in 0..10_000 * bound {
                hits[rng.below(bound)] += 1;
            }
            // Five standard deviations of 10,000 expected hits.
            assert!(hits.iter().all(|hits| (hits - 10_000).abs() < 500), "{bound}: {hits:?}");
        }
    }
}

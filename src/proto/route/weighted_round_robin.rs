//! `weighted-round-robin`: in proportion to weight, smoothly.
//!
//! Formula: the group's [`Wheel`], turned once. Tie-break: the group's order. State: the wheel. Worst case: O(candidates); where
//! nobody is left out but servers without room, the router turns the wheel itself, which takes O(log candidates).
//! *Source*: the Lifeboat rules, section 4.

use super::policy::{Candidate, Choice, Policy};
use super::wheel::Wheel;
use crate::proto::backend::catalog::Algorithm;

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub struct WeightedRoundRobin;

impl Policy for WeightedRoundRobin {
    fn choose(&self, wheel: &mut Wheel, candidates: &mut [Candidate]) -> Choice {
        let chosen = candidates[wheel.turn_among(candidates)];
        Choice {
            backend: chosen.backend,
            slot: chosen.slot,
            turned: candidates.len() > 1,
            by: Algorithm::WeightedRoundRobin,
        }
    }
}

//! `least-connections`: the least busy server, relative to its weight.
//!
//! Formula: least `in_flight / weight`, compared by cross-multiplication, so equal ratios are equal. Tie-break: the smooth
//! wheel over those that tie, so that an idle pool is spread by weight instead of first-listed-wins. The wheel's turns are
//! not reported to peers: load figures already steer them apart. State: the wheel. Worst case: O(candidates).
//! *Source*: the Lifeboat rules, section 4.

use super::policy::{Candidate, Choice, Policy};
use super::wheel::Wheel;
use crate::proto::backend::catalog::Algorithm;

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub struct LeastConnections;

impl Policy for LeastConnections {
    fn choose(&self, wheel: &mut Wheel, candidates: &mut [Candidate]) -> Choice {
        let compare = |a: &Candidate, b: &Candidate| {
            let (a_cross, b_cross) = (
                u128::from(a.in_flight) * u128::from(b.weight),
                u128::from(b.in_flight) * u128::from(a.weight),
            );
            a_cross.cmp(&b_cross)
        };
        let mut least = candidates[0];
        for candidate in &candidates[1..] {
            if compare(candidate, &least).is_lt() {
                least = *candidate;
            }
        }
        // Those that tie go to the front, in the group's order.
        let mut ties = 0;
        for i in 0..candidates.len() {
            if compare(&candidates[i], &least).is_eq() {
                candidates.swap(ties, i);
                ties += 1;
            }
        }
        let chosen = candidates[wheel.turn_among(&candidates[..ties])];
        Choice { backend: chosen.backend, slot: chosen.slot, turned: false, by: Algorithm::LeastConnections }
    }
}

//! `sticky-session`: the same server for the same session.
//!
//! Formula: weighted rendezvous hashing. Every member of the group draws `u` in (0, 1) from the session's key and its own
//! name; the largest `ln(u) / weight` wins (a member with twice the weight wins twice as often). Weights are the last
//! non-zero ones, so draining a server moves its sessions only while it drains, and adding or losing one moves only its
//! own share. Tie-break: the group's order. A winner that is not eligible or has no room, or a request without a key:
//! [`LeastConnections`] among the rest. State: none. Worst case: O(members), one logarithm each where weights differ.
//!
//! The hash is unsalted and depends on names and weights alone: restarts and other routers choose alike.
//! *Source*: the Lifeboat rules, section 4; Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.

use super::least_connections::LeastConnections;
use super::policy::{Candidate, Choice, Policy};
use super::wheel::Wheel;
use crate::proto::backend::catalog::Algorithm;
use crate::proto::ids::BackendId;

/// A server that sessions are spread over, eligible or not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Member {
    pub backend: BackendId,
    /// Hash of its name.
    pub name: u64,
    /// Last non-zero weight, above 0.
    pub weight: f64,
}

/// The stable hash of a server's name: FNV-1a over its bytes, mixed.
pub fn hash_name(name: &str) -> u64 {
    let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    mix(fnv)
}

/// A bijection of 64 bits in which every input bit reaches every output bit (the finaliser of splitmix64).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The member that the key belongs to. `None`: there are none.
pub fn owner(key: u64, members: &[Member]) -> Option<BackendId> {
    let uniform = members.iter().all(|member| member.weight == members[0].weight);
    let mut best: Option<(f64, BackendId)> = None;
    for member in members {
        let draw = mix(key ^ member.name) >> 11;
        // In (0, 1): 53 bits, and half a step so that neither end is met.
        let u = (draw as f64 + 0.5) / (1u64 << 53) as f64;
        // ln rises with u: with equal weights it changes nothing.
        let score = if uniform { u } else { u.ln() / member.weight };
        if best.is_none_or(|(most, _)| score > most) {
            best = Some((score, member.backend));
        }
    }
    best.map(|(_, backend)| backend)
}

/// See the module's text.
#[derive(Clone, Copy, Debug)]
pub struct StickySession<'a> {
    /// The first eight bytes of the key's digest; `None`: the request has no session.
    pub key: Option<u64>,
    pub members: &'a [Member],
}

impl Policy for StickySession<'_> {
    fn choose(&self, wheel: &mut Wheel, candidates: &mut [Candidate]) -> Choice {
        let owner = self.key.and_then(|key| owner(key, self.members));
        match candidates.iter().find(|candidate| Some(candidate.backend) == owner) {
            Some(chosen) => Choice {
                backend: chosen.backend,
                slot: chosen.slot,
                turned: false,
                by: Algorithm::StickySession,
            },
            None => LeastConnections.choose(wheel, candidates),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(weights: &[f64]) -> Vec<Member> {
        (0..)
            .zip(weights)
            .map(|(i, weight)| Member {
                backend: BackendId(i),
                name: hash_name(&format!("gpu{i}")),
                weight: *weight,
            })
            .collect()
    }

    fn owners(members: &[Member], keys: u64) -> Vec<BackendId> {
        (0..keys).map(|key| owner(mix(key), members).unwrap()).collect()
    }

    #[test]
    fn keys_are_spread_by_weight() {
        let members = members(&[1.0, 2.0, 0.5, 0.5]);
        let owners = owners(&members, 40_000);
        for member in &members {
            let got = owners.iter().filter(|owner| **owner == member.backend).count() as f64;
            let expected = 10_000.0 * member.weight;
            assert!((got / expected - 1.0).abs() < 0.05, "{member:?}: {got} of {expected}");
        }
    }

    #[test]
    fn a_new_member_takes_only_its_own_share() {
        let before = members(&[1.0, 3.0, 1.0]);
        let after = members(&[1.0, 3.0, 1.0, 5.0]);
        let (old, new) = (owners(&before, 20_000), owners(&after, 20_000));
        let moved: Vec<_> =
            old.iter().zip(&new).filter(|(old, new)| old != new).map(|(_, new)| new).collect();
        assert!(moved.iter().all(|to| **to == BackendId(3)), "nobody moves between those that stay");
        assert!((9_000..=11_000).contains(&moved.len()), "its share is a half: {}", moved.len());
    }

    /// Fixed figures: a change of the hash would move every session of every deployment.
    #[test]
    fn choices_are_the_same_for_ever() {
        let equal: Vec<u16> = owners(&members(&[1.0; 5]), 12).iter().map(|id| id.0).collect();
        let unequal: Vec<u16> = owners(&members(&[1.0, 2.0, 4.0]), 12).iter().map(|id| id.0).collect();

        assert_eq!((hash_name("gpu0"), hash_name("")), (NAMES.0, NAMES.1));
        assert_eq!((equal, unequal), (EQUAL.to_vec(), UNEQUAL.to_vec()));
    }

    const NAMES: (u64, u64) = (13_314_237_713_601_510_707, 17_665_956_581_633_026_203);
    const EQUAL: [u16; 12] = [3, 2, 1, 0, 0, 4, 2, 0, 0, 1, 2, 2];
    const UNEQUAL: [u16; 12] = [2, 2, 1, 0, 2, 2, 2, 0, 2, 1, 2, 2];

    #[test]
    fn an_owner_that_is_not_shown_means_least_connections() {
        let members = members(&[1.0, 1.0]);
        let key = (0..).map(mix).find(|key| owner(*key, &members) == Some(BackendId(0)));
        let mut wheel = Wheel::new(2);
        wheel.set_weights(&[1, 1]);
        let candidate = |slot, in_flight| Candidate {
            backend: BackendId(slot),
            slot,
            weight: 1,
            in_flight,
            matched: 0,
            continues: false,
            prefill_tokens: 0,
        };
        let policy = StickySession { key, members: &members };
        let choice = policy.choose(&mut wheel, &mut [candidate(0, 9), candidate(1, 0)]);
        assert_eq!((choice.backend, choice.by), (BackendId(0), Algorithm::StickySession));
        let choice = policy.choose(&mut wheel, &mut [candidate(1, 0)]);
        assert_eq!((choice.backend, choice.by), (BackendId(1), Algorithm::LeastConnections));
        let keyless = StickySession { key: None, members: &members };
        let choice = keyless.choose(&mut wheel, &mut [candidate(0, 9), candidate(1, 0)]);
        assert_eq!((choice.backend, choice.by), (BackendId(1), Algorithm::LeastConnections));
    }
}

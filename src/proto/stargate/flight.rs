//! A request on its way through the router: what it asked, where it was, where it is.
//!
//! The router keeps all of them in one place, linked by the slot they are live in, in the order in which they went out; a request's
//! session holds a [`Flight`], which is no more than its number.
//!
//! *Invariant*: a number that a [`Flight`] holds is taken. A flight is linked to the slot of its present dispatch, and to no other.
//! *Bound and cost*: space for the most there were at once, with the buffers they grew; every operation O(1).
//! *Source*: the Stargate rules, sections 4.5, 5 and 7.

use std::cell::RefCell;
use std::rc::Rc;

use super::balancer::Balancer;
use super::layout::SlotId;
use super::live::{Marks, Phase};
use super::request::{Dispatched, Wish};
use super::retry::Tries;
use crate::clock::Nanos;
use crate::proto::config::lb_config::Entry;
use crate::proto::ids::{BackendId, Ticket};

/// No flight, no target.
pub const NOBODY: u32 = u32::MAX;

/// A request that was accepted. It has to be ended by `TargetRouter::handle_end`.
#[must_use]
#[derive(Debug)]
pub struct Flight {
    /// [`NOBODY`] once it has ended.
    pub(super) index: u32,
}

impl Drop for Flight {
    fn drop(&mut self) {
        debug_assert!(
            self.index == NOBODY || std::thread::panicking(),
            "a flight was dropped and not ended: what it holds stays counted"
        );
    }
}

/// What log lines tell of a flight. Numbers that are not known are 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    /// Canonical name.
    pub algorithm: &'static str,
    /// Empty where the algorithm has none.
    pub comparator: &'static str,
    /// Clusters of the target when the last choice was made.
    pub num_candidates: u32,
    pub sample_count_configured: u32,
    pub sample_count_effective: u32,
    /// Of the last choice; see [`Dispatched::rank_depth`].
    pub rank_depth: u32,
    pub selected_after_kv_skip: bool,
    /// Evaluations after the first, waiting included.
    pub routing_retry_attempts: u32,
    /// Dispatches so far, reconnects not counted.
    pub attempts: u32,
    pub connect_retries: u32,
    pub request_retries: u32,
    pub failed_backends: u32,
    /// Where it went last.
    pub dispatched: Option<Dispatched>,
    /// The routing expression was compiled for this request: rebuilt (true) or built.
    pub expression_built: Option<bool>,
}

/// One configuration for one target: what it says, and what its load balancer remembers.
#[derive(Debug)]
pub struct Method {
    pub entry: Entry,
    pub balancer: RefCell<Balancer>,
}

impl Method {
    pub fn new(entry: Entry, routing_key: &[u8], model: &[u8]) -> Method {
        let balancer = RefCell::new(Balancer::new(&entry, routing_key, model));
        Method { entry, balancer }
    }
}

/// Where a flight is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// With the router's caller.
    Open,
    /// In its target's queue.
    Waiting(Ticket),
    /// Live in a slot.
    Sent(Sent),
}

/// A present dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    pub slot: SlotId,
    pub phase: Phase,
}

/// See the module's text.
#[derive(Debug)]
pub struct State {
    /// [`NOBODY`]: a target that nobody ever served.
    pub target: u32,
    /// `None`: as `target`, without an expression.
    pub method: Option<Rc<Method>>,
    pub arrived: Nanos,
    pub input_tokens: u64,
    /// As far as they are counted.
    pub tokens: u64,
    pub priority: u32,
    pub max_wait_ms: Option<u64>,
    pub slo_ms: Option<u64>,
    pub embeddings: bool,
    pub affinity_key: Vec<u8>,
    /// Names of clusters that failed it.
    pub excluded: Vec<u32>,
    /// Servers that failed it.
    pub failed: Vec<BackendId>,
    /// The cluster whose next server comes first, because one of it failed.
    pub stay: Option<u32>,
    /// The name of the cluster that it was sent to last.
    pub cluster: u32,
    /// Its answered ticket, while nobody has fetched the answer.
    pub woken: Option<Ticket>,
    pub tries: Tries,
    pub stage: Stage,
    /// Of the present dispatch.
    pub marks: Marks,
    pub sent: Nanos,
    pub head: Nanos,
    pub output: Nanos,
    /// When routing began; `NEVER`: it has not, or a first choice was made.
    pub routing_began: Nanos,
    /// Looked at before.
    pub evaluated: bool,
    /// Neighbours in its slot by the time of dispatch, or [`NOBODY`].
    newer: u32,
    older: u32,
    taken: bool,
    pub facts: Facts,
}

impl State {
    fn new() -> State {
        State {
            target: NOBODY,
            method: None,
            arrived: Nanos::ZERO,
            input_tokens: 0,
            tokens: 0,
            priority: 0,
            max_wait_ms: None,
            slo_ms: None,
            embeddings: false,
            affinity_key: Vec::new(),
            excluded: Vec::new(),
            failed: Vec::new(),
            stay: None,
            cluster: NOBODY,
            woken: None,
            tries: Tries::default(),
            stage: Stage::Open,
            marks: Marks::default(),
            sent: Nanos::ZERO,
            head: Nanos::NEVER,
            output: Nanos::NEVER,
            routing_began: Nanos::NEVER,
            evaluated: false,
            newer: NOBODY,
            older: NOBODY,
            taken: false,
            facts: Facts::default(),
        }
    }

    /// The cluster of that name failed it.
    pub fn exclude(&mut self, name: u32) {
        if !self.excluded.contains(&name) {
            self.excluded.push(name);
        }
    }

    fn begin(&mut self, wish: &Wish<'_>, target: u32) {
        self.target = target;
        self.arrived = wish.arrived;
        self.input_tokens = wish.input_tokens;
        self.tokens = wish.input_tokens.min(super::live::LIVE_TOKENS_MAX);
        self.priority = wish.priority;
        self.max_wait_ms = wish.max_wait_ms;
        self.slo_ms = wish.slo_ms;
        self.embeddings = wish.embeddings;
        self.affinity_key.clear();
        self.affinity_key.extend_from_slice(wish.affinity_key);
        self.excluded.clear();
        self.failed.clear();
        self.stay = None;
        self.cluster = NOBODY;
        self.woken = None;
        self.tries = Tries::new(wish.arrived, wish.retry_budget_ms);
        self.stage = Stage::Open;
        self.routing_began = Nanos::NEVER;
        self.evaluated = false;
        self.facts = Facts::default();
        self.taken = true;
    }
}

/// All flights of a shard.
#[derive(Debug, Default)]
pub struct Flights {
    states: Vec<State>,
    free: Vec<u32>,
}

impl Flights {
    pub fn open(&mut self, wish: &Wish<'_>, target: u32) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.states.push(State::new());
            self.states.len() as u32 - 1
        });
        self.states[index as usize].begin(wish, target);
        index
    }

    /// The flight is over, and linked to no slot.
    pub fn close(&mut self, index: u32) {
        let state = &mut self.states[index as usize];
        debug_assert!(state.taken && state.stage == Stage::Open);
        state.method = None;
        state.taken = false;
        self.free.push(index);
    }

    pub fn of(&self, index: u32) -> &State {
        let state = &self.states[index as usize];
        debug_assert!(state.taken, "flight {index} has ended");
        state
    }

    pub fn of_mut(&mut self, index: u32) -> &mut State {
        let state = &mut self.states[index as usize];
        debug_assert!(state.taken, "flight {index} has ended");
        state
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.states.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The flight is the last that went out to a slot, whose newest one so far is `newest`.
    pub fn link(&mut self, index: u32, newest: &mut u32) {
        let second = std::mem::replace(newest, index);
        let state = &mut self.states[index as usize];
        (state.newer, state.older) = (NOBODY, second);
        if second != NOBODY {
            self.states[second as usize].newer = index;
        }
    }

    pub fn unlink(&mut self, index: u32, newest: &mut u32) {
        let state = &self.states[index as usize];
        let (newer, older) = (state.newer, state.older);
        match newer {
            NOBODY => *newest = older,
            newer => self.states[newer as usize].older = older,
        }
        if older != NOBODY {
            self.states[older as usize].newer = newer;
        }
    }

    /// The flights that are live in a slot, from its newest one on.
    pub fn newest_first(&self, newest: u32) -> impl Iterator<Item = &State> {
        let next = |index: u32| (index != NOBODY).then(|| &self.states[index as usize]);
        std::iter::successors(next(newest), move |state| next(state.older))
    }

    /// Changes those flights, from the newest on, while `change` returns true.
    pub fn each_newest_first(&mut self, newest: u32, mut change: impl FnMut(&mut State) -> bool) {
        let mut index = newest;
        while index != NOBODY {
            let state = &mut self.states[index as usize];
            index = state.older;
            if !change(state) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flights_of_a_slot_are_linked_in_the_order_they_went_out() {
        let mut flights = Flights::default();
        let mut newest = NOBODY;
        let indices: Vec<u32> = (0..4)
            .map(|priority| {
                let index = flights.open(&Wish { priority, ..Wish::default() }, 0);
                flights.link(index, &mut newest);
                index
            })
            .collect();
        let order = |flights: &Flights, newest| -> Vec<u32> {
            flights.newest_first(newest).map(|state| state.priority).collect()
        };
        assert_eq!(order(&flights, newest), [3, 2, 1, 0]);
        for (gone, left) in [(1, &[3, 2, 0][..]), (3, &[2, 0]), (0, &[2]), (2, &[])] {
            flights.unlink(indices[gone], &mut newest);
            flights.close(indices[gone]);
            assert_eq!(order(&flights, newest), left);
        }
        assert!(flights.is_empty() && newest == NOBODY);
        let reused = flights.open(&Wish::default(), 3);
        assert!((reused as usize) < 4, "space is used again");
    }
}

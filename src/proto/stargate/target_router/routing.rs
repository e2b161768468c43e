//! The choice itself, the counting that follows from it, and who is looked at when something changes.

use std::ops::Bound;

use super::super::balancer::{Ask, Choice, expected_queue_ms};
use super::super::estimate::has_capacity;
use super::super::figures::ROUTING_DURATION_NS;
use super::super::flight::{NOBODY, Sent, Stage, State};
use super::super::layout::SlotId;
use super::super::live::Phase;
use super::super::request::{Dispatched, Refusal};
use super::super::waiting::{could_take, limit};
use super::{RECHECK_MS, TargetRouter};
use crate::clock::Nanos;
use crate::proto::ids::Ticket;

/// What a look at a request comes to.
pub(super) enum Verdict {
    Dispatch(Dispatched),
    /// To be looked at again then, or when something changes.
    Wait(Nanos),
    Refuse(Refusal),
}

fn ask<'a>(state: &'a State, now: Nanos, excluded: &'a [usize]) -> Ask<'a> {
    Ask {
        input_tokens: state.input_tokens,
        priority: state.priority,
        elapsed_ns: now.since(state.arrived),
        slo_ms: state.slo_ms,
        affinity_key: &state.affinity_key,
        excluded,
        shut: &[],
    }
}

impl TargetRouter {
    /// Looks at a request that is not at a server.
    pub(super) fn evaluate(&mut self, now: Nanos, index: u32) -> Verdict {
        let state = self.flights.of_mut(index);
        state.facts.routing_retry_attempts += u32::from(state.evaluated);
        state.evaluated = true;
        if state.target == NOBODY {
            return Verdict::Refuse(Refusal::NoTarget);
        }
        let target_at = state.target as usize;
        let target = &mut self.targets[target_at];
        target.refresh(&mut self.table, &self.flights, &mut self.scratch);
        let state = self.flights.of_mut(index);
        if let Some(name) = state.stay.take() {
            let group = target.position(name).map(|at| (at, &mut target.groups[at]));
            match group.and_then(|(at, group)| Some((at, group.next(&state.failed, &self.table)?))) {
                Some((at, slot)) => return Verdict::Dispatch(self.dispatch(now, index, at, slot)),
                None => state.exclude(name),
            }
        }
        let Some(method) = state.method.clone() else { return Verdict::Refuse(Refusal::NoTarget) };
        let mut balancer = method.balancer.borrow_mut();
        loop {
            let state = self.flights.of_mut(index);
            let target = &mut self.targets[target_at];
            self.excluded.clear();
            self.excluded.extend(state.excluded.iter().filter_map(|name| target.position(*name)));
            if self.excluded.len() == target.clusters.len() {
                return Verdict::Refuse(self.nobody_left(now, index));
            }
            let version = target.version(&method.entry);
            let ask = ask(state, now, &self.excluded);
            if let Err(work) = balancer.admit(&method.entry, &target.clusters, &ask) {
                let counts = &mut target.counts;
                match work.capacity {
                    true => counts.input_work_capacity_unavailable += 1,
                    false => counts.input_work_limit_exceeded += 1,
                }
                return Verdict::Refuse(Refusal::InputWork { capacity: work.capacity });
            }
            let candidates = target.clusters.len() as u32;
            let choice = balancer.choose(&method.entry, &target.clusters, version, &ask, &mut self.rng);
            let until = limit(state.arrived, state.max_wait_ms);
            let after = |ns: u64| Nanos(now.0.saturating_add(ns.max(1))).min(until);
            state.facts.num_candidates = candidates;
            match choice {
                Choice::Selected(selection) => {
                    let group = &mut target.groups[selection.index];
                    let Some(slot) = group.next(&state.failed, &self.table) else {
                        // All its servers have failed the request.
                        state.exclude(group.name);
                        continue;
                    };
                    state.facts.rank_depth = selection.rank_depth;
                    state.facts.selected_after_kv_skip = selection.after_kv_skip;
                    state.facts.sample_count_effective =
                        if state.facts.sample_count_configured > 0 { selection.considered } else { 0 };
                    let counts = target.counts.of(method.entry.method());
                    match selection.rank_depth {
                        1 => counts.primary += 1,
                        _ => counts.fallback += 1,
                    }
                    counts.kv_free_token_fallback += u64::from(selection.after_kv_skip);
                    return Verdict::Dispatch(self.dispatch(now, index, selection.index, slot));
                }
                Choice::Wait { ns } if now < until => return Verdict::Wait(after(ns)),
                // It has said how long things may take to change.
                Choice::Unavailable if now < until && state.max_wait_ms.is_some() => {
                    return Verdict::Wait(balancer.bounds_open_ns().map_or(until, after));
                }
                Choice::Wait { .. } | Choice::Unavailable => return Verdict::Refuse(Refusal::Unavailable),
            }
        }
    }

    /// Why a request gets nothing where there is no cluster, or none that has not failed it.
    fn nobody_left(&mut self, now: Nanos, index: u32) -> Refusal {
        let state = self.flights.of(index);
        let target = &mut self.targets[state.target as usize];
        if !state.failed.is_empty() {
            let reason = self.reasons.id("no_eligible_backend");
            target.counts.exhaust(reason);
            return Refusal::Unavailable;
        }
        match target.is_known(now, self.options.grace_ms) {
            true => Refusal::Unavailable,
            false => Refusal::NoTarget,
        }
    }

    /// Counts a request into a slot of that cluster of its target.
    fn dispatch(&mut self, now: Nanos, index: u32, cluster: usize, slot: SlotId) -> Dispatched {
        let state = self.flights.of_mut(index);
        let target = &mut self.targets[state.target as usize];
        let row = self.table.row_mut(slot);
        let dispatched = Dispatched {
            backend: row.slot.as_ref().expect("chosen slots are laid out").backend,
            slot,
            // As it is without the request itself.
            expected_queue_ms: expected_queue_ms(&target.clusters[cluster].stats, state.priority),
            rank_depth: state.facts.rank_depth.max(1),
        };
        if state.routing_began != Nanos::NEVER {
            let took_ns = now.since(std::mem::replace(&mut state.routing_began, Nanos::NEVER));
            target.counts.routing_duration_ns.note(&ROUTING_DURATION_NS, took_ns);
        }
        state.cluster = target.groups[cluster].name;
        state.stage = Stage::Sent(Sent { slot, phase: Phase::Pending });
        (state.sent, state.head, state.output) = (now, Nanos::NEVER, Nanos::NEVER);
        state.facts.attempts += 1;
        state.facts.dispatched = Some(dispatched);
        let (priority, tokens) = (state.priority, state.tokens);
        state.marks = row.live.begin(priority, tokens);
        if row.reported.is_some() {
            row.reserved.add(priority, tokens);
        }
        self.flights.link(index, &mut row.newest);
        self.note_change(slot, priority);
        dispatched
    }

    /// Counts a request out of its slot.
    pub(super) fn take_back(&mut self, _now: Nanos, index: u32) {
        let state = self.flights.of_mut(index);
        let Stage::Sent(Sent { slot, phase }) = state.stage else { return };
        state.stage = Stage::Open;
        let (priority, tokens, marks) = (state.priority, state.tokens, state.marks);
        let row = self.table.row_mut(slot);
        if row.reported.is_some() && marks.reports == row.live.marks().reports {
            row.reserved.remove(priority, tokens);
        }
        row.live.end(priority, tokens, phase, marks);
        self.flights.unlink(index, &mut row.newest);
        self.note_change(slot, priority);
    }

    pub(super) fn advance(&mut self, index: u32, slot: SlotId, from: Phase, to: Phase) {
        let state = self.flights.of_mut(index);
        state.stage = Stage::Sent(Sent { slot, phase: to });
        let (priority, tokens) = (state.priority, state.tokens);
        self.table.row_mut(slot).live.advance(priority, tokens, from, to);
        self.note_change(slot, priority);
    }

    /// This shard's live requests in a slot have changed.
    fn note_change(&mut self, slot: SlotId, priority: u32) {
        self.mark(slot);
        self.untold(slot, priority);
    }

    /// What is known of a slot has changed.
    pub(super) fn mark(&mut self, slot: SlotId) {
        for (target, cluster) in &self.table.row(slot).memberships {
            let at = *target;
            let target = &mut self.targets[at as usize];
            target.mark(*cluster);
            if !target.touched && !target.waiting.is_empty() {
                target.touched = true;
                self.touched.push(at);
            }
        }
    }

    /// Those who wait for a target are to be looked at.
    pub(super) fn touch(&mut self, at: u32) {
        let target = &mut self.targets[at as usize];
        if !target.touched {
            target.touched = true;
            self.touched.push(at);
        }
    }

    /// Looks at those whom changes since the last call may help, in the order of their arrival.
    pub(super) fn settle(&mut self, now: Nanos) {
        while let Some(at) = self.touched.pop() {
            let target = &mut self.targets[at as usize];
            target.touched = false;
            target.refresh(&mut self.table, &self.flights, &mut self.scratch);
            if target.waiting.is_empty() {
                target.eased.clear();
                (target.changed, target.moved) = (false, false);
                continue;
            }
            if target.changed || !target.eased.is_empty() {
                self.look_at_all(now, at);
            }
            let target = &mut self.targets[at as usize];
            if std::mem::take(&mut target.moved) && !target.recheck && !target.waiting.is_empty() {
                target.recheck = true;
                self.rechecks.push_back((now.plus_ms(RECHECK_MS), at));
            }
        }
    }

    /// Looks at all who wait for a target and whom what has eased may help.
    fn look_at_all(&mut self, now: Nanos, at: u32) {
        let target = &mut self.targets[at as usize];
        let all = std::mem::take(&mut target.changed);
        let mut eased = std::mem::take(&mut self.eased);
        eased.clear();
        eased.append(&mut target.eased);
        let mut last = Bound::Unbounded;
        loop {
            let target = &mut self.targets[at as usize];
            target.refresh(&mut self.table, &self.flights, &mut self.scratch);
            let room =
                |cluster: &u32| has_capacity(&target.clusters[*cluster as usize].stats, target.max_queued);
            if !all && !eased.iter().any(room) {
                // What had eased is taken: it helps nobody else.
                break;
            }
            let Some(next) = target.waiting.range((last, Bound::Unbounded)).next().copied() else { break };
            last = Bound::Excluded(next);
            if all || self.may_use(now, next.1, at, &eased) {
                self.look(now, next.1);
            }
        }
        self.eased = eased;
    }

    /// Whether one of the clusters that eased could be the choice for a waiting request.
    fn may_use(&mut self, now: Nanos, ticket: Ticket, at: u32, eased: &[u32]) -> bool {
        let Some((index, false)) = self.waiting.find(ticket) else { return false };
        let target = &mut self.targets[at as usize];
        let state = self.flights.of(index);
        let Some(method) = &state.method else { return true };
        self.excluded.clear();
        self.excluded.extend(state.excluded.iter().filter_map(|name| target.position(*name)));
        let ask = ask(state, now, &self.excluded);
        let version = target.version(&method.entry);
        eased.iter().any(|cluster| {
            let cluster = *cluster as usize;
            could_take(&method.entry, &target.clusters[cluster], &ask)
                && method.balancer.borrow_mut().concerns(
                    &method.entry,
                    &target.clusters,
                    version,
                    &ask,
                    cluster,
                )
        })
    }

    /// Looks at a waiting request; it goes on, or it waits for longer.
    pub(super) fn look(&mut self, now: Nanos, ticket: Ticket) {
        let Some((index, false)) = self.waiting.find(ticket) else { return };
        let routed = match self.evaluate(now, index) {
            Verdict::Wait(due) => return self.waiting.postpone(ticket, due),
            Verdict::Dispatch(dispatched) => Ok(dispatched),
            Verdict::Refuse(refusal) => {
                self.flights.of_mut(index).stage = Stage::Open;
                Err(refusal)
            }
        };
        let state = self.flights.of_mut(index);
        state.woken = Some(ticket);
        self.targets[state.target as usize].waiting.remove(&(state.arrived, ticket));
        self.waiting.answer(ticket, routed);
    }
}

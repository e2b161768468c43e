//! What the control thread and the peers tell, and what is told to them.

use super::super::layout::{Layout, Slot, SlotId};
use super::super::stats::{Reported, Scraped};
use super::TargetRouter;
use crate::clock::Nanos;
use crate::proto::ids::{BackendId, ShardId};
use crate::proto::message::{Message, Update, Urgency};

impl TargetRouter {
    /// `Catalog`, `Health`, `Forget`, `RoundTrip`, `Reported` and `Scraped`; others are ignored.
    pub fn handle_update(&mut self, now: Nanos, update: &Update) {
        match update {
            Update::Catalog(catalog) => self.handle_layout(now, &catalog.stargate),
            Update::Health { backend, up } => self.handle_health(now, *backend, *up),
            Update::RoundTrip { backend, rtt_ns } => self.handle_round_trip(now, *backend, *rtt_ns),
            Update::Reported { slot, reported } => self.handle_report(now, *slot, reported),
            Update::Scraped { slot, scraped } => self.handle_scrape(now, *slot, scraped),
            Update::Forget { backend } => {
                // Its models begin anew.
                for slot in self.table.server_mut(*backend).slots.clone() {
                    self.table.row_mut(slot).estimator.restart();
                }
            }
            Update::Ready(_) | Update::Phase(_) | Update::Report { .. } => {}
        }
    }

    /// The slots there are from now on.
    pub fn handle_layout(&mut self, now: Nanos, layout: &Layout) {
        let mut affected = Vec::new();
        for (id, slot) in (0..).map(SlotId).zip(&layout.slots) {
            let Some(before) = self.table.configure(id, slot) else { continue };
            let before = before.map(|before| self.targets_of(&before)).unwrap_or_default();
            let after = self.targets_of(slot);
            for at in before.iter().filter(|at| !slot.advertised || !after.contains(at)) {
                self.targets[*at as usize].withdraw(now, id);
            }
            for at in after.iter().filter(|_| slot.advertised) {
                self.targets[*at as usize].advertise(id);
            }
            affected.extend(before);
            affected.extend(after);
        }
        self.rebuild(now, affected);
    }

    /// The targets that a slot is for.
    fn targets_of(&mut self, slot: &Slot) -> Vec<u32> {
        if slot.routing_keys.is_empty() {
            return vec![self.target("", &slot.model)];
        }
        slot.routing_keys.iter().map(|key| self.target(key, &slot.model)).collect()
    }

    /// The target's number, which it gets here at the latest.
    fn target(&mut self, routing_key: &str, model: &str) -> u32 {
        if let Some(at) = self.find(routing_key.as_bytes(), model.as_bytes()) {
            return at;
        }
        let at = self.targets.len() as u32;
        self.targets.push(super::Target::new(routing_key, model));
        self.index.insert(self.key.as_slice().into(), at);
        at
    }

    fn rebuild(&mut self, now: Nanos, mut affected: Vec<u32>) {
        affected.sort_unstable();
        affected.dedup();
        for at in affected {
            let target = &mut self.targets[at as usize];
            let names = &mut self.names;
            let gone = target.rebuild(at, &mut self.table, |name| {
                let next = names.len() as u32;
                match names.get(name) {
                    Some(number) => *number,
                    None => *names.entry(name.into()).or_insert(next),
                }
            });
            if gone {
                self.expressions.forget(target.routing_key.as_bytes(), target.model.as_bytes());
            }
            (self.active_models, self.models_without_key) = (None, None);
            self.touch(at);
        }
        self.settle(now);
    }

    /// The health checks' word on a server.
    pub fn handle_health(&mut self, now: Nanos, backend: BackendId, up: bool) {
        let server = self.table.server_mut(backend);
        let was_ready = server.is_ready();
        server.up = Some(up);
        if server.is_ready() != was_ready {
            self.rebuild_of(now, backend);
        }
    }

    /// A health check of a server succeeded, and took so long.
    pub fn handle_round_trip(&mut self, now: Nanos, backend: BackendId, rtt_ns: u64) {
        let server = self.table.server_mut(backend);
        let was_ready = server.is_ready();
        if server.rtt_ns.replace(rtt_ns) == Some(rtt_ns) {
            return;
        }
        if server.is_ready() != was_ready {
            return self.rebuild_of(now, backend);
        }
        for slot in server.slots.clone() {
            self.mark(slot);
        }
        self.settle(now);
    }

    fn rebuild_of(&mut self, now: Nanos, backend: BackendId) {
        let mut affected = Vec::new();
        for id in self.table.server_mut(backend).slots.clone() {
            if let Some(slot) = self.table.row(id).slot.clone() {
                affected.extend(self.targets_of(&slot));
            }
        }
        self.rebuild(now, affected);
    }

    /// A registration reports of one model.
    pub fn handle_report(&mut self, now: Nanos, slot: SlotId, reported: &Reported) {
        self.table.report(slot, reported);
        self.mark(slot);
        self.settle(now);
    }

    /// An engine's own figures of one model.
    pub fn handle_scrape(&mut self, now: Nanos, slot: SlotId, scraped: &Scraped) {
        self.table.scrape(slot, scraped);
        let row = self.table.row_mut(slot);
        let mut noted = Vec::new();
        // Only what went out before the engine was asked can be in its answer.
        self.flights.each_newest_first(row.newest, |state| {
            if state.sent <= scraped.asked {
                return false;
            }
            row.live.note_since_scrape(state.priority, &mut state.marks);
            noted.push(state.priority);
            true
        });
        for priority in noted {
            self.untold(slot, priority);
        }
        self.mark(slot);
        self.settle(now);
    }

    /// `Live`, `Since` and `Sample` of another shard; others are ignored.
    pub fn handle_message(&mut self, now: Nanos, from: ShardId, message: &Message) {
        let slot = match message {
            Message::Live { slot, priority, work } => {
                self.table.ensure(*slot);
                self.table.row_mut(*slot).live.hear(from, *priority, work).then_some(*slot)
            }
            Message::Since { slot, priority, since } => {
                self.table.ensure(*slot);
                self.table.row_mut(*slot).live.hear_since(from, *priority, since).then_some(*slot)
            }
            Message::Sample { slot, tps } => {
                self.note_sample(*slot, *tps);
                None
            }
            _ => None,
        };
        if let Some(slot) = slot {
            self.mark(slot);
        }
        self.settle(now);
    }

    pub(super) fn note_sample(&mut self, slot: SlotId, tps: f64) {
        self.table.ensure(slot);
        if self.table.row_mut(slot).estimator.note(tps) {
            self.mark(slot);
        }
    }

    /// The peers lack this shard's figure.
    pub(super) fn untold(&mut self, slot: SlotId, priority: u32) {
        // Alone there is nobody to tell.
        if self.options.shards == 1 {
            return;
        }
        let row = self.table.row_mut(slot);
        if row.untold.is_empty() {
            self.untold.push(slot);
        }
        if !row.untold.contains(&priority) {
            row.untold.push(priority);
        }
    }

    /// A lazy message that found its ring full: its figure is sent again with the next flush.
    pub fn handle_dropped(&mut self, message: &Message) {
        if let Message::Live { slot, priority, .. } | Message::Since { slot, priority, .. } = message {
            self.untold(*slot, *priority);
        }
    }

    /// Some figure has changed and was not flushed.
    pub fn needs_flush(&self) -> bool {
        !self.untold.is_empty()
    }

    /// Puts out the figures that changed since the last flush. Call every tick while [`TargetRouter::needs_flush`]. O(changes × shards).
    pub fn flush(&mut self, _now: Nanos) {
        while let Some(slot) = self.untold.pop() {
            while let Some(priority) = self.table.row_mut(slot).untold.pop() {
                let live = &self.table.row(slot).live;
                let (work, since) = (live.own(priority), live.own_since(priority));
                self.tell_peers(Message::Live { slot, priority, work }, Urgency::Lazy);
                // Without a report or a scrape there is nothing that it would be since.
                if since.reports > 0 || since.scrapes > 0 {
                    self.tell_peers(Message::Since { slot, priority, since }, Urgency::Lazy);
                }
            }
        }
    }

    pub(super) fn tell_peers(&mut self, message: Message, urgency: Urgency) {
        for shard in 0..self.options.shards {
            if shard != self.options.me.index() {
                self.messages.push_back((ShardId(shard as u8), message, urgency));
            }
        }
    }

    /// Models with an active server under any routing key: sorted, unique.
    pub fn active_models(&mut self) -> &[Box<str>] {
        let targets = &self.targets;
        self.active_models.get_or_insert_with(|| models(targets.iter()))
    }

    /// Models with an active server for requests without a routing key: sorted, unique.
    pub fn models_without_key(&mut self) -> &[Box<str>] {
        let targets = &self.targets;
        self.models_without_key
            .get_or_insert_with(|| models(targets.iter().filter(|target| target.routing_key.is_empty())))
    }
}

fn models<'a>(targets: impl Iterator<Item = &'a super::Target>) -> Vec<Box<str>> {
    let active = targets.filter(|target| !target.clusters.is_empty());
    let mut models: Vec<Box<str>> = active.map(|target| target.model.clone()).collect();
    models.sort_unstable();
    models.dedup();
    models
}

//! What only the home shard does: it grants, queues, recalls and denies for all shards.
//!
//! A request that finds nothing spare is lined up, and the servers of its group are recalled; the answers bring free permits
//! or the certainty that there are none. Whatever makes a permit spare serves the oldest request that may use it.
//!
//! *Invariant*: after every call, no request waits for a live server that has a spare permit.
//! *Source*: the Lifeboat rules, section 3.

use super::{Decision, Dispatcher, Wanted, room};
use crate::clock::Nanos;
use crate::proto::admission::ledger::{LeaseRules, Ledger};
use crate::proto::admission::queue::{Place, Queue};
use crate::proto::backend::table::{BackendTable, Row};
use crate::proto::error::Rejection;
use crate::proto::ids::{BackendId, GroupId, ShardId, Ticket};
use crate::proto::message::{Message, Tried, Urgency};
use crate::proto::route::policy::Choice;
use crate::proto::route::router::Router;

/// Home's own state.
#[derive(Debug)]
pub(super) struct Home {
    ledger: Ledger,
    queue: Queue,
    /// Groups of which the peers were told that nothing can be admitted.
    told_full: Vec<GroupId>,
    /// Groups that turned a request away since the last flush.
    turned_away: Vec<GroupId>,
    /// Messages about groups of a catalog that has not come here yet, in order.
    early: Vec<(ShardId, Message)>,
}

impl Home {
    pub(super) fn new(shards: usize, rules: LeaseRules) -> Self {
        Home {
            ledger: Ledger::new(shards, rules),
            queue: Queue::default(),
            told_full: Vec::new(),
            turned_away: Vec::new(),
            early: Vec::new(),
        }
    }

    /// Whether that server can take a request: it has no gate, or a permit to spare.
    pub(super) fn has_room(&self, id: BackendId, row: &Row) -> bool {
        !row.gated() || self.ledger.spare(id) > 0
    }

    pub(super) fn books(&self) -> (&Ledger, &Queue) {
        (&self.ledger, &self.queue)
    }

    /// Nothing can be admitted for that group just now: every live server is exhausted and the queue is at its bound.
    pub(super) fn is_full(&self, group: GroupId, router: &Router, table: &BackendTable) -> bool {
        if !self.queue.at_bound(group) {
            return false;
        }
        let routed = router.group(group).expect("the caller has the group from the router");
        routed.has_live() && routed.live().all(|id| table.row(id).gated() && self.ledger.exhausted(id))
    }

    pub(super) fn may_be_full(&self) -> bool {
        !self.turned_away.is_empty()
    }
}

impl Dispatcher {
    fn at_home(&mut self) -> &mut Home {
        self.home.as_mut().expect("called on the home shard only")
    }

    /// A request of the home shard itself.
    pub(super) fn request_at_home(&mut self, now: Nanos, group: GroupId, wanted: &Wanted<'_>) -> Decision {
        let tried = wanted.tried;
        if let Some(choice) = self.choose_spare(group, wanted) {
            self.router.note_request(group, choice.backend, &self.table, room(self.home.as_ref()));
            self.take_own(choice.backend);
            return Decision::Dispatch(self.place(now, choice.backend, choice.by, 0));
        }
        let ticket = self.wait(now, group, wanted, None);
        let place = Place { since: now, shard: ShardId::HOME, ticket };
        match self.line_up(group, place, tried) {
            Ok(()) => Decision::Wait(ticket),
            Err(rejection) => {
                self.answer(ticket, None);
                self.waiting.remove(ticket);
                Decision::Reject(rejection)
            }
        }
    }

    /// The algorithm's choice among servers with a spare permit. Prompt blocks are those of the request at hand, or none.
    fn choose_spare(&mut self, group: GroupId, wanted: &Wanted<'_>) -> Option<Choice> {
        let affinity = wanted.affinity(&self.memory, &self.ends);
        self.router.pick(group, wanted.tried, affinity, &self.table, room(self.home.as_ref()))
    }

    /// Leases a permit to the home shard itself.
    fn take_own(&mut self, backend: BackendId) {
        let row = self.table.row_mut(backend);
        if row.gated() {
            row.held += 1;
            self.at_home().ledger.lease(backend, ShardId::HOME, 1);
        }
    }

    /// Recalls the group's servers and lines the request up, or says why not.
    fn line_up(&mut self, group: GroupId, place: Place, tried: Tried) -> Result<(), Rejection> {
        self.recall_group(group);
        let peers = self.shards > 1;
        let home = self.at_home();
        if home.queue.at_bound(group) {
            if peers && !home.turned_away.contains(&group) {
                home.turned_away.push(group);
            }
            if !self.may_come(group, tried) {
                return Err(self.at_home().queue.rejection(group));
            }
        }
        self.at_home().queue.push(group, place, tried);
        Ok(())
    }

    /// Some live server of the group that was not tried may yet turn out to have a free permit.
    fn may_come(&self, group: GroupId, tried: Tried) -> bool {
        let ledger = &self.home.as_ref().expect("called on the home shard only").ledger;
        let routed = self.router.group(group).expect("groups with requests exist");
        routed.live().any(|id| !ledger.exhausted(id) && !tried.contains(id))
    }

    fn recall_group(&mut self, group: GroupId) {
        let mut i = 0;
        while let Some(backend) = self.router.live_at(group, i) {
            self.recall(backend);
            i += 1;
        }
    }

    fn recall(&mut self, backend: BackendId) {
        let home = self.home.as_mut().expect("called on the home shard only");
        let messages = &mut self.messages;
        home.ledger.recall(backend, |shard| {
            messages.push_back((shard, Message::Recall { backend }, Urgency::Wake));
        });
    }

    pub(super) fn message_at_home(&mut self, now: Nanos, from: ShardId, message: Message) {
        if self.home.is_none() {
            return;
        }
        match message {
            Message::Ask { group, .. } | Message::Withdraw { group, .. }
                if self.router.group(group).is_none() =>
            {
                self.at_home().early.push((from, message));
            }
            Message::Ask { ticket, group, preferred, tried, since } => {
                let place = Place { since, shard: from, ticket };
                self.asked(group, place, preferred, tried);
            }
            Message::Withdraw { ticket, group, since } => {
                self.withdraw_at_home(now, from, ticket, group, since)
            }
            Message::Return { backend, count, recalled } => {
                if recalled {
                    self.at_home().ledger.note_answer(backend, from);
                }
                self.given_back(now, backend, from, count);
                if recalled {
                    self.settle_groups(backend);
                }
            }
            Message::Adopt { backend, count } => {
                self.table.ensure(backend);
                self.table.note_change(backend);
                self.at_home().ledger.adopt(backend, from, count);
                if self.at_home().ledger.recall_late(backend, from) {
                    self.messages.push_back((from, Message::Recall { backend }, Urgency::Wake));
                }
                self.enforce_ceiling(backend);
                self.serve(now, backend);
                self.settle_groups(backend);
            }
            _ => {}
        }
    }

    /// Another shard asks for a permit.
    fn asked(&mut self, group: GroupId, place: Place, preferred: Option<BackendId>, tried: Tried) {
        let wanted = preferred
            .filter(|id| self.router.is_live(group, *id) && !tried.contains(*id) && self.spare(*id) > 0);
        // The asker turned its own wheel for `preferred`; another choice turns the wheel here.
        let plain = Wanted { tried, ..Wanted::default() };
        let mut other = || self.choose_spare(group, &plain).map(|choice| choice.backend);
        if let Some(backend) = wanted.or_else(&mut other) {
            let count = self.at_home().ledger.batch(backend);
            self.grant_to(place, backend, count);
            return;
        }
        let lined_up = if self.router.has_untried(group, tried) {
            self.line_up(group, place, tried)
        } else {
            Err(Rejection::NoHealthyServer)
        };
        if let Err(rejection) = lined_up {
            self.messages.push_back((
                place.shard,
                Message::Deny { ticket: place.ticket, rejection },
                Urgency::Wake,
            ));
        }
    }

    /// Permits that can be granted, as this book has it.
    fn spare(&self, backend: BackendId) -> u32 {
        let ledger = &self.home.as_ref().expect("called on the home shard only").ledger;
        if self.table.row(backend).gated() { ledger.spare(backend) } else { u32::MAX }
    }

    /// Leases `count` permits to another shard, the first for the request at `place`.
    fn grant_to(&mut self, place: Place, backend: BackendId, count: u32) {
        let Place { shard, ticket, .. } = place;
        self.table.note_change(backend);
        let ledger = &mut self.at_home().ledger;
        ledger.lease(backend, shard, count);
        let recalled = ledger.recalling(backend);
        if recalled {
            ledger.note_told(backend, shard);
        }
        self.messages.push_back((shard, Message::Grant { ticket, backend, count, recalled }, Urgency::Wake));
    }

    pub(super) fn withdraw_at_home(
        &mut self,
        now: Nanos,
        shard: ShardId,
        ticket: Ticket,
        group: GroupId,
        since: Nanos,
    ) {
        let removed = self.at_home().queue.remove(group, Place { since, shard, ticket });
        if removed && self.at_home().queue.is_empty(group) {
            let mut i = 0;
            while let Some(backend) = self.router.live_at(group, i) {
                self.serve(now, backend);
                i += 1;
            }
        }
    }

    /// A shard gave `count` permits back.
    pub(super) fn given_back(&mut self, now: Nanos, backend: BackendId, shard: ShardId, count: u32) {
        if count > 0 {
            self.table.note_change(backend);
            self.at_home().ledger.give_back(backend, shard, count);
        }
        self.serve(now, backend);
    }

    /// Gives the spare permits of a server to those who wait longest, and eases its recall when nobody is left.
    fn serve(&mut self, now: Nanos, backend: BackendId) {
        while self.spare(backend) > 0 {
            let queue = &self.home.as_ref().expect("called on the home shard only").queue;
            let groups = self.router.groups_of(backend).iter();
            let live = groups.filter(|(group, slot)| self.router.carries(*group, *slot));
            let heads =
                live.filter_map(|(group, _)| queue.oldest(*group, backend).map(|place| (place, *group)));
            let Some((place, group)) = heads.min() else {
                self.ease(backend);
                return;
            };
            self.at_home().queue.remove(group, place);
            if place.shard == ShardId::HOME {
                self.take_own(backend);
                let granted = self.grant(now, place.ticket, backend);
                assert!(granted, "a request of this shard is in the queue only while it waits");
            } else {
                self.grant_to(place, backend, 1);
            }
        }
    }

    /// Nobody who may use this server waits.
    fn ease(&mut self, backend: BackendId) {
        let home = self.home.as_mut().expect("called on the home shard only");
        if !home.ledger.recalling(backend) {
            return;
        }
        let messages = &mut self.messages;
        home.ledger.ease(backend, |shard| {
            messages.push_back((shard, Message::Ease { backend }, Urgency::Quiet));
        });
    }

    /// After a recall's answer: where nothing can come any more, provisional requests are denied.
    fn settle_groups(&mut self, backend: BackendId) {
        let mut i = 0;
        while let Some((group, _)) = self.router.group_of(backend, i) {
            self.settle(group);
            i += 1;
        }
    }

    fn settle(&mut self, group: GroupId) {
        if !self.at_home().queue.has_provisional(group) {
            return;
        }
        let live = self.router.group(group).expect("groups with requests exist").has_live();
        let hope = self.may_come(group, Tried::default());
        let provisional =
            self.home.as_ref().expect("called on the home shard only").queue.provisional_of(group);
        let hopeless: Vec<Place> = provisional
            .filter(|(_, tried)| !hope || (!tried.is_empty() && !self.may_come(group, *tried)))
            .map(|(place, _)| place)
            .collect();
        for place in hopeless {
            self.at_home().queue.remove(group, place);
            let rejection =
                if live { self.at_home().queue.rejection(group) } else { Rejection::NoHealthyServer };
            if place.shard == ShardId::HOME {
                self.refuse(place.ticket, rejection);
            } else {
                let deny = Message::Deny { ticket: place.ticket, rejection };
                self.messages.push_back((place.shard, deny, Urgency::Wake));
            }
        }
    }

    /// A server came or went: who waits may use it, or has to stop hoping for it.
    pub(super) fn eligibility_at_home(&mut self, now: Nanos, backend: BackendId) {
        let mut i = 0;
        while let Some((group, _)) = self.router.group_of(backend, i) {
            i += 1;
            self.look_again(now, group);
        }
    }

    fn look_again(&mut self, now: Nanos, group: GroupId) {
        if self.at_home().queue.is_empty(group) {
            return;
        }
        // The bench may spare other servers of the group now, so all of them.
        let mut i = 0;
        while let Some(backend) = self.router.live_at(group, i) {
            self.serve(now, backend);
            i += 1;
        }
        if !self.at_home().queue.is_empty(group) {
            self.recall_group(group);
            self.settle(group);
        }
    }

    /// More is out than a lowered ceiling allows: no free permit may stay anywhere.
    fn enforce_ceiling(&mut self, backend: BackendId) {
        if self.at_home().ledger.overdrawn(backend) {
            self.recall(backend);
        }
    }

    /// The catalog of `self` is new; the first `known` servers were there before; `opened` have a ceiling for the first time.
    pub(super) fn catalog_at_home(&mut self, now: Nanos, known: usize, opened: &[(BackendId, u32)]) {
        let home = self.home.as_mut().expect("called on the home shard only");
        for i in 0..self.catalog.servers.len() {
            let id = BackendId(i as u16);
            home.ledger.set_ceiling(id, self.table.row(id).ceiling, i < known);
        }
        for (id, count) in opened {
            home.ledger.adopt(*id, ShardId::HOME, *count);
        }
        home.queue.configure(&self.catalog);
        for group in self.router.ids() {
            self.at_home().queue.promote(group);
        }
        for i in 0..self.catalog.servers.len() {
            self.enforce_ceiling(BackendId(i as u16));
            self.serve(now, BackendId(i as u16));
        }
        for group in self.router.ids() {
            self.look_again(now, group);
        }
        for (from, message) in std::mem::take(&mut self.at_home().early) {
            self.message_at_home(now, from, message);
        }
    }

    /// Tells the peers at once of groups that can admit again.
    pub(super) fn note_full(&mut self) {
        let Some(home) = &self.home else { return };
        if home.told_full.is_empty() {
            return;
        }
        let mut told = std::mem::take(&mut self.at_home().told_full);
        told.retain(|group| {
            let home = self.home.as_ref().expect("checked above");
            let full = home.is_full(*group, &self.router, &self.table);
            if !full {
                self.tell_peers(Message::Full { group: *group, full }, Urgency::Quiet);
            }
            full
        });
        self.at_home().told_full = told;
    }

    /// Tells the peers, at most once a tick and group, that nothing can be admitted.
    pub(super) fn tell_full(&mut self) {
        if self.home.is_none() {
            return;
        }
        for group in std::mem::take(&mut self.at_home().turned_away) {
            let home = self.home.as_ref().expect("checked above");
            let full = home.is_full(group, &self.router, &self.table);
            if full && !home.told_full.contains(&group) {
                self.at_home().told_full.push(group);
                self.tell_peers(Message::Full { group, full }, Urgency::Quiet);
            }
        }
    }
}

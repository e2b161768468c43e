//! A shard's side of the leases: permits come, are recalled, and go home when idle.
//!
//! *Invariant*: while a server is recalled this shard holds no free permit of it.
//! *Bound and cost*: O(1); a sweep O(servers), every `LEASE_IDLE_MS` while something is free.

use super::Dispatcher;
use crate::clock::Nanos;
use crate::limits::LEASE_IDLE_MS;
use crate::proto::ids::{BackendId, Ticket};
use crate::proto::message::{Message, Urgency};

impl Dispatcher {
    /// On a shard that is not home: permits came.
    pub(super) fn granted(
        &mut self,
        now: Nanos,
        ticket: Ticket,
        backend: BackendId,
        count: u32,
        recalled: bool,
    ) {
        self.table.ensure(backend);
        let row = self.table.row_mut(backend);
        row.held += count;
        row.free_low = row.free_low.min(row.free());
        row.recalled |= recalled;
        let unanswered = self.waiting.get_mut(ticket).filter(|w| w.answered.is_none());
        let again = unanswered.map(|w| (w.group, w.tried, w.since));
        if let Some((group, tried, since)) = again {
            if self.router.is_live(group, backend) {
                self.grant(now, ticket, backend);
            } else {
                // Home has not yet heard that this server is down, drained or gone; a request must not go there. Its place in
                // the queue stays: `since` is the same.
                let row = self.table.row_mut(backend);
                let free = row.free();
                row.held -= free;
                self.send_home(Message::Return { backend, count: free, recalled: false }, Urgency::Wake);
                self.send_home(Message::Ask { ticket, group, preferred: None, tried, since }, Urgency::Wake);
            }
        }
        self.settle_lease(now, backend, Urgency::Wake);
    }

    /// Home wants free permits back, from now on.
    pub(super) fn recalled(&mut self, backend: BackendId) {
        self.table.ensure(backend);
        let row = self.table.row_mut(backend);
        row.recalled = true;
        let count = row.free();
        row.held -= count;
        self.send_home(Message::Return { backend, count, recalled: true }, Urgency::Wake);
    }

    /// Sends free permits back when they are recalled, else sees that they are looked at once idle.
    pub(super) fn settle_lease(&mut self, now: Nanos, backend: BackendId, urgency: Urgency) {
        let row = self.table.row_mut(backend);
        let free = row.free();
        if free == 0 {
            return;
        }
        if row.recalled {
            row.held -= free;
            self.send_home(Message::Return { backend, count: free, recalled: false }, urgency);
        } else if self.sweep_at == Nanos::NEVER {
            self.sweep_at = now.plus_ms(LEASE_IDLE_MS);
        }
    }

    /// Sends leases back that nobody needed since the last sweep.
    pub(super) fn sweep(&mut self, now: Nanos) {
        self.sweep_at = Nanos::NEVER;
        for id in self.table.ids() {
            let row = self.table.row_mut(id);
            if row.held == 0 {
                continue;
            }
            let idle = row.free_low.min(row.free());
            row.held -= idle;
            row.free_low = row.free();
            if row.free_low > 0 {
                self.sweep_at = now.plus_ms(LEASE_IDLE_MS);
            }
            if idle > 0 {
                let back = Message::Return { backend: id, count: idle, recalled: false };
                self.send_home(back, Urgency::Quiet);
            }
        }
    }
}

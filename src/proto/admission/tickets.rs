//! This shard's requests that wait, by ticket.
//!
//! A ticket number is used once (the counter turns over after 2^32), so an answer that crosses a withdrawal can never meet
//! another request. The table is indexed by the number's low bits; a number whose place is taken is skipped.
//!
//! *Invariant*: the live tickets have distinct places.
//! *Bound and cost*: O(1) without hashing; memory for twice the largest number of requests that ever waited at once.

use crate::proto::ids::Ticket;

const SLOTS_MIN: usize = 64;

/// See the module's text.
#[derive(Debug)]
pub struct Tickets<T> {
    slots: Vec<Option<(Ticket, T)>>,
    next: u32,
    len: usize,
}

impl<T> Default for Tickets<T> {
    fn default() -> Self {
        Tickets { slots: Vec::new(), next: 0, len: 0 }
    }
}

impl<T> Tickets<T> {
    fn place(&self, ticket: Ticket) -> usize {
        ticket.0 as usize & (self.slots.len() - 1)
    }

    /// A new ticket for `value`.
    pub fn insert(&mut self, value: T) -> Ticket {
        if self.len * 2 >= self.slots.len() {
            self.grow();
        }
        loop {
            let ticket = Ticket(self.next);
            self.next = self.next.wrapping_add(1);
            let place = self.place(ticket);
            if self.slots[place].is_none() {
                self.slots[place] = Some((ticket, value));
                self.len += 1;
                return ticket;
            }
        }
    }

    fn grow(&mut self) {
        // Places that differ in their low bits still do with one bit more.
        let size = (self.slots.len() * 2).max(SLOTS_MIN);
        let held = std::mem::take(&mut self.slots);
        self.slots.resize_with(size, || None);
        for entry in held.into_iter().flatten() {
            let place = self.place(entry.0);
            self.slots[place] = Some(entry);
        }
    }

    pub fn get_mut(&mut self, ticket: Ticket) -> Option<&mut T> {
        if self.slots.is_empty() {
            return None;
        }
        let place = self.place(ticket);
        self.slots[place].as_mut().filter(|(t, _)| *t == ticket).map(|(_, value)| value)
    }

    pub fn remove(&mut self, ticket: Ticket) -> Option<T> {
        self.get_mut(ticket)?;
        let place = self.place(ticket);
        self.len -= 1;
        self.slots[place].take().map(|(_, value)| value)
    }

    pub fn len(&self) -> usize {
        self.len
    }
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_never_used_twice_and_always_found() {
        let mut tickets = Tickets::default();
        let old = tickets.insert(0_u32);
        let mut live = Vec::new();
        for i in 1..5000 {
            live.push((tickets.insert(i), i));
            if i % 3 != 0 {
                let (ticket, value) = live.swap_remove((i as usize * 7) % live.len());
                assert_eq!(tickets.remove(ticket), Some(value));
                assert_eq!(tickets.remove(ticket), None);
            }
        }
        assert_eq!(tickets.len(), live.len() + 1);
        for (ticket, value) in live {
            assert_ne!(ticket, old);
            assert_eq!(tickets.get_mut(ticket).copied(), Some(value));
        }
        assert_eq!(tickets.remove(old), Some(0));
    }

    #[test]
    fn the_counter_turns_over_without_meeting_a_live_ticket() {
        let mut tickets = Tickets::default();
        let old = tickets.insert("old");
        tickets.next = u32::MAX;
        let last = tickets.insert("last");
        let first = tickets.insert("first");
        assert_eq!((last.0, first.0), (u32::MAX, 1), "0 is still held");
        assert_eq!(tickets.remove(old), Some("old"));
    }
}

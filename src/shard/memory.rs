//! Gives memory back to the system after a burst.
//!
//! The allocator returns pages when the thread next works it, and a shard that has fallen quiet does not. So a shard counts
//! roughly what it frees in bulk, and once it frees no more, asks the allocator to let go.
//!
//! *Cost*: an addition per connection put to rest and per large buffer; one collection per burst.

use std::cell::Cell;

/// Not worth a collection.
const BYTES_MIN: usize = 512 * 1024;

/// See the module's text.
#[derive(Default)]
pub struct Memory {
    freed_bytes: Cell<usize>,
    /// As it was at the last look.
    seen_bytes: Cell<usize>,
}

impl Memory {
    /// About `bytes` have been given to the allocator.
    pub fn freed(&self, bytes: usize) {
        self.freed_bytes.set(self.freed_bytes.get().saturating_add(bytes));
    }

    /// Looks whether a burst is over; to be called now and then. True: memory was given back.
    pub fn give_back(&self) -> bool {
        let freed_bytes = self.freed_bytes.get();
        let over = freed_bytes >= BYTES_MIN && freed_bytes == self.seen_bytes.get();
        self.seen_bytes.set(freed_bytes);
        if over {
            self.freed_bytes.set(0);
            self.seen_bytes.set(0);
            // SAFETY: collects the calling thread's own heap; no pointer is involved.
            unsafe { libmimalloc_sys::mi_collect(true) };
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_goes_back_once_after_a_burst_and_not_during_it() {
        let memory = Memory::default();
        memory.freed(BYTES_MIN);
        assert!(!memory.give_back(), "the burst may go on");
        memory.freed(1);
        assert!(!memory.give_back(), "it does go on");
        assert!(memory.give_back(), "it is over");
        assert!(!memory.give_back(), "once is enough");
        memory.freed(1);
        assert!(!memory.give_back() && !memory.give_back(), "a trifle");
    }
}

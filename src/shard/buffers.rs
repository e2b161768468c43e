//! Pooled byte buffers of three sizes, one pool per shard.
//!
//! *Invariant*: a buffer given back is empty and has the capacity of its class.
//! *Bound and cost*: each free list keeps at most its bound; beyond it buffers go back to the allocator, so that a burst
//! does not stay in memory. Taking and giving are a pop and a push.

use std::cell::RefCell;

/// Head-sized: an armed read on a client.
pub const SMALL_BYTES: usize = 4 * 1024;
/// An answer, or a request with its body.
pub const MEDIUM_BYTES: usize = 16 * 1024;
/// Bulk transfer.
pub const LARGE_BYTES: usize = 64 * 1024;

const CLASSES: [(usize, usize); 3] = [(SMALL_BYTES, 512), (MEDIUM_BYTES, 256), (LARGE_BYTES, 32)];

/// See the module's text.
#[derive(Default)]
pub struct Buffers {
    free: RefCell<[Vec<Vec<u8>>; CLASSES.len()]>,
}

impl Buffers {
    /// An empty buffer with room for at least `bytes`; exact classes up to [`LARGE_BYTES`], beyond it allocated to size.
    pub fn take(&self, bytes: usize) -> Vec<u8> {
        match CLASSES.iter().position(|(size, _)| bytes <= *size) {
            Some(class) => {
                self.free.borrow_mut()[class].pop().unwrap_or_else(|| Vec::with_capacity(CLASSES[class].0))
            }
            None => Vec::with_capacity(bytes),
        }
    }

    /// Gives a buffer back, whatever its size and content.
    pub fn give(&self, mut buf: Vec<u8>) {
        let Some(class) = CLASSES.iter().position(|(size, _)| buf.capacity() == *size) else { return };
        let free = &mut self.free.borrow_mut()[class];
        if free.len() < CLASSES[class].1 {
            buf.clear();
            free.push(buf);
        }
    }

    /// Frees half of what lies unused: called now and then, so that the pool follows the load down.
    pub fn shrink(&self) {
        for free in self.free.borrow_mut().iter_mut() {
            let keep = free.len() / 2;
            free.truncate(keep);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_empty_and_bounded() {
        let pool = Buffers::default();
        let mut buf = pool.take(100);
        assert_eq!(buf.capacity(), SMALL_BYTES);
        buf.extend_from_slice(b"secret");
        let place = buf.as_ptr();
        pool.give(buf);
        let again = pool.take(SMALL_BYTES);
        assert_eq!((again.as_ptr(), again.len()), (place, 0));

        let many: Vec<_> = (0..40).map(|_| pool.take(LARGE_BYTES)).collect();
        many.into_iter().for_each(|b| pool.give(b));
        assert_eq!(pool.free.borrow()[2].len(), 32);
        pool.shrink();
        assert_eq!(pool.free.borrow()[2].len(), 16);

        let odd = pool.take(LARGE_BYTES + 1);
        pool.give(odd);
        assert_eq!(pool.free.borrow()[2].len(), 16, "buffers outside the classes are not kept");
    }
}

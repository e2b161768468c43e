//! The clients that own blocks of one server, and which of them is most over its share.
//!
//! Shares are equal, so the client most over its share is the one with the most blocks; of equals, the one whose oldest block
//! is oldest; of equals again, the lower id. A heap keeps them in that order. The client whose prompt is being recorded is
//! taken out of the heap and judged beside it, so that its own blocks' coming and going moves nothing.
//!
//! *Invariant*: a client is in the table while it owns a block, or while its prompt is recorded; in the heap unless it is the
//! one whose prompt is recorded. At most `clients_max` are told apart: the one after shares the entry of [`CROWD`].
//! *Bound and cost*: 32 bytes and two numbers of 4 per client; find O(1), a loss of a block O(log clients) and mostly O(1). The
//! tables grow by an eighth, which is the only allocation.

use crate::clock::Nanos;
use crate::proto::ids::ClientId;

use super::{NONE, Stamp, reduce};

/// Whom blocks are charged to when too many clients are about.
pub const CROWD: ClientId = ClientId(u64::MAX);

/// One client's list of blocks and its size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client {
    pub(super) id: ClientId,
    /// Ends of the list of its blocks.
    pub(super) newest: u32,
    pub(super) oldest: u32,
    pub(super) blocks: u32,
    /// Where a late touch was put last: not necessarily in this list any more.
    pub(super) hint: u32,
    /// Place in the heap; NONE: not in it.
    place: u32,
    /// Next of the same bucket, or of the free ones.
    next: u32,
}

/// What the order is by; larger: evicted from earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claim {
    pub(super) blocks: u32,
    pub(super) oldest: std::cmp::Reverse<Stamp>,
    pub(super) id: std::cmp::Reverse<ClientId>,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct Clients {
    table: Vec<Client>,
    buckets: Vec<u32>,
    free: u32,
    heap: Vec<u32>,
    live: u32,
    clients_max: u32,
}

impl Clients {
    pub(super) const fn new(clients_max: u32) -> Self {
        Clients { table: Vec::new(), buckets: Vec::new(), free: NONE, heap: Vec::new(), live: 0, clients_max }
    }

    pub(super) const fn bytes_max(clients_max: usize) -> usize {
        // The crowd, and one whose prompt is recorded, come on top.
        (clients_max + 2 + clients_max / 8 + 8) * (size_of::<Client>() + 2 * size_of::<u32>())
    }
    pub(super) fn bytes(&self) -> usize {
        self.table.capacity() * size_of::<Client>()
            + (self.buckets.capacity() + self.heap.capacity()) * size_of::<u32>()
    }

    pub(super) fn len(&self) -> usize {
        self.live as usize
    }

    #[inline]
    pub(super) fn of(&self, client: u32) -> &Client {
        &self.table[client as usize]
    }
    #[inline]
    pub(super) fn of_mut(&mut self, client: u32) -> &mut Client {
        &mut self.table[client as usize]
    }

    /// Those that own blocks.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Client> {
        self.table.iter().filter(|client| client.blocks > 0)
    }

    fn bucket(&self, id: ClientId) -> usize {
        // A digest places itself; multiplied, so do small numbers.
        reduce(id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15), self.buckets.len())
    }

    fn find(&self, id: ClientId) -> Option<u32> {
        let mut at = *self.buckets.get(self.bucket(id))?;
        while at != NONE {
            let client = self.of(at);
            if client.id == id {
                return Some(at);
            }
            at = client.next;
        }
        None
    }

    /// The entry of a client, made if need be.
    pub(super) fn admit(&mut self, id: ClientId) -> u32 {
        if let Some(found) = self.find(id) {
            return found;
        }
        if self.live >= self.clients_max && id != CROWD {
            return self.admit(CROWD);
        }
        let at = self.free;
        let at = if at == NONE { self.grow() } else { at };
        self.free = self.of(at).next;
        let bucket = self.bucket(id);
        *self.of_mut(at) = Client {
            id,
            newest: NONE,
            oldest: NONE,
            blocks: 0,
            hint: NONE,
            place: NONE,
            next: self.buckets[bucket],
        };
        self.buckets[bucket] = at;
        self.live += 1;
        at
    }

    /// One more free entry; from time to time room for an eighth more.
    fn grow(&mut self) -> u32 {
        let at = self.table.len();
        if at == self.table.capacity() {
            let more = (at / 8).max(8);
            self.table.reserve_exact(more);
            self.heap.reserve_exact(at + more - self.heap.len());
            self.buckets = vec![NONE; at + more];
            for i in 0..at {
                let bucket = self.bucket(self.table[i].id);
                self.table[i].next = self.buckets[bucket];
                self.buckets[bucket] = i as u32;
            }
        }
        self.table.push(Client {
            id: CROWD,
            newest: NONE,
            oldest: NONE,
            blocks: 0,
            hint: NONE,
            place: NONE,
            next: NONE,
        });
        at as u32
    }

    /// Forgets a client that owns nothing and is not in the heap.
    pub(super) fn release(&mut self, client: u32) {
        let Client { id, blocks, place, next, .. } = *self.of(client);
        debug_assert!(blocks == 0 && place == NONE);
        let bucket = self.bucket(id);
        if self.buckets[bucket] == client {
            self.buckets[bucket] = next;
        } else {
            let mut at = self.buckets[bucket];
            while self.of(at).next != client {
                at = self.of(at).next;
            }
            self.of_mut(at).next = next;
        }
        self.of_mut(client).next = self.free;
        self.free = client;
        self.live -= 1;
    }

    /// The client most over its share, of those in the heap.
    #[inline]
    pub(super) fn top(&self) -> Option<u32> {
        self.heap.first().copied()
    }

    /// Blocks of the one after the top; 0: there is none.
    #[inline]
    pub(super) fn second_blocks(&self) -> u32 {
        let second = self.heap.get(1..).unwrap_or_default().iter().take(2);
        second.map(|client| self.of(*client).blocks).max().unwrap_or(0)
    }

    /// `stamp_of` gives the last touch of a block.
    pub(super) fn claim(&self, client: u32, stamp_of: impl Fn(u32) -> Stamp) -> Claim {
        let Client { id, blocks, oldest, .. } = *self.of(client);
        let oldest =
            if oldest == NONE { Stamp { at: Nanos::NEVER, ..Stamp::ZERO } } else { stamp_of(oldest) };
        Claim { blocks, oldest: std::cmp::Reverse(oldest), id: std::cmp::Reverse(id) }
    }

    #[inline]
    fn above(&self, a: u32, b: u32, stamp_of: &impl Fn(u32) -> Stamp) -> bool {
        let (blocks_a, blocks_b) = (self.of(a).blocks, self.of(b).blocks);
        if blocks_a != blocks_b {
            return blocks_a > blocks_b;
        }
        self.claim(a, stamp_of) > self.claim(b, stamp_of)
    }

    fn put(&mut self, place: usize, client: u32) {
        self.heap[place] = client;
        self.of_mut(client).place = place as u32;
    }

    /// Takes a client out of the heap, if it is there.
    pub(super) fn lift(&mut self, client: u32, stamp_of: impl Fn(u32) -> Stamp) {
        let place = self.of(client).place;
        if place == NONE {
            return;
        }
        self.of_mut(client).place = NONE;
        let last = self.heap.pop().expect("it is in the heap");
        if last != client {
            self.put(place as usize, last);
            self.raise(last, &stamp_of);
            self.sink(last, &stamp_of);
        }
    }

    /// Puts a client that owns blocks into the heap.
    pub(super) fn insert(&mut self, client: u32, stamp_of: impl Fn(u32) -> Stamp) {
        self.heap.push(client);
        self.of_mut(client).place = self.heap.len() as u32 - 1;
        self.raise(client, &stamp_of);
    }

    fn raise(&mut self, client: u32, stamp_of: &impl Fn(u32) -> Stamp) {
        let mut place = self.of(client).place as usize;
        while place > 0 {
            let parent = (place - 1) / 2;
            let other = self.heap[parent];
            if !self.above(client, other, stamp_of) {
                break;
            }
            self.put(place, other);
            place = parent;
        }
        self.put(place, client);
    }

    /// To be called when a client in the heap has lost blocks: that can only lower its claim.
    pub(super) fn sink(&mut self, client: u32, stamp_of: &impl Fn(u32) -> Stamp) {
        let mut place = self.of(client).place as usize;
        let start = place;
        loop {
            let mut child = 2 * place + 1;
            if child >= self.heap.len() {
                break;
            }
            if child + 1 < self.heap.len() && self.above(self.heap[child + 1], self.heap[child], stamp_of) {
                child += 1;
            }
            let other = self.heap[child];
            if !self.above(other, client, stamp_of) {
                break;
            }
            self.put(place, other);
            place = child;
        }
        if place != start {
            self.put(place, client);
        }
    }
}

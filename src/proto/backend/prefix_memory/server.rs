//! What one server is believed to hold: its blocks by identity, and each client's in the order of their last touch.
//!
//! A block is a node in one slab; a chained hash table finds it, and it is in the list of the client that it is charged to.
//! Lists are ordered by stamp, so that replicas which hear of the same touches in different orders have the same lists. How a
//! prompt gets into them is told in [`recording`].
//!
//! *Invariant*: `held` ≤ `capacity` whenever nothing is being recorded; a node is in one bucket and one list, or announced
//! and in a bucket only, or free; the index of the domain knows of each that is not free.
//! *Bound and cost*: 38 bytes per block of capacity, reserved with the first block (the system gives pages as they are written)
//! and from then on nothing but what new clients need. O(1) per block, whatever is held.

mod recording;

use crate::clock::Nanos;
#[cfg(test)]
use crate::proto::ids::ClientId;
use crate::proto::ids::ShardId;

use super::clients::{CROWD, Clients};
use super::index::Index;
use super::{NONE, Stamp, reduce};

/// Largest capacity: node numbers and client numbers (with the shard beside them) fit.
pub(super) const CAPACITY_MAX: u32 = 1 << 24;

#[derive(Clone, Copy, Debug)]
struct Node {
    identity: u64,
    at: Nanos,
    newer: u32,
    older: u32,
    /// Next of the same bucket, or of the free ones.
    next: u32,
    /// Client and shard of the last touch; NONE: free.
    owner: Owner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner(u32);

impl Owner {
    const NOBODY: Owner = Owner(NONE);
    /// Of a block that is announced and not recorded yet: in no list.
    const ANNOUNCED: Owner = Owner(NONE - 0x100);
    const fn new(client: u32, shard: ShardId) -> Self {
        Owner(client << 8 | shard.0 as u32)
    }
    const fn client(self) -> u32 {
        self.0 >> 8
    }
    const fn is_nobody(self) -> bool {
        self.0 == NONE
    }
    const fn is_announced(self) -> bool {
        self.0 == Self::ANNOUNCED.0
    }
}

impl Node {
    const fn stamp(&self) -> Stamp {
        Stamp { at: self.at, shard: ShardId(self.owner.0 as u8) }
    }
    #[inline]
    fn is_later_than(&self, stamp: Stamp) -> bool {
        self.at > stamp.at || (self.at == stamp.at && self.owner.0 as u8 > stamp.shard.0)
    }
}

/// Neighbours in one client's list that are to be moved together.
#[derive(Clone, Copy, Debug)]
struct Run {
    newest: u32,
    oldest: u32,
    client: u32,
    blocks: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(super) struct ServerMemory {
    capacity: u32,
    /// Blocks that may be held: the capacity, or less.
    limit: u32,
    /// Recorded, and announced only.
    held: u32,
    announced: u32,
    nodes: Vec<Node>,
    buckets: Box<[u32]>,
    free: u32,
    pub(super) clients: Clients,
    pub(super) evicted: u64,
}

/// How many clients a server of this capacity tells apart: beyond it a share would be less than eight blocks.
pub(super) fn clients_max(capacity: u32) -> u32 {
    (capacity / 8).max(64)
}

/// Blocks that may be announced beyond the capacity.
const fn announced_max(capacity: u32) -> u32 {
    if capacity == 0 { 0 } else { capacity / 16 + 64 }
}

impl ServerMemory {
    pub(super) fn new(capacity: u32) -> Self {
        assert!(capacity <= CAPACITY_MAX, "at most {CAPACITY_MAX} blocks per server");
        ServerMemory {
            capacity,
            limit: capacity,
            held: 0,
            announced: 0,
            nodes: Vec::new(),
            buckets: Box::default(),
            free: NONE,
            clients: Clients::new(clients_max(capacity)),
            evicted: 0,
        }
    }

    /// Blocks of a server of this capacity, announced ones included, at most.
    pub(super) const fn blocks_max(capacity: u32) -> usize {
        (capacity + announced_max(capacity)) as usize
    }

    /// What a server of this capacity takes at most.
    pub(super) fn bytes_max(capacity: u32) -> usize {
        if capacity == 0 {
            return 0;
        }
        Self::blocks_max(capacity) * size_of::<Node>()
            + capacity as usize * size_of::<u32>()
            + Clients::bytes_max(clients_max(capacity).min(capacity) as usize)
    }

    pub(super) fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>()
            + self.buckets.len() * size_of::<u32>()
            + self.clients.bytes()
    }

    /// Has at most `limit` blocks held from the next new block on, and at least one.
    pub(super) fn set_limit(&mut self, limit: u32) {
        self.limit = limit.clamp(1.min(self.capacity), self.capacity);
    }
    pub(super) const fn limit(&self) -> u32 {
        self.limit
    }
    pub(super) const fn capacity(&self) -> u32 {
        self.capacity
    }
    pub(super) const fn announced(&self) -> u32 {
        self.announced
    }
    pub(super) const fn held(&self) -> u32 {
        self.held
    }

    /// Another capacity: evicts down to it. Takes time in proportion to what is held.
    pub(super) fn resize(&mut self, capacity: u32, index: &mut Index, slot: u16) {
        assert!(capacity <= CAPACITY_MAX, "at most {CAPACITY_MAX} blocks per server");
        if capacity == self.capacity {
            return;
        }
        for node in self.nodes.iter().filter(|node| node.owner.is_announced()) {
            index.remove(node.identity, slot);
        }
        self.capacity = capacity;
        while self.held > capacity {
            let top = self.clients.top().expect("held blocks have an owner");
            let most = (self.clients.of(top).blocks - self.clients.second_blocks()).max(1);
            self.evict_oldest(top, most.min(self.held - capacity), index, slot, |_, _| true);
            self.lost(top);
        }
        let evicted = self.evicted;
        let old = std::mem::replace(self, ServerMemory { evicted, ..ServerMemory::new(capacity) });
        if old.held == 0 {
            return;
        }
        self.allocate();
        // Clients that are too many now join the crowd, their blocks in the order of their stamps.
        let mut crowd: Vec<&Node> = Vec::new();
        for of in old.clients.iter() {
            let client = self.clients.admit(of.id);
            let joins = self.clients.of(client).id == CROWD;
            let mut at = of.oldest;
            while at != NONE {
                let node = &old.nodes[at as usize];
                match joins {
                    true => crowd.push(node),
                    false => self.push_newest(client, node),
                }
                at = node.newer;
            }
            if !joins {
                self.clients.insert(client, stamp_in(&self.nodes));
            }
        }
        if !crowd.is_empty() {
            let client = self.clients.admit(CROWD);
            crowd.sort_by_key(|node| node.stamp());
            crowd.into_iter().for_each(|node| self.push_newest(client, node));
            self.clients.insert(client, stamp_in(&self.nodes));
        }
    }

    /// A node of another slab, as the client's newest.
    fn push_newest(&mut self, client: u32, node: &Node) {
        let at = self.nodes.len() as u32;
        let bucket = reduce(node.identity, self.buckets.len());
        let next = std::mem::replace(&mut self.buckets[bucket], at);
        let owner = Owner::new(client, node.stamp().shard);
        self.nodes.push(Node { next, owner, ..*node });
        self.link(client, Run { newest: at, oldest: at, client, blocks: 1 }, NONE);
        self.clients.of_mut(client).blocks += 1;
        self.held += 1;
    }

    /// Empties it.
    pub(super) fn clear(&mut self, index: &mut Index, slot: u16) {
        for node in self.nodes.iter().filter(|node| !node.owner.is_nobody()) {
            index.remove(node.identity, slot);
        }
        let limit = self.limit;
        *self = ServerMemory { limit, ..ServerMemory::new(self.capacity) };
    }

    fn allocate(&mut self) {
        self.nodes = Vec::new();
        self.nodes.reserve_exact(Self::blocks_max(self.capacity));
        self.buckets = vec![NONE; self.capacity as usize].into_boxed_slice();
        self.free = NONE;
    }

    #[inline]
    fn find(&self, identity: u64) -> u32 {
        let Some(mut at) = self.buckets.get(reduce(identity, self.buckets.len())).copied() else {
            return NONE;
        };
        while at != NONE {
            let node = &self.nodes[at as usize];
            if node.identity == identity {
                break;
            }
            at = node.next;
        }
        at
    }

    /// Leading blocks that are held or announced.
    pub(super) fn matched(&self, blocks: &[u64]) -> u32 {
        let mut guess = NONE;
        let mut matched = 0;
        for block in blocks {
            // What was touched before a block is mostly the one after it in the prompt.
            let at = match self.nodes.get(guess as usize) {
                Some(node) if node.identity == *block && !node.owner.is_nobody() => guess,
                _ => self.find(*block),
            };
            let Some(node) = self.nodes.get(at as usize) else { break };
            guess = node.older;
            matched += 1;
        }
        matched
    }

    /// The prompt is on its way to the server and will be recorded: from now on it matches. Says how many leading blocks matched
    /// before. Touches nothing and pushes nothing out; where too much is announced already, the rest is left to the recording.
    pub(super) fn announce(&mut self, index: &mut Index, slot: u16, blocks: &[u64]) -> u32 {
        if self.capacity == 0 {
            return 0;
        }
        if self.buckets.is_empty() {
            self.allocate();
        }
        let matched = self.matched(blocks);
        for block in &blocks[matched as usize..] {
            if self.announced >= announced_max(self.capacity) {
                break;
            }
            if self.find(*block) == NONE {
                let owner = Owner::ANNOUNCED;
                self.take_node(Node {
                    identity: *block,
                    at: Nanos::ZERO,
                    newer: NONE,
                    older: NONE,
                    next: NONE,
                    owner,
                });
                self.announced += 1;
                index.add(*block, slot);
            }
        }
        matched
    }

    /// A free node, filled and put in its bucket.
    #[inline]
    fn take_node(&mut self, node: Node) -> u32 {
        let bucket = reduce(node.identity, self.buckets.len());
        let node = Node { next: self.buckets[bucket], ..node };
        let at = self.free;
        let at = match self.nodes.get_mut(at as usize) {
            Some(free) => {
                self.free = free.next;
                *free = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        };
        self.buckets[bucket] = at;
        at
    }

    /// A client in the heap has fewer blocks now, maybe none.
    fn lost(&mut self, client: u32) {
        if self.clients.of(client).blocks == 0 {
            self.clients.lift(client, stamp_in(&self.nodes));
            self.clients.release(client);
        } else {
            self.clients.sink(client, &stamp_in(&self.nodes));
        }
    }

    fn unlink(&mut self, run: Run) {
        let newer = self.nodes[run.newest as usize].newer;
        let older = self.nodes[run.oldest as usize].older;
        match newer {
            NONE => self.clients.of_mut(run.client).newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => self.clients.of_mut(run.client).oldest = newer,
            older => self.nodes[older as usize].newer = newer,
        }
    }

    /// Puts a run on the older side of `cursor`, or at the newest end.
    fn link(&mut self, client: u32, run: Run, cursor: u32) {
        let older = match cursor {
            NONE => std::mem::replace(&mut self.clients.of_mut(client).newest, run.newest),
            cursor => std::mem::replace(&mut self.nodes[cursor as usize].older, run.newest),
        };
        match older {
            NONE => self.clients.of_mut(client).oldest = run.oldest,
            older => self.nodes[older as usize].newer = run.oldest,
        }
        self.nodes[run.newest as usize].newer = cursor;
        self.nodes[run.oldest as usize].older = older;
    }

    /// Evicts a client's oldest blocks, at most `most` and as long as they are to go; the heap is the caller's.
    #[inline]
    fn evict_oldest(
        &mut self,
        client: u32,
        most: u32,
        index: &mut Index,
        slot: u16,
        goes: impl Fn(&Self, u32) -> bool,
    ) {
        let mut at = self.clients.of(client).oldest;
        let mut gone = 0;
        while gone < most && at != NONE && goes(self, at) {
            let newer = self.nodes[at as usize].newer;
            self.free_node(at, index, slot);
            at = newer;
            gone += 1;
        }
        let of = self.clients.of_mut(client);
        of.oldest = at;
        of.blocks -= gone;
        match at {
            NONE => of.newest = NONE,
            at => self.nodes[at as usize].older = NONE,
        }
        self.held -= gone;
        self.evicted += u64::from(gone);
    }

    fn evict(&mut self, at: u32, client: u32, index: &mut Index, slot: u16) {
        self.remove(at, client, index, slot);
        self.evicted += 1;
    }

    /// Forgets a node of a client; the heap is the caller's.
    fn remove(&mut self, at: u32, client: u32, index: &mut Index, slot: u16) {
        self.unlink(Run { newest: at, oldest: at, client, blocks: 1 });
        self.clients.of_mut(client).blocks -= 1;
        self.held -= 1;
        self.free_node(at, index, slot);
    }

    /// Takes a node out of its bucket and the index; the list is the caller's.
    #[inline]
    fn free_node(&mut self, at: u32, index: &mut Index, slot: u16) {
        let node = &mut self.nodes[at as usize];
        let Node { identity, next, .. } = *node;
        node.owner = Owner::NOBODY;
        node.next = self.free;
        self.free = at;
        let bucket = reduce(identity, self.buckets.len());
        if self.buckets[bucket] == at {
            self.buckets[bucket] = next;
        } else {
            let mut before = self.buckets[bucket];
            while self.nodes[before as usize].next != at {
                before = self.nodes[before as usize].next;
            }
            self.nodes[before as usize].next = next;
        }
        index.remove(identity, slot);
    }

    /// Forgets those of `blocks` that were not touched later than `stamp`.
    pub(super) fn drop_blocks(&mut self, index: &mut Index, slot: u16, stamp: Stamp, blocks: &[u64]) {
        for block in blocks {
            let at = self.find(*block);
            if at == NONE || self.nodes[at as usize].is_later_than(stamp) {
                continue;
            }
            let owner = self.nodes[at as usize].owner;
            // What is announced was sent later, whatever becomes of it.
            if owner.is_announced() {
                continue;
            }
            let client = owner.client();
            self.remove(at, client, index, slot);
            self.lost(client);
        }
    }

    /// Each client and its blocks, oldest touch first.
    #[cfg(test)]
    pub(super) fn lists(&self) -> Vec<(ClientId, Vec<(u64, Stamp)>)> {
        let mut lists = Vec::new();
        for client in self.clients.iter() {
            let mut at = client.oldest;
            let mut list = Vec::new();
            let mut older = NONE;
            while at != NONE {
                let node = &self.nodes[at as usize];
                assert_eq!(node.older, older);
                list.push((node.identity, node.stamp()));
                older = at;
                at = node.newer;
            }
            assert_eq!((client.newest, client.blocks), (older, list.len() as u32));
            lists.push((client.id, list));
        }
        lists
    }
}

fn stamp_in(nodes: &[Node]) -> impl Fn(u32) -> Stamp + '_ {
    |at| nodes[at as usize].stamp()
}

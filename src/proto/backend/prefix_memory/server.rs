//! What one server is believed to hold: its blocks by identity, and each client's in the order of their last touch.
//!
//! A block is a node in one slab. The index of the domain tells where it is, or, where it tells another server's node of the same
//! block, a chained hash table of the server's own does. It is in the list of the client that it is charged to.
//! Lists are ordered by stamp, so that replicas which hear of the same touches in different orders have the same lists. How a
//! prompt gets into them is told in [`recording`].
//!
//! *Invariant*: `held` ≤ `capacity` whenever nothing is being recorded; a node is told by the index or in one bucket, never both, and
//! in one list, or announced and in none; or it is free. The index knows of each that is not free.
//! *Bound and cost*: 34 bytes per block of capacity, reserved with the first block (the system gives pages as they are written), 4 more
//! with the first that another server had before, and from then on nothing but what new clients need. O(1) per block, whatever is held.

mod recording;

use crate::clock::Nanos;
#[cfg(test)]
use crate::proto::ids::ClientId;
use crate::proto::ids::ShardId;

use super::clients::{CROWD, Clients};
use super::index::{AHEAD, Added, Index};
use super::{NONE, Stamp, reduce};

/// Largest capacity: node numbers and client numbers (with the shard beside them) fit.
pub(super) const CAPACITY_MAX: u32 = 1 << 24;

/// In place of the next of the same bucket: the index tells the node, and it is in no bucket.
const TOLD: u32 = NONE - 1;

/// Blocks that are taken out of the index together.
const EVICTED_AT_ONCE: usize = 16;

/// Half a cache line, so that none lies across two.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct Node {
    identity: u64,
    at: Nanos,
    newer: u32,
    older: u32,
    /// Next of the same bucket, or of the free ones, or [`TOLD`].
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
    /// Of the nodes that the index does not tell; empty before the first of them.
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
            index.remove(node.identity, slot, node.next == TOLD);
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
        let mut crowd: Vec<(u32, &Node)> = Vec::new();
        for of in old.clients.iter() {
            let client = self.clients.admit(of.id);
            let joins = self.clients.of(client).id == CROWD;
            let mut at = of.oldest;
            while at != NONE {
                let node = &old.nodes[at as usize];
                match joins {
                    true => crowd.push((at, node)),
                    false => self.push_newest(client, at, node, index),
                }
                at = node.newer;
            }
            if !joins {
                self.clients.insert(client, stamp_in(&self.nodes));
            }
        }
        if !crowd.is_empty() {
            let client = self.clients.admit(CROWD);
            crowd.sort_by_key(|(_, node)| node.stamp());
            crowd.into_iter().for_each(|(was, node)| self.push_newest(client, was, node, index));
            self.clients.insert(client, stamp_in(&self.nodes));
        }
    }

    /// A node of another slab, where it was number `was`, as the client's newest.
    fn push_newest(&mut self, client: u32, was: u32, node: &Node, index: &mut Index) {
        let at = self.nodes.len() as u32;
        let owner = Owner::new(client, node.stamp().shard);
        self.nodes.push(Node { owner, ..*node });
        if node.next != TOLD || !index.tell(node.identity, at, was) {
            self.chain(at);
        }
        self.link(client, Run { newest: at, oldest: at, client, blocks: 1 }, NONE);
        self.clients.of_mut(client).blocks += 1;
        self.held += 1;
    }

    /// Empties it.
    pub(super) fn clear(&mut self, index: &mut Index, slot: u16) {
        for node in self.nodes.iter().filter(|node| !node.owner.is_nobody()) {
            index.remove(node.identity, slot, node.next == TOLD);
        }
        let limit = self.limit;
        *self = ServerMemory { limit, ..ServerMemory::new(self.capacity) };
    }

    fn allocate(&mut self) {
        self.nodes.reserve_exact(Self::blocks_max(self.capacity));
    }

    /// The server's node of a block; NONE: it has none.
    #[inline]
    fn find(&self, index: &Index, slot: u16, identity: u64) -> u32 {
        index.find(identity, slot).map_or(NONE, |told| self.own(told, identity))
    }

    /// The server's node of a block, where the index tells that one.
    #[inline]
    fn own(&self, told: u32, identity: u64) -> u32 {
        // It may be another server's number.
        match self.nodes.get(told as usize) {
            Some(node) if node.identity == identity && node.next == TOLD => told,
            _ => self.find_chained(identity),
        }
    }

    /// Announces the last of `blocks`, back to the first that somebody holds or that cannot be announced any more, notes their nodes
    /// and says how many. What is new is searched for just this once.
    #[inline(never)]
    fn announce_new(&mut self, index: &mut Index, slot: u16, blocks: &[u64], found: &mut [u32]) -> usize {
        let most = announced_max(self.capacity).saturating_sub(self.announced) as usize;
        let blocks = &blocks[blocks.len().saturating_sub(most)..];
        let first = found.len() - blocks.len();
        let node = |identity| {
            let owner = Owner::ANNOUNCED;
            Node { identity, at: Nanos::ZERO, newer: NONE, older: NONE, next: TOLD, owner }
        };
        let far = blocks.len() > AHEAD;
        let mut left = blocks.len();
        for (block, found) in blocks.iter().zip(&mut found[first..]).rev() {
            let at = match self.nodes.get_mut(self.free as usize) {
                Some(free) => {
                    let at = self.free;
                    if !index.add_new(*block, slot, at) {
                        break;
                    }
                    self.free = free.next;
                    *free = node(*block);
                    at
                }
                None => {
                    let at = self.nodes.len() as u32;
                    if !index.add_new(*block, slot, at) {
                        break;
                    }
                    self.nodes.push(node(*block));
                    at
                }
            };
            *found = at | recording::ANNOUNCED;
            left -= 1;
            if far && let Some(ahead) = left.checked_sub(AHEAD) {
                index.prefetch(blocks[ahead]);
            }
        }
        let new = blocks.len() - left;
        self.announced += new as u32;
        new
    }

    /// The node that is filled next.
    #[inline]
    const fn next_free(&self) -> u32 {
        if self.free == NONE { self.nodes.len() as u32 } else { self.free }
    }

    /// Fills the next free node.
    #[inline]
    fn fill(&mut self, node: Node) -> u32 {
        let at = self.free;
        match self.nodes.get_mut(at as usize) {
            Some(free) => {
                self.free = free.next;
                *free = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        }
    }

    #[inline(never)]
    fn find_chained(&self, identity: u64) -> u32 {
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

    /// Puts a node that the index does not tell in its bucket.
    #[inline(never)]
    fn chain(&mut self, at: u32) {
        if self.buckets.is_empty() {
            self.buckets = vec![NONE; self.capacity as usize].into_boxed_slice();
        }
        let node = &mut self.nodes[at as usize];
        let bucket = reduce(node.identity, self.buckets.len());
        node.next = std::mem::replace(&mut self.buckets[bucket], at);
    }

    #[inline(never)]
    fn unchain(&mut self, at: u32) {
        let Node { identity, next, .. } = self.nodes[at as usize];
        let bucket = reduce(identity, self.buckets.len());
        if self.buckets[bucket] == at {
            self.buckets[bucket] = next;
            return;
        }
        let mut before = self.buckets[bucket];
        while self.nodes[before as usize].next != at {
            before = self.nodes[before as usize].next;
        }
        self.nodes[before as usize].next = next;
    }

    /// Leading blocks that are held or announced.
    pub(super) fn matched(&self, index: &Index, slot: u16, blocks: &[u64]) -> u32 {
        let mut guess = NONE;
        let mut matched = 0;
        for block in blocks {
            // What was touched before a block is mostly the one after it in the prompt.
            let at = match self.nodes.get(guess as usize) {
                Some(node) if node.identity == *block && !node.owner.is_nobody() => guess,
                _ => self.find(index, slot, *block),
            };
            let Some(node) = self.nodes.get(at as usize) else { break };
            guess = node.older;
            matched += 1;
        }
        matched
    }

    /// The prompt is on its way to the server and will be recorded: from now on it matches. Says how many leading blocks matched
    /// before. Touches nothing and pushes nothing out; where too much is announced already, the rest is left to the recording.
    /// `found` has room for as many.
    pub(super) fn announce(
        &mut self,
        index: &mut Index,
        slot: u16,
        found: &mut [u32],
        blocks: &[u64],
    ) -> u32 {
        if self.capacity == 0 {
            return 0;
        }
        if self.nodes.capacity() == 0 {
            self.allocate();
        }
        let matched = self.matched(index, slot, blocks);
        let mut missing = &blocks[matched as usize..];
        // Whichever comes first, if there is room for all.
        if missing.len() <= announced_max(self.capacity).saturating_sub(self.announced) as usize {
            let new = self.announce_new(index, slot, missing, &mut found[..missing.len()]);
            missing = &missing[..missing.len() - new];
        }
        for block in missing {
            if self.announced >= announced_max(self.capacity) {
                break;
            }
            if self.find(index, slot, *block) == NONE {
                let owner = Owner::ANNOUNCED;
                let (at, newer, older) = (Nanos::ZERO, NONE, NONE);
                let node = Node { identity: *block, at, newer, older, next: NONE, owner };
                if self.take_node(node, index, slot) != NONE {
                    self.announced += 1;
                }
            }
        }
        matched
    }

    /// A free node, filled and to be found; NONE: there is one of this block.
    #[inline]
    fn take_node(&mut self, node: Node, index: &mut Index, slot: u16) -> u32 {
        let identity = node.identity;
        let at = self.fill(node);
        match index.add(identity, slot, at) {
            Added::Told => self.nodes[at as usize].next = TOLD,
            Added::Apart => self.chain(at),
            Added::Known => return self.take_known(at, index, slot),
        }
        at
    }

    /// The rest of that where the server is among the holders already: it has the block, or [`Holders::without`] failed once.
    #[cold]
    #[inline(never)]
    fn take_known(&mut self, at: u32, index: &mut Index, slot: u16) -> u32 {
        let identity = self.nodes[at as usize].identity;
        if self.find(index, slot, identity) != NONE {
            let node = &mut self.nodes[at as usize];
            node.owner = Owner::NOBODY;
            node.next = self.free;
            self.free = at;
            return NONE;
        }
        if index.tell(identity, at, NONE) {
            self.nodes[at as usize].next = TOLD;
        } else {
            self.chain(at);
        }
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

    /// Evicts a client's oldest blocks, at most `most` and as long as they are to go; the heap is the caller's. Apart from its caller, as
    /// it is much of a recording: a dozen registers are few.
    #[inline(never)]
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
        let mut batch = [0; EVICTED_AT_ONCE];
        loop {
            // The lines of the index are on their way while the next nodes are read.
            let mut told = 0;
            while told < EVICTED_AT_ONCE && gone < most && at != NONE && goes(self, at) {
                let node = &mut self.nodes[at as usize];
                let Node { identity, newer, next, .. } = *node;
                if next == TOLD {
                    node.owner = Owner::NOBODY;
                    node.next = std::mem::replace(&mut self.free, at);
                    // The processor looks a few ahead by itself.
                    if most > AHEAD as u32 {
                        index.prefetch(identity);
                    }
                    batch[told] = identity;
                    told += 1;
                } else {
                    self.free_node(at, index, slot);
                }
                at = newer;
                gone += 1;
            }
            if told == 0 {
                break;
            }
            index.remove_told(&batch[..told], slot);
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

    /// Takes a node out of the index, and of its bucket; the list is the caller's.
    #[inline]
    fn free_node(&mut self, at: u32, index: &mut Index, slot: u16) {
        let Node { identity, next, .. } = self.nodes[at as usize];
        if next != TOLD {
            self.unchain(at);
        }
        let node = &mut self.nodes[at as usize];
        node.owner = Owner::NOBODY;
        node.next = self.free;
        self.free = at;
        index.remove(identity, slot, next == TOLD);
    }

    /// Forgets those of `blocks` that were not touched later than `stamp`.
    pub(super) fn drop_blocks(&mut self, index: &mut Index, slot: u16, stamp: Stamp, blocks: &[u64]) {
        for block in blocks {
            let at = self.find(index, slot, *block);
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

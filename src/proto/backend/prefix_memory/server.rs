//! What one server is believed to hold: its blocks by identity, and each client's in the order of their last touch.
//!
//! A block is a node in one slab; a chained hash table finds it, and it is in the list of the client that it is charged to.
//! Lists are ordered by stamp, so that replicas which hear of the same touches in different orders have the same lists.
//! Recording a prompt goes over it twice at most. From its tail to its head the blocks that are held are touched: neighbours in
//! the prompt are mostly neighbours in the list too and are moved in one piece. If some are missing, room is made, as if they
//! were there already, and then they are put in from the head to the tail.
//!
//! *Invariant*: `held` ≤ `capacity` whenever nothing is being recorded; a node is in one list and one bucket, or free; the
//! index of the domain knows of each.
//! *Bound and cost*: 36 bytes per block of capacity, reserved with the first block (the system gives pages as they are written)
//! and from then on nothing but what new clients need. O(1) per block, whatever is held.

use crate::clock::Nanos;
use crate::proto::ids::{ClientId, ShardId};

use super::clients::{CROWD, Clients};
use super::index::Index;
use super::{NONE, Stamp, reduce};

/// In place of a node: the block is not held, or was touched later than the prompt that is recorded.
const ABSENT: u32 = NONE;
const LATER: u32 = NONE - 1;
/// Beside a node's number: it is announced only.
const ANNOUNCED: u32 = 1 << 31;
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

/// A recording under way.
struct Recording {
    stamp: Stamp,
    /// Whom it is charged to: lifted out of the heap.
    client: u32,
    /// The prompt's blocks go to the older side of this node; NONE: to the newest end.
    cursor: u32,
    /// Blocks that are not held yet.
    absent: u32,
    /// Leading blocks that will be held: those after it give way.
    keep: usize,
    /// Of the touched blocks the one nearest to the prompt's tail.
    tail: u32,
    /// All that the client has and is older than this prompt is gone.
    older_gone: bool,
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

    /// Has at most `limit` blocks held from the next recording on, and at least one.
    pub(super) fn set_limit(&mut self, limit: u32) {
        self.limit = limit.clamp(1.min(self.capacity), self.capacity);
    }
    pub(super) const fn limit(&self) -> u32 {
        self.limit
    }
    pub(super) const fn capacity(&self) -> u32 {
        self.capacity
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
        *self = ServerMemory::new(self.capacity);
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

    /// Remembers `blocks`, at most as many as `found` has room for, and says how many leading ones were held before.
    pub(super) fn record(
        &mut self,
        index: &mut Index,
        slot: u16,
        found: &mut [u32],
        stamp: Stamp,
        client: ClientId,
        blocks: &[u64],
    ) -> u32 {
        let keep = blocks.len().min(found.len());
        if keep == 0 || self.capacity == 0 {
            return 0;
        }
        if self.buckets.is_empty() {
            self.allocate();
        }
        let client = self.clients.admit(client);
        self.clients.lift(client, stamp_in(&self.nodes));
        let cursor = self.cursor(client, stamp);
        let mut recording =
            Recording { stamp, client, cursor, absent: 0, keep, tail: NONE, older_gone: false };
        let (blocks, found) = (&blocks[..keep], &mut found[..keep]);
        let matched = self.touch_held(&mut recording, found, blocks);
        if recording.absent > 0 {
            while self.held + recording.absent > self.limit {
                self.make_room(&mut recording, found, blocks, index, slot);
            }
            self.insert_absent(&recording, found, blocks, matched, index, slot);
        }
        if self.clients.of(client).blocks == 0 {
            self.clients.release(client);
        } else {
            if cursor != NONE {
                let hint = self.nodes[cursor as usize].older;
                self.clients.of_mut(client).hint = hint;
            }
            self.clients.insert(client, stamp_in(&self.nodes));
        }
        matched as u32
    }

    /// The oldest of the client's blocks that were touched later than `stamp`; NONE: there is none.
    fn cursor(&self, client: u32, stamp: Stamp) -> u32 {
        let of = self.clients.of(client);
        if of.newest == NONE || !self.nodes[of.newest as usize].is_later_than(stamp) {
            return NONE;
        }
        // Late touches come in the order of their stamps: near to where the last one went.
        let hint = self.nodes.get(of.hint as usize).filter(|node| node.owner.client() == client);
        let mut at = match hint {
            Some(node) if !node.owner.is_nobody() => of.hint,
            _ => of.newest,
        };
        while !self.nodes[at as usize].is_later_than(stamp) {
            at = self.nodes[at as usize].newer;
        }
        loop {
            let older = self.nodes[at as usize].older;
            if older == NONE || !self.nodes[older as usize].is_later_than(stamp) {
                return at;
            }
            at = older;
        }
    }

    /// Touches what is held, from the tail to the head; notes each block's node. How many leading blocks are held.
    fn touch_held(&mut self, recording: &mut Recording, found: &mut [u32], blocks: &[u64]) -> usize {
        let Recording { stamp, client, .. } = *recording;
        let owner = Owner::new(client, stamp.shard);
        let mut matched = blocks.len();
        let mut run = Run { newest: NONE, oldest: NONE, client, blocks: 0 };
        let mut left = blocks.len();
        while left > 0 {
            left -= 1;
            let at = self.find(blocks[left]);
            found[left] = at;
            if at == NONE {
                matched = left;
                recording.absent += 1;
                continue;
            }
            let node = &mut self.nodes[at as usize];
            if node.owner.is_announced() {
                found[left] = at | ANNOUNCED;
                matched = left;
                recording.absent += 1;
                continue;
            }
            if node.is_later_than(stamp) {
                found[left] = LATER;
                continue;
            }
            if node.older != run.newest || node.owner.client() != run.client || run.blocks == 0 {
                // Moved before the next is stamped: the heap reads stamps.
                self.move_run(recording, run);
                let node = &self.nodes[at as usize];
                run = Run { newest: at, oldest: at, client: node.owner.client(), blocks: 0 };
                if recording.tail == NONE {
                    recording.tail = at;
                }
            }
            let node = &mut self.nodes[at as usize];
            node.at = stamp.at;
            node.owner = owner;
            run.newest = at;
            // The block before this one in the prompt is mostly the one touched after it.
            let next = node.newer;
            let same = touch_run(
                &mut self.nodes,
                next,
                run.client,
                &blocks[..left],
                &mut found[..left],
                stamp,
                owner,
            );
            left -= same;
            if same > 0 {
                run.newest = found[left];
            }
            run.blocks += same as u32 + 1;
        }
        self.move_run(recording, run);
        matched
    }

    /// To its new place in the list of the recording's client.
    fn move_run(&mut self, recording: &Recording, run: Run) {
        if run.blocks == 0 {
            return;
        }
        self.unlink(run);
        let client = recording.client;
        if run.client != client {
            let of = self.clients.of_mut(run.client);
            of.blocks -= run.blocks;
            self.lost(run.client);
            self.clients.of_mut(client).blocks += run.blocks;
        }
        self.link(client, run, recording.cursor);
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

    /// Evicts blocks, or has the prompt keep fewer: as if its absent blocks were there already, the newest of all.
    fn make_room(
        &mut self,
        recording: &mut Recording,
        found: &[u32],
        blocks: &[u64],
        index: &mut Index,
        slot: u16,
    ) {
        let client = recording.client;
        let need = self.held + recording.absent - self.limit;
        // What of the client is older than the prompt goes first, then the prompt from its tail, then what is newer.
        let oldest = self.clients.of(client).oldest;
        recording.older_gone |= !self.is_before(oldest, recording);
        let own = self.clients.of(client).blocks + recording.absent;
        let top = self.clients.top();
        if let Some(top) = top
            && self.is_over(top, recording)
        {
            // As many as it has more than the next, and at least the one that decided.
            let next = self.clients.second_blocks().max(own);
            let most = self.clients.of(top).blocks.saturating_sub(next).max(1);
            self.evict_oldest(top, need.min(most), index, slot, |_, _| true);
            self.lost(top);
            return;
        }
        let most = own - top.map_or(0, |top| self.clients.of(top).blocks);
        let most = need.min(most.max(1));
        if !recording.older_gone {
            self.evict_oldest(client, most, index, slot, |memory, at| memory.is_before(at, recording));
            return;
        }
        while recording.keep > 0 {
            recording.keep -= 1;
            match found[recording.keep] {
                LATER => {}
                ABSENT => {
                    recording.absent -= 1;
                    return;
                }
                at if at & ANNOUNCED != 0 => {
                    recording.absent -= 1;
                    let at = at & !ANNOUNCED;
                    if self.is_announced(at, blocks[recording.keep]) {
                        self.announced -= 1;
                        self.free_node(at, index, slot);
                    }
                    return;
                }
                at if self.is_touched(at, blocks[recording.keep], client) => {
                    self.evict(at, client, index, slot);
                    return;
                }
                _ => {}
            }
        }
        unreachable!("there is no room for blocks that are absent, so the prompt has some");
    }

    /// Whether a node of the recording's client is older than the prompt.
    #[inline]
    fn is_before(&self, at: u32, recording: &Recording) -> bool {
        at != NONE && at != recording.tail && !self.nodes[at as usize].is_later_than(recording.stamp)
    }

    /// Whether a node that was found for a block still is it: where a prompt has a block twice, it may be gone.
    #[inline]
    fn is_touched(&self, at: u32, block: u64, client: u32) -> bool {
        let node = &self.nodes[at as usize];
        node.identity == block && node.owner.client() == client
    }

    /// The same for one that was announced.
    #[inline]
    fn is_announced(&self, at: u32, block: u64) -> bool {
        let node = &self.nodes[at as usize];
        node.identity == block && node.owner.is_announced()
    }

    /// Whether a client in the heap is further over its share than the one whose prompt is recorded.
    #[inline]
    fn is_over(&self, top: u32, recording: &Recording) -> bool {
        let blocks = self.clients.of(recording.client).blocks + recording.absent;
        let top_blocks = self.clients.of(top).blocks;
        if top_blocks != blocks {
            return top_blocks > blocks;
        }
        let mut claim = self.clients.claim(recording.client, stamp_in(&self.nodes));
        claim.blocks = blocks;
        if recording.older_gone && recording.absent > 0 {
            claim.oldest.0 = claim.oldest.0.min(recording.stamp);
        }
        self.clients.claim(top, stamp_in(&self.nodes)) > claim
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

    /// Puts in the blocks that were absent, each behind the one before it, from block `from` on.
    fn insert_absent(
        &mut self,
        recording: &Recording,
        found: &[u32],
        blocks: &[u64],
        from: usize,
        index: &mut Index,
        slot: u16,
    ) {
        let Recording { stamp, client, cursor, keep, .. } = *recording;
        let owner = Owner::new(client, stamp.shard);
        let from = from.min(keep);
        let before =
            (0..from).rev().find(|i| found[*i] != LATER && self.is_touched(found[*i], blocks[*i], client));
        let mut before = before.map_or(cursor, |i| found[i]);
        // Those put in one behind the other are linked to what is older than all of them at the end.
        let mut older = self.older_than(client, before);
        let mut put = 0;
        for (block, found) in blocks[from..keep].iter().zip(&found[from..keep]) {
            let announced = match *found {
                LATER => continue,
                ABSENT => None,
                at if at & ANNOUNCED != 0 => {
                    Some(at & !ANNOUNCED).filter(|at| self.is_announced(*at, *block))
                }
                at => {
                    if self.is_touched(at, *block, client) {
                        self.set_newer(client, older, before);
                        before = at;
                        older = self.nodes[at as usize].older;
                    }
                    continue;
                }
            };
            let node = Node { identity: *block, at: stamp.at, newer: before, older, next: NONE, owner };
            let at = match announced {
                Some(at) => {
                    let announced = &mut self.nodes[at as usize];
                    *announced = Node { next: announced.next, ..node };
                    self.announced -= 1;
                    at
                }
                None => {
                    index.add(*block, slot);
                    self.take_node(node)
                }
            };
            match before {
                NONE => self.clients.of_mut(client).newest = at,
                before => self.nodes[before as usize].older = at,
            }
            before = at;
            put += 1;
        }
        self.set_newer(client, older, before);
        self.clients.of_mut(client).blocks += put;
        self.held += put;
    }

    /// What follows `at` on the older side; NONE stands for the newest end of the client's list.
    fn older_than(&self, client: u32, at: u32) -> u32 {
        match at {
            NONE => self.clients.of(client).newest,
            at => self.nodes[at as usize].older,
        }
    }

    /// What follows `at` on the newer side; NONE stands for the oldest end of the client's list.
    fn set_newer(&mut self, client: u32, at: u32, newer: u32) {
        match at {
            NONE => self.clients.of_mut(client).oldest = newer,
            at => self.nodes[at as usize].newer = newer,
        }
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

/// Touches nodes from `at` to the newer side of their list as long as they are a client's and the last of `blocks`, in turn;
/// notes them, and says how many. Apart from its caller, as it is most of a recording.
#[inline(never)]
fn touch_run(
    nodes: &mut [Node],
    mut at: u32,
    client: u32,
    blocks: &[u64],
    found: &mut [u32],
    stamp: Stamp,
    owner: Owner,
) -> usize {
    let mut same = 0;
    for (block, found) in blocks.iter().zip(found).rev() {
        let Some(node) = nodes.get_mut(at as usize) else { break };
        if node.identity != *block || node.owner.client() != client || node.is_later_than(stamp) {
            break;
        }
        node.at = stamp.at;
        node.owner = owner;
        *found = at;
        at = node.newer;
        same += 1;
    }
    same
}

fn stamp_in(nodes: &[Node]) -> impl Fn(u32) -> Stamp + '_ {
    |at| nodes[at as usize].stamp()
}

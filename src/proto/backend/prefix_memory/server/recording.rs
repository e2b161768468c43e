//! Recording a prompt.
//!
//! Two passes at most. From the prompt's tail to its head the blocks that are held are touched: neighbours in the prompt are
//! mostly neighbours in the list too and are moved in one piece. Those that nobody holds are announced meanwhile, as far as that can
//! be, so that they are searched for just once. If some are missing, room is made, as if they were there already, and then they are
//! put in from the head to the tail.
//!
//! *Invariant*: when it returns, `held` ≤ `capacity`, and the client is in the heap again if it owns a block.
//! *Bound and cost*: O(1) per block; O(log clients) per recording, and per client that loses blocks.

use crate::proto::backend::prefix_memory::index::Index;
use crate::proto::backend::prefix_memory::{NONE, Stamp};
use crate::proto::ids::ClientId;

use super::{Node, Owner, Run, ServerMemory, TOLD, announced_max, stamp_in};

/// In place of a node: the block is not held, or was touched later than the prompt that is recorded.
const ABSENT: u32 = NONE;
const LATER: u32 = NONE - 1;
/// Beside a node's number: it is announced only.
pub(super) const ANNOUNCED: u32 = 1 << 31;

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

impl ServerMemory {
    /// Remembers `blocks`, at most as many as `found` has room for, and says how many leading ones were held before.
    pub(in crate::proto::backend::prefix_memory) fn record(
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
        if self.nodes.capacity() == 0 {
            self.allocate();
        }
        let client = self.clients.admit(client);
        self.clients.lift(client, stamp_in(&self.nodes));
        let cursor = self.cursor(client, stamp);
        let mut recording =
            Recording { stamp, client, cursor, absent: 0, keep, tail: NONE, older_gone: false };
        let (blocks, found) = (&blocks[..keep], &mut found[..keep]);
        let matched = self.touch_held(&mut recording, found, blocks, index, slot);
        if recording.absent > 0 {
            while self.held + recording.absent > self.limit {
                self.make_room(&mut recording, found, blocks, index, slot);
            }
            // Where nothing of the prompt is kept, its place in the list may be gone too.
            if recording.keep > 0 {
                self.insert_absent(&recording, found, blocks, matched, index, slot);
            }
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
    fn touch_held(
        &mut self,
        recording: &mut Recording,
        found: &mut [u32],
        blocks: &[u64],
        index: &mut Index,
        slot: u16,
    ) -> usize {
        let Recording { stamp, client, .. } = *recording;
        let owner = Owner::new(client, stamp.shard);
        let mut matched = blocks.len();
        let mut run = Run { newest: NONE, oldest: NONE, client, blocks: 0 };
        let mut left = blocks.len();
        while left > 0 {
            left -= 1;
            let at = self.find(index, slot, blocks[left]);
            if at == NONE {
                found[left] = ABSENT;
                let (blocks, found) = (&blocks[..=left], &mut found[..=left]);
                let new = if self.announced < announced_max(self.capacity) {
                    self.announce_new(index, slot, blocks, found)
                } else {
                    let absent = index.absent_at_end(blocks);
                    found[left + 1 - absent..].fill(ABSENT);
                    absent
                };
                left -= new.saturating_sub(1);
                recording.absent += new.max(1) as u32;
                matched = left;
                continue;
            }
            if self.nodes[at as usize].owner.is_announced() {
                found[left] = at | ANNOUNCED;
                matched = left;
                recording.absent += 1;
                continue;
            }
            found[left] = at;
            let node = &self.nodes[at as usize];
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
        // Nothing of the prompt is left, and the limit is less than what was held before.
        self.evict(self.clients.of(client).oldest, client, index, slot);
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
        let mut at = from;
        while at < keep {
            let (found_on, blocks_on) = (&found[at..keep], &blocks[at..keep]);
            let ends = match found[at] {
                LATER => None,
                ABSENT => self.put_run(index, slot, found_on, blocks_on, before, older, stamp, owner),
                _ => {
                    let settled =
                        settle_run(&mut self.nodes, found_on, blocks_on, before, older, stamp, owner);
                    self.announced -= settled as u32;
                    let last = settled.checked_sub(1).map(|last| found_on[last]);
                    last.map(|last| (settled, found[at] & !ANNOUNCED, last & !ANNOUNCED))
                }
            };
            if let Some((new, first, last)) = ends {
                match before {
                    NONE => self.clients.of_mut(client).newest = first,
                    before => self.nodes[before as usize].older = first,
                }
                at += new;
                put += new as u32;
                before = last;
                continue;
            }
            let (block, found) = (&blocks[at], &found[at]);
            at += 1;
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
                None => match self.take_node(node, index, slot) {
                    NONE => continue,
                    at => at,
                },
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

    /// Puts absent blocks that nobody holds one behind the other, as long as the first of `found` are such, between `before` and `older`
    /// in a client's list: how many, and the first and the last node. What `before` is linked to is the caller's.
    #[inline(never)]
    #[expect(clippy::too_many_arguments, reason = "a loop's registers")]
    fn put_run(
        &mut self,
        index: &mut Index,
        slot: u16,
        found: &[u32],
        blocks: &[u64],
        before: u32,
        older: u32,
        stamp: Stamp,
        owner: Owner,
    ) -> Option<(usize, u32, u32)> {
        let mut new = 0;
        let mut first = NONE;
        let mut newer = before;
        for (identity, _) in blocks.iter().copied().zip(found.iter().take_while(|found| **found == ABSENT)) {
            let at = self.next_free();
            if !index.add_new(identity, slot, at) {
                break;
            }
            self.fill(Node { identity, at: stamp.at, newer, older, next: TOLD, owner });
            match new {
                0 => first = at,
                _ => self.nodes[newer as usize].older = at,
            }
            newer = at;
            new += 1;
        }
        (new > 0).then_some((new, first, newer))
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
}

/// Puts announced nodes one behind the other, as long as the first of `found` are such, between `before` and `older` in a client's
/// list; says how many. What `before` is linked to is the caller's. Apart from its caller as [`touch_run`].
#[inline(never)]
fn settle_run(
    nodes: &mut [Node],
    found: &[u32],
    blocks: &[u64],
    before: u32,
    older: u32,
    stamp: Stamp,
    owner: Owner,
) -> usize {
    let mut newer = before;
    let mut settled = 0;
    // What is not announced has no number of a node.
    let mut next = found[0] ^ ANNOUNCED;
    for (i, block) in blocks.iter().enumerate() {
        let at = next;
        let Some(node) = nodes.get_mut(at as usize) else { break };
        if node.identity != *block || !node.owner.is_announced() {
            break;
        }
        node.at = stamp.at;
        node.owner = owner;
        node.newer = newer;
        next = found.get(i + 1).map_or(NONE, |next| next ^ ANNOUNCED);
        node.older = next;
        newer = at;
        settled += 1;
    }
    if settled > 0 {
        nodes[newer as usize].older = older;
    }
    settled
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

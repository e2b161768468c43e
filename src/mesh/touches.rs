//! Touches between shards: which prompt went where, told to every peer, in word rings.
//!
//! A touch is three words (kind, server and number of blocks; client; time) and one per block: 8 × (3 + blocks) bytes per request and
//! peer, with at most [`TOUCH_BLOCKS_MAX`] blocks. It is copied into each peer's ring as a whole or, where the ring has no room, not
//! at all: that peer's replica then lacks it until the prompt comes again, and it is counted. Nobody is woken by a touch, except a
//! sleeper whose ring is more than half full.
//!
//! *Invariant*: a reader sees whole touches, and those of one peer in the order they were sent.
//! *Bound and cost*: one ring per ordered pair, of [`ring_words`] words; the system gives pages as they are first written, so without
//! touches they take none. Sending is one copy per peer, taking in O(shards) per touch to find the oldest; no allocation.
//! *Errors*: none.

use std::fmt;

use rtrb::{Consumer, Producer, RingBuffer};

use crate::clock::Nanos;
use crate::limits::{TOUCH_BLOCKS_MAX, TOUCH_RING_WORDS_MAX, TOUCH_RING_WORDS_MIN, TOUCH_RINGS_BYTES};
use crate::proto::backend::prefix_memory::{Touch, TouchKind};
use crate::proto::ids::{BackendId, ClientId, ShardId};

/// What a shard told its peers since the start, one count per peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TouchFigures {
    pub sent: u64,
    /// Found a peer's ring full.
    pub dropped: u64,
    /// Of those sent.
    pub bytes: u64,
}

/// Words before the blocks.
const HEAD_WORDS: usize = 3;

/// Length of each ring for so many shards.
pub fn ring_words(shards: usize) -> usize {
    let pairs = (shards * shards.saturating_sub(1)).max(1);
    (TOUCH_RINGS_BYTES / size_of::<u64>() / pairs).clamp(TOUCH_RING_WORDS_MIN, TOUCH_RING_WORDS_MAX)
}

fn head(touch: &Touch) -> [u64; HEAD_WORDS] {
    let kind = match touch.kind {
        TouchKind::Recorded => 0,
        TouchKind::Dropped => 1,
    };
    let blocks = touch.told().len() as u64;
    [kind | u64::from(touch.backend.0) << 8 | blocks << 32, touch.client.0, touch.at.0]
}

/// What a head says, its blocks aside.
#[derive(Clone, Copy, Debug)]
struct Head {
    at: Nanos,
    kind: TouchKind,
    backend: BackendId,
    client: ClientId,
    blocks: usize,
}

impl Head {
    fn read([what, client, at]: [u64; HEAD_WORDS]) -> Self {
        Head {
            at: Nanos(at),
            kind: if what & 0xff == 0 { TouchKind::Recorded } else { TouchKind::Dropped },
            backend: BackendId((what >> 8) as u16),
            client: ClientId(client),
            blocks: (what >> 32) as usize,
        }
    }
}

/// One peer's ring, and the touch that is next in it.
#[derive(Debug)]
struct Receiver {
    ring: Consumer<u64>,
    next: Option<Head>,
    /// Words that this poll may still take.
    left: usize,
}

impl Receiver {
    fn read_head(&mut self) {
        self.next = None;
        if self.left >= HEAD_WORDS {
            let words = self.ring.read_chunk(HEAD_WORDS).expect("what is left has arrived");
            // Dropped without a commit: it stays in the ring.
            let (first, second) = words.as_slices();
            let mut head = [0; HEAD_WORDS];
            for (word, read) in head.iter_mut().zip(first.iter().chain(second)) {
                *word = *read;
            }
            self.next = Some(Head::read(head));
        }
    }
}

/// One shard's end of all rings of touches.
pub(super) struct Touches {
    /// By receiver, and by sender; `None` for this shard itself.
    out: Vec<Option<Producer<u64>>>,
    incoming: Vec<Option<Receiver>>,
    /// Blocks of a touch that lies across a ring's end.
    joined: Vec<u64>,
    figures: TouchFigures,
}

impl fmt::Debug for Touches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Touches({} peers, {} dropped)", self.out.len().saturating_sub(1), self.figures.dropped)
    }
}

/// The ends of each shard.
pub(super) fn build(shards: usize) -> Vec<Touches> {
    let words = ring_words(shards);
    let mut ends: Vec<Touches> = (0..shards)
        .map(|_| Touches {
            out: Vec::new(),
            incoming: Vec::new(),
            joined: Vec::with_capacity(if shards > 1 { TOUCH_BLOCKS_MAX } else { 0 }),
            figures: TouchFigures::default(),
        })
        .collect();
    for from in 0..shards {
        for to in 0..shards {
            let (sender, ring) = RingBuffer::new(if from == to { 0 } else { words });
            ends[from].out.push((from != to).then_some(sender));
            // Rows are made in order of `from`, so each `incoming` ends up in that order too.
            ends[to].incoming.push((from != to).then_some(Receiver { ring, next: None, left: 0 }));
        }
    }
    ends
}

impl Touches {
    /// Copies a touch into every peer's ring that has room for it. Calls `wake` for peers whose ring is more than half full.
    pub(super) fn send(&mut self, touch: &Touch, mut wake: impl FnMut(ShardId)) {
        let head = head(touch);
        let blocks = touch.told();
        for (to, ring) in self.out.iter_mut().enumerate() {
            let Some(ring) = ring else { continue };
            let Ok(mut chunk) = ring.write_chunk(HEAD_WORDS + blocks.len()) else {
                self.figures.dropped += 1;
                wake(ShardId(to as u8));
                continue;
            };
            let (first, second) = chunk.as_mut_slices();
            match first.split_at_mut_checked(HEAD_WORDS) {
                Some((head_words, first)) => {
                    head_words.copy_from_slice(&head);
                    let (here, there) = blocks.split_at(first.len());
                    first.copy_from_slice(here);
                    second.copy_from_slice(there);
                }
                // The ring's end is within the head.
                None => {
                    let (here, there) = head.split_at(first.len());
                    first.copy_from_slice(here);
                    let (head_words, second) = second.split_at_mut(there.len());
                    head_words.copy_from_slice(there);
                    second.copy_from_slice(blocks);
                }
            }
            self.figures.sent += 1;
            self.figures.bytes += ((HEAD_WORDS + blocks.len()) * size_of::<u64>()) as u64;
            chunk.commit_all();
            // What the reader has taken is looked up (a line of another core's cache) only when it seems to lag.
            let half = ring.buffer().capacity() / 2;
            if ring.cached_slots() < half && ring.slots() < half {
                wake(ShardId(to as u8));
            }
        }
    }

    /// Hands over all that has arrived when it is called, oldest first, of equals the lower shard's first; says how many.
    pub(super) fn poll(&mut self, mut take: impl FnMut(ShardId, &Touch)) -> usize {
        let mut waiting = 0;
        for receiver in self.incoming.iter_mut().flatten() {
            // Senders put in whole touches, so these words are whole touches.
            receiver.left = receiver.ring.slots();
            receiver.read_head();
            waiting += usize::from(receiver.next.is_some());
        }
        let mut taken = 0;
        while waiting > 0 {
            let heads = self.incoming.iter().enumerate();
            let heads = heads.filter_map(|(from, receiver)| Some((receiver.as_ref()?.next?.at, from)));
            let (_, from) = heads.min().expect("one is waiting");
            let receiver = self.incoming[from].as_mut().expect("it has a head");
            let Head { at, kind, backend, client, blocks } = receiver.next.expect("it is the oldest");
            let chunk = receiver.ring.read_chunk(HEAD_WORDS + blocks).expect("touches are put in whole");
            let (first, second) = chunk.as_slices();
            let blocks = if second.is_empty() {
                &first[HEAD_WORDS..]
            } else if first.len() <= HEAD_WORDS {
                &second[HEAD_WORDS - first.len()..]
            } else {
                self.joined.clear();
                self.joined.extend_from_slice(&first[HEAD_WORDS..]);
                self.joined.extend_from_slice(second);
                &self.joined
            };
            let words = HEAD_WORDS + blocks.len();
            take(ShardId(from as u8), &Touch { kind, at, backend, client, blocks });
            chunk.commit_all();
            receiver.left -= words;
            receiver.read_head();
            waiting -= usize::from(receiver.next.is_none());
            taken += 1;
        }
        taken
    }

    pub(super) fn figures(&self) -> TouchFigures {
        self.figures
    }
}

#[cfg(test)]
mod tests;

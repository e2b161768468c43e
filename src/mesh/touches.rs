//! Touches between shards: which prompt went where, told to every shard, in word rings.
//!
//! A touch is three words (kind, server and number of blocks; client; time) and one per block: 8 × (3 + blocks) bytes per request and
//! peer, with at most [`TOUCH_BLOCKS_MAX`] blocks. It is copied into each peer's ring as a whole or, where the ring has no room, not
//! at all: that peer's replica then lacks it until the prompt comes again, and it is counted. A reader is shown a touch when it has
//! arrived, and leaves it in the ring. A shard tells itself too, and takes all touches, its own among them, in the order of their
//! stamps once they are [`TOUCH_SETTLE_MS`] old: so every shard takes the same touches in the same order. Nobody is woken by a touch, except a sleeper whose ring is more than half full.
//!
//! *Invariant*: a reader sees whole touches, and those of one shard in the order they were sent.
//! *Bound and cost*: one ring per ordered pair, and one to itself, of [`ring_words`] words; the system gives pages as they are first
//! written, so without touches they take none. Sending is one copy per shard, taking in O(shards) per touch to find the oldest; no
//! allocation. A ring that is more than half full is not left to settle: nothing is lost where it need not be.
//! *Errors*: none.

use std::fmt;

use rtrb::{Consumer, Producer, RingBuffer};

use crate::clock::Nanos;
use crate::limits::{
    TOUCH_BLOCKS_MAX, TOUCH_RING_WORDS_MAX, TOUCH_RING_WORDS_MIN, TOUCH_RINGS_BYTES, TOUCH_SETTLE_MS,
};
use crate::proto::backend::prefix_memory::{Touch, TouchKind, TouchStage};
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
    (TOUCH_RINGS_BYTES / size_of::<u64>() / (shards * shards))
        .clamp(TOUCH_RING_WORDS_MIN, TOUCH_RING_WORDS_MAX)
}

fn head(touch: &Touch) -> [u64; HEAD_WORDS] {
    let (kind, of) = match touch.kind {
        TouchKind::Recorded(client) => (0, client.0),
        TouchKind::Dropped(at) => (1, at.0),
    };
    let blocks = touch.told().len() as u64;
    [kind | u64::from(touch.backend.0) << 8 | blocks << 32, of, touch.at.0]
}

/// What a head says, its blocks aside.
#[derive(Clone, Copy, Debug)]
struct Head {
    at: Nanos,
    kind: TouchKind,
    backend: BackendId,
    blocks: usize,
}

impl Head {
    fn read([what, of, at]: [u64; HEAD_WORDS]) -> Self {
        Head {
            at: Nanos(at),
            kind: match what & 0xff {
                0 => TouchKind::Recorded(ClientId(of)),
                _ => TouchKind::Dropped(Nanos(of)),
            },
            backend: BackendId((what >> 8) as u16),
            blocks: (what >> 32) as usize,
        }
    }
}

/// One shard's ring, and the touch that is next in it.
#[derive(Debug)]
struct Receiver {
    ring: Consumer<u64>,
    next: Option<Head>,
    /// Words that this poll may still take, and those of them that were shown.
    left: usize,
    shown: usize,
}

/// A touch that begins `at` words into what a ring holds. `joined` is for blocks that lie across the ring's end.
fn read<'a>((first, second): (&'a [u64], &'a [u64]), at: usize, joined: &'a mut Vec<u64>) -> Touch<'a> {
    let Head { at: time, kind, backend, blocks } = read_head((first, second), at);
    let (from, to) = (at + HEAD_WORDS, at + HEAD_WORDS + blocks);
    let blocks = if to <= first.len() {
        &first[from..to]
    } else if from >= first.len() {
        &second[from - first.len()..to - first.len()]
    } else {
        joined.clear();
        joined.extend_from_slice(&first[from..]);
        joined.extend_from_slice(&second[..to - first.len()]);
        joined
    };
    Touch { kind, at: time, backend, blocks }
}

fn read_head((first, second): (&[u64], &[u64]), at: usize) -> Head {
    Head::read(std::array::from_fn(|i| match first.get(at + i) {
        Some(word) => *word,
        None => second[at + i - first.len()],
    }))
}

impl Receiver {
    /// Looks at the touch that is next, if this poll may still take one.
    fn look(&mut self) {
        self.next = (self.left > 0).then(|| {
            // Dropped without a commit: it stays in the ring.
            let words = self.ring.read_chunk(HEAD_WORDS).expect("touches are put in whole");
            read_head(words.as_slices(), 0)
        });
    }
}

/// One shard's end of all rings of touches.
pub(super) struct Touches {
    me: ShardId,
    /// By receiver, and by sender, this shard itself among them. None at all in a process of one shard: there is no order to keep.
    out: Vec<Producer<u64>>,
    incoming: Vec<Receiver>,
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
    let mut ends: Vec<Touches> = (0..shards)
        .map(|me| Touches {
            me: ShardId(me as u8),
            out: Vec::new(),
            incoming: Vec::new(),
            joined: Vec::with_capacity(if shards > 1 { TOUCH_BLOCKS_MAX } else { 0 }),
            figures: TouchFigures::default(),
        })
        .collect();
    if shards > 1 {
        let words = ring_words(shards);
        for from in 0..shards {
            for to in 0..shards {
                let (sender, ring) = RingBuffer::new(words);
                ends[from].out.push(sender);
                // Rows are made in order of `from`, so each `incoming` ends up in that order too.
                ends[to].incoming.push(Receiver { ring, next: None, left: 0, shown: 0 });
            }
        }
    }
    ends
}

impl Touches {
    /// Copies a touch into every ring that has room for it; false: not into the one to this shard itself. Calls `wake` for peers
    /// whose ring is more than half full.
    pub(super) fn send(&mut self, touch: &Touch, mut wake: impl FnMut(ShardId)) -> bool {
        let head = head(touch);
        let blocks = touch.told();
        let mut told_itself = false;
        for (to, ring) in self.out.iter_mut().enumerate() {
            let itself = to == self.me.index();
            let Ok(mut chunk) = ring.write_chunk(HEAD_WORDS + blocks.len()) else {
                if !itself {
                    self.figures.dropped += 1;
                    wake(ShardId(to as u8));
                }
                continue;
            };
            told_itself |= itself;
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
            if !itself {
                self.figures.sent += 1;
                self.figures.bytes += ((HEAD_WORDS + blocks.len()) * size_of::<u64>()) as u64;
            }
            chunk.commit_all();
            // What the reader has taken is looked up (a line of another core's cache) only when it seems to lag.
            let half = ring.buffer().capacity() / 2;
            if !itself && ring.cached_slots() < half && ring.slots() < half {
                wake(ShardId(to as u8));
            }
        }
        told_itself
    }

    /// Shows what peers have sent since the last poll, then hands over what has settled at `now`, oldest first, of equals the lower
    /// shard's first; says how many were handed over. Both only of what has arrived when it is called.
    pub(super) fn poll(&mut self, now: Nanos, mut take: impl FnMut(ShardId, TouchStage, &Touch)) -> usize {
        let mut settled = Nanos(now.0.saturating_sub(TOUCH_SETTLE_MS * 1_000_000));
        for (from, receiver) in self.incoming.iter_mut().enumerate() {
            // Senders put in whole touches, so these words are whole touches.
            receiver.left = receiver.ring.slots();
            if receiver.left > receiver.ring.buffer().capacity() / 2 {
                settled = Nanos::NEVER;
            }
            if from != self.me.index() && receiver.shown < receiver.left {
                let words = receiver.ring.read_chunk(receiver.left).expect("so many have arrived");
                while receiver.shown < receiver.left {
                    let touch = read(words.as_slices(), receiver.shown, &mut self.joined);
                    take(ShardId(from as u8), TouchStage::Arrived, &touch);
                    receiver.shown += HEAD_WORDS + touch.blocks.len();
                }
            }
            receiver.look();
        }
        let mut taken = 0;
        loop {
            let heads = self.incoming.iter().enumerate();
            let heads = heads.filter_map(|(from, receiver)| Some((receiver.next?.at, from)));
            let Some((at, from)) = heads.min() else { return taken };
            if at > settled {
                return taken;
            }
            let receiver = &mut self.incoming[from];
            let length = HEAD_WORDS + receiver.next.map_or(0, |head| head.blocks);
            let words = receiver.ring.read_chunk(length).expect("touches are put in whole");
            take(ShardId(from as u8), TouchStage::Settled, &read(words.as_slices(), 0, &mut self.joined));
            words.commit_all();
            receiver.left -= length;
            receiver.shown = receiver.shown.saturating_sub(length);
            receiver.look();
            taken += 1;
        }
    }

    pub(super) fn figures(&self) -> TouchFigures {
        self.figures
    }
}

#[cfg(test)]
mod tests;

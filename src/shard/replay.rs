//! A request that streams through and may have to be sent again: its head, and a copy of its body.
//!
//! *Invariant*: the copy is all of the body that has come, from its first byte; or the body has outgrown it, and the copy goes once what it
//! held has been sent.
//! *Bound*: the limit it is made with, and the shard's part of `buffered_bytes_max` (see [`super::intake`]).
//! *Source*: the Stargate rules, section 5.1.

use super::buffers::LARGE_BYTES;

/// See the module's text.
pub struct Replay {
    /// The request's head, as it came.
    pub head: Vec<u8>,
    /// The body's content, without chunk framing.
    bytes: Vec<u8>,
    bytes_max: usize,
    /// How much of `bytes` has been sent in the present attempt.
    sent: usize,
    /// Some attempt has begun to send it.
    begun: bool,
    overflow: bool,
    /// The end of a chunked body has been sent in the present attempt.
    pub ended: bool,
}

impl Replay {
    /// `bytes_max`: of the copy.
    pub fn new(head: Vec<u8>, bytes_max: usize) -> Replay {
        Replay { head, bytes: Vec::new(), bytes_max, sent: 0, begun: false, overflow: false, ended: false }
    }

    /// More of the body has come; `sent`: it is on its way already. `may_hold` is asked whether so many bytes more may be
    /// held. True: the copy has been given up.
    pub fn push(&mut self, data: &[u8], sent: bool, may_hold: impl FnOnce(usize) -> bool) -> bool {
        if self.overflow {
            return false;
        }
        let total = self.bytes.len() + data.len();
        if total > self.bytes_max || !may_hold(data.len()) {
            self.overflow = true;
            if !sent {
                // It came with the head: it has to get out once.
                self.bytes.extend_from_slice(data);
            }
            return self.drop_sent();
        }
        self.bytes.extend_from_slice(data);
        if sent {
            self.sent = total;
        }
        false
    }

    /// A new attempt begins.
    pub fn rewind(&mut self) {
        (self.sent, self.ended, self.begun) = (0, false, true);
    }

    /// The next piece to send of what is held, at most [`LARGE_BYTES`]; it counts as sent.
    pub fn next_piece(&mut self) -> &[u8] {
        let from = self.sent;
        self.sent = self.bytes.len().min(from + LARGE_BYTES);
        &self.bytes[from..self.sent]
    }

    /// Frees the copy if it is of no more use. True: it was.
    pub fn drop_sent(&mut self) -> bool {
        let over = self.overflow && self.sent == self.bytes.len();
        if over {
            (self.bytes, self.sent) = (Vec::new(), 0);
        }
        over
    }

    /// All that is held has been sent in the present attempt.
    pub fn is_sent(&self) -> bool {
        self.sent == self.bytes.len()
    }

    /// Bytes held.
    pub fn held_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The body has outgrown the copy, which cannot be sent again.
    pub fn is_lost(&self) -> bool {
        self.overflow && self.begun
    }

    /// It has outgrown the copy, or would: every byte counts.
    pub fn is_over(&self) -> bool {
        self.overflow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(replay: &mut Replay) -> Vec<u8> {
        replay.rewind();
        let mut out = Vec::new();
        while !replay.is_sent() {
            out.extend_from_slice(replay.next_piece());
        }
        out
    }

    #[test]
    fn what_came_is_sent_again_from_the_start() {
        let mut replay = Replay::new(b"head".to_vec(), 3 * LARGE_BYTES);
        let body: Vec<u8> = (0..2 * LARGE_BYTES + 5).map(|i| i as u8).collect();
        assert!(!replay.push(&body[..10], false, |n| n == 10));
        replay.rewind();
        assert_eq!(replay.next_piece(), &body[..10]);
        assert!(!replay.push(&body[10..], true, |_| true));
        assert!(replay.is_sent() && replay.held_bytes() == body.len());
        assert_eq!(replay.next_piece(), b"", "what went out as it came is not sent twice");
        assert_eq!(all(&mut replay), body);
        assert_eq!(all(&mut replay), body);
        assert!(!replay.is_lost());
    }

    #[test]
    fn an_outgrown_copy_is_sent_once_and_freed() {
        let mut replay = Replay::new(Vec::new(), 8);
        assert!(!replay.push(b"12345678", false, |_| true), "the limit itself fits");
        assert!(!replay.push(b"9", false, |_| true), "not yet sent");
        assert!(!replay.is_lost(), "nothing of it is gone yet");
        replay.rewind();
        assert!(replay.is_lost());
        assert_eq!(replay.next_piece(), b"123456789");
        assert!(replay.drop_sent());
        assert_eq!((replay.held_bytes(), replay.is_sent()), (0, true));
        assert!(!replay.push(b"x", true, |_| panic!("nothing is held any more")));
        assert_eq!(replay.held_bytes(), 0);
    }

    #[test]
    fn a_budget_that_is_spent_gives_the_copy_up() {
        let mut replay = Replay::new(Vec::new(), 100);
        replay.rewind();
        assert!(!replay.push(b"abc", true, |_| true));
        assert!(replay.push(b"def", true, |_| false), "freed at once: all of it was sent");
        assert!(replay.is_lost() && replay.held_bytes() == 0);
    }
}

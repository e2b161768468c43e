//! Keeps the log readable while a server fails a thousand times a second.
//!
//! The first fault of a kind on a server is told at once; those that follow are counted and told once a second, as one
//! line. After [`QUIET_MS`] without one, the next counts as a first again.
//!
//! *Invariant*: pure; every fault noted is told, alone or in a count.
//! *Bound and cost*: one map entry per server and kind that failed lately; O(1) per fault, O(entries) per sweep.

use std::collections::BTreeMap;

use crate::clock::Nanos;
use crate::proto::ids::BackendId;
use crate::proto::message::UpstreamFault;

/// Faults are counted over this long.
pub const WINDOW_MS: u64 = 1000;
/// Silence after which a kind of fault is news again.
pub const QUIET_MS: u64 = 10_000;

/// One line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    pub backend: BackendId,
    pub fault: UpstreamFault,
    /// Of the last one counted; 0 where the operating system gave none.
    pub errno: i32,
    /// How many this line stands for; `None`: it is the first of its kind.
    pub count: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Kind {
    fault: UpstreamFault,
    window: Nanos,
    last: Nanos,
    count: u64,
    errno: i32,
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub struct FaultLog {
    kinds: BTreeMap<(BackendId, u8), Kind>,
}

impl FaultLog {
    /// Notes one fault; returns a line if it is to be told now.
    pub fn note(&mut self, now: Nanos, backend: BackendId, fault: UpstreamFault, errno: i32) -> Option<Line> {
        let key = (backend, fault as u8);
        match self.kinds.get_mut(&key) {
            Some(kind) => {
                if kind.count == 0 {
                    kind.window = now;
                }
                kind.count += 1;
                kind.last = now;
                kind.errno = errno;
                None
            }
            None => {
                self.kinds.insert(key, Kind { fault, window: now, last: now, count: 0, errno });
                Some(Line { backend, fault, errno, count: None })
            }
        }
    }

    /// The counts whose second is over. Call it about once a second.
    pub fn sweep(&mut self, now: Nanos) -> Vec<Line> {
        let mut lines = Vec::new();
        self.kinds.retain(|(backend, _), kind| {
            if kind.count > 0 && now >= kind.window.plus_ms(WINDOW_MS) {
                let count = Some(std::mem::take(&mut kind.count));
                lines.push(Line { backend: *backend, fault: kind.fault, errno: kind.errno, count });
            }
            kind.count > 0 || now < kind.last.plus_ms(QUIET_MS)
        });
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: BackendId = BackendId(0);
    const B: BackendId = BackendId(1);

    #[test]
    fn the_first_of_a_kind_is_told_the_rest_is_counted() {
        let mut log = FaultLog::default();
        let first = log.note(Nanos::ZERO, A, UpstreamFault::Connect, 111);
        assert_eq!(first, Some(Line { backend: A, fault: UpstreamFault::Connect, errno: 111, count: None }));
        for ms in 1..=500 {
            assert_eq!(log.note(Nanos::from_ms(ms), A, UpstreamFault::Connect, 111), None);
        }
        assert!(log.note(Nanos::from_ms(2), A, UpstreamFault::Status, 0).is_some(), "another kind is news");
        assert!(
            log.note(Nanos::from_ms(2), B, UpstreamFault::Connect, 111).is_some(),
            "another server is news"
        );
        assert_eq!(log.sweep(Nanos::from_ms(900)), []);
        let lines = log.sweep(Nanos::from_ms(1001));
        assert_eq!(lines.len(), 1, "kinds without a further fault have nothing to say");
        assert_eq!(
            (lines[0].backend, lines[0].fault, lines[0].count),
            (A, UpstreamFault::Connect, Some(500))
        );
        assert_eq!(log.sweep(Nanos::from_ms(2500)), []);
    }

    #[test]
    fn after_silence_a_kind_is_news_again_and_takes_no_memory() {
        let mut log = FaultLog::default();
        log.note(Nanos::ZERO, A, UpstreamFault::Truncated, 0);
        log.note(Nanos::from_ms(1), A, UpstreamFault::Truncated, 0);
        assert_eq!(log.sweep(Nanos::from_ms(QUIET_MS + 1)).len(), 1, "a late sweep still tells the count");
        assert!(log.kinds.is_empty());
        assert!(log.note(Nanos::from_ms(QUIET_MS + 2), A, UpstreamFault::Truncated, 0).is_some());
    }
}

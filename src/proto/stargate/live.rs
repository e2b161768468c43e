//! The requests that live in a slot, by priority and phase, as this shard has it: its own, exact, and those of each peer as last heard.
//!
//! Beside them stands which of them went out since the server's last report, or since its engine was last asked: what those figures
//! cannot include yet.
//!
//! *Invariant*: sums are those of the rows; a row of nothing is no row. Figures since a report are counted only from peers that have
//! handled the same reports.
//! *Bound and cost*: linear in the priorities in use, per call; a peer's rows only where it has some.
//! *Source*: the Stargate rules, sections 6.3, 6.4 and 6.7.

use super::by_priority::ByPriority;
use crate::proto::ids::ShardId;

/// More input tokens than this count as this, so that no sum of them overflows: years of work for any engine.
pub const LIVE_TOKENS_MAX: u64 = 1 << 40;

/// How far a request has come at its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Sent, not answered yet.
    Pending,
    /// Response head received, no output yet.
    Prefill,
    /// First output seen.
    Decode,
}

/// Requests of one shard and one priority in a slot, by phase, and their input tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub pending: u32,
    pub prefill: u32,
    pub decode: u32,
    pub pending_tokens: u64,
    pub prefill_tokens: u64,
    pub decode_tokens: u64,
}

impl Work {
    fn phase(&mut self, phase: Phase) -> (&mut u32, &mut u64) {
        match phase {
            Phase::Pending => (&mut self.pending, &mut self.pending_tokens),
            Phase::Prefill => (&mut self.prefill, &mut self.prefill_tokens),
            Phase::Decode => (&mut self.decode, &mut self.decode_tokens),
        }
    }

    fn add(&mut self, phase: Phase, tokens: u64) {
        let (requests, sum) = self.phase(phase);
        *requests += 1;
        *sum += tokens;
    }

    fn remove(&mut self, phase: Phase, tokens: u64) {
        let (requests, sum) = self.phase(phase);
        *requests -= 1;
        *sum -= tokens;
    }

    /// Puts `new` where `old` was.
    fn replace(&mut self, old: &Work, new: &Work) {
        self.pending = self.pending - old.pending + new.pending;
        self.prefill = self.prefill - old.prefill + new.prefill;
        self.decode = self.decode - old.decode + new.decode;
        self.pending_tokens = self.pending_tokens - old.pending_tokens + new.pending_tokens;
        self.prefill_tokens = self.prefill_tokens - old.prefill_tokens + new.prefill_tokens;
        self.decode_tokens = self.decode_tokens - old.decode_tokens + new.decode_tokens;
    }

    fn is_none(&self) -> bool {
        *self == Work::default()
    }

    /// All requests.
    pub fn requests(&self) -> u64 {
        self.queued() + u64::from(self.decode)
    }

    /// Requests without output.
    pub fn queued(&self) -> u64 {
        u64::from(self.pending) + u64::from(self.prefill)
    }

    pub fn tokens(&self) -> u64 {
        self.queued_tokens() + self.decode_tokens
    }

    pub fn queued_tokens(&self) -> u64 {
        self.pending_tokens + self.prefill_tokens
    }
}

/// The part of one shard's requests of one priority in a slot that a report does not include yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Since {
    /// Reports of the slot that the sender had handled; its figures since an earlier one are void.
    pub reports: u32,
    /// Live requests sent since that report, and their input tokens.
    pub requests: u32,
    pub tokens: u64,
    /// Answers of the engine's own metrics that the sender had handled.
    pub scrapes: u32,
    /// Live requests sent since the engine was last asked.
    pub since_scrape: u32,
}

/// What a request remembers of the slot it was counted in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    pub reports: u32,
    pub scrapes: u32,
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub struct Live {
    own: ByPriority<Work>,
    /// By shard; shorter while the last ones have said nothing.
    peers: Vec<ByPriority<Work>>,
    /// Of all shards.
    rows: ByPriority<Work>,
    sum: Work,
    own_since: ByPriority<Since>,
    peers_since: Vec<ByPriority<Since>>,
    marks: Marks,
}

impl Live {
    /// All shards' requests together.
    pub fn sum(&self) -> &Work {
        &self.sum
    }

    /// The same, by priority.
    pub fn rows(&self) -> &ByPriority<Work> {
        &self.rows
    }

    /// This shard's requests of all priorities.
    pub fn own_requests(&self) -> u64 {
        self.own.iter().map(|(_, work)| work.requests()).sum()
    }

    /// This shard's requests of a priority.
    pub fn own(&self, priority: u32) -> Work {
        self.own.of(priority).unwrap_or_default()
    }

    /// See [`Since`].
    pub fn own_since(&self, priority: u32) -> Since {
        let since = self.own_since.of(priority).unwrap_or_default();
        Since { reports: self.marks.reports, scrapes: self.marks.scrapes, ..since }
    }

    /// Requests sent since the last report, over all shards.
    pub fn since_report(&self) -> (u64, u64) {
        let own = self.own_since.iter();
        let rows = own.chain(self.heard_since());
        rows.fold((0, 0), |(requests, tokens), (_, row)| {
            (requests + u64::from(row.requests), tokens + row.tokens)
        })
    }

    /// The same of the peers alone, by priority; several may have the same, in no order.
    pub fn heard_since(&self) -> impl Iterator<Item = (u32, Since)> + '_ {
        let reports = self.marks.reports;
        let rows = self.peers_since.iter().flat_map(ByPriority::iter);
        rows.filter(move |(_, row)| row.reports == reports && row.requests > 0)
    }

    /// Requests sent since the engine was last asked, over all shards.
    pub fn since_scrape(&self) -> u64 {
        let own = self.own_since.iter().map(|(_, row)| u64::from(row.since_scrape));
        let rows = self.peers_since.iter().flat_map(ByPriority::iter);
        let heard = rows.filter(|(_, row)| row.scrapes == self.marks.scrapes);
        own.sum::<u64>() + heard.map(|(_, row)| u64::from(row.since_scrape)).sum::<u64>()
    }

    /// Counts a request of this shard in. What it returns has to come back with its end.
    pub fn begin(&mut self, priority: u32, tokens: u64) -> Marks {
        self.own.entry(priority).add(Phase::Pending, tokens);
        self.rows.entry(priority).add(Phase::Pending, tokens);
        self.sum.add(Phase::Pending, tokens);
        let since = self.own_since.entry(priority);
        since.requests += 1;
        since.tokens += tokens;
        since.since_scrape += 1;
        self.marks
    }

    pub fn advance(&mut self, priority: u32, tokens: u64, from: Phase, to: Phase) {
        for work in [self.own.entry(priority), self.rows.entry(priority), &mut self.sum] {
            work.remove(from, tokens);
            work.add(to, tokens);
        }
    }

    /// Counts a request of this shard out.
    pub fn end(&mut self, priority: u32, tokens: u64, phase: Phase, marks: Marks) {
        for rows in [&mut self.own, &mut self.rows] {
            let row = rows.entry(priority);
            row.remove(phase, tokens);
            if row.is_none() {
                rows.remove(priority);
            }
        }
        self.sum.remove(phase, tokens);
        let since = self.own_since.entry(priority);
        if marks.reports == self.marks.reports {
            since.requests -= 1;
            since.tokens -= tokens;
        }
        if marks.scrapes == self.marks.scrapes {
            since.since_scrape -= 1;
        }
        if since.requests == 0 && since.since_scrape == 0 {
            self.own_since.remove(priority);
        }
    }

    /// A report has come: it includes all that went out before.
    pub fn report(&mut self) {
        self.marks.reports += 1;
        self.own_since.each(|row| (row.requests, row.tokens) = (0, 0));
        self.own_since.retain(|_, row| row.since_scrape > 0);
    }

    /// The engine's figures have come, which include all that went out before it was asked: all but the requests of this shard that
    /// [`Live::note_since_scrape`] names next.
    pub fn scrape(&mut self) {
        self.marks.scrapes += 1;
        self.own_since.each(|row| row.since_scrape = 0);
        self.own_since.retain(|_, row| row.requests > 0);
    }

    /// A request of this shard went out after the engine was asked.
    pub fn note_since_scrape(&mut self, priority: u32, marks: &mut Marks) {
        marks.scrapes = self.marks.scrapes;
        self.own_since.entry(priority).since_scrape += 1;
    }

    /// What a request that goes out now is marked with.
    pub fn marks(&self) -> Marks {
        self.marks
    }

    /// Whether there are reports or scrapes to measure from.
    pub fn is_marked(&self) -> bool {
        self.marks != Marks::default()
    }

    /// A peer's requests of a priority. Whether that is news.
    pub fn hear(&mut self, from: ShardId, priority: u32, work: &Work) -> bool {
        let rows = of_peer(&mut self.peers, from);
        let old = rows.of(priority).unwrap_or_default();
        if old == *work {
            return false;
        }
        *rows.entry(priority) = *work;
        if work.is_none() {
            rows.remove(priority);
        }
        let row = self.rows.entry(priority);
        row.replace(&old, work);
        if row.is_none() {
            self.rows.remove(priority);
        }
        self.sum.replace(&old, work);
        true
    }

    /// A peer's requests of a priority that its reports do not include yet. Whether that is news.
    pub fn hear_since(&mut self, from: ShardId, priority: u32, since: &Since) -> bool {
        let rows = of_peer(&mut self.peers_since, from);
        if rows.of(priority).unwrap_or_default() == *since {
            return false;
        }
        *rows.entry(priority) = *since;
        if since.requests == 0 && since.since_scrape == 0 {
            rows.remove(priority);
        }
        true
    }
}

fn of_peer<T: Clone>(peers: &mut Vec<ByPriority<T>>, from: ShardId) -> &mut ByPriority<T> {
    if peers.len() <= from.index() {
        peers.resize_with(from.index() + 1, ByPriority::default);
    }
    &mut peers[from.index()]
}

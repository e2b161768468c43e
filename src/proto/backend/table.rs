//! This shard's replica of every server's load, health and permits.
//!
//! A row holds what a routing decision reads: this shard's own counts, exact, and the sum of what each peer last reported,
//! at most [`LOAD_DELTA_STALE_MS_MAX`](crate::limits::LOAD_DELTA_STALE_MS_MAX) old plus the ring's delay.
//!
//! *Invariant*: where a ceiling is in force, `in_flight` ≤ `held`: no request runs without a permit. Rows are only added.
//! Whoever keeps something in step with the rows (the groups' rosters) reads which of them changed since it last looked:
//! [`BackendTable::changes_since`].
//!
//! *Bound and cost*: one row of two cache lines per server and 4 bytes per server and shard, and 512 bytes of changes; every
//! operation O(1).

use std::cell::Cell;

use super::bench::Verdict;
use super::rates::{Rate, Rates};
use crate::clock::Nanos;
use crate::proto::backend::catalog::{Catalog, RoutingMode, Server};
use crate::proto::ids::{BackendId, ShardId};

/// Millionths: six decimals of a weight are exact, and ties are ties.
const WEIGHT_SCALE: f64 = 1_000_000.0;
/// Weights above this count as this.
const WEIGHT_MAX: f64 = 1_000_000.0;

/// A weight as the wheels and load comparisons count it: in millionths, at least 1 for a weight above 0, so that a tiny
/// weight is not a drained server. 0 for what is not a weight.
pub fn fixed_weight(weight: f64) -> u64 {
    if weight > 0.0 { ((weight.min(WEIGHT_MAX) * WEIGHT_SCALE).round() as u64).max(1) } else { 0 }
}

/// One server.
#[derive(Clone, Debug)]
pub struct Row {
    /// In millionths, see [`fixed_weight`].
    pub weight: u64,
    /// The ceiling in force over all shards; 0: no gate (none configured, or the pool ignores ceilings).
    pub ceiling: u32,
    /// In the catalog, with an address and known models.
    pub present: bool,
    /// Last word of the health checks.
    pub up: bool,
    /// Home wants free permits back as they become free.
    pub recalled: bool,
    /// This shard's requests on it.
    pub in_flight: u32,
    /// The peers' requests on it, as last heard.
    pub peers: u32,
    /// Prompt tokens that this shard's requests still have computed there, as far as estimated; 0 in pools whose
    /// algorithm does not ask for it.
    pub prefill_tokens: u64,
    /// The same of the peers' requests, as last heard.
    pub prefill_tokens_peers: u64,
    /// This shard's requests there whose prompt is not yet computed, and its peers', as last heard. In pools that count
    /// `prefill_tokens`.
    pub prefilling: u32,
    pub prefilling_peers: u32,
    /// Steps by which reports to this shard narrowed its prefix memory, and to its peers, as last heard. Below 0 where others
    /// narrowed and reports here widened.
    pub narrowed: i32,
    pub narrowed_peers: i32,
    /// When reports to this shard last did.
    pub narrowed_at: Nanos,
    /// Requests of this shard that asked for a permit there and have no answer yet.
    pub asked: u32,
    /// Permits leased to this shard.
    pub held: u32,
    /// The least number of permits that was free since the last sweep: so many nobody needed.
    pub free_low: u32,
    /// This shard's failures in a row.
    pub failures: u32,
    pub verdict: Verdict,
    /// Requests sent to it by this shard.
    pub dispatched: u64,
    /// Since when the peers' copy of `in_flight` differs; [`Nanos::NEVER`]: it does not.
    pub changed: Nanos,
}

impl Row {
    fn new() -> Self {
        Row {
            weight: 0,
            ceiling: 0,
            present: false,
            up: true,
            recalled: false,
            in_flight: 0,
            peers: 0,
            prefill_tokens: 0,
            prefill_tokens_peers: 0,
            prefilling: 0,
            prefilling_peers: 0,
            narrowed: 0,
            narrowed_peers: 0,
            narrowed_at: Nanos::ZERO,
            asked: 0,
            held: 0,
            free_low: 0,
            failures: 0,
            verdict: Verdict::default(),
            dispatched: 0,
            changed: Nanos::NEVER,
        }
    }

    /// Permits this shard holds and does not use.
    pub const fn free(&self) -> u32 {
        self.held.saturating_sub(self.in_flight)
    }
    pub const fn gated(&self) -> bool {
        self.ceiling != 0
    }
    /// Whether this shard may dispatch to it without asking.
    pub const fn open(&self) -> bool {
        !self.gated() || (!self.recalled && self.held > self.in_flight)
    }
    /// Over all shards, as far as heard.
    pub const fn total(&self) -> u32 {
        self.in_flight.saturating_add(self.peers)
    }
    /// What a decision compares: all that run there or are to.
    pub const fn load(&self) -> u32 {
        self.total().saturating_add(self.asked)
    }
    /// Whether some permit is believed to be free, here or elsewhere.
    pub const fn believed_room(&self) -> bool {
        self.open() || self.total() < self.ceiling
    }
    /// Could take requests, the bench aside.
    pub const fn fit(&self) -> bool {
        self.present && self.up && self.weight > 0
    }
    pub const fn eligible(&self, now: Nanos) -> bool {
        self.fit() && !self.verdict.benched(now)
    }
}

/// One shard's part of a server's load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub in_flight: u32,
    /// See [`Row::prefill_tokens`].
    pub prefill_tokens: u64,
    /// See [`Row::prefilling`].
    pub prefilling: u32,
    /// See [`Row::narrowed`].
    pub narrowed: i32,
}

/// Changes that are kept; more than that are as good as all.
const CHANGES_KEPT: usize = 256;

/// Which servers changed, in order.
#[derive(Debug)]
struct Changes {
    /// The last of them; the `i`th ever is at `i` modulo the length.
    kept: [BackendId; CHANGES_KEPT],
    /// How many there were ever.
    count: u64,
    /// How many somebody has read: a change of the same server behind that is a new one.
    read: Cell<u64>,
}

impl Changes {
    #[inline]
    fn note(&mut self, id: BackendId) {
        let last = self.kept[(self.count as usize).wrapping_sub(1) % CHANGES_KEPT];
        if self.count == self.read.get() || last != id {
            self.kept[self.count as usize % CHANGES_KEPT] = id;
            self.count += 1;
        }
    }
}

/// See the module's text.
#[derive(Debug)]
pub struct BackendTable {
    shards: usize,
    rows: Vec<Row>,
    /// By server, then shard.
    heard: Vec<Load>,
    /// Servers whose row says `changed`.
    changed: Vec<BackendId>,
    changes: Changes,
    /// How fast servers read input; kept up by whoever measures.
    rates: Rates,
}

impl BackendTable {
    pub fn new(shards: usize) -> Self {
        let changes = Changes { kept: [BackendId(0); CHANGES_KEPT], count: 0, read: Cell::new(0) };
        BackendTable {
            shards,
            rows: Vec::new(),
            heard: Vec::new(),
            changed: Vec::new(),
            changes,
            rates: Rates::new(shards),
        }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
    pub fn row(&self, id: BackendId) -> &Row {
        &self.rows[id.index()]
    }
    pub fn row_mut(&mut self, id: BackendId) -> &mut Row {
        self.changes.note(id);
        &mut self.rows[id.index()]
    }
    /// What a decision reads of a server has changed elsewhere: its spare permits.
    pub fn note_change(&mut self, id: BackendId) {
        self.changes.note(id);
    }
    /// How many changes there were ever: whoever has seen all of them asks for those since.
    pub fn change_count(&self) -> u64 {
        self.changes.count
    }
    /// The servers that changed since there were `count` changes, some perhaps more than once. `None`: too many to tell.
    #[inline]
    pub fn changes_since(&self, count: u64) -> Option<impl Iterator<Item = BackendId>> {
        let changes = &self.changes;
        let newer = changes.count - count;
        changes.read.set(changes.count);
        (newer <= CHANGES_KEPT as u64)
            .then(|| (count..changes.count).map(|i| changes.kept[i as usize % CHANGES_KEPT]))
    }
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }
    pub fn ids(&self) -> impl Iterator<Item = BackendId> + use<> {
        (0..self.rows.len()).map(|i| BackendId(i as u16))
    }

    /// Makes rows up to `id`: a peer may speak of a server before this shard has the catalog with it.
    pub fn ensure(&mut self, id: BackendId) {
        if self.rows.len() <= id.index() {
            self.rows.resize_with(id.index() + 1, Row::new);
            self.heard.resize(self.rows.len() * self.shards, Load::default());
            self.rates.ensure(self.rows.len());
        }
    }

    /// Takes over what the catalog says of a server; the ceiling it now has is returned and not yet in force.
    pub fn configure(&mut self, id: BackendId, catalog: &Catalog) -> u32 {
        self.ensure(id);
        let server: &Server = catalog.server(id);
        let row = self.row_mut(id);
        row.present = !server.removed && server.address.is_some() && server.models.is_some();
        row.weight = fixed_weight(server.weight);
        if server.removed {
            // A server of that name which comes back is a new one: it has not failed yet.
            row.up = true;
            row.failures = 0;
        }
        let unlimited = server.pool.is_some_and(|p| catalog.pool(p).routing_mode == RoutingMode::Unlimited);
        if unlimited { 0 } else { server.max_concurrency }
    }

    /// Counts a request of this shard in.
    pub fn begin(&mut self, now: Nanos, id: BackendId) {
        let row = self.row_mut(id);
        row.in_flight += 1;
        row.dispatched += 1;
        row.free_low = row.free_low.min(row.free());
        self.touch(now, id);
    }

    /// Counts a request of this shard out.
    pub fn end(&mut self, now: Nanos, id: BackendId) {
        let row = self.row_mut(id);
        assert!(row.in_flight > 0, "a request leaves a server once, after it was placed there");
        row.in_flight -= 1;
        self.touch(now, id);
    }

    fn touch(&mut self, now: Nanos, id: BackendId) {
        // Alone there is nobody to tell.
        if self.shards > 1 {
            let row = &mut self.rows[id.index()];
            if row.changed == Nanos::NEVER {
                row.changed = now;
                self.changed.push(id);
            }
        }
    }

    /// A peer's figure for a server.
    pub fn hear(&mut self, from: ShardId, id: BackendId, load: Load) {
        self.ensure(id);
        self.changes.note(id);
        let heard = &mut self.heard[id.index() * self.shards + from.index()];
        let row = &mut self.rows[id.index()];
        row.peers = row.peers - heard.in_flight + load.in_flight;
        row.prefill_tokens_peers = row.prefill_tokens_peers - heard.prefill_tokens + load.prefill_tokens;
        row.prefilling_peers = row.prefilling_peers - heard.prefilling + load.prefilling;
        row.narrowed_peers += load.narrowed - heard.narrowed;
        *heard = load;
    }

    /// Steps by which the prefix memory is narrowed on all shards' word, at least 0.
    pub fn narrowed(&self, id: BackendId) -> u32 {
        let row = &self.rows[id.index()];
        (row.narrowed + row.narrowed_peers).max(0) as u32
    }

    /// One step more (1) or less (-1) on this shard's word.
    pub fn narrow(&mut self, now: Nanos, id: BackendId, step: i32) {
        let row = &mut self.rows[id.index()];
        row.narrowed += step;
        row.narrowed_at = now;
        self.touch(now, id);
    }

    /// Prompt tokens that a request of this shard has computed there from now on.
    pub fn begin_prefill(&mut self, now: Nanos, id: BackendId, tokens: u64) {
        let row = &mut self.rows[id.index()];
        row.prefill_tokens += tokens;
        row.prefilling += 1;
        self.touch(now, id);
    }

    /// Those tokens are computed, or given up.
    pub fn end_prefill(&mut self, now: Nanos, id: BackendId, tokens: u64) {
        let row = &mut self.rows[id.index()];
        debug_assert!(row.prefill_tokens >= tokens && row.prefilling > 0, "what was begun ends once");
        row.prefill_tokens = row.prefill_tokens.saturating_sub(tokens);
        row.prefilling = row.prefilling.saturating_sub(1);
        self.touch(now, id);
    }

    /// How fast servers read input.
    pub fn rates(&self) -> &Rates {
        &self.rates
    }

    /// Lets something be noted of how fast a server reads; decisions see it when that changed what is published.
    pub fn rate(&mut self, id: BackendId, note: impl FnOnce(&mut Rates) -> bool) {
        self.ensure(id);
        if note(&mut self.rates) {
            self.changes.note(id);
        }
    }

    /// The next server whose measured rate the peers lack, with it.
    pub fn pop_rate(&mut self, me: ShardId) -> Option<(BackendId, Rate)> {
        self.rates.pop_change(me)
    }

    /// Has this server's measured rate told once more.
    pub fn resend_rate(&mut self, id: BackendId) {
        self.rates.resend(id);
    }

    /// What a peer last said of a server.
    pub fn heard(&self, from: ShardId, id: BackendId) -> Load {
        self.heard.get(id.index() * self.shards + from.index()).copied().unwrap_or_default()
    }

    /// Has this server's figure sent once more.
    pub fn resend(&mut self, id: BackendId, changed: Nanos) {
        let row = &mut self.rows[id.index()];
        if row.changed == Nanos::NEVER {
            self.changed.push(id);
        }
        row.changed = row.changed.min(changed);
    }

    pub fn has_changes(&self) -> bool {
        !self.changed.is_empty() || self.rates.has_changes()
    }

    /// The next server whose figure the peers lack, with that figure and since when.
    pub fn pop_change(&mut self) -> Option<(BackendId, Load, Nanos)> {
        let id = self.changed.pop()?;
        let row = &mut self.rows[id.index()];
        let load = Load {
            in_flight: row.in_flight,
            prefill_tokens: row.prefill_tokens,
            prefilling: row.prefilling,
            narrowed: row.narrowed,
        };
        Some((id, load, std::mem::replace(&mut row.changed, Nanos::NEVER)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_keep_six_decimals_and_stay_above_zero() {
        assert_eq!(fixed_weight(5.0), 5 * fixed_weight(1.0));
        assert_eq!(fixed_weight(0.2), 2 * fixed_weight(0.1));
        assert_eq!(fixed_weight(1e-12), 1);
        assert_eq!(fixed_weight(f64::INFINITY), fixed_weight(1e6));
        assert_eq!((fixed_weight(0.0), fixed_weight(-1.0), fixed_weight(f64::NAN)), (0, 0, 0));
    }

    #[test]
    fn peers_are_the_sum_of_what_each_said_last() {
        let mut table = BackendTable::new(3);
        let id = BackendId(2);
        let load =
            |in_flight, prefill_tokens| Load { in_flight, prefill_tokens, prefilling: 1, narrowed: -1 };
        table.hear(ShardId(1), id, load(4, 100));
        table.hear(ShardId(2), id, load(3, 30));
        table.hear(ShardId(1), id, load(1, 20));
        assert_eq!((table.row(id).total(), table.heard(ShardId(1), id), table.len()), (4, load(1, 20), 3));
        assert_eq!((table.row(id).prefill_tokens_peers, table.row(id).narrowed_peers), (50, -2));
        assert_eq!(table.row(id).prefilling_peers, 2);
    }

    #[test]
    fn a_change_is_told_once_with_its_first_time() {
        let mut table = BackendTable::new(2);
        let id = BackendId(0);
        table.ensure(id);
        table.begin(Nanos(5), id);
        table.begin(Nanos(6), id);
        table.end(Nanos(7), id);
        assert_eq!(table.pop_change(), Some((id, Load { in_flight: 1, ..Load::default() }, Nanos(5))));
        assert_eq!(table.pop_change(), None);
        table.resend(id, Nanos(5));
        assert_eq!(table.pop_change(), Some((id, Load { in_flight: 1, ..Load::default() }, Nanos(5))));
    }

    #[test]
    fn changes_are_told_once_to_each_reader_and_too_many_are_all() {
        let mut table = BackendTable::new(2);
        let (a, b) = (BackendId(0), BackendId(1));
        table.ensure(b);
        let start = table.change_count();
        table.begin(Nanos(1), a);
        table.end(Nanos(2), a);
        table.hear(ShardId(1), b, Load { in_flight: 1, ..Load::default() });
        let since = |table: &BackendTable, count| table.changes_since(count).map(Iterator::collect::<Vec<_>>);
        assert_eq!(since(&table, start), Some(vec![a, b]), "the same server at a stretch is one change");
        let seen = table.change_count();
        assert_eq!(since(&table, seen), Some(vec![]));
        // It has been read, so that this is a new one; and another reader still finds both.
        table.row_mut(b).asked += 1;
        assert_eq!(since(&table, seen), Some(vec![b]));
        assert_eq!(since(&table, start), Some(vec![a, b, b]));
        for _ in 0..CHANGES_KEPT / 2 {
            table.note_change(a);
            table.note_change(b);
        }
        assert_eq!(since(&table, seen), None);
        let last = table.change_count() - CHANGES_KEPT as u64;
        assert_eq!(since(&table, last).map(|ids| ids.len()), Some(CHANGES_KEPT));
    }
}

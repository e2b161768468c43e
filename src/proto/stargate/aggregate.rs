//! The statistics of a cluster, from those of its active servers.
//!
//! Rates and queues add up. Of what a cluster has as a whole (live requests, limit, totals, queue times, KV cache, greatest output rate)
//! the latest report is taken, because each of its servers reports for all; servers that do not report such a figure add what is
//! known of them here. Requests that went out since a server's report are added to what it reported.
//!
//! *Invariant*: the result depends on reports, scrapes and live requests alone, not on what it was before.
//! *Bound and cost*: linear in the servers and the priorities in use; no allocation in steady state.
//! *Source*: the Stargate rules, sections 6.3 to 6.5 and 6.7.

use super::by_priority::ByPriority;
use super::estimate::{delta_ms, is_rate};
use super::flight::Flights;
use super::layout::SlotId;
use super::queue_times::{add_step, staircase};
use super::stats::{Cluster, KvCache, QueueTimes, Stats};
use super::table::{Row, SlotTable};

/// Room to work in, kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    stats: Stats,
    queued: ByPriority<u64>,
}

/// The latest of some reports.
struct Latest<T>(Option<(u64, T)>);

impl<T> Latest<T> {
    fn note(&mut self, serial: u64, value: T) {
        if self.0.as_ref().is_none_or(|(latest, _)| *latest < serial) {
            self.0 = Some((serial, value));
        }
    }
    fn take(self) -> Option<T> {
        self.0.map(|(_, value)| value)
    }
}

/// A limit that is the sum of some, one of which may not be known.
#[derive(Default)]
struct Limit {
    sum: u64,
    unknown: bool,
}

impl Limit {
    fn add(&mut self, limit: u64) {
        self.sum = self.sum.saturating_add(limit);
        self.unknown |= limit == 0;
    }
    /// 0: not known.
    fn total(&self) -> u64 {
        if self.unknown { 0 } else { self.sum }
    }
}

/// How a cluster's figures moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Something that a request could wait for: fewer requests, less work, a higher limit or rate, more cache.
    pub eased: bool,
    /// Anything at all.
    pub at_all: bool,
    pub mean: bool,
    pub max: bool,
}

/// Brings a cluster up to date with its servers' slots. Says what moved.
pub fn refresh(
    cluster: &mut Cluster,
    members: &[SlotId],
    table: &mut SlotTable,
    flights: &Flights,
    scratch: &mut Scratch,
) -> Moved {
    let rtt_before = cluster.rtt_ns;
    cluster.rtt_ns = mean_rtt_ns(members, table);
    let stats = &mut scratch.stats;
    sum(stats, members, table);
    queue_times(stats, members, table, flights, &mut scratch.queued);
    let moved = Moved {
        eased: cluster.rtt_ns < rtt_before || is_easier(&cluster.stats, stats),
        at_all: cluster.rtt_ns != rtt_before || cluster.stats != *stats,
        mean: cluster.stats.last_mean_input_tps.to_bits() != stats.last_mean_input_tps.to_bits(),
        max: cluster.stats.max_input_tps.to_bits() != stats.max_input_tps.to_bits(),
    };
    std::mem::swap(&mut cluster.stats, stats);
    moved
}

fn mean_rtt_ns(members: &[SlotId], table: &SlotTable) -> u64 {
    let of = |id: &SlotId| {
        let slot = table.row(*id).slot.as_ref()?;
        table.server(slot.backend)?.rtt_ns
    };
    // One that is up by word alone has not been measured yet.
    let rtts = members.iter().filter_map(of);
    let (sum, count) = rtts.fold((0_u128, 0_u128), |(sum, count), rtt| (sum + u128::from(rtt), count + 1));
    sum.checked_div(count).unwrap_or(0) as u64
}

/// All but the queue times.
fn sum(stats: &mut Stats, members: &[SlotId], table: &SlotTable) {
    let times = std::mem::take(&mut stats.queue_times);
    *stats = Stats { queue_times: times, ..Stats::default() };
    let (mut running, mut limit, mut total) = (Latest(None), Latest(None), Latest(None));
    let (mut max_output, mut kv) = (Latest(None), Latest(None));
    let mut limits = Limit::default();
    // What is added to the latest reports, or stands alone.
    let (mut running_more, mut total_more) = (0_u64, 0_u64);
    let mut max_known = true;
    for id in members {
        let row = table.row(*id);
        let live = row.live.sum();
        let (since, since_tokens) = if row.reported.is_some() { row.live.since_report() } else { (0, 0) };
        let more = |reported: u64, more: u64| reported.saturating_add(more);
        stats.last_mean_input_tps += row.mean_tps();
        let max = row.max_tps();
        max_known &= is_rate(max);
        stats.max_input_tps = stats.max_input_tps.max(max);
        if let Some((serial, cache)) = row.kv() {
            kv.note(serial, cache);
        }
        let none = super::stats::Reported::default();
        let report = row.reported.as_deref().unwrap_or(&none);
        let serial = row.reported_serial;
        let add = |to: &mut u64, value: u64| *to = to.saturating_add(value);
        stats.output_tps += report.output_tps.unwrap_or(0.0);
        add(&mut stats.queue_size, report.queue_size.map_or(live.queued(), |n| more(n, since)));
        let queued = report.queued_input_size.map_or(live.queued_tokens(), |n| more(n, since_tokens));
        add(&mut stats.queued_input_size, queued);
        let reading = report.input_processing_queries.unwrap_or(u64::from(live.prefill));
        add(&mut stats.input_processing_queries, reading);
        let writing = report.output_generation_queries.unwrap_or(u64::from(live.decode));
        add(&mut stats.output_generation_queries, writing);
        let observed = report.observed_at_unix_ms.unwrap_or(0);
        stats.observed_at_unix_ms = stats.observed_at_unix_ms.max(observed);
        if let Some(tps) = report.max_output_tps {
            max_output.note(serial, tps);
        }
        match report.num_running_queries {
            Some(reported) => {
                running.note(serial, reported);
                add(&mut running_more, since);
            }
            None => add(&mut running_more, row.running()),
        }
        match report.total_query_input_size {
            Some(reported) => {
                total.note(serial, reported);
                add(&mut total_more, since_tokens);
            }
            None => add(&mut total_more, live.tokens()),
        }
        match report.max_engine_concurrency {
            Some(reported) => limit.note(serial, reported),
            None => limits.add(row.concurrency()),
        }
    }
    if !max_known {
        stats.max_input_tps = 0.0;
    }
    if let Some(reported) = limit.take() {
        limits.add(reported);
    }
    stats.max_engine_concurrency = limits.total();
    stats.num_running_queries = running.take().unwrap_or(0).saturating_add(running_more);
    stats.total_query_input_size = total.take().unwrap_or(0).saturating_add(total_more);
    stats.max_output_tps = max_output.take().unwrap_or(0.0);
    stats.kv = kv.take().unwrap_or(KvCache::default());
}

/// Whether the server's queue times are known here rather than reported. One that reports its queue and no times has none: what is
/// known here would be part of that queue.
fn counts_here(row: &Row) -> bool {
    row.reported
        .as_deref()
        .is_none_or(|report| report.queue_times.is_none() && report.queued_input_size.is_none())
}

fn queue_times(
    stats: &mut Stats,
    members: &[SlotId],
    table: &mut SlotTable,
    flights: &Flights,
    queued: &mut ByPriority<u64>,
) {
    let tps = stats.last_mean_input_tps;
    queued.clear();
    let mut latest = Latest(None);
    for id in members {
        let row = table.row(*id);
        if counts_here(row) {
            add_queued(row, queued);
        } else if row.reported.as_deref().is_some_and(|report| report.queue_times.is_some()) {
            latest.note(row.reported_serial, *id);
        }
    }
    let times = &mut stats.queue_times;
    let Some(latest) = latest.take() else {
        staircase(queued.iter(), tps, times);
        return;
    };
    times.clear();
    if let Some(reported) =
        table.row(latest).reported.as_deref().and_then(|report| report.queue_times.as_ref())
    {
        times.extend_from_slice(reported);
    }
    for id in members {
        let row = table.row_mut(*id);
        if !counts_here(row) && !times.is_empty() {
            reserve(row, flights, tps, times);
        }
    }
    if times.is_empty() {
        return;
    }
    // What servers without reports have queued is in nobody's report.
    for (priority, tokens) in queued.iter() {
        step(times, priority, tokens, tps);
    }
}

/// Adds to a reported staircase what went out since.
fn reserve(row: &mut Row, flights: &Flights, tps: f64, times: &mut QueueTimes) {
    if !row.reserved.is_of(tps) {
        row.reserved.reset(tps);
        let marks = row.live.marks();
        for flight in flights.newest_first(row.newest).take_while(|sent| sent.marks.reports == marks.reports)
        {
            row.reserved.add(flight.priority, flight.tokens);
        }
    }
    row.reserved.apply(times);
    for (priority, since) in row.live.heard_since() {
        step(times, priority, since.tokens, tps);
    }
}

fn step(times: &mut QueueTimes, priority: u32, tokens: u64, tps: f64) {
    match delta_ms(tokens, tps) {
        Some(ms) if !times.is_empty() => add_step(times, priority, ms),
        Some(_) => {}
        None => times.clear(),
    }
}

/// What a slot has queued: requests that are not answered at their own priority, those being read ahead of all.
fn add_queued(row: &Row, queued: &mut ByPriority<u64>) {
    for (priority, work) in row.live.rows().iter() {
        if work.pending_tokens > 0 {
            *queued.entry(priority) += work.pending_tokens;
        }
        if work.prefill_tokens > 0 {
            *queued.entry(0) += work.prefill_tokens;
        }
    }
}

fn is_easier(old: &Stats, new: &Stats) -> bool {
    let limit = |stats: &Stats| match stats.max_engine_concurrency {
        0 => u64::MAX,
        limit => limit,
    };
    new.num_running_queries < old.num_running_queries
        || limit(new) > limit(old)
        || new.queued_input_size < old.queued_input_size
        || new.queue_size < old.queue_size
        || new.last_mean_input_tps > old.last_mean_input_tps
        || new.max_input_tps > old.max_input_tps
        || new.kv.free_tokens > old.kv.free_tokens
        || new.kv.capacity_tokens > old.kv.capacity_tokens
        || is_lower(old, new)
}

/// Whether some priority waits less than before.
fn is_lower(old: &Stats, new: &Stats) -> bool {
    if old.queue_times == new.queue_times {
        return false;
    }
    let keys = old.queue_times.iter().chain(&new.queue_times).map(|(key, _)| *key);
    keys.into_iter().any(|key| queue_time(new, key) < queue_time(old, key))
}

/// Free slots or not; later than any time where it is not known.
fn queue_time(stats: &Stats, priority: u32) -> u64 {
    let times = &stats.queue_times;
    if times.is_empty() {
        // Where there are no times, the queue as a whole speaks.
        return delta_ms(stats.queued_input_size, stats.last_mean_input_tps).unwrap_or(u64::MAX);
    }
    let above = times.partition_point(|(key, _)| *key <= priority);
    if above == 0 { 0 } else { times[above - 1].1 }
}

#[cfg(test)]
mod tests;

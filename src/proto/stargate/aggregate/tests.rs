use super::*;
use crate::proto::ids::{BackendId, ShardId};
use crate::proto::stargate::layout::Slot;
use crate::proto::stargate::live::{Phase, Since, Work};
use crate::proto::stargate::request::Wish;
use crate::proto::stargate::stats::{Reported, Scraped};

/// Slots of one cluster, each of a server of its own, all in one cluster.
struct Rig {
    table: SlotTable,
    flights: Flights,
    scratch: Scratch,
    cluster: Cluster,
    members: Vec<SlotId>,
}

impl Rig {
    fn new(limits: &[u64]) -> Rig {
        let mut table = SlotTable::default();
        let members: Vec<SlotId> = (0..limits.len() as u32).map(SlotId).collect();
        for (id, limit) in members.iter().zip(limits) {
            let slot = Slot {
                backend: BackendId(id.0 as u16),
                server: format!("server-{}", id.0).into(),
                model: "m".into(),
                cluster_id: "c".into(),
                routing_keys: Vec::new(),
                advertised: true,
                active: true,
                input_tps: 0.0,
                max_concurrency: *limit,
            };
            table.configure(*id, &slot);
        }
        Rig {
            table,
            flights: Flights::default(),
            scratch: Scratch::default(),
            cluster: Cluster { id: "c".into(), ..Cluster::default() },
            members,
        }
    }

    fn refresh(&mut self) -> Moved {
        refresh(&mut self.cluster, &self.members, &mut self.table, &self.flights, &mut self.scratch)
    }

    fn stats(&mut self) -> &Stats {
        self.refresh();
        &self.cluster.stats
    }

    fn report(&mut self, at: usize, reported: &Reported) {
        self.table.report(self.members[at], reported);
    }

    fn rate(&mut self, at: usize, tps: f64) {
        let row = self.table.row_mut(self.members[at]);
        row.estimator = crate::proto::stargate::estimator::Estimator::with_prior(tps);
    }

    /// As a dispatch does it.
    fn begin(&mut self, at: usize, priority: u32, tokens: u64) -> u32 {
        let wish = Wish { priority, input_tokens: tokens, ..Wish::default() };
        let index = self.flights.open(&wish, 0);
        let row = self.table.row_mut(self.members[at]);
        self.flights.of_mut(index).marks = row.live.begin(priority, tokens);
        if row.reported.is_some() {
            row.reserved.add(priority, tokens);
        }
        self.flights.link(index, &mut row.newest);
        index
    }

    fn end(&mut self, at: usize, index: u32) {
        let row = self.table.row_mut(self.members[at]);
        let state = self.flights.of(index);
        let (priority, tokens, marks) = (state.priority, state.tokens, state.marks);
        if marks.reports == row.live.marks().reports {
            row.reserved.remove(priority, tokens);
        }
        row.live.end(priority, tokens, Phase::Pending, marks);
        self.flights.unlink(index, &mut row.newest);
        self.flights.close(index);
    }
}

/// All numbers of a report.
fn full(numbers: [u64; 9], tps: f64, queue_times: &[(u32, u64)]) -> Reported {
    let [output, queue, queued, reading, writing, running, limit, total, max_output] = numbers;
    Reported {
        output_tps: Some(output as f64),
        last_mean_input_tps: Some(tps),
        queue_size: Some(queue),
        queued_input_size: Some(queued),
        input_processing_queries: Some(reading),
        output_generation_queries: Some(writing),
        num_running_queries: Some(running),
        max_engine_concurrency: Some(limit),
        total_query_input_size: Some(total),
        max_output_tps: Some(max_output as f64),
        queue_times: Some(queue_times.to_vec()),
        ..Reported::default()
    }
}

#[test]
fn two_reports_make_the_example_of_a_cluster() {
    let mut rig = Rig::new(&[0, 0]);
    rig.report(0, &full([2, 1, 100, 1, 2, 11, 111, 1111, 40], 100.0, &[(1, 111)]));
    rig.report(1, &full([5, 2, 200, 3, 4, 7, 77, 777, 30], 120.0, &[(1, 222), (2, 333)]));
    rig.table.server_mut(BackendId(0)).rtt_ns = Some(1);
    rig.table.server_mut(BackendId(1)).rtt_ns = Some(4);
    let expected = Stats {
        output_tps: 7.0,
        last_mean_input_tps: 220.0,
        max_input_tps: 120.0,
        max_output_tps: 30.0,
        queue_size: 3,
        queued_input_size: 300,
        input_processing_queries: 4,
        output_generation_queries: 6,
        num_running_queries: 7,
        max_engine_concurrency: 77,
        total_query_input_size: 777,
        queue_times: vec![(1, 222), (2, 333)],
        ..Stats::default()
    };
    assert_eq!(rig.stats(), &expected);
    assert_eq!(rig.cluster.rtt_ns, 2);
    // The other one reports again: what is the cluster's as a whole is now as it says.
    rig.report(0, &full([2, 1, 100, 1, 2, 12, 112, 1112, 41], 100.0, &[]));
    let stats = rig.stats();
    assert_eq!((stats.num_running_queries, stats.max_engine_concurrency), (12, 112));
    assert_eq!((stats.total_query_input_size, stats.max_output_tps), (1112, 41.0));
    assert_eq!((stats.queue_times.len(), stats.queued_input_size), (0, 300));
    // It goes: the newest of those that are left speaks.
    rig.members.remove(0);
    let stats = rig.stats();
    assert_eq!((stats.num_running_queries, stats.queued_input_size), (7, 200));
    assert_eq!(stats.queue_times, [(1, 222), (2, 333)]);
}

#[test]
fn requests_since_a_report_are_added_until_they_end_or_the_next_one() {
    let mut rig = Rig::new(&[0, 0]);
    let first = rig.begin(0, 0, 30);
    rig.report(0, &full([0, 1, 30, 0, 0, 5, 9, 50, 0], 50.0, &[(2, 5)]));
    rig.report(1, &full([0, 2, 20, 0, 0, 3, 8, 40, 0], 50.0, &[(1, 10), (4, 40)]));
    let stats = rig.stats();
    assert_eq!((stats.num_running_queries, stats.queue_size, stats.queued_input_size), (3, 3, 50));
    let second = rig.begin(0, 2, 10);
    let third = rig.begin(1, 5, 10);
    let stats = rig.stats();
    // At 100 tokens per second each of them takes 100 ms; whichever server it is at, it is the cluster's.
    assert_eq!(stats.queue_times, [(1, 10), (2, 110), (4, 140), (5, 240)]);
    assert_eq!((stats.num_running_queries, stats.queue_size, stats.queued_input_size), (5, 5, 70));
    assert_eq!(stats.total_query_input_size, 60);
    rig.end(0, first);
    let stats = rig.stats();
    assert_eq!(
        (stats.num_running_queries, stats.queue_size),
        (5, 5),
        "a report has it, and the next will not"
    );
    rig.end(0, second);
    let stats = rig.stats();
    assert_eq!(stats.queue_times, [(1, 10), (4, 40), (5, 140)]);
    assert_eq!((stats.num_running_queries, stats.queue_size), (4, 4));
    rig.report(1, &full([0, 3, 30, 0, 0, 4, 8, 50, 0], 50.0, &[(5, 300)]));
    let stats = rig.stats();
    assert_eq!((stats.num_running_queries, stats.queue_size), (4, 4));
    assert_eq!(stats.queue_times, [(5, 300)]);
    rig.end(1, third);
    assert_eq!(rig.stats().num_running_queries, 4);
}

#[test]
fn a_rate_that_moves_gives_every_reservation_its_new_time() {
    let mut rig = Rig::new(&[0]);
    let times = |tps| Reported { last_mean_input_tps: Some(tps), ..full([0; 9], tps, &[(0, 0)]) };
    rig.report(0, &times(100.0));
    let flights: Vec<u32> = (0..3).map(|_| rig.begin(0, 0, 10)).collect();
    assert_eq!(rig.stats().queue_times, [(0, 300)]);
    // Another server doubles the cluster's rate.
    rig.members.push(SlotId(1));
    let slot = rig.table.row(SlotId(0)).slot.clone().unwrap();
    rig.table.configure(SlotId(1), &Slot { backend: BackendId(1), input_tps: 100.0, ..slot });
    assert_eq!(rig.stats().queue_times, [(0, 150)]);
    rig.end(0, flights[1]);
    assert_eq!(rig.stats().queue_times, [(0, 100)]);
    rig.members.pop();
    assert_eq!(rig.stats().queue_times, [(0, 200)]);
    // Without any rate nothing can be said.
    rig.report(0, &times(0.0));
    assert_eq!(rig.stats().queue_times, [(0, 0)]);
    rig.begin(0, 1, 10);
    assert_eq!(rig.stats().queue_times, []);
}

#[test]
fn what_is_counted_here_adds_up_over_servers() {
    let mut rig = Rig::new(&[4, 6]);
    rig.rate(0, 60.0);
    rig.rate(1, 40.0);
    rig.begin(0, 3, 100);
    let reading = rig.begin(1, 3, 50);
    rig.begin(1, 5, 10);
    let stats = rig.stats();
    assert_eq!((stats.num_running_queries, stats.max_engine_concurrency), (3, 10));
    assert_eq!((stats.queue_size, stats.queued_input_size, stats.total_query_input_size), (3, 160, 160));
    assert_eq!(stats.queue_times, [(3, 1500), (5, 1600)]);
    assert_eq!((stats.last_mean_input_tps, stats.max_input_tps), (100.0, 60.0));
    // What is being read cannot be overtaken; what writes has been read.
    let row = rig.table.row_mut(SlotId(1));
    row.live.advance(3, 50, Phase::Pending, Phase::Prefill);
    let stats = rig.stats();
    assert_eq!(stats.queue_times, [(0, 500), (3, 1500), (5, 1600)]);
    assert_eq!((stats.input_processing_queries, stats.queue_size), (1, 3));
    rig.table.row_mut(SlotId(1)).live.advance(3, 50, Phase::Prefill, Phase::Decode);
    let stats = rig.stats();
    assert_eq!(stats.queue_times, [(3, 1000), (5, 1100)]);
    assert_eq!((stats.output_generation_queries, stats.queue_size, stats.num_running_queries), (1, 2, 3));
    let _ = reading;
    // One limit that is not known leaves the cluster's unknown.
    let mut rig = Rig::new(&[4, 0]);
    assert_eq!(rig.stats().max_engine_concurrency, 0);
}

#[test]
fn a_queue_that_is_reported_without_times_is_not_mistaken_for_ours() {
    let mut rig = Rig::new(&[0]);
    let reported =
        Reported { last_mean_input_tps: Some(1000.0), queued_input_size: Some(5000), ..Reported::default() };
    rig.report(0, &reported);
    rig.begin(0, 0, 10);
    let stats = rig.stats();
    assert_eq!((stats.queued_input_size, stats.queue_times.len()), (5010, 0));
    assert_eq!(crate::proto::stargate::estimate::expected_queue_ms(stats, 0), Some(5010));
    // A rate alone leaves the queue to be counted here.
    rig.report(0, &Reported { last_mean_input_tps: Some(1000.0), ..Reported::default() });
    assert_eq!(rig.stats().queue_times, [(0, 10)]);
}

#[test]
fn the_greatest_rate_is_known_where_every_server_has_one() {
    let mut rig = Rig::new(&[0, 0]);
    let reports = |mean, max| Reported {
        last_mean_input_tps: Some(mean),
        max_input_tps: Some(max),
        ..Reported::default()
    };
    rig.report(0, &reports(100.0, 300.0));
    rig.report(1, &reports(100.0, 200.0));
    assert_eq!(rig.stats().max_input_tps, 300.0);
    rig.report(0, &reports(0.0, 0.0));
    let stats = rig.stats();
    assert_eq!((stats.max_input_tps, stats.last_mean_input_tps), (0.0, 100.0));
}

#[test]
fn kv_is_that_of_the_latest_report_or_scrape() {
    let mut rig = Rig::new(&[0, 0]);
    let kv = |free| KvCache { capacity_tokens: 100, used_tokens: 100 - free, free_tokens: free };
    let scraped = |free| Scraped { kv: Some(kv(free)), ..Scraped::default() };
    rig.table.scrape(SlotId(0), &scraped(10));
    assert_eq!(rig.stats().kv, kv(10));
    rig.report(1, &Reported { kv: Some(kv(20)), ..Reported::default() });
    assert_eq!(rig.stats().kv, kv(20));
    rig.table.scrape(SlotId(0), &scraped(30));
    assert_eq!(rig.stats().kv, kv(30));
    // What a server reports comes before what its engine publishes.
    rig.table.scrape(SlotId(1), &scraped(40));
    assert_eq!(rig.stats().kv, kv(30));
}

#[test]
fn peers_requests_count_like_ones_own() {
    let mut rig = Rig::new(&[5]);
    rig.rate(0, 100.0);
    rig.begin(0, 2, 10);
    let work = Work { pending: 2, pending_tokens: 20, decode: 1, decode_tokens: 7, ..Work::default() };
    let row = rig.table.row_mut(SlotId(0));
    assert!(row.live.hear(ShardId(3), 2, &work) && !row.live.hear(ShardId(3), 2, &work));
    let stats = rig.stats();
    assert_eq!((stats.num_running_queries, stats.queued_input_size), (4, 30));
    assert_eq!((stats.total_query_input_size, stats.queue_times.as_slice()), (37, &[(2, 300)][..]));
    rig.table.row_mut(SlotId(0)).live.hear(ShardId(3), 2, &Work::default());
    assert_eq!(rig.stats().num_running_queries, 1);
    // Beside a report: only what its sender's same report does not have.
    rig.report(0, &full([0, 0, 0, 0, 0, 10, 20, 0, 0], 100.0, &[(0, 1)]));
    let since = |reports| Since { reports, requests: 2, tokens: 10, ..Since::default() };
    rig.table.row_mut(SlotId(0)).live.hear_since(ShardId(1), 4, &since(0));
    assert_eq!(rig.stats().num_running_queries, 10);
    rig.table.row_mut(SlotId(0)).live.hear_since(ShardId(1), 4, &since(1));
    let stats = rig.stats();
    assert_eq!((stats.num_running_queries, stats.queue_times.as_slice()), (12, &[(0, 1), (4, 101)][..]));
    rig.report(0, &full([0, 0, 0, 0, 0, 10, 20, 0, 0], 100.0, &[(0, 1)]));
    assert_eq!(rig.stats().num_running_queries, 10);
}

#[test]
fn what_moved_is_told_apart() {
    let mut rig = Rig::new(&[5]);
    rig.rate(0, 100.0);
    assert_eq!(rig.refresh(), Moved { eased: true, at_all: true, mean: true, max: true });
    assert_eq!(rig.refresh(), Moved::default());
    let one = rig.begin(0, 1, 10);
    let busier = Moved { at_all: true, ..Moved::default() };
    assert_eq!(rig.refresh(), busier);
    rig.table.row_mut(SlotId(0)).live.advance(1, 10, Phase::Pending, Phase::Prefill);
    assert_eq!(rig.refresh(), busier, "it is in the way of more urgent ones now");
    rig.end_of(one);
    assert_eq!(rig.refresh(), Moved { eased: true, ..busier });
    rig.rate(0, 50.0);
    assert_eq!(rig.refresh(), Moved { mean: true, max: true, ..busier });
    rig.rate(0, 60.0);
    assert_eq!(rig.refresh(), Moved { eased: true, at_all: true, mean: true, max: true });
}

impl Rig {
    /// Ends a request that is being read.
    fn end_of(&mut self, index: u32) {
        let row = self.table.row_mut(self.members[0]);
        let state = self.flights.of(index);
        row.live.end(state.priority, state.tokens, Phase::Prefill, state.marks);
        self.flights.unlink(index, &mut row.newest);
        self.flights.close(index);
    }
}

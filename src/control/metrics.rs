//! The `/metrics` page: every figure of the process for Prometheus.
//!
//! *Invariant*: names and units don't change; base units (seconds); label values are server, pool and shard names of the
//! configuration, three-digit statuses and fixed words, so that label sets stay bounded whatever clients send.
//! *Bound and cost*: O(servers + pools + shards) per page.
//! *Source*: the configuration reference, list of metric names; the text format 0.0.4 of Prometheus and OpenMetrics 1.0.

use std::fmt::Error;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, EncodeLabelSet, EncodeMetric, NoLabelSet, prometheus_text, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::figures::{Figures, ServerRow};
use super::targets;
use crate::proto::error::Rejection;
use crate::proto::message::UpstreamFault;
use crate::proto::report::{BUCKETS_NS, Times};

/// Which of the two text formats to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text 0.0.4: what a plain `curl` gets.
    Prometheus,
    /// OpenMetrics 1.0, for scrapers that ask for it.
    OpenMetrics,
}

impl Format {
    /// The format that a scraper's `Accept` header asks for.
    pub fn accepted(accept: Option<&[u8]>) -> Format {
        let asked = b"application/openmetrics-text";
        let found = accept.is_some_and(|value| value.windows(asked.len()).any(|part| part == asked));
        if found { Format::OpenMetrics } else { Format::Prometheus }
    }

    pub const fn content_type(self) -> &'static str {
        match self {
            Format::Prometheus => prometheus_text::CONTENT_TYPE,
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Writes the page. `prefix`: what the names of the Stargate family's metrics begin with; `None`: no listener follows it.
pub fn render(figures: Figures, prefix: Option<&str>, format: Format) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page { figures, prefix: prefix.map(str::to_owned) }));
    let mut page = String::new();
    match format {
        Format::Prometheus => prometheus_text::encode(&mut page, &registry),
        Format::OpenMetrics => text::encode(&mut page, &registry),
    }
    .expect("writing to a String does not fail");
    page
}

#[derive(Debug)]
struct Page {
    figures: Figures,
    prefix: Option<String>,
}

/// A histogram: how many values are in each bucket, by upper bound.
pub(super) struct Buckets {
    pub(super) sum: f64,
    pub(super) count: u64,
    pub(super) buckets: Vec<(f64, u64)>,
}

/// Writes whole families, one after the other.
pub(super) struct Writer<'a>(DescriptorEncoder<'a>);

impl Writer<'_> {
    /// `name` without `_total`, which the encoder adds.
    pub(super) fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (L, u64)>,
    ) -> Result<(), Error> {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, count) in rows {
            ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn counter(&mut self, name: &str, help: &str, count: u64) -> Result<(), Error> {
        let metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(count).encode(metric)
    }

    pub(super) fn gauges<L: EncodeLabelSet, N: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (L, N)>,
    ) -> Result<(), Error> {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in rows {
            ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    pub(super) fn gauge<N: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        value: N,
    ) -> Result<(), Error> {
        let metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value).encode(metric)
    }

    pub(super) fn histograms<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        rows: impl IntoIterator<Item = (L, Buckets)>,
    ) -> Result<(), Error> {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, Buckets { sum, count, buckets }) in rows {
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }

    fn times(&mut self, name: &str, help: &str, times: &Times) -> Result<(), Error> {
        let bounds = BUCKETS_NS.iter().map(|ns| seconds(*ns)).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(times.counts).collect();
        self.0.encode_descriptor(name, help, None, MetricType::Histogram)?.encode_histogram::<NoLabelSet>(
            seconds(times.sum_ns),
            times.count(),
            &buckets,
            None,
        )
    }
}

impl Writer<'_> {
    /// What prefixes did.
    fn prefixes(&mut self, servers: &[ServerRow]) -> Result<(), Error> {
        self.counters(
            "ringway_prefix_blocks",
            "Prefix blocks of the prompts sent to a server: taken for cached there, and all.",
            servers.iter().flat_map(|row| {
                [("matched", row.kv.prefix_matched), ("total", row.kv.prefix_total)]
                    .map(|(kind, blocks)| ([("server", &*row.name), ("kind", kind)], blocks))
            }),
        )?;
        let mut tokens = |name, help, of: fn(&ServerRow) -> u64| {
            self.counters(name, help, servers.iter().map(|row| ([("server", &*row.name)], of(row))))
        };
        tokens(
            "ringway_reported_prompt_tokens",
            "Prompt tokens of the answers in which an engine reported cached tokens.",
            |row| row.kv.reported_prompt_tokens,
        )?;
        tokens("ringway_reported_cached_tokens", "What the engine had cached of them.", |row| {
            row.kv.reported_cached_tokens
        })?;
        tokens("ringway_predicted_cached_tokens", "What was foretold as cached of them.", |row| {
            row.kv.predicted_cached_tokens
        })?;
        let remembered = || servers.iter().filter(|row| row.kv.source.is_some());
        let mut gauges = |name, help, of: fn(&ServerRow) -> u64| {
            self.gauges(name, help, remembered().map(|row| ([("server", &*row.name)], of(row))))
        };
        gauges("ringway_memory_blocks", "Prefix blocks that a server is remembered to hold.", |row| {
            row.kv.memory.held
        })?;
        gauges("ringway_memory_capacity_blocks", "Prefix blocks that may be remembered.", |row| {
            row.kv.memory.capacity
        })?;
        gauges("ringway_memory_clients", "Clients that own at least one remembered block.", |row| {
            row.kv.memory.clients
        })?;
        self.counters(
            "ringway_memory_evicted_blocks",
            "Remembered blocks that made room for others since the memory last started empty.",
            remembered().map(|row| ([("server", &*row.name)], row.kv.memory.evicted)),
        )
    }
}

pub(super) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

impl Collector for Page {
    fn encode(&self, encoder: DescriptorEncoder) -> Result<(), Error> {
        let mut page = Writer(encoder);
        let figures = &self.figures;
        let servers = &figures.servers;
        let by_server = |name: &'static str| servers.iter().map(move |row| (name, &*row.name));

        page.0
            .encode_descriptor("ringway_build", "What runs.", None, MetricType::Info)?
            .encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
        page.counters(
            "ringway_requests",
            "Requests answered by a server, by status.",
            servers.iter().flat_map(|row| {
                row.statuses.iter().map(|(status, count)| {
                    let status = status.to_string();
                    (
                        vec![
                            ("pool", row.pool.to_string()),
                            ("server", row.name.to_string()),
                            ("status", status),
                        ],
                        *count,
                    )
                })
            }),
        )?;
        page.gauges(
            "ringway_in_flight",
            "Requests dispatched to a server and not yet finished.",
            by_server("server").zip(servers).map(|(label, row)| ([label], row.in_flight)),
        )?;
        page.gauges(
            "ringway_queue_depth",
            "Requests that wait for room in a pool.",
            figures.pools.iter().map(|pool| ([("pool", &*pool.name)], pool.queued)),
        )?;
        page.counters(
            "ringway_rejections",
            "Requests answered by the router itself, by reason.",
            Rejection::ALL.iter().map(|r| ([("reason", r.row().reason)], figures.rejections[*r as usize])),
        )?;
        page.counters(
            "ringway_retries",
            "Requests sent again after this server could not have read them.",
            by_server("server").zip(servers).map(|(label, row)| ([label], row.retries)),
        )?;
        page.counter("ringway_client_aborts", "Requests whose client went away.", figures.client_aborts)?;
        page.counters(
            "ringway_upstream_errors",
            "Exchanges with a server that failed, by kind.",
            servers.iter().flat_map(|row| {
                UpstreamFault::ALL.iter().map(|fault| {
                    ([("server", &*row.name), ("kind", fault.name())], row.faults[*fault as usize])
                })
            }),
        )?;
        page.times(
            "ringway_time_to_first_token_seconds",
            "From dispatch to the first byte of a streamed answer's body.",
            &figures.first_token,
        )?;
        page.times("ringway_queue_wait_seconds", "Time spent waiting for room.", &figures.queue_wait)?;
        page.times(
            "ringway_overhead_seconds",
            "Time spent inside the router per request, queue wait aside.",
            &figures.overhead,
        )?;
        page.gauge(
            "ringway_active_requests",
            "Requests whose head was read and that are not finished.",
            figures.shards.iter().map(|shard| u64::from(shard.active)).sum::<u64>(),
        )?;
        page.gauges(
            "ringway_connections",
            "Client connections open.",
            figures.shards.iter().map(|row| ([("shard", row.shard.to_string())], u64::from(row.connections))),
        )?;
        page.counter(
            "ringway_requests_finished",
            "Requests ended, however they ended.",
            figures.shards.iter().map(|shard| shard.finished).sum(),
        )?;
        page.gauges(
            "ringway_server_up",
            "1 while active checks find the server up.",
            by_server("server").zip(servers).map(|(label, row)| ([label], u64::from(row.standing.up))),
        )?;
        page.gauges(
            "ringway_server_benched",
            "1 while the server is benched after failures in a row.",
            by_server("server").zip(servers).map(|(label, row)| ([label], u64::from(row.standing.benched))),
        )?;
        page.gauge(
            "ringway_mesh_lag_seconds",
            "Age of the oldest figure of a peer that any shard decides by.",
            seconds(figures.shards.iter().map(|shard| shard.mesh_lag_ns).max().unwrap_or(0)),
        )?;
        page.counter(
            "ringway_notices_dropped",
            "Log notices lost because a shard's ring to the control thread was full.",
            figures.notices_dropped,
        )?;
        page.gauges(
            "ringway_drift_ratio",
            "Share of the pool's requests over the last minute, over the share of its weight, minus 1; the share itself at weight 0.",
            servers.iter().filter_map(|row| {
                Some(([("pool", &*row.pool), ("server", &*row.name)], row.drift.drift.filter(|_| row.drift.judged)?))
            }),
        )?;
        page.prefixes(servers)?;
        page.counters(
            "ringway_touches",
            "Uses of remembered prefixes told to the other shards, one count per shard told.",
            [
                ("sent", figures.shards.iter().map(|row| row.touches_sent).sum::<u64>()),
                ("dropped", figures.shards.iter().map(|row| row.touches_dropped).sum()),
            ]
            .map(|(kind, touches)| ([("kind", kind)], touches)),
        )?;
        page.counter(
            "ringway_touch_bytes",
            "Bytes that telling them took.",
            figures.shards.iter().map(|row| row.touch_bytes).sum(),
        )?;
        match &self.prefix {
            Some(prefix) => targets::encode(&mut page, prefix, &figures.targets),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::figures::tests::sample;
    use crate::proto::account::drift::Drift;
    use crate::proto::backend::prefix_memory::MemoryFigures;

    fn has(page: &str, line: &str) {
        assert!(page.lines().any(|l| l == line), "no line {line:?} on the page:\n{page}");
    }

    #[test]
    fn the_page_has_every_name_with_its_labels() {
        let page = render(sample(), None, Format::Prometheus);
        for line in [
            concat!("ringway_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
            r#"ringway_requests_total{pool="chat",server="gpu0",status="200"} 40"#,
            r#"ringway_requests_total{pool="chat",server="gpu0",status="503"} 2"#,
            r#"ringway_in_flight{server="gpu0"} 4"#,
            r#"ringway_in_flight{server="spare"} 0"#,
            r#"ringway_queue_depth{pool="chat"} 6"#,
            r#"ringway_rejections_total{reason="queue_full"} 8"#,
            r#"ringway_rejections_total{reason="unauthorized"} 0"#,
            r#"ringway_retries_total{server="gpu0"} 2"#,
            "ringway_client_aborts_total 2",
            r#"ringway_upstream_errors_total{server="gpu0",kind="connect"} 4"#,
            r#"ringway_upstream_errors_total{server="gpu0",kind="status"} 2"#,
            "ringway_active_requests 4",
            r#"ringway_connections{shard="1"} 5"#,
            "ringway_requests_finished_total 80",
            r#"ringway_server_up{server="gpu1"} 1"#,
            r#"ringway_server_up{server="spare"} 0"#,
            r#"ringway_server_benched{server="gpu1"} 1"#,
            r#"ringway_server_benched{server="gpu0"} 0"#,
            "ringway_mesh_lag_seconds 0.002",
            "ringway_notices_dropped_total 0",
            "# TYPE ringway_requests_total counter",
            "# TYPE ringway_queue_wait_seconds histogram",
        ] {
            has(&page, line);
        }
        assert!(!page.contains("_total_total"));
    }

    #[test]
    fn prefixes_and_drift_have_their_lines() {
        let mut figures = sample();
        figures.servers[1].drift = Drift { drift: Some(-0.25), judged: true, ..Drift::default() };
        figures.servers[2].drift = Drift { drift: Some(0.5), ..Drift::default() };
        let kv = &mut figures.servers[0].kv;
        kv.source = Some("default");
        (kv.prefix_matched, kv.prefix_total) = (6, 10);
        (kv.reported_prompt_tokens, kv.reported_cached_tokens, kv.predicted_cached_tokens) = (100, 60, 64);
        kv.memory = MemoryFigures {
            held: 7,
            capacity: 9,
            configured: 9,
            clients: 2,
            evicted: 3,
            ..MemoryFigures::default()
        };
        figures.shards[0].touches_sent = 4;
        figures.shards[1].touches_sent = 1;
        figures.shards[1].touch_bytes = 640;
        let page = render(figures, None, Format::Prometheus);
        for line in [
            r#"ringway_drift_ratio{pool="chat",server="gpu1"} -0.25"#,
            r#"ringway_prefix_blocks_total{server="gpu0",kind="matched"} 6"#,
            r#"ringway_prefix_blocks_total{server="gpu0",kind="total"} 10"#,
            r#"ringway_prefix_blocks_total{server="gpu1",kind="total"} 0"#,
            r#"ringway_reported_prompt_tokens_total{server="gpu0"} 100"#,
            r#"ringway_reported_cached_tokens_total{server="gpu0"} 60"#,
            r#"ringway_predicted_cached_tokens_total{server="gpu0"} 64"#,
            r#"ringway_memory_blocks{server="gpu0"} 7"#,
            r#"ringway_memory_capacity_blocks{server="gpu0"} 9"#,
            r#"ringway_memory_clients{server="gpu0"} 2"#,
            r#"ringway_memory_evicted_blocks_total{server="gpu0"} 3"#,
            r#"ringway_touches_total{kind="sent"} 5"#,
            r#"ringway_touches_total{kind="dropped"} 0"#,
            "ringway_touch_bytes_total 640",
        ] {
            has(&page, line);
        }
        assert!(!page.contains(r#"ringway_memory_blocks{server="gpu1"}"#), "nothing is remembered of it");
        assert!(!page.contains(r#"ringway_drift_ratio{pool="spare""#), "drift is no trouble there");
    }

    #[test]
    fn histograms_are_cumulative_in_seconds_and_end_in_infinity() {
        let page = render(sample(), None, Format::Prometheus);
        for line in [
            r#"ringway_queue_wait_seconds_bucket{le="1e-05"} 0"#,
            r#"ringway_queue_wait_seconds_bucket{le="2.5e-05"} 2"#,
            r#"ringway_queue_wait_seconds_bucket{le="100"} 2"#,
            r#"ringway_queue_wait_seconds_bucket{le="+Inf"} 2"#,
            "ringway_queue_wait_seconds_count 2",
            r#"ringway_time_to_first_token_seconds_bucket{le="100"} 0"#,
            r#"ringway_time_to_first_token_seconds_bucket{le="+Inf"} 2"#,
            "ringway_time_to_first_token_seconds_sum 400.0",
        ] {
            has(&page, line);
        }
        let infinite = page.lines().filter(|l| l.starts_with("ringway_overhead_seconds_bucket{le=\"+Inf\"}"));
        assert_eq!(infinite.count(), 1);
    }

    #[test]
    fn no_sample_stands_twice_and_every_family_has_help_and_type() {
        let page = render(sample(), None, Format::Prometheus);
        let mut samples = std::collections::HashSet::new();
        let mut families = 0;
        for line in page.lines() {
            match line.strip_prefix("# TYPE ") {
                Some(_) => families += 1,
                None if line.starts_with("# HELP ") => {}
                None => assert!(samples.insert(line.rsplit_once(' ').unwrap().0), "twice: {line}"),
            }
        }
        assert_eq!(families, 29);
        assert_eq!(page.lines().filter(|l| l.starts_with("# HELP ")).count(), families);
    }

    #[test]
    fn openmetrics_is_written_for_those_who_ask() {
        let asked = Format::accepted(Some(b"application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
        assert_eq!(asked, Format::OpenMetrics);
        assert_eq!(Format::accepted(Some(b"*/*")), Format::Prometheus);
        assert_eq!(Format::accepted(None), Format::Prometheus);
        let page = render(sample(), None, Format::OpenMetrics);
        assert!(page.ends_with("# EOF\n"));
        has(&page, r#"ringway_requests_total{pool="chat",server="gpu0",status="200"} 40"#);
        has(&page, "# TYPE ringway_requests counter");
    }

    #[test]
    fn a_name_with_quotes_stays_one_label() {
        let mut figures = sample();
        figures.servers[0].name = "a\"b\\c".into();
        has(&render(figures, None, Format::Prometheus), r#"ringway_in_flight{server="a\"b\\c"} 4"#);
    }
}

//! What the shards counted on Stargate listeners, added up by target and server, and as metrics.
//!
//! *Invariant*: servers are added up by name, so that the counters of one that registers anew, elsewhere, go on; a counter never goes
//! back while the process runs. Label values are targets that some server serves or served, server names, algorithms, statuses, and
//! retry reasons as the shards bound them; requests for targets that nobody ever served have empty labels.
//! *Bound and cost*: O(targets × servers × shards) per page.
//! *Source*: the Stargate rules, section 7. What it counts of QUIC connections is counted of HTTP connections, under the same names; of
//! TLS there is nothing to count in this version.

use std::collections::BTreeMap;
use std::fmt::Error;

use super::metrics::{Buckets, Writer, seconds};
use crate::proto::backend::catalog::Catalog;
use crate::proto::report::{LinkCounts, ShardReport};
use crate::proto::stargate::figures::{
    AlgorithmFigures, AttemptResult, Histogram, PROXY_DURATION_NS, REPLAY_BYTES, ROUTING_DURATION_NS,
    TargetFigures,
};

/// Routing key and model.
type Target = (Box<str>, Box<str>);

/// Of one server in one target, over all shards.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerSums {
    pub requests: BTreeMap<u16, u64>,
    pub attempts: BTreeMap<AttemptResult, u64>,
    pub proxy_duration_ns: Histogram<12>,
}

/// Of one target, over all shards.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TargetSums {
    /// Servers that every shard can use.
    pub active: u32,
    /// Requests that wait for a route.
    pub waiting: u64,
    /// By name; empty: no server.
    pub servers: BTreeMap<Box<str>, ServerSums>,
    pub algorithms: BTreeMap<&'static str, AlgorithmFigures>,
    pub retries: BTreeMap<Box<str>, u64>,
    pub exhausted: BTreeMap<Box<str>, u64>,
    pub input_work_limit_exceeded: u64,
    pub input_work_capacity_unavailable: u64,
    pub routing_duration_ns: Histogram<7>,
    pub replay_buffer_bytes: Histogram<10>,
    /// Shards that know the target.
    shards: usize,
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    pub targets: BTreeMap<Target, TargetSums>,
    /// Over all shards, each of which keeps its own.
    pub expression_cache_entries: u64,
    /// By server name.
    pub links: BTreeMap<Box<str>, LinkCounts>,
}

impl Targets {
    /// Adds up the last report of every shard.
    pub fn sum(catalog: &Catalog, reports: &[Option<Box<ShardReport>>]) -> Targets {
        let mut all = Targets::default();
        let mut shards = 0;
        for report in reports.iter().flatten() {
            shards += 1;
            for (server, figures) in catalog.servers.iter().zip(&report.servers) {
                if figures.links != LinkCounts::default() {
                    let sums = all.links.entry(server.name.clone()).or_default();
                    sums.stale += figures.links.stale;
                    sums.failed += figures.links.failed;
                    sums.reconnects += figures.links.reconnects;
                    sums.failed_reconnects += figures.links.failed_reconnects;
                }
            }
            let Some(figures) = &report.stargate else { continue };
            all.expression_cache_entries += figures.expression_cache_entries;
            for target in &figures.targets {
                let key = target.target.clone().unwrap_or_default();
                all.targets.entry(key).or_default().add(catalog, target);
            }
        }
        for sums in all.targets.values_mut().filter(|sums| sums.shards < shards) {
            // Some shard has not heard of it yet.
            sums.active = 0;
        }
        all
    }
}

impl TargetSums {
    fn add(&mut self, catalog: &Catalog, figures: &TargetFigures) {
        self.active = if self.shards == 0 { figures.active } else { self.active.min(figures.active) };
        self.shards += 1;
        self.waiting += u64::from(figures.waiting);
        for server in &figures.servers {
            let name = server.backend.map(|id| catalog.server(id).name.clone()).unwrap_or_default();
            let sums = self.servers.entry(name).or_default();
            add_all(&mut sums.requests, &server.requests);
            add_all(&mut sums.attempts, &server.attempts);
            add_histogram(&mut sums.proxy_duration_ns, &server.proxy_duration_ns);
        }
        for figures in &figures.algorithms {
            let sums = self.algorithms.entry(figures.algorithm).or_default();
            sums.primary += figures.primary;
            sums.fallback += figures.fallback;
            sums.kv_free_token_fallback += figures.kv_free_token_fallback;
            sums.expression_hits += figures.expression_hits;
            sums.expression_builds += figures.expression_builds;
            sums.expression_rebuilds += figures.expression_rebuilds;
        }
        add_all(&mut self.retries, &figures.retries);
        add_all(&mut self.exhausted, &figures.exhausted);
        self.input_work_limit_exceeded += figures.input_work_limit_exceeded;
        self.input_work_capacity_unavailable += figures.input_work_capacity_unavailable;
        add_histogram(&mut self.routing_duration_ns, &figures.routing_duration_ns);
        add_histogram(&mut self.replay_buffer_bytes, &figures.replay_buffer_bytes);
    }
}

fn add_all<K: Ord + Clone>(sums: &mut BTreeMap<K, u64>, counts: &[(K, u64)]) {
    for (key, count) in counts {
        *sums.entry(key.clone()).or_default() += count;
    }
}

fn add_histogram<const N: usize>(sums: &mut Histogram<N>, other: &Histogram<N>) {
    for (mine, theirs) in sums.buckets.iter_mut().zip(&other.buckets) {
        *mine += theirs;
    }
    sums.above += other.above;
    sums.sum = sums.sum.wrapping_add(other.sum);
}

/// A histogram as the page writes it: bounds and sum divided by `unit`.
fn buckets<const N: usize>(
    histogram: &Histogram<N>,
    bounds: &[u64; N],
    unit: impl Fn(u64) -> f64,
) -> Buckets {
    let upper = bounds.iter().map(|bound| unit(*bound)).chain([f64::INFINITY]);
    let counts = histogram.buckets.iter().copied().chain([histogram.above]);
    Buckets { sum: unit(histogram.sum), count: histogram.count(), buckets: upper.zip(counts).collect() }
}

fn label(result: AttemptResult) -> String {
    match result {
        AttemptResult::Upstream(status) => format!("upstream_{status}"),
        AttemptResult::Proxy(status) => format!("proxy_{status}"),
    }
}

/// Labels of a target, and one or two more.
fn labels<const N: usize>(target: &Target, more: [(&'static str, &str); N]) -> Vec<(&'static str, String)> {
    let own = [("routing_key", &*target.0), ("model", &*target.1)];
    own.into_iter().chain(more).map(|(name, value)| (name, value.to_owned())).collect()
}

/// Writes the family's metrics; their names begin with `prefix`.
pub(super) fn encode(page: &mut Writer<'_>, prefix: &str, all: &Targets) -> Result<(), Error> {
    let name = |name: &str| format!("{prefix}{name}");
    let targets = || all.targets.iter();
    let servers = || {
        targets().flat_map(|(target, sums)| {
            sums.servers.iter().map(move |(server, sums)| (target, &**server, sums))
        })
    };
    page.counters(
        &name("requests"),
        "Requests on Stargate listeners that were routed or tried to be, by final status; no server where none was chosen.",
        servers().flat_map(|(target, server, sums)| {
            sums.requests.iter().map(move |(status, count)| {
                let status = status.to_string();
                (labels(target, [("inference_server_id", server), ("status", &status)]), *count)
            })
        }),
    )?;
    page.counters(
        &name("proxy_attempts"),
        "Attempts to have a request answered, by what became of each.",
        servers().flat_map(|(target, server, sums)| {
            sums.attempts.iter().map(move |(result, count)| {
                (labels(target, [("inference_server_id", server), ("result", &label(*result))]), *count)
            })
        }),
    )?;
    page.counters(
        &name("proxy_retries"),
        "Attempts after the first of a request, by reason.",
        targets().flat_map(|(target, sums)| {
            sums.retries.iter().map(move |(reason, count)| (labels(target, [("reason", reason)]), *count))
        }),
    )?;
    page.counters(
        &name("proxy_retry_exhausted"),
        "Requests that were tried no more although their last attempt failed, by reason.",
        targets().flat_map(|(target, sums)| {
            sums.exhausted.iter().map(move |(reason, count)| (labels(target, [("reason", reason)]), *count))
        }),
    )?;
    let algorithms = || {
        targets()
            .flat_map(|(target, sums)| sums.algorithms.iter().map(move |(name, sums)| (target, *name, sums)))
    };
    page.counters(
        &name("routing_selections"),
        "Choices of a cluster: the first of a ranking or group (primary), or another (fallback).",
        algorithms().flat_map(|(target, algorithm, sums)| {
            [("primary", sums.primary), ("fallback", sums.fallback)]
                .into_iter()
                .filter(|(_, count)| *count > 0)
                .map(move |(selection, count)| {
                    (labels(target, [("algorithm", algorithm), ("selection", selection)]), count)
                })
        }),
    )?;
    page.counters(
        &name("routing_kv_free_token_fallback_selections"),
        "Choices made after a cluster of a higher rank was passed over for want of free KV cache.",
        algorithms().filter(|(_, _, sums)| sums.kv_free_token_fallback > 0).map(
            |(target, algorithm, sums)| {
                (labels(target, [("algorithm", algorithm)]), sums.kv_free_token_fallback)
            },
        ),
    )?;
    page.counters(
        &name("admission_rejections"),
        "Requests refused because of the input work that waits already, or because no rate is known.",
        targets().flat_map(|(target, sums)| {
            [
                ("input_work_limit_exceeded", sums.input_work_limit_exceeded),
                ("input_work_capacity_unavailable", sums.input_work_capacity_unavailable),
            ]
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(move |(reason, count)| (labels(target, [("reason", reason)]), count))
        }),
    )?;
    encode_expressions(page, prefix, all)?;
    encode_links(page, prefix, all)?;
    page.histograms(
        &name("proxy_replay_buffer_bytes"),
        "Bytes of the body kept for another attempt when an attempt ended.",
        by_model(all).into_iter().map(|(model, histogram)| {
            (vec![("model", model.to_owned())], buckets(&histogram, &REPLAY_BYTES, |bytes| bytes as f64))
        }),
    )?;
    page.histograms(
        &name("proxy_duration_seconds"),
        "From a request's arrival to the response head that was passed on.",
        servers().filter(|(_, _, sums)| sums.proxy_duration_ns.count() > 0).map(|(target, server, sums)| {
            let times = buckets(&sums.proxy_duration_ns, &PROXY_DURATION_NS, seconds);
            (labels(target, [("inference_server_id", server)]), times)
        }),
    )?;
    page.histograms(
        &name("routing_duration_seconds"),
        "From the start of routing to the first choice, waiting included.",
        targets().filter(|(_, sums)| sums.routing_duration_ns.count() > 0).map(|(target, sums)| {
            (labels(target, []), buckets(&sums.routing_duration_ns, &ROUTING_DURATION_NS, seconds))
        }),
    )?;
    // Requests for targets that nobody ever served have no servers to count.
    let served = || targets().filter(|(target, _)| !target.1.is_empty());
    page.gauges(
        &name("active_inference_servers"),
        "Servers that requests of the target can be sent to; 0 once the last has left.",
        served().map(|(target, sums)| (labels(target, []), u64::from(sums.active))),
    )?;
    page.gauges(
        &name("routing_waiting_requests"),
        "Requests that wait for a route.",
        served().map(|(target, sums)| (labels(target, []), sums.waiting)),
    )
}

fn encode_links(page: &mut Writer<'_>, prefix: &str, all: &Targets) -> Result<(), Error> {
    let mut family = |name: &str, help, label, of: fn(&LinkCounts) -> [(&'static str, u64); 2]| {
        let rows = all.links.iter().flat_map(|(server, links)| {
            of(links).into_iter().filter(|(_, count)| *count > 0).map(move |(value, count)| {
                ([("inference_server_id", server.to_string()), (label, value.to_owned())], count)
            })
        });
        page.counters(&format!("{prefix}{name}"), help, rows)
    };
    family(
        "quic_connection_evictions",
        "Connections to servers that were dropped: closed by the server before a request went out, or because a request failed.",
        "reason",
        |links| [("stale_connection", links.stale), ("proxy_error", links.failed)],
    )?;
    family(
        "quic_hot_path_reconnect",
        "Fresh connections in place of such, while a request waited for them.",
        "result",
        |links| [("success", links.reconnects), ("error", links.failed_reconnects)],
    )
}

fn encode_expressions(page: &mut Writer<'_>, prefix: &str, all: &Targets) -> Result<(), Error> {
    let mut expressions: BTreeMap<(&'static str, &'static str), u64> = BTreeMap::new();
    for (algorithm, sums) in all.targets.values().flat_map(|sums| &sums.algorithms) {
        for (cache, count) in [
            ("hit", sums.expression_hits),
            ("build", sums.expression_builds),
            ("rebuild", sums.expression_rebuilds),
        ] {
            *expressions.entry((algorithm, cache)).or_default() += count;
        }
    }
    page.counters(
        &format!("{prefix}routing_expressions"),
        "Accepted routing methods with parameters, by what the cache of configurations had for them.",
        expressions
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|((algorithm, cache), count)| ([("algorithm", algorithm), ("cache", cache)], count)),
    )?;
    page.gauge(
        &format!("{prefix}routing_expression_cache_entries"),
        "Routing keys and models whose last routing expressions are kept, over all shards.",
        all.expression_cache_entries,
    )
}

fn by_model(all: &Targets) -> BTreeMap<&str, Histogram<10>> {
    let mut models: BTreeMap<&str, Histogram<10>> = BTreeMap::new();
    for ((_, model), sums) in &all.targets {
        if sums.replay_buffer_bytes.count() > 0 {
            add_histogram(models.entry(model).or_default(), &sums.replay_buffer_bytes);
        }
    }
    models
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::figures::tests::{sample, server};
    use crate::control::metrics::{Format, render};
    use crate::proto::ids::{BackendId, ShardId};
    use crate::proto::stargate::figures::{ServerFigures, StargateFigures};

    fn served() -> TargetFigures {
        TargetFigures {
            target: Some(("fn-1".into(), "m".into())),
            active: 2,
            waiting: 3,
            servers: vec![
                ServerFigures { backend: None, requests: vec![(503, 4)], ..ServerFigures::default() },
                ServerFigures {
                    backend: Some(BackendId(0)),
                    requests: vec![(200, 5)],
                    attempts: vec![(AttemptResult::Upstream(200), 5), (AttemptResult::Proxy(502), 1)],
                    proxy_duration_ns: Histogram {
                        buckets: [1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                        above: 0,
                        sum: 33_000_000,
                    },
                },
                // The same server after it registered anew.
                ServerFigures {
                    backend: Some(BackendId(1)),
                    requests: vec![(200, 1), (429, 2)],
                    ..ServerFigures::default()
                },
            ],
            algorithms: vec![AlgorithmFigures {
                algorithm: "pulsar",
                primary: 7,
                fallback: 1,
                kv_free_token_fallback: 1,
                expression_hits: 6,
                expression_builds: 1,
                expression_rebuilds: 0,
            }],
            retries: vec![("hot_path_reconnect".into(), 2)],
            exhausted: vec![("no_eligible_backend".into(), 1)],
            input_work_limit_exceeded: 1,
            input_work_capacity_unavailable: 0,
            routing_duration_ns: Histogram { buckets: [8, 0, 0, 0, 0, 0, 0], above: 1, sum: 2_000_000_000 },
            replay_buffer_bytes: Histogram { buckets: [0, 9, 0, 0, 0, 0, 0, 0, 0, 0], above: 0, sum: 900 },
        }
    }

    fn sums(reports: Vec<StargateFigures>) -> Targets {
        let catalog =
            Catalog { servers: vec![server("a", None, 1.0), server("a", None, 1.0)], ..Catalog::default() };
        let reports: Vec<_> = reports
            .into_iter()
            .enumerate()
            .map(|(shard, figures)| {
                let mut report = ShardReport::new(ShardId(shard as u8));
                report.stargate = Some(Box::new(figures));
                Some(Box::new(report))
            })
            .collect();
        Targets::sum(&catalog, &reports)
    }

    fn of(targets: Vec<TargetFigures>) -> StargateFigures {
        StargateFigures { targets, expression_cache_entries: 1 }
    }

    #[test]
    fn what_happened_to_connections_stands_under_the_names_of_the_contract() {
        let catalog =
            Catalog { servers: vec![server("a", None, 1.0), server("b", None, 1.0)], ..Catalog::default() };
        let links = LinkCounts { stale: 1, failed: 2, reconnects: 3, failed_reconnects: 0 };
        let of_shard = |shard: u8| {
            let mut report = ShardReport::new(ShardId(shard));
            report.servers = vec![
                crate::proto::report::ServerFigures::default(),
                crate::proto::report::ServerFigures { links, ..Default::default() },
            ];
            Some(Box::new(report))
        };
        let mut figures = sample();
        figures.targets = Targets::sum(&catalog, &[of_shard(0), None, of_shard(1)]);
        let page = render(figures, Some("stargate_"), Format::Prometheus);
        for line in [
            r#"stargate_quic_connection_evictions_total{inference_server_id="b",reason="stale_connection"} 2"#,
            r#"stargate_quic_connection_evictions_total{inference_server_id="b",reason="proxy_error"} 4"#,
            r#"stargate_quic_hot_path_reconnect_total{inference_server_id="b",result="success"} 6"#,
        ] {
            assert!(page.lines().any(|found| found == line), "no line {line} on the page:\n{page}");
        }
        assert!(!page.contains(r#"inference_server_id="a""#) && !page.contains(r#"result="error""#));
    }

    #[test]
    fn shards_add_up_and_servers_by_their_name() {
        let nobody = TargetFigures {
            servers: vec![ServerFigures { requests: vec![(404, 1)], ..ServerFigures::default() }],
            ..TargetFigures::default()
        };
        let all = sums(vec![of(vec![served(), nobody.clone()]), of(vec![served(), nobody])]);
        let m = &all.targets[&("fn-1".into(), "m".into())];
        assert_eq!((m.active, m.waiting), (2, 6), "replicas of what is active don't add up");
        assert_eq!(m.servers["a"].requests, BTreeMap::from([(200, 12), (429, 4)]));
        assert_eq!(m.servers[""].requests[&503], 8);
        assert_eq!(m.servers["a"].proxy_duration_ns.count(), 10);
        assert_eq!(all.targets[&("".into(), "".into())].servers[""].requests[&404], 2);
        assert_eq!(all.expression_cache_entries, 2);
    }

    #[test]
    fn a_server_is_active_once_every_shard_has_heard_of_it() {
        let one = TargetFigures { active: 1, ..served() };
        let m = |all: Targets| all.targets[&("fn-1".into(), "m".into())].active;
        assert_eq!(m(sums(vec![of(vec![served()]), of(vec![one])])), 1);
        assert_eq!(m(sums(vec![of(vec![served()]), of(vec![])])), 0);
    }

    #[test]
    fn the_page_has_the_contract_s_names_and_labels() {
        let figures = || {
            let mut figures = sample();
            figures.targets = sums(vec![of(vec![served()])]);
            figures
        };
        let page = render(figures(), Some("stargate_"), Format::Prometheus);
        let target = r#"routing_key="fn-1",model="m""#;
        for line in [
            format!(r#"stargate_requests_total{{{target},inference_server_id="a",status="200"}} 6"#),
            format!(r#"stargate_requests_total{{{target},inference_server_id="",status="503"}} 4"#),
            format!(
                r#"stargate_proxy_attempts_total{{{target},inference_server_id="a",result="upstream_200"}} 5"#
            ),
            format!(
                r#"stargate_proxy_attempts_total{{{target},inference_server_id="a",result="proxy_502"}} 1"#
            ),
            format!(r#"stargate_proxy_retries_total{{{target},reason="hot_path_reconnect"}} 2"#),
            format!(r#"stargate_proxy_retry_exhausted_total{{{target},reason="no_eligible_backend"}} 1"#),
            format!(
                r#"stargate_routing_selections_total{{{target},algorithm="pulsar",selection="fallback"}} 1"#
            ),
            format!(
                r#"stargate_routing_kv_free_token_fallback_selections_total{{{target},algorithm="pulsar"}} 1"#
            ),
            format!(
                r#"stargate_admission_rejections_total{{{target},reason="input_work_limit_exceeded"}} 1"#
            ),
            format!(r#"stargate_active_inference_servers{{{target}}} 2"#),
            format!(
                r#"stargate_proxy_duration_seconds_bucket{{{target},inference_server_id="a",le="0.001"}} 1"#
            ),
            format!(
                r#"stargate_proxy_duration_seconds_bucket{{{target},inference_server_id="a",le="0.01"}} 5"#
            ),
            format!(r#"stargate_proxy_duration_seconds_sum{{{target},inference_server_id="a"}} 0.033"#),
            format!(r#"stargate_routing_duration_seconds_bucket{{{target},le="0.1"}} 8"#),
            format!(r#"stargate_routing_duration_seconds_bucket{{{target},le="+Inf"}} 9"#),
            r#"stargate_proxy_replay_buffer_bytes_bucket{model="m",le="1024"} 9"#.to_owned(),
            r#"stargate_proxy_replay_buffer_bytes_count{model="m"} 9"#.to_owned(),
            r#"stargate_routing_expressions_total{algorithm="pulsar",cache="hit"} 6"#.to_owned(),
            "stargate_routing_expression_cache_entries 1".to_owned(),
            "# TYPE stargate_requests_total counter".to_owned(),
            "# TYPE stargate_proxy_duration_seconds histogram".to_owned(),
        ] {
            assert!(page.lines().any(|found| found == line), "no line {line} on the page:\n{page}");
        }
        let renamed = render(figures(), Some("sg_"), Format::Prometheus);
        assert!(
            renamed.contains("\nsg_requests_total{") && !renamed.contains("stargate_"),
            "the prefix is replaced"
        );
        let none = render(figures(), None, Format::Prometheus);
        assert!(!none.contains("stargate_"), "without a trusted listener there is nothing to tell");
    }
}

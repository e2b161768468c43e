//! What one shard counted on trusted listeners: plain integers, for the control thread to add up and name.
//!
//! *Bound*: one entry per target that was ever served and per server in it; all targets that nobody serves share one entry
//! without names. At most [`REASONS_MAX`] texts of upstream servers become labels; further ones count as `other`.
//! *Source*: the Stargate rules, section 7.

use crate::proto::config::lb_config::Method;
use crate::proto::ids::BackendId;

/// Reasons that are not kept apart.
pub const OTHER: &str = "other";
/// Longest reason that is kept apart, in bytes.
const REASON_BYTES_MAX: usize = 64;
/// Distinct retry reasons of upstream servers that are kept apart.
pub const REASONS_MAX: usize = 32;
/// Upper bounds of `proxy_duration_seconds`, in nanoseconds.
pub const PROXY_DURATION_NS: [u64; 12] = [
    1_000_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];
/// Upper bounds of `routing_duration_seconds`, in nanoseconds.
pub const ROUTING_DURATION_NS: [u64; 7] =
    [100_000, 500_000, 1_000_000, 5_000_000, 10_000_000, 50_000_000, 100_000_000];
/// Upper bounds of `proxy_replay_buffer_bytes`.
pub const REPLAY_BYTES: [u64; 10] =
    [0, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// Values up to each of `N` upper bounds (each value in the first bound that holds it), and above the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram<const N: usize> {
    pub buckets: [u64; N],
    pub above: u64,
    /// Of all values; wraps around.
    pub sum: u64,
}

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Self {
        Histogram { buckets: [0; N], above: 0, sum: 0 }
    }
}

impl<const N: usize> Histogram<N> {
    /// Counts a value by the upper bounds that the histogram is of.
    pub fn note(&mut self, bounds: &[u64; N], value: u64) {
        match bounds.iter().position(|bound| value <= *bound) {
            Some(at) => self.buckets[at] += 1,
            None => self.above += 1,
        }
        self.sum = self.sum.wrapping_add(value);
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum::<u64>() + self.above
    }
}

/// What became of an attempt: label `upstream_<status>` or `proxy_<status>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttemptResult {
    /// The server answered with that status.
    Upstream(u16),
    /// It did not; the router's own status for that.
    Proxy(u16),
}

/// Of one server in one target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerFigures {
    /// `None`: no server (404, 503, admission): an empty label.
    pub backend: Option<BackendId>,
    /// Finished requests by final status, ascending.
    pub requests: Vec<(u16, u64)>,
    /// Ascending.
    pub attempts: Vec<(AttemptResult, u64)>,
    pub proxy_duration_ns: Histogram<12>,
}

/// Of one algorithm in one target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AlgorithmFigures {
    /// Canonical name.
    pub algorithm: &'static str,
    pub primary: u64,
    pub fallback: u64,
    pub kv_free_token_fallback: u64,
    /// Accepted expressions with parameters, by what the cache said.
    pub expression_hits: u64,
    pub expression_builds: u64,
    pub expression_rebuilds: u64,
}

/// Of one target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TargetFigures {
    /// `None`: all targets that nobody ever served: empty labels.
    pub target: Option<(Box<str>, Box<str>)>,
    /// Active servers now, as this shard sees it.
    pub active: u32,
    /// Requests of this shard that wait for a route.
    pub waiting: u32,
    pub servers: Vec<ServerFigures>,
    pub algorithms: Vec<AlgorithmFigures>,
    /// By reason.
    pub retries: Vec<(Box<str>, u64)>,
    pub exhausted: Vec<(Box<str>, u64)>,
    pub input_work_limit_exceeded: u64,
    pub input_work_capacity_unavailable: u64,
    pub routing_duration_ns: Histogram<7>,
    pub replay_buffer_bytes: Histogram<10>,
}

/// See the module's text. Counters only grow while the process runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StargateFigures {
    pub targets: Vec<TargetFigures>,
    pub expression_cache_entries: u64,
}

/// Texts that became labels; their number stands for them.
#[derive(Debug)]
pub struct Reasons(Vec<Box<str>>);

impl Default for Reasons {
    fn default() -> Self {
        Reasons(vec![OTHER.into()])
    }
}

impl Reasons {
    pub fn id(&mut self, text: &str) -> u8 {
        if let Some(at) = self.0.iter().position(|known| **known == *text) {
            return at as u8;
        }
        let is_label =
            text.len() <= REASON_BYTES_MAX && text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
        if !is_label || self.0.len() > REASONS_MAX {
            return 0;
        }
        self.0.push(text.into());
        self.0.len() as u8 - 1
    }

    fn named(&self, counts: &[(u8, u64)]) -> Vec<(Box<str>, u64)> {
        counts.iter().map(|(id, count)| (self.0[usize::from(*id)].clone(), *count)).collect()
    }
}

/// Of one algorithm in one target, by [`Method`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ByMethod {
    pub primary: u64,
    pub fallback: u64,
    pub kv_free_token_fallback: u64,
    pub expression_hits: u64,
    pub expression_builds: u64,
    pub expression_rebuilds: u64,
}

/// What is counted of one target, as it is kept.
#[derive(Debug, Default)]
pub struct Counts {
    by_method: [ByMethod; Method::ALL.len()],
    /// Ascending by server.
    servers: Vec<ServerFigures>,
    /// By the reason's number, in no order.
    retries: Vec<(u8, u64)>,
    exhausted: Vec<(u8, u64)>,
    pub input_work_limit_exceeded: u64,
    pub input_work_capacity_unavailable: u64,
    pub routing_duration_ns: Histogram<7>,
    pub replay_buffer_bytes: Histogram<10>,
}

fn add<K: PartialEq>(counts: &mut Vec<(K, u64)>, key: K) {
    match counts.iter_mut().find(|(known, _)| *known == key) {
        Some((_, count)) => *count += 1,
        None => counts.push((key, 1)),
    }
}

impl Counts {
    pub fn of(&mut self, method: Method) -> &mut ByMethod {
        &mut self.by_method[method as usize]
    }

    pub fn server(&mut self, backend: Option<BackendId>) -> &mut ServerFigures {
        let at = self.servers.binary_search_by_key(&backend, |server| server.backend);
        let at = at.unwrap_or_else(|at| {
            self.servers.insert(at, ServerFigures { backend, ..ServerFigures::default() });
            at
        });
        &mut self.servers[at]
    }

    pub fn retry(&mut self, reason: u8) {
        add(&mut self.retries, reason);
    }

    pub fn exhaust(&mut self, reason: u8) {
        add(&mut self.exhausted, reason);
    }

    /// For the control thread; `target`, `active` and `waiting` are left to the caller.
    pub fn figures(&self, reasons: &Reasons) -> TargetFigures {
        let used = Method::ALL.into_iter().zip(&self.by_method).filter(|(_, counts)| {
            let expressions = counts.expression_hits + counts.expression_builds + counts.expression_rebuilds;
            counts.primary + counts.fallback + expressions > 0
        });
        let mut servers = self.servers.clone();
        for server in &mut servers {
            server.requests.sort_unstable();
            server.attempts.sort_unstable();
        }
        TargetFigures {
            servers,
            algorithms: used
                .map(|(method, counts)| AlgorithmFigures {
                    algorithm: method.name(),
                    primary: counts.primary,
                    fallback: counts.fallback,
                    kv_free_token_fallback: counts.kv_free_token_fallback,
                    expression_hits: counts.expression_hits,
                    expression_builds: counts.expression_builds,
                    expression_rebuilds: counts.expression_rebuilds,
                })
                .collect(),
            retries: reasons.named(&self.retries),
            exhausted: reasons.named(&self.exhausted),
            input_work_limit_exceeded: self.input_work_limit_exceeded,
            input_work_capacity_unavailable: self.input_work_capacity_unavailable,
            routing_duration_ns: self.routing_duration_ns.clone(),
            replay_buffer_bytes: self.replay_buffer_bytes.clone(),
            ..TargetFigures::default()
        }
    }
}

impl ServerFigures {
    pub fn finish(&mut self, status: u16) {
        add(&mut self.requests, status);
    }

    pub fn attempt(&mut self, result: AttemptResult) {
        add(&mut self.attempts, result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_counted_in_the_first_bound_that_holds_it() {
        let mut histogram = Histogram::default();
        for bytes in [0, 1, 1024, 1025, 64 << 20, (64 << 20) + 1] {
            histogram.note(&REPLAY_BYTES, bytes);
        }
        assert_eq!(histogram.buckets, [1, 2, 1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!((histogram.above, histogram.count()), (1, 6));
        assert_eq!(histogram.sum, 1 + 1024 + 1025 + (128 << 20) + 1);
        assert!(PROXY_DURATION_NS.is_sorted() && ROUTING_DURATION_NS.is_sorted() && REPLAY_BYTES.is_sorted());
    }

    #[test]
    fn the_texts_that_become_labels_are_bounded() {
        let mut reasons = Reasons::default();
        let first = reasons.id("busy");
        assert_eq!((reasons.id("busy"), reasons.id(OTHER)), (first, 0));
        for text in ["a\nb".into(), "\u{e9}".into(), "x".repeat(65)] {
            assert_eq!(reasons.id(&text), 0, "{text:?} is no label");
        }
        let ids: Vec<u8> = (0..1000).map(|n| reasons.id(&format!("reason {n}"))).collect();
        assert_eq!(ids.iter().filter(|id| **id > 0).count(), REASONS_MAX - 1);
        assert_eq!(reasons.named(&[(first, 3), (0, 5)]), [("busy".into(), 3), (OTHER.into(), 5)]);
    }

    #[test]
    fn figures_are_sorted_and_only_of_what_was_used() {
        let mut counts = Counts::default();
        for (backend, status) in
            [(Some(BackendId(4)), 200), (None, 503), (Some(BackendId(1)), 502), (None, 404)]
        {
            counts.server(backend).finish(status);
        }
        counts.server(None).finish(503);
        counts.server(Some(BackendId(4))).attempt(AttemptResult::Proxy(502));
        counts.server(Some(BackendId(4))).attempt(AttemptResult::Upstream(429));
        counts.of(Method::Pulsar).fallback += 1;
        let figures = counts.figures(&Reasons::default());
        let servers: Vec<_> = figures.servers.iter().map(|server| server.backend.map(|id| id.0)).collect();
        assert_eq!(servers, [None, Some(1), Some(4)]);
        assert_eq!(figures.servers[0].requests, [(404, 1), (503, 2)]);
        let attempts = [(AttemptResult::Upstream(429), 1), (AttemptResult::Proxy(502), 1)];
        assert_eq!(figures.servers[2].attempts, attempts);
        assert_eq!(figures.algorithms.len(), 1);
        assert_eq!((figures.algorithms[0].algorithm, figures.algorithms[0].fallback), ("pulsar", 1));
    }
}

//! The fields of an entry: which algorithms accept each, in a file and in a routing expression, and of what kind it is.
//!
//! *Source*: the Stargate rules, sections 1.4 and 3.3.

use super::method::{Comparator, Method, RendezvousWeight};

/// A field, named once for files and expressions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto::config) enum Field {
    Algorithm,
    RequestAlgorithms,
    RequireCacheAffinityKey,
    RequireInputTokens,
    MaxInputWorkSeconds,
    SampleCount,
    Comparator,
    Seed,
    ConsiderKvFreeTokens,
    N,
    MaxQueued,
    MaxQueueTimeFloorMs,
    MaxQueueTimeCeilMs,
    TtftBucketSizeMs,
    NextBucketUnlockFactor,
    IgnoreQueueTime,
    IgnoreInputProcessingTime,
    VirtualNodes,
    Group,
    CacheAffinityInputTokensScale,
    CacheAffinityWaitMs,
    BandWidenIntervalMs,
    FallbackMaxQueued,
    RendezvousWeight,
    LastClusterAffinity,
}

/// What a field holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto::config) enum Kind {
    /// Read before the others: the algorithm itself, and the entries beside it.
    Structure,
    Flag,
    Uint,
    Number,
    Text,
    Comparator,
    Weight,
}

/// A value of that kind.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::proto::config) enum Setting {
    Flag(bool),
    Uint(u64),
    /// Finite.
    Number(f64),
    Text(Box<str>),
    Comparator(Comparator),
    Weight(RendezvousWeight),
}

/// A set of methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::proto::config) struct Methods(u8);

impl Methods {
    const fn of(methods: &[Method]) -> Methods {
        let mut bits = 0;
        let mut i = 0;
        while i < methods.len() {
            bits |= 1 << methods[i] as u8;
            i += 1;
        }
        Methods(bits)
    }

    pub const fn has(self, method: Method) -> bool {
        self.0 & (1 << method as u8) != 0
    }

    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

const NONE: Methods = Methods::of(&[]);
const ALL: Methods = Methods::of(&Method::ALL);
const POWER: Methods = Methods::of(&[Method::PowerOfN]);
const RING: Methods = Methods::of(&[Method::WaitAndWiden]);
const COMPARE: Methods = Methods::of(&[Method::PowerOfN, Method::WaitAndWiden]);
const WIDEN: Methods = Methods::of(&[Method::WaitAndWiden, Method::PulsarWaitAndWiden]);
const PULSAR: Methods = Methods::of(&[Method::Pulsar, Method::PulsarWaitAndWiden]);
const SEEDED: Methods = Methods::of(&[Method::WaitAndWiden, Method::Pulsar, Method::PulsarWaitAndWiden]);
const BANDS: Methods = Methods::of(&[Method::PulsarWaitAndWiden]);

/// A field: its name, kind, who accepts it in a file, who in an expression (nobody: an expression does not know the name).
type Row = (Field, &'static str, Kind, Methods, Methods);

const TABLE: [Row; 25] = [
    (Field::Algorithm, "algorithm", Kind::Structure, ALL, NONE),
    (Field::RequestAlgorithms, "request_algorithms", Kind::Structure, ALL, NONE),
    (Field::RequireCacheAffinityKey, "require_cache_affinity_key", Kind::Flag, ALL, ALL),
    (Field::RequireInputTokens, "require_input_tokens", Kind::Flag, ALL, ALL),
    (Field::MaxInputWorkSeconds, "max_input_work_seconds", Kind::Number, ALL, ALL),
    (Field::SampleCount, "sample_count", Kind::Uint, POWER, POWER),
    (Field::Comparator, "comparator", Kind::Comparator, COMPARE, COMPARE),
    (Field::Seed, "seed", Kind::Text, SEEDED, SEEDED),
    (Field::ConsiderKvFreeTokens, "consider_kv_free_tokens", Kind::Flag, PULSAR, PULSAR),
    (Field::N, "n", Kind::Uint, WIDEN, WIDEN),
    (Field::MaxQueued, "max_queued", Kind::Uint, WIDEN, WIDEN),
    (Field::MaxQueueTimeFloorMs, "max_queue_time_floor_ms", Kind::Uint, WIDEN, WIDEN),
    (Field::MaxQueueTimeCeilMs, "max_queue_time_ceil_ms", Kind::Uint, WIDEN, WIDEN),
    (Field::TtftBucketSizeMs, "ttft_bucket_size_ms", Kind::Uint, WIDEN, WIDEN),
    (Field::NextBucketUnlockFactor, "next_bucket_unlock_factor", Kind::Number, WIDEN, WIDEN),
    (Field::IgnoreQueueTime, "ignore_queue_time", Kind::Flag, WIDEN, WIDEN),
    (Field::IgnoreInputProcessingTime, "ignore_input_processing_time", Kind::Flag, WIDEN, WIDEN),
    // A file may carry it over from the method with a ring; an expression may not.
    (Field::VirtualNodes, "cache_affinity_virtual_nodes", Kind::Uint, WIDEN, RING),
    (Field::Group, "cache_affinity_backend_selection_count", Kind::Uint, WIDEN, WIDEN),
    (Field::CacheAffinityInputTokensScale, "cache_affinity_input_tokens_scale", Kind::Number, WIDEN, WIDEN),
    (Field::CacheAffinityWaitMs, "cache_affinity_wait_ms", Kind::Uint, WIDEN, WIDEN),
    (Field::BandWidenIntervalMs, "band_widen_interval_ms", Kind::Uint, BANDS, BANDS),
    (Field::FallbackMaxQueued, "fallback_max_queued", Kind::Uint, BANDS, BANDS),
    (Field::RendezvousWeight, "rendezvous_weight", Kind::Weight, PULSAR, NONE),
    (Field::LastClusterAffinity, "last_cluster_affinity", Kind::Flag, WIDEN, NONE),
];

// `Field::row` indexes.
const _: () = {
    let mut i = 0;
    while i < TABLE.len() {
        assert!(TABLE[i].0 as usize == i);
        i += 1;
    }
};

impl Field {
    const fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    pub const fn name(self) -> &'static str {
        self.row().1
    }

    pub const fn kind(self) -> Kind {
        self.row().2
    }

    /// Who accepts it in a file.
    pub const fn in_file(self) -> Methods {
        self.row().3
    }

    /// Who accepts it in an expression.
    pub const fn in_expression(self) -> Methods {
        self.row().4
    }

    /// The field of that name, to the letter.
    pub fn parse(name: &str) -> Option<Field> {
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    pub fn all() -> impl Iterator<Item = Field> {
        TABLE.iter().map(|row| row.0)
    }
}

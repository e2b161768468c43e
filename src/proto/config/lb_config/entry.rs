//! One algorithm with all its settings: what a configuration entry, or a routing expression laid over one, comes to.
//!
//! *Invariant*: nothing is left undecided: defaults are filled in, and a 0 that acts as 1 is 1.
//! *Source*: the Stargate rules, sections 1.4, 2.3 to 2.8.

use super::field::{Field, Setting};
use super::method::{Comparator, Method, RendezvousWeight};

/// An entry, which is used whole: settings never merge with another entry's.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// A request without an affinity key is refused.
    pub require_cache_affinity_key: bool,
    /// No effect of its own: trusted callers always say how many input tokens they send.
    pub require_input_tokens: bool,
    /// Admission limit on the seconds of input work ahead of a request; no range. `None`: no limit.
    pub max_input_work_seconds: Option<f64>,
    pub method: MethodSettings,
}

/// The settings that are a method's own.
#[derive(Clone, Debug, PartialEq)]
pub enum MethodSettings {
    PowerOfN(PowerOfN),
    WaitAndWiden(WaitAndWiden),
    RoundRobin,
    Random,
    Pulsar(Pulsar),
    PulsarWaitAndWiden {
        pulsar: Pulsar,
        widen: Widen,
        /// How many of the first ranks are the affinity group; at least 1.
        group: u64,
        /// Milliseconds between the openings of wider bands; 0: all at once. `None`: as long as `widen.cache_affinity_wait_ms`.
        band_widen_interval_ms: Option<u64>,
        /// Requests that may queue at a cluster over its concurrency, once the group's time is over.
        fallback_max_queued: u64,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct PowerOfN {
    /// 1 to 64.
    pub sample_count: u8,
    pub comparator: Comparator,
}

#[derive(Clone, Debug, PartialEq)]
pub struct WaitAndWiden {
    /// Empty: none.
    pub seed: Box<str>,
    pub comparator: Comparator,
    pub widen: Widen,
    /// Ring nodes of each cluster; at least 1.
    pub virtual_nodes: u32,
    /// Clusters of an affinity group; 0: no groups.
    pub group: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Pulsar {
    /// Empty: none.
    pub seed: Box<str>,
    /// Clusters whose KV cache has no room for the request's input are skipped.
    pub consider_kv_free_tokens: bool,
    pub weight: RendezvousWeight,
}

/// What both widening algorithms share.
#[derive(Clone, Debug, PartialEq)]
pub struct Widen {
    /// Clusters that are compared; at least 1.
    pub n: u64,
    /// Requests that may queue at a cluster over its concurrency.
    pub max_queued: u64,
    /// See [`Widen::queue_time_ms`].
    pub max_queue_time_floor_ms: Option<u64>,
    /// See [`Widen::queue_time_ms`].
    pub max_queue_time_ceil_ms: Option<u64>,
    pub ttft_bucket_size_ms: u64,
    /// Finite; any sign.
    pub next_bucket_unlock_factor: f64,
    pub ignore_queue_time: bool,
    pub ignore_input_processing_time: bool,
    /// Milliseconds from arrival for which only the affinity group is tried.
    pub cache_affinity_wait_ms: u64,
    /// What a request's own prefill counts for within its affinity group: 0 to 1.
    pub cache_affinity_input_tokens_scale: f64,
}

impl Widen {
    /// Floor and ceiling of the longest queue time that is allowed, in milliseconds, in no particular order. `None`: no bound,
    /// because not both are set. One alone has no effect, and yet an expression may add the other.
    pub fn queue_time_ms(&self) -> Option<(u64, u64)> {
        self.max_queue_time_floor_ms.zip(self.max_queue_time_ceil_ms)
    }
}

impl Default for PowerOfN {
    fn default() -> PowerOfN {
        PowerOfN { sample_count: 2, comparator: Comparator::Ttft }
    }
}

impl Default for Widen {
    fn default() -> Widen {
        Widen {
            n: 2,
            max_queued: 0,
            max_queue_time_floor_ms: None,
            max_queue_time_ceil_ms: None,
            ttft_bucket_size_ms: 20,
            next_bucket_unlock_factor: 0.25,
            ignore_queue_time: false,
            ignore_input_processing_time: false,
            cache_affinity_wait_ms: 0,
            cache_affinity_input_tokens_scale: 1.0,
        }
    }
}

impl Default for WaitAndWiden {
    fn default() -> WaitAndWiden {
        WaitAndWiden {
            seed: "".into(),
            comparator: Comparator::Ttft,
            widen: Widen::default(),
            virtual_nodes: 150,
            group: 0,
        }
    }
}

impl Default for Pulsar {
    fn default() -> Pulsar {
        Pulsar { seed: "".into(), consider_kv_free_tokens: false, weight: RendezvousWeight::MaxInputTps }
    }
}

impl Entry {
    /// The method with its defaults.
    pub fn new(method: Method) -> Entry {
        let method = match method {
            Method::PowerOfN => MethodSettings::PowerOfN(PowerOfN::default()),
            Method::WaitAndWiden => MethodSettings::WaitAndWiden(WaitAndWiden::default()),
            Method::RoundRobin => MethodSettings::RoundRobin,
            Method::Random => MethodSettings::Random,
            Method::Pulsar => MethodSettings::Pulsar(Pulsar::default()),
            Method::PulsarWaitAndWiden => MethodSettings::PulsarWaitAndWiden {
                pulsar: Pulsar::default(),
                widen: Widen::default(),
                group: 1,
                band_widen_interval_ms: None,
                fallback_max_queued: 0,
            },
        };
        Entry {
            require_cache_affinity_key: false,
            require_input_tokens: false,
            max_input_work_seconds: None,
            method,
        }
    }

    pub const fn method(&self) -> Method {
        match self.method {
            MethodSettings::PowerOfN(_) => Method::PowerOfN,
            MethodSettings::WaitAndWiden(_) => Method::WaitAndWiden,
            MethodSettings::RoundRobin => Method::RoundRobin,
            MethodSettings::Random => Method::Random,
            MethodSettings::Pulsar(_) => Method::Pulsar,
            MethodSettings::PulsarWaitAndWiden { .. } => Method::PulsarWaitAndWiden,
        }
    }

    /// Writes a field that the method accepts, with a setting of its kind and range.
    pub(in crate::proto::config) fn set(&mut self, field: Field, setting: Setting) {
        match (field, setting) {
            (Field::RequireCacheAffinityKey, Setting::Flag(on)) => self.require_cache_affinity_key = on,
            (Field::RequireInputTokens, Setting::Flag(on)) => self.require_input_tokens = on,
            (Field::MaxInputWorkSeconds, Setting::Number(x)) => self.max_input_work_seconds = Some(x),
            (Field::LastClusterAffinity, Setting::Flag(on)) => {
                assert!(!on, "the reader refuses it");
            }
            (field, setting) => self.method.set(field, setting),
        }
    }

    /// What both widening methods share, for either.
    pub(in crate::proto::config) fn widen(&self) -> Option<&Widen> {
        match &self.method {
            MethodSettings::WaitAndWiden(WaitAndWiden { widen, .. })
            | MethodSettings::PulsarWaitAndWiden { widen, .. } => Some(widen),
            _ => None,
        }
    }
}

impl MethodSettings {
    fn set(&mut self, field: Field, setting: Setting) {
        match (&mut *self, field, setting) {
            (MethodSettings::PowerOfN(own), Field::SampleCount, Setting::Uint(n)) => {
                own.sample_count = u8::try_from(n).expect("the reader's range is 1 to 64");
            }
            (MethodSettings::PowerOfN(own), Field::Comparator, Setting::Comparator(by)) => {
                own.comparator = by;
            }
            (MethodSettings::WaitAndWiden(own), Field::Comparator, Setting::Comparator(by)) => {
                own.comparator = by;
            }
            (MethodSettings::WaitAndWiden(own), Field::Seed, Setting::Text(seed)) => own.seed = seed,
            (MethodSettings::WaitAndWiden(own), Field::VirtualNodes, Setting::Uint(n)) => {
                own.virtual_nodes = u32::try_from(n.max(1)).expect("the reader's range ends far below");
            }
            // Accepted in files, and of no effect: this method has no ring.
            (MethodSettings::PulsarWaitAndWiden { .. }, Field::VirtualNodes, Setting::Uint(_)) => {}
            (MethodSettings::WaitAndWiden(own), Field::Group, Setting::Uint(n)) => own.group = n,
            (MethodSettings::PulsarWaitAndWiden { group, .. }, Field::Group, Setting::Uint(n)) => {
                *group = n.max(1);
            }
            (
                MethodSettings::PulsarWaitAndWiden { band_widen_interval_ms, .. },
                Field::BandWidenIntervalMs,
                Setting::Uint(ms),
            ) => *band_widen_interval_ms = Some(ms),
            (
                MethodSettings::PulsarWaitAndWiden { fallback_max_queued, .. },
                Field::FallbackMaxQueued,
                Setting::Uint(n),
            ) => *fallback_max_queued = n,
            (
                MethodSettings::Pulsar(pulsar) | MethodSettings::PulsarWaitAndWiden { pulsar, .. },
                Field::Seed | Field::ConsiderKvFreeTokens | Field::RendezvousWeight,
                setting,
            ) => pulsar.set(field, setting),
            (
                MethodSettings::WaitAndWiden(WaitAndWiden { widen, .. })
                | MethodSettings::PulsarWaitAndWiden { widen, .. },
                field,
                setting,
            ) => widen.set(field, setting),
            (_, field, setting) => mismatch(field, &setting),
        }
    }
}

impl Pulsar {
    fn set(&mut self, field: Field, setting: Setting) {
        match (field, setting) {
            (Field::Seed, Setting::Text(seed)) => self.seed = seed,
            (Field::ConsiderKvFreeTokens, Setting::Flag(on)) => self.consider_kv_free_tokens = on,
            (Field::RendezvousWeight, Setting::Weight(weight)) => self.weight = weight,
            (field, setting) => mismatch(field, &setting),
        }
    }
}

impl Widen {
    fn set(&mut self, field: Field, setting: Setting) {
        match (field, setting) {
            (Field::N, Setting::Uint(n)) => self.n = n.max(1),
            (Field::MaxQueued, Setting::Uint(n)) => self.max_queued = n,
            (Field::MaxQueueTimeFloorMs, Setting::Uint(ms)) => self.max_queue_time_floor_ms = Some(ms),
            (Field::MaxQueueTimeCeilMs, Setting::Uint(ms)) => self.max_queue_time_ceil_ms = Some(ms),
            (Field::TtftBucketSizeMs, Setting::Uint(ms)) => self.ttft_bucket_size_ms = ms,
            (Field::NextBucketUnlockFactor, Setting::Number(x)) => self.next_bucket_unlock_factor = x,
            (Field::IgnoreQueueTime, Setting::Flag(on)) => self.ignore_queue_time = on,
            (Field::IgnoreInputProcessingTime, Setting::Flag(on)) => self.ignore_input_processing_time = on,
            (Field::CacheAffinityWaitMs, Setting::Uint(ms)) => self.cache_affinity_wait_ms = ms,
            (Field::CacheAffinityInputTokensScale, Setting::Number(x)) => {
                self.cache_affinity_input_tokens_scale = x;
            }
            (field, setting) => mismatch(field, &setting),
        }
    }
}

/// The field table allowed what the entry has no place for: the two disagree, which only a change to either can bring about.
fn mismatch(field: Field, setting: &Setting) -> ! {
    panic!("{} has no place for {setting:?} here", field.name())
}

//! An entry as a log line shows it: every value its algorithm routes with, in the form of the file.
//!
//! *Invariant*: a file's entry with this text routes the same, and has the same text.
//! *Source*: the Stargate rules, section 3.5. The rules give the order for wait-and-widen; the other algorithms follow it.

use super::entry::{Entry, MethodSettings, Pulsar, WaitAndWiden, Widen};
use super::field::Field;

/// A JSON object in the making.
struct Object(String);

impl Object {
    fn put(&mut self, field: Field, value: impl serde::Serialize) {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push('"');
        self.0 += field.name();
        self.0 += "\":";
        self.0 += &serde_json::to_string(&value).expect("texts, flags and numbers can be written");
    }

    fn put_if_set(&mut self, field: Field, value: Option<impl serde::Serialize>) {
        if let Some(value) = value {
            self.put(field, value);
        }
    }

    fn put_seed(&mut self, seed: &str) {
        self.put_if_set(Field::Seed, Some(seed).filter(|seed| !seed.is_empty()));
    }
}

impl Entry {
    /// One line of JSON. What is unset has no key.
    pub fn effective_json(&self) -> String {
        let mut object = Object(String::with_capacity(512));
        object.put(Field::Algorithm, self.method().name());
        match &self.method {
            MethodSettings::PowerOfN(own) => {
                object.put(Field::SampleCount, own.sample_count);
                object.put(Field::Comparator, own.comparator.name());
            }
            MethodSettings::WaitAndWiden(WaitAndWiden { seed, comparator, widen, virtual_nodes, group }) => {
                object.put(Field::Comparator, comparator.name());
                object.put_seed(seed);
                object.put(Field::VirtualNodes, virtual_nodes);
                object.put_if_set(Field::Group, Some(group).filter(|group| **group > 0));
                widen.put_affinity(&mut object);
                widen.put_buckets(&mut object);
            }
            MethodSettings::RoundRobin | MethodSettings::Random => {}
            MethodSettings::Pulsar(own) => own.put(&mut object),
            MethodSettings::PulsarWaitAndWiden {
                pulsar,
                widen,
                group,
                band_widen_interval_ms,
                fallback_max_queued,
            } => {
                pulsar.put(&mut object);
                object.put(Field::Group, group);
                widen.put_affinity(&mut object);
                let interval_ms = band_widen_interval_ms.unwrap_or(widen.cache_affinity_wait_ms);
                object.put(Field::BandWidenIntervalMs, interval_ms);
                object.put(Field::FallbackMaxQueued, fallback_max_queued);
                widen.put_buckets(&mut object);
            }
        }
        object.put(Field::RequireCacheAffinityKey, self.require_cache_affinity_key);
        object.put(Field::RequireInputTokens, self.require_input_tokens);
        object.put_if_set(Field::MaxInputWorkSeconds, self.max_input_work_seconds);
        object.0.push('}');
        object.0
    }
}

impl Pulsar {
    fn put(&self, object: &mut Object) {
        object.put_seed(&self.seed);
        object.put(Field::ConsiderKvFreeTokens, self.consider_kv_free_tokens);
        object.put(Field::RendezvousWeight, self.weight.name());
    }
}

impl Widen {
    fn put_affinity(&self, object: &mut Object) {
        object.put(Field::CacheAffinityInputTokensScale, self.cache_affinity_input_tokens_scale);
        object.put(Field::CacheAffinityWaitMs, self.cache_affinity_wait_ms);
    }

    fn put_buckets(&self, object: &mut Object) {
        object.put(Field::TtftBucketSizeMs, self.ttft_bucket_size_ms);
        object.put(Field::NextBucketUnlockFactor, self.next_bucket_unlock_factor);
        object.put(Field::N, self.n);
        object.put(Field::MaxQueued, self.max_queued);
        object.put_if_set(Field::MaxQueueTimeFloorMs, self.max_queue_time_floor_ms);
        object.put_if_set(Field::MaxQueueTimeCeilMs, self.max_queue_time_ceil_ms);
        object.put(Field::IgnoreQueueTime, self.ignore_queue_time);
        object.put(Field::IgnoreInputProcessingTime, self.ignore_input_processing_time);
    }
}

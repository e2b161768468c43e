//! The Stargate rules, section 3.5.

use super::*;
use crate::proto::config::expression;
use crate::proto::config::lb_config::LbConfig;

/// A cache whose state is the number of the build.
struct Cache {
    cache: Expressions<u32>,
    now: Nanos,
    builds: u32,
}

impl Cache {
    fn new(entries_max: usize) -> Cache {
        Cache { cache: Expressions::with_max(entries_max), now: Nanos(7), builds: 0 }
    }

    /// As a request for a model does it: what it was given, and whether that had to be built.
    fn ask(&mut self, routing_key: &str, model: &str, value: &str) -> (u32, Option<Outcome>) {
        let (key, model, value) = (routing_key.as_bytes(), model.as_bytes(), value.as_bytes());
        if let Some(state) = self.cache.lookup(self.now, key, model, value) {
            return (*state, None);
        }
        self.builds += 1;
        let outcome = self.cache.insert(self.now, key, model, value, Rc::new(self.builds));
        (self.builds, Some(outcome))
    }

    fn later(&mut self, ms: u64) {
        self.now = self.now.plus_ms(ms);
    }

    /// The list holds what the index holds, in both directions.
    fn check(&self) {
        let mut numbers = Vec::new();
        let (mut at, mut newer, mut hit) = (self.cache.newest, NOBODY, Nanos::NEVER);
        while at != NOBODY {
            let entry = self.cache.entry(at);
            assert_eq!(entry.newer, newer);
            assert!(entry.last_hit <= hit, "out of order");
            assert_eq!(self.cache.index.get(&entry.key), Some(&at));
            numbers.push(at);
            (newer, hit, at) = (at, entry.last_hit, entry.older);
        }
        assert_eq!(self.cache.oldest, newer);
        assert_eq!(
            (numbers.len(), self.cache.entries.len()),
            (self.cache.len(), numbers.len() + self.cache.free.len())
        );
    }
}

const BUILD: Option<Outcome> = Some(Outcome::Build);
const REBUILD: Option<Outcome> = Some(Outcome::Rebuild);

#[test]
fn the_two_values_built_last() {
    let mut cache = Cache::new(8);
    assert_eq!(cache.ask("", "m", "A;"), (1, BUILD));
    assert_eq!(cache.ask("", "m", "B;"), (2, REBUILD));
    // By turns: only hits, each with what it remembers.
    for _ in 0..3 {
        assert_eq!(cache.ask("", "m", "A;"), (1, None));
        assert_eq!(cache.ask("", "m", "B;"), (2, None));
    }
    assert_eq!(cache.ask("", "m", "C;"), (3, REBUILD));
    assert_eq!(cache.ask("", "m", "B;"), (2, None), "the older of the two");
    assert_eq!(cache.ask("", "m", "A;"), (4, REBUILD), "gone, and new now");
    assert_eq!(cache.cache.len(), 1);
    cache.check();
}

/// A hit on the older value does not make it the newer: the next new value still drops it.
#[test]
fn a_hit_does_not_promote() {
    let mut cache = Cache::new(8);
    cache.ask("", "m", "A;");
    cache.ask("", "m", "B;");
    assert_eq!(cache.ask("", "m", "A;"), (1, None));
    assert_eq!(cache.ask("", "m", "D;"), (3, REBUILD));
    assert_eq!(cache.ask("", "m", "B;"), (2, None), "was the newer, is the older");
    assert_eq!(cache.ask("", "m", "A;"), (4, REBUILD));
}

/// R10: case and spaces make another value, with a load balancer of its own.
#[test]
fn values_are_compared_byte_for_byte() {
    let mut cache = Cache::new(8);
    assert_eq!(cache.ask("", "m", "round-robin;require_input_tokens=false"), (1, BUILD));
    assert_eq!(cache.ask("", "m", "ROUND-ROBIN;require_input_tokens=false"), (2, REBUILD));
    assert_eq!(cache.ask("", "m", "round-robin;require_input_tokens=false"), (1, None));
    assert_eq!(cache.ask("", "m", "round-robin; require_input_tokens=false"), (3, REBUILD));
}

#[test]
fn keys_and_models_are_kept_apart() {
    let mut cache = Cache::new(8);
    let pairs = [("", "m"), ("k", "m"), ("", "n"), ("m", ""), ("a", "bc"), ("ab", "c"), ("abc", "")];
    for (number, (key, model)) in (1..).zip(pairs) {
        assert_eq!(cache.ask(key, model, "A;"), (number, BUILD));
    }
    for (number, (key, model)) in (1..).zip(pairs) {
        assert_eq!(cache.ask(key, model, "A;"), (number, None), "{key} {model}");
    }
}

#[test]
fn fifteen_idle_minutes() {
    let mut cache = Cache::new(8);
    assert_eq!(cache.cache.poll_timeout(), Nanos::NEVER);
    cache.ask("", "a", "A;");
    cache.later(60_000);
    cache.ask("", "b", "B;");
    assert_eq!(cache.cache.poll_timeout(), Nanos(7).plus_ms(900_000));
    cache.later(839_999);
    assert_eq!(cache.ask("", "a", "A;"), (1, None), "a millisecond before the end");
    assert_eq!(cache.cache.poll_timeout(), Nanos(7).plus_ms(960_000), "b's, now");
    cache.later(60_001);
    // Without a request, and without a sweep before the request.
    cache.cache.sweep(cache.now);
    assert_eq!(cache.cache.len(), 1);
    cache.check();
    cache.later(900_000);
    assert_eq!(cache.ask("", "a", "A;"), (3, BUILD), "not a rebuild: nothing is there");
    cache.later(900_000);
    assert_eq!(cache.ask("", "a", "B;"), (4, BUILD));
    cache.check();
}

/// Nothing but a hit or a build ends idleness: a value that is refused would keep an entry that nobody can use.
#[test]
fn a_miss_changes_nothing() {
    let mut cache = Cache::new(2);
    cache.ask("", "a", "A;");
    cache.later(1);
    cache.ask("", "b", "B;");
    cache.later(1);
    for (model, value) in [("a", "refused;"), ("b", "refused;"), ("c", "refused;")] {
        assert!(cache.cache.lookup(cache.now, b"", model.as_bytes(), value.as_bytes()).is_none());
    }
    assert_eq!(cache.cache.poll_timeout(), Nanos(7).plus_ms(900_000));
    assert_eq!((cache.ask("", "a", "A;"), cache.ask("", "b", "B;")), ((1, None), (2, None)));
}

#[test]
fn the_longest_idle_goes_when_it_is_full() {
    let mut cache = Cache::new(3);
    for model in ["a", "b", "c"] {
        cache.later(1);
        cache.ask("", model, "A;");
    }
    cache.later(1);
    cache.ask("", "a", "A;");
    // A second value takes no second entry.
    assert_eq!(cache.ask("", "c", "B;"), (4, REBUILD));
    assert_eq!(cache.ask("", "d", "A;"), (5, BUILD));
    assert_eq!(cache.cache.len(), 3);
    for (model, number) in [("a", 1), ("c", 3), ("d", 5)] {
        assert_eq!(cache.ask("", model, "A;"), (number, None));
    }
    assert_eq!(cache.ask("", "b", "A;"), (6, BUILD), "it was the longest idle");
    cache.check();
}

#[test]
fn the_bound_is_16384() {
    let mut cache = Cache { cache: Expressions::default(), now: Nanos(7), builds: 0 };
    for i in 0..16_384 {
        cache.ask("key", &i.to_string(), "A;");
    }
    assert_eq!((cache.cache.len(), cache.ask("key", "0", "A;")), (16_384, (1, None)));
    cache.ask("key", "one more", "A;");
    assert_eq!(cache.cache.len(), 16_384);
    assert_eq!(cache.ask("key", "1", "A;").1, BUILD, "it was the longest idle");
    assert_eq!(cache.cache.entries.len(), 16_384, "places are used again");
    cache.check();
}

#[test]
fn what_was_dropped_lives_as_long_as_it_is_held() {
    let mut cache = Expressions::with_max(1);
    let state = Rc::new("state");
    assert_eq!(cache.insert(Nanos::ZERO, b"", b"m", b"A;", state.clone()), Outcome::Build);
    assert_eq!(Rc::strong_count(&state), 2);
    cache.forget(b"", b"other");
    assert_eq!((cache.len(), Rc::strong_count(&state)), (1, 2));
    cache.forget(b"", b"m");
    assert!(cache.is_empty() && cache.lookup(Nanos::ZERO, b"", b"m", b"A;").is_none());
    assert_eq!((Rc::strong_count(&state), *state), (1, "state"));
    // By a third value, by a newcomer, by time.
    cache.insert(Nanos::ZERO, b"", b"m", b"A;", state.clone());
    cache.insert(Nanos::ZERO, b"", b"m", b"B;", Rc::new("b"));
    assert_eq!(Rc::strong_count(&state), 2);
    cache.insert(Nanos::ZERO, b"", b"m", b"C;", Rc::new("c"));
    assert_eq!(Rc::strong_count(&state), 1);
    cache.insert(Nanos::ZERO, b"", b"n", b"A;", state.clone());
    cache.sweep(Nanos::from_ms(900_000));
    assert_eq!((cache.len(), Rc::strong_count(&state)), (0, 1));
}

/// From the header to the configuration, as a request on a trusted listener goes.
#[test]
fn together_with_configuration_and_expression() {
    let config =
        LbConfig::parse(br#"{"models":{"m":{"algorithm":"pulsar","consider_kv_free_tokens":true}}}"#)
            .unwrap();
    let mut cache = Expressions::default();
    let value = b"pulsar;seed=a";
    for round in 0..3 {
        if let Some(built) = cache.lookup(Nanos(round), b"k", b"m", value) {
            // The cache's and ours.
            assert!(round > 0 && Rc::strong_count(&built) == 2);
            continue;
        }
        assert_eq!(round, 0);
        let Ok(expression::Requested::Expression(expression)) = expression::parse(value) else { panic!() };
        let base = config.entry(config.resolve(b"m", Some(expression.method())).unwrap());
        let entry = expression.compile(base).unwrap();
        assert!(entry.effective_json().contains(r#""seed":"a","consider_kv_free_tokens":true"#));
        assert_eq!(cache.insert(Nanos(round), b"k", b"m", value, Rc::new(entry)), Outcome::Build);
    }
    assert_eq!(Outcome::Build.name(), "build");
    assert_eq!(Outcome::Rebuild.name(), "rebuild");
}

/// Against a list of entries, the newest first.
#[test]
fn as_a_naive_model_has_it() {
    type Kept = Vec<(String, Nanos, Vec<(String, u32)>)>;
    let mut seed = 1u64;
    let mut dice = move |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let mut cache = Cache::new(4);
    let mut kept: Kept = Vec::new();
    let (mut hits, mut evictions) = (0, 0);
    for _ in 0..20_000 {
        cache.later(if dice(50) == 0 { 500_000 } else { dice(20_000) });
        kept.retain(|(_, hit, _)| cache.now.since(*hit) < Nanos::from_ms(900_000).0);
        let model = dice(6).to_string();
        if dice(40) == 0 {
            cache.cache.forget(b"k", model.as_bytes());
            kept.retain(|(kept, ..)| *kept != model);
            continue;
        }
        let value = format!("v{};", dice(3));
        let at = kept.iter().position(|(kept, ..)| *kept == model);
        let expected = match at {
            Some(at) => {
                let (model, _, mut values) = kept.remove(at);
                let found = values.iter().find(|(kept, _)| *kept == value).map(|(_, number)| *number);
                let expected = found.map_or((cache.builds + 1, REBUILD), |number| (number, None));
                if found.is_none() {
                    values.insert(0, (value.clone(), cache.builds + 1));
                    values.truncate(2);
                }
                hits += u32::from(found.is_some());
                kept.insert(0, (model, cache.now, values));
                expected
            }
            None => {
                evictions += u32::from(kept.len() == 4);
                kept.truncate(3);
                let number = cache.builds + 1;
                kept.insert(0, (model.clone(), cache.now, vec![(value.clone(), number)]));
                (number, BUILD)
            }
        };
        assert_eq!(cache.ask("k", &model, &value), expected);
        assert_eq!(cache.cache.len(), kept.len());
        cache.check();
    }
    assert!(hits > 2_000 && evictions > 200, "{hits} hits, {evictions} evictions");
}

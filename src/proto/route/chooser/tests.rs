use super::*;
use crate::proto::backend::table::BackendTable;
use crate::proto::config::lb_config::{Comparator, Method};
use crate::proto::ids::BackendId;
use crate::proto::stargate::estimate::score;

/// Seats with rows of their own: `(cluster id, weight, ceiling)`.
struct Group {
    chooser: Chooser,
    seats: Vec<(&'static str, f64)>,
    table: BackendTable,
    rates: Vec<Published>,
    live: Vec<u16>,
    rng: Rng,
}

impl Group {
    fn new(entry: &Entry, seats: &[(&'static str, f64, u32)]) -> Group {
        let mut table = BackendTable::new(1);
        for (i, (_, weight, ceiling)) in seats.iter().enumerate() {
            let id = BackendId(i as u16);
            table.ensure(id);
            (table.row_mut(id).weight, table.row_mut(id).ceiling) = (fixed_weight(*weight), *ceiling);
        }
        let mut group = Group {
            chooser: Chooser::new(entry),
            seats: seats.iter().map(|(id, ..)| (*id, 0.0)).collect(),
            table,
            rates: vec![Published::default(); seats.len()],
            live: (0..seats.len() as u16).collect(),
            rng: Rng::new(5),
        };
        group.chooser.set_seats(group.seats.iter().copied());
        group.set_live((0..seats.len() as u16).collect());
        group
    }

    fn set_live(&mut self, live: Vec<u16>) {
        self.live = live;
        self.chooser.set_live(&self.live);
        self.see_all();
    }

    fn has_room(&self, slot: u16) -> bool {
        let row = self.table.row(BackendId(slot));
        row.ceiling == 0 || row.in_flight < row.ceiling
    }

    fn see(&mut self, slot: u16) {
        let (row, room) = (self.table.row(BackendId(slot)), self.has_room(slot));
        self.chooser.see(slot, row, room, self.rates[usize::from(slot)]);
        self.chooser.settle();
    }

    fn see_all(&mut self) {
        for slot in 0..self.seats.len() as u16 {
            self.see(slot);
        }
    }

    fn load(&mut self, slot: u16, in_flight: u32, prefill_tokens: u64) {
        let row = self.table.row_mut(BackendId(slot));
        (row.in_flight, row.prefill_tokens) = (in_flight, prefill_tokens);
        row.prefilling = in_flight.min(1);
        self.see(slot);
    }

    fn choose(&mut self, key: &[u8], tried: &[u16]) -> Option<u16> {
        let input = Input { tokens: 100, affinity_key: key };
        self.chooser.choose(input, tried, &mut self.rng)
    }

    /// The same as a chooser that has never seen anything else.
    fn fresh(&self) -> Chooser {
        let mut fresh = Chooser::new(self.chooser.entry());
        fresh.set_seats(self.seats.iter().copied());
        fresh.set_live(&self.live);
        for slot in 0..self.seats.len() as u16 {
            let (row, room) = (self.table.row(BackendId(slot)), self.has_room(slot));
            fresh.see(slot, row, room, self.rates[usize::from(slot)]);
        }
        fresh.settle();
        fresh
    }
}

fn stats(group: &Group, at: usize) -> (f64, f64) {
    let stats = &group.chooser.clusters[at].stats;
    (stats.last_mean_input_tps, stats.max_input_tps)
}

#[test]
fn unknown_rates_are_the_weights_scaled_as_the_known_ones_are() {
    let mut group = Group::new(&Entry::new(Method::Pulsar), &[("a", 1.0, 8), ("b", 2.0, 8), ("c", 0.5, 8)]);
    let all = |group: &Group| (0..3).map(|at| stats(group, at)).collect::<Vec<_>>();
    let close = |got: Vec<(f64, f64)>, expected: [(f64, f64); 3]| {
        let apart = |(a, b): (f64, f64)| (a - b).abs() > 1e-9 * b;
        let wrong =
            got.iter().zip(expected).any(|(got, want)| apart((got.0, want.0)) || apart((got.1, want.1)));
        assert!(!wrong, "{got:?} instead of {expected:?}");
    };
    close(all(&group), [(1000.0, 1000.0), (2000.0, 2000.0), (500.0, 500.0)]);
    group.rates[1] = Published { mean: 600.0, greatest: 800.0 };
    group.see(1);
    close(all(&group), [(300.0, 400.0), (600.0, 800.0), (150.0, 200.0)]);
    group.rates[0] = Published { mean: 900.0, greatest: 1000.0 };
    group.see(0);
    close(all(&group), [(900.0, 1000.0), (600.0, 800.0), (250.0, 300.0)]);
    // A configured rate is the rate, whatever is measured.
    group.chooser.set_seats([("a", 0.0), ("b", 50.0), ("c", 0.0)].into_iter());
    group.set_live(vec![0, 1, 2]);
    assert_eq!(stats(&group, 1), (50.0, 50.0));
}

#[test]
fn keys_follow_weights_before_anything_is_measured() {
    let mut group = Group::new(&Entry::new(Method::Pulsar), &[("a", 1.0, 8), ("b", 2.0, 8), ("c", 1.0, 8)]);
    let mut counts = [0; 3];
    for key in 0..4000_u32 {
        counts[usize::from(group.choose(&key.to_be_bytes(), &[]).unwrap())] += 1;
    }
    assert!((900..1100).contains(&counts[0]) && (1900..2100).contains(&counts[1]), "{counts:?}");
    assert_eq!(group.choose(b"", &[]), None, "no key belongs nowhere");
}

#[test]
fn a_key_keeps_its_place_while_its_first_is_full_or_failed() {
    let mut group = Group::new(&Entry::new(Method::Pulsar), &[("a", 1.0, 1), ("b", 1.0, 1), ("c", 1.0, 1)]);
    let first = group.choose(b"k", &[]).unwrap();
    let second = group.choose(b"k", &[first]).unwrap();
    assert_ne!(second, first);
    group.load(first, 1, 0);
    assert_eq!(group.choose(b"k", &[]), Some(second));
    assert_eq!((group.chooser.first(b"k"), group.chooser.first(b"")), (Some(first), None));
    let third = group.choose(b"k", &[second]).unwrap();
    assert!(third != first && third != second);
    (0..3).for_each(|slot| group.load(slot, 1, 0));
    assert_eq!(group.choose(b"k", &[]), None, "nobody has room");
    group.load(first, 0, 0);
    assert_eq!(group.choose(b"k", &[]), Some(first));
}

#[test]
fn servers_of_a_cluster_are_one_and_take_turns() {
    let seats = [("x", 1.0, 2), ("y", 1.0, 2), ("x", 1.0, 2)];
    let mut group = Group::new(&Entry::new(Method::RoundRobin), &seats);
    let turns: Vec<_> = (0..6).map(|_| group.choose(b"", &[]).unwrap()).collect();
    assert_eq!(turns, [0, 1, 2, 1, 0, 1]);
    assert!(group.chooser.are_one(0, 2) && !group.chooser.are_one(0, 1));
    // One is full: the other has all of its cluster's turns.
    group.load(2, 2, 0);
    let turns: Vec<_> = (0..4).map(|_| group.choose(b"", &[]).unwrap()).collect();
    assert_eq!(turns, [0, 1, 0, 1]);
    // And one that was tried, too; with both out, the cluster is.
    group.load(2, 0, 0);
    assert_eq!((0..4).map(|_| group.choose(b"", &[0]).unwrap()).collect::<Vec<_>>(), [2, 1, 2, 1]);
    assert_eq!((0..3).map(|_| group.choose(b"", &[0, 2]).unwrap()).collect::<Vec<_>>(), [1, 1, 1]);
    assert_eq!(group.choose(b"", &[0, 1, 2]), None);
    let stats = &group.chooser.clusters[0].stats;
    assert_eq!((stats.max_engine_concurrency, stats.last_mean_input_tps), (4, 2000.0));
}

#[test]
fn turns_go_on_when_servers_come_and_go() {
    let seats = [("x", 1.0, 0), ("x", 1.0, 0), ("y", 1.0, 0)];
    let mut group = Group::new(&Entry::new(Method::RoundRobin), &seats);
    assert_eq!((group.choose(b"", &[]), group.choose(b"", &[])), (Some(0), Some(2)));
    group.set_live(vec![0, 1]);
    assert_eq!(group.choose(b"", &[]), Some(1), "the cluster's second turn");
    group.set_live(vec![]);
    assert_eq!((group.choose(b"", &[]), group.chooser.first(b"k")), (None, None));
}

#[test]
fn what_was_followed_change_by_change_is_what_a_fresh_look_finds() {
    let seats = [
        ("a", 1.0, 2),
        ("b", 0.5, 1),
        ("a", 1.0, 3),
        ("c", 2.0, 0),
        ("d", 1.0, 1),
        ("e", 3.0, 4),
        ("d", 1.0, 2),
    ];
    let mut power = Entry::new(Method::PowerOfN);
    let MethodSettings::PowerOfN(rules) = &mut power.method else { unreachable!() };
    // All are compared, so that the choice can be checked.
    rules.sample_count = 64;
    let mut grouped = Entry::new(Method::WaitAndWiden);
    let MethodSettings::WaitAndWiden(rules) = &mut grouped.method else { unreachable!() };
    (rules.group, rules.comparator) = (2, Comparator::Utilization);
    let others = Method::ALL.map(Entry::new);
    for (seed, entry) in [power, grouped].iter().chain(&others).enumerate() {
        let mut group = Group::new(entry, &seats);
        let mut random = Rng::new(seed as u64);
        let mut chosen = 0;
        for step in 0..3000 {
            let slot = random.below(seats.len()) as u16;
            match random.below(20) {
                0 => group.set_live((0..seats.len() as u16).filter(|_| random.below(4) > 0).collect()),
                1 => {
                    let mean = random.below(5) as f64 * 100.0;
                    group.rates[usize::from(slot)] = Published { mean, greatest: mean * 1.5 };
                    group.see(slot);
                }
                _ => group.load(slot, random.below(5) as u32, random.below(3) as u64 * 500),
            }
            let mut fresh = group.fresh();
            assert_eq!(group.chooser.clusters, fresh.clusters, "{entry:?} {step}");
            assert_eq!((&group.chooser.shut, group.chooser.shut_count), (&fresh.shut, fresh.shut_count));
            let tried: Vec<u16> = (0..random.below(3)).map(|_| random.below(seats.len()) as u16).collect();
            let key = [random.below(9) as u8];
            let usable = |slot: &u16| group.has_room(*slot) && !tried.contains(slot);
            let usable: Vec<u16> = group.live.iter().copied().filter(usable).collect();
            let choice = group.choose(&key, &tried);
            let Some(slot) = choice else {
                // Times of two that read nothing cannot be told apart only when nothing is left at all.
                assert!(usable.is_empty(), "{entry:?} {step}: {usable:?} could have been chosen");
                continue;
            };
            chosen += 1;
            assert!(usable.contains(&slot), "{entry:?} {step}: {slot} of {usable:?}");
            let cluster = |slot: u16| fresh.seats[usize::from(slot)].cluster as usize;
            match &entry.method {
                MethodSettings::PowerOfN(rules) if rules.sample_count == 64 => {
                    let score = |slot: u16| score(Comparator::Ttft, &fresh.clusters[cluster(slot)], 100, 0);
                    let least = usable.iter().map(|slot| score(*slot)).min();
                    assert_eq!(Some(score(slot)), least, "{step}");
                }
                MethodSettings::Pulsar(_) | MethodSettings::PulsarWaitAndWiden { .. } => {
                    // The first of the ranking, where that one may be chosen.
                    let first = fresh.first(&key).unwrap();
                    let may = usable.iter().any(|slot| fresh.are_one(*slot, first));
                    assert!(!may || fresh.are_one(slot, first), "{entry:?} {step}");
                    if matches!(entry.method, MethodSettings::Pulsar(_)) {
                        let input = Input { tokens: 100, affinity_key: &key };
                        let again = fresh.choose(input, &tried, &mut Rng::new(0)).unwrap();
                        assert!(fresh.are_one(slot, again), "what is remembered of keys is up to date");
                    }
                }
                _ => {}
            }
        }
        assert!(chosen > 2000, "{entry:?}: {chosen}");
    }
}

#[test]
fn a_permit_asked_for_fills_nobody_who_has_room() {
    let mut group = Group::new(&Entry::new(Method::WaitAndWiden), &[("a", 1.0, 2)]);
    group.table.row_mut(BackendId(0)).asked = 7;
    group.see(0);
    assert_eq!(group.chooser.clusters[0].stats.num_running_queries, 1);
    assert_eq!(group.choose(b"", &[]), Some(0));
}

use super::*;
use crate::proto::stargate::layout::Slot;

fn slot(backend: u16, server: &str, cluster_id: &str) -> Slot {
    Slot {
        backend: BackendId(backend),
        server: server.into(),
        model: "m".into(),
        cluster_id: cluster_id.into(),
        routing_keys: Vec::new(),
        advertised: true,
        active: true,
        input_tps: 100.0,
        max_concurrency: 0,
    }
}

struct Rig {
    table: SlotTable,
    target: Target,
    names: Vec<String>,
}

impl Rig {
    fn new(slots: &[(&str, &str)]) -> Rig {
        let mut rig = Rig { table: SlotTable::default(), target: Target::new("", "m"), names: Vec::new() };
        for (backend, (server, cluster_id)) in (0..).zip(slots) {
            let id = SlotId(u32::from(backend));
            rig.table.configure(id, &slot(backend, server, cluster_id));
            rig.table.server_mut(BackendId(backend)).up = Some(true);
            rig.target.advertise(id);
        }
        rig.rebuild();
        rig
    }

    fn rebuild(&mut self) -> bool {
        let names = &mut self.names;
        self.target.rebuild(0, &mut self.table, |name| match names.iter().position(|known| known == name) {
            Some(at) => at as u32,
            None => {
                names.push(name.into());
                names.len() as u32 - 1
            }
        })
    }

    fn set_up(&mut self, backend: u16, up: bool) -> bool {
        self.table.server_mut(BackendId(backend)).up = Some(up);
        self.rebuild()
    }

    /// The server whose turn it is in that cluster.
    fn next(&mut self, cluster: usize, failed: &[u16]) -> Option<u32> {
        let failed: Vec<BackendId> = failed.iter().copied().map(BackendId).collect();
        self.target.groups[cluster].next(&failed, &self.table).map(|slot| slot.0)
    }

    fn ids(&self) -> Vec<&str> {
        self.target.clusters.iter().map(|cluster| &*cluster.id).collect()
    }
}

#[test]
fn clusters_are_sorted_and_their_servers_take_turns_by_name() {
    let mut rig = Rig::new(&[("z", "east"), ("b", "west"), ("a", "east"), ("m", "east")]);
    assert_eq!(rig.ids(), ["east", "west"]);
    let turns: Vec<_> = (0..5).map(|_| rig.next(0, &[]).unwrap()).collect();
    assert_eq!(turns, [2, 3, 0, 2, 3], "a, m, z, and again");
    assert_eq!(rig.next(1, &[]), Some(1));
    assert_eq!(rig.next(1, &[1]), None);
    // Only those are counted that have not failed the request: the turn stands at 5, 5 % 2 is 1.
    assert_eq!(rig.next(0, &[3]), Some(0));
    assert_eq!(rig.next(0, &[3, 9]), Some(2));
    assert_eq!(rig.target.active(), 4);
}

#[test]
fn a_cluster_keeps_its_turn_while_others_come_and_go() {
    let mut rig = Rig::new(&[("a", "mid"), ("b", "mid"), ("c", "early"), ("d", "late")]);
    assert_eq!(rig.ids(), ["early", "late", "mid"]);
    assert_eq!(rig.next(2, &[]), Some(0));
    assert!(!rig.set_up(2, false));
    assert_eq!(rig.ids(), ["late", "mid"]);
    assert_eq!(rig.next(1, &[]), Some(1));
    assert_eq!(rig.table.row(SlotId(0)).memberships, [(0, 1)]);
    assert_eq!(rig.table.row(SlotId(2)).memberships, []);
    assert!(!rig.set_up(0, false) && !rig.set_up(1, false));
    assert!(rig.set_up(3, false), "the last one went");
    assert!(!rig.set_up(3, false), "and is still gone");
    assert_eq!((rig.ids().len(), rig.target.active()), (0, 0));
    assert!(!rig.set_up(1, true));
    assert_eq!(rig.ids(), ["mid"]);
}

#[test]
fn versions_grow_with_what_they_are_of() {
    use crate::proto::config::lb_config::{Entry, Method};
    let mut rig = Rig::new(&[("a", "a"), ("b", "b")]);
    let wide = Entry::new(Method::WaitAndWiden);
    let by_max = Entry::new(Method::Pulsar);
    let mut by_mean = by_max.clone();
    let MethodSettings::Pulsar(pulsar) = &mut by_mean.method else { panic!("pulsar's settings") };
    pulsar.weight = RendezvousWeight::LastMeanInputTps;
    let flights = Flights::default();
    let mut scratch = Scratch::default();
    let mut look = |rig: &mut Rig| {
        rig.target.refresh(&mut rig.table, &flights, &mut scratch);
        [&wide, &by_max, &by_mean].map(|entry| rig.target.version(entry))
    };
    let before = look(&mut rig);
    rig.target.mark(1);
    assert_eq!(look(&mut rig), before, "nothing moved");
    let row = rig.table.row_mut(SlotId(1));
    row.live.begin(0, 5);
    rig.target.mark(1);
    assert_eq!(look(&mut rig), before, "load is no weight");
    // A fixed rate gives way to a report: mean and greatest move apart.
    let mut reported = crate::proto::stargate::stats::Reported {
        last_mean_input_tps: Some(50.0),
        max_input_tps: Some(100.0),
        ..Default::default()
    };
    rig.table.report(SlotId(1), &reported);
    rig.target.mark(1);
    assert_eq!(look(&mut rig), [before[0], before[1], before[2] + 1]);
    reported.max_input_tps = Some(101.0);
    rig.table.report(SlotId(1), &reported);
    rig.target.mark(1);
    assert_eq!(look(&mut rig), [before[0], before[1] + 1, before[2] + 1]);
    rig.set_up(0, false);
    let after = look(&mut rig);
    assert!(before.iter().zip(&after).all(|(before, after)| before < after), "{before:?} {after:?}");
}

#[test]
fn a_target_is_known_while_advertised_and_for_its_grace() {
    let mut rig = Rig::new(&[("a", "a")]);
    let at = Nanos::from_ms;
    assert!(rig.target.is_known(at(0), 0));
    rig.target.withdraw(at(10), SlotId(5));
    assert!(rig.target.is_known(at(1_000_000), 5), "it never had that one");
    rig.target.withdraw(at(10), SlotId(0));
    rig.target.withdraw(at(12), SlotId(0));
    assert!(rig.target.is_known(at(14), 5) && !rig.target.is_known(at(15), 5));
    assert!(!rig.target.is_known(at(10), 0));
    assert!(!Target::new("", "m").is_known(at(0), 900_000));
}

use super::*;
use crate::control::drain::Shutdown;
use crate::control::figures::tests::server;
use crate::control::registrations::body;
use crate::control::scrape::load::Limits;
use crate::control::state::CheckFailure;
use crate::control::tests::PlayedPort;
use crate::proto::backend::catalog::Catalog;
use crate::proto::ids::ShardId;

const RULES: Rules = Rules { interval_ms: 2000, fall: 2, rise: 1 };
const ONE: BackendId = BackendId(0);
const NEW: BackendId = BackendId(1);

fn ms(ms: u64) -> Nanos {
    Nanos::from_ms(ms)
}

/// One configured server, `one`, which serves `models`.
fn state(models: &[&str], only: bool) -> (State<PlayedPort>, PlayedPort) {
    let mut one = server("one", None, 1.0);
    one.models = Some(models.iter().map(|model| Box::from(*model)).collect());
    let catalog = Catalog { servers: vec![one], ..Catalog::default() };
    let port = PlayedPort::new(1);
    let shutdown = Shutdown::new(1, 10, 10);
    let mut state = State::new(port.clone(), RULES, catalog, vec![None], shutdown, ms(0));
    let place = Place { cluster_id: "rack".into(), routing_keys: vec!["k".into()], input_tps: 7.5 };
    state.trust(Some(Trusted { only, servers: vec![place], ttl_ms: 60_000, ttl_ms_max: 300_000 }));
    state.publish(ms(0));
    (state, port)
}

fn snapshot(url: &str, extra: &str, models: &str) -> Snapshot {
    let text = format!("{{\"url\":\"{url}\"{extra},\"models\":{{{models}}}}}");
    body::parse(text.as_bytes(), 300_000).unwrap()
}

const M: &str = r#""m":{"status":"active","stats":{"num_running_queries":3}}"#;
const TWO: &str = r#""m":{"status":"active","stats":{}},"n":{"status":"inactive","stats":{}}"#;

fn renewal(of: &Opened, url: &str, models: &str) -> Snapshot {
    Snapshot { lease: Some(of.lease.clone()), ..snapshot(url, "", models) }
}

/// What the shard was told since `from`, one word each.
fn told(port: &PlayedPort, from: usize) -> Vec<String> {
    port.told(0, |told| {
        told[from..]
            .iter()
            .filter_map(|update| match update {
                Update::Catalog(_) => Some("catalog".to_owned()),
                Update::Health { backend, up } => Some(format!("health {} {up}", backend.0)),
                Update::RoundTrip { backend, rtt_ns } => Some(format!("rtt {} {rtt_ns}", backend.0)),
                Update::Reported { slot, reported } => {
                    Some(format!("report {} {:?}", slot.0, reported.num_running_queries))
                }
                Update::Scraped { slot, scraped } => Some(format!("scrape {} {:?}", slot.0, scraped.running)),
                _ => None,
            })
            .collect()
    })
}

fn count(port: &PlayedPort) -> usize {
    port.told(0, <[Update]>::len)
}

fn slot(state: &State<PlayedPort>, index: usize) -> &Slot {
    &state.catalog().stargate.slots[index]
}

#[test]
fn configured_servers_have_a_slot_for_each_model_that_is_known_by_name() {
    let (mut state, _) = state(&["a", "b"], false);
    let expected = Slot {
        backend: ONE,
        server: "one".into(),
        model: "a".into(),
        cluster_id: "rack".into(),
        routing_keys: vec!["k".into()],
        advertised: true,
        active: true,
        input_tps: 7.5,
        max_concurrency: 32,
    };
    assert_eq!(
        state.catalog().stargate.slots,
        [expected.clone(), Slot { model: "b".into(), ..expected.clone() }]
    );
    state.catalog.servers[0].weight = 0.0;
    state.publish(ms(1));
    assert!(slot(&state, 0).advertised && !slot(&state, 0).active, "an operator took it out of service");
    state.catalog.servers[0].weight = 2.0;
    state.catalog.servers[0].models = Some(Vec::new());
    state.publish(ms(2));
    assert!(!slot(&state, 0).advertised && !slot(&state, 1).active, "every model is none by name");
    let (mut untrusting, _) = self::state(&["a"], false);
    untrusting.trust(None);
    untrusting.catalog.stargate.slots.clear();
    untrusting.publish(ms(3));
    assert!(untrusting.catalog().stargate.slots.is_empty());
    assert_eq!(untrusting.register(ms(3), "x", snapshot("http://h", "", M)), Err(Refused::Unknown));
}

#[test]
fn a_registration_is_a_server_that_only_targets_know() {
    let (mut state, port) = state(&["a"], false);
    let from = count(&port);
    let extra = ",\"cluster_id\":\"c\",\"routing_key\":\"fn\",\"ttl_ms\":2000";
    let opened = state.register(ms(10), "r", snapshot("http://10.0.0.9:80", extra, TWO)).unwrap();
    assert_eq!((opened.backend, opened.watch, opened.ttl_ms), (NEW, Some(0), 2000));
    assert_eq!(opened.expires, ms(2010));
    assert!(told(&port, from).is_empty() && state.changed(), "shards hear of the slots first");
    state.publish(ms(11));
    assert_eq!(told(&port, from), ["catalog", "report 1 None", "report 2 None"]);
    let expected = Slot {
        backend: NEW,
        server: "r".into(),
        model: "m".into(),
        cluster_id: "c".into(),
        routing_keys: vec!["fn".into()],
        advertised: true,
        active: true,
        input_tps: 0.0,
        max_concurrency: 0,
    };
    assert_eq!(*slot(&state, 1), expected);
    assert_eq!(*slot(&state, 2), Slot { model: "n".into(), active: false, ..expected });
    let catalog = state.catalog();
    assert!(catalog.route(Some(b"m"), b"").is_none() && catalog.route(Some(b"a"), b"").is_some());
    assert!(!String::from_utf8_lossy(&catalog.models_body).contains("\"m\""));
    assert!(catalog.learning, "the configured one has not been checked");
    state.handle_check(ONE, ms(12), ms(12), Ok(0));
    assert!(state.settled(), "a registration is not waited for");
}

#[test]
fn a_renewal_is_a_full_snapshot_and_no_new_catalog_where_nothing_but_figures_changed() {
    let (mut state, port) = state(&[], false);
    let opened = state.register(ms(0), "r", snapshot("http://10.0.0.9:80", "", M)).unwrap();
    state.publish(ms(1));
    let from = count(&port);
    let again = state.register(ms(5), "r", renewal(&opened, "http://10.0.0.9:80", M)).unwrap();
    assert_eq!((again.watch, &again.lease, again.expires), (None, &opened.lease, ms(60_005)));
    assert!(!state.changed());
    assert_eq!(told(&port, from), ["report 0 Some(3)"]);
    // Another model comes, then the first goes.
    let from = count(&port);
    state.register(ms(6), "r", renewal(&opened, "http://10.0.0.9:80", TWO)).unwrap();
    assert_eq!(told(&port, from), ["report 0 None"], "the new slot's report waits for its catalog");
    state.publish(ms(7));
    assert_eq!(told(&port, from), ["report 0 None", "catalog", "report 1 None"]);
    let other = r#""n":{"status":"active","stats":{}}"#;
    state.register(ms(8), "r", renewal(&opened, "http://10.0.0.9:80", other)).unwrap();
    state.publish(ms(9));
    assert!(!slot(&state, 0).advertised && slot(&state, 1).active);
    // It forgot its report when it left: the one that brings it back follows the catalog.
    let from = count(&port);
    state.register(ms(10), "r", renewal(&opened, "http://10.0.0.9:80", M)).unwrap();
    assert!(told(&port, from).is_empty());
    state.publish(ms(11));
    assert_eq!(told(&port, from), ["catalog", "report 0 Some(3)"]);
    assert_eq!(state.catalog().stargate.slots.len(), 2, "a slot is taken up again");
}

#[test]
fn what_closes_a_registration_takes_it_out_at_once() {
    let (mut state, port) = state(&[], false);
    let opened = state.register(ms(0), "r", snapshot("http://10.0.0.9:80", "", M)).unwrap();
    state.publish(ms(1));
    state.handle_check(NEW, ms(2), ms(2), Ok(0));
    let from = count(&port);
    let moved = state.register(ms(3), "r", renewal(&opened, "http://10.0.0.8:80", M));
    assert_eq!(moved, Err(Refused::Moved { field: "url", was: "http://10.0.0.9:80".into() }));
    assert_eq!(told(&port, from), ["health 1 false"]);
    assert!(state.catalog().server(NEW).removed && state.life(NEW) == 1 && state.changed());
    state.publish(ms(4));
    assert!(!slot(&state, 0).advertised);
    assert_eq!(state.deregister(ms(4), "r", None), Err(Refused::Unknown));
    // The same server comes back as it was, another one as itself.
    let back = state.register(ms(5), "r", snapshot("http://10.0.0.9:80", "", M)).unwrap();
    assert_eq!((back.backend, back.watch), (NEW, Some(2)));
    assert!(state.unchecked(NEW), "it has to be found up anew");
    assert_eq!(state.deregister(ms(6), "r", Some("wrong")), Err(Refused::Held));
    assert_eq!(state.deregister(ms(6), "r", Some(&back.lease)), Ok(()));
    let elsewhere = state.register(ms(7), "r", snapshot("http://10.0.0.8:80", "", M)).unwrap();
    assert_eq!(elsewhere.backend, BackendId(2));
    state.publish(ms(8));
    assert!(!slot(&state, 0).advertised && slot(&state, 1).active);
}

#[test]
fn a_registration_that_is_not_renewed_runs_out() {
    let (mut state, port) = state(&[], false);
    let extra = ",\"ttl_ms\":1000";
    state.register(ms(0), "r", snapshot("http://10.0.0.9:80", extra, M)).unwrap();
    state.publish(ms(1));
    assert_eq!(state.deadline(), ms(1000));
    state.handle_timeout(ms(999));
    assert!(!state.changed());
    let from = count(&port);
    state.handle_timeout(ms(1000));
    assert_eq!(told(&port, from), ["health 1 false"]);
    assert!(state.changed() && state.registrations().next().is_none());
    assert_eq!(state.deadline(), Nanos::NEVER);
}

#[test]
fn ids_are_unique_among_servers_and_room_is_bounded() {
    let (mut state, _) = state(&["a"], false);
    assert_eq!(state.register(ms(0), "one", snapshot("http://h", "", M)), Err(Refused::Configured));
    state.register(ms(0), "r", snapshot("http://h", "", M)).unwrap();
    assert_eq!(state.register(ms(0), "r", snapshot("http://h", "", M)), Err(Refused::Held));
    let taken = (0..SLOTS_MAX as u32).map(|n| ((BackendId(9), format!("m{n}").into()), SlotId(n)));
    state.targets.slots.extend(taken);
    assert_eq!(
        state.register(ms(0), "s", snapshot("http://h", "", M)),
        Err(Refused::Full("pairs of a server and a model"))
    );
    assert!(state.find("s").is_none(), "nothing of it stays");
}

#[test]
fn one_failed_check_takes_a_registered_server_out_and_its_round_trips_are_told() {
    let (mut state, port) = state(&["a"], false);
    state.register(ms(0), "r", snapshot("http://10.0.0.9:80", "", M)).unwrap();
    state.publish(ms(1));
    assert_eq!(state.check_due(NEW), ms(0), "it is checked at once");
    let from = count(&port);
    state.handle_check(NEW, ms(2), ms(3), Ok(0));
    state.handle_round_trip(NEW, 1_000_000);
    assert!(state.check_due(NEW) <= ms(1002), "every second");
    state.handle_round_trip(NEW, 1_040_000);
    state.handle_round_trip(NEW, 1_070_000);
    state.handle_check(NEW, ms(1000), ms(1000), Err(CheckFailure::Status(500)));
    assert_eq!(told(&port, from), ["health 1 true", "rtt 1 1000000", "rtt 1 1070000", "health 1 false"]);
    // A configured one stands by its own rules, and is looked at as often.
    state.handle_check(ONE, ms(2000), ms(2000), Ok(0));
    state.handle_check(ONE, ms(2500), ms(2500), Err(CheckFailure::Status(500)));
    assert!(state.check_due(ONE) <= ms(3500));
    assert!(!told(&port, from).contains(&"health 0 false".to_owned()), "two failures, as configured");
}

#[test]
fn engines_are_asked_how_busy_they_are_unless_they_report_it() {
    let (mut state, port) = state(&["a", "b"], false);
    state.register(ms(0), "r", snapshot("http://10.0.0.9:80", "", M)).unwrap();
    state.register(ms(0), "s", snapshot("http://10.0.0.8:80", "", TWO)).unwrap();
    state.publish(ms(1));
    assert_eq!(state.take_load(ONE, ms(1)), None, "a server that is down is not asked");
    for id in [ONE, NEW, BackendId(2)] {
        state.handle_check(id, ms(1), ms(1), Ok(0));
    }
    assert_eq!(state.take_load(NEW, ms(2)), None, "it reports that itself");
    assert!(state.take_load(BackendId(2), ms(2)).is_some());
    let task = state.take_load(ONE, ms(2)).unwrap();
    assert_eq!((task.limits, state.take_load(ONE, ms(2))), (None, None), "one at a time");
    let from = count(&port);
    let load = |running| Load { engine: EngineMetrics::Vllm, running: Some(running), ..Load::default() };
    state.handle_load(ONE, task.round, ms(2), Some((load(0), Some(Limits::default()))));
    assert_eq!(told(&port, from), ["scrape 0 Some(0)", "scrape 1 Some(0)"]);
    assert_eq!(state.take_load(ONE, ms(501)), None);
    let task = state.take_load(ONE, ms(502)).unwrap();
    assert_eq!(task.limits, Some(Limits::default()), "limits are asked for once");
    state.handle_load(ONE, task.round, ms(502), Some((load(0), task.limits)));
    assert_eq!(told(&port, from).len(), 2, "idle as before");
    let task = state.take_load(ONE, ms(1100)).unwrap();
    state.handle_load(ONE, task.round, ms(1100), Some((load(4), task.limits)));
    let task = state.take_load(ONE, ms(1700)).unwrap();
    state.handle_load(ONE, task.round, ms(1700), Some((load(4), task.limits)));
    assert_eq!(
        told(&port, from)[2..],
        ["scrape 0 Some(4)", "scrape 1 Some(4)"].repeat(2),
        "when it was asked counts"
    );
    let task = state.take_load(ONE, ms(2300)).unwrap();
    state.handle_load(ONE, task.round, ms(2300), Some((Load::default(), None)));
    assert_eq!(state.take_load(ONE, ms(60_000)), None, "it publishes nothing that is known");
}

#[test]
fn where_every_listener_is_trusted_readiness_is_that_of_targets() {
    for (only, ready) in [(true, true), (false, false)] {
        let (mut state, _) = state(&[], only);
        state.register(ms(0), "r", snapshot("http://10.0.0.9:80", "", M)).unwrap();
        state.publish(ms(1));
        assert!(!state.ready());
        state.handle_check(NEW, ms(2), ms(2), Ok(0));
        state.publish(ms(3));
        assert_eq!(state.ready(), ready);
        state.deregister(ms(4), "r", None).unwrap();
        state.publish(ms(5));
        assert!(!state.ready());
    }
}

#[test]
fn figures_show_a_registered_server_under_its_own_name() {
    let (mut state, _) = state(&["a"], false);
    state.register(ms(0), "r", snapshot("http://10.0.0.9:80", "", M)).unwrap();
    state.publish(ms(1));
    state.handle_notice(
        ms(2),
        ShardId(0),
        crate::proto::message::Notice::Started { io_uring: true, downgrade: None },
    );
    let figures = state.figures(ms(2));
    let row = figures.servers.iter().find(|row| &*row.name == "r").unwrap();
    assert!(row.registered && row.pool_index.is_none() && &*row.pool == "r");
}

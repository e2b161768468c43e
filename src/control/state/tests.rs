use super::*;
use crate::control::figures::tests::server;
use crate::control::models::parse_listing;
use crate::control::scrape::{EVERY_MS, Facts, Life};
use crate::control::tests::PlayedPort;
use crate::proto::account::drift::Cause;
use crate::proto::config::ServerChange;

const A: BackendId = BackendId(0);
const RULES: Rules = Rules { interval_ms: 100, fall: 1, rise: 1 };

fn ms(ms: u64) -> Nanos {
    Nanos::from_ms(ms)
}

/// One server that says what it serves itself, reached by name or by address.
fn state(name: Option<&str>) -> (State<PlayedPort>, PlayedPort) {
    let mut one = server("one", None, 1.0);
    one.models = None;
    if name.is_some() {
        one.address = None;
    }
    let catalog = Catalog { servers: vec![one], ..Catalog::default() };
    let names = vec![name.map(|name| (name.into(), 80))];
    let port = PlayedPort::new(1);
    (State::new(port.clone(), RULES, catalog, names, Shutdown::new(1, 10, 10), ms(0)), port)
}

fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn refused() -> Result<usize, CheckFailure> {
    Err(CheckFailure::Status(503))
}

fn listing(ids: &[&str]) -> Option<Vec<Listed>> {
    let data: Vec<_> = ids.iter().map(|id| serde_json::json!({"id": id})).collect();
    Some(parse_listing(serde_json::json!({"data": data}).to_string().as_bytes()).unwrap())
}

#[test]
fn a_name_is_asked_for_once_at_a_time_and_again_when_it_is_due() {
    let (mut state, _) = state(Some("gpu"));
    assert_eq!(state.take_question(A, ms(0)), Some(("gpu".into(), 80)));
    assert_eq!(state.take_question(A, ms(60_000)), None, "the first question is still under way");
    state.handle_resolved(A, ms(100), Err(std::io::ErrorKind::NotFound.into()));
    assert_eq!(state.take_question(A, ms(1099)), None);
    assert!(state.take_question(A, ms(1100)).is_some());
    state.handle_resolved(A, ms(1100), Ok(addresses(&["10.0.0.1:80"])));
    assert_eq!(state.take_question(A, ms(31_099)), None);
    state.handle_check(A, ms(2000), ms(2000), refused());
    assert!(state.take_question(A, ms(3000)).is_some(), "a failed check asks earlier");
    let (mut fixed, _) = self::state(None);
    assert_eq!(fixed.take_question(A, ms(0)), None);
}

#[test]
fn the_address_that_answers_is_kept_while_the_name_has_it() {
    let (mut state, _) = state(Some("gpu"));
    state.take_question(A, ms(0));
    state.handle_resolved(A, ms(0), Ok(addresses(&["[::1]:80", "10.0.0.1:80", "10.0.0.2:80"])));
    assert_eq!(
        state.catalog().server(A).address,
        None,
        "nothing is sent to an address that has not answered"
    );
    state.handle_check(A, ms(1), ms(1), Ok(1));
    let tcp = |text: &str| Address::Tcp(text.parse().unwrap());
    assert_eq!(state.catalog().server(A).address, Some(tcp("10.0.0.1:80")));
    assert_eq!(state.addresses(A), [tcp("10.0.0.1:80"), tcp("[::1]:80"), tcp("10.0.0.2:80")]);
    state.handle_resolved(A, ms(2), Ok(addresses(&["10.0.0.2:80", "10.0.0.1:80"])));
    assert_eq!(
        state.addresses(A),
        [tcp("10.0.0.1:80"), tcp("10.0.0.2:80")],
        "in another order it stays first"
    );
    state.handle_resolved(A, ms(3), Ok(addresses(&["10.0.0.3:80"])));
    state.handle_check(A, ms(4), ms(4), Ok(0));
    assert_eq!(state.catalog().server(A).address, Some(tcp("10.0.0.3:80")));
}

#[test]
fn a_list_read_from_an_earlier_life_of_the_engine_counts_for_nothing() {
    let (mut state, _) = state(None);
    let first = state.handle_check(A, ms(0), ms(0), Ok(0)).expect("up for the first time");
    assert_eq!(state.handle_check(A, ms(100), ms(100), Ok(0)), None, "it is being read");
    assert!(state.goes_on_learning(A, first));
    state.handle_check(A, ms(200), ms(200), refused());
    assert!(!state.goes_on_learning(A, first));
    let second = state.handle_check(A, ms(300), ms(300), Ok(0)).expect("up again");
    state.handle_listing(A, first, ms(301), listing(&["old"]));
    assert_eq!(state.catalog().server(A).models, None);
    assert!(!state.goes_on_learning(A, first));
    state.handle_listing(A, second, ms(302), listing(&["new"]));
    assert_eq!(state.catalog().server(A).models.as_deref(), Some(&["new".into()][..]));
    assert_eq!(state.handle_check(A, ms(400), ms(400), Ok(0)), None);
    let due = ms(302 + LEARN_EVERY_MS);
    assert_eq!(state.handle_check(A, due, due, Ok(0)), Some(second), "it is read again in time");
}

#[test]
fn only_a_change_is_published() {
    let (mut state, port) = state(None);
    let sent = || port.told(0, |told| told.iter().filter(|u| matches!(u, Update::Catalog(_))).count());
    assert!(state.changed());
    state.publish(ms(0));
    assert_eq!((state.changed(), sent()), (false, 1));
    let generation = state.handle_check(A, ms(1), ms(1), Ok(0)).unwrap();
    assert!(state.changed());
    state.publish(ms(1));
    assert_eq!(sent(), 1, "up, but it lists nothing yet");
    state.handle_listing(A, generation, ms(2), listing(&["m"]));
    state.publish(ms(2));
    assert_eq!(sent(), 2);
    state.handle_check(A, ms(3), ms(3), Ok(0));
    state.handle_listing(A, generation, ms(3), listing(&["m"]));
    assert!(!state.changed(), "the same again is no change");
    state.handle_check(A, ms(4), ms(4), refused());
    state.publish(ms(4));
    assert_eq!(sent(), 3, "its models are gone from the list");
    assert!(!state.ready());
}

/// A kv-aware pool with one server that lists its own models.
fn kv_state(kind: EngineMetrics) -> (State<PlayedPort>, PlayedPort) {
    let mut pool = crate::control::figures::tests::pool("p");
    pool.algorithm = crate::proto::backend::catalog::Algorithm::KvAware;
    pool.kv.kv_capacity_blocks = 500;
    let mut one = server("one", Some(0), 1.0);
    one.kv_capacity_blocks = 500;
    let catalog = Catalog { servers: vec![one], pools: vec![pool], ..Catalog::default() };
    let port = PlayedPort::new(1);
    let shutdown = Shutdown::new(1, 10, 10);
    let mut state = State::new(port.clone(), RULES, catalog, vec![None], shutdown, ms(0));
    state.set_engine_metrics(&[kind]);
    (state, port)
}

fn forgotten(port: &PlayedPort) -> usize {
    port.told(0, |told| told.iter().filter(|update| matches!(update, Update::Forget { .. })).count())
}

fn facts(cache_tokens: Option<u64>, started_s: Option<f64>, prompt_tokens: Option<f64>) -> Option<Facts> {
    let life = Life { started_s, prompt_tokens };
    Some(Facts { engine: EngineMetrics::Vllm, cache_tokens, life })
}

#[test]
fn the_engine_s_word_on_its_cache_beats_the_configuration() {
    let (mut state, _) = kv_state(EngineMetrics::Auto);
    assert_eq!(state.take_scrape(A, ms(0)), None, "a server that is down is not asked");
    state.handle_check(A, ms(0), ms(0), Ok(0));
    assert_eq!(state.capacity_source(A), Some(CapacitySource::Configured));
    let (kind, round) = state.take_scrape(A, ms(1)).expect("it is due");
    assert_eq!((kind, state.take_scrape(A, ms(1))), (EngineMetrics::Auto, None), "one at a time");
    state.publish(ms(1));
    state.handle_scrape(A, round, ms(2), None);
    assert_eq!((state.changed(), state.catalog().server(A).kv_capacity_blocks), (false, 500));
    assert_eq!(state.take_scrape(A, ms(3)), None, "not due yet");
    let (_, round) = state.take_scrape(A, ms(2 + EVERY_MS)).expect("it is due again");
    state.handle_scrape(A, round, ms(20_000), facts(Some(6_400), None, None));
    assert_eq!((state.changed(), state.catalog().server(A).kv_capacity_blocks), (true, 100));
    assert_eq!(state.capacity_source(A), Some(CapacitySource::Engine));
    state.handle_scrape(A, round + 1, ms(20_000), facts(Some(1), None, None));
    assert_eq!(state.catalog().server(A).kv_capacity_blocks, 100, "a scrape of another life");
    let (mut untouched, _) = kv_state(EngineMetrics::None);
    untouched.handle_check(A, ms(0), ms(0), Ok(0));
    assert_eq!(untouched.take_scrape(A, ms(1)), None, "it is not to be asked");
    let (other, _) = self::state(None);
    assert_eq!(other.capacity_source(A), None, "not kv-aware");
}

/// Lifeboat rules: "A server that restarts, is replaced, or whose address changes starts with an empty memory."
#[test]
fn an_engine_that_lost_its_cache_is_forgotten_once() {
    let (mut state, port) = kv_state(EngineMetrics::Auto);
    let down_and_up = |state: &mut State<PlayedPort>, at: u64| {
        state.handle_check(A, ms(at), ms(at), refused());
        state.handle_check(A, ms(at + 1), ms(at + 1), Ok(0));
    };
    let scrape = |state: &mut State<PlayedPort>, at: u64, facts: Option<Facts>| {
        let (_, round) = state.take_scrape(A, ms(at)).expect("it is due");
        state.handle_scrape(A, round, ms(at), facts);
    };
    state.handle_check(A, ms(0), ms(0), Ok(0));
    assert_eq!(forgotten(&port), 0, "there is nothing yet");
    // Nothing tells whether it is the same: it is taken for another.
    down_and_up(&mut state, 10);
    assert_eq!(forgotten(&port), 1);
    // What it publishes can tell: the same process.
    scrape(&mut state, 20, facts(None, Some(100.0), Some(5.0)));
    down_and_up(&mut state, 30);
    scrape(&mut state, 40, facts(None, Some(100.0), Some(9.0)));
    assert_eq!(forgotten(&port), 1, "it was only slow to answer its checks");
    // Another process.
    down_and_up(&mut state, 50);
    assert_eq!(forgotten(&port), 1, "not yet known");
    scrape(&mut state, 60, facts(None, Some(200.0), Some(0.0)));
    assert_eq!(forgotten(&port), 2);
    // It cannot be read after it came back.
    down_and_up(&mut state, 70);
    scrape(&mut state, 80, None);
    assert_eq!(forgotten(&port), 3);
    // A restart between two checks shows in the next scrape.
    scrape(&mut state, 80 + EVERY_MS, facts(None, None, Some(50.0)));
    scrape(&mut state, 80 + 2 * EVERY_MS, facts(None, None, Some(3.0)));
    assert_eq!(forgotten(&port), 4);
    scrape(&mut state, 80 + 3 * EVERY_MS, facts(None, None, Some(4.0)));
    assert_eq!(forgotten(&port), 4);
}

#[test]
fn a_server_that_moves_is_forgotten_after_its_new_address_is_known() {
    let (mut state, port) = state(Some("gpu"));
    for (at, address) in [(0, "10.0.0.1:80"), (100, "10.0.0.2:80")] {
        state.handle_resolved(A, ms(at), Ok(addresses(&[address])));
        state.handle_check(A, ms(at), ms(at), Ok(0));
        state.publish(ms(at));
    }
    assert_eq!(forgotten(&port), 1, "the first address is no move");
    port.told(0, |told| {
        let last = told.iter().rposition(|update| matches!(update, Update::Catalog(_))).unwrap();
        assert!(matches!(told[last + 1..], [Update::Forget { backend: A }, ..]), "{told:?}");
    });
}

#[test]
fn a_change_reaches_the_shards_and_keeps_the_weight_that_keys_are_spread_by() {
    let (mut state, port) = kv_state(EngineMetrics::None);
    state.publish(ms(0));
    assert_eq!((state.find("one"), state.find("two"), state.names()), (Some(A), None, vec!["one"]));
    let change = ServerChange {
        weight: Some(2.5),
        max_input_tokens: Some(9),
        routing_tier: Some("gold".into()),
        ..ServerChange::default()
    };
    state.change_server(A, &change).unwrap();
    state.change_server(A, &ServerChange { weight: Some(0.0), ..ServerChange::default() }).unwrap();
    state.publish(ms(1));
    port.told(0, |told| {
        let Some(Update::Catalog(catalog)) = told.iter().rfind(|update| matches!(update, Update::Catalog(_)))
        else {
            panic!("no catalog")
        };
        let server = catalog.server(A);
        assert_eq!((server.weight, &*server.weight_text, server.affinity_weight), (0.0, "0", 2.5));
        assert_eq!((server.max_input_tokens, &*server.tier, server.max_concurrency), (9, "gold", 32));
        assert!(catalog.route(None, b"gold").is_some() && catalog.route(None, b"").is_none());
    });
    state.change_server(A, &ServerChange { weight: Some(0.0), ..ServerChange::default() }).unwrap();
    assert!(!state.changed(), "nothing new");
}

#[test]
fn live_changes_make_no_more_classes_of_input_than_the_file_may() {
    let servers = (0..=64u16).map(|n| {
        let mut one = server(&format!("s{n}"), None, 1.0);
        one.max_input_tokens = n.into();
        one
    });
    let catalog = Catalog { servers: servers.collect(), ..Catalog::default() };
    let names = vec![None; 65];
    let mut state = State::new(PlayedPort::new(1), RULES, catalog, names, Shutdown::new(1, 10, 10), ms(0));
    let change = |tokens| ServerChange { max_input_tokens: Some(tokens), ..ServerChange::default() };
    let faults = state.change_server(A, &change(1000)).unwrap_err();
    assert_eq!(
        faults.to_string(),
        "max_input_tokens: 1000: expected at most 64 distinct values over all servers"
    );
    state.change_server(A, &change(64)).unwrap();
    state.change_server(BackendId(1), &change(1000)).unwrap();
}

/// Lifeboat rules, section 7: samples of the shards' reports become shares, a drift and its cause.
#[test]
fn reports_become_drift_with_its_cause() {
    use crate::proto::report::ServerFigures;
    let servers = vec![server("a", Some(0), 1.0), server("b", Some(0), 1.0)];
    let pools = vec![crate::control::figures::tests::pool("p")];
    let catalog = Catalog { servers, pools, ..Catalog::default() };
    let mut state =
        State::new(PlayedPort::new(1), RULES, catalog, vec![None; 2], Shutdown::new(1, 10, 10), ms(0));
    let b = BackendId(1);
    for id in [A, b] {
        state.handle_check(id, ms(0), ms(0), Ok(0));
    }
    let report =
        |state: &mut State<PlayedPort>, at: u64, dispatched: [u64; 2], in_flight: u32, faults: u64| {
            let number = state.ask_reports();
            let mut report = ShardReport::new(ShardId(0));
            report.number = number;
            let figures = |dispatched| ServerFigures { dispatched, ..ServerFigures::default() };
            report.servers = dispatched.map(figures).to_vec();
            report.servers[1].in_flight = in_flight;
            report.servers[1].faults[0] = faults;
            state.handle_notice(ms(at), ShardId(0), Notice::Report(Box::new(report)));
            let drifts = state.figures(ms(at)).servers.iter().map(|row| row.drift).collect::<Vec<_>>();
            (drifts[1].share, drifts[1].cause, drifts[0].cause, drifts[1].badge)
        };
    assert_eq!(report(&mut state, 0, [0, 0], 0, 0), (None, None, None, false));
    let full = Some(Cause::AtCapacity);
    assert_eq!(report(&mut state, 1_000, [150, 50], 32, 0), (Some(0.25), full, full, true));
    report(&mut state, 2_000, [150, 50], 0, 1);
    let erring = Some(Cause::Erroring);
    assert_eq!(report(&mut state, 3_000, [150, 50], 0, 2), (Some(0.25), erring, erring, true));
    assert_eq!(report(&mut state, 62_500, [150, 50], 0, 2), (None, None, None, false), "it is over");
}

use super::*;
use crate::control::figures::tests::server;
use crate::control::models::parse_listing;
use crate::control::tests::PlayedPort;

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

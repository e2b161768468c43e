//! The nine-prompt experiment as a newcomer runs it, `ringway demo --experiment kv-reuse`.

mod support;

use ringway::engine::{EngineOptions, spawn};

use support::router::{Ended, run_to_exit};
use support::*;

fn experiment(more: &[&str]) -> Ended {
    let args = [&["demo", "--experiment", "kv-reuse"], more].concat();
    run_to_exit(&args, seconds(100))
}

/// A row of the table: the requests of each engine, and the reuse in percent.
#[track_caller]
fn row(said: &Ended, name: &str) -> (Vec<u32>, f64) {
    let line = said
        .stdout
        .lines()
        .find(|line| line.trim_start().strip_prefix(name).is_some_and(|rest| rest.starts_with("   ")))
        .unwrap_or_else(|| panic!("no row {name:?} in\n{}\n{}", said.stdout, said.stderr));
    let figures = line.trim_start()[name.len()..].trim_end_matches(" %");
    let (split, reuse) = figures.trim().rsplit_once(' ').expect("two columns");
    let split = split.split('/').map(|count| count.trim().parse().expect("a count")).collect();
    (split, reuse.parse().expect("a share"))
}

/// "Measured on an RTX PRO 6000 Blackwell, two backends, nine distinct prompts against a cache that can hold about five:
/// Weighted round-robin 23 / 22, 3.4%; KV-aware 25 / 20, 48.3%." Ours, in turn and shuffled: at least 78 % of at most 80, and
/// the split no worse.
#[test]
fn nine_prompts_over_two_backends_that_cache_about_five() {
    let said = experiment(&[]);
    for order in ["in turn", "shuffled"] {
        let (split, reuse) = row(&said, &format!("kv-aware, {order}"));
        assert!((78.0..=80.0).contains(&reuse), "{}", said.stdout);
        assert!(split.iter().all(|count| (20..=25).contains(count)), "{}", said.stdout);
        let (split, default_reuse) = row(&said, &format!("weighted-round-robin, {order}"));
        assert!(split.iter().all(|count| (21..=24).contains(count)), "{}", said.stdout);
        assert!(default_reuse < reuse, "{}", said.stdout);
    }
    // In turn the default finds nothing: what comes next has always just been evicted.
    assert!(row(&said, "weighted-round-robin, in turn").1 < 5.0, "{}", said.stdout);
    assert_eq!(row(&said, "published: KV-aware"), (vec![25, 20], 48.3));
    assert_eq!(row(&said, "published: weighted round-robin"), (vec![23, 22], 3.4));
    assert!(said.stdout.contains("reached"), "{}", said.stdout);
    assert_eq!(said.code, Some(0), "{}\n{}", said.stdout, said.stderr);
    assert!(said.stderr.contains("row 1 of 6"), "{}", said.stderr);
}

/// Engines of one's own: each row uses prompts that they have not seen, and missing the figures is exit code 1. These have
/// room for everything, so that blind spreading finds half of what there is, and an engine's own memory shows.
#[test]
fn engines_of_ones_own_take_the_place_of_the_simulated_ones() {
    let engines: Vec<_> = (0..2).map(|_| spawn(EngineOptions::default()).expect("an engine")).collect();
    let urls: Vec<String> = engines.iter().map(|engine| engine.url()).collect();
    let said = experiment(&["--quiet", "--backend", &urls[0], "--backend", &urls[1]]);
    assert_eq!(said.stderr, "");
    let requests: u64 = engines.iter().map(|engine| engine.stats().completed).sum();
    assert!(requests >= 6 * 45, "all rows were sent to them: {requests}");
    assert!(said.stdout.contains("engines of your own"), "{}", said.stdout);
    // Nine prompts on two engines, five rounds: with two first requests each, at most 27 of 45 can be found.
    let (_, reuse) = row(&said, "weighted-round-robin, in turn");
    assert!((55.0..=60.0).contains(&reuse), "nothing of an earlier row is found: {}", said.stdout);
    let judged = ["in turn", "shuffled"].map(|order| row(&said, &format!("kv-aware, {order}")));
    let reached =
        judged.iter().all(|(split, reuse)| *reuse >= 78.0 && split.iter().all(|count| *count <= 25));
    assert_eq!(said.code, Some(if reached { 0 } else { 1 }), "{}", said.stdout);
    assert!(said.stdout.contains(if reached { "reached" } else { "MISSED" }), "{}", said.stdout);
}

/// An engine that says nothing of its cache cannot be judged, and the experiment says what to do.
#[test]
fn an_engine_that_reports_no_cached_tokens_is_told_in_words() {
    let silent = || {
        Engine::start(|exchange| {
            let body = br#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":null}}"#;
            exchange.reply(200, &[("Content-Type", "application/json")], body)
        })
    };
    let (a, b) = (silent(), silent());
    let said = experiment(&["--quiet", "--backend", &a.url(), "--backend", &b.url()]);
    assert_eq!(said.code, Some(2), "{}", said.stderr);
    for part in ["does not report cached prompt tokens", "--enable-prompt-tokens-details"] {
        assert!(said.stderr.contains(part), "{}", said.stderr);
    }
}

#[test]
fn engines_that_cannot_be_reached_or_share_no_model_are_told_in_words() {
    let other = EngineSetup::new().models(Probe::models(&["other"])).start(|exchange| exchange.reply_ok());
    let some = Engine::answering();
    let said = experiment(&["--quiet", "--backend", &some.url(), "--backend", &other.url()]);
    assert_eq!(said.code, Some(2));
    assert!(said.stderr.contains("no model in common"), "{}", said.stderr);
    for (args, part) in [
        (&["--backend", "http://127.0.0.1:1"][..], "at least two"),
        (&["--backend", "ftp://x", "--backend", "ftp://y"], "ftp://x"),
    ] {
        let said = experiment(args);
        assert!(said.code == Some(1) || said.code == Some(2), "{said:?}");
        assert!(said.stderr.contains(part), "{}", said.stderr);
    }
}

//! `ringway demo` as a newcomer runs it: what it says, how it ends, and that nothing stays behind.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn demo(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringway"));
    command.arg("demo").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Ids of processes whose parent is `parent`.
fn children(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("proc").flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{id}/stat")) else { continue };
        // The name, in parentheses, may hold anything; the parent's id is the second field behind it.
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        if fields.split_whitespace().nth(1).and_then(|field| field.parse().ok()) == Some(parent) {
            found.push(id);
        }
    }
    found
}

fn is_running(id: u32) -> bool {
    // A process that has ended and was not waited for is a zombie: gone as far as this matters.
    std::fs::read_to_string(format!("/proc/{id}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(')').map_or("", |(_, rest)| rest).trim_start().starts_with('Z'))
}

#[expect(clippy::disallowed_methods, reason = "a test waits for other processes, with a limit by the clock")]
fn eventually(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let since = Instant::now();
    while !condition() {
        assert!(since.elapsed() < limit, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts a long demo and waits until its load runs. Answers the demo, its router's id, and the rest of its stderr.
fn started() -> (Child, u32, BufReader<ChildStderr>) {
    let mut child = demo(&["--requests", "100000"]).spawn().expect("started");
    let mut progress = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("sending") {
        line.clear();
        assert!(progress.read_line(&mut line).expect("text") > 0, "the demo ended before its load");
    }
    let router = children(child.id());
    assert_eq!(router.len(), 1, "the engines are threads, the router is a process");
    (child, router[0], progress)
}

fn rest(mut progress: BufReader<ChildStderr>) -> String {
    let mut text = String::new();
    progress.read_to_string(&mut text).expect("text");
    text
}

fn signal(id: u32, signal: i32) {
    // SAFETY: a plain system call on a child that this test started and has not waited for.
    unsafe { libc::kill(id as i32, signal) };
}

#[test]
fn the_tour_ends_with_a_table_and_nothing_stays_behind() {
    let Output { status, stdout, stderr } = demo(&["--requests", "60"]).output().expect("ran");
    let (said, progress) = (text(&stdout), text(&stderr));
    assert_eq!(status.code(), Some(0), "{said}\n{progress}");
    let cells = |start: &str| -> Vec<String> {
        let line = said
            .lines()
            .find(|line| line.trim_start().starts_with(start))
            .unwrap_or_else(|| panic!("{said}"));
        line.split_whitespace().map(str::to_owned).collect()
    };
    let count = |name: &str| cells(name)[1].parse::<u32>().expect("a count");
    assert_eq!(count("engine-1") + count("engine-2"), 60, "{said}");
    assert!(count("engine-1") >= 25 && count("engine-2") >= 25, "equal weights share evenly: {said}");
    assert_eq!(cells("together").last().map(String::as_str), Some("0"), "no errors: {said}");
    assert_eq!(cells("together")[4], "30", "half of the mix is streamed: {said}");
    assert!(count("waited") > 0, "twelve clients, eight places: {said}");
    for part in ["added by the router", "ringway serve --backend", "http://127.0.0.1:30000/v1"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(
        !progress.contains('\r') && !progress.contains('\x1b'),
        "no cursor tricks off a terminal: {progress:?}"
    );
    assert!(progress.contains("sending 60 requests"), "{progress}");
}

#[test]
fn quiet_says_nothing_but_the_table() {
    let output = demo(&["--requests", "10", "--quiet"]).output().expect("ran");
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""));
    assert!(text(&output.stdout).contains("Who got what"));
}

#[test]
fn settings_of_another_router_in_the_environment_do_not_matter() {
    let output = demo(&["--requests", "10"])
        .env("RINGWAY_BACKEND", "http://127.0.0.1:1")
        .env("RINGWAY_HEADER_PREFIX", "X-Other-")
        .output()
        .expect("ran");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn an_interrupt_ends_the_router_too() {
    for stop in [libc::SIGINT, libc::SIGTERM] {
        let (mut child, router, progress) = started();
        signal(child.id(), stop);
        let said = rest(progress);
        assert_eq!(child.wait().expect("ended").code(), Some(3), "{said}");
        assert!(said.contains("interrupted"), "{said}");
        assert!(!is_running(router), "the router has ended before the demo does");
    }
}

#[test]
fn a_killed_demo_takes_the_router_with_it() {
    let (mut child, router, _) = started();
    child.kill().expect("killed");
    child.wait().expect("ended");
    eventually("the router ends", Duration::from_secs(5), || !is_running(router));
}

#[test]
fn a_router_that_dies_is_told_in_words() {
    let (mut child, router, progress) = started();
    signal(router, libc::SIGKILL);
    let said = rest(progress);
    assert_eq!(child.wait().expect("ended").code(), Some(2), "{said}");
    assert!(said.contains("router: it ended while it was needed (signal: 9"), "{said}");
}

#[test]
fn an_unknown_experiment_is_refused_and_the_known_ones_are_named() {
    let output = demo(&["--experiment", "nine"]).output().expect("ran");
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("--experiment nine: expected one of: kv-reuse"), "{said}");
}

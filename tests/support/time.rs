//! Waiting, always with a limit.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

#[expect(clippy::disallowed_methods, reason = "tests measure the router from outside, with the real clock")]
pub fn now() -> Instant {
    Instant::now()
}

#[expect(clippy::disallowed_methods, reason = "a test thread may block")]
pub fn pause(span: Duration) {
    std::thread::sleep(span);
}

pub fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Asks again until `probe` says `Ok`, and panics with its last complaint after `limit`.
#[track_caller]
pub fn eventually<T>(limit: Duration, what: &str, mut probe: impl FnMut() -> Result<T, String>) -> T {
    let start = now();
    loop {
        match probe() {
            Ok(value) => return value,
            Err(complaint) if start.elapsed() > limit => {
                panic!("not within {limit:?}: {what}; last seen: {complaint}")
            }
            Err(_) => pause(ms(4)),
        }
    }
}

/// For figures that a busy machine can only make worse: passes when one of `count` attempts does, fails with all their
/// complaints otherwise. Never used for counts or contents, which must hold every time.
#[track_caller]
pub fn attempts(count: usize, mut attempt: impl FnMut() -> Result<(), String>) {
    let mut complaints = Vec::new();
    for _ in 0..count {
        match attempt() {
            Ok(()) => return,
            Err(complaint) => complaints.push(complaint),
        }
    }
    panic!("none of {count} attempts was in time:\n{}", complaints.join("\n"));
}

/// Holds threads until the test lets them go.
#[derive(Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    open: bool,
    tickets: usize,
    waiting: usize,
}

impl Gate {
    pub fn new() -> std::sync::Arc<Gate> {
        std::sync::Arc::default()
    }
    /// Lets everyone through from now on.
    pub fn open(&self) {
        self.state.lock().expect("no holder panics").open = true;
        self.changed.notify_all();
    }
    /// Lets `count` more through.
    pub fn release(&self, count: usize) {
        self.state.lock().expect("no holder panics").tickets += count;
        self.changed.notify_all();
    }
    /// Threads held now.
    pub fn waiting(&self) -> usize {
        self.state.lock().expect("no holder panics").waiting
    }
    /// Waits to be let through; false after `limit`.
    pub fn pass(&self, limit: Duration) -> bool {
        let mut state = self.state.lock().expect("no holder panics");
        state.waiting += 1;
        let (mut state, timeout) = self
            .changed
            .wait_timeout_while(state, limit, |s| !s.open && s.tickets == 0)
            .expect("no holder panics");
        state.waiting -= 1;
        if !state.open && !timeout.timed_out() {
            state.tickets -= 1;
        }
        !timeout.timed_out()
    }
}

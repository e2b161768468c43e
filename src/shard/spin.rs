//! Spinning before sleep: while requests come quickly one after the other, the thread polls instead of sleeping, which
//! spares the wake-up (about half of the latency at one connection).
//!
//! Two tasks wake each other in turn. One task that wakes itself would starve the others: monoio 0.2.4 puts it in front of
//! the run queue. They stop once nothing has happened for `spin_us`, and a request sets them going again.
//! *Cost*: up to one core while traffic is paced just below the window; so off by default, for shared cores.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use super::state::Shard;

type Pair = RefCell<[Option<Waker>; 2]>;

/// Starts the two tasks.
pub fn spawn(shard: Rc<Shard>, spin_us: u64) {
    let pair = Rc::new(Pair::default());
    for side in 0..2 {
        monoio::spawn(spin(shard.clone(), pair.clone(), side, spin_us * 1_000));
    }
}

async fn spin(shard: Rc<Shard>, pair: Rc<Pair>, side: usize, spin_ns: u64) {
    poll_fn(|cx| {
        let mut wakers = pair.borrow_mut();
        if wakers[side].as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            wakers[side] = Some(cx.waker().clone());
        }
        if shard.clock.now().since(shard.last_activity()) < spin_ns {
            if let Some(other) = &wakers[1 - side] {
                other.wake_by_ref();
            }
        } else {
            shard.rest_spinner(cx.waker().clone());
        }
        Poll::<()>::Pending
    })
    .await;
}

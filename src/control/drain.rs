//! How the process ends: serving, settling, draining, stopping.
//!
//! The first signal to end starts *settling*: readiness says 503 while connections are still accepted for
//! `drain_settle_ms`, so that whoever balances in front has time to look away. Then *draining*: shards stop accepting and
//! finish what runs, for at most `drain_timeout_ms`. Then *stopping*: what still runs is cut.
//!
//! *Invariant*: pure; phases only go forward; [`Order::Exit`] is given at most once, and nothing after it.
//! *Errors*: exit code 0 when every shard finished its requests, 3 when the drain limit or a second signal cut them, or
//! when a shard had failed.
//! *Source*: the configuration reference, exit codes and `[limits]`.

use crate::clock::Nanos;
use crate::proto::ids::ShardId;
use crate::proto::message::Phase;

/// Everything ended in order.
pub const EXIT_DONE: u8 = 0;
/// Requests were cut.
pub const EXIT_FORCED: u8 = 3;

/// What the control thread has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Tell every shard.
    Phase(Phase),
    /// Leave with this exit code.
    Exit(u8),
}

/// The orders of one event: at most two.
pub type Orders = Vec<Order>;

/// The state of a shutdown.
#[derive(Clone, Debug)]
pub struct Shutdown {
    phase: Phase,
    /// When the present phase ends by itself.
    until: Nanos,
    /// Per shard: it has nothing left to finish.
    drained: Vec<bool>,
    /// Some shard failed: the end is not a clean one.
    failed: bool,
    exited: bool,
    settle_ms: u64,
    timeout_ms: u64,
}

impl Shutdown {
    /// `settle_ms` and `timeout_ms` in milliseconds, as configured; `shards` at least 1.
    pub fn new(shards: usize, settle_ms: u64, timeout_ms: u64) -> Self {
        Shutdown {
            phase: Phase::Serving,
            until: Nanos::NEVER,
            drained: vec![false; shards],
            failed: false,
            exited: false,
            settle_ms,
            timeout_ms,
        }
    }

    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// When [`Shutdown::handle_timeout`] wants to be called; [`Nanos::NEVER`] while nothing is timed.
    pub const fn deadline(&self) -> Nanos {
        self.until
    }

    /// A signal asked the process to end.
    pub fn handle_terminate(&mut self, now: Nanos) -> Orders {
        match self.phase {
            Phase::Serving => self.settle(now),
            Phase::Settling | Phase::Draining | Phase::Stopping => self.stop(EXIT_FORCED),
        }
    }

    /// A shard is draining and has no request left.
    pub fn handle_drained(&mut self, shard: ShardId) -> Orders {
        if let Some(drained) = self.drained.get_mut(shard.index()) {
            *drained = true;
        }
        self.stop_if_drained()
    }

    /// A shard cannot go on. Its requests are lost; the others finish theirs, and the process ends so that its
    /// supervisor starts a whole one.
    pub fn handle_failed(&mut self, shard: ShardId, now: Nanos) -> Orders {
        self.failed = true;
        if let Some(drained) = self.drained.get_mut(shard.index()) {
            *drained = true;
        }
        match self.phase {
            Phase::Serving => self.settle(now),
            _ => self.stop_if_drained(),
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Nanos) -> Orders {
        if now < self.until {
            return Orders::new();
        }
        match self.phase {
            Phase::Serving => Orders::new(),
            Phase::Settling => {
                self.phase = Phase::Draining;
                self.until = now.plus_ms(self.timeout_ms);
                let mut orders = vec![Order::Phase(Phase::Draining)];
                orders.extend(self.stop_if_drained());
                orders
            }
            Phase::Draining | Phase::Stopping => self.stop(EXIT_FORCED),
        }
    }

    fn settle(&mut self, now: Nanos) -> Orders {
        self.phase = Phase::Settling;
        self.until = now.plus_ms(self.settle_ms);
        vec![Order::Phase(Phase::Settling)]
    }

    fn stop_if_drained(&mut self) -> Orders {
        if self.phase == Phase::Draining && self.drained.iter().all(|drained| *drained) {
            return self.stop(if self.failed { EXIT_FORCED } else { EXIT_DONE });
        }
        Orders::new()
    }

    fn stop(&mut self, code: u8) -> Orders {
        if self.exited {
            return Orders::new();
        }
        self.exited = true;
        self.phase = Phase::Stopping;
        self.until = Nanos::NEVER;
        vec![Order::Phase(Phase::Stopping), Order::Exit(code)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ShardId = ShardId(0);
    const B: ShardId = ShardId(1);

    fn ms(ms: u64) -> Nanos {
        Nanos::from_ms(ms)
    }

    fn stopped(code: u8) -> Orders {
        vec![Order::Phase(Phase::Stopping), Order::Exit(code)]
    }

    #[test]
    fn a_signal_settles_then_drains_then_exits_zero_when_every_shard_is_done() {
        let mut shutdown = Shutdown::new(2, 1000, 30_000);
        assert_eq!(shutdown.handle_timeout(ms(5)), []);
        assert_eq!(shutdown.handle_terminate(ms(10)), [Order::Phase(Phase::Settling)]);
        assert_eq!(shutdown.deadline(), ms(1010));
        assert_eq!(shutdown.handle_timeout(ms(1009)), []);
        assert_eq!(shutdown.handle_timeout(ms(1010)), [Order::Phase(Phase::Draining)]);
        assert_eq!(shutdown.deadline(), ms(31_010));
        assert_eq!(shutdown.handle_drained(A), []);
        assert_eq!(shutdown.handle_drained(A), [], "one shard twice is not two shards");
        assert_eq!(shutdown.handle_drained(B), stopped(EXIT_DONE));
        assert_eq!(shutdown.deadline(), Nanos::NEVER);
    }

    #[test]
    fn the_drain_limit_forces() {
        let mut shutdown = Shutdown::new(2, 0, 500);
        shutdown.handle_terminate(ms(0));
        assert_eq!(shutdown.handle_timeout(ms(0)), [Order::Phase(Phase::Draining)]);
        shutdown.handle_drained(A);
        assert_eq!(shutdown.handle_timeout(ms(499)), []);
        assert_eq!(shutdown.handle_timeout(ms(500)), stopped(EXIT_FORCED));
        assert_eq!(shutdown.handle_drained(B), [], "nothing follows an exit");
    }

    #[test]
    fn a_second_signal_exits_at_once_in_every_phase() {
        let mut settling = Shutdown::new(1, 1000, 1000);
        settling.handle_terminate(ms(0));
        assert_eq!(settling.handle_terminate(ms(1)), stopped(EXIT_FORCED));

        let mut draining = Shutdown::new(1, 0, 1000);
        draining.handle_terminate(ms(0));
        draining.handle_timeout(ms(0));
        assert_eq!(draining.handle_terminate(ms(1)), stopped(EXIT_FORCED));
        assert_eq!(draining.handle_terminate(ms(2)), [], "exit is ordered once");
    }

    #[test]
    fn a_shard_that_drained_while_settling_still_counts() {
        let mut shutdown = Shutdown::new(1, 100, 1000);
        shutdown.handle_terminate(ms(0));
        assert_eq!(shutdown.handle_drained(A), [], "settling lasts its time: others may still connect");
        let orders = shutdown.handle_timeout(ms(100));
        assert_eq!(orders[0], Order::Phase(Phase::Draining));
        assert_eq!(orders[1..], stopped(EXIT_DONE));
    }

    #[test]
    fn a_failed_shard_ends_the_process_after_the_others_are_done() {
        let mut shutdown = Shutdown::new(2, 10, 1000);
        assert_eq!(shutdown.handle_failed(B, ms(0)), [Order::Phase(Phase::Settling)]);
        assert_eq!(shutdown.handle_timeout(ms(10)), [Order::Phase(Phase::Draining)]);
        assert_eq!(shutdown.handle_drained(A), stopped(EXIT_FORCED));
    }

    #[test]
    fn an_unknown_shard_number_is_ignored() {
        let mut shutdown = Shutdown::new(1, 0, 1000);
        shutdown.handle_terminate(ms(0));
        shutdown.handle_timeout(ms(0));
        assert_eq!(shutdown.handle_drained(ShardId(9)), []);
    }
}

//! What follows from a setback: the same server on a fresh connection, another server of the cluster, another cluster, or the end.
//!
//! There is no delay between tries. The budget is a span from arrival, after which no try begins; it does not bound a try itself.
//!
//! *Invariant*: each setback counts one retry at most; a fresh connection that fails belongs to the retry that wanted it.
//! *Bound and cost*: a few comparisons.
//! *Source*: the Stargate rules, sections 5.2 to 5.5.

use super::request::{Exhausted, Setback};
use crate::clock::Nanos;

/// The reason of an upstream server that wants its cluster tried on another server; it counts as not sent there.
pub const QUEUE_ESTIMATE_MISMATCH: &[u8] = b"queue_estimate_mismatch";
/// What is counted where an upstream server gives no reason.
pub const NO_REASON: &str = "retryable_upstream_response";

/// Limits on the retries of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryRules {
    pub connect_retries_max: u32,
    pub request_retries_max: u32,
}

/// One request's retries so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tries {
    /// No try begins at or after it.
    until: Nanos,
    pub connect_retries: u32,
    pub request_retries: u32,
    /// A fresh connection to the same server is being made.
    reconnecting: bool,
}

/// What to do, and what to count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// The same server on a fresh connection.
    Reconnect,
    /// Another server of the cluster, then other clusters.
    Sibling { reason: &'a str },
    /// Another cluster.
    Cluster { reason: &'a str },
    /// The end; counted under that reason, unless the client is told that its body was too large.
    Exhausted { exhausted: Exhausted, reason: Option<&'a str> },
}

impl Tries {
    /// `budget_ms`: since arrival, in milliseconds; `None`: no limit; 0: no retry.
    pub fn new(arrived: Nanos, budget_ms: Option<u64>) -> Tries {
        let until = budget_ms.map_or(Nanos::NEVER, |ms| arrived.plus_ms(ms));
        Tries { until, ..Tries::default() }
    }

    /// The fresh connection that was wanted, if one was, works. Whether one was.
    pub fn reconnected(&mut self) -> bool {
        std::mem::take(&mut self.reconnecting)
    }

    /// See the module's text. `replayable`: the body can be sent (again), else whether it outgrew the replay buffer. Call
    /// [`Tries::reconnected`] first, unless the setback is that connection's.
    pub fn step<'a>(
        &mut self,
        now: Nanos,
        rules: RetryRules,
        setback: Setback<'a>,
        replayable: Result<(), bool>,
    ) -> Step<'a> {
        let over = |exhausted, reason| Step::Exhausted { exhausted, reason: Some(reason) };
        if std::mem::take(&mut self.reconnecting) && setback == Setback::Connect {
            return Step::Sibling { reason: "connect_failover" };
        }
        if now >= self.until && self.until != Nanos::NEVER {
            return over(Exhausted::Budget, "retry_budget_exhausted");
        }
        match setback {
            Setback::Connect | Setback::Transport => {
                if self.connect_retries >= rules.connect_retries_max {
                    return over(Exhausted::ConnectRetries, "connect_retries_exhausted");
                }
                if let Err(overflow) = replayable {
                    let reason = (!overflow).then_some("retryable_proxy_error");
                    return Step::Exhausted { exhausted: Exhausted::Body { overflow }, reason };
                }
                self.connect_retries += 1;
                if setback == Setback::Connect {
                    // The connection that failed was a fresh one already.
                    return Step::Sibling { reason: "connect_failover" };
                }
                self.reconnecting = true;
                Step::Reconnect
            }
            Setback::Retryable { reason, .. } => {
                let label = label(reason);
                if self.request_retries >= rules.request_retries_max {
                    return over(Exhausted::Upstream, label);
                }
                if let Err(overflow) = replayable {
                    let reason = (!overflow).then_some(label);
                    return Step::Exhausted { exhausted: Exhausted::Body { overflow }, reason };
                }
                self.request_retries += 1;
                if reason.trim_ascii() == QUEUE_ESTIMATE_MISMATCH {
                    Step::Sibling { reason: label }
                } else {
                    Step::Cluster { reason: label }
                }
            }
        }
    }
}

/// The reason as it is counted.
fn label(reason: &[u8]) -> &str {
    match std::str::from_utf8(reason).map(str::trim) {
        Ok("") => NO_REASON,
        Ok(text) => text,
        // No text: it is counted with the reasons that are not kept apart.
        Err(_) => super::figures::OTHER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: RetryRules = RetryRules { connect_retries_max: 2, request_retries_max: 2 };
    const BUSY: Setback<'static> = Setback::Retryable { status: 429, reason: b"busy" };

    fn over(exhausted: Exhausted, reason: &str) -> Step<'_> {
        Step::Exhausted { exhausted, reason: Some(reason) }
    }

    #[test]
    fn a_broken_connection_is_made_anew_then_another_server_is_tried() {
        let mut tries = Tries::new(Nanos::ZERO, None);
        assert_eq!(tries.step(Nanos(1), RULES, Setback::Transport, Ok(())), Step::Reconnect);
        let failover = Step::Sibling { reason: "connect_failover" };
        assert_eq!(tries.step(Nanos(2), RULES, Setback::Connect, Ok(())), failover);
        assert_eq!(tries.connect_retries, 1, "one retry wanted it");
        assert_eq!(tries.step(Nanos(3), RULES, Setback::Connect, Ok(())), failover);
        let exhausted = over(Exhausted::ConnectRetries, "connect_retries_exhausted");
        assert_eq!(tries.step(Nanos(4), RULES, Setback::Connect, Ok(())), exhausted);
        assert_eq!(tries.step(Nanos(4), RULES, Setback::Transport, Ok(())), exhausted);
        assert!(!tries.reconnected());
    }

    #[test]
    fn a_connection_made_anew_counts_once_it_is_used() {
        let mut tries = Tries::new(Nanos::ZERO, None);
        assert_eq!(tries.step(Nanos(1), RULES, Setback::Transport, Ok(())), Step::Reconnect);
        assert!(tries.reconnected());
        assert!(!tries.reconnected());
        assert_eq!(tries.step(Nanos(2), RULES, Setback::Transport, Ok(())), Step::Reconnect);
        assert_eq!(tries.connect_retries, 2);
    }

    #[test]
    fn what_an_upstream_server_says_decides_where_else() {
        let mut tries = Tries::new(Nanos::ZERO, None);
        assert_eq!(tries.step(Nanos(1), RULES, BUSY, Ok(())), Step::Cluster { reason: "busy" });
        let mismatch = Setback::Retryable { status: 429, reason: b" queue_estimate_mismatch " };
        let sibling = Step::Sibling { reason: "queue_estimate_mismatch" };
        assert_eq!(tries.step(Nanos(1), RULES, mismatch, Ok(())), sibling);
        assert_eq!(tries.step(Nanos(1), RULES, BUSY, Ok(())), over(Exhausted::Upstream, "busy"));
        let mut tries = Tries::new(Nanos::ZERO, None);
        let blank = Setback::Retryable { status: 503, reason: b"  " };
        assert_eq!(tries.step(Nanos(1), RULES, blank, Ok(())), Step::Cluster { reason: NO_REASON });
        let odd = Setback::Retryable { status: 503, reason: b"\xff" };
        assert_eq!(tries.step(Nanos(1), RULES, odd, Ok(())), Step::Cluster { reason: "other" });
    }

    #[test]
    fn the_budget_comes_first_then_the_counts_then_the_body() {
        let none = RetryRules { connect_retries_max: 0, request_retries_max: 0 };
        let gone = over(Exhausted::Budget, "retry_budget_exhausted");
        for setback in [Setback::Connect, Setback::Transport, BUSY] {
            let mut tries = Tries::new(Nanos::from_ms(5), Some(10));
            assert_eq!(tries.step(Nanos::from_ms(15), none, setback, Err(true)), gone);
            // Nothing is ever retried with a budget of 0, at the same instant either.
            let mut tries = Tries::new(Nanos::from_ms(5), Some(0));
            assert_eq!(tries.step(Nanos::from_ms(5), RULES, setback, Ok(())), gone);
        }
        let mut tries = Tries::new(Nanos::ZERO, Some(10));
        let before = Nanos(9_999_999);
        let connect = over(Exhausted::ConnectRetries, "connect_retries_exhausted");
        assert_eq!(tries.step(before, none, Setback::Transport, Err(true)), connect);
        assert_eq!(tries.step(before, none, BUSY, Err(true)), over(Exhausted::Upstream, "busy"));
        let body = |overflow, reason| Step::Exhausted { exhausted: Exhausted::Body { overflow }, reason };
        let error = Some("retryable_proxy_error");
        assert_eq!(tries.step(before, RULES, Setback::Transport, Err(false)), body(false, error));
        assert_eq!(tries.step(before, RULES, Setback::Connect, Err(true)), body(true, None));
        assert_eq!(tries.step(before, RULES, BUSY, Err(false)), body(false, Some("busy")));
        assert_eq!(tries.step(before, RULES, BUSY, Err(true)), body(true, None));
        assert_eq!((tries.connect_retries, tries.request_retries), (0, 0), "nothing was tried");
        assert_eq!(tries.step(before, RULES, BUSY, Ok(())), Step::Cluster { reason: "busy" });
    }
}

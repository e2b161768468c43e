//! Takes a request to a server and brings the answer back.
//!
//! *Invariants*: a request is sent again only if no server can have read it: its connection was never made, its kernel
//! took none of its bytes, or an old connection ended in order with none of them acknowledged ([`super::upstream::Upstream::unread`]).
//! After the first byte of an answer nothing is ever sent again. A client that goes takes the server's connection with it.
//! *Bound*: [`ATTEMPTS_MAX`] servers per request.

use std::future::Future;
use std::task::Poll;

use super::asked::Asked;
use super::attempt::{self, Attempt, Order};
use super::client::Client;
use super::deadline::Action;
use super::held::Held;
use super::intake::Intake;
use super::placed::Placed;
use super::relay;
use super::reply::Known;
use super::session::{After, Desk, refuse};
use super::state::Shard;
use crate::limits::ATTEMPTS_MAX;
use crate::proto::backend::catalog::Algorithm;
use crate::proto::classify::Api;
use crate::proto::classify::affinity::AffinityId;
use crate::proto::dispatcher::{Decision, Input, Outcome, Placement, Prompted, Wanted};
use crate::proto::error::Rejection;
use crate::proto::ids::BackendId;
use crate::proto::message::{Phase, Tried, UpstreamFault};

/// See the module's text. `asked` says where the request may go.
pub async fn forward(
    client: &mut Client,
    desk: &mut Desk,
    intake: &mut Intake,
    asked: &Asked,
    known: &mut Known,
    api: Api,
) -> After {
    let shard = client.shard.clone();
    let mut tried = Tried::default();
    let mut waited_ns = 0;
    let mut lost = None;
    for _ in 0..ATTEMPTS_MAX {
        let admitted = admit(client, asked, &desk.prompt.blocks, tried, known).await;
        if let Ok(Placement { wait_ns: ns, .. }) | Err(Some((_, ns))) = admitted {
            waited_ns += ns;
            known.wait_ns = Some(waited_ns);
            shard.figures.borrow_mut().queue_wait.record(ns);
        }
        let placement = match admitted {
            Ok(placement) => placement,
            Err(Some((rejection, _))) => {
                // Every server it may go to has been tried: that is what the client should hear.
                let lost = lost.filter(|_| rejection == Rejection::NoHealthyServer);
                let (rejection, what) = match &lost {
                    Some(backend) => failure(&shard, *backend, UpstreamFault::Connect),
                    None => (rejection, None),
                };
                let what = if rejection == Rejection::UpstreamTimeout { Some(TOO_LONG.into()) } else { what };
                return refuse(client, desk, intake, rejection, what.as_deref(), known, api).await;
            }
            Err(None) => return After::Gone,
        };
        let backend = placement.backend;
        if lost.take().is_some() {
            again(&shard, backend, known);
        }
        let mut held = Held::new(&shard, backend);
        let arrived = shard.now();
        if asked.algorithm == Algorithm::KvAware {
            let prompt =
                Prompted { client: asked.client, blocks: &desk.prompt.blocks, tokens: asked.prompt_tokens };
            let belief = shard.remember(arrived, asked.group, backend, &prompt);
            let total = prompt.blocks.len() as u32;
            known.prefix_blocks = asked.has_prompt.then_some((belief.matched, total));
            held.believe(belief);
        }
        if asked.measured {
            held.measure(arrived, asked.prompt_tokens);
        }
        let mut order = Order::new(&shard, backend, true, arrived);
        let mut attempt = attempt::attempt(client, desk, intake, &order).await;
        if matches!(attempt, Attempt::Stale) {
            again(&shard, backend, known);
            (order.may_reuse, order.since) = (false, shard.read_clock());
            attempt = attempt::attempt(client, desk, intake, &order).await;
        }
        if !matches!(attempt, Attempt::Answered { .. }) {
            // It may be that of the server's connection, which is gone.
            client.timer.clear();
        }
        match attempt {
            // Cut by us: neither the server's doing nor the client's.
            Attempt::Failed { .. } | Attempt::Unconnected { .. } if shard.phase.get() == Phase::Stopping => {
                drop(held);
                return refuse(client, desk, intake, Rejection::ShuttingDown, None, known, api).await;
            }
            Attempt::Answered { upstream, rx, sent } => {
                let placed = Placed { held, placement, asked: *asked, known, api, dispatched: arrived };
                let exchange = relay::Exchange::new(placed, upstream, sent, arrived);
                return match relay::relay(client, desk, intake, rx, exchange).await {
                    Ok(after) => after,
                    Err(fault) => {
                        let (rejection, what) = failure(&shard, backend, fault);
                        refuse(client, desk, intake, rejection, what.as_deref(), known, api).await
                    }
                };
            }
            Attempt::Unconnected { errno, .. } => {
                shard.fault(backend, UpstreamFault::Connect, errno);
                held.done(Outcome::Failure);
                if let Some((matched, _)) = known.prefix_blocks {
                    // It never got there.
                    shard.unsent(arrived, backend, &desk.prompt.blocks, matched);
                }
                tried.push(backend);
                lost = Some(backend);
            }
            Attempt::Stale => unreachable!("only a reused connection can be stale"),
            Attempt::Failed { fault: UpstreamFault::HeadTimeout, .. } if shard.now() >= known.until => {
                // The request's own limit: it says nothing about the server.
                drop(held);
                let what = Some(TOO_LONG);
                return refuse(client, desk, intake, Rejection::UpstreamTimeout, what, known, api).await;
            }
            Attempt::Failed { fault, errno } => {
                shard.fault(backend, fault, errno);
                held.done(Outcome::Failure);
                let (rejection, what) = failure(&shard, backend, fault);
                return refuse(client, desk, intake, rejection, what.as_deref(), known, api).await;
            }
            Attempt::ClientGone => return After::Gone,
            Attempt::Refuse(rejection, what) => {
                drop(held);
                return refuse(client, desk, intake, rejection, Some(what), known, api).await;
            }
        }
    }
    let backend = lost.expect("every attempt that comes here lost a server");
    let (rejection, what) = failure(&shard, backend, UpstreamFault::Connect);
    refuse(client, desk, intake, rejection, what.as_deref(), known, api).await
}

const TOO_LONG: &str = "the request took longer than limits.total_timeout_ms";

/// The request is sent again, to `backend`, after a server certainly read nothing of it.
fn again(shard: &Shard, backend: BackendId, known: &mut Known) {
    known.retries += 1;
    shard.figures.borrow_mut().server(backend).retries += 1;
}

/// What the client hears of a server's failure.
pub fn failure(shard: &Shard, backend: BackendId, fault: UpstreamFault) -> (Rejection, Option<String>) {
    let (rejection, what) = match fault {
        UpstreamFault::Connect => (Rejection::UpstreamError, "could not be connected to"),
        UpstreamFault::BeforeHead => (
            Rejection::UpstreamError,
            "closed the connection before it answered; the request was not sent again",
        ),
        UpstreamFault::HeadTimeout => {
            (Rejection::UpstreamTimeout, "did not answer in time (limits.response_head_timeout_ms)")
        }
        UpstreamFault::BadHead => (Rejection::UpstreamError, "answered with something that is not HTTP/1.x"),
        UpstreamFault::Truncated => (Rejection::UpstreamError, "broke off its answer"),
        UpstreamFault::BetweenTimeout => (
            Rejection::UpstreamTimeout,
            "stopped in the middle of its answer (limits.between_bytes_timeout_ms)",
        ),
        UpstreamFault::Status => (Rejection::UpstreamError, "answered with an error"),
    };
    (rejection, Some(format!("server `{}` {what}", shard.catalog.borrow().server(backend).name)))
}

/// Finds the request a server, waiting where the pool says so. `Err(None)`: the client went away meanwhile; else the
/// rejection and how long was waited, in nanoseconds.
async fn admit(
    client: &mut Client,
    asked: &Asked,
    blocks: &[u64],
    tried: Tried,
    known: &Known,
) -> Result<Placement, Option<(Rejection, u64)>> {
    let shard = client.shard.clone();
    let (since, until) = (shard.now(), known.until);
    if since >= until {
        return Err(Some((Rejection::UpstreamTimeout, 0)));
    }
    let affinity_key = known.affinity.as_deref().map_or(&[][..], AffinityId::key);
    let input = Input { tokens: asked.prompt_tokens, affinity_key };
    let wanted = Wanted { tried, session: asked.session.map(|session| session.stable), blocks, input };
    let decision = shard.dispatcher.borrow_mut().handle_request(since, asked.group, &wanted);
    match decision {
        Decision::Dispatch(placement) => {
            shard.pump();
            Ok(placement)
        }
        Decision::Reject(rejection) => {
            shard.pump();
            Err(Some((rejection, 0)))
        }
        Decision::Wait(ticket) => {
            let mut waiting = std::pin::pin!(shard.wait(ticket));
            shard.pump();
            // Whoever waits for a server is not waited for, but its own time runs.
            client.timer.arm(until, client.socket.fd(), Action::Wake);
            let timer = client.timer.handle();
            let granted = std::future::poll_fn(|cx| match waiting.as_mut().poll(cx) {
                Poll::Ready(result) => Poll::Ready(result),
                Poll::Pending => timer.poll_woken(cx).map(|()| Err(Rejection::UpstreamTimeout)),
            });
            match client.watch(granted).await {
                Ok(Ok(placement)) => Ok(placement),
                Ok(Err(rejection)) => Err(Some((rejection, shard.now().since(since)))),
                Err(_) => Err(None),
            }
        }
    }
}

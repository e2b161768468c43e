//! Requests on trusted listeners: the Stargate contract on the wire.
//!
//! * [`endpoint`]: what is asked for. [`headers`]: what the gateway says of it. [`trace`]: its trace context.
//! * [`walk`]: a request's way to a server and back; [`aloft`] sees to it that its flight ends.
//! * [`answer`]: answers of the router's own. [`tell`]: what is said of a request for the log.
//! * [`desk`]: the shard's part: its target router, and who waits for it.
//!
//! *Invariant*: routing is the target router's (`proto/stargate`); connections, bodies and answers are those of the other listeners,
//! under this contract's rules.
//! *Source*: the Stargate rules, sections 4 and 5.

mod aloft;
pub mod answer;
pub mod desk;
mod endpoint;
mod headers;
mod tell;
mod trace;
mod walk;

use super::client::Client;
use super::intake::{Intake, Stop};
use super::session::{After, Desk};
use super::state::Shard;
use crate::clock::Nanos;
use crate::proto::message::Phase;
use answer::Answer;
use endpoint::Endpoint;

/// One request, whose head is on the desk, and its answer.
pub async fn exchange(client: &mut Client, desk: &mut Desk, arrived: Nanos) -> After {
    let shard = client.shard.clone();
    let mut intake = match Intake::in_hand(client, desk) {
        Ok(intake) => intake,
        Err(Stop::Gone) => return After::Gone,
        Err(Stop::Refuse(rejection, _)) => return answer::refuse_head(client, rejection.row().status).await,
    };
    let path = desk.head.path(client.unread());
    let answer = match Endpoint::of(desk.head.method, path) {
        Endpoint::Proxied(proxied) => return walk::proxy(client, desk, &mut intake, proxied, arrived).await,
        Endpoint::Models => models(&shard, desk.head.path_and_query.of(client.unread())),
        Endpoint::DebugState => debug_state(&shard),
        Endpoint::Healthz => Answer::empty(200),
        Endpoint::Readyz if shard.phase.get() == Phase::Serving => Answer::empty(200),
        Endpoint::Readyz => Answer::empty(503),
        Endpoint::WrongMethod { allow } => Answer { allow, ..Answer::empty(405) },
        Endpoint::Unknown => Answer::empty(404),
    };
    answer::send(client, desk, &mut intake, &answer).await
}

/// `target`: path and query.
fn models(shard: &Shard, target: &[u8]) -> Answer {
    let query = memchr::memchr(b'?', target).map_or(&[][..], |at| &target[at + 1..]);
    let Some(wanted) = endpoint::model_ids(query) else { return Answer::empty(400) };
    let mut router = shard.trusted().router.borrow_mut();
    let models = router.models_without_key().iter().map(|model| &**model);
    let chosen: Vec<&str> =
        models.filter(|model| wanted.is_empty() || wanted.iter().any(|id| id == model)).collect();
    Answer::json(serde_json::json!({ "model_ids": chosen }).to_string().into_bytes())
}

fn debug_state(shard: &Shard) -> Answer {
    let stargate = shard.trusted();
    let mut router = stargate.router.borrow_mut();
    let ids: Vec<&str> = router.active_models().iter().map(|model| &**model).collect();
    let ids = serde_json::Value::from(ids);
    Answer::json(
        format!("{{\"config\":{},\"active_model_ids\":{ids}}}", stargate.options.debug_config).into_bytes(),
    )
}

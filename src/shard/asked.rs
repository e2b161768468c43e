//! What a request asks for, as far as routing wants to know it: group, session, client, prompt.
//!
//! *Invariant*: nothing here keeps a request from being forwarded: what cannot be read has no prompt, no session and no
//! length, and the rules for those apply.
//! *Bound and cost*: the body is walked once; a second time where the pool cuts its blocks otherwise than the first
//! kv-aware pool. One digest where a session or client is asked for.

use std::collections::HashMap;

use super::client::Client;
use super::intake::Intake;
use super::session::Desk;
use crate::proto::account::calibration::Calibration;
use crate::proto::backend::catalog::{Algorithm, Catalog};
use crate::proto::classify::affinity::AffinityId;
use crate::proto::classify::caller::{Digest, Session};
use crate::proto::classify::{Endpoint, PromptRules, Reading, read_prompt};
use crate::proto::error::Rejection;
use crate::proto::ids::{ClientId, GroupId};

/// So much of an unknown model's name is repeated to its caller.
const MODEL_SHOWN_BYTES_MAX: usize = 256;

/// One request's wishes.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub group: GroupId,
    /// Of its pool.
    pub algorithm: Algorithm,
    /// In sticky-session pools.
    pub session: Option<Digest>,
    /// Its pool goes by how fast servers read.
    pub measured: bool,
    /// Its answer's head says that the input is read; others have to be looked into.
    pub reads_to_head: bool,
    /// In kv-aware pools.
    pub client: ClientId,
    /// A prompt was read; its full blocks are on the desk.
    pub has_prompt: bool,
    /// Its prompt's length, estimated; where nothing asks for it, 0.
    pub prompt_tokens: u64,
    /// Blocks of its prompt stand for tokens evenly: it has no media.
    even: bool,
    /// Its prompt's text, in bytes; 0 where media or token ids make it no measure of its tokens.
    prompt_bytes: u64,
    /// Where its model's tokens are counted.
    model: ModelId,
}

/// A request that no group takes.
pub struct Unroutable {
    pub rejection: Rejection,
    /// What is to be said about it.
    pub what: Option<String>,
    /// Whose pool is named all the same, where it is known.
    pub group: Option<GroupId>,
}

/// Index into [`Calibrations`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ModelId(usize);

/// Bytes per token by model, learnt from answers.
#[derive(Debug)]
pub struct Calibrations {
    /// The first is for what names no known model.
    models: Vec<Calibration>,
    ids: HashMap<Box<[u8]>, usize>,
}

impl Default for Calibrations {
    fn default() -> Self {
        Calibrations { models: vec![Calibration::default()], ids: HashMap::new() }
    }
}

impl Calibrations {
    /// Only models that the catalog knows get a figure of their own, so that callers cannot make it grow.
    fn id(&mut self, catalog: &Catalog, model: Option<&[u8]>) -> ModelId {
        let Some(model) = model else { return ModelId(0) };
        if let Some(id) = self.ids.get(model) {
            return ModelId(*id);
        }
        if !catalog.models.contains_key(model) {
            return ModelId(0);
        }
        self.models.push(Calibration::default());
        self.ids.insert(model.into(), self.models.len() - 1);
        ModelId(self.models.len() - 1)
    }
}

impl Asked {
    /// Reads the request. Where its pool's algorithm keeps conversations together, `affinity` becomes the id of its own.
    pub fn read(
        client: &mut Client,
        desk: &mut Desk,
        intake: &Intake,
        endpoint: Endpoint,
        affinity: &mut Option<Box<AffinityId>>,
    ) -> Result<Asked, Unroutable> {
        let shard = client.shard.clone();
        let catalog = shard.catalog();
        let head = &desk.head;
        let caller = &shard.limits.caller;
        let tier = caller.tier(head, client.unread()).map_err(|what| Unroutable {
            rejection: Rejection::BadRequest,
            what: Some(what.to_owned()),
            group: None,
        })?;
        let session = caller.session(head, client.unread());
        let mut prompt = std::mem::take(&mut desk.prompt);
        prompt.blocks.clear();
        let reads = catalog.has_kv_pools
            || catalog.has_token_limits
            || catalog.has_measured_pools
            || session.is_none() && catalog.has_sticky_pools;
        let mut decoded = Vec::new();
        let content = intake.content(client, desk, &mut decoded);
        let body = if reads { content.json() } else { None };
        let mut rules = PromptRules { block_bytes: catalog.kv_block_bytes, seed: shard.limits.prompt_seed };
        let (reading, model) = match body {
            Some(body) => {
                let mut reading = read_prompt(endpoint, body, content.whole, &rules, &mut prompt);
                let model = reading.model.take();
                (reading, model)
            }
            None => (Reading::default(), content.model()),
        };
        let mut calibrations = shard.calibrations.borrow_mut();
        let id = match reads {
            true => calibrations.id(&catalog, model.as_deref()),
            false => ModelId(0),
        };
        let prompt_bytes = reading.prompt_bytes + intake.missing();
        let tokens = match reading.has_prompt {
            true => calibrations.models[id.0].estimate(prompt_bytes, reading.token_ids),
            false => 0,
        };
        let resolved = shard.dispatcher.borrow().resolve(model.as_deref(), tier, tokens);
        let asked = resolved.map_err(|rejection| Unroutable {
            rejection,
            what: detail(rejection, model.as_deref(), tier, tokens),
            group: catalog.route(model.as_deref(), tier).map(|route| route.widest()),
        });
        let asked = asked.map(|group| {
            let pool = catalog.pool(catalog.group(group).pool);
            if let Some(body) = body
                && pool.algorithm == Algorithm::KvAware
                && pool.kv.block_bytes != rules.block_bytes
            {
                rules.block_bytes = pool.kv.block_bytes;
                read_prompt(endpoint, body, content.whole, &rules, &mut prompt);
            }
            let digest = || session.map(|session| caller.digest(session));
            let (mut own, mut owner) = (None, None);
            match pool.algorithm {
                Algorithm::StickySession => {
                    let named = reading.affinity_id.as_deref();
                    own = digest().or_else(|| named.map(|id| caller.digest_of_body_id(id)));
                }
                Algorithm::KvAware if !prompt.blocks.is_empty() => {
                    let seeds_own = |session| matches!(session, Session::Named(_) | Session::Key(_));
                    owner = session.filter(|s| seeds_own(*s)).map(|s| ClientId(caller.digest(s).shown));
                }
                _ => {}
            }
            *affinity = pool.wants_affinity().then(|| {
                let named = reading.affinity_id.as_deref();
                let of_head = caller.affinity(&desk.head, client.unread());
                let id = of_head
                    .or_else(|| named.map(|id| caller.affinity_of_body_id(id)))
                    .unwrap_or_else(|| shard.affinity_ids.borrow_mut().generate());
                Box::new(id)
            });
            let asked = Asked {
                group,
                algorithm: pool.algorithm,
                session: own,
                measured: pool.measures(),
                reads_to_head: endpoint == Endpoint::Embeddings,
                client: owner.unwrap_or_default(),
                has_prompt: reading.has_prompt && pool.algorithm == Algorithm::KvAware,
                prompt_tokens: tokens,
                even: !reading.has_media,
                prompt_bytes: if reading.token_ids == 0 && !reading.has_media && content.whole {
                    reading.prompt_bytes
                } else {
                    0
                },
                model: id,
            };
            (asked, owner.is_none() && !prompt.blocks.is_empty())
        });
        drop(calibrations);
        desk.prompt = prompt;
        let (mut asked, nameless) = asked?;
        if nameless && asked.algorithm == Algorithm::KvAware {
            asked.client = client.peer();
        }
        Ok(asked)
    }

    /// Whether the engine's report about the prompt is worth reading from its answer.
    pub fn wants_usage(&self, catalog: &Catalog) -> bool {
        self.has_prompt || self.prompt_bytes > 0 && catalog.has_token_limits
    }

    /// The engine counted this request's tokens.
    pub fn learn(&self, calibrations: &mut Calibrations, prompt_tokens: u64) {
        if self.prompt_bytes > 0 {
            calibrations.models[self.model.0].learn(self.prompt_bytes, prompt_tokens);
        }
    }

    /// Whether the engine's cached tokens can be told in blocks.
    pub fn is_even(&self) -> bool {
        self.even
    }
}

/// What is to be said about a request that has no group.
fn detail(rejection: Rejection, model: Option<&[u8]>, tier: &[u8], tokens: u64) -> Option<String> {
    let shown =
        |text: &[u8]| String::from_utf8_lossy(&text[..text.len().min(MODEL_SHOWN_BYTES_MAX)]).into_owned();
    match rejection {
        Rejection::ModelNotFound => Some(format!(
            "no server serves the model `{}`; GET /v1/models lists those that are served",
            shown(model?)
        )),
        Rejection::NoServerInTier if tier.is_empty() => {
            Some("every server of this model is in a routing tier, and the request names none".to_owned())
        }
        Rejection::NoServerInTier => {
            Some(format!("the routing tier `{}` has no server for this model", shown(tier)))
        }
        Rejection::InputTooLong => Some(format!(
            "the input has about {tokens} tokens, more than any server of this model takes (max_input_tokens)"
        )),
        _ => None,
    }
}

//! An inference request from its body to its answer: checked against the model and its context, queued, prefilled,
//! decoded token by token, and given up as soon as the client has gone.
//!
//! *Invariant*: the slot is free and the request counted as ended before the last byte goes out, so whoever has read a
//! whole answer finds the engine's figures settled.
//! *Bound and cost*: tokens that are due together go out in one send.
//! *Errors*: [`ApiError`]: 400 (body, context), 404 (model), 503 with `Retry-After` (queue full).

use std::future::poll_fn;
use std::rc::Rc;

use super::connection::Connection;
use super::error::ApiError;
use super::fault::Fault;
use super::native::{Generated, TokensOut};
use super::openai::{self, Completion, DIMENSIONS_MAX};
use super::prompt::{Ask, Endpoint, parse};
use super::scheduler::{Refusal, Started, Work};
use super::server::{Engine, Flight, Outcome, Seat};
use super::session::{JSON, Next, Reply};
use super::text::{self, Token, mix};
use super::wire::{Events, Finish, Usage, Wire};
use super::{anthropic, responses};

/// How long an answer will be, and why it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    tokens: u32,
    finish: Finish,
}

/// Where an answer ends: by itself after `natural` tokens, or at the caller's limit, or at the end of the context.
fn plan(ask: &Ask, natural: u32, context_tokens_max: usize) -> Result<Plan, ApiError> {
    let prompt = ask.tokens.len();
    let room = context_tokens_max.saturating_sub(prompt).min(u32::MAX as usize) as u32;
    let too_long = |wanted: u32| {
        let message = format!(
            "this model's maximum context length is {context_tokens_max} tokens, but the request has {prompt} prompt \
             tokens and wants {wanted} more"
        );
        ApiError::new(400, message)
    };
    if room == 0 {
        return Err(too_long(ask.output_max.unwrap_or(1)));
    }
    let limit = ask.output_max.unwrap_or(room);
    if limit > room {
        return Err(too_long(limit));
    }
    let natural = natural.max(ask.output_min);
    if ask.ignore_eos || natural > limit {
        Ok(Plan { tokens: limit, finish: Finish::Length })
    } else {
        Ok(Plan { tokens: natural, finish: Finish::Stop })
    }
}

/// Answers an inference request.
pub async fn serve(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    endpoint: Endpoint,
    body: &[u8],
    reply: &Reply,
    flight: &mut Flight<'_>,
) -> Result<Next, ApiError> {
    let options = &engine.options;
    let ask = parse(endpoint, body)?;
    let model = match &ask.model {
        None => options.models[0].clone(),
        Some(name) if options.models.contains(name) => name.clone(),
        Some(name) => {
            let message = format!("the model `{name}` does not exist");
            return Err(ApiError { param: Some("model"), ..ApiError::new(404, message) });
        }
    };
    match endpoint {
        Endpoint::Tokenize => {
            let body = openai::tokenize(&ask, options.context_tokens_max);
            return Ok(done(connection, reply, flight, body).await);
        }
        Endpoint::CountTokens => {
            let body = format!(r#"{{"input_tokens":{}}}"#, ask.tokens.len()).into_bytes();
            return Ok(done(connection, reply, flight, body).await);
        }
        Endpoint::Embeddings | Endpoint::Rerank => {
            return pooled(engine, connection, endpoint, &ask, &model, reply, flight).await;
        }
        _ => {}
    }
    let plan = plan(&ask, options.output_tokens, options.context_tokens_max)?;
    let work = Work::generate(&ask.tokens, ask.salt, plan.tokens, options.block_tokens);
    let seat = take_seat(engine, work)?;
    let (number, created) = (engine.next_id(), engine.unix_s());
    let mut wire: Box<dyn Wire> = match endpoint {
        Endpoint::Responses => Box::new(responses::Response::new(number, created, &model, ask.output_max)),
        Endpoint::Messages => Box::new(anthropic::Message::new(number, &model)),
        Endpoint::Generate => Box::new(Generated::new(number)),
        Endpoint::TokensIn => Box::new(TokensOut::new(number)),
        _ => {
            Box::new(Completion::new(endpoint == Endpoint::Chat, number, created, &model, ask.include_usage))
        }
    };
    let seed = match ask.seed {
        Some(seed) => mix(options.seed, seed as u64),
        None => options.seed,
    };
    let answer = Answer {
        seed: ask.tokens.iter().fold(mix(seed, ask.salt), |h, token| mix(h, u64::from(*token))),
        prompt_tokens: ask.tokens.len() as u64,
        plan,
    };
    engine.stats.borrow_mut().prompt_tokens += answer.prompt_tokens;
    if ask.stream {
        engine.stats.borrow_mut().streamed += 1;
        Ok(stream(engine, connection, seat, &answer, wire.as_mut(), reply, flight).await)
    } else {
        Ok(whole(engine, connection, seat, &answer, wire.as_mut(), reply, flight).await)
    }
}

fn take_seat(engine: &Rc<Engine>, work: Work) -> Result<Seat, ApiError> {
    engine.seat(work).map_err(|refusal| match refusal {
        Refusal::QueueFull => ApiError {
            retry_after_s: Some(1),
            ..ApiError::new(503, "all slots are busy and the queue is full".into())
        },
        Refusal::TooLong { kv_tokens_max } => ApiError::new(
            400,
            format!("prompt and answer do not fit the key/value memory of {kv_tokens_max} tokens"),
        ),
    })
}

/// Sends a complete JSON answer and counts it.
async fn done(connection: &mut Connection, reply: &Reply, flight: &mut Flight<'_>, body: Vec<u8>) -> Next {
    flight.settle(if matches!(reply.fault, Some(Fault::Die { .. })) {
        Outcome::Faulted
    } else {
        Outcome::Completed
    });
    reply.whole(connection, 200, JSON, "", body).await
}

/// Embeddings and rerank: read, not continued.
async fn pooled(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    endpoint: Endpoint,
    ask: &Ask,
    model: &str,
    reply: &Reply,
    flight: &mut Flight<'_>,
) -> Result<Next, ApiError> {
    let context = engine.options.context_tokens_max;
    let mut from = 0;
    let mut longest = 0;
    for (index, end) in ask.input_ends.iter().enumerate() {
        longest = longest.max(end - from);
        if end - from > context {
            let message = format!(
                "this model's maximum context length is {context} tokens, but input {index} has {}",
                end - from
            );
            return Err(ApiError::bad_request("input", message));
        }
        from = *end;
    }
    if let Some(dimensions) = ask.dimensions.filter(|dimensions| *dimensions > DIMENSIONS_MAX) {
        let message = format!("expected 1 to {DIMENSIONS_MAX}, got {dimensions}");
        return Err(ApiError::bad_request("dimensions", message));
    }
    let seat = take_seat(engine, Work::pooled(ask.tokens.len(), longest))?;
    engine.stats.borrow_mut().prompt_tokens += ask.tokens.len() as u64;
    let waited = connection
        .unless_gone(async {
            let started = poll_fn(|cx| seat.poll_started(cx)).await;
            engine.sleep_until(started.first_token_at).await;
        })
        .await;
    if waited.is_none() {
        return Ok(Next::Close);
    }
    drop(seat);
    let body = match endpoint {
        Endpoint::Rerank => openai::rerank(ask, engine.next_id(), model),
        _ => openai::embeddings(ask, model),
    };
    Ok(done(connection, reply, flight, body).await)
}

/// What is to be answered.
struct Answer {
    seed: u64,
    prompt_tokens: u64,
    plan: Plan,
}

impl Answer {
    fn usage(&self, started: &Started, output_tokens: u32) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: started.cached_tokens as u64,
            output_tokens: u64::from(output_tokens),
        }
    }

    /// Makes the tokens `made..ready`, gives each to `each`, and records them.
    fn make(
        &self,
        engine: &Rc<Engine>,
        seat: &Seat,
        made: u32,
        ready: u32,
        text: &mut Vec<u8>,
        mut each: impl FnMut(&str) -> bool,
    ) -> u32 {
        // This task may have woken before the one that ends the prefill.
        engine.step();
        let mut tokens: Vec<Token> = Vec::with_capacity((ready - made) as usize);
        for index in made..ready {
            let token = text::token(self.seed, index);
            tokens.push(token);
            text::push(text, token);
            let bytes = token.to_le_bytes();
            if !each(std::str::from_utf8(&bytes).expect("tokens are ASCII words")) {
                break;
            }
        }
        engine.scheduler.borrow_mut().record(seat.ticket(), &tokens);
        engine.stats.borrow_mut().output_tokens += tokens.len() as u64;
        made + tokens.len() as u32
    }
}

/// A prompt's prefill began: counts what it found in the cache.
fn note_start(engine: &Engine, started: &Started) {
    engine.stats.borrow_mut().cached_tokens += started.cached_tokens as u64;
}

async fn whole(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    seat: Seat,
    answer: &Answer,
    wire: &mut dyn Wire,
    reply: &Reply,
    flight: &mut Flight<'_>,
) -> Next {
    let rates = engine.options.rates;
    let plan = answer.plan;
    let made = connection
        .unless_gone(async {
            let started = poll_fn(|cx| seat.poll_started(cx)).await;
            note_start(engine, &started);
            engine.sleep_until(rates.token_at(started.first_token_at, plan.tokens - 1)).await;
            started
        })
        .await;
    let Some(started) = made else { return Next::Close };
    let mut text = Vec::with_capacity(plan.tokens as usize * text::TOKEN_BYTES);
    answer.make(engine, &seat, 0, plan.tokens, &mut text, |_| true);
    drop(seat);
    let text = String::from_utf8(text).expect("tokens are ASCII words");
    let body = wire.whole(&text, plan.finish, answer.usage(&started, plan.tokens));
    done(connection, reply, flight, body).await
}

async fn stream(
    engine: &Rc<Engine>,
    connection: &mut Connection,
    seat: Seat,
    answer: &Answer,
    wire: &mut dyn Wire,
    reply: &Reply,
    flight: &mut Flight<'_>,
) -> Next {
    let rates = engine.options.rates;
    let plan = answer.plan;
    let (limit, reset) = match reply.fault {
        Some(Fault::Die { after_events, reset }) => (Some(after_events), reset),
        _ => (None, false),
    };
    let (mut head, chunked) = reply.stream_head();
    let mut events = Events::new(chunked, limit);
    if !reply.dawdle(connection, &mut head).await {
        return Next::Close;
    }
    // The head goes out at once where there is something to wait for, else together with the first events.
    let now = engine.clock.now();
    let waits = limit == Some(0) || seat.started().is_none_or(|started| started.first_token_at > now);
    if waits && !connection.send(std::mem::take(&mut head)).await.0 {
        return Next::Close;
    }
    let started = connection
        .unless_gone(async {
            let started = poll_fn(|cx| seat.poll_started(cx)).await;
            note_start(engine, &started);
            engine.sleep_until(started.first_token_at).await;
            started
        })
        .await;
    let Some(started) = started else { return Next::Close };
    let mut text = Vec::new();
    let mut made = 0;
    wire.begin(&mut events, answer.usage(&started, 0));
    loop {
        let ready = rates.tokens_by(started.first_token_at, engine.clock.now()).min(plan.tokens);
        if ready > made {
            made = answer.make(engine, &seat, made, ready, &mut text, |word| {
                wire.token(&mut events, word);
                !events.cut()
            });
        }
        let last = made == plan.tokens;
        if last {
            let text = std::str::from_utf8(&text).expect("tokens are ASCII words");
            wire.end(&mut events, text, plan.finish, answer.usage(&started, made));
            events.finish();
        }
        if events.cut() {
            flight.settle(Outcome::Faulted);
            drop(seat);
            send(connection, &mut events, &mut head).await;
            return if reset { Next::Reset } else { Next::Close };
        }
        if last {
            flight.settle(Outcome::Completed);
            drop(seat);
            let sent = send(connection, &mut events, &mut head).await;
            return if sent && chunked { reply.next() } else { Next::Close };
        }
        if !send(connection, &mut events, &mut head).await {
            return Next::Close;
        }
        let next_at = rates.token_at(started.first_token_at, made);
        if connection.unless_gone(engine.sleep_until(next_at)).await.is_none() {
            return Next::Close;
        }
    }
}

/// Sends what has gathered, after a head that was kept back; `false`: the client has gone.
async fn send(connection: &mut Connection, events: &mut Events, head: &mut Vec<u8>) -> bool {
    if !head.is_empty() {
        events.prepend(head);
        head.clear();
    }
    let (sent, buffer) = connection.send(events.take()).await;
    events.reuse(buffer);
    sent
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(output_max: Option<u32>, output_min: u32, ignore_eos: bool) -> Ask {
        Ask { tokens: vec![0; 100], output_max, output_min, ignore_eos, ..Ask::default() }
    }

    #[test]
    fn an_answer_ends_by_itself_or_at_the_limit() {
        let plan = |ask: Ask| plan(&ask, 64, 1000).map(|plan| (plan.tokens, plan.finish)).ok();
        assert_eq!(plan(ask(None, 0, false)), Some((64, Finish::Stop)));
        assert_eq!(plan(ask(Some(64), 0, false)), Some((64, Finish::Stop)));
        assert_eq!(plan(ask(Some(63), 0, false)), Some((63, Finish::Length)));
        assert_eq!(plan(ask(Some(500), 0, false)), Some((64, Finish::Stop)));
        assert_eq!(plan(ask(Some(500), 0, true)), Some((500, Finish::Length)));
        assert_eq!(plan(ask(Some(500), 200, false)), Some((200, Finish::Stop)));
        assert_eq!(plan(ask(None, 0, true)), Some((900, Finish::Length)), "to the end of the context");
        assert_eq!(plan(ask(Some(900), 0, false)), Some((64, Finish::Stop)));
        assert_eq!(plan(ask(Some(901), 0, false)), None, "would not fit the context");
    }

    #[test]
    fn a_prompt_that_fills_the_context_is_refused_in_words() {
        let fault = plan(&ask(None, 0, false), 64, 100).expect_err("no room");
        assert_eq!(fault.status, 400);
        assert!(fault.message.contains("maximum context length is 100 tokens"), "{}", fault.message);
    }
}

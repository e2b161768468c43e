//! The measuring backend's side of one connection, without I/O: bytes in, things to do out.
//!
//! It answers as the recipe header of the request says, checks the request's body byte by byte, and knows the few paths
//! that routers ask on their own: `/health` and `/v1/models`.
//!
//! *Invariant*: one request at a time; a timer that belongs to an answer is obeyed only while that answer is open.
//! *Bound and cost*: a request costs one head parse and one comparison of its body; answers are built once per length and
//! shared. At most [`PIPELINE_BYTES_MAX`] of a request that comes before the last answer is out are kept.
//! *Errors*: what is wrong with a request is answered with 400 and the reason, counted, and the connection closed.

use std::collections::HashMap;
use std::sync::Arc;

use crate::http::{self, Framing};
use crate::payload::{self, Answer, Recipe};
use crate::prompts;

const PIPELINE_BYTES_MAX: usize = 1 << 20;
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Bytes to send: shared by many connections, or made for one.
#[derive(Clone, Debug)]
pub enum Payload {
    Shared(Arc<[u8]>),
    Owned(Vec<u8>),
    Fixed(&'static [u8]),
}

impl Payload {
    pub fn bytes(&self) -> &[u8] {
        match self {
            Payload::Shared(bytes) => bytes,
            Payload::Owned(bytes) => bytes,
            Payload::Fixed(bytes) => bytes,
        }
    }
}

/// What a connection wants done.
#[derive(Debug)]
pub enum Action {
    Send(Payload),
    /// Call [`ServerConnection::timer`] with `ticket` at `due_ns`.
    Timer {
        due_ns: u64,
        ticket: u64,
    },
    /// Close once everything has been sent.
    Close,
}

/// What all connections of the backend share.
#[derive(Debug)]
pub struct Backend {
    /// For requests without a recipe header; their bodies are not checked.
    default: Recipe,
    bodies: HashMap<(usize, bool, Option<u32>), Arc<[u8]>>,
    answers: HashMap<(usize, Option<u32>), Arc<[u8]>>,
    /// By conversation, the listener at which its last turn came in. Those that are over are forgotten.
    homes: HashMap<u32, u32>,
    pub counts: Counts,
}

/// What the backend has met.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    pub connections: u64,
    /// Requests answered by recipe.
    pub requests: u64,
    /// Requests of the router itself: health, models.
    pub housekeeping: u64,
    /// Requests refused because something was wrong with them.
    pub refused: u64,
    /// Connections that ended with a request or an answer unfinished.
    pub cut: u64,
    /// Turns of conversations other than the first, and how many of them came to the server that had the turn before.
    pub turns_later: u64,
    pub turns_at_home: u64,
    /// The last reason for a refusal.
    pub example: Option<String>,
}

impl Backend {
    pub fn new(default: Recipe) -> Backend {
        Backend {
            default,
            bodies: HashMap::new(),
            answers: HashMap::new(),
            homes: HashMap::new(),
            counts: Counts::default(),
        }
    }

    fn check(&mut self, recipe: &Recipe) -> Result<Check, String> {
        let (turn, number) = match recipe.answer {
            Answer::Chat { conversation, turn } => {
                (Some(turn), Some((prompts::number_at(recipe.body_len), prompts::digits(conversation))))
            }
            _ => (None, None),
        };
        let key = (recipe.body_len, recipe.streams(), turn);
        if let Some(body) = self.bodies.get(&key) {
            return Ok(Check { body: body.clone(), number });
        }
        let body: Arc<[u8]> = recipe.body()?.into();
        self.bodies.insert(key, body.clone());
        Ok(Check { body, number })
    }

    /// The whole answer to `recipe`, which is not a stream.
    fn answer(&mut self, recipe: &Recipe) -> Result<Arc<[u8]>, String> {
        let key = match recipe.answer {
            Answer::Json { len, .. } => (len, None),
            Answer::Chat { turn, .. } => (recipe.body_len, Some(turn)),
            Answer::Events { .. } => unreachable!("called for a JSON answer only"),
        };
        if let Some(answer) = self.answers.get(&key) {
            return Ok(answer.clone());
        }
        let body = match key {
            (len, None) => payload::answer_body(len)?,
            (size, Some(turn)) => prompts::answer_body(size, turn)?,
        };
        let answer: Arc<[u8]> = payload::response("200 OK", "application/json", &body).into();
        self.answers.insert(key, answer.clone());
        Ok(answer)
    }

    /// A turn of a conversation has come in at `listener`.
    fn count_turn(&mut self, conversation: u32, turn: u32, listener: u32) {
        let before = if turn + 1 < prompts::TURNS {
            self.homes.insert(conversation, listener)
        } else {
            self.homes.remove(&conversation)
        };
        if turn > 0 {
            self.counts.turns_later += 1;
            self.counts.turns_at_home += u64::from(before == Some(listener));
        }
    }
}

/// What a request's body must be.
#[derive(Debug)]
struct Check {
    body: Arc<[u8]>,
    /// Where other bytes than `body`'s must stand, and which.
    number: Option<(usize, [u8; 8])>,
}

impl Check {
    /// Whether `piece` is what must stand from `from` on.
    fn agrees(&self, from: usize, piece: &[u8]) -> bool {
        let to = from + piece.len();
        if to > self.body.len() {
            return false;
        }
        let Some((number_at, number)) = &self.number else { return &self.body[from..to] == piece };
        // The body around the number, and the number.
        let (start, end) = ((*number_at).clamp(from, to), (number_at + number.len()).clamp(from, to));
        self.body[from..start] == piece[..start - from]
            && self.body[end..to] == piece[end - from..]
            && piece[start - from..end - from].iter().zip(start..).all(|(&b, at)| number[at - number_at] == b)
    }
}

#[derive(Debug)]
enum Route {
    Recipe(Recipe),
    Health,
    Models,
    Unknown,
}

#[derive(Debug)]
enum State {
    Head,
    Body { framing: Framing, route: Route, check: Option<Check>, seen: usize, keep_alive: bool },
    Answering { recipe: Recipe, asked_ns: u64, next_event: u32, keep_alive: bool },
    Closed,
}

/// One accepted connection.
#[derive(Debug)]
pub struct ServerConnection {
    state: State,
    /// Which of the backend's listeners took it.
    listener: u32,
    /// Part of a head, or a request that came too early.
    partial: Vec<u8>,
    /// Timers set so far; a timer carries the count at its setting, and is stale when the count has moved on.
    ticket: u64,
}

impl ServerConnection {
    pub fn new(listener: u32) -> ServerConnection {
        ServerConnection { state: State::Head, listener, partial: Vec::new(), ticket: 0 }
    }

    /// Takes received bytes.
    pub fn feed(&mut self, input: &[u8], now_ns: u64, backend: &mut Backend, actions: &mut Vec<Action>) {
        if let Err(why) = self.step(input, now_ns, backend, actions) {
            self.refuse(&why, backend, actions);
        }
    }

    /// The peer has closed.
    pub fn end(&mut self, backend: &mut Backend) {
        match self.state {
            State::Head if self.partial.is_empty() => {}
            State::Closed => {}
            _ => backend.counts.cut += 1,
        }
        self.state = State::Closed;
    }

    fn refuse(&mut self, why: &str, backend: &mut Backend, actions: &mut Vec<Action>) {
        backend.counts.refused += 1;
        backend.counts.example = Some(why.to_owned());
        actions.push(Action::Send(Payload::Owned(payload::response(
            "400 Bad Request",
            "text/plain",
            why.as_bytes(),
        ))));
        actions.push(Action::Close);
        self.state = State::Closed;
    }

    fn step(
        &mut self,
        mut input: &[u8],
        now_ns: u64,
        backend: &mut Backend,
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        while !input.is_empty() {
            match &mut self.state {
                State::Closed => return Ok(()),
                State::Answering { .. } => {
                    if self.partial.len() + input.len() > PIPELINE_BYTES_MAX {
                        return Err(format!("more than {PIPELINE_BYTES_MAX} bytes sent ahead of the answer"));
                    }
                    self.partial.extend_from_slice(input);
                    return Ok(());
                }
                State::Head => {
                    let before = self.partial.len();
                    let parsed = if before == 0 {
                        http::request_head(input)
                    } else {
                        self.partial.extend_from_slice(input);
                        http::request_head(&self.partial)
                    };
                    let Some((head, length)) = parsed.map_err(|fault| fault.to_string())? else {
                        if before == 0 {
                            self.partial.extend_from_slice(input);
                        }
                        return Ok(());
                    };
                    self.partial.clear();
                    input = &input[length - before..];
                    self.open(head, backend, actions)?;
                    // A request without a body is whole already.
                    if matches!(self.state, State::Body { framing: Framing::Length(0), .. }) {
                        self.answer(now_ns, backend, actions)?;
                    }
                }
                State::Body { framing, check, seen, .. } => {
                    let mut wrong = None;
                    let (taken, done) = framing
                        .feed(input, &mut |piece| {
                            let end = *seen + piece.len();
                            if let Some(check) = check
                                && wrong.is_none()
                                && !check.agrees(*seen, piece)
                            {
                                wrong = Some(format!("request body differs within bytes {seen} to {end}"));
                            }
                            *seen = end;
                        })
                        .map_err(|fault| fault.to_string())?;
                    if let Some(why) = wrong {
                        return Err(why);
                    }
                    input = &input[taken..];
                    if done {
                        self.answer(now_ns, backend, actions)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn open(
        &mut self,
        head: http::RequestHead,
        backend: &mut Backend,
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        let (route, check) = match (head.method.as_str(), head.path.as_str(), head.recipe) {
            ("GET" | "HEAD", "/health", _) => (Route::Health, None),
            ("GET", "/v1/models", _) => (Route::Models, None),
            ("POST", _, Some(text)) => {
                let recipe = Recipe::parse(&text)?;
                let check = backend.check(&recipe)?;
                (Route::Recipe(recipe), Some(check))
            }
            ("POST", ..) => (Route::Recipe(backend.default), None),
            _ => (Route::Unknown, None),
        };
        if head.expect_continue {
            actions.push(Action::Send(Payload::Fixed(CONTINUE)));
        }
        self.state =
            State::Body { framing: head.framing, route, check, seen: 0, keep_alive: head.keep_alive };
        Ok(())
    }

    fn answer(
        &mut self,
        now_ns: u64,
        backend: &mut Backend,
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        let State::Body { route, check, seen, keep_alive, .. } =
            std::mem::replace(&mut self.state, State::Closed)
        else {
            unreachable!("called when a request has been read whole");
        };
        if let Some(check) = check.filter(|check| check.body.len() != seen) {
            return Err(format!("request body of {seen} bytes, expected {}", check.body.len()));
        }
        let housekeeping = |status, kind, text: &[u8]| Payload::Owned(payload::response(status, kind, text));
        let sent = match route {
            Route::Health => housekeeping("200 OK", "text/plain", b""),
            Route::Models => {
                let models = b"{\"object\":\"list\",\"data\":[{\"id\":\"perf\",\"object\":\"model\",\"owned_by\":\"perf\"}]}";
                housekeeping("200 OK", "application/json", models)
            }
            Route::Unknown => housekeeping("404 Not Found", "text/plain", b"not a path of this backend\n"),
            Route::Recipe(recipe) => {
                backend.counts.requests += 1;
                self.state = State::Answering { recipe, asked_ns: now_ns, next_event: 0, keep_alive };
                match recipe.answer {
                    Answer::Json { delay_ns: 0, .. } => return self.send_json(now_ns, backend, actions),
                    Answer::Chat { conversation, turn } => {
                        backend.count_turn(conversation, turn, self.listener);
                        return self.send_json(now_ns, backend, actions);
                    }
                    Answer::Json { delay_ns, .. } => self.set_timer(now_ns + delay_ns, actions),
                    Answer::Events { first_ns, .. } => {
                        actions.push(Action::Send(Payload::Fixed(payload::EVENTS_HEAD)));
                        self.set_timer(now_ns + first_ns, actions);
                    }
                }
                return Ok(());
            }
        };
        backend.counts.housekeeping += 1;
        actions.push(Action::Send(sent));
        self.finish(keep_alive, now_ns, backend, actions)
    }

    fn set_timer(&mut self, due_ns: u64, actions: &mut Vec<Action>) {
        self.ticket += 1;
        actions.push(Action::Timer { due_ns, ticket: self.ticket });
    }

    /// A timer has come due. `now_ns` is read afresh by the caller: it becomes the timestamp of what is sent.
    pub fn timer(&mut self, ticket: u64, now_ns: u64, backend: &mut Backend, actions: &mut Vec<Action>) {
        if ticket != self.ticket {
            return;
        }
        let State::Answering { recipe, asked_ns, next_event, keep_alive } = &mut self.state else { return };
        let done = match recipe.answer {
            Answer::Json { .. } | Answer::Chat { .. } => self.send_json(now_ns, backend, actions),
            Answer::Events { count, first_ns, every_ns } => {
                actions.push(Action::Send(Payload::Owned(payload::event_chunk(*next_event, now_ns))));
                *next_event += 1;
                if *next_event < count {
                    let due_ns = *asked_ns + first_ns + u64::from(*next_event) * every_ns;
                    self.set_timer(due_ns, actions);
                    Ok(())
                } else {
                    let keep_alive = *keep_alive;
                    actions.push(Action::Send(Payload::Owned(payload::done_chunks())));
                    self.finish(keep_alive, now_ns, backend, actions)
                }
            }
        };
        if let Err(why) = done {
            self.refuse(&why, backend, actions);
        }
    }

    fn send_json(
        &mut self,
        now_ns: u64,
        backend: &mut Backend,
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        let State::Answering { recipe, keep_alive, .. } = self.state else {
            unreachable!("called when an answer is due");
        };
        let answer = backend.answer(&recipe)?;
        actions.push(Action::Send(Payload::Shared(answer)));
        self.finish(keep_alive, now_ns, backend, actions)
    }

    fn finish(
        &mut self,
        keep_alive: bool,
        now_ns: u64,
        backend: &mut Backend,
        actions: &mut Vec<Action>,
    ) -> Result<(), String> {
        if !keep_alive {
            actions.push(Action::Close);
            self.state = State::Closed;
            return Ok(());
        }
        self.state = State::Head;
        let early = std::mem::take(&mut self.partial);
        if early.is_empty() {
            return Ok(());
        }
        self.step(&early, now_ns, backend, actions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::{AnswerReader, Expect, Progress};

    const RECIPE: Recipe = Recipe { body_len: 300, answer: Answer::Json { len: 512, delay_ns: 0 } };

    fn backend() -> Backend {
        Backend::new(RECIPE)
    }

    fn sent(actions: &[Action]) -> Vec<u8> {
        let mut all = Vec::new();
        for action in actions {
            if let Action::Send(payload) = action {
                all.extend_from_slice(payload.bytes());
            }
        }
        all
    }

    fn closes(actions: &[Action]) -> bool {
        actions.iter().any(|action| matches!(action, Action::Close))
    }

    #[test]
    fn answers_the_recipe_in_every_split() {
        let wire = payload::request("h", "/v1/chat/completions", &RECIPE, &[]).expect("fits");
        let expected =
            payload::response("200 OK", "application/json", &payload::answer_body(512).expect("fits"));
        for cut in 0..=wire.len() {
            let (mut b, mut c, mut actions) = (backend(), ServerConnection::new(0), Vec::new());
            c.feed(&wire[..cut], 1, &mut b, &mut actions);
            c.feed(&wire[cut..], 2, &mut b, &mut actions);
            assert_eq!(sent(&actions), expected, "cut {cut}");
            assert_eq!((b.counts.requests, b.counts.refused), (1, 0));
        }
    }

    #[test]
    fn pipelined_requests_are_answered_in_order() {
        let slow = Recipe { answer: Answer::Json { len: 600, delay_ns: 5_000 }, ..RECIPE };
        let wire = [
            payload::request("h", "/", &slow, &[]).expect("fits"),
            payload::request("h", "/", &RECIPE, &[]).expect("fits"),
        ]
        .concat();
        let (mut b, mut c, mut actions) = (backend(), ServerConnection::new(0), Vec::new());
        c.feed(&wire, 100, &mut b, &mut actions);
        let [Action::Timer { due_ns: 5_100, ticket }] = actions[..] else {
            panic!("a timer and no answer yet")
        };
        actions.clear();
        c.timer(ticket, 5_100, &mut b, &mut actions);
        let answer =
            |n| payload::response("200 OK", "application/json", &payload::answer_body(n).expect("fits"));
        assert_eq!(sent(&actions), [answer(600), answer(512)].concat());
        actions.clear();
        c.timer(ticket, 5_101, &mut b, &mut actions);
        assert!(actions.is_empty(), "a stale timer does nothing");
    }

    #[test]
    fn a_changed_request_body_is_refused() {
        let whole = payload::request("h", "/", &RECIPE, &[]).expect("fits");
        let mut altered = whole.clone();
        let at = altered.len() - 50;
        altered[at] ^= 1;
        let shorter =
            String::from_utf8(whole).expect("ascii").replace("Content-Length: 300", "Content-Length: 299");
        for wire in [altered, shorter.into_bytes()] {
            let (mut b, mut c, mut actions) = (backend(), ServerConnection::new(0), Vec::new());
            c.feed(&wire, 1, &mut b, &mut actions);
            assert!(sent(&actions).starts_with(b"HTTP/1.1 400 ") && closes(&actions));
            assert_eq!((b.counts.requests, b.counts.refused), (0, 1));
            assert!(b.counts.example.expect("kept").contains("request body"));
        }
    }

    #[test]
    fn conversations_are_checked_number_and_all_in_every_split() {
        let recipe = Recipe { body_len: 1024, answer: Answer::Chat { conversation: 0, turn: 1 } };
        let script = Arc::new(prompts::Script::new("h", "/", 1024).expect("fits"));
        let mut talks = prompts::Talks::new(&script, 1);
        let wire = loop {
            let (talk, wire, turn) = talks.draw();
            talks.put_back(talk);
            if turn == 1 {
                break wire;
            }
        };
        let expected =
            payload::response("200 OK", "application/json", &prompts::answer_body(1024, 1).expect("fits"));
        for cut in 0..=wire.len() {
            let (mut b, mut c, mut actions) = (backend(), ServerConnection::new(0), Vec::new());
            c.feed(&wire[..cut], 1, &mut b, &mut actions);
            c.feed(&wire[cut..], 2, &mut b, &mut actions);
            assert_eq!(sent(&actions), expected, "cut {cut}: {:?}", b.counts.example);
        }
        let body_at = wire.len() - recipe.body().expect("fits").len();
        for at in body_at..wire.len() {
            let mut altered = wire.to_vec();
            altered[at] ^= 1;
            let (mut b, mut c, mut actions) = (backend(), ServerConnection::new(0), Vec::new());
            c.feed(&altered, 1, &mut b, &mut actions);
            assert_eq!((b.counts.requests, b.counts.refused), (0, 1), "byte {at}");
        }
    }

    #[test]
    fn turns_that_come_to_the_server_of_the_last_are_counted() {
        let script = Arc::new(prompts::Script::new("h", "/", 1024).expect("fits"));
        // Of two talks, one is kept back.
        let mut talks = prompts::Talks::new(&script, 1);
        let (_kept, ..) = talks.draw();
        let mut b = backend();
        let mut counts = Vec::new();
        // Two conversations: one at server 1 all the time, one that goes to the other for its third turn and stays there.
        for listener in [1, 1, 1, 1, 0, 0, 1, 1] {
            let (mut c, mut actions) = (ServerConnection::new(listener), Vec::new());
            let (talk, request, _) = talks.draw();
            talks.put_back(talk);
            c.feed(&request, 1, &mut b, &mut actions);
            counts.push((b.counts.turns_later, b.counts.turns_at_home));
        }
        assert_eq!(counts, [(0, 0), (1, 1), (2, 2), (3, 3), (3, 3), (4, 4), (5, 4), (6, 5)]);
        assert!(b.homes.is_empty(), "what is over is forgotten");
    }

    #[test]
    fn a_stream_is_sent_event_by_event_on_its_schedule() {
        let recipe = Recipe {
            body_len: 300,
            answer: Answer::Events { count: 3, first_ns: 50_000, every_ns: 100_000 },
        };
        let wire = payload::request("h", "/", &recipe, &[]).expect("fits");
        let (mut b, mut c, mut actions) = (backend(), ServerConnection::new(0), Vec::new());
        c.feed(&wire, 1_000, &mut b, &mut actions);
        let mut all = sent(&actions);
        let mut dues = Vec::new();
        while let Some(&Action::Timer { due_ns, ticket }) =
            actions.iter().find(|action| matches!(action, Action::Timer { .. }))
        {
            dues.push(due_ns);
            actions.clear();
            c.timer(ticket, due_ns + 7, &mut b, &mut actions);
            all.extend(sent(&actions));
        }
        assert_eq!(dues, [51_000, 151_000, 251_000]);
        let mut times = Vec::new();
        let progress = AnswerReader::new()
            .feed(&all, &Expect::Events(3), &mut |a| times.push(a.sent_ns.expect("stamped")))
            .expect("a good answer");
        assert_eq!(progress, Progress::Done { keep_alive: true });
        assert_eq!(times, [51_007, 151_007, 251_007], "the stamp is the send time, not the due time");
    }

    #[test]
    fn housekeeping_paths() {
        for (wire, part, count) in [
            ("GET /health HTTP/1.1\r\nHost: a\r\n\r\n", "200 OK", 1),
            ("GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", "\"id\":\"perf\"", 1),
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", "404 Not Found", 1),
        ] {
            let (mut b, mut c, mut actions) = (backend(), ServerConnection::new(0), Vec::new());
            c.feed(wire.as_bytes(), 1, &mut b, &mut actions);
            assert!(String::from_utf8_lossy(&sent(&actions)).contains(part), "{wire}");
            assert_eq!((b.counts.housekeeping, b.counts.requests), (count, 0));
            assert!(!closes(&actions));
        }
    }

    #[test]
    fn close_is_honoured_and_cuts_are_counted() {
        let wire = "GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let (mut b, mut c, mut actions) = (backend(), ServerConnection::new(0), Vec::new());
        c.feed(wire.as_bytes(), 1, &mut b, &mut actions);
        assert!(closes(&actions));
        c.end(&mut b);
        assert_eq!(b.counts.cut, 0);
        let mut c = ServerConnection::new(0);
        c.feed(b"POST / HTTP/1.1\r\n", 1, &mut b, &mut actions);
        c.end(&mut b);
        assert_eq!(b.counts.cut, 1);
    }
}

"""Routing by what the engines hold: kv-aware and sticky-session, with engines that really cache.

What the router believes (X-Lifeboat-Prefix-Blocks, its metrics) is held against what the engines
report. The prompts of each check begin with that check's own words and a number of this run.
"""

import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import wire
from .processes import CONTEXT_PER_SLOT, SLOTS
from .report import Failed, check, expect, require

BLOCK_BYTES = 256
# What a prompt's token is taken to be before any was measured; the router's own figure.
BYTES_PER_TOKEN = 4
# The router asks an engine for its size and counters every 15 s.
SCRAPE_WAIT_S = 40.0
RUN = os.urandom(4).hex()


def text(about: str, size: int) -> str:
    """`size` bytes that begin like no other text of this run or another."""
    words = "%s of run %s. " % (about, RUN)
    number = 0
    while len(words) < size:
        words += "Item %d of %s is fine and stays where it was put. " % (number, about)
        number += 1
    return words[:size]


def kv(router: Any, engine: str) -> Dict[str, Any]:
    """What the admin API says of a server's prefix memory."""
    return router.servers()[engine]["kv"]


def counter(router: Any, name: str, engine: str) -> float:
    body = wire.call(router.admin_url, "GET", "/metrics").body.decode()
    found = re.search(r'^%s\{[^}]*server="%s"[^}]*\} (\S+)$' % (re.escape(name), re.escape(engine)), body, re.M)
    return float(found[1]) if found else 0.0


def matched(header: Optional[str]) -> Tuple[int, int]:
    """X-Lifeboat-Prefix-Blocks as two numbers."""
    found = re.fullmatch(r"(\d+)/(\d+)", header or "")
    if not found:
        raise Failed("expected X-Lifeboat-Prefix-Blocks: matched/total, got %r" % header)
    return int(found[1]), int(found[2])


def wait_for(what: str, holds: Callable[[], Any], seconds: float, every: float = 0.1) -> float:
    """Seconds until `holds()` is true; `what` is what failed to come about."""
    started = time.monotonic()
    seen = None
    while time.monotonic() - started < seconds:
        seen = holds()
        if seen:
            return time.monotonic() - started
        time.sleep(every)
    raise Failed("%s within %g s (last seen: %r)" % (what, seconds, seen))


@check("kv-aware: the engines' cache size is read", needs_router=True)
def cache_size(run: Any) -> str:
    sizes = []
    for engine in (run.a, run.b):
        slots = wire.fetch(engine.url, "/slots")
        expect("slots of engine %s and their tokens" % engine.name, [slot["n_ctx"] for slot in slots], [CONTEXT_PER_SLOT] * SLOTS)
        wait_for("engine %s's cache size was not read" % engine.name, lambda: kv(run.kv_router, engine.name)["capacity_source"] == "engine", SCRAPE_WAIT_S)
        seen = kv(run.kv_router, engine.name)["capacity_blocks"]
        expect("blocks of engine %s" % engine.name, seen, SLOTS * CONTEXT_PER_SLOT * BYTES_PER_TOKEN // BLOCK_BYTES)
        sizes.append(seen)
    return "%d slots of %d tokens are %d blocks of %d bytes" % (SLOTS, CONTEXT_PER_SLOT, sizes[0], BLOCK_BYTES)


@dataclass
class Turn:
    """What one turn of a conversation came to."""

    server: str
    algorithm: str
    matched: int
    total: int
    prompt_tokens: int
    cached_tokens: int
    said: str


def ask(run: Any, messages: List[dict], streamed: bool, answer: str) -> Turn:
    """One turn through the kv-aware router, with the OpenAI SDK."""
    request = dict(model=run.model, messages=messages, max_tokens=30, temperature=0, extra_body={"grammar": 'root ::= "%s"' % answer})
    completions = run.openai(run.kv_router.url).chat.completions
    if streamed:
        stream = completions.create(stream=True, stream_options={"include_usage": True}, **request)
        headers = stream.response.headers
        chunks = list(stream)
        usage = chunks[-1].usage
        said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    else:
        raw = completions.with_raw_response.create(**request)
        headers, parsed = raw.headers, raw.parse()
        usage, said = parsed.usage, parsed.choices[0].message.content
    known, total = matched(headers.get("x-lifeboat-prefix-blocks"))
    cached = usage.prompt_tokens_details.cached_tokens
    return Turn(headers["x-lifeboat-server"], headers["x-lifeboat-algorithm"], known, total, usage.prompt_tokens, cached, said)


def converse(run: Any, about: str, streams: List[bool]) -> List[Turn]:
    """A conversation of as many turns, each of which resends all before it."""
    messages: List[dict] = [{"role": "system", "content": text(about, 1500)}]
    turns: List[Turn] = []
    for number, streamed in enumerate(streams, 1):
        messages.append({"role": "user", "content": text("question %d about %s" % (number, about), 500)})
        turn = ask(run, messages, streamed, "answer number %d is short" % number)
        messages.append({"role": "assistant", "content": turn.said})
        turns.append(turn)
    return turns


@check("kv-aware: a chat's turns, plain and streamed", needs_router=True)
def turns(run: Any) -> str:
    shown = []
    for about, streams in (("the first chat", [False, True, False, True]), ("one more chat, the second", [True, True, False, False])):
        before = {engine: figures(run.kv_router, engine) for engine in ("a", "b")}
        seen = converse(run, about, streams)
        server = seen[0].server
        line = ", ".join("%d/%d (%d of %d tokens)" % (turn.matched, turn.total, turn.cached_tokens, turn.prompt_tokens) for turn in seen)
        # The first turn finds nothing, and is spread as by the default algorithm.
        expect("first turn: matched blocks and algorithm", (seen[0].matched, seen[0].algorithm), (0, "weighted-round-robin"))
        for number, (earlier, turn) in enumerate(zip(seen, seen[1:]), 2):
            where = "turn %d of %s" % (number, line)
            expect(where + ": server and algorithm", (turn.server, turn.algorithm), (server, "kv-aware"))
            expect(where + ": matched blocks are all of the turn before", turn.matched, earlier.total)
            require(turn.total > earlier.total, where + ": expected more blocks than the turn before")
            # The engine holds what it was sent, but for a few tokens that its template ends a prompt with.
            require(turn.cached_tokens >= earlier.prompt_tokens - 8, where + ": expected the turn before to be cached in the engine")
        # Shards tell what they counted a few times a second.
        whole = sum(turn.prompt_tokens for turn in seen)
        wait_for("%d prompt tokens were not counted for %s" % (whole, server), lambda: figures(run.kv_router, server)[0] - before[server][0] >= whole, 5)
        deltas = {engine: [now - then for now, then in zip(figures(run.kv_router, engine), before[engine])] for engine in before}
        prompt, cached, predicted = deltas[server]
        expect("tokens counted for the server that was not asked", deltas["b" if server == "a" else "a"], [0, 0, 0])
        expect("prompt tokens counted", prompt, whole)
        expect("cached tokens counted", cached, sum(turn.cached_tokens for turn in seen))
        # Whole blocks are foretold, so less than there is; a block is some 60 of these 400 to 1000 tokens.
        require(0.8 * cached <= predicted <= 1.05 * cached, "expected about %d cached tokens to be foretold, got %d" % (cached, predicted))
        shown.append("%s at %s: %s; foretold %d, cached %d" % (about, server, line, predicted, cached))
    return "; ".join(shown)


def figures(router: Any, engine: str) -> Tuple[float, float, float]:
    """Prompt tokens that an engine reported, cached ones of them, and how many were foretold."""
    names = ("ringway_reported_prompt_tokens_total", "ringway_reported_cached_tokens_total", "ringway_predicted_cached_tokens_total")
    prompt, cached, predicted = (counter(router, name, engine) for name in names)
    return prompt, cached, predicted


# Whether the framing's end comes in the same read is chance: some of so many are closed before it.
CLOSED_STREAMS = 60


@check("kv-aware: reports of streams closed at [DONE]", needs_router=True)
def closed_at_done(run: Any) -> str:
    # SDKs stop reading at [DONE] and may close before the last chunk of the framing has come. The
    # engine's report stands before [DONE], so whoever has read that far has made the router see it.
    total = lambda: sum(counter(run.kv_router, "ringway_reported_prompt_tokens_total", engine) for engine in ("a", "b"))  # noqa: E731
    before, expected, early = total(), 0, 0
    for number in range(CLOSED_STREAMS):
        body = {"model": run.model, "messages": [{"role": "user", "content": "Say %d." % number}], "max_tokens": 2, "temperature": 0, "stream": True}
        with wire.Call(run.kv_router.url, "POST", "/v1/chat/completions", dict(body, stream_options={"include_usage": True})) as call:
            answer, came = call.head(), b""
            expect("status", answer.status, 200)
            for _, piece in call.pieces(answer):
                came += piece
                if came.endswith(b"data: [DONE]\n\n"):
                    break
        early += not answer.complete
        expected += int(re.search(rb'"prompt_tokens":(\d+)', came)[1])
    counted = lambda: total() - before >= expected  # noqa: E731
    try:
        wait_for("not counted", counted, 5)
    except Failed:
        raise Failed("%d prompt tokens were reported in %d streams, %d of them closed at [DONE] before the framing's end; counted: %d" % (
            expected, CLOSED_STREAMS, early, total() - before,
        )) from None  # fmt: skip
    expect("prompt tokens counted", total() - before, expected)
    return "%d streams, %d closed before the framing's end, all %d prompt tokens counted" % (CLOSED_STREAMS, early, expected)


EXPERIMENT_TIMEOUT_S = 1800
# Of 45 requests, 9 meet a prompt for the first time: 80 % is the most.
REUSE_PERCENT_MIN = 78.0
BUSIER_MAX = 25
ROW = re.compile(r"^ *(weighted-round-robin|kv-aware), (in turn|shuffled)((?:, 4 at once)?) +(\d+) / (\d+) +(\d+\.\d) %$", re.M)


@check("kv-aware: nine prompts, caches for five each", needs_router=True)
def nine_prompts(run: Any) -> str:
    command = [str(run.ringway), "demo", "--experiment", "kv-reuse"]
    for engine in (run.a, run.b):
        command += ["--backend", engine.url]
    # It ends its router itself when told to end.
    process = run.processes.spawn("experiment", command, stdout=subprocess.PIPE, at_our_death=signal.SIGTERM)
    try:
        told = process.communicate(timeout=EXPERIMENT_TIMEOUT_S)[0].decode()
    except subprocess.TimeoutExpired:
        raise Failed("not done within %g s:\n%s" % (EXPERIMENT_TIMEOUT_S, run.processes.log_end("experiment"))) from None
    finally:
        run.processes.stop(process)
    rows = {(name, order, more): (int(one), int(two), float(reuse)) for name, order, more, one, two, reuse in ROW.findall(told)}
    require(len(rows) == 6, "expected a table of six rows, got:\n%s\n%s" % (told, run.processes.log_end("experiment")))
    for order in ("in turn", "shuffled"):
        one, two, reuse = rows["kv-aware", order, ""]
        require(reuse >= REUSE_PERCENT_MIN and max(one, two) <= BUSIER_MAX, "kv-aware, %s: %d / %d, %.1f %% reused; at least %g %% and at most %d were expected\n%s" % (
            order, one, two, reuse, REUSE_PERCENT_MIN, BUSIER_MAX, told,
        ))  # fmt: skip
        blind = rows["weighted-round-robin", order, ""][2]
        require(blind < reuse, "weighted-round-robin, %s: %.1f %% reused; the engines' caches hold too much for a comparison\n%s" % (order, blind, told))
    expect("exit code", process.returncode, 0)
    return "; ".join("%s, %s%s: %d / %d, %.1f %%" % (*key, *row) for key, row in rows.items())


@dataclass
class Asked:
    """One request of the load around a kill; times by the monotonic clock."""

    started: float
    ended: float
    what: str
    server: Optional[str]
    algorithm: Optional[str]
    key: Optional[str]
    fault: str


def send(base: str, model: str, what: str, prompt: str, session: str = "") -> Asked:
    """One short completion, told apart by `what`."""
    started = time.monotonic()
    headers = {"X-Lifeboat-Session-Id": session} if session else {}
    body = {"model": model, "prompt": prompt, "max_tokens": 3, "temperature": 0}
    try:
        answer = wire.call(base, "POST", "/v1/completions", body, headers, timeout=60)
        whole = answer.complete and answer.status == 200 and answer.json()["usage"]["completion_tokens"] >= 1
        fault = "" if whole else "complete: %s, %s, %s" % (answer.complete, answer.header("x-lifeboat-reject-reason"), answer)
        pick = [answer.header("x-lifeboat-" + name) for name in ("server", "algorithm", "sticky-key")]
    except (OSError, wire.WireError, KeyError) as error:
        fault, pick = "%s: %s" % (type(error).__name__, error), [None, None, None]
    return Asked(started, time.monotonic(), what, *pick, fault)


# Enough that not all have the same server as home.
SESSIONS = 16


class Rounds:
    """Clients that ask in turn, each for one router, until told to stop."""

    def __init__(self, run: Any):
        self.asked: List[Asked] = []
        self.stopping = threading.Event()
        self.sessions = ["session %d of %s" % (number, RUN) for number in range(SESSIONS)]
        prompts = [text("load prompt %d" % number, 600) for number in range(8)]
        kinds: List[Tuple[str, Callable[[int], Asked]]] = [
            ("kv", lambda at: send(run.kv_router.url, run.model, "kv", prompts[at % len(prompts)])),
            ("sticky", self._ask_sticky),
        ]
        self.threads = [threading.Thread(target=self._work, args=(one, first), daemon=True) for _, one in kinds for first in (0, 4)]
        self.sticky_url, self.model = run.sticky_router.url, run.model

    def _ask_sticky(self, at: int) -> Asked:
        session = self.sessions[at % len(self.sessions)]
        return send(self.sticky_url, self.model, session, "One,", session)

    def _work(self, one: Callable[[int], Asked], at: int) -> None:
        while not self.stopping.is_set():
            self.asked.append(one(at))
            at += 1

    def __enter__(self) -> "Rounds":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(timeout=70)

    def count(self, since: float, holds: Callable[[Asked], bool]) -> int:
        return sum(1 for one in list(self.asked) if one.started > since and holds(one))


OUTAGE_S = 6.0


@check("kv-aware and sticky: an engine is killed and comes back", needs_router=True)
def killed(run: Any) -> str:
    is_kv = lambda one: one.what == "kv"  # noqa: E731
    with Rounds(run) as load:
        # Every session and every prompt was asked, in both servers' turns.
        settled = lambda: all(load.count(0, lambda one: one.what == session) for session in load.sessions) and load.count(0, is_kv) >= 24  # noqa: E731
        wait_for("the load did not get going", settled, 120)
        killed_at = time.monotonic()
        run.b.kill()
        dead_at = time.monotonic()
        outage = lambda: time.monotonic() > dead_at + OUTAGE_S and all(load.count(dead_at, lambda one: one.what == name) for name in ["kv", *load.sessions])  # noqa: E731
        wait_for("the other engine did not answer on", outage, 120)
        revived_at = time.monotonic()
        run.b.start()
        run.b.wait_healthy()
        wait_for("engine b was not taken up again", lambda: all(router.servers()["b"]["state"] == "up" for router in (run.kv_router, run.sticky_router)), 30)
        up_at = time.monotonic()
        again = lambda: all(load.count(up_at, lambda one: one.what == session) for session in load.sessions)  # noqa: E731
        wait_for("the sessions were not asked again", again, 120)
    # What was under way: began before it was dead and ended after it was killed.
    lost = [one for one in load.asked if one.fault]
    for one in lost:
        under_way = one.started <= dead_at and one.ended >= killed_at
        require(under_way, "failed, though not under way at the kill: started %+.3f s, ended %+.3f s after it: %s" % (one.started - killed_at, one.ended - killed_at, one))
    answered = [one for one in load.asked if not one.fault]
    # Up to the restart there is only one that can answer.
    expect("servers that answered meanwhile", {one.server for one in answered if dead_at < one.started and one.ended < revived_at}, {"a"})
    homes: Dict[str, List[Optional[str]]] = {}
    for session in load.sessions:
        of_it = [one for one in answered if one.what == session]
        expect("digests of %s" % session, len({one.key for one in of_it}), 1)
        before = {one.server for one in of_it if one.ended < killed_at}
        require(len(before) == 1, "%s was served by %s before the kill" % (session, before))
        home = before.pop()
        homes.setdefault(home, []).append(session)
        fallen = {one.algorithm for one in of_it if dead_at < one.started and one.ended < revived_at}
        expect("algorithm meanwhile of %s, at home on %s" % (session, home), fallen, {"least-connections" if home == "b" else "sticky-session"})
        expect("server of %s after the return" % session, {one.server for one in of_it if one.started > up_at}, {home})
    require(len(homes) == 2, "%d sessions were expected to have both servers as home, got %s" % (SESSIONS, homes))
    restore(run)
    return "%d of %d requests failed, all under way at the kill; %d of %d sessions went from b to a and back; b dead for %.1f s" % (
        len(lost), len(load.asked), len(homes["b"]), SESSIONS, up_at - dead_at,
    )  # fmt: skip


def restore(run: Any) -> None:
    """Until every router uses engine b again."""
    for router in (run.router, run.kv_router, run.sticky_router):
        wait_for("router %s did not take up engine b again" % router.name, lambda: router.servers()["b"]["state"] == "up", 30)


@check("kv-aware: a restart too short to notice is forgotten", needs_router=True)
def forgotten(run: Any) -> str:
    """kill -9 and a start at once: health checks may not see it, the engine's counters tell."""
    run.wait_idle()
    # One that engine b holds: new prompts take turns.
    for number in range(8):
        messages = [{"role": "user", "content": text("matter %d that is to be lost" % number, 1400)}]
        first = ask(run, messages, False, "yes")
        if first.server == "b":
            break
    expect("the server of one of eight new prompts", first.server, "b")
    warm = ask(run, messages, False, "yes")
    expect("server and matched blocks, second time", (warm.server, warm.matched), ("b", first.total))
    require(warm.cached_tokens > 0.8 * warm.prompt_tokens, "expected most of %d tokens to be cached, got %d" % (warm.prompt_tokens, warm.cached_tokens))
    wait_for("the engine's counters were not read", lambda: kv(run.kv_router, "b")["memory_blocks"] > 0, 5)
    # The router has to have seen a counter that can go back.
    time.sleep(16)
    run.b.kill()
    run.b.start()
    run.b.wait_healthy()
    took = wait_for("engine b's memory did not start empty", lambda: kv(run.kv_router, "b")["memory_blocks"] == 0, SCRAPE_WAIT_S)
    other = kv(run.kv_router, "a")["memory_blocks"]
    require(other > 0, "engine a's memory is empty too")
    restore(run)
    cold = ask(run, messages, False, "yes")
    expect("matched blocks after the restart", (cold.matched, cold.total), (0, first.total))
    require(cold.cached_tokens < 0.2 * cold.prompt_tokens, "expected next to nothing to be cached, got %d of %d" % (cold.cached_tokens, cold.prompt_tokens))
    return "%d/%d blocks and %d of %d tokens before, %d/%d and %d after; forgotten %.1f s after the engine was back" % (
        warm.matched, warm.total, warm.cached_tokens, warm.prompt_tokens, cold.matched, cold.total, cold.cached_tokens, took,
    )  # fmt: skip

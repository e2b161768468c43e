"""What goes wrong in a long run: connections that grow stale, engines that die, a router that stops."""

import asyncio
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import httpx
import httpx2
import openai

from . import wire
from .report import Failed, check, expect, require

# What a broken stream raises from below the SDKs.
HTTP_ERRORS = (httpx.HTTPError, httpx2.HTTPError)
KEEPALIVE_REQUESTS = 300
KEEPALIVE_SECONDS_MAX = 90.0
# A generation takes seconds on a machine that is busy otherwise; from then on, only small requests.
GENERATE_UNTIL_S = 45.0
# After which request to pause how long. The engines close a connection after 5 s without a request
# and after 100 requests: the first three pauses aim at the very moment of that close.
PAUSES_S = {40: 4.99, 90: 5.0, 150: 5.01, 210: 6.0}


@check("300 requests over the engines' keep-alive limits")
def keepalive(run: Any) -> str:
    client = run.openai()
    started = time.monotonic()
    failures: List[str] = []
    generated = 0
    # httpx closes its own idle connections after 5 s: with this it leaves that to the other side.
    limits = httpx.Limits(keepalive_expiry=60)
    with httpx.Client(base_url=run.front, limits=limits, timeout=30) as plain:
        for number in range(1, KEEPALIVE_REQUESTS + 1):
            try:
                if number % 5 == 0 and time.monotonic() - started < GENERATE_UNTIL_S:
                    answer = client.completions.create(model=run.model, prompt="One,", max_tokens=1, temperature=0)
                    expect("completion tokens", answer.usage.completion_tokens, 1)
                    generated += 1
                else:
                    # Takes no time in the engine, and is a POST like any other on the way there.
                    tokens = plain.post("/tokenize", json={"content": "word " * number})
                    expect("status", tokens.status_code, 200)
                    require(len(tokens.json()["tokens"]) >= number, "expected at least %d tokens, got %s" % (number, tokens.text[:200]))
            except (openai.OpenAIError, httpx.HTTPError, Failed) as error:
                failures.append("request %d, %.1f s in: %s: %s" % (number, time.monotonic() - started, type(error).__name__, error))
            if number in PAUSES_S:
                time.sleep(PAUSES_S[number])
            if time.monotonic() - started > KEEPALIVE_SECONDS_MAX:
                failures.append("only %d of %d requests within %g s" % (number, KEEPALIVE_REQUESTS, KEEPALIVE_SECONDS_MAX))
                break
    require(not failures, "%d failures:\n%s" % (len(failures), "\n".join(failures[:10])))
    pauses = ", ".join("%g" % pause for pause in PAUSES_S.values())
    return "0 failures in %.0f s, %d generations, pauses of %s s" % (time.monotonic() - started, generated, pauses)


STREAMS = 60


@check("streams back to back: the engine closes after each", needs_router=True)
def back_to_back(run: Any) -> str:
    # llama.cpp says `Keep-Alive: timeout=5, max=100` in the head of a stream, and closes the
    # connection a few milliseconds after its end. Who sends the next request on it meanwhile loses
    # that request: the engine reads it and throws it away. So each stream here begins the moment
    # the one before has ended, on one connection to a router with one engine for the model.
    body = {"model": run.model, "prompt": "One,", "max_tokens": 2, "temperature": 0, "stream": True}
    failures: List[str] = []
    connection = None
    for number in range(1, STREAMS + 1):
        call = wire.Call(run.pinned, "POST", "/v1/completions", body, over=connection)
        answer = call.head()
        answer.body = b"".join(piece for _, piece in call.pieces(answer))
        if answer.status != 200 or not answer.complete or not answer.body.endswith(b"data: [DONE]\n\n"):
            failures.append("stream %d, complete: %s: %s" % (number, answer.complete, answer))
        connection = call.socket
        if not answer.complete or (answer.header("connection") or "").lower() == "close":
            connection.close()
            connection = None
    if connection is not None:
        connection.close()
    require(not failures, "%d of %d streams failed:\n%s" % (len(failures), STREAMS, "\n".join(failures[:10])))
    return "%d streams, 0 failures" % STREAMS


@dataclass
class Request:
    """One request of the load around a kill; times by the monotonic clock."""

    started: float
    streamed: bool
    server: Optional[str] = None
    ended: float = 0.0
    error: str = ""
    # The router's own refusal, as (status, X-Lifeboat-Reject-Reason).
    refusal: Optional[Tuple[int, Optional[str]]] = None
    silent: str = ""


ANSWER = "one two three four five six seven"
AFTER_KILL_S = 6.0
AFTER_KILL_REQUESTS = 12


class Load:
    """Six clients, each asking again as soon as it was answered, half of them with streams."""

    def __init__(self, run: Any):
        self.run = run
        self.requests: List[Request] = []
        self.killed_at: Optional[float] = None
        self.kill_ended_at: Optional[float] = None

    def start(self) -> None:
        """Runs until enough was asked after the kill."""
        asyncio.run(self._all())

    def later(self) -> List[Request]:
        """The requests that started when the engine was dead."""
        return [one for one in self.requests if self.kill_ended_at is not None and one.started > self.kill_ended_at]

    def _goes_on(self, began: float) -> bool:
        if self.kill_ended_at is None:
            return time.monotonic() < began + 60
        after = time.monotonic() - self.kill_ended_at
        # Long enough for health checks to have seen it and for any bench to have ended and begun anew.
        return after < AFTER_KILL_S or (len(self.later()) < AFTER_KILL_REQUESTS and after < 60)

    async def _all(self) -> None:
        async with self.run.openai(asynchronous=True) as client:
            await asyncio.gather(*(self._client(client, number % 2 == 0) for number in range(6)))
        if self.kill_ended_at is None:
            raise Failed("no stream of engine b came far enough to kill it meanwhile; %d requests went to: %s" % (len(self.requests), self._servers()))

    def _servers(self) -> Dict[Optional[str], int]:
        names = [request.server for request in self.requests]
        return {name: names.count(name) for name in set(names)}

    async def _client(self, client: Any, streamed: bool) -> None:
        began = time.monotonic()
        while self._goes_on(began):
            request = Request(time.monotonic(), streamed)
            self.requests.append(request)
            try:
                text = await self._ask(client, request)
                if text != ANSWER:
                    # The worst of all: cut off, and nothing told the client.
                    request.silent = "ended without an error after %r" % text
            except (openai.OpenAIError, *HTTP_ERRORS) as error:
                request.error = "%s: %s" % (type(error).__name__, error)
                if isinstance(error, openai.APIStatusError):
                    request.refusal = (error.status_code, error.response.headers.get("x-lifeboat-reject-reason"))
            request.ended = time.monotonic()

    async def _ask(self, client: Any, request: Request) -> str:
        body = dict(model=self.run.model, messages=[{"role": "user", "content": "Count."}], max_tokens=60, temperature=0)
        body["extra_body"] = {"grammar": 'root ::= "%s"' % ANSWER}
        if not request.streamed:
            raw = await client.chat.completions.with_raw_response.create(**body)
            request.server = raw.headers.get("x-lifeboat-server")
            return raw.parse().choices[0].message.content
        stream = await client.chat.completions.create(stream=True, **body)
        request.server = stream.response.headers.get("x-lifeboat-server")
        text = ""
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            answered = sum(1 for other in self.requests if other.ended)
            if self.killed_at is None and request.server == "b" and len(text) > 5 and answered >= 6:
                # In the middle of a stream of its own. It takes a moment, and the others must go on.
                self.killed_at = time.monotonic()
                await asyncio.get_running_loop().run_in_executor(None, self.run.b.kill)
                self.kill_ended_at = time.monotonic()
        return text


@check("an engine is killed: only its own requests fail", needs_router=True)
def kill(run: Any) -> str:
    load = Load(run)
    load.start()
    at_kill = [one for one in load.requests if one.started <= load.kill_ended_at and one.ended >= load.killed_at]
    later = load.later()
    describe = lambda one: "started %+.3f s, ended %+.3f s (kill -9 at 0, dead at %+.3f s), %s, server %s: %s" % (  # noqa: E731
        one.started - load.killed_at,
        one.ended - load.killed_at,
        load.kill_ended_at - load.killed_at,
        "stream" if one.streamed else "plain",
        one.server,
        one.silent or "%s, refusal %s" % (one.error, one.refusal),
    )

    def none(what: str, found: List[Request]) -> None:
        require(not found, "%d %s:\n%s" % (len(found), what, "\n".join(map(describe, found))))

    lost = [one for one in at_kill if one.error]
    none("answers were cut off without an error", [one for one in load.requests if one.silent])
    none("requests failed that were not under way when the engine died", [one for one in load.requests if one.error and one not in at_kill])
    none("requests failed that engine a served", [one for one in lost if one.server == "a"])
    # A stream that had begun can only break off; everything else must be told properly.
    began = [one for one in lost if one.streamed and one.server == "b"]
    none("failures are neither a 502 upstream_error nor a broken stream", [one for one in lost if one not in began and one.refusal != (502, "upstream_error")])
    require(began, "expected the stream that engine b was in the middle of to fail")
    require(len(later) >= AFTER_KILL_REQUESTS, "expected the other engine to answer on; only %d requests were made after the kill" % len(later))
    expect("servers that answered later", {one.server for one in later}, {"a"})
    return "%d of %d under way failed (%d broken streams, %d 502), %d later ones all answered" % (
        len(lost), len(at_kill), len(began), len(lost) - len(began), len(later),
    )  # fmt: skip


@check("the engine comes back and is used again", needs_router=True)
def comes_back(run: Any) -> str:
    run.b.start()
    run.b.wait_healthy()
    started = time.monotonic()
    client = run.openai()
    servers: List[Optional[str]] = []
    while time.monotonic() - started < 15:
        raw = client.completions.with_raw_response.create(model=run.model, prompt="One,", max_tokens=1, temperature=0)
        servers.append(raw.headers.get("x-lifeboat-server"))
        if servers[-1] == "b":
            return "after %.1f s, request %d" % (time.monotonic() - started, len(servers))
        time.sleep(0.1)
    raise Failed("15 s after engine b was healthy again, none of %d requests went there; state: %s" % (len(servers), run.router.servers()["b"]))


@check("nothing is left in flight", needs_router=True)
def quiet(run: Any) -> str:
    run.wait_idle()
    for router in (run.router, run.pinned_router, run.kv_router, run.sticky_router):
        busy = {name: server["in_flight"] for name, server in router.servers().items() if server["in_flight"]}
        require(not busy, "router %s still counts in flight: %s" % (router.name, busy))
        metrics = wire.call(router.admin_url, "GET", "/metrics").body.decode()
        gauges = [line for line in metrics.splitlines() if re.match(r"ringway_(in_flight|queue_depth)\b", line)]
        require(gauges, "router %s: no ringway_in_flight or ringway_queue_depth in /metrics" % router.name)
        stuck = [line for line in gauges if float(line.rsplit(" ", 1)[1]) != 0]
        require(not stuck, "router %s: gauges that are not back at 0: %s" % (router.name, stuck))
    total = sum(float(line.rsplit(" ", 1)[1]) for line in metrics_of(run.router, "ringway_requests_total"))
    aborts = sum(float(line.rsplit(" ", 1)[1]) for line in metrics_of(run.router, "ringway_client_aborts_total"))
    require(total > 0, "ringway_requests_total is %g after all these requests" % total)
    return "%d requests, %d client aborts counted, every gauge at 0" % (total, aborts)


def metrics_of(router: Any, name: str) -> List[str]:
    """The sample lines of one metric."""
    text = wire.call(router.admin_url, "GET", "/metrics").body.decode()
    return [line for line in text.splitlines() if re.match(re.escape(name) + r"[ {]", line)]


@check("SIGTERM: a running stream ends properly, exit code 0", needs_router=True)
def graceful_stop(run: Any) -> str:
    answer = "one two three four five six seven eight nine ten eleven twelve"
    stream = run.openai().chat.completions.create(
        model=run.model, messages=[{"role": "user", "content": "Count."}], max_tokens=100, temperature=0, stream=True, extra_body={"grammar": 'root ::= "%s"' % answer}
    )
    text, stopping = "", None
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if stopping is None and len(text) > 5:
            stopping = threading.Thread(target=run.processes.stop, args=(run.router.process, signal.SIGTERM, 40))
            started = time.monotonic()
            stopping.start()
    require(stopping is not None, "the stream ended before the router was told to stop: %r" % text)
    stopping.join()
    took = time.monotonic() - started
    expect("text of the stream that was running", text, answer)
    expect("exit code", run.router.process.returncode, 0)
    try:
        late = wire.call(run.front, "GET", "/health", timeout=5)
    except OSError:
        return "stream complete, exit code 0 after %.1f s, then connections are refused" % took
    raise Failed("something still answers at %s: %s" % (run.front, late))

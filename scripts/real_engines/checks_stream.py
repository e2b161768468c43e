"""Below the SDKs: answers as the engine sent them, tokens one by one, clients that go away."""

import json
import statistics
import time
from typing import Any, Callable, List, Tuple

from . import wire
from .report import Failed, check, expect, require

# One connection's own business (RFC 9110 section 7.6.1), which a router sets for itself.
HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-authenticate", "proxy-authorization")
# A generation of ten seconds and more: it ends early only because somebody ended it.
LONG_TOKENS = 600
FREED_WITHIN_S = 1.0
# llama.cpp asks whether the client of a plain request is still there when it has sent no result to
# anybody for a second. Looking at its slots counts as a result, so one must not look more often.
PLAIN_POLL_S = 1.6


def end_to_end(answer: wire.Answer) -> List[Tuple[str, str]]:
    """The header fields that are the engine's, in order."""
    fields = [(name.lower(), value) for name, value in answer.headers]
    return [(name, value) for name, value in fields if name not in HOP_BY_HOP and not name.startswith("x-lifeboat-")]


@check("answers are the engine's, byte for byte")
def byte_for_byte(run: Any) -> str:
    # What the engine answers to these depends on the request alone. The body's odd spelling must
    # not bother anybody, and these paths are not among those that a router knows.
    odd = b'{ "content" : "caf\\u00e9 \\n one  two",\r\n\t"with_pieces":true, "unknown": [1.0, 1e2, {"a":{}}], "content" : "caf\\u00e9 s\xc3\xa9lection" }'
    asked = [("POST", "/tokenize", odd), ("POST", "/detokenize", {"tokens": [1000, 2000, 3000]}), ("GET", "/v1/models?x=%20", None), ("GET", "/nowhere", None)]
    seen = []
    for method, path, body in asked:
        if path.startswith("/v1/models") and run.router is not None:
            continue  # The router answers that one itself.
        ours = wire.call(run.front, method, path, body)
        theirs = wire.call(run.direct, method, path, body)
        expect("%s %s: status" % (method, path), (ours.status, ours.reason), (theirs.status, theirs.reason))
        expect("%s %s: header fields" % (method, path), end_to_end(ours), end_to_end(theirs))
        if not path.startswith("/v1/models"):
            expect("%s %s: body" % (method, path), ours.body, theirs.body)
        require(ours.complete, "%s %s: the body broke off after %d bytes" % (method, path, len(ours.body)))
        seen.append("%s %d" % (path, ours.status))
    return ", ".join(seen)


@check("every field of a chat answer and of its stream")
def every_field(run: Any) -> str:
    body = {"model": run.model, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 20, "temperature": 0}
    body["grammar"] = 'root ::= "hello to you"'
    # Twice each: the second time both find the prompt cached, so that all counts must agree.
    for _ in range(2):
        ours, theirs = (wire.call(base, "POST", "/v1/chat/completions", body) for base in (run.pinned, run.direct))
    difference = wire.first_difference(wire.steady(ours.json()), wire.steady(theirs.json()))
    require(difference is None, "plain answer: %s" % difference)
    without_length = lambda answer: [field for field in end_to_end(answer) if field[0] != "content-length"]  # noqa: E731
    expect("header fields", without_length(ours), without_length(theirs))

    body.update(stream=True, stream_options={"include_usage": True})
    ours, theirs = (wire.call(base, "POST", "/v1/chat/completions", body) for base in (run.pinned, run.direct))
    expect("header fields of the stream", end_to_end(ours), end_to_end(theirs))
    require(ours.complete, "the stream's chunked body did not end properly")
    pairs = [[parse(event) for _, event in answer.events()] for answer in (ours, theirs)]
    difference = wire.first_difference(*pairs)
    require(difference is None, "stream: %s" % difference)
    return "%d fields of header, %d events" % (len(end_to_end(ours)), len(pairs[0]))


def parse(event: str) -> Any:
    """An event's data without what differs from call to call; text that is not JSON as it is."""
    text = event[len("data: ") :] if event.startswith("data: ") else event
    return wire.steady(json.loads(text)) if text.startswith("{") else text


def arrivals(base: str, model: str) -> Tuple[float, List[float], List[float]]:
    """(first event after s, when each read with events came, when each event came) of a 48-token stream."""
    body = {"model": model, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True}
    answer = wire.call(base, "POST", "/v1/chat/completions", body)
    if answer.status != 200 or not answer.complete:
        raise Failed("expected a complete stream with status 200, got %s (complete: %s)" % (answer, answer.complete))
    times = [when for when, event in answer.events() if '"content"' in event]
    return times[0], sorted(set(times)), times


def median_gap(times: List[float]) -> float:
    """Seconds between neighbours; 0 where all came at once."""
    return statistics.median([b - a for a, b in zip(times, times[1:])] or [0.0])


@check("tokens arrive one by one")
def one_by_one(run: Any) -> str:
    # On a busy machine this very reader may come late and find two tokens waiting. A router that
    # holds tokens back does so every time; hence three tries, and the direct share beside it.
    tries = []
    for _ in range(3):
        first, reads, events = arrivals(run.front, run.model)
        direct_first, direct_reads, direct_events = arrivals(run.direct, run.model)
        share, direct_share = len(reads) / len(events), len(direct_reads) / len(direct_events)
        gap, direct_gap = median_gap(reads), median_gap(direct_reads)
        text = "%d tokens in %d reads (direct %d in %d), median gap %.0f ms (direct %.0f), first after %.0f ms (direct %.0f)" % (
            len(events), len(reads), len(direct_events), len(direct_reads), gap * 1e3, direct_gap * 1e3, first * 1e3, direct_first * 1e3,
        )  # fmt: skip
        tries.append(text)
        # A lump has all its gaps near zero; tokens that come as they are made have the engine's.
        if share >= 0.8 and 0.5 * direct_gap <= gap <= 2.0 * direct_gap and len(events) == len(direct_events):
            return text
        if direct_share < 0.8:
            tries[-1] += " [the machine is too busy for the direct stream, too]"
    raise Failed(
        "expected at least 80 %% of the tokens in reads of their own and gaps within half to double the direct ones, three times got:\n%s" % "\n".join(tries)
    )


def busy(run: Any) -> int:
    return run.a.busy_slots() + run.b.busy_slots()


def wait_until(what: str, holds: Callable[[], bool], seconds: float, poll_s: float = 0.01) -> float:
    """Looks every `poll_s`; how long it took, or fails."""
    started = time.monotonic()
    while True:
        # Not at once: the first look must be as gentle as the others.
        time.sleep(poll_s)
        if holds():
            return time.monotonic() - started
        if time.monotonic() - started > seconds:
            raise Failed("%s: not within %g s" % (what, seconds))


def freed_after(run: Any, base: str, stream: bool) -> float:
    """Starts a long generation, goes away in the middle of it; seconds until the engine is idle."""
    run.wait_idle()
    body = {"model": run.model, "messages": [{"role": "user", "content": "Go on and on."}], "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": stream}
    with wire.Call(base, "POST", "/v1/chat/completions", body) as call:
        if stream:
            pieces = call.pieces(call.head())
            for _ in range(6):
                next(pieces)
        wait_until("the engine starts to generate", lambda: busy(run) == 1, 20)
        # Well into the generation, so that nothing but the abort can end it.
        time.sleep(0.3)
        expect("busy slots before the client goes away", busy(run), 1)
    poll_s = 0.01 if stream else PLAIN_POLL_S
    return wait_until("the slot is freed after the client went away (%s)" % base, lambda: busy(run) == 0, 5, poll_s)


def compare_freed(run: Any, stream: bool) -> str:
    # The engine itself may need a while to notice that its connection is gone.
    direct = freed_after(run, run.direct, stream)
    ours = freed_after(run, run.front, stream)
    slack = FREED_WITHIN_S if stream else PLAIN_POLL_S + 0.1
    require(ours <= direct + slack, "expected an idle engine within %.2f s (direct) + %g s, took %.2f s" % (direct, slack, ours))
    if run.router is not None:
        wait_until("the router counts nothing in flight", lambda: all(one["in_flight"] == 0 for one in run.router.servers().values()), 2)
    return "engine idle after %.2f s (direct %.2f s)" % (ours, direct)


@check("client gone while streaming: the engine stops")
def abort_stream(run: Any) -> str:
    return compare_freed(run, stream=True)


@check("client gone while waiting: the engine stops")
def abort_plain(run: Any) -> str:
    return compare_freed(run, stream=False)


@check("openai stream closed early: the engine stops")
def abort_sdk(run: Any) -> str:
    run.wait_idle()
    stream = run.openai().chat.completions.create(
        model=run.model, messages=[{"role": "user", "content": "Go on."}], max_tokens=LONG_TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _chunk in zip(range(5), stream):
        pass
    expect("busy slots before the stream is closed", busy(run), 1)
    stream.close()
    took = wait_until("the slot is freed after the stream was closed", lambda: busy(run) == 0, FREED_WITHIN_S + 1)
    return "engine idle after %.2f s" % took

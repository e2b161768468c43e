"""The Anthropic SDK: messages, streams, token counts, errors, concurrency."""

import asyncio
from typing import Any, List, Tuple

import anthropic

from .report import check, expect, require

QUESTION = [{"role": "user", "content": "Say hello."}]
# The SDK's methods no longer take a temperature; engines do.
STEADY = {"temperature": 0}


def counts(usage: Any) -> Tuple[int, int]:
    """(prompt tokens, output tokens). This API counts cached tokens apart from the others."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0), usage.output_tokens


@check("anthropic messages.create")
def messages(run: Any) -> str:
    request = dict(model=run.model, max_tokens=16, extra_body=STEADY, system="Be brief.", messages=QUESTION)
    ours = run.anthropic().messages.create(**request)
    theirs = run.anthropic(run.direct).messages.create(**request)
    require(ours.content and ours.content[0].text, "expected some text, got %r" % ours.content)
    expect("text at temperature 0", ours.content[0].text, theirs.content[0].text)
    expect("stop_reason", ours.stop_reason, theirs.stop_reason)
    expect("model", ours.model, run.model)
    expect("usage (prompt, output)", counts(ours.usage), counts(theirs.usage))
    return "%r, %d+%d tokens" % (ours.content[0].text, *counts(ours.usage))


@check("anthropic messages.stream")
def stream(run: Any) -> str:
    request = dict(model=run.model, max_tokens=16, extra_body=STEADY, messages=QUESTION)

    def read(client: Any) -> Tuple[List[str], str, Any]:
        with client.messages.stream(**request) as events:
            types = [event.type for event in events]
            final = events.get_final_message()
        return types, final.content[0].text, final

    types, text, final = read(run.anthropic())
    direct_types, direct_text, direct_final = read(run.anthropic(run.direct))
    require(text, "expected some text, got %r" % text)
    expect("text at temperature 0", text, direct_text)
    expect("event types", types, direct_types)
    expect("the last event", types[-1], "message_stop")
    expect("stop_reason", final.stop_reason, direct_final.stop_reason)
    expect("usage (prompt, output)", counts(final.usage), counts(direct_final.usage))
    return "%r in %d events" % (text, len(types))


@check("anthropic messages.count_tokens")
def count_tokens(run: Any) -> str:
    request = dict(model=run.model, messages=QUESTION)
    ours = run.anthropic().messages.count_tokens(**request)
    theirs = run.anthropic(run.direct).messages.count_tokens(**request)
    require(ours.input_tokens > 0, "expected a count, got %r" % ours)
    expect("input_tokens", ours.input_tokens, theirs.input_tokens)
    return "%d input tokens" % ours.input_tokens


@check("anthropic error: malformed request")
def bad_request(run: Any) -> str:
    # No SDK writes a message without content; extra_body puts one in place of a proper list.
    return same_error(run, anthropic.BadRequestError, 400, dict(messages=QUESTION, extra_body={"messages": [{"role": "user"}]}))


@check("anthropic error: prompt longer than the context")
def too_long(run: Any) -> str:
    return same_error(run, anthropic.BadRequestError, 400, dict(messages=[{"role": "user", "content": "stone " * 3_000}]))


def same_error(run: Any, kind: type, status: int, request: dict) -> str:
    """The engine's refusal reaches the SDK as the exception that it is directly, word for word."""
    seen = []
    for base in (run.front, run.direct):
        try:
            answer = run.anthropic(base).messages.create(model=run.model, max_tokens=4, **request)
        except anthropic.APIStatusError as error:
            expect("the SDK's exception from %s (%s)" % (base, error.message), type(error).__name__, kind.__name__)
            expect("status from %s" % base, error.status_code, status)
            seen.append((error.message, error.body, error.response.headers.get("content-type")))
        else:
            require(False, "expected %s from %s, got %r" % (kind.__name__, base, answer))
    expect("message, body and content type", seen[0], seen[1])
    return "%s %d: %s" % (kind.__name__, status, seen[0][1]["error"]["message"][:80])


@check("anthropic error: unknown model", needs_router=True)
def unknown_model(run: Any) -> str:
    try:
        answer = run.anthropic().messages.create(model="no-such-model", messages=QUESTION, max_tokens=1)
    except anthropic.NotFoundError as error:
        expect("the outer type", error.body["type"], "error")
        require(isinstance(error.body["error"].get("type"), str), "expected error.type to be text, got %r" % error.body)
        require("no-such-model" in error.body["error"]["message"], "the message does not name the model: %r" % error.body)
        expect("X-Lifeboat-Reject-Reason", error.response.headers.get("x-lifeboat-reject-reason"), "model_not_found")
        return "NotFoundError: %s" % error.body["error"]["message"][:80]
    require(False, "expected NotFoundError, got %r" % answer)
    raise AssertionError("unreachable")


@check("anthropic async, 8 at once")
def concurrent(run: Any) -> str:
    async def one(client: Any, number: int) -> None:
        # Each has its own prompt length and its own limit: one mixed up with another shows.
        request = dict(model=run.model, max_tokens=2 + number, extra_body=STEADY, messages=[{"role": "user", "content": "go " * (number + 1)}])
        if number % 2:
            async with client.messages.stream(**request) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**request)
        prompt, output = counts(message.usage)
        lengths[number] = prompt
        require(1 <= output <= 2 + number, "request %d: expected 1 to %d output tokens, got %d" % (number, 2 + number, output))
        if message.stop_reason == "max_tokens":
            expect("request %d's output tokens, stopped by the limit" % number, output, 2 + number)

    async def all_of_them() -> None:
        async with run.anthropic(asynchronous=True) as client:
            await asyncio.gather(*(one(client, number) for number in range(8)))

    lengths: dict = {}
    asyncio.run(all_of_them())
    expect("prompt tokens of each request (one `go` more each)", dict(sorted(lengths.items())), {n: lengths[0] + n for n in range(8)})
    return "8 requests, each its own counts"

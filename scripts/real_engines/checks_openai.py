"""The OpenAI SDK: every endpoint, plain and streaming, errors, concurrency.

A real model's words are nobody's to predict, so most requests carry llama.cpp's `grammar`, an
extension that leaves it one answer. It also proves that unknown fields reach the engine.
"""

import asyncio
import json
import re
from typing import Any, List, Optional, Tuple

import openai

from . import wire
from .report import check, expect, require

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def only(answer: str) -> dict:
    """Extra body fields that leave the model `answer` and nothing else."""
    return {"grammar": 'root ::= "%s"' % answer}


def same_usage(ours: Any, theirs: Any) -> None:
    """Token counts through the router are the engine's; cached ones depend on who answered before."""
    pick = lambda usage: (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)  # noqa: E731
    require(ours is not None, "usage is missing; directly it is %s" % (theirs,))
    expect("usage (prompt, completion, total)", pick(ours), pick(theirs))


@check("openai models.list")
def models(run: Any) -> str:
    listed = [model.to_dict() for model in run.openai().models.list()]
    direct = [model.to_dict() for model in run.openai(run.direct).models.list()]
    expect("model ids (two engines list the same one)", [model["id"] for model in listed], [run.model])
    for model in listed + direct:
        # The engine fills this in with the time of the question.
        model.pop("created")
    difference = wire.first_difference(listed, direct)
    require(difference is None, "the model's entry is not the engine's own: %s" % difference)
    return "%s once, entry as the engine's" % run.model


@check("openai models.list, engines that differ", needs_router=True)
def models_union(run: Any) -> str:
    ids = [model.id for model in run.openai(run.pinned).models.list()]
    expect("the union of both engines' models", sorted(ids), sorted([run.model, run.embed_model]))
    return "%s" % ", ".join(ids)


@check("openai chat.completions")
def chat(run: Any) -> str:
    request = dict(model=run.model, messages=QUESTION, max_tokens=40, temperature=0, extra_body=only("the answer is Paris"))
    ours = run.openai().chat.completions.create(**request)
    theirs = run.openai(run.direct).chat.completions.create(**request)
    expect("text", ours.choices[0].message.content, "the answer is Paris")
    expect("finish_reason", ours.choices[0].finish_reason, "stop")
    expect("model", ours.model, run.model)
    same_usage(ours.usage, theirs.usage)
    return "%r, %d+%d tokens" % (ours.choices[0].message.content, ours.usage.prompt_tokens, ours.usage.completion_tokens)


@check("openai chat.completions, free text as direct")
def chat_free(run: Any) -> str:
    request = dict(model=run.model, messages=QUESTION, max_tokens=16, temperature=0)
    ours = run.openai().chat.completions.create(**request)
    theirs = run.openai(run.direct).chat.completions.create(**request)
    require(ours.choices[0].message.content, "expected some text, got %r" % ours.choices[0].message.content)
    expect("text at temperature 0", ours.choices[0].message.content, theirs.choices[0].message.content)
    expect("finish_reason", ours.choices[0].finish_reason, theirs.choices[0].finish_reason)
    return "%r" % ours.choices[0].message.content


@check("openai chat.completions, json_schema")
def chat_schema(run: Any) -> str:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"], "additionalProperties": False}
    answer = run.openai().chat.completions.create(
        model=run.model,
        messages=QUESTION,
        # Room for the white space that the schema leaves the model to play with.
        max_tokens=250,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    )
    expect("the JSON answered", json.loads(answer.choices[0].message.content), {"city": "Paris"})
    return " ".join(answer.choices[0].message.content.split())


def read_chat_stream(client: Any, **request: Any) -> Tuple[str, int, Optional[str], Any]:
    """(text, chunks with text, finish reason, usage) of a streamed chat."""
    text, chunks, finish, usage = "", 0, None, None
    with client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request) as stream:
        for chunk in stream:
            require(usage is None, "a chunk came after the one with the usage: %r" % chunk)
            usage = chunk.usage
            for choice in chunk.choices:
                if choice.delta.content:
                    text, chunks = text + choice.delta.content, chunks + 1
                finish = choice.finish_reason or finish
    return text, chunks, finish, usage


@check("openai chat.completions, stream with usage")
def chat_stream(run: Any) -> str:
    request = dict(model=run.model, messages=QUESTION, max_tokens=40, temperature=0, extra_body=only("the answer is Paris"))
    text, chunks, finish, usage = read_chat_stream(run.openai(), **request)
    _, direct_chunks, _, direct_usage = read_chat_stream(run.openai(run.direct), **request)
    expect("text of all chunks", text, "the answer is Paris")
    expect("finish_reason", finish, "stop")
    expect("chunks with text", chunks, direct_chunks)
    same_usage(usage, direct_usage)
    return "%r in %d chunks, usage in the last" % (text, chunks)


@check("openai completions")
def completions(run: Any) -> str:
    request = dict(model=run.model, prompt="The capital of France is", max_tokens=20, temperature=0, extra_body=only(" Paris, of course"))
    ours = run.openai().completions.create(**request)
    theirs = run.openai(run.direct).completions.create(**request)
    expect("text", ours.choices[0].text, " Paris, of course")
    same_usage(ours.usage, theirs.usage)
    return "%r, %d+%d tokens" % (ours.choices[0].text, ours.usage.prompt_tokens, ours.usage.completion_tokens)


@check("openai completions, stream")
def completions_stream(run: Any) -> str:
    request = dict(model=run.model, prompt="The capital of France is", max_tokens=20, temperature=0, extra_body=only(" Paris, of course"))

    def read(client: Any) -> Tuple[List[str], Any]:
        chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **request))
        return [chunk.choices[0].text for chunk in chunks if chunk.choices], chunks[-1].usage

    ours, usage = read(run.openai())
    theirs, direct_usage = read(run.openai(run.direct))
    expect("text of all chunks", "".join(ours), " Paris, of course")
    expect("the chunks' texts", ours, theirs)
    same_usage(usage, direct_usage)
    return "%r in %d chunks" % ("".join(ours), len(ours))


@check("openai responses")
def responses(run: Any) -> str:
    request = dict(model=run.model, input="What is the capital of France?", max_output_tokens=40, temperature=0, extra_body=only("the answer is Paris"))
    ours = run.openai().responses.create(**request)
    theirs = run.openai(run.direct).responses.create(**request)
    expect("output_text", ours.output_text, "the answer is Paris")
    expect("status", ours.status, "completed")
    pick = lambda answer: (answer.usage.input_tokens, answer.usage.output_tokens)  # noqa: E731
    expect("usage (input, output)", pick(ours), pick(theirs))
    return "%r, %d+%d tokens" % (ours.output_text, *pick(ours))


@check("openai responses, stream")
def responses_stream(run: Any) -> str:
    request = dict(model=run.model, input="What is the capital of France?", max_output_tokens=40, temperature=0, extra_body=only("the answer is Paris"))

    def read(client: Any) -> Tuple[List[str], str, Any]:
        events = list(client.responses.create(stream=True, **request))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        return [event.type for event in events], "".join(deltas), events[-1]

    types, text, last = read(run.openai())
    direct_types, _, _ = read(run.openai(run.direct))
    expect("text of all deltas", text, "the answer is Paris")
    expect("the last event", last.type, "response.completed")
    expect("output_text of the last event", last.response.output_text, "the answer is Paris")
    expect("event types", types, direct_types)
    return "%r in %d events" % (text, len(types))


@check("openai embeddings")
def embeddings(run: Any) -> str:
    request = dict(model=run.embed_model, input=["Paris", "a red apple"])
    ours = run.openai(run.embed_front).embeddings.create(**request)
    theirs = run.openai(run.embed.url).embeddings.create(**request)
    expect("vectors", len(ours.data), 2)
    expect("numbers in a vector", len(ours.data[0].embedding), 640)
    expect("vectors as from the engine itself", [item.embedding for item in ours.data], [item.embedding for item in theirs.data])
    require(ours.data[0].embedding != ours.data[1].embedding, "two texts have the same vector")
    return "2 vectors of 640 numbers, as direct"


@check("openai embeddings where the engine has none")
def embeddings_refused(run: Any) -> str:
    return same_error(run, openai.InternalServerError, 501, lambda client: client.embeddings.create(model=run.model, input="Paris"))


@check("openai error: malformed request")
def bad_request(run: Any) -> str:
    return same_error(run, openai.BadRequestError, 400, lambda client: client.chat.completions.create(model=run.model, messages="no list"))


@check("openai error: prompt longer than the context")
def too_long(run: Any) -> str:
    # 300 KB: many reads and writes, and the engine answers only after the last of them.
    messages = [{"role": "user", "content": "stone " * 50_000}]
    return same_error(run, openai.BadRequestError, 400, lambda client: client.chat.completions.create(model=run.model, messages=messages))


def same_error(run: Any, kind: type, status: int, ask: Any) -> str:
    """The engine's refusal reaches the SDK as the exception that it is directly, word for word."""
    seen = []
    for base in (run.front, run.direct):
        try:
            answer = ask(run.openai(base))
        except openai.APIStatusError as error:
            expect("the SDK's exception from %s" % base, type(error).__name__, kind.__name__)
            expect("status from %s" % base, error.status_code, status)
            seen.append((error.message, error.body, error.response.headers.get("content-type")))
        else:
            require(False, "expected %s from %s, got %r" % (kind.__name__, base, answer))
    expect("message, body and content type", seen[0], seen[1])
    return "%s %d: %s" % (kind.__name__, status, seen[0][1]["message"][:80])


@check("openai error: unknown model", needs_router=True)
def unknown_model(run: Any) -> str:
    try:
        answer = run.openai().chat.completions.create(model="no-such-model", messages=QUESTION, max_tokens=1)
    except openai.NotFoundError as error:
        expect("code", error.code, "model_not_found")
        expect("X-Lifeboat-Reject-Reason", error.response.headers.get("x-lifeboat-reject-reason"), "model_not_found")
        require("no-such-model" in error.message, "the message does not name the model: %r" % error.message)
        return "NotFoundError: %s" % error.body["message"][:80]
    require(False, "expected NotFoundError, got %r" % answer)
    raise AssertionError("unreachable")


HEADERS = {
    "x-lifeboat-server": r"a|b",
    "x-lifeboat-pool": r"default",
    "x-lifeboat-algorithm": r"weighted-round-robin",
    "x-lifeboat-wait-ms": r"\d+",
    "x-lifeboat-inflight": r"[1-9]\d*/32",
    "x-lifeboat-weight": r"1",
}


@check("headers on plain, streamed and refused answers", needs_router=True)
def headers(run: Any) -> str:
    client = run.openai()
    request = dict(model=run.model, messages=QUESTION, max_tokens=4, temperature=0)
    answers = {"plain": client.chat.completions.with_raw_response.create(**request)}
    with client.chat.completions.with_streaming_response.create(stream=True, **request) as streamed:
        for _ in streamed.iter_lines():
            pass
        answers["streamed"] = streamed
    try:
        client.chat.completions.create(model=run.model, messages="no list")
    except openai.BadRequestError as error:
        answers["refused by the engine"] = error.response
    faults = []
    for kind, answer in answers.items():
        for name, pattern in HEADERS.items():
            value = answer.headers.get(name)
            if value is None or not re.fullmatch(pattern, value):
                faults.append("%s: %s is %r, expected %s" % (kind, name, value, pattern))
    require(not faults, "; ".join(faults))
    return ", ".join("%s=%s" % (name[len("x-lifeboat-") :], answers["plain"].headers[name]) for name in HEADERS)


@check("both engines are used", needs_router=True)
def spread(run: Any) -> str:
    client = run.openai()
    servers = []
    for _ in range(8):
        raw = client.completions.with_raw_response.create(model=run.model, prompt="One, two,", max_tokens=1, temperature=0)
        servers.append(raw.headers.get("x-lifeboat-server"))
    expect("answers by engine a, by engine b (weights are equal)", (servers.count("a"), servers.count("b")), (4, 4))
    return " ".join(servers)


@check("openai async, 8 at once")
def concurrent(run: Any) -> str:
    async def one(client: Any, number: int) -> None:
        # Each has its own answer and its own prompt length: one mixed up with another shows.
        answer = "this is answer %d" % number
        request = dict(
            model=run.model,
            messages=[{"role": "user", "content": "go " * (number + 1)}],
            max_tokens=40,
            temperature=0,
            extra_body=only(answer),
        )
        if number % 2:
            text, usage = "", None
            async for chunk in await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
        else:
            whole = await client.chat.completions.create(**request)
            text, usage = whole.choices[0].message.content, whole.usage
        expect("request %d's text" % number, text, answer)
        lengths[number] = usage.prompt_tokens

    async def all_of_them() -> None:
        limit = asyncio.Semaphore(8)
        async with run.openai(asynchronous=True) as client:

            async def within_limit(number: int) -> None:
                async with limit:
                    await one(client, number)

            await asyncio.gather(*(within_limit(number) for number in range(24)))

    lengths: dict = {}
    asyncio.run(all_of_them())
    expected = {number: lengths[0] + number for number in range(24)}
    expect("prompt tokens of each request (one `go` more each)", dict(sorted(lengths.items())), expected)
    return "24 requests, each its own answer"

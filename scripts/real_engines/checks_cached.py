"""Cached-token counts: what the engine reports is what the client reads, in each API's own field.

A long prompt goes through a router that has one engine for the model: once cold, once warm; then
the same straight to that engine, whose cache now holds it too. The warm counts must be equal.
"""

from typing import Any, Callable, Dict, Tuple

from .report import check, expect, require

Reader = Callable[[str], Tuple[int, dict]]


def prompt(about: str) -> str:
    """Some 300 tokens that begin differently for each check, so that none warms another's."""
    return "Report on %s. " % about + " ".join("Item %d is fine and stays where it was put;" % item for item in range(22))


def compare(run: Any, read: Reader) -> str:
    """`read(base)` asks once and returns (cached tokens, everything the engine says of tokens)."""
    cold, _ = read(run.pinned)
    warm, ours = read(run.pinned)
    direct, theirs = read(run.direct)
    require(warm > 200, "expected most of some 300 prompt tokens to be cached the second time, got %d; all fields: %s" % (warm, ours))
    require(cold < warm / 2, "expected few cached tokens the first time, got %d (second time %d)" % (cold, warm))
    expect("cached tokens, second time, against a third time asked directly", warm, direct)
    expect("all token fields", ours, theirs)
    return "%d cold, %d warm, %d direct" % (cold, warm, direct)


def chat_fields(usage: Any, timings: Dict[str, Any]) -> Tuple[int, dict]:
    """From `usage` and llama.cpp's `timings`, which must agree with each other."""
    cached = usage.prompt_tokens_details.cached_tokens
    expect("timings.cache_n against usage", timings["cache_n"], cached)
    expect("timings.cache_n + prompt_n against usage", timings["cache_n"] + timings["prompt_n"], usage.prompt_tokens)
    return cached, usage.to_dict()


@check("cached tokens: openai chat.completions")
def chat(run: Any) -> str:
    def read(base: str) -> Tuple[int, dict]:
        messages = [{"role": "user", "content": prompt("the first matter")}]
        answer = run.openai(base).chat.completions.create(model=run.model, messages=messages, max_tokens=2, temperature=0)
        return chat_fields(answer.usage, answer.model_extra["timings"])

    return compare(run, read)


@check("cached tokens: openai chat.completions, stream")
def chat_stream(run: Any) -> str:
    def read(base: str) -> Tuple[int, dict]:
        messages = [{"role": "user", "content": prompt("a second matter")}]
        request = dict(model=run.model, messages=messages, max_tokens=2, temperature=0)
        chunks = list(run.openai(base).chat.completions.create(stream=True, stream_options={"include_usage": True}, **request))
        return chat_fields(chunks[-1].usage, chunks[-1].model_extra["timings"])

    return compare(run, read)


@check("cached tokens: openai completions")
def completions(run: Any) -> str:
    def read(base: str) -> Tuple[int, dict]:
        answer = run.openai(base).completions.create(model=run.model, prompt=prompt("this third matter"), max_tokens=2, temperature=0)
        return chat_fields(answer.usage, answer.model_extra["timings"])

    return compare(run, read)


@check("cached tokens: openai responses")
def responses(run: Any) -> str:
    def read(base: str) -> Tuple[int, dict]:
        answer = run.openai(base).responses.create(model=run.model, input=prompt("matter number four"), max_output_tokens=2, temperature=0)
        return answer.usage.input_tokens_details.cached_tokens, answer.usage.to_dict()

    return compare(run, read)


@check("cached tokens: anthropic messages.create")
def messages(run: Any) -> str:
    def read(base: str) -> Tuple[int, dict]:
        request = [{"role": "user", "content": prompt("one more matter, the fifth")}]
        answer = run.anthropic(base).messages.create(model=run.model, messages=request, max_tokens=2, extra_body={"temperature": 0})
        return answer.usage.cache_read_input_tokens, answer.usage.to_dict()

    return compare(run, read)


@check("cached tokens: anthropic messages.stream")
def messages_stream(run: Any) -> str:
    def read(base: str) -> Tuple[int, dict]:
        request = [{"role": "user", "content": prompt("yet another matter, the sixth")}]
        with run.anthropic(base).messages.stream(model=run.model, messages=request, max_tokens=2, extra_body={"temperature": 0}) as events:
            start = next(event for event in events if event.type == "message_start")
            usage = start.message.usage.to_dict()
            events.until_done()
        return usage["cache_read_input_tokens"], usage

    return compare(run, read)

"""The checks of a run: a registry, one at a time with its outcome, and the table.

A check is a function of the `Run`. It returns what it saw, in a few words for the table; it raises
`Failed` (or anything else) to fail; `Skipped` when it makes no sense as the run is set up.
"""

import contextlib
import io
import textwrap
import time
import traceback
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional


class Failed(Exception):
    """What was seen is not what was expected; the text has both."""


class Skipped(Exception):
    """The check makes no sense in this run; the text says why."""


@dataclass
class Check:
    name: str
    function: Callable[[Any], str]
    needs_router: bool


@dataclass
class Outcome:
    check: Check
    verdict: str
    seen: str
    seconds: float


REGISTRY: List[Check] = []


def check(name: str, needs_router: bool = False) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Registers a check; they run in the order of registration."""

    def register(function: Callable[[Any], str]) -> Callable[[Any], str]:
        assert name not in [known.name for known in REGISTRY], "two checks called %r" % name
        REGISTRY.append(Check(name, function, needs_router))
        return function

    return register


def expect(what: str, seen: Any, expected: Any) -> None:
    """Fails unless both are equal."""
    if seen != expected:
        raise Failed("%s: expected %s, got %s" % (what, short(expected), short(seen)))


def require(holds: Any, text: str) -> None:
    """Fails with `text` unless `holds`."""
    if not holds:
        raise Failed(text)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 600 else text[:600] + "… (%d characters)" % len(text)


def run_checks(run: Any, checks: List[Check], direct: bool) -> List[Outcome]:
    """Runs all, printing each line as it is known; a failure does not stop the rest."""
    outcomes = []
    width = max(len(one.name) for one in checks)
    print("\n%-*s  %-7s %6s  seen" % (width, "check", "verdict", "s"), flush=True)
    for one in checks:
        started = time.monotonic()
        verdict, seen, detail = run_one(run, one, direct)
        outcome = Outcome(one, verdict, seen, time.monotonic() - started)
        outcomes.append(outcome)
        print("%-*s  %-7s %6.1f  %s" % (width, one.name, verdict, outcome.seconds, seen), flush=True)
        if detail:
            print(textwrap.indent(detail, "    | "), flush=True)
    return outcomes


def run_one(run: Any, one: Check, direct: bool) -> "tuple[str, str, str]":
    """(verdict, what was seen on one line, details for a failure)."""
    try:
        if direct and one.needs_router:
            raise Skipped("needs a router")
        return "ok", one.function(run), ""
    except Skipped as skipped:
        return "skipped", str(skipped), ""
    except Failed as failed:
        return "FAILED", first_line(str(failed)), str(failed) if "\n" in str(failed) or len(str(failed)) > 160 else ""
    except Exception as error:  # A surprise is a failure of this check, not the end of the run.
        text = io.StringIO()
        traceback.print_exc(limit=-4, file=text)
        return "FAILED", first_line("%s: %s" % (type(error).__name__, error)), text.getvalue().rstrip() + described(error)


def described(error: BaseException) -> str:
    """The HTTP answer that an SDK's exception carries, where there is one."""
    lines = []
    step: Optional[BaseException] = error
    while step is not None:
        response = getattr(step, "response", None)
        if response is not None and hasattr(response, "status_code"):
            lines.append("answer: %d %s" % (response.status_code, dict(response.headers)))
            with contextlib.suppress(Exception):
                lines.append("body: %s" % response.text[:800])
        step = step.__cause__
    return "".join("\n" + line for line in lines)


def first_line(text: str) -> str:
    return textwrap.shorten(text.split("\n")[0], 160, placeholder="…")


def summary(outcomes: List[Outcome]) -> Iterator[str]:
    """The last lines of the run; the very last is `N passed, N failed`."""
    failed = [outcome for outcome in outcomes if outcome.verdict == "FAILED"]
    skipped = sum(1 for outcome in outcomes if outcome.verdict == "skipped")
    passed = len(outcomes) - len(failed) - skipped
    yield ""
    for outcome in failed:
        yield "FAILED %s: %s" % (outcome.check.name, outcome.seen)
    if skipped:
        yield "%d skipped" % skipped
    yield "%d passed, %d failed" % (passed, len(failed))

"""Starts engines and router, runs the checks, cleans up; inside the cached environment."""

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Optional

# Anything but loopback would be a mistake here, whatever proxy the environment names.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"

import anthropic  # noqa: E402
import httpx  # noqa: E402
import openai  # noqa: E402

# Importing them registers their checks, which run in this order: those that kill engines come last.
from . import checks_openai, checks_anthropic, checks_cached, checks_stream, checks_kv, checks_faults  # noqa: E402, F401, I001
from .prepare import tidy_on_signals  # noqa: E402
from .processes import Engine, Processes, Router, StartError, build_ringway  # noqa: E402
from .report import REGISTRY, Failed, run_checks, summary  # noqa: E402

MODEL = "gemma-3-270m"
EMBED_MODEL = "gemma-3-270m-embed"


class Run:
    """What the checks work on.

    `front`: base URL of what is under test over engines a and b; `pinned`: the same with a as the
    only engine of the chat model, and the embedding engine beside it; `direct`: engine a itself.
    Without a router `front` and `pinned` are engine a. `kv_router` and `sticky_router` are over
    engines a and b too, with those algorithms.
    """

    model = MODEL
    embed_model = EMBED_MODEL

    def __init__(self, processes: Processes, llama_server: Path, model: Path):
        self.processes = processes
        self.a = Engine(processes, "a", llama_server, model, MODEL)
        self.b = Engine(processes, "b", llama_server, model, MODEL)
        self.embed = Engine(processes, "embed", llama_server, model, EMBED_MODEL, slots=1, extra=("--embeddings", "--pooling", "mean"))
        self.router: Optional[Router] = None
        self.pinned_router: Optional[Router] = None
        self.kv_router: Optional[Router] = None
        self.sticky_router: Optional[Router] = None
        self.ringway: Optional[Path] = None
        self.front = self.pinned = self.direct = self.a.url
        self.embed_front = self.embed.url

    def start_engines(self) -> None:
        engines = (self.a, self.b, self.embed)
        print("starting llama-server: %s" % ", ".join("%s at %s" % (one.name, one.url) for one in engines), flush=True)
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_healthy()

    def start_routers(self, ringway: Path) -> None:
        self.router = Router(self.processes, "front", ringway, [self.a, self.b])
        self.pinned_router = Router(self.processes, "pinned", ringway, [self.a, self.embed])
        self.kv_router = Router(self.processes, "kv", ringway, [self.a, self.b], ("--algorithm", "kv-aware"))
        self.sticky_router = Router(self.processes, "sticky", ringway, [self.a, self.b], ("--algorithm", "sticky-session"))
        self.ringway = ringway
        for router in (self.router, self.pinned_router, self.kv_router, self.sticky_router):
            router.wait_ready()
        self.front, self.pinned = self.router.url, self.pinned_router.url
        self.embed_front = self.pinned
        print(
            "starting ringway: %s (engines a, b), %s (engines a, embed), %s (a, b, kv-aware), %s (a, b, sticky-session)"
            % (self.front, self.pinned, self.kv_router.url, self.sticky_router.url),
            flush=True,
        )

    # No retries anywhere: a failure that an SDK would retry away must show.

    def openai(self, base: Optional[str] = None, asynchronous: bool = False) -> Any:
        client = openai.AsyncOpenAI if asynchronous else openai.OpenAI
        return client(base_url=(base or self.front) + "/v1", api_key="sk-check", max_retries=0, timeout=120)

    def anthropic(self, base: Optional[str] = None, asynchronous: bool = False) -> Any:
        client = anthropic.AsyncAnthropic if asynchronous else anthropic.Anthropic
        return client(base_url=base or self.front, api_key="sk-check", max_retries=0, timeout=120)

    def wait_idle(self, seconds: float = 120.0) -> None:
        """Until no engine generates anything: what the check before left must not disturb the next."""
        deadline = time.monotonic() + seconds
        while any(engine.busy_slots() for engine in (self.a, self.b)):
            if time.monotonic() > deadline:
                raise Failed("the engines were still busy %g s after the last request had ended" % seconds)
            time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(prog="real_engines.run")
    for name in ("--cache", "--llama-server", "--model", "--repository"):
        parser.add_argument(name, type=Path, required=True)
    for name in ("--direct", "--list", "--keep-logs"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--only", action="append", default=[])
    args = parser.parse_args()

    checks = [one for one in REGISTRY if not args.only or any(text in one.name for text in args.only)]
    if not checks:
        print("real-engines: no check's name contains %s; --list names them" % " or ".join(map(repr, args.only)), file=sys.stderr)
        return 2
    if args.list:
        for one in checks:
            print(one.name + ("   (needs a router)" if one.needs_router else ""))
        return 0

    logs = log_directory(args.cache / "runs")
    processes = Processes(logs)
    code = 2
    try:
        with tidy_on_signals():
            code = run_all(args, checks, processes)
    except StartError as error:
        print("real-engines: could not start: %s" % error, file=sys.stderr)
    except KeyboardInterrupt:
        print("\nreal-engines: interrupted", file=sys.stderr)
        code = 130
    finally:
        # A second Ctrl-C must not leave processes behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        processes.stop_all()
        put_away(logs, args.cache / "logs" / "last-run" if code or args.keep_logs else None)
    return code


def run_all(args: argparse.Namespace, checks: list, processes: Processes) -> int:
    print("openai %s, anthropic %s, httpx %s" % (openai.__version__, anthropic.__version__, httpx.__version__))
    ringway = None if args.direct else build_ringway(args.repository, processes)
    run = Run(processes, args.llama_server, args.model)
    run.start_engines()
    if ringway is not None:
        run.start_routers(ringway)
    outcomes = run_checks(run, checks, args.direct)
    failed = any(outcome.verdict == "FAILED" for outcome in outcomes)
    # The count is the last line, so what concerns the logs comes before it.
    if failed or args.keep_logs:
        print("\nlogs of engines and routers: %s" % (args.cache / "logs" / "last-run"))
    for line in summary(outcomes):
        print(line, flush=True)
    return 1 if failed else 0


def log_directory(runs: Path) -> Path:
    """A directory for this run's logs, named by its process; removes those of runs that were killed."""
    for old in runs.glob("*"):
        # A number that was used again meanwhile only delays the removal.
        if not Path("/proc", old.name).exists():
            shutil.rmtree(old, ignore_errors=True)
    logs = runs / str(os.getpid())
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    return logs


def put_away(logs: Path, keep_in: Optional[Path]) -> None:
    """Removes the run's logs, or moves them where the next run will replace them."""
    if keep_in is not None:
        shutil.rmtree(keep_in, ignore_errors=True)
        keep_in.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(logs, keep_in)
    shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

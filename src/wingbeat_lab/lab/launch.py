"""Run a command on every host of a lab, from outside it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wingbeat.errors import LabError, UsageError, unknown
from wingbeat_lab.lab import kernel
from wingbeat_lab.lab.counters import LabStats
from wingbeat_lab.lab.cross import Sample
from wingbeat_lab.lab.script import parse_script
from wingbeat_lab.lab.spec import LabSpec

_PREFIX = "wingbeat-lab/"
_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class RunningLab:
    """A lab that answered: its name, its command, and its counters at that moment."""

    name: str
    command: tuple[str, ...]
    stats: LabStats


def listen() -> socket.socket:
    """Open the socket of a new lab; closing it removes the lab from the list."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{_PREFIX}{os.getpid()}-{secrets.token_hex(2)}")
    listener.listen(8)
    return listener


def running() -> list[RunningLab]:
    """All labs of this user that answer, with their counters; oldest launcher first."""
    found = [_ask(name) for name in _names()]
    return [lab for lab in found if lab is not None]


def stats(name: str | None = None) -> LabStats:
    """Return the counters of the running lab ``name``, or of the only one.

    UsageError if there is no lab of that name, LabError if none or several are running.
    """
    return choose(running(), name).stats


def choose(labs: list[RunningLab], name: str | None) -> RunningLab:
    """Select one lab.

    UsageError if there is no lab of that name, LabError if none or several are running.
    """
    if name is not None:
        for lab in labs:
            if lab.name == name:
                return lab
        raise unknown("lab", name, [lab.name for lab in labs])
    if len(labs) == 1:
        return labs[0]
    if not labs:
        raise LabError("no lab is running; start one with: wingbeat lab run SPEC -- CMD")
    names = ", ".join(lab.name for lab in labs)
    raise LabError(f"{len(labs)} labs are running, name one of them: {names}")


def _names() -> list[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
        marks = (line.rpartition(f"@{_PREFIX}") for line in lines)
        # A connection shows the listener's name too, hence the set.
        names = {name.strip() for _, mark, name in marks if mark}
        return sorted(names, key=lambda n: int(n.partition("-")[0]) if n[:1].isdigit() else 0)
    return []


def _ask(name: str) -> RunningLab | None:
    """Read one lab's answer; None if it has ended or belongs to another user."""
    useless = contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError)
    with useless, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_TIMEOUT)
        client.connect(f"\0{_PREFIX}{name}")
        credentials = client.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        if struct.unpack("3i", credentials)[1] != os.getuid() != 0:
            return None
        with client.makefile("rb") as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        command, stats = answer["command"], answer["stats"]
        return RunningLab(name, tuple(map(str, command)), LabStats.from_json(stats))
    return None


GRACE_SECONDS = 30.0
END_SECONDS = 10.0
"""Seconds that a lab has to end by itself before it is killed."""
TIMEOUT_CODE = 124
"""Exit code of a run that its time limit ended, as in coreutils' ``timeout``."""

UNSHARE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child")
_INNER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from wingbeat_lab.lab.inner import main; main()"
)

OnLine = Callable[[int, str], None]
OnEvent = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """The first worker that failed; ``code`` is 128 + n for signal n, ``after`` in seconds."""

    rank: int
    host: str
    code: int
    after: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} ended with exit code {self.code} after "
            f"{self.after:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended.

    Attributes:
        exit_codes: by rank; 128 + n for a worker ended by signal n.
        first_failure: the first worker that failed, or None.
        timed_out: whether the time limit ended the run.
        stats: the kernel's counters after the last worker ended.
        cross: samples of the cross-traffic, by receiving host.
    """

    exit_codes: tuple[int, ...]
    first_failure: Failure | None
    timed_out: bool
    stats: LabStats
    cross: dict[str, list[Sample]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0, the first failing worker's code, or 124 if the time limit came before any failure."""
        if self.first_failure is not None and not self.timed_out:
            return self.first_failure.code
        return TIMEOUT_CODE if self.timed_out else 0


class FaultInjector:
    """Lets faults occur in a running lab, called by another thread than `run`.

    Pass it to `run` as ``faults``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], LabSpec, int] | None = None

    def inject(self, action: str) -> None:
        """Let a fault occur now, such as ``h2.eth0 down``, ``kill h1`` or ``rate h3 100mbit``.

        UsageError if it cannot be parsed, LabError if the lab does not run.
        """
        with self._lock:
            if self._running is None:
                raise LabError(f"fault {action!r}: the lab does not run yet, or not any more")
            inner, spec, per_host = self._running
            for event in parse_script(f"0s {action}", spec, per_host):
                _write(inner, f"{event.to_text()}\n".encode())

    @contextlib.contextmanager
    def attached(
        self, inner: subprocess.Popen[bytes], spec: LabSpec, per_host: int
    ) -> Iterator[None]:
        """Inject into this lab while the body runs."""
        with self._lock:
            self._running = inner, spec, per_host
        try:
            yield
        finally:
            with self._lock:
                self._running = None


def run(
    spec: LabSpec | str,
    command: Sequence[str],
    *,
    per_host: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    on_line: OnLine | None = None,
    on_event: OnEvent | None = None,
    fail: str = "",
    faults: FaultInjector | None = None,
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
) -> RunResult:
    """Build a lab, run ``command`` on every host, and leave nothing behind.

    Args:
        spec: the cluster, as :class:`LabSpec`, its text or a TOML file.
        command: program and arguments; the program is searched on PATH.
        per_host: workers on each host.
        env: variables added to this process's own for the workers.
        cwd: working directory of the workers.
        on_line: called with rank and line for all output of the workers; without it lines go to
            standard output with the prefix ``[h0]`` (``[h0.1]`` with several workers per host).
        on_event: called with one line of text when a scripted fault occurs.
        fail: faults at given seconds, see :mod:`wingbeat_lab.lab.script`.
        faults: injects further ones while the lab runs.
        timeout: seconds after which the run is ended, counted from its start.
        grace: seconds that the other workers have to end after the first failure.

    Raises:
        UsageError: an invalid value, or a command that does not exist.
        LabError: this machine cannot create the lab; :func:`wingbeat_lab.lab.available` returns
            the reason.
    """
    lab = LabSpec.parse(spec) if isinstance(spec, str) else spec
    _check(command, per_host, timeout, grace)
    fails = parse_script(fail, lab, per_host)
    job = {
        "spec": lab.to_text(),
        "command": list(command),
        "per_host": per_host,
        "env": _environment({**os.environ, **(env or {})}),
        "fail": "; ".join(event.to_text() for event in fails),
        "timeout": timeout,
        "grace": grace,
        "port": 0 if lab.shaped else _free_port(),
    }
    collector = _Collector(lab, per_host, on_line or Prefixer(lab, per_host), on_event)
    with listen() as listener, _start(job, lab, listener, cwd) as inner:
        listener.close()  # the lab holds its own copy and is listed as long as it lives
        with (faults or FaultInjector()).attached(inner, lab, per_host):
            _follow(inner, collector)
    return collector.result()


def _environment(env: dict[str, str]) -> dict[str, str]:
    """Return the environment of the workers, with a name and a key for the job if it has none."""
    made = {"WINGBEAT_JOB_ID": f"lab-{secrets.token_hex(8)}"}
    if "WINGBEAT_JOB_KEY_FILE" not in env:
        made["WINGBEAT_JOB_KEY"] = secrets.token_hex(32)
    return {**made, **env}


class Prefixer:
    """Print lines with the name of their worker as prefix; coloured on a terminal."""

    def __init__(self, spec: LabSpec, per_host: int) -> None:
        self._per_host = per_host
        self._width = len(self._name(spec.hosts * per_host - 1))
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, rank: int, line: str) -> None:
        """Print one line."""
        name = self._name(rank).ljust(self._width)
        if self._colour:
            name = f"\x1b[{31 + rank % 6}m{name}\x1b[0m"
        print(name, line, flush=True)

    def _name(self, rank: int) -> str:
        host, local = divmod(rank, self._per_host)
        return f"[h{host}]" if self._per_host == 1 else f"[h{host}.{local}]"


@dataclass(slots=True)
class _Collector:
    """Builds the result from the events of the inner process."""

    spec: LabSpec
    per_host: int
    on_line: OnLine
    on_event: OnEvent | None
    codes: dict[int, int] = field(default_factory=dict)
    first_failure: Failure | None = None
    timed_out: bool = False
    stats: LabStats | None = None
    cross: dict[str, list[Sample]] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Handle one event; raise the error that the inner process reported."""
        match event:
            case {"event": "line", "rank": rank, "line": line}:
                self.on_line(rank, line)
            case {"event": "exit", "rank": rank, "code": code, "after": after}:
                self.codes[rank] = code
                if code and self.first_failure is None and not self.timed_out:
                    self.first_failure = Failure(rank, f"h{rank // self.per_host}", code, after)
            case {"event": "fault", "text": text} if self.on_event:
                self.on_event(text)
            case {"event": "cross", "host": host, "sample": sample}:
                self.cross.setdefault(host, []).append(Sample(*sample))
            case {"event": "timeout"}:
                self.timed_out = self.first_failure is None
            case {"event": "done", "stats": stats}:
                self.stats = LabStats.from_json(stats)
            case {"event": "error", "kind": kind, "text": text}:
                raise UsageError(text) if kind == "usage" else LabError(text)

    def result(self) -> RunResult:
        """The result, available once the inner process has reported its end."""
        if self.stats is None:
            raise LabError("the lab was ended from outside before its workers were done")
        codes = tuple(self.codes[rank] for rank in range(self.spec.hosts * self.per_host))
        return RunResult(codes, self.first_failure, self.timed_out, self.stats, self.cross)


def _check(command: Sequence[str], per_host: int, timeout: float | None, grace: float) -> None:
    if not command:
        raise UsageError("no command to run; put it after --, as in: -- python train.py")
    if shutil.which(command[0]) is None:
        raise UsageError(f"command {command[0]!r} is not found on PATH or cannot be executed")
    if not 1 <= per_host <= 64:
        raise UsageError(f"{per_host} workers a host; allowed: 1 to 64")
    if timeout is not None and timeout <= 0:
        raise UsageError(f"timeout of {timeout} seconds; allowed: more than 0")
    if grace < 0:
        raise UsageError(f"grace of {grace} seconds; allowed: 0 or more")


def look_in_sbin() -> None:
    """Add the folders of tc and ip to PATH, where users of Debian lack them."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    missing = [each for each in ("/usr/sbin", "/sbin") if each not in folders]
    os.environ["PATH"] = os.pathsep.join([*folders, *missing])


@functools.lru_cache(maxsize=1)
def isolation() -> tuple[str, ...]:
    """Return the ``unshare`` command that works here; as root without a user namespace if possible.

    LabError with the reason if none works.
    """
    look_in_sbin()
    rootless = (*UNSHARE, "--user", "--map-root-user")
    reason = ""
    for candidate in (UNSHARE, rootless) if os.geteuid() == 0 else (rootless,):
        try:
            done = subprocess.run([*candidate, "true"], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise LabError("unshare not found: the lab needs Linux with util-linux") from None
        if done.returncode == 0:
            return candidate
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
    raise LabError(f"private namespaces are refused here ({reason}); see: wingbeat lab doctor")


@contextlib.contextmanager
def _start(
    job: dict[str, Any], spec: LabSpec, listener: socket.socket, cwd: str | Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the inner process and send it its job; it has exited when the body ends."""
    source = str(Path(__file__).parents[2])
    # Isolated and without site: neither the working folder nor PYTHONPATH can replace a module.
    # The standard library and wingbeat_lab.lab are sufficient there.
    python = [sys.executable, "-I", "-S", "-c", _INNER, source]
    inner = subprocess.Popen(
        [*(isolation() if spec.shaped else ()), *python],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=cwd,
        pass_fds=[listener.fileno()],
        start_new_session=True,  # Ctrl-C reaches only the launcher, which ends the lab
        preexec_fn=functools.partial(
            kernel.die_with_parent, signal.SIGKILL if spec.shaped else signal.SIGTERM
        ),
    )
    try:
        _write(inner, json.dumps({**job, "listener": listener.fileno()}).encode() + b"\n")
        yield inner
    finally:
        _end(inner)


def _follow(inner: subprocess.Popen[bytes], collector: _Collector) -> None:
    """Handle events until the inner process ends; on Ctrl-C have it end its workers first."""
    assert inner.stdout is not None
    try:
        for line in inner.stdout:
            collector.take(json.loads(line))
    except KeyboardInterrupt:
        _write(inner, b"stop\n")
        for line in inner.stdout:
            collector.take(json.loads(line))
        raise


def _end(inner: subprocess.Popen[bytes]) -> None:
    """Close the input, which ends a lab that still runs, and wait for its exit."""
    assert inner.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        inner.stdin.close()
    inner.stdin = None
    try:
        inner.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        inner.kill()  # the kernel then kills every process in the lab
        inner.communicate()


def _write(inner: subprocess.Popen[bytes], data: bytes) -> None:
    assert inner.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its last output has the reason
        inner.stdin.write(data)
        inner.stdin.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""A worker's thread that reports its progress about once per second, and rank 0's supervisor.

A report is a text under the worker's key of the rendezvous store and replaces the previous one.
Rank 0 reads all of them and forwards them to the supervisor process that it has started.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from wingbeat.errors import UsageError
from wingbeat.observe import meter
from wingbeat.observe.log import log
from wingbeat.observe.meter import TEXT, Cell, Meter, Section
from wingbeat.observe.report import LARGEST, READS, Report
from wingbeat.observe.summary import Summary
from wingbeat.observe.supervisor import Places, socket_folder
from wingbeat.settings import is_on
from wingbeat.transport.store import Store

SWITCH = "WINGBEAT_TOP"
"""Environment variable: ``off`` disables reports and the supervisor."""

METRICS = "WINGBEAT_METRICS"
"""Environment variable: ``PORT`` or ``HOST:PORT`` at which the supervisor serves HTTP."""

EVERY_S = 1.0
"""Seconds between two reports."""

_READ_S = 1.0
"""Timeout of reads of keys that exist, in seconds."""

_LEAVE_S = 1.0
"""Seconds that the last report may take."""

_EXIT_S = 0.5
"""Seconds for the supervisor to exit by itself."""

_NAME = 40
"""Maximum characters of a script's name; the path of a socket has about 100 in all."""

_PROGRAM = (
    # A SIGTERM of the whole job may come while it imports the rest.
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = sys.argv[1].splitlines(); "
    "from wingbeat.observe.supervisor import main; main(sys.argv[2:])"
)
"""Like ``python -m wingbeat.observe.supervisor``, with this process's import path."""


# -- what the environment selects -----------------------------------------------------------------


def enabled(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether jobs are monitored; UsageError reports an invalid environment variable."""
    return is_on(SWITCH, env)


def places(env: Mapping[str, str] = os.environ) -> Places:
    """Return where the supervisor serves; UsageError reports an invalid port.

    >>> places({"WINGBEAT_METRICS": "9400", "WINGBEAT_RUNTIME_DIR": "/run/wb"})
    Places(folder='/run/wb', host='127.0.0.1', port=9400)
    """
    folder, address = str(socket_folder(env)), env.get(METRICS, "")
    if not address:
        return Places(folder)
    host, _, port = address.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{METRICS}={address:.80}: allowed is a port up to 65535, or HOST:PORT")
    return Places(folder, host.strip("[]") or "127.0.0.1", int(port))


def job_name(argv0: str = "", env: Mapping[str, str] = os.environ) -> str:
    """Return the name of this process's job: the script's name and a process id.

    Under torchrun it is torchrun's process id, so a restarted job keeps its name.
    """
    script = Path(argv0 or (sys.argv[0] if sys.argv else "")).name.removesuffix(".py")
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", script).strip("-.")[:_NAME] or "job"
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid()
    return f"{plain}-{pid}"


# -- the supervisor's process, seen from rank 0 ---------------------------------------------------


class SupervisorProcess:
    """The supervisor's process; a thread passes its messages for the user to ``tell``.

    Raises OSError if a process or a thread cannot be started.
    """

    def __init__(self, name: str, where: Places, tell: Callable[[str], None]) -> None:
        http = () if where.port is None else (where.host, str(where.port))
        self._reports, theirs = socket.socketpair()
        self._reports.settimeout(None)  # a script may have set another default
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, "\n".join(sys.path), name, where.folder, *http],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                bufsize=0,  # a buffer's lock could be held by a blocked thread
                # The job's stderr must close when the job exits.
                stderr=subprocess.DEVNULL,
            )
        except BaseException:
            self._reports.close()
            raise
        finally:
            theirs.close()
        self._tell = tell
        self._failed = False
        thread = threading.Thread(target=self._forward, name="wingbeat-supervisor", daemon=True)
        try:
            thread.start()
        except RuntimeError as err:  # too many threads
            self.close()
            raise OSError(str(err)) from None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send_report(self, rank: int, text: str) -> bool:
        """Send what a rank has reported; return whether it was sent, and report a first failure.

        Whatever the text contains, it is one line of bounded length.
        """
        line = f"{rank} {text[: LARGEST + 1]}".replace("\n", " ").encode("ascii", "replace")
        try:
            # A script may let SIGPIPE terminate it; this write must not.
            self._reports.sendall(line + b"\n", socket.MSG_NOSIGNAL)
            return True
        except OSError:  # it has exited, or is being closed
            if not self._failed and self._reports.fileno() >= 0:
                self._failed = True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if self._process.wait(_EXIT_S):  # with status 0 it has told the cause
                        why = "its supervisor has ended"
                        self._tell(f"`wingbeat top` shows this job no more: {why}")
            return False

    def close(self) -> None:
        """Close the input, then kill the process if needed; no thread may be sending."""
        with contextlib.suppress(OSError):  # it has exited, or was closed before
            # Forked children, such as a DataLoader's workers, hold the socket open too.
            self._reports.shutdown(socket.SHUT_WR)
        self._reports.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process, which also unblocks `send_report`."""
        self._process.kill()
        self._process.wait()

    def _forward(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                self._tell(line.decode(errors="replace").strip())


# -- a worker's reports ---------------------------------------------------------------------------


class Reporter:
    """Reports the meters of this process's models every ``every_s`` seconds.

    ``store`` is a connection for reports alone. On rank 0 ``supervisor`` receives the reports of
    all workers; it is None on other ranks. Rank 0 of several workers logs a `Summary`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        interfaces: Sequence[str],
        store: Store,
        supervisor: SupervisorProcess | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self._rank, self._size, self._interfaces, self._store = rank, size, interfaces, store
        self._supervisor, self._every_s = supervisor, every_s
        self._meters: weakref.WeakSet[Meter] = weakref.WeakSet()
        self._changing = threading.Lock()
        self._numbers = itertools.count()
        self._ending = threading.Event()
        self._pid = os.getpid()
        self._turn = 1
        self._seen: set[int] = set()
        self._summary = Summary(log.info) if size > 1 and not rank else None
        self._thread = threading.Thread(target=self._run, name="wingbeat-report", daemon=True)

    def add(self, each: Meter) -> None:
        """Include a model in the reports until its meter is garbage-collected."""
        with self._changing:
            self._meters.add(each)

    def start(self) -> Reporter:
        """Start the thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Send the last report and stop; takes about 1 s at most."""
        if self._pid != os.getpid():  # a forked child does not have the parent's threads
            return
        self._ending.set()
        self._thread.join(_LEAVE_S)
        if self._supervisor is not None and self._thread.is_alive():
            self._supervisor.kill()  # the thread may be blocked on it
        elif self._supervisor is not None:
            self._supervisor.close()

    def _run(self) -> None:
        try:
            while not self._ending.wait(self._every_s):
                self.send()
            self.send()
        except Exception as error:
            # Most often the store's host has exited. The supervisor notices missing reports, and
            # training is not affected.
            log.debug("rank %d reports no more: %s", self._rank, error)
        if self._summary is not None:
            self._summary.end()

    def send(self) -> None:
        """Write this worker's report; on rank 0 forward all workers' reports.

        Raises the store's exception if the store is lost.
        """
        report = self._report()
        if self._summary is not None:
            self._summary.add(report, self._comparison())
        mine = report.to_text()
        if self._rank:
            self._store.set(_key(self._rank), mine)
        elif self._supervisor is not None and self._supervisor.send_report(0, mine):
            # Ranks are read in turns, so that reading has a bounded cost.
            others = self._size - 1
            for _ in range(min(others, READS)):
                rank, self._turn = self._turn, self._turn % others + 1
                text = self._read(rank)
                if text is not None:
                    self._supervisor.send_report(rank, text)

    def _read(self, rank: int) -> str | None:
        if rank not in self._seen:
            # Waiting locks some stores, and their timeout of 0 s never expires.
            if not self._store.has(_key(rank)):
                return None
            self._seen.add(rank)
        try:
            return self._store.get(_key(rank), _READ_S)
        except TimeoutError:  # deleted, or replaced without the job's key
            self._seen.discard(rank)
            return None

    def _comparison(self) -> str:
        """Return what is known of DDP's schedule; nothing with several models."""
        with self._changing:
            meters = list(self._meters)
        return meters[0].compare() if len(meters) == 1 else ""

    def _report(self) -> Report:
        with self._changing:
            meters = sorted(self._meters, key=lambda each: (each.name, -each.iterations))
        sections = _added(section for each in meters for section in each.sections)
        if len(meters) > 1:
            steps: dict[str, Cell] = {f"{i} {m.name}": m.iterations for i, m in enumerate(meters)}
            sections.insert(0, Section("steps", steps))
        strategy = ", ".join(dict.fromkeys(each.strategy for each in meters))
        counts: Counter[str] = Counter()
        for each in meters:
            counts.update(dict(each.counts))
        return Report(
            rank=self._rank,
            size=self._size,
            host=socket.gethostname(),
            pid=os.getpid(),
            strategy=strategy if len(strategy) <= TEXT else strategy[: TEXT - 3] + "...",
            number=next(self._numbers),
            at_s=time.monotonic(),
            iteration=max((each.iterations for each in meters), default=0),
            spent_s=_spent(meters),
            interfaces=_bytes(self._interfaces),
            counts=dict(counts),
            sections=tuple(sections),
            ended=self._ending.is_set(),
        )


def _key(rank: int) -> str:
    return f"reports/{rank}"


def _spent(meters: Sequence[Meter]) -> dict[str, float]:
    """Return the seconds of all models by part."""
    models = [each.spent for each in meters]
    busy = {
        part: math.fsum(spent[part] for spent in models)
        for part in ("forward", "backward", "update", "exchange")
    }
    # Time that is ``other`` for one model may be another model's forward.
    passed = max((math.fsum(spent.values()) for spent in models), default=0.0)
    other = max(0.0, passed - math.fsum(busy.values()))
    return {**busy, "other": other, "codec": meter.codec.total / 1e9}


def _added(sections: Iterable[Section]) -> list[Section]:
    """Add the numbers of all models' sections of one name and unit; the last text is kept."""
    found: dict[tuple[str, str], dict[str, Cell]] = {}
    for section in sections:
        cells = found.setdefault((section.name, section.unit), {})
        for column, cell in section.cells.items():
            before = cells.get(column, 0)
            both = not isinstance(cell, str) and not isinstance(before, str)
            cells[column] = before + cell if both else cell  # type: ignore[operator]
    return [Section(name, cells, unit) for (name, unit), cells in found.items()]


def _bytes(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    try:
        found = psutil.net_io_counters(pernic=True, nowrap=False)
    except (OSError, RuntimeError):  # no /proc, or no permission
        return {}
    return {n: (found[n].bytes_sent, found[n].bytes_recv) for n in names if n in found}

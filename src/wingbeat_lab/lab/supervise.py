"""Start the workers of a lab, forward their output, and end them. One thread, no sleeps.

In a lab it runs as the first process of the process namespace, so that its end is the end of every
process in it; under loopback it is an ordinary process and ends the workers itself.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import resource
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wingbeat.errors import LabError, UsageError
from wingbeat_lab.lab import kernel

TERM_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""
MAX_LINE = 1 << 16

Emit = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Worker:
    """One process, its incomplete last line, and its callbacks.

    Attributes:
        on_line: called with each line.
        ended: called with the exit code; 128 + n for signal n.
    """

    rank: int
    pid: int
    pipe: int
    on_line: Callable[[str], None]
    ended: Callable[[int], None]
    open_line: bytearray = field(default_factory=bytearray)
    code: int | None = None


class Supervisor:
    """Runs workers until all have ended; calls ``emit`` with every line and every exit.

    Workers keep the current limit of open files, even if the lab raises its own.
    """

    def __init__(self, emit: Emit, *, grace: float, namespaced: bool) -> None:
        self.workers: list[Worker] = []
        self.beside: list[Worker] = []
        self._emit = emit
        self._grace = grace
        self._namespaced = namespaced
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._failed = False
        self._began = time.monotonic()
        self._file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._watch_children()

    def watch(self, file: int | socket.socket, call: Callable[[], None]) -> None:
        """Call back whenever ``file`` is readable."""
        self._selector.register(file, selectors.EVENT_READ, call)

    def unwatch(self, file: int | socket.socket) -> None:
        """Stop calling back for ``file``."""
        self._selector.unregister(file)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call back once, ``seconds`` from now."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), call))

    def start(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        enter: Callable[[int], None],
    ) -> None:
        """Start one worker for each environment; ``enter(rank)`` runs in the new process.

        UsageError if the command cannot be executed, LabError if it cannot enter its host.
        """
        for rank, env in enumerate(environments):
            on_line = functools.partial(self._emit_line, rank)
            ended = functools.partial(self._tell, rank)
            self.workers.append(self._start_one(rank, command, env, enter, on_line, ended))
        self._began = time.monotonic()

    def start_beside(
        self,
        number: int,
        command: Sequence[str],
        enter: Callable[[int], None],
        on_line: Callable[[str], None],
        ended: Callable[[int], None],
    ) -> None:
        """Start a process that is no worker: the run does not wait for it; the lab ends it.

        UsageError if the command cannot be executed, LabError if it cannot enter its host.
        """
        self.beside.append(self._start_one(number, command, os.environ, enter, on_line, ended))

    def _start_one(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        enter: Callable[[int], None],
        on_line: Callable[[str], None],
        ended: Callable[[int], None],
    ) -> Worker:
        def prepare() -> None:
            kernel.die_with_parent()
            enter(rank)
            resource.setrlimit(resource.RLIMIT_NOFILE, self._file_limit)

        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env=dict(env),
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as err:
            os.close(reader)
            raise UsageError(f"cannot run {command[0]!r}: {err.strerror}") from None
        except subprocess.SubprocessError:
            os.close(reader)
            raise LabError(
                f"could not place worker {rank} on its host; see: wingbeat lab doctor"
            ) from None
        finally:
            os.close(writer)
        process.returncode = 0  # waitid reaped it here, not subprocess
        os.set_blocking(reader, False)
        worker = Worker(rank, process.pid, reader, on_line, ended)
        self.watch(reader, lambda: self._read(worker))
        return worker

    @property
    def running(self) -> list[Worker]:
        """Workers that have not ended."""
        return [w for w in self.workers if w.code is None]

    @property
    def elapsed(self) -> float:
        """Seconds since all workers were started."""
        return time.monotonic() - self._began

    def run(self) -> None:
        """Serve until every worker has ended."""
        self._reap()
        while self.running:
            for key, _ in self._selector.select(self._until_timer()):
                key.data()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
        for worker in (*self.workers, *self.beside):
            self._read(worker)

    def signal_all(self, number: int) -> None:
        """Send a signal to the process groups of all running workers."""
        for worker in self.running:
            self.signal_worker(worker, number)

    def signal_worker(self, worker: Worker, number: int) -> None:
        """Send a signal to one worker and the processes it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, number)

    def stop(self) -> None:
        """Send SIGTERM to all workers, and SIGKILL to those that run a few seconds later."""
        self.signal_all(signal.SIGTERM)
        self.after(TERM_SECONDS, lambda: self.signal_all(signal.SIGKILL))

    def clean_up(self) -> None:
        """Kill what workers left running, such as data loader processes."""
        self.signal_all(signal.SIGKILL)
        if self._namespaced:
            return  # the namespace ends with this process, and all others with it
        while children := _children(os.getpid()):
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _until_timer(self) -> float | None:
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _watch_children(self) -> None:
        """Wake the selector when a child ends; a signal alone could precede ``select``."""
        kernel.adopt_orphans()
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

        def woken() -> None:
            os.read(reader, 4096)
            self._reap()

        self.watch(reader, woken)

    def _reap(self) -> None:
        by_pid = {w.pid: w for w in (*self.workers, *self.beside)}
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None:
                return
            worker = by_pid.get(info.si_pid)
            if worker and not self._namespaced:
                # Until it is reaped, its group's number cannot be reused.
                self.signal_worker(worker, signal.SIGKILL)
            _, status = os.waitpid(info.si_pid, 0)
            if worker:
                self._ended(worker, os.waitstatus_to_exitcode(status))

    def _ended(self, worker: Worker, code: int) -> None:
        self._read(worker)
        worker.code = code if code >= 0 else 128 - code
        worker.ended(worker.code)

    def _tell(self, rank: int, code: int) -> None:
        self._emit({"event": "exit", "rank": rank, "code": code, "after": self.elapsed})
        if code and not self._failed:
            self._failed = True
            self.after(self._grace, self.stop)

    def _read(self, worker: Worker) -> None:
        while worker.pipe >= 0:
            try:
                data = os.read(worker.pipe, MAX_LINE)
            except BlockingIOError:
                break
            worker.open_line += data
            *lines, worker.open_line = worker.open_line.split(b"\n")
            for line in lines:
                worker.on_line(_text(line))
            if len(worker.open_line) > MAX_LINE or (not data and worker.open_line):
                worker.on_line(_text(worker.open_line))
                worker.open_line = bytearray()
            if not data:
                self.unwatch(worker.pipe)
                os.close(worker.pipe)
                worker.pipe = -1

    def _emit_line(self, rank: int, line: str) -> None:
        self._emit({"event": "line", "rank": rank, "line": line})


def _text(line: bytes | bytearray) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # State and parent follow the command's name, which may contain anything.
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return found

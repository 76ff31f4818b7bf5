"""A set of worker processes on loopback that run test cases by name.

Importing torch takes seconds, so a server does it once and forks the workers, and a pool is given
many cases. Every worker sees the environment that torchrun sets; as under torchrun's agent, the
parent serves the rendezvous store, so no port is guessed and none is raced for. A case is any
importable function; each worker calls it with the same arguments and sends back what it returned
or raised.

Forked workers hash text alike, which real ones do not: one can have an interpreter of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helpers import worker

GRACE = 5.0
"""Seconds the other workers get to report once one has failed."""

SHOWN = 2000
"""Characters shown of the beginning and of the end of a failed worker's output."""


@dataclass(frozen=True)
class Outcome:
    """What one worker did with a case: ``kind`` is ``ok``, ``raised``, ``died`` or ``hung``.

    ``value`` is what the case returned; ``error`` is ``"Type: message"``; ``detail`` is the
    traceback and the tail of the worker's output; ``seconds`` is how long the answer took.
    """

    rank: int
    kind: str
    value: Any = None
    error: str = ""
    detail: str = ""
    seconds: float = 0.0


def load_ddp() -> None:
    """Have a worker load what DDP needs."""
    DistributedDataParallel(nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()


class CaseFailed(AssertionError):
    """A case did not succeed on every worker."""


def _torchrun_env(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextmanager
def _environment() -> Iterator[None]:
    """What has to be there before an interpreter loads anything."""
    path = [entry for entry in sys.path if entry and Path(entry).is_dir()]
    early = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    before = {name: os.environ.get(name) for name in early}
    os.environ.update(early)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@dataclass
class Pool:
    """``size`` workers on loopback; started by the first case, restarted after a failed one.

    With ``default_group`` each worker joins torch.distributed's default gloo group before its
    first case; without it that is left to the case. With ``interpreter`` the last worker has an
    interpreter of its own, which takes seconds; the others are forked.
    """

    size: int
    default_group: bool = True
    interpreter: bool = False
    _workers: list[BaseProcess] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _store: dist.TCPStore | None = None

    def start(self) -> None:
        """Start the workers; waits for the first server to load torch, and for no worker."""
        self._folder = tempfile.TemporaryDirectory(prefix="wingbeat-pool-")
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        multiprocessing.get_context("forkserver").set_forkserver_preload(["helpers.nursery"])
        for rank in range(self.size):
            context = multiprocessing.get_context(
                "spawn" if self.interpreter and rank == self.size - 1 else "forkserver"
            )
            ours, theirs = Pipe()
            log = Path(self._folder.name) / f"worker-{rank}.log"
            env = _torchrun_env(rank, self.size, self._store.port)
            args = (theirs, env, str(log), self.default_group)
            process = context.Process(target=worker.main, args=args)  # type: ignore[attr-defined]
            with _environment():
                process.start()
            theirs.close()
            self._workers.append(process)
            self._pipes.append(ours)
            self._logs.append(log)

    def close(self) -> None:
        """End every worker: politely by closing its pipe, then by its own pid."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 2.0
        for process in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._workers, self._pipes, self._logs, self._store = [], [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run(self, case: Callable[..., Any], *args: Any, deadline: float = 60.0) -> list[Any]:
        """Run ``case(*args)`` on every worker; the values in rank order, or `CaseFailed`."""
        outcomes = self.outcomes(case, *args, deadline=deadline)
        bad = [o for o in outcomes if o.kind != "ok"]
        if bad:
            lines = [f"rank {o.rank} {o.kind}: {o.error}" for o in bad]
            details = [f"--- rank {o.rank}\n{o.detail}" for o in bad if o.detail]
            raise CaseFailed("\n".join([*lines, *details]))
        return [o.value for o in outcomes]

    def outcomes(
        self,
        case: Callable[..., Any],
        *args: Any,
        deadline: float = 60.0,
        grace: float = GRACE,
        silent: Collection[int] = (),
    ) -> list[Outcome]:
        """Run ``case(*args)`` on every worker and say what each did; raises nothing.

        Ranks in ``silent`` are not waited for. The pool is closed, to be started again by the
        next case, unless all went well.
        """
        if not self._workers:
            self.start()
        begin = time.monotonic()
        for pipe in self._pipes:
            try:
                pipe.send((case.__module__, case.__qualname__, args))
            except OSError:
                continue  # its process is gone: told from its exit code below
        found: dict[int, Outcome] = {}
        until = begin + deadline
        while found.keys() | set(silent) != set(range(self.size)) and time.monotonic() < until:
            before = len(found)
            self._collect(found, begin, max(0.0, until - time.monotonic()))
            if len(found) > before and any(o.kind != "ok" for o in found.values()):
                until = min(until, time.monotonic() + grace)
        for rank in range(self.size):
            if rank not in found:
                error = f"no answer within {time.monotonic() - begin:.0f} s"
                found[rank] = Outcome(rank, "hung", error=error, detail=self._stack(rank))
        if any(o.kind != "ok" for o in found.values()):
            self.close()
        return [found[rank] for rank in range(self.size)]

    def _collect(self, found: dict[int, Outcome], begin: float, timeout: float) -> None:
        """Take the answers that are there, waiting up to ``timeout`` for the first."""
        waiting = {self._pipes[r]: r for r in range(self.size) if r not in found}
        for pipe in wait(list(waiting), timeout):
            assert isinstance(pipe, Connection)
            rank, took = waiting[pipe], time.monotonic() - begin
            try:
                kind, value, error, detail = pipe.recv()
            except (EOFError, OSError):
                self._workers[rank].join()
                error, detail = f"exit code {self._workers[rank].exitcode}", self._tail(rank)
                found[rank] = Outcome(rank, "died", error=error, detail=detail, seconds=took)
                continue
            if kind != "ok":
                detail += self._tail(rank)
            found[rank] = Outcome(rank, kind, value, error, detail, took)

    def _tail(self, rank: int) -> str:
        path = self._logs[rank]
        text = path.read_text(errors="replace") if path.exists() else ""
        if len(text) > 2 * SHOWN:
            text = f"{text[:SHOWN]}\n[...]\n{text[-SHOWN:]}"
        return f"\noutput of rank {rank}:\n{text}" if text.strip() else ""

    def _stack(self, rank: int) -> str:
        """Where a silent worker stands: it prints its stacks on SIGUSR1."""
        pid = self._workers[rank].pid
        if self._workers[rank].exitcode is not None or pid is None or not self._logs[rank].exists():
            return self._tail(rank)
        size = self._logs[rank].stat().st_size
        os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while self._logs[rank].stat().st_size == size and time.monotonic() < until:
            time.sleep(0.02)
        return self._tail(rank)

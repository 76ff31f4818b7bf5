"""A set of worker processes on loopback that run test cases by name.

Importing torch takes over a second, so a pool is started once and given many cases. Every
worker sees the environment that torchrun sets; as under torchrun's agent, the parent serves the
rendezvous store, so no port is guessed and none is raced for. A case is any importable function;
each worker calls it with the same arguments and sends back what it returned or raised.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def _worker_env(rank: int, size: int, port: int) -> dict[str, str]:
    path = [entry for entry in sys.path if entry and Path(entry).is_dir()]
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONFAULTHANDLER": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


@dataclass
class Pool:
    """``size`` workers on loopback; started by the first case, restarted after a failed one.

    With ``default_group`` each worker joins torch.distributed's default gloo group before its
    first case; without it that is left to the case.
    """

    size: int
    default_group: bool = True
    starts: int = 0
    _workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _store: dist.TCPStore | None = None

    def start(self) -> None:
        """Start the workers; does not wait for them."""
        self._folder = tempfile.TemporaryDirectory(prefix="wingbeat-pool-")
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.starts += 1
        for rank in range(self.size):
            ours, theirs = Pipe()
            log = Path(self._folder.name) / f"worker-{rank}.log"
            mode = "join" if self.default_group else "alone"
            with log.open("wb") as out:
                worker = subprocess.Popen(
                    [sys.executable, "-m", "helpers.worker", str(theirs.fileno()), mode],
                    env=_worker_env(rank, self.size, self._store.port),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
            self._logs.append(log)

    def close(self) -> None:
        """End every worker: politely by closing its pipe, then by its own pid."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 2.0
        for worker in self._workers:
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.send_signal(signal.SIGKILL)
                worker.wait()
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
                code = self._workers[rank].wait()
                error, detail = f"exit code {code}", self._tail(rank)
                found[rank] = Outcome(rank, "died", error=error, detail=detail, seconds=took)
                continue
            if kind != "ok":
                detail += self._tail(rank)
            found[rank] = Outcome(rank, kind, value, error, detail, took)

    def _tail(self, rank: int) -> str:
        text = self._logs[rank].read_text(errors="replace")
        if len(text) > 2 * SHOWN:
            text = f"{text[:SHOWN]}\n[...]\n{text[-SHOWN:]}"
        return f"\noutput of rank {rank}:\n{text}" if text.strip() else ""

    def _stack(self, rank: int) -> str:
        """Where a silent worker stands: it prints its stacks on SIGUSR1."""
        if self._workers[rank].poll() is not None:
            return self._tail(rank)
        size = self._logs[rank].stat().st_size
        self._workers[rank].send_signal(signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while self._logs[rank].stat().st_size == size and time.monotonic() < until:
            time.sleep(0.02)
        return self._tail(rank)

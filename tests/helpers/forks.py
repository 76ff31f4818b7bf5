"""Processes of a script as a launcher starts them, forked from one process that has loaded torch.

A process that loads torch takes some seconds of a processor. Run as a program, this one reads
requests, a line of JSON each, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from helpers.ports import free_port
from helpers.waiting import PATIENCE


class Ended(NamedTuple):
    """How a rank has ended: its exit status, negative for a signal, and what it has written."""

    status: int
    said: str

    @property
    def tracebacks(self) -> int:
        """The number of tracebacks that it has written."""
        return self.said.count("Traceback (most recent call last)")

    @property
    def last(self) -> str:
        """Its last line."""
        return self.said.rstrip().rpartition("\n")[2]


class Job:
    """The processes of one job, rank by rank, each in a session of its own."""

    def __init__(self, forks: Forks, request: dict[str, Any]) -> None:
        self._forks, self._request = forks, request
        self._folder = Path(request["folder"])
        self.pids: list[int] = forks.ask(request)

    def restart(self, rank: int) -> None:
        """Wait until the process of a rank has ended, and start it again."""
        self.until(lambda: self._statuses()[rank] is not None)
        [self.pids[rank]] = self._forks.ask({**self._request, "ranks": [rank]})

    def said(self, rank: int) -> str:
        """Return what a rank has written until now."""
        with contextlib.suppress(FileNotFoundError):  # it is being forked
            return (self._folder / f"{rank}.txt").read_text(encoding="utf-8", errors="replace")
        return ""

    def until(self, is_so: Callable[[], object], seconds: float = 3 * PATIENCE) -> None:
        """Wait for something; fail with all output if it is not in time."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, "\n".join(map(self.said, range(len(self.pids))))
            time.sleep(0.02)

    def until_said(self, text: str, ranks: Sequence[int] = ()) -> None:
        """Wait until these ranks, or all, have written a text."""
        chosen = ranks or range(len(self.pids))
        self.until(lambda: all(text in self.said(rank) for rank in chosen))

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to the process groups of these ranks; default: of all."""
        for rank in ranks or range(len(self.pids)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pids[rank], number)

    def end(self, seconds: float = 3 * PATIENCE) -> list[Ended]:
        """Wait for all ranks, and return how they have ended; nothing of them may be left."""
        self.until(lambda: None not in self._statuses(), seconds)
        ended = [Ended(s, self.said(rank)) for rank, s in enumerate(self._statuses())]
        self.until(lambda: not any(map(self._alive, self.pids)))
        return ended

    def kill(self) -> None:
        """End what is left of it."""
        self.signal(signal.SIGKILL)

    def _statuses(self) -> list[Any]:
        found = self._forks.ask({"statuses": self.pids})
        return list(found)

    @staticmethod
    def _alive(session: int) -> bool:
        """Whether a process of the session of a rank runs, such as a server."""
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return False
        states = [
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            for pid in os.listdir("/proc")
            if pid.isdigit() and Path(f"/proc/{pid}/stat").exists()
        ]
        return any(int(each[3]) == session and each[0] != "Z" for each in states)


class Forks:
    """The process that forks them."""

    def __init__(self) -> None:
        tests = str(Path(__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.forks"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> Any:
        """Send a request and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    @contextlib.contextmanager
    def job(
        self,
        script: Path,
        folder: Path,
        *words: str,
        size: int = 3,
        port: int = 0,
        env: Mapping[str, str] = {},
    ) -> Iterator[Job]:
        """Start a script as ``size`` ranks that rank 0 serves the store, as without a launcher."""
        folder.mkdir(exist_ok=True)
        known = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        known["MASTER_PORT"] = str(port or free_port())
        asked = {
            "script": str(script), "words": words, "folder": str(folder),
            "ranks": list(range(size)), "env": {**known, **env},
        }  # fmt: skip
        job = Job(self, asked)
        try:
            yield job
        finally:
            job.kill()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _become(rank: int, request: dict[str, Any]) -> None:
    os.setsid()
    output = os.open(Path(request["folder"]) / f"{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["env"], RANK=str(rank))
    sys.argv = [request["script"], *request["words"]]
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    runpy.run_path(request["script"], run_name="__main__")


def _serve() -> None:
    import torch._dynamo.config
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    import wingbeat.engine.upgrade  # noqa: F401

    statuses: dict[int, int] = {}
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "statuses" in request:
            for pid in set(request["statuses"]) - set(statuses):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps([statuses.get(p) for p in request["statuses"]]), file=answers)
        else:
            pids = []
            for rank in request["ranks"]:
                pid = os.fork()
                if pid == 0:
                    answers.close()
                    _become(rank, request)
                    return
                while os.getsid(pid) != pid:  # until then it has this process's group
                    time.sleep(0.001)
                pids.append(pid)
            print(json.dumps(pids), file=answers)
        answers.flush()


if __name__ == "__main__":
    _serve()

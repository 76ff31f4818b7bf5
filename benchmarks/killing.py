"""Workers of a lab that are killed one after the other, and restarted, while the rest train.

Each host has a keeper process, which runs its worker, kills it (SIGKILL) on request and starts the
next incarnation. Rank 0's keeper has the rendezvous store, as torchrun would, so that rank 0's
worker may be killed too. All share a folder: a worker writes ``at-RANK`` there (`Telling.say`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common import run_and_judge, show, write

from wingbeat.errors import LabError
from wingbeat_lab import baselines, lab
from wingbeat_lab.bench.table import Printed

PATIENCE_S = 300.0
"""Seconds for a worker to rejoin, and for the others to continue."""
TOGETHER = 20
"""Minimum number of steps that all train together between two kills."""
LEARNT = 0.1
"""Allowed share of the loss at the start of training."""
LOOK_S = 0.02


def trained(
    spec: str, script: str, home: Path, row: str, env: dict[str, str], killer: Killer
) -> list[str]:
    """Run a job in a lab while the killer kills; return its lines."""
    lines: list[str] = []
    thread = threading.Thread(target=killer.run, name="killer")
    thread.start()
    try:
        ended = lab.run(
            spec,
            [sys.executable, script, "--keep", str(home), row],
            env={"WINGBEAT_TOP": "off", **env},
            on_line=lambda rank, line: lines.append(f"[{rank}] {line}"),
        )
    finally:
        killer.over.set()
        thread.join()
    if ended.exit_code or killer.failure:
        print("\n".join(lines[-40:]))
        raise LabError(f"{spec}: {killer.failure or ended.first_failure or ended.exit_code}")
    return lines


class Killer:
    """Has one worker after the other killed, from outside of the lab.

    Args:
        home: the shared folder.
        workers: number of workers.
        times: number of kills.
        seed: determines victims and times.
        spared: ranks that are not killed.
        last: a rank that is killed permanently after all others; None for none.

    Attributes:
        kills: results, see `_kill`.
        failure: why it stopped early; empty if it did not.
        over: set when the lab has ended.
    """

    def __init__(
        self,
        home: Path,
        workers: int,
        times: int,
        seed: int,
        *,
        spared: Sequence[int] = (),
        last: int | None = None,
    ) -> None:
        self._home, self._workers, self._times, self._last = home, workers, times, last
        self._drawn, self._lives = random.Random(seed), [0] * workers
        self._victims = [rank for rank in range(workers) if rank not in spared]
        self.kills: list[dict[str, Any]] = []
        self.failure, self.over = "", threading.Event()

    def run(self) -> None:
        """Kill, and stop all some steps after the last worker has rejoined."""
        everyone = range(self._workers)
        try:
            for _ in range(self._times):
                self._together(everyone)
                time.sleep(self._drawn.uniform(0.0, 0.5))
                self.kills.append(self._kill(self._drawn.choice(self._victims), back=True))
            steps = self._together(everyone)
            if self._last is not None:
                self.kills.append(self._kill(self._last, back=False))
                steps = self._together([rank for rank in everyone if rank != self._last])
            put(self._home / "stop", steps + 10 * TOGETHER)
        except TimeoutError as error:
            self.failure = "" if self.over.is_set() else str(error)
            put(self._home / "stop", 0)

    def _kill(self, rank: int, *, back: bool) -> dict[str, Any]:
        """Kill a worker; return the state of all workers, and the longest stall.

        ``rank``; ``steps`` of the slowest of the others; ``still_s``, the longest time that any of
        these made no step in; ``back_s``, until the killed one trains again, and
        ``steps_without``, steps of the slowest by then; ``before``, the last report of the killed
        one; the reports of the others then (``others``) and in the end (``after``).
        """
        others = [each for each in range(self._workers) if each != rank]
        said, before = self.said(rank) or {}, [self.said(each) or {} for each in others]
        begun, began = self._steps(others), time.monotonic()
        self._end(rank, back=back)
        self._lives[rank] += 1
        still, back_s, without = Standstill(others, began), None, 0
        while (back and back_s is None) or self._steps(others) < begun + TOGETHER:
            now = time.monotonic()
            still.look(now, {each: self._steps([each]) for each in others})
            if back and back_s is None and self.said(rank) is not None:
                back_s, without = now - began, self._steps(others) - begun
            self._wait(now - began, f"rank {rank} was killed at step {begun}")
        if back:
            self._together(range(self._workers))
        return {
            "rank": rank, "steps": begun, "still_s": still.longest_s, "steps_without": without,
            "back_s": back_s, "before": said, "others": before,
            "after": [self.said(each) or {} for each in others],
        }  # fmt: skip

    def _end(self, rank: int, *, back: bool) -> None:
        """Have a worker killed, and restarted if ``back``."""
        put(self._home / f"kill-{rank}", back)

    def _together(self, ranks: Sequence[int]) -> int:
        """Wait until all have made some more steps; return the number of steps of all."""
        began, first = time.monotonic(), None
        while True:
            if all(self.said(rank) is not None for rank in ranks):
                steps = self._steps(ranks)
                first = steps if first is None else first
                if steps >= first + TOGETHER:
                    return steps
            self._wait(time.monotonic() - began, "not all train")

    def _wait(self, waited: float, what: str) -> None:
        if waited > PATIENCE_S or self.over.wait(LOOK_S):
            raise TimeoutError(f"{what}, and after {waited:.0f} s they do not go on")

    def _steps(self, ranks: Iterable[int]) -> int:
        return min(((self.said(rank) or {"steps": 0})["steps"] for rank in ranks), default=0)

    def said(self, rank: int) -> dict[str, Any] | None:
        """The last report of a worker's current incarnation; None if it does not train yet."""
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((self._home / f"at-{rank}").read_text())
            return dict(found) if found["life"] == self._lives[rank] else None
        return None


class Standstill:
    """The longest time in which any of some workers has made no step.

    Args:
        ranks: of the workers.
        now: seconds; every worker counts as having just made a step.

    Attributes:
        longest_s: so far.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._moved = dict.fromkeys(ranks, now)
        self._steps: dict[int, int] = {}
        self.longest_s = 0.0

    def look(self, now: float, steps: dict[int, int]) -> None:
        """Record each worker's number of steps."""
        for rank, made in steps.items():
            self.longest_s = max(self.longest_s, now - self._moved[rank])
            if made > self._steps.setdefault(rank, made):
                self._steps[rank], self._moved[rank] = made, now


# -- for benchmarks --------------------------------------------------------------------------


def run_once(
    args: Any,
    run: Callable[[Any, Path], dict[str, Any]],
    tables: Callable[[dict[str, Any]], list[Printed]],
    judged: Callable[[int, dict[str, Any]], list[str]],
) -> int:
    """Run in a new folder, save the report and judge it; return the exit code.

    Args:
        args: the command line, with ``json``, ``kills`` and ``row``.
        run: returns the results.
        tables: returns them for printing.
        judged: returns the missed limits for so many kills.
    """

    def measure(report: dict[str, Any]) -> list[str]:
        baselines.parse(args.row)  # fail before a lab is created, rather than in each worker
        with tempfile.TemporaryDirectory() as folder:
            report |= run(args, Path(folder))
        for table in (*tables(report), losses_table(report["losses"])):
            show(report, table)
        write(args.json, report)
        return judged(args.kills, report)

    return run_and_judge(args.json, measure)


def standstills(kills: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line about the others' longest stalls; none without kills."""
    still = [kill["still_s"] for kill in kills]
    if not still:
        return []
    spread = f"{min(still):.2f} .. {max(still):.2f} s"
    return [f"the others stood still for {statistics.median(still):.2f} s (median), {spread}"]


def kill_cells(kills: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each kill; its last cell is empty if the worker has not rejoined."""
    return [
        (
            f"kill {number}",
            str(kill["rank"]),
            str(kill["steps"]),
            f"{kill['still_s']:.2f}",
            str(kill["steps_without"]),
            "" if kill["back_s"] is None else f"{kill['back_s']:.2f}",
        )
        for number, kill in enumerate(kills, start=1)
    ]


def losses_table(found: dict[str, Any]) -> Printed:
    """Return each worker's held-out loss, before and after."""
    cells = [(name, f"{a:.3f}", f"{b:.4f}") for name, (a, b, _) in sorted(found.items())]
    return Printed.of("held-out loss", ("worker", "at first", "in the end"), cells)


def put(path: Path, value: Any) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value))
    part.rename(path)


# -- on a host of the lab --------------------------------------------------------------------


def keep(script: str, home: Path, row: str) -> int:
    """Run the host's worker, kill it on request, and restart it.

    The command is ``SCRIPT --work HOME ROW LIFE``.

    Returns:
        Its exit code, when it has ended by itself; 0 if it was killed permanently.
    """
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as in torchrun's workers: clients
    store = dist.TCPStore("0.0.0.0", port, size, True, wait_for_workers=False) if not rank else None
    asked = home / f"kill-{rank}"
    life, code, back = 0, None, True
    while code is None and back:
        words = [sys.executable, script, "--work", str(home), row, str(life)]
        worker = subprocess.Popen(words)
        while (code := worker.poll()) is None and not asked.exists():
            time.sleep(LOOK_S / 2)
        if code is None:
            worker.kill()
            worker.wait()
            back = json.loads(asked.read_text())
            asked.unlink()
            life += 1
    (home / f"left-{rank}").touch()
    while store is not None and not all((home / f"left-{r}").exists() for r in range(size)):
        time.sleep(LOOK_S)
    return code or 0


class Telling:
    """A worker's reports to the killer.

    Args:
        home: the shared folder.
        rank: the worker's.
        life: number of its incarnation.
    """

    def __init__(self, home: Path, rank: int, life: int) -> None:
        self._home, self._rank, self._life = home, rank, life

    def say(self, steps: int, **more: Any) -> bool:
        """Report the number of steps; return whether to continue.

        Args:
            steps: of all incarnations together.
            more: for the report.
        """
        put(self._home / f"at-{self._rank}", {"life": self._life, "steps": steps, **more})
        stop = self._home / "stop"
        return not stop.exists() or steps < json.loads(stop.read_text())

    def end(self, first: float, model: Any, loss: Callable[[Any], float]) -> None:
        """Report the result: the first loss, the last one, and the sums of parameters."""
        sums = [float(p.detach().double().abs().sum()) for p in model.parameters()]
        put(self._home / f"loss-{self._rank}", (first, loss(model), sums))


def losses(home: Path) -> dict[str, Any]:
    """Return the workers' final reports."""
    return {path.name: json.loads(path.read_text()) for path in sorted(home.glob("loss-*"))}


def missed_losses(found: dict[str, Any]) -> list[str]:
    """Return the missed limits: all learn, and have the same weights."""
    missed = []
    for name, (first, last, sums) in found.items():
        if not last <= LEARNT * first:
            missed.append(f"{name}: {last:.3f}, it began with {first:.3f}; limit {LEARNT} of it")
        if sums != next(iter(found.values()))[2]:
            missed.append(f"{name}: other weights than the others'")
    return missed


def loss_of(held_out: Any) -> Callable[[Any], float]:
    """Return the loss of a model on images and their digits."""
    import torch

    def loss(model: Any) -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(held_out[0]), held_out[1]))

    return loss

"""Exact strategies whose replicas are killed and stopped, in real processes over loopback."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import elastic_script
import pytest
import torch

from helpers.code_blocks import blocks_of
from wingbeat.transport.served_store import StoreServer

PAGE = Path(__file__).parents[3] / "docs/how-to/checkpoints.md"
SCRIPT = Path(elastic_script.__file__)
PATIENCE_S = 150.0
NEVER = (-1, "")
PAUSE_S = 5.0
"""Seconds that torchft's DDP made no step in at a kill, on the machine of these tests."""

Fault = tuple[int, str]


class Job:
    """Replicas of one process each."""

    def __init__(self, home: Path, replicas: int, row: str, **options: Any) -> None:
        self.home, self.replicas, self._store = home, replicas, StoreServer(0)
        self._options = {"optimizer": "sgd", "norm": False, "pace": 0.01, "timeout": 60.0}
        self._options |= {"row": row, **options}
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.lives: dict[int, int] = {}

    def start(self, rank: int, fault: Fault = NEVER) -> None:
        life = self.lives[rank] = self.lives.get(rank, -1) + 1
        env = os.environ | {
            "WINGBEAT_REPLICA": str(rank),
            "WINGBEAT_REPLICAS": str(self.replicas),
            "WINGBEAT_STORE": f"127.0.0.1:{self._store.port}",
            "WINGBEAT_TOP": "off",
            "OMP_NUM_THREADS": "1",
        }
        options = json.dumps(self._options | {"life": life, "fault": fault})
        with (self.home / f"err-{rank}-{life}").open("wb") as err:
            words = [sys.executable, str(SCRIPT), str(self.home), options]
            self.running[rank] = subprocess.Popen(words, env=env, stderr=err)

    def lines(self, rank: int, life: int | None = None) -> list[dict[str, Any]]:
        path = self.home / f"log-{rank}-{self.lives[rank] if life is None else life}"
        if not path.exists():
            return []
        whole = [each for each in path.read_text().splitlines(keepends=True) if each[-1] == "\n"]
        return list(map(json.loads, whole))

    def errors(self, rank: int, life: int = 0) -> str:
        return (self.home / f"err-{rank}-{life}").read_text()

    def await_steps(self, least: int, ranks: Sequence[int]) -> None:
        self._wait(lambda: all(len(self.lines(rank)) >= least for rank in ranks), ranks)

    def await_death(self, rank: int) -> None:
        process = self.running.pop(rank)
        self._wait(lambda: process.poll() is not None, ())
        assert process.returncode == -signal.SIGKILL, self.errors(rank, self.lives[rank])

    def _wait(self, done: Callable[[], bool], ranks: Sequence[int]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            for rank in ranks:
                code = self.running[rank].poll()
                assert code is None, self.errors(rank, self.lives[rank])
            assert time.monotonic() < deadline, [self.errors(rank) for rank in self.lives]
            time.sleep(0.05)

    def step(self) -> int:
        """The largest number of steps that a process has written."""
        return max(self.lines(rank)[-1]["step"] for rank in self.running if self.lines(rank))

    def end(self, steps: int = 20) -> dict[int, dict[str, Any]]:
        """Have all make some more steps; return what each has written last."""
        part = self.home / "stop.new"
        part.write_text(str(self.step() + 1 + steps))
        part.rename(self.home / "stop")
        for rank, process in self.running.items():
            assert process.wait(PATIENCE_S) == 0, self.errors(rank, self.lives[rank])
        return {rank: self.lines(rank)[-1] for rank in self.running}

    def close(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self._store.close()

    def history(self) -> dict[int, list[dict[str, Any]]]:
        """The lines of all processes by step."""
        found: dict[int, list[dict[str, Any]]] = {}
        for rank, last in self.lives.items():
            for life in range(last + 1):
                for line in self.lines(rank, life):
                    if "loss" in line:
                        found.setdefault(line["step"], []).append({**line, "rank": rank})
        return found

    def longest_pause(self, rank: int) -> float:
        times = [line["at"] for line in self.lines(rank) if "at" in line]
        return max(b - a for a, b in itertools.pairwise(times))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def made(*args: Any, **options: Any) -> Job:
        jobs.append(Job(tmp_path, *args, **options))
        return jobs[-1]

    yield made
    for job in jobs:
        job.close()


def agreeing(job: Job) -> int:
    """Check that all processes have done the same in each step; return the dropped steps."""
    dropped = 0
    for step, lines in sorted(job.history().items()):
        for key in ("applied", "weights"):
            found = {line.get(key) for line in lines if line["same_members"]}
            assert len(found) <= 1 or step_of_a_death(job, step), (step, lines)
        dropped += not lines[0]["applied"]
    return dropped


def step_of_a_death(job: Job, step: int) -> bool:
    """Whether a process that died has written the step, which the others may have dropped."""
    last = [job.lines(r, life)[-1]["step"] for r, n in job.lives.items() for life in range(n)]
    dead = [job.lines(r)[-1]["step"] for r in job.lives if r not in job.running]
    return step in [*last, *dead]


def replayed(job: Job, optimizer_name: str) -> list[torch.Tensor]:
    """The weights of one process that computes the mean over the ranks of each applied step."""
    model = elastic_script.net(0)
    optimizer = elastic_script.OPTIMIZERS[optimizer_name](model.parameters())
    for step, lines in sorted(job.history().items()):
        alive = [line for line in lines if line["rank"] in job.running]
        if not alive[0]["applied"]:
            continue
        ranks = alive[0]["members"]
        total: list[torch.Tensor] = []
        for rank in ranks:
            x, y = elastic_script.batch(step, rank)
            model.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            grads = [param.grad / len(ranks) for param in model.parameters()]  # type: ignore[operator]
            total = grads if not total else [a + b for a, b in zip(total, grads, strict=True)]
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach().flatten() for param in model.parameters()]


def distance(ours: Sequence[Sequence[float]], theirs: Sequence[torch.Tensor]) -> float:
    mine = torch.cat([torch.tensor(each, dtype=torch.float64) for each in ours])
    wanted = torch.cat(list(theirs))
    return float((mine - wanted).norm() / wanted.norm())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("row", ["allreduce:min_replicas=1", "dear:min_replicas=1,plan=fixed"])
def test_replicas_that_are_killed_anywhere_in_a_step_are_left_out_and_return(
    make: Callable[..., Job], row: str, optimizer: str
) -> None:
    drawn = random.Random(f"{row} {optimizer}")
    job = make(3, f"{row},mb=0.03", optimizer=optimizer, pace=0.1)
    victims = drawn.sample(range(3), 3)
    places = drawn.sample(elastic_script.PLACES, 3)
    for rank in range(3):
        job.start(rank, (10, places[0]) if rank == victims[0] else NEVER)
    for number, victim in enumerate(victims):
        job.await_death(victim)
        later = victims[number + 1 :]
        if not later:
            break
        # The next victim was started before its fault was known, so the one that returns has it.
        job.start(victim)
        job.await_steps(5, [victim])
        if number == 0:
            os.kill(job.running[victims[1]].pid, signal.SIGKILL)
        else:
            time.sleep(drawn.uniform(0.0, 0.3))
            os.kill(job.running[victims[2]].pid, signal.SIGKILL)
    ends = job.end()
    assert len({end["end"] for end in ends.values()}) == 1
    assert 1 <= agreeing(job) <= 2 * len(victims)
    for rank in job.running:
        assert job.longest_pause(rank) < PAUSE_S
        losses = [line["loss"] for line in job.lines(rank)[:-1]]
        assert all(loss < 10.0 for loss in losses)
    if row.startswith("allreduce"):
        (first, *_) = ends.values()
        assert distance(first["values"], replayed(job, optimizer)) < 1e-10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", elastic_script.PLACES)
def test_the_weights_without_one_of_two_are_bit_for_bit_those_of_the_participants(
    make: Callable[..., Job], place: str
) -> None:
    job = make(2, "allreduce:min_replicas=1,mb=0.03", optimizer="adam")
    job.start(0)
    job.start(1, (12, place))
    job.await_death(1)
    job.await_steps(30, [0])
    (end,) = job.end().values()
    # A sum of two does not depend on the order.
    assert distance(end["values"], replayed(job, "adam")) == 0.0
    assert agreeing(job) <= 1
    assert "the others continue without it [event=lost rank=1 incarnation=0]" in job.errors(0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_that_was_stopped_copies_the_weights_and_trains_again(
    make: Callable[..., Job],
) -> None:
    job = make(3, "allreduce:min_replicas=2", timeout=60.0, norm=True)
    for rank in range(3):
        job.start(rank)
    job.await_steps(10, range(3))
    os.kill(job.running[1].pid, signal.SIGSTOP)
    before = len(job.lines(0))
    job.await_steps(before + 30, [0, 2])
    assert max(map(job.longest_pause, (0, 2))) < 20.0, "seconds, and not the timeout"
    os.kill(job.running[1].pid, signal.SIGCONT)
    before = len(job.lines(1))
    job.await_steps(before + 30, [1])
    ends = job.end()
    assert len({end["end"] for end in ends.values()}) == 1
    assert len({str(end["buffers"]) for end in ends.values()}) == 1
    for rank, said in ((0, "lost"), (0, "returned"), (1, "excluded")):
        assert f"[event={said} rank=1 incarnation=0]" in job.errors(rank)
    assert agreeing(job) <= 4


UNTIL_STOPPED = """
def until_stopped(first):
    import pathlib, time
    stop = pathlib.Path(__file__).parent / "stop"
    while not (stop.exists() and first >= int(stop.read_text())):
        print(f"step {first} rate {schedule.get_last_lr()[0]!r}", flush=True)
        yield first
        first += 1
        time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_of_the_page_continues_with_the_schedule_after_a_return(tmp_path: Path) -> None:
    (code,) = [block.code for block in blocks_of(PAGE) if block.code.startswith("# exact.py")]
    code = code.replace("range(first, 400)", "until_stopped(first)")
    script, store = tmp_path / "exact.py", StoreServer(0)
    head, loop, tail = code.partition("for step in")
    script.write_text(head + UNTIL_STOPPED + loop + tail)

    def start(rank: int) -> subprocess.Popen[str]:
        env = os.environ | {"WINGBEAT_REPLICA": str(rank), "WINGBEAT_REPLICAS": "2"}
        env |= {"WINGBEAT_STORE": f"127.0.0.1:{store.port}", "WINGBEAT_TOP": "off"}
        words = [sys.executable, str(script)]
        return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)

    running = [start(rank) for rank in range(2)]
    try:
        assert running[1].stdout is not None
        for line in running[1].stdout:
            if line.startswith("step 20 "):
                break
        running[1].kill()
        running[1].wait()
        running[1] = start(1)
        assert running[1].stdout is not None
        begun = running[1].stdout.readline()
        step = int(begun.split()[1])
        (tmp_path / "stop").write_text(str(step + 30))
        texts = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
        store.close()
    assert [process.returncode for process in running] == [0, 0]
    rates = [dict(re.findall(r"step (\d+) rate (\S+)", text)) for text in texts]
    assert step > 20
    both = rates[0].keys() & rates[1].keys()
    assert len(both) > 20
    assert all(rates[0][each] == rates[1][each] for each in both)
    assert begun.split()[3] == rates[0][str(step)]
    sums = [text.splitlines()[-1].partition(": ")[2] for text in texts]
    assert sums[0] == sums[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fewer_than_min_replicas_end_with_one_line(make: Callable[..., Job]) -> None:
    job = make(2, "allreduce:min_replicas=2", timeout=5.0)
    job.start(0)
    job.start(1, (10, "backward"))
    job.await_death(1)
    assert job.running.pop(0).wait(PATIENCE_S) == 1
    *_, last = job.errors(0).splitlines()
    assert last.removeprefix("[rank0]: ") == (
        "wingbeat.errors.PeerError: rank 0: 1 of 2 replicas are left, fewer than min_replicas=2, "
        "and none has returned for 5 s; start all replicas again from a checkpoint"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fewer_than_min_replicas_wait_for_one_that_returns(make: Callable[..., Job]) -> None:
    job = make(2, "allreduce:min_replicas=2", timeout=100.0)
    job.start(0)
    job.start(1, (10, "after backward"))
    job.await_death(1)
    job.start(1)
    job.await_steps(10, [0, 1])
    ends = job.end()
    assert len({end["end"] for end in ends.values()}) == 1
    members = [line["members"] for line in job.lines(0)[:-1]]
    assert all(each == [0, 1] for each in members), "none has trained alone"


AGAIN = """
import gc
import weakref

import torch

import wingbeat
from wingbeat.errors import UsageError

wingbeat.init(timeout=60)


def trained():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wingbeat.distribute(model, optimizer, wingbeat.AllReduce(min_replicas=1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    wingbeat.synchronize(model)
    return model, optimizer


model, optimizer = trained()
wingbeat.release(model, optimizer)
print("released", flush=True)
model, optimizer = trained()
dropped = weakref.ref(model)
del model, optimizer
model, optimizer = trained()
print("dropped", dropped() is None, flush=True)
try:
    trained()
except UsageError as error:
    print(error, flush=True)
wingbeat.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_is_distributed_after_another_was_released_or_dropped(tmp_path: Path) -> None:
    script, store = tmp_path / "again.py", StoreServer(0)
    script.write_text(AGAIN)
    env = os.environ | {"WINGBEAT_REPLICAS": "2", "WINGBEAT_TOP": "off", "OMP_NUM_THREADS": "1"}
    env["WINGBEAT_STORE"] = f"127.0.0.1:{store.port}"
    running = [
        subprocess.Popen(
            [sys.executable, str(script)], env=env | {"WINGBEAT_REPLICA": str(rank)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
        store.close()
    for text in texts:
        *said, refused = text.splitlines()
        assert said == ["released", "dropped True"]
        assert refused.startswith("min_replicas= is possible for one model at a time")

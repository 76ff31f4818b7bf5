"""A job can be watched; whatever happens to what watches it, training goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import wingbeat
from helpers.ports import free_port
from wingbeat import testing
from wingbeat.engine import api
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.observe import top
from wingbeat.observe.meter import Meter
from wingbeat.observe.report import Job
from wingbeat.transport.torch_store import TorchStore, is_append_only
from wingbeat.transport.world import World

SLEEP_S = 0.03


class Net(torch.nn.Module):
    """One layer, whose forward and backward can take their time."""

    def __init__(self, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: time.sleep(self.backward_s))
        out: torch.Tensor = self.second(hidden)
        return out


def _metered(world: World, strategy: Any, net: Net) -> tuple[Net, torch.optim.Optimizer, Meter]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wingbeat.distribute(net, optimizer, strategy, world=world)
    engine = engine_of(net)
    assert engine is not None
    return net, optimizer, engine.meter


def _iterate(net: Net, optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()


@pytest.mark.alone
@pytest.mark.parametrize("strategy", [wingbeat.AllReduce(), wingbeat.DeAR()])
def test_each_part_of_an_iteration_is_counted_where_it_belongs(strategy: Any) -> None:
    def train(world: World) -> dict[str, float]:
        slow = world.rank == 0
        net, optimizer, meter = _metered(
            world, strategy, Net(4 * SLEEP_S if slow else 0.0, SLEEP_S if slow else 0.0)
        )
        _iterate(net, optimizer)
        before = meter.spent
        _iterate(net, optimizer, 3)
        assert meter.iterations == 4
        return {part: s - before[part] for part, s in meter.spent.items()}

    slow, fast = testing.run(testing.worlds(2), train)
    assert slow["forward"] >= 3 * 4 * SLEEP_S
    assert 3 * SLEEP_S <= slow["backward"] < slow["forward"]
    assert slow["exchange"] < SLEEP_S * 3
    # The other one waits for it, and that is no forward, backward or update.
    assert fast["exchange"] >= 3 * 4 * SLEEP_S
    assert fast["forward"] + fast["backward"] + fast["update"] < 3 * SLEEP_S


@pytest.mark.alone
def test_meter_under_no_sync_counts_forward_and_backward() -> None:
    def train(world: World) -> dict[str, float]:
        net, _, meter = _metered(world, wingbeat.AllReduce(), Net(SLEEP_S, 2 * SLEEP_S))
        with wingbeat.no_sync(net):
            net(torch.ones(2, 4)).sum().backward()
        time.sleep(3 * SLEEP_S)
        meter.enter("other")
        return meter.spent

    spent, _ = testing.run(testing.worlds(2), train)
    assert SLEEP_S <= spent["forward"] < 2 * SLEEP_S
    assert 2 * SLEEP_S <= spent["backward"] < 3 * SLEEP_S
    assert spent["other"] >= 3 * SLEEP_S


@pytest.mark.alone
def test_meter_during_evaluation_counts_no_forward() -> None:
    def train(world: World) -> dict[str, float]:
        net, optimizer, meter = _metered(world, wingbeat.DeAR(), Net())
        _iterate(net, optimizer)
        before = meter.spent["forward"]
        net.forward_s = SLEEP_S
        with torch.no_grad():
            net(torch.ones(2, 4))
        meter.enter("other")
        assert meter.spent["forward"] - before < SLEEP_S
        return meter.spent

    testing.run(testing.worlds(2), train)


def test_a_worker_without_batches_counts_steps_with_the_others() -> None:
    def train(world: World) -> int:
        net, optimizer, meter = _metered(world, wingbeat.AllReduce(), Net())
        with wingbeat.join(net):
            _iterate(net, optimizer, 5 if world.rank else 2)
        return meter.iterations

    assert testing.run(testing.worlds(2), train) == [5, 5]


def test_a_codecs_work_is_counted() -> None:
    from wingbeat.observe import meter as meters

    def train(world: World) -> None:
        strategy = wingbeat.AllReduce(compression=wingbeat.Sketch(auto_disable=False))
        net, optimizer, _ = _metered(world, strategy, Net())
        _iterate(net, optimizer, 2)

    before = meters.codec.total
    testing.run(testing.worlds(2), train)
    assert meters.codec.total > before


def test_servers_show_bytes_by_class_and_by_server() -> None:
    def train(world: World) -> list[Any]:
        net, optimizer, meter = _metered(world, wingbeat.Geryon(servers=2), Net())
        _iterate(net, optimizer, 3)
        return meter.sections

    nbytes = 4 * sum(p.numel() for p in Net().parameters())
    for classes, servers in testing.run(testing.worlds(2), train):
        assert (classes.name, servers.name) == ("classes", "servers")
        assert classes.unit == servers.unit == "B/s"
        for section in (classes, servers):
            for way in ("in", "out"):
                moved = sum(n for name, n in section.cells.items() if name.endswith(way))
                # The last sums may not have been asked for yet.
                assert 2 * nbytes <= moved < 6 * nbytes
        assert set(servers.cells) <= {"0 in", "0 out", "1 in", "1 out"}


def test_workers_that_are_threads_of_a_test_start_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WINGBEAT_TOP", "on")
    monkeypatch.setenv("WINGBEAT_RUNTIME_DIR", str(tmp_path / "run"))
    for world in testing.worlds(2):
        api.report(world, Meter("Net"))
        assert world not in api._reporters
    assert not (tmp_path / "run").exists()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A world of one worker that can be watched; the folder where."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WINGBEAT_TOP", "on")
    monkeypatch.setenv("WINGBEAT_RUNTIME_DIR", str(tmp_path / "run"))
    wingbeat.init()
    yield tmp_path / "run"
    wingbeat.shutdown()


def _train_alone(steps: int = 3) -> Net:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wingbeat.distribute(net, optimizer, wingbeat.DeAR())
    _iterate(net, optimizer, steps)
    return net


def _until(condition: Callable[[Job], bool], folder: Path, seconds: float = 60.0) -> Job:
    """The job that is watched here, once this is true of it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(top.JobLost, UsageError):
            job = top.find("", folder).query()
            if condition(job):
                return job
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s; there are {top.running(folder)}")


def _at(job: Job, iteration: int) -> bool:
    return bool(job.workers) and all(
        worker.report is not None and worker.report.iteration >= iteration for worker in job.workers
    )


def test_a_worker_alone_can_be_watched_until_it_shuts_down(alone: Path) -> None:
    _net = _train_alone()
    job = _until(lambda job: _at(job, 3), alone)
    [worker] = job.workers
    assert worker.report is not None
    assert worker.report.strategy == "DeAR()"
    assert worker.report.pid == os.getpid()
    wingbeat.shutdown()
    assert list(alone.iterdir()) == []


def test_report_switched_off_starts_nothing(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINGBEAT_TOP", "off")
    _train_alone()
    assert not alone.exists()


@pytest.mark.parametrize(("name", "value"), [("WINGBEAT_TOP", "yes"), ("WINGBEAT_METRICS", "port")])
def test_report_variable_with_wrong_value_is_refused_before_any_change(
    alone: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name}={value}: allowed"):
        wingbeat.distribute(net, optimizer, wingbeat.DeAR())
    assert type(net) is Net  # nothing was changed: it can be distributed with another value
    monkeypatch.delenv(name)
    wingbeat.distribute(net, optimizer, wingbeat.DeAR())


def test_training_continues_if_no_process_can_be_started(
    alone: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fails)
    with caplog.at_level("INFO", logger="wingbeat"):
        _train_alone()
    [line] = [record.getMessage() for record in caplog.records if "top" in record.getMessage()]
    assert line == "`wingbeat top` cannot show this job: Resource temporarily unavailable"


@pytest.mark.parametrize("thread", ["wingbeat-supervisor", "wingbeat-report"])
def test_training_continues_if_no_thread_can_be_started(
    alone: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, thread: str
) -> None:
    start, before = threading.Thread.start, psutil.Process().children()

    def fails(self: threading.Thread) -> None:
        if self.name == thread:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails)
    with caplog.at_level("INFO", logger="wingbeat"):
        _train_alone()
    [line] = [record.getMessage() for record in caplog.records if "top" in record.getMessage()]
    assert "can't start new thread" in line
    assert set(psutil.Process().children()) <= set(before)
    assert top.running(alone) == []


def test_a_store_in_a_file_is_not_filled_with_reports(tmp_path: Path) -> None:
    dist = torch.distributed
    file = dist.FileStore(str(tmp_path / "store"), 1)
    assert is_append_only(TorchStore(dist.PrefixStore("a", dist.PrefixStore("b", file))))
    assert not is_append_only(TorchStore(dist.PrefixStore("a", dist.HashStore())))


SCRIPT = """
import os, pathlib, sys, time, torch, wingbeat

def model():
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return wingbeat.distribute(net, optimizer, wingbeat.AllReduce())

def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step()

world = wingbeat.init(timeout=60)
generator, critic = model(), model()
goal, steps = pathlib.Path(sys.argv[1]), 0
going = torch.ones(1)
while going:
    step(*generator)
    step(*critic)
    step(*critic)
    steps += 1
    time.sleep(0.05)
    going = torch.tensor(float(not goal.exists()))
    torch.distributed.all_reduce(going, torch.distributed.ReduceOp.MIN)
print(steps, world.rank, flush=True)
"""


class Started:
    """Two workers in processes of their own, which train until they are told to end."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.goal = folder / "goal"
        self.run = folder / "run"
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        shared = {
            **os.environ,
            "WINGBEAT_TOP": "on",
            "WINGBEAT_RUNTIME_DIR": str(self.run),
            "OMP_NUM_THREADS": "1",
            **meeting,
            **env,
        }
        self.workers = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(self.goal)],
                env={**shared, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def end(self) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each."""
        self.goal.write_text("")
        ends = [worker.communicate(timeout=60) for worker in self.workers]
        return [(w.returncode, *end) for w, end in zip(self.workers, ends, strict=True)]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()

    def supervisor(self) -> int:
        """The supervisor's process."""
        [rank_zero] = [w.pid for w in self.workers[:1]]
        children = Path(f"/proc/{rank_zero}/task/{rank_zero}/children").read_text().split()
        [found] = [
            int(child)
            for child in children
            if b"wingbeat.observe.supervisor" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return found


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def begin(**env: str) -> Started:
        made.append(Started(tmp_path, **env))
        return made[-1]

    yield begin
    for each in made:
        each.kill()


def test_two_workers_are_watched_and_a_killed_supervisor_changes_nothing(
    started: Callable[..., Started],
) -> None:
    both = started()
    job = _until(lambda job: _at(job, 4) and all(w.rate for w in job.workers), both.run)
    assert [worker.rank for worker in job.workers] == [0, 1]
    for worker in job.workers:
        assert worker.report is not None
        assert worker.report.size == 2
        assert worker.report.pid == both.workers[worker.rank].pid
        assert worker.report.strategy == "AllReduce()"
        assert "lo" in worker.interfaces
        [steps] = [section for section in worker.sections if section.name == "steps"]
        assert [name.split()[1] for name in steps.cells] == ["Linear", "Linear"]
        assert worker.report.iteration == max(steps.cells.values())
    supervisor = both.supervisor()
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(2.5)  # reports meet nobody
    ends = both.end()
    assert [code for code, _, _ in ends] == [0, 0]
    told = "wingbeat: `wingbeat top` shows this job no more: its supervisor has ended\n"
    (_, _, first), (_, _, second) = ends
    summary = r"wingbeat: AllReduce\(\): \d+ steps, .* waiting for communication\n"
    assert re.fullmatch(re.escape(told) + summary, first)
    assert not second


@pytest.mark.slow
def test_a_worker_that_stands_still_is_seen_to_be_silent(
    started: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = started()
    _until(lambda job: _at(job, 2), both.run)
    both.workers[1].send_signal(signal.SIGSTOP)  # nobody hears that its connection is closed
    job = _until(lambda job: job.workers[1].state.startswith("silent"), both.run)
    assert job.workers[0].state in ("running", "no step for 10 s") or job.workers[0].still_s > 4
    both.workers[1].send_signal(signal.SIGCONT)
    _until(lambda job: job.workers[1].state == "running", both.run)
    assert [code for code, _, _ in both.end()] == [0, 0]


@pytest.mark.slow
def test_an_unwritable_folder_is_logged_and_training_continues(
    started: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    both = started(WINGBEAT_RUNTIME_DIR=str(tmp_path / "file"))
    time.sleep(8.0)  # reports meet nobody
    (code, _, errors), (other, _, nothing) = both.end()
    assert (code, other, nothing) == (0, 0, "")
    [line] = errors.splitlines()
    assert line.startswith("wingbeat: `wingbeat top` will not find this job: ")


@pytest.mark.slow
def test_a_killed_job_leaves_no_supervisor(started: Callable[..., Started]) -> None:
    both = started()
    _until(lambda job: _at(job, 1), both.run)
    supervisor = both.supervisor()
    both.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{supervisor}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert top.running(both.run) == []

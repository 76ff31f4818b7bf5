"""How a worker ends: silently, with the exit code of its script, and the others know how."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.ports import free_port
from wingbeat.collectives import Collectives
from wingbeat.errors import PeerError, RendezvousError
from wingbeat.transport import failures, graceful_shutdown, loopback
from wingbeat.transport.failures import (
    FailureAttribution,
    has_finished,
    publish_exit,
    published_failure,
)
from wingbeat.transport.world import World

SCRIPT = """
import os, pathlib, sys, time
import torch, wingbeat
import torch.distributed as dist

rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])

def prepare():
    global model, optimizer
    before = dict(os.environ)
    wingbeat.init(timeout=40)
    assert dict(os.environ) == before
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wingbeat.distribute(model, optimizer, wingbeat.DeAR(plan="fixed"))

def train(steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    model.synchronize()

def until(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""
OWN_GROUP = "prepare(); train()\n"
USERS_GROUP = "dist.init_process_group('gloo'); prepare(); train()\n"
DESTROY = "dist.destroy_process_group()\n"


def launch(body: str, folder: Path, size: int = 2) -> list[tuple[int, str]]:
    """Run the script and ``body`` as so many workers, rank 0 with the store: codes and output."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "MASTER"))}
    kept.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = folder / "script.py"
    path.write_text(SCRIPT + body, encoding="utf-8")
    running = [
        subprocess.Popen(
            [sys.executable, str(path), str(folder)],
            env={
                **kept,
                **meeting,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=160)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [(p.returncode, out) for p, out in zip(running, said, strict=True)]


def test_script_may_destroy_the_group_and_init_again(tmp_path: Path) -> None:
    """Here worker 1 starts again while the store of rank 0 is still that of the first time."""
    body = f"""
{OWN_GROUP}{DESTROY}
if rank == 0:
    until("again")
    time.sleep(0.5)  # were the store closed now, worker 1 would have met the old one
wingbeat.shutdown()
(folder / "again").touch()
{OWN_GROUP}{DESTROY}
"""
    assert launch(body, tmp_path) == [(0, "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("start", [OWN_GROUP, USERS_GROUP])
@pytest.mark.parametrize("end", ["", DESTROY, DESTROY + "wingbeat.shutdown()", "sys.exit(3)"])
def test_script_ends_silently_with_its_exit_status(start: str, end: str, tmp_path: Path) -> None:
    code = 3 if "exit" in end else 0
    assert launch(start + end, tmp_path) == [(code, "")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("start", [OWN_GROUP, USERS_GROUP])
@pytest.mark.parametrize("end", ["", DESTROY])
def test_exception_ends_the_script_with_only_its_traceback(
    start: str, end: str, tmp_path: Path
) -> None:
    for code, said in launch(f"{start}{end}raise KeyError('mine')", tmp_path):
        assert code == 1
        assert said.count("Traceback") == 1
        assert "Exception ignored" not in said
        assert said.rstrip().endswith("KeyError: 'mine'")


@pytest.mark.parametrize(("early", "size"), [(0, 2), (1, 3)])
@pytest.mark.slow  # in one process: test_collective_reports_a_finished_peer
def test_rank_that_finished_early_is_not_reported_as_failed(
    early: int, size: int, tmp_path: Path
) -> None:
    """Rank 0 serves the store, which has to be there when the others ask."""
    more = f"if rank != {early}:\n    time.sleep(2); train(1)\n"
    ended = launch(OWN_GROUP + more, tmp_path, size)
    assert ended[early] == (0, "")
    for rank, (code, said) in enumerate(ended):
        if rank != early:
            assert code == 1
            assert f"rank {early} has finished" in said
            assert "with model.join():" in said


@pytest.mark.slow
def test_rank_that_raised_has_not_finished(tmp_path: Path) -> None:
    (code, said), _ = launch(f"{OWN_GROUP}if rank == 1: raise KeyError('mine')\ntrain(1)", tmp_path)
    assert code == 1
    assert "rank 0: rank 1 failed with KeyError: 'mine', noticed in" in said
    assert "finished" not in said


CANARY = """
wingbeat.init(timeout=40)
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
wingbeat.distribute(model, optimizer, wingbeat.Canary(s=2, encrypted=False))

def steps(n):
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.ones(4, 300)).sum().backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_rank_that_exits_early_waits_until_the_others_have_flushed(
    tmp_path: Path,
) -> None:
    """Messages are under way without a copy."""
    body = CANARY + "steps(3)\nif rank == 1: sys.exit(0)\nsteps(3); model.synchronize(); steps(3)\n"
    assert launch(body, tmp_path) == [(0, "")] * 2


@pytest.mark.slow
def test_remaining_ranks_name_the_exception_of_the_lost_one(tmp_path: Path) -> None:
    body = f"{CANARY}steps(3)\nif rank == 1: raise KeyError('mine')\n"
    body += "steps(9); model.synchronize()\n"
    (code, said), (failed, _) = launch(body, tmp_path)
    assert (code, failed) == (0, 1)
    lines = [line for line in said.splitlines() if "rank 0: " in line]
    assert lines == [
        "wingbeat: rank 0: rank 1 failed with KeyError: 'mine'; the others continue without it "
        "[event=lost rank=1 incarnation=0]",
        "wingbeat: rank 0: trained to the end without all workers: rank 1 failed with "
        "KeyError: 'mine'",
    ]


# -- without processes ----------------------------------------------------------------------


def waits_for_the_other(world: World) -> str:
    try:
        Collectives(world).all_reduce(torch.ones(8), bucket=2).wait()
    except PeerError as err:
        return str(err)
    return ""


def test_collective_reports_a_finished_peer() -> None:
    first, second = loopback.worlds(2)
    graceful_shutdown.close_world(second)
    said = waits_for_the_other(first)
    assert said.startswith("rank 0: rank 1 has finished (its script ended, or called sys.exit()")
    assert "waits for it in all-reduce of bucket 2 on interface lo0: see what rank 1" in said
    assert "`with model.join():`" in said
    assert "\n" not in said


def test_collective_reports_a_failed_peer() -> None:
    first, second = loopback.worlds(2)
    try:
        raise KeyError("mine")
    except KeyError:
        graceful_shutdown.close_world(second)
    said = waits_for_the_other(first)
    assert said.startswith("rank 0: rank 1 failed with KeyError: 'mine', noticed in all-reduce of")
    assert "\n" not in said


def test_exit_is_published_after_the_last_message() -> None:
    """Were it said before, the others would not wait for what is still queued."""
    board = loopback.Switchboard()
    world, _ = loopback.worlds(2, switchboard=board)
    said: list[bool] = []
    world.on_close(lambda: said.append(board.has("left/0")))
    graceful_shutdown.close_world(world)
    assert said == [False]
    assert has_finished(board, 0)


def test_failure_is_published_before_connections_are_closed() -> None:
    """A peer that notices that a connection has ended asks why, and finds the exception."""
    board = loopback.Switchboard()
    world, _ = loopback.worlds(2, switchboard=board)
    said: list[str] = []
    world.on_close(lambda: said.append(published_failure(board, 0)))
    try:
        raise ValueError("boom")
    except ValueError:
        graceful_shutdown.close_world(world)
    assert said == ["ValueError: boom"]
    assert not has_finished(board, 0)


def test_exit_in_an_exception_handler_is_published_as_that_failure() -> None:
    board = loopback.Switchboard()
    world, _ = loopback.worlds(2, switchboard=board)
    try:
        try:
            raise ValueError("boom")
        except ValueError:
            sys.exit(1)
    except SystemExit:
        graceful_shutdown.close_world(world)
    assert published_failure(board, 0) == "ValueError: boom"


def test_exchange_reports_a_finished_peer() -> None:
    first, second = loopback.worlds(2, timeout=0.2)
    graceful_shutdown.close_world(second)
    with pytest.raises(RendezvousError, match=r"rank 1 has finished .* in 'plan': see what"):
        first.exchange("plan", {})


def test_chain_of_waits_passes_failed_ranks_and_ends_at_the_finished_one() -> None:
    board = loopback.Switchboard()
    _, second, third = loopback.worlds(3, switchboard=board)
    FailureAttribution(board, 1, 3, 5.0).publish_wait(2)
    graceful_shutdown.close_world(second)
    graceful_shutdown.close_world(third)
    blame = FailureAttribution(board, 0, 3, 5.0)
    assert blame.root_cause(1) == 2
    assert blame.has_finished(2)


def returns() -> None:
    pass


def raises() -> None:
    raise KeyError("mine")


def exits() -> None:
    sys.exit()


def exits_with_code() -> None:
    sys.exit(3)


class FileStore:
    """As much of a store as leaving needs, for more than one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        (self._folder / key.replace("/", "-")).write_text(value, encoding="utf-8")

    def get(self, key: str, seconds: float) -> str:
        return (self._folder / key.replace("/", "-")).read_text(encoding="utf-8")

    def has(self, key: str) -> bool:
        return (self._folder / key.replace("/", "-")).exists()


def child(folder: Path, body: Callable[[], None]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # its traceback
    world = World(1, 2, (), (), 5.0, FileStore(folder))
    graceful_shutdown.close_at_exit(world, lambda: graceful_shutdown.close_world(world))
    body()


@pytest.mark.parametrize(
    ("body", "finished"),
    [(returns, True), (exits, True), (raises, False), (exits_with_code, False)],
)
def test_child_of_multiprocessing_publishes_how_it_exits(
    body: Callable[[], None], finished: bool, tmp_path: Path
) -> None:
    """As torch.multiprocessing starts them; they do not come to the functions of atexit."""
    process = multiprocessing.get_context("fork").Process(target=child, args=(tmp_path, body))
    process.start()
    process.join(60)
    assert process.exitcode is not None
    store = FileStore(tmp_path)
    assert store.has("left/1")
    assert has_finished(store, 1) == finished


class Time:
    """Passes only while somebody sleeps; ``then`` is called after each sleep."""

    def __init__(self, then: Callable[[float], None] = lambda now: None) -> None:
        self.now, self._then = 0.0, then

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._then(self.now)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> loopback.Switchboard:
    """The store that rank 0 of three workers serves; its end is up to the test."""
    board = loopback.Switchboard()
    world = loopback.worlds(3, switchboard=board)[0]
    monkeypatch.setattr(graceful_shutdown._ExitHandler, "of", None)
    monkeypatch.setattr(graceful_shutdown._ExitHandler, "begun", False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    graceful_shutdown.close_at_exit(world, lambda: graceful_shutdown.close_world(world))
    return board


def test_rank_0_waits_for_all_others_to_leave(
    served: loopback.Switchboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(now: float) -> None:
        if now > 1:
            publish_exit(served, 1, finished=True)
        if now > 3:
            publish_exit(served, 2, finished=True)

    clock = Time(leave)
    for module in (graceful_shutdown, failures):
        monkeypatch.setattr(module, "time", clock)
    graceful_shutdown._run_at_exit()
    assert clock.now == pytest.approx(3, abs=0.1)
    assert has_finished(served, 0)


def test_rank_0_serves_the_others_longer_when_it_has_finished_than_when_it_fails(
    served: loopback.Switchboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Time()
    for module in (graceful_shutdown, failures):
        monkeypatch.setattr(module, "time", clock)
    end = graceful_shutdown._ExitHandler.of
    graceful_shutdown._run_at_exit()
    assert clock.now == pytest.approx(graceful_shutdown.STORE_LINGER_S, abs=0.1)
    graceful_shutdown._ExitHandler.of, clock.now = end, 0.0
    try:
        raise KeyError("mine")
    except KeyError:
        graceful_shutdown._run_at_exit()
    assert clock.now == pytest.approx(graceful_shutdown.ANSWER_TIMEOUT_S, abs=0.1)


@pytest.mark.usefixtures("served")
def test_exit_of_a_fork_is_not_that_of_its_parent(tmp_path: Path) -> None:
    """Its parent's threads are not there, and its parent still trains."""
    store = FileStore(tmp_path)
    world = World(0, 1, (), (), 5.0, store)
    graceful_shutdown.close_at_exit(world, lambda: graceful_shutdown.close_world(world))
    fork = multiprocessing.get_context("fork").Process(target=graceful_shutdown._run_at_exit)
    fork.start()
    fork.join(60)
    assert fork.exitcode == 0
    assert not store.has("left/0")
    graceful_shutdown._run_at_exit()
    assert store.has("left/0")

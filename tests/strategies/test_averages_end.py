"""Processes that average models while one of them ends: the group generator's, or by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.returning import lines, made, start

SCRIPT = """if True:
    import os, sys, time, torch, wingbeat
    from wingbeat.errors import PeerError
    from wingbeat.strategies import parse
    from wingbeat.engine.upgrade import engine_of
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=60)
    rank = int(os.environ["RANK"])
    model = torch.nn.Linear(300, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    model, optimizer = wingbeat.distribute(model, optimizer, parse(sys.argv[1]))
    grouping = getattr(engine_of(model).update._averager, "grouping", None)
    started = getattr(grouping, "_started", None)
    print("generator", started._process.pid if started else -1, flush=True)
    count = 0

    def train(until):
        global count
        while not os.path.exists(until):
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
            count += 1
            print("made", count, flush=True)
            time.sleep(0.002)

    def synchronize(what):
        begun = time.monotonic()
        try:
            wingbeat.synchronize(model)
        except PeerError as error:
            return print("refused", f"{time.monotonic() - begun:.1f} {error}", flush=True)
        total = sum(float(value.detach().double().sum()) for value in model.parameters())
        print(what, f"{time.monotonic() - begun:.1f} {total!r}", flush=True)

    train(sys.argv[2])
    synchronize("agreed")
    if len(sys.argv) > 3:
        if rank == 2:
            print("waits", "now", flush=True)
            synchronize("never")  # the others train on: Ctrl-C comes here
        train(sys.argv[3])
        synchronize("without")
    wingbeat.shutdown()
"""


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    try:
        yield running
    finally:
        for worker in running:
            worker.kill()
            worker.wait(10)


def each(said: list[Iterator[list[str]]], what: str) -> list[str]:
    """The rest of the first line of each that begins so."""
    return [next(rest[0].strip() for word, *rest in own if word == what) for own in said]


def trained(
    workers: list[subprocess.Popen[str]], strategy: str, *stops: Path
) -> list[Iterator[list[str]]]:
    port = free_port()
    workers += [start(SCRIPT, rank, port, strategy, *stops) for rank in range(3)]
    return [lines(worker) for worker in workers]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "strategy",
    ["ripples", "localsgd:every=2", "diloco:every=2", "diloco:every=4,fragments=2,delay=1"],
)
def test_killed_generator_process_ends_no_training_and_all_agree(
    strategy: str, tmp_path: Path, workers: list[subprocess.Popen[str]]
) -> None:
    stop = tmp_path / "stop"
    said = trained(workers, strategy, stop)
    generator = int(next(rest[0] for word, *rest in said[0] if word == "generator"))
    now = [made(own, 60) for own in said]
    os.kill(generator, signal.SIGKILL)
    for own, steps in zip(said, now, strict=True):
        made(own, steps + 60)
    stop.touch()
    totals = {text.split()[1] for text in each(said, "agreed")}
    assert len(totals) == 1
    assert [worker.wait(30) for worker in workers] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ripples", "ripples:policy=static", "adpsgd"])
def test_worker_ended_by_ctrl_c_in_a_synchronization_delays_nobody(
    strategy: str, tmp_path: Path, workers: list[subprocess.Popen[str]]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    said = trained(workers, strategy, first, second)
    for own in said:
        made(own, 20)
    first.touch()
    assert len({text.split()[1] for text in each(said, "agreed")}) == 1
    next(word for word, *_ in said[2] if word == "waits")
    now = [made(said[rank], 0) for rank in (0, 1)]
    workers[2].send_signal(signal.SIGINT)
    assert workers[2].wait(120) == -signal.SIGINT
    for rank, steps in zip((0, 1), now, strict=True):
        made(said[rank], steps + 40)
    second.touch()
    found = [
        next((word, rest[0]) for word, *rest in said[rank] if word in ("without", "refused"))
        for rank in (0, 1)
    ]
    assert {word for word, _ in found} == {"without"}
    assert len({text.split()[1] for _, text in found}) == 1
    assert all(float(text.split()[0]) < 50 for _, text in found)
    assert [workers[rank].wait(30) for rank in (0, 1)] == [0, 0]

"""One worker's part of a bench, without links: what a row finds out, who sleeps, what counts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import wingbeat
from helpers.pool import Pool
from wingbeat.collectives import Handle
from wingbeat.observe.events import COLLECTIVES, stream
from wingbeat.planning.control import Decisions
from wingbeat.simulator.codecs import Price
from wingbeat.transport import loopback
from wingbeat_lab.bench import attach, worker
from wingbeat_lab.bench.attach import Attached
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.models import Built
from wingbeat_lab.bench.pace import Calls, Open, Pace
from wingbeat_lab.bench.worker import Training, Worker


def training(monkeypatch: pytest.MonkeyPatch, worth: list[float] | None) -> tuple[Any, list[int]]:
    """A row whose n-th iteration brings what ``worth`` says to what is applied; None: lockstep."""
    made = SimpleNamespace(applied=None if worth is None else lambda: sum(worth[: len(own)]))
    row, own = Training(*[SimpleNamespace()] * 4, made), list[int]()  # type: ignore[arg-type]

    def iterate(_: Training, number: int) -> None:
        own.append(number)
        row.curve.append((0.0, 0.0))

    monkeypatch.setattr(Training, "iterate", iterate)
    return row, own


def test_worker_in_lockstep_counts_each_of_its_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    row, own = training(monkeypatch, None)
    assert list(row.iterations(5, 3)) == [0, 1, 2]
    assert own == [5, 6, 7]
    assert row.done() == 3


@pytest.mark.parametrize(
    ("worth", "made"),
    [
        ([1.0, 1.0, 1.0], 3),
        ([0.5] * 9, 6),  # others are slow
        ([0.0, 2.5, 0.5], 3),  # what others have made comes at once
        ([0.1] * 40, 30),  # adds up to a little less than whole numbers
        ([5.0], 1),
    ],
)
def test_worker_without_lockstep_counts_applied_iterations(
    monkeypatch: pytest.MonkeyPatch, worth: list[float], made: int
) -> None:
    row, own = training(monkeypatch, worth)
    assert list(row.iterations(1, 3)) == [0, 1, 2]
    assert len(own) == made


def test_worker_without_lockstep_ignores_rounds_applied_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, own = training(monkeypatch, [2.0] + [1.0] * 9)
    list(row.iterations(1, 1))
    assert list(row.iterations(2, 2)) == [0, 1]
    assert len(own) == 3


STEPS = 4
BUCKET_MB = 100 * 4 / 2**20


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def collectives_of(only: str) -> dict[str, int]:
    """How often each collective ran, in four iterations after the first two."""
    world = wingbeat.init(timeout=30.0)
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(10, 10, bias=False) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        strategy = wingbeat.DeAR(plan="fixed", mb=BUCKET_MB, edge_mb=0)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy)
        if only:
            worker.use_only(only, model, world, strategy.topology)
        for step in range(2 + STEPS):
            if step == 2:
                model.synchronize()  # type: ignore[operator]
                stream.start(world.rank)
            optimizer.zero_grad()
            model(torch.ones(4, 10)).sum().backward()
            optimizer.step()
        model.synchronize()  # type: ignore[operator]
        counted = Counter(event.what for event in stream.stop())
        wingbeat.release(model, optimizer)
        return {what: counted[what] for what in COLLECTIVES if counted[what]}
    finally:
        wingbeat.shutdown()


@pytest.mark.parametrize(
    ("only", "left"),
    [
        ("", {"reduce_scatter": 3 * STEPS, "all_gather": 3 * STEPS}),
        ("RS-only", {"reduce_scatter": 3 * STEPS}),
        ("AG-only", {"all_gather": 3 * STEPS}),
    ],
)
def test_dear_row_of_one_half_runs_only_its_collectives(
    pool: Pool, only: str, left: dict[str, int]
) -> None:
    assert pool.run(collectives_of, only) == [left, left]


def test_without_gathers_the_reduce_scatter_is_still_waited_for() -> None:
    own = object.__new__(worker.ReduceScatterOnly)
    reduced = Handle([])
    assert own.all_gather(torch.zeros(4), bucket=0, after=reduced) is reduced


FOUND = Decisions(bucket_bytes=4096)


class Control:
    """Decides after so many iterations, or at once what it is to keep."""

    def __init__(self, left: int) -> None:
        self.left = left

    def deciding(self) -> bool:
        return self.left > 0

    def decisions(self) -> Decisions:
        return FOUND

    def keep(self, known: Decisions) -> None:
        assert known is FOUND
        self.left = 0


def nothing() -> None:
    """What is undone or waited for here."""


def checked(*rows: str, **options: Any) -> Checked:
    return BenchConfig(
        lab="loopback:2", model="paced:resnet50@0.02", strategies=rows, **options
    ).check()


def worker_of(*rows: str) -> Worker:
    return Worker(checked(*rows), loopback.worlds(2)[1])


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models that are attached to a `Control` that decides in five iterations, each to its own.

    The fixture is the controls so far; None in front of them makes the next one a worker alone.
    """
    controls: list[Any] = []

    @contextlib.contextmanager
    def attached(_contender: Any, model: Any, _maker: Any, **_: Any) -> Iterator[Attached]:
        controls.append(None if controls[:1] == [None] else Control(5))
        optimizer = torch.optim.SGD(model.parameters())
        yield Attached(model, optimizer, nothing, nothing, control=controls[-1])

    def step(made: Attached, _loss: Any) -> float:
        made.control.left -= 1  # type: ignore[union-attr]
        return 0.0

    monkeypatch.setattr(attach, "attached", attached)
    monkeypatch.setattr(attach, "step", step)
    return controls


def test_a_row_decides_once_and_all_that_follows_keeps_it(attached: list[Any]) -> None:
    own = worker_of("dear")
    made = worker.decide(own, 0)
    assert made is not None
    assert (made.iterations, made.decision) == (5, {"bucket_bytes": 4096})
    assert own.decisions == {0: FOUND}
    for recorded in (False, True):
        with own.training(0, recorded=recorded) as training:
            assert not training.made.deciding()
    assert [control.left for control in attached] == [0, 0, 0]


def test_a_row_with_nothing_to_find_out_is_not_built_for_it(attached: list[Any]) -> None:
    own = worker_of("ddp", "dear:plan=fixed", "psgd")
    assert [worker.decide(own, row) for row in range(3)] == [None] * 3
    assert attached == []


def test_single_worker_decides_nothing(attached: list[Any]) -> None:
    attached.append(None)
    own = worker_of("dear")
    assert worker.decide(own, 0) is None
    assert own.decisions == {}


class Sizes(Pace):
    """Notes on which models a codec is priced, and asks nothing of them."""

    def measure(self, opened: Open) -> list[dict[str, Calls]]:
        for share in (1.0, 0.25):
            with opened(share) as iterate:
                iterate(0)
        return [{"encode": Calls(14.0, 10, 100)}, {"encode": Calls(11.0, 10, 25)}]


def test_a_row_with_a_codec_is_priced_on_its_model_and_on_a_quarter(
    attached: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[str] = []
    real = worker.training

    def training(checked: Checked, *rest: Any, **options: Any) -> Any:
        models.append(checked.config.model)
        return real(checked, *rest, **options)

    monkeypatch.setattr(worker, "training", training)
    own = worker_of("ddp", "dear:plan=fixed", "ddp+bf16", "dear:compression=sketch")
    own.pace = Sizes(1.0, 0.02)
    others: list[list[dict[str, list[float]]]] = [
        [{"encode": [90.0, 10, 100]}, {"encode": [10.0, 10, 25]}],
        [{"encode": [1.0, 10, 100]}, {"encode": [90.0, 10, 25]}],
    ]
    monkeypatch.setattr(type(own.world), "exchange", lambda _world, _what, mine: [mine, *others])
    for row in range(4):
        worker.price_codec(own, row)
    # Of the medians of all workers, this one's, on both models.
    assert set(own.prices) == {2, 3}
    for row in (2, 3):
        assert own.prices[row]["encode"] == pytest.approx((1.0, 0.04))
    assert models == ["paced:resnet50@0.02", "paced:resnet50@0.005"] * 2
    assert len(attached) == 4


def test_each_row_trains_with_its_own_prices(attached: list[Any]) -> None:
    own = worker_of("ddp", "dear:compression=sketch")
    own.prices = {1: {"encode": Price(0.5, 0.0)}}
    seen = []
    for row in (1, 0):
        with own.training(row):
            seen.append(dict(own.pace.prices))
    assert seen == [{"encode": Price(0.5, 0.0)}, {}]


class Clock:
    """Time that passes in sleep alone, and by a second in each step."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_slow_worker_sleeps_before_its_iteration_and_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(worker, "time", clock)
    began: list[float] = []

    def step(*_: Any) -> float:
        began.append(clock.now)
        clock.now += 1.0
        return 0.25

    monkeypatch.setattr(attach, "step", step)
    model = torch.nn.Linear(1, 1)
    built = Built(model, lambda own: own(torch.ones(1)), lambda _: None)
    made = Attached(model, torch.optim.SGD(model.parameters()), nothing, nothing)
    asked = checked("ddp", slow=("1=+2x@2-3", "0=+9x"))
    own = Training(asked, 1, 0.5, built, made)
    for number in (0, 1, 2, 3, 4):
        own.iterate(number)
    assert [s for s, _ in own.curve] == [1.0, 1.0, 2.0, 2.0, 1.0]
    assert began == [0.0, 1.0, 3.0, 5.0, 6.0]
    assert {loss for _, loss in own.curve} == {0.25}


SENT = 1 << 20
SEND = f"""
import socket
server = socket.create_server(("127.0.0.1", 0))
out = socket.create_connection(server.getsockname())
into, _ = server.accept()
for _ in range({SENT >> 16}):
    out.sendall(bytes(1 << 16))
    left = 1 << 16
    while left:
        left -= len(into.recv(left))
"""


def test_what_other_processes_of_a_host_send_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.dist, "barrier", lambda: None)
    own = worker_of("ddp")
    model = torch.nn.Linear(1, 1)
    settled: list[int] = []
    made = Attached(model, torch.optim.SGD(model.parameters()), int, lambda: settled.append(1))
    before = worker._settled(own, made)
    subprocess.run([sys.executable, "-c", SEND], check=True, timeout=30)
    assert worker._settled(own, made).since(before, 2).sent >= SENT / 2
    assert len(settled) == 2


def test_bytes_are_read_while_nobody_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have settled before one reads, and all have read before one goes on."""
    log: list[str] = []
    monkeypatch.setattr(worker.dist, "barrier", lambda: log.append("barrier"))
    monkeypatch.setattr(worker.Sent, "read", lambda _lab: log.append("read"))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    worker._settled(worker_of("ddp"), Attached(model, optimizer, int, lambda: log.append("settle")))
    assert log == ["settle", "barrier", "read", "barrier"]

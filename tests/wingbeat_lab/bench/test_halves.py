"""DeAR with half of its exchange: the other half does not travel, and nobody waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import wingbeat
from helpers.pool import Pool
from wingbeat.collectives import Handle
from wingbeat.observe.events import COLLECTIVES, stream
from wingbeat_lab.bench import halves

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
            halves.use_only(only, model, world, strategy.topology)
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
def test_only_one_half_travels(pool: Pool, only: str, left: dict[str, int]) -> None:
    assert pool.run(collectives_of, only) == [left, left]


def test_without_gathers_the_reduce_scatter_is_still_waited_for() -> None:
    own = object.__new__(halves.ReduceScatterOnly)
    reduced = Handle([])
    assert own.all_gather(torch.zeros(4), bucket=0, after=reduced) is reduced

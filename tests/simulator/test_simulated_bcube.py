"""A BCube in virtual time: one program over several interfaces of each worker."""

from __future__ import annotations

import pytest

from wingbeat import strategies
from wingbeat.errors import UsageError
from wingbeat.simulator import Links, Model, simulate
from wingbeat.simulator.model import TimedLayer
from wingbeat.types import TensorSpec

BYTES_PER_S = 125e6


def one_layer(mb: float) -> Model:
    """A model of one tensor, which takes no time to compute."""
    numel = int(mb * 2**20) // 4
    return Model((TimedLayer(0.0, 0.0, (0,)),), (TensorSpec("t", (numel,), "float32", 4),))


def seconds(strategy: str, workers: int, interfaces: int, mb: float = 36.0) -> float:
    made = strategies.parse(strategy)
    links = Links(bytes_per_s=BYTES_PER_S, count=interfaces)
    return simulate(one_layer(mb), made, workers, links, iterations=3).median_s


@pytest.mark.parametrize("mb", [5.0, 36.0, 100.0, 400.0])
@pytest.mark.parametrize(("workers", "interfaces"), [(4, 2), (9, 2), (8, 3), (16, 2)])
def test_bml_uses_all_interfaces_at_once(workers: int, interfaces: int, mb: float) -> None:
    """Within a tenth of the time that its bytes need, as a ring on one interface is of its own.

    With what communication costs processors by the simulator's defaults.
    """
    least = 2 * (workers - 1) / workers * mb * 2**20 / BYTES_PER_S
    ring = seconds("allreduce:topology=ring", workers, 1, mb)
    bml = seconds("bml", workers, interfaces, mb)
    assert least < ring < 1.1 * least
    assert least / interfaces < bml < 1.12 * least / interfaces
    assert ring / bml > 0.9 * interfaces


def test_the_same_with_its_size_given() -> None:
    assert seconds("bml:topology=bcube@3x2", 9, 2) == seconds("bml", 9, 2)


def test_what_makes_no_bcube_is_refused() -> None:
    with pytest.raises(UsageError, match="you have 9 with 3"):
        seconds("bml", 9, 3)

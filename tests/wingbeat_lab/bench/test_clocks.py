"""Rates and shares, on stamps whose figures are known."""

from __future__ import annotations

import pytest

from wingbeat_lab.bench import clocks

FAST_AND_SLOW = [
    [[0.0, 1.0, 2.0], [0.5, 2.5, 4.5]],
    [[10.0, 12.0], [10.5, 13.5]],
]
"""Two blocks of two workers, of two iterations and of one."""


def test_each_worker_has_its_own_iterations() -> None:
    samples = clocks.samples_by_rank_s(FAST_AND_SLOW)
    assert samples == [[1.0, 1.0, 2.0], [2.0, 2.0, 3.0]]
    made = clocks.rates(samples)
    assert made.by_rank == pytest.approx([3 / 4, 3 / 7])
    assert made.total == pytest.approx(3 / 4 + 3 / 7)


def test_every_role_counts() -> None:
    cpu = [{"worker": [0.4, 0.2], "server": [1.0]}, {"worker": [0.2, 0.1], "server": [0.5]}]
    assert clocks.cpu_s_per_iteration(cpu, 3) == {
        "server": pytest.approx([0.5]),
        "worker": pytest.approx([0.2, 0.1]),
    }
    # From the first worker's begin to the last one's end: 4.5 s and 3.5 s.
    assert clocks.cores_share(FAST_AND_SLOW, cpu, 2) == pytest.approx(2.4 / 16)
    assert clocks.cores_share(FAST_AND_SLOW, cpu, 1) == pytest.approx(2.4 / 8)


def test_a_role_that_took_time_in_one_block_alone_counts_there() -> None:
    blocks = [{"worker": [1.0, 2.0]}, {"worker": [1.0, 2.0], "server": [0.0, 0.5]}]
    found = clocks.cpu_s_per_iteration(blocks, 2)
    assert found == {"server": [0.0, 0.25], "worker": [1.0, 2.0]}

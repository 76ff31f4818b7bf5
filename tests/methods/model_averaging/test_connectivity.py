"""Whether groups have connected all workers, and which worker is added if they have not."""

from __future__ import annotations

from random import Random

from wingbeat.methods.model_averaging.rules import Connectivity, Rules, WorkerPool
from wingbeat.types import Layout


def test_count_request_is_true_after_the_bound() -> None:
    connectivity = Connectivity(4, steps=2)
    assert [connectivity.count_request() for _ in range(2 * 3 * 4 + 2)] == [False] * 24 + [True] * 2


def test_requests_are_counted_anew_once_all_are_connected() -> None:
    connectivity = Connectivity(4, steps=1)
    for group in ((0, 1), (2, 3), (1, 0)):
        connectivity.add_group(group, 4)
    assert [connectivity.count_request() for _ in range(13)][-1]
    connectivity.add_group((3, 0), 4)
    assert not any(connectivity.count_request() for _ in range(12))
    assert connectivity.count_request()


def test_count_request_is_false_without_a_bound() -> None:
    connectivity = Connectivity(3, steps=None)
    assert not any(connectivity.count_request() for _ in range(1000))


def test_find_unconnected_returns_a_fast_worker_of_another_component() -> None:
    pool = WorkerPool(Layout.even(1, 6), Rules(threshold=2, halve_after=None), Random(1))
    pool.requests = [9, 9, 9, 9, 5, 9]
    connectivity = Connectivity(6, steps=2)
    connectivity.add_group((0, 1, 5), 6)
    found = {connectivity.find_unconnected(0, pool) for _ in range(100)}
    assert found - {None} == {2, 3}
    assert {connectivity.find_unconnected(4, pool) for _ in range(100)} - {None} == {0, 1, 2, 3, 5}

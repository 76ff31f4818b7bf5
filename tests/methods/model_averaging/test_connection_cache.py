"""Which groups' connections stay open: members agree, and respect the capacity."""

from __future__ import annotations

from random import Random

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.service import ConnectionCache


def test_id_is_stable_until_the_connections_are_closed() -> None:
    cache = ConnectionCache(5, capacity=2)
    assert cache.id_of((0, 1)) == cache.id_of((1, 0)) == 1
    assert cache.id_of((0, 2)) == 2
    assert cache.id_of((0, 1)) == 1
    assert cache.id_of((0, 3)) == 3
    # (0, 2) was used longest ago.
    assert [cache.pop_closed(worker) for worker in range(5)] == [[2], [], [2], [], []]
    assert cache.pop_closed(0) == []
    assert cache.id_of((0, 1)) == 1
    assert cache.id_of((0, 2)) == 4


def test_close_all_closes_every_connection_of_a_worker() -> None:
    cache = ConnectionCache(4)
    cache.id_of((0, 1))
    cache.id_of((1, 2, 3))
    cache.id_of((2, 3))
    cache.close_all(1)
    assert [cache.pop_closed(worker) for worker in range(4)] == [[1], [1, 2], [2], [2]]
    assert cache.id_of((2, 3)) == 3
    assert cache.id_of((0, 1)) == 4


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_members_agree_and_respect_the_capacity(capacity: int) -> None:
    chance, cache = Random(capacity), ConnectionCache(10, capacity)
    kept: list[dict[int, tuple[int, ...]]] = [{} for _ in range(10)]
    again = 0
    for _ in range(5000):
        if chance.random() < 0.01:
            cache.close_all(chance.randrange(10))
        members = tuple(chance.sample(range(10), chance.choice((2, 2, 3))))
        number = cache.id_of(members)
        opened = set()
        for member in members:
            for closed in cache.pop_closed(member):
                del kept[member][closed]
            opened.add(number in kept[member])
            assert kept[member].setdefault(number, tuple(sorted(members))) == tuple(sorted(members))
            assert len(kept[member]) <= capacity
        assert len(opened) == 1, "some have kept connections, and others have not"
        again += opened.pop()
    assert again > 100 * (capacity - 1)


def test_capacity_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match=r"capacity=0\): allowed are 1"):
        ConnectionCache(4, capacity=0)

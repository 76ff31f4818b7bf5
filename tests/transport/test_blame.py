from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from wingbeat.transport.blame import Blame
from wingbeat.transport.loopback import Switchboard


@pytest.mark.parametrize("silent", [0, 2, 3])
def test_everyone_blames_the_one_that_waited_for_nobody(silent: int) -> None:
    store, size = Switchboard(), 4
    ranks = [rank for rank in range(size) if rank != silent]

    def fail(rank: int) -> int:
        blame = Blame(store, rank, size, timeout=0.5)
        blame.publish((rank - 1) % size)
        return blame.culprit((rank - 1) % size)

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(fail, ranks)) == [silent] * 3


def test_a_circle_of_waits_ends() -> None:
    store = Switchboard()
    store.set("waited/1", "0")
    assert Blame(store, 0, 2, timeout=0.1).culprit(1) == 0


@pytest.mark.parametrize("nonsense", ["", "seven", "-1", "99"])
def test_nonsense_in_the_store_is_not_followed(nonsense: str) -> None:
    store = Switchboard()
    store.set("waited/2", nonsense)
    assert Blame(store, 0, 4, timeout=0.1).culprit(2) == 2

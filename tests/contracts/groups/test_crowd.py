"""20,000 random groups cost no more threads, files or memory than some do."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import wingbeat
from helpers.pool import Pool
from wingbeat.transport import loopback

from .crowd import AT_ONCE, Held, crowd, random_groups, take_part

QUICK, ALL = 2_000, 20_000
RANKS = 8
WORKERS = 3
"""Processes, connected over TCP."""

GROWTH_MB = 6.0
"""What the allocator may take for itself. A World kept for each group would be 50 and more."""

KEYS = 100
"""In the store, of groups that are meeting at that moment."""


def flat(before: Held, after: Held, ranks: int, files: int = 2) -> None:
    assert after.objects <= before.objects + ranks, (before, after)
    assert after.files <= before.files + files, (before, after)
    assert after.threads <= before.threads + ranks, (before, after)
    assert after.resident_mb <= before.resident_mb + GROWTH_MB, (before, after)


@pytest.mark.parametrize("number", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)])
def test_random_groups_of_threads(number: int) -> None:
    members = loopback.worlds(RANKS, timeout=60)
    groups = random_groups(RANKS, number)
    loopback.run(members, lambda world: take_part(world, groups[: number // 10]))
    before = Held.now()
    loopback.run(members, lambda world: take_part(world, groups[number // 10 :]))
    after = Held.now()
    flat(before, after, RANKS * AT_ONCE)
    board = members[0].store
    assert isinstance(board, loopback.Switchboard)
    assert not board._messages
    assert not board._values
    for world in members:
        world.close()


def over_tcp(number: int) -> tuple[Held, Held, int, float]:
    """What a process of the pool does: what it held, new keys in the store, seconds."""
    world = wingbeat.init(timeout=60)
    store = world.store._store.inner  # type: ignore[attr-defined]
    begin, keys = time.monotonic(), store.num_keys()
    try:
        before, after = crowd(world, number)
        keys = store.num_keys() - keys
    finally:
        seconds = time.monotonic() - begin
        wingbeat.shutdown()
    return before, after, keys, seconds


@pytest.mark.parametrize(
    "number",
    [
        100,
        pytest.param(400, marks=pytest.mark.slow),
        pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_random_groups_of_processes(number: int, pool_of: Callable[[int], Pool]) -> None:
    [first, *others] = pool_of(WORKERS).run(over_tcp, number, deadline=1100.0)
    for before, after, keys, seconds in (first, *others):
        print(f"{number} groups in {seconds:.0f} s: {before}, then {after}; {keys} new keys")
        assert keys <= KEYS
        flat(before, after, AT_ONCE)

"""Queues follow what an interface carries, and routes those who come and go."""

from __future__ import annotations

import pytest

from helpers.cards import bcube
from wingbeat.methods.bounded_staleness.paths import (
    INITIAL_RATE,
    MIN_BYTES,
    TARGET_DELAY_S,
    Interface,
    Path,
    PathTable,
    RoutingTable,
)


class Sent:
    """A message that has not arrived."""

    def __init__(self, size: int) -> None:
        self.size, self.arrived = size, False


def link(queue: Interface, rate: float, begin: float, end: float, step: float = 0.01) -> float:
    """Keep a link of so many bytes a second full; return how long a part waits at the end."""
    for number in range(round(begin / step), round(end / step)):
        queue.posted(max(0, queue.limit - queue.waiting), number * step)
        queue.arrived(min(queue.waiting, int(rate * step)), (number + 1) * step)
    return queue.limit / rate


@pytest.mark.parametrize("rate", [2e5, 1e6, 1e7, 1e9])
def test_queue_is_as_long_as_wanted(rate: float) -> None:
    assert 0.9 * TARGET_DELAY_S <= link(Interface(), rate, 0.0, 2.0) <= 1.1 * TARGET_DELAY_S


def test_link_that_becomes_slow_has_short_queue_again() -> None:
    queue = Interface()
    link(queue, 1e8, 0.0, 2.0)
    assert link(queue, 1e6, 2.0, 5.0) <= 1.1 * TARGET_DELAY_S


def test_queue_of_slowest_link_is_not_too_small() -> None:
    queue = Interface()
    link(queue, 1.0, 0.0, 1000.0, 10.0)
    assert queue.limit == MIN_BYTES


def test_arrivals_from_short_queue_do_not_reduce_rate() -> None:
    queue = Interface()
    queue.posted(100, 0.0)
    queue.arrived(100, 1.0)
    assert queue.rate == INITIAL_RATE


def test_interface_from_which_nothing_arrives_keeps_its_rate() -> None:
    """When it is mended, as many bytes are queued as before."""
    queue = Interface()
    link(queue, 1e7, 0.0, 2.0)
    before = queue.rate
    for number in range(200, 600):
        queue.arrived(0, number / 100)
    assert queue.rate == before


def test_part_takes_the_path_on_which_it_arrives_first() -> None:
    """Interface 0 is ten times as fast, so it is used until ten times as much waits on it."""
    paths = PathTable()
    paths.add(1, (0, 1))
    assert paths.to({1}, 1000)[0] == Path(1, 0)
    for number in range(100):
        paths.check(number / 100)
        part = Sent(INITIAL_RATE // 10)  # in a hundredth of a second
        part.arrived = True
        paths.posted(Path(1, 0), part, number / 100)  # type: ignore[arg-type]
    paths.check(1.0)
    assert paths.to({1}, 1000)[0] == Path(1, 0)
    paths.posted(Path(1, 0), Sent(8000), 1.0)  # type: ignore[arg-type]
    assert paths.to({1}, 1000)[0] == Path(1, 0)
    paths.posted(Path(1, 0), Sent(2000), 1.0)  # type: ignore[arg-type]
    assert paths.to({1}, 1000)[0] == Path(1, 1)


def test_parts_are_a_quarter_of_the_shortest_queue_and_not_tiny() -> None:
    paths = PathTable()
    assert paths.part == 1 << 14
    paths.add(1, (0, 1))
    link(paths._interfaces[0], 1e8, 0.0, 2.0)
    link(paths._interfaces[1], 1e7, 0.0, 2.0)
    assert 6e5 < paths.part < 7e5


# -- routes in a BCube -----------------------------------------------------------------------


def test_over_those_who_share_a_switch_with_both() -> None:
    joined = [set().union(*cards) for cards in bcube(3, 2)]
    paths = RoutingTable(joined, 0)
    assert paths.relays
    assert sorted(paths.next(1, joined[0])) == [1]
    assert sorted(paths.next(4, joined[0])) == [1, 3]
    paths.without(1)
    assert sorted(paths.next(4, joined[0] - {1})) == [3]
    # The interface to 1 and 2 is cut: over 3, and then over 4 or 5.
    paths.again(1)
    assert sorted(paths.next(1, {3, 6})) == [3, 6]
    assert sorted(paths.next(4, {3, 6})) == [3]
    paths.without(3)
    paths.without(1)
    assert sorted(paths.next(4, {2, 6})) == [2, 6]
    assert sorted(paths.next(4, set())) == []


def test_nobody_leads_to_one_who_is_alone() -> None:
    paths = RoutingTable([{1}, {0, 2}, {1}], 0)
    paths.without(1)
    assert sorted(paths.next(2, {1})) == []


def test_where_all_reach_all_anybody_helps() -> None:
    paths = RoutingTable(None, 0)
    assert not paths.relays
    assert sorted(paths.next(2, {1, 2})) == [2]
    assert sorted(paths.next(2, {1, 3})) == [1, 3]

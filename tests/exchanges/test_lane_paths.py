"""Who leads to whom in a BCube, as workers come and go."""

from __future__ import annotations

from helpers.cards import bcube
from wingbeat.exchanges.lanes import RoutingTable


def test_over_those_who_share_a_switch_with_both() -> None:
    joined = [set().union(*cards) for cards in bcube(3, 2)]
    paths = RoutingTable(joined, 0)
    assert paths.relays
    assert paths.next(1, joined[0]) == [1]
    assert sorted(paths.next(4, joined[0])) == [1, 3]
    paths.without(1)
    assert paths.next(4, joined[0] - {1}) == [3]
    # The interface to 1 and 2 is cut: over 3, and then over 4 or 5.
    paths.again(1)
    assert sorted(paths.next(1, {3, 6})) == [3, 6]
    assert paths.next(4, {3, 6}) == [3]
    paths.without(3)
    paths.without(1)
    assert paths.next(4, {2, 6}) == [2, 6]
    assert paths.next(4, set()) == []


def test_nobody_leads_to_one_who_is_alone() -> None:
    paths = RoutingTable([{1}, {0, 2}, {1}], 0)
    paths.without(1)
    assert paths.next(2, {1}) == []


def test_where_all_reach_all_anybody_helps() -> None:
    paths = RoutingTable(None, 0)
    assert not paths.relays
    assert paths.next(2, {1, 2}) == [2]
    assert paths.next(2, {1, 3}) == [1, 3]

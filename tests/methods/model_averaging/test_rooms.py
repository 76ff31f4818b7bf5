"""Which groups' connections are kept: members agree, and nobody keeps too many."""

from __future__ import annotations

from random import Random

import pytest

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.service import Rooms


def test_a_meeting_keeps_its_number_until_it_is_closed() -> None:
    rooms = Rooms(5, capacity=2)
    assert rooms.meeting((0, 1)) == rooms.meeting((1, 0)) == 1
    assert rooms.meeting((0, 2)) == 2
    assert rooms.meeting((0, 1)) == 1
    assert rooms.meeting((0, 3)) == 3
    # (0, 2) was used longest ago.
    assert [rooms.closed(worker) for worker in range(5)] == [[2], [], [2], [], []]
    assert rooms.closed(0) == []
    assert rooms.meeting((0, 1)) == 1
    assert rooms.meeting((0, 2)) == 4


def test_all_meetings_of_one_that_is_gone_are_closed() -> None:
    rooms = Rooms(4)
    rooms.meeting((0, 1))
    rooms.meeting((1, 2, 3))
    rooms.meeting((2, 3))
    rooms.gone(1)
    assert [rooms.closed(worker) for worker in range(4)] == [[1], [1, 2], [2], [2]]
    assert rooms.meeting((2, 3)) == 3
    assert rooms.meeting((0, 1)) == 4


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_members_agree_and_nobody_keeps_more_than_its_capacity(capacity: int) -> None:
    chance, rooms = Random(capacity), Rooms(10, capacity)
    kept: list[dict[int, tuple[int, ...]]] = [{} for _ in range(10)]
    again = 0
    for _ in range(5000):
        if chance.random() < 0.01:
            rooms.gone(chance.randrange(10))
        members = tuple(chance.sample(range(10), chance.choice((2, 2, 3))))
        number = rooms.meeting(members)
        opened = set()
        for member in members:
            for closed in rooms.closed(member):
                del kept[member][closed]
            opened.add(number in kept[member])
            assert kept[member].setdefault(number, tuple(sorted(members))) == tuple(sorted(members))
            assert len(kept[member]) <= capacity
        assert len(opened) == 1, "some have kept connections, and others have not"
        again += opened.pop()
    assert again > 100 * (capacity - 1)


def test_no_room_is_refused() -> None:
    with pytest.raises(UsageError, match=r"capacity=0\): allowed are 1"):
        Rooms(4, capacity=0)

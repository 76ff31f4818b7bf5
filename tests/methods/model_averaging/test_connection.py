"""Whether groups have connected all workers, and who is added if they have not."""

from __future__ import annotations

from random import Random

from wingbeat.methods.model_averaging.policies import Connection, Crowd
from wingbeat.methods.model_averaging.rules import Layout, Rules


def test_it_is_time_after_so_many_requests_without_a_connection() -> None:
    connection = Connection(4, steps=2)
    assert [connection.asked() for _ in range(2 * 3 * 4 + 2)] == [False] * 24 + [True] * 2


def test_all_begins_anew_when_all_are_connected() -> None:
    connection = Connection(4, steps=1)
    for group in ((0, 1), (2, 3), (1, 0)):
        connection.join(group, 4)
    assert [connection.asked() for _ in range(13)][-1]
    connection.join((3, 0), 4)
    assert not any(connection.asked() for _ in range(12))
    assert connection.asked()


def test_nobody_cares_without_a_bound() -> None:
    connection = Connection(3, steps=None)
    assert not any(connection.asked() for _ in range(1000))


def test_who_is_added_is_of_another_part_and_fast_enough() -> None:
    crowd = Crowd(Layout.even(1, 6), Rules(threshold=2, forget=None), Random(1))
    crowd.asked = [9, 9, 9, 9, 5, 9]
    connection = Connection(6, steps=2)
    connection.join((0, 1, 5), 6)
    found = {connection.other(0, crowd) for _ in range(100)}
    assert found - {None} == {2, 3}
    assert {connection.other(4, crowd) for _ in range(100)} - {None} == {0, 1, 2, 3, 5}

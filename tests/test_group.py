"""A group is a value, and one that cannot be is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from wingbeat.errors import UsageError
from wingbeat.types import Group


def test_groups_of_the_same_ranks_and_epoch_are_equal() -> None:
    assert Group([3, 0, 1], 7) == Group((0, 1, 3), 7)
    assert len({Group([3, 0], 7), Group([0, 3], 7), Group([0, 3], 8), Group([0, 2], 7)}) == 3
    assert Group(iter([2, 1])).ranks == (1, 2)
    assert Group([5]).epoch == 0


def test_a_group_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Group([0, 1]).epoch = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("ranks", "epoch", "words"),
    [
        ([], 0, "ranks is empty"),
        ([0, 2, 2, 1], 0, "rank 2 occurs twice"),
        ([0, -1], 0, "ranks has -1: allowed are whole numbers from 0 on"),
        ([0, True], 0, "ranks has True"),
        (["0"], 0, "ranks has '0'"),
        ([0.0], 0, "ranks has 0.0"),
        ([0, 1], -1, "epoch=-1: allowed are whole numbers from 0 on"),
        ([0, 1], 1.5, "epoch=1.5"),
        ([0, 1], True, "epoch=True"),
    ],
)
def test_what_is_no_group_is_refused(ranks: Any, epoch: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Group(ranks, epoch)
    assert str(caught.value).startswith("Group: ")
    assert words in str(caught.value)


def test_messages_show_a_group_and_no_long_lists() -> None:
    assert str(Group([4, 0], 7)) == "group (0, 4) of epoch 7"
    assert str(Group(range(9))) == "group (0, 1, 2, 3, 4, 5, 6, 7, 8) of epoch 0"
    assert str(Group(range(64), 3)) == "group (0, 1, 2, 3, 4, 5, 6, 7, ..., 63) of epoch 3"

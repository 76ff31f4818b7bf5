"""The register of groups keeps to its bounds, and frees what is left."""

from __future__ import annotations

import gc

import pytest

from wingbeat.errors import UsageError
from wingbeat.transport import loopback
from wingbeat.transport.world import MAX_OPEN, REMEMBERED, Register
from wingbeat.types import SERIES, Group


def test_no_more_groups_are_open_than_there_may_be() -> None:
    register = Register()
    groups = [Group((0, 1), epoch) for epoch in range(MAX_OPEN + 1)]
    for group in groups[:-1]:
        register.admit(group, 0, 2)
    with pytest.raises(UsageError, match=f"rank 0 has {MAX_OPEN} groups open, which is as many"):
        register.admit(groups[-1], 0, 2)
    register.leave(groups[3])
    register.admit(groups[-1], 0, 2)


def test_what_was_refused_may_be_opened_later() -> None:
    """It must not count as an epoch that is over."""
    register = Register()
    for epoch in range(MAX_OPEN):
        register.admit(Group((0,), epoch), 0, 2)
    late = Group((0, 1), 5)
    with pytest.raises(UsageError, match="groups open"):
        register.admit(late, 0, 2)
    register.leave(Group((0,), 0))
    register.admit(late, 0, 2)


def test_the_last_epochs_of_many_groups_are_remembered_and_not_of_all() -> None:
    register = Register()
    for rank in range(1, REMEMBERED + 2):
        group = Group((0, rank), 3)
        register.admit(group, 0, REMEMBERED + 2)
        register.leave(group)
    assert len(register._last) == REMEMBERED
    with pytest.raises(UsageError, match="opened epoch 3 of these ranks before"):
        register.admit(Group((0, 2), 3), 0, REMEMBERED + 2)


def test_a_group_that_its_user_drops_counts_no_more() -> None:
    [world, _] = loopback.worlds(2)
    for epoch in range(MAX_OPEN + 5):
        world.open_group(Group((0, 1), epoch))
    gc.collect()
    assert not world._register._open


@pytest.mark.parametrize("what", [(0, 1), None, "0,1"])
def test_only_a_group_can_be_opened(what: object) -> None:
    with pytest.raises(UsageError, match=r"allowed is a wingbeat\.Group"):
        loopback.worlds(2)[0].open_group(what)  # type: ignore[arg-type]


def test_a_group_opens_no_channels() -> None:
    members = loopback.worlds(2)[0].open_group(Group((0, 1), 2))
    with pytest.raises(UsageError, match=r"group \(0, 1\) of epoch 2 has no channels"):
        members.open_channel()


def test_a_channel_opens_no_groups() -> None:
    members = loopback.worlds(2, timeout=5)
    channel, _ = loopback.run(members, lambda world: world.open_channel())
    with pytest.raises(UsageError, match="in a part of the world: call open_group on"):
        channel.open_group(Group((0, 1)))


def test_each_series_of_epochs_counts_by_itself() -> None:
    register = Register()
    register.admit(Group([0, 1], epoch=SERIES + 3), 0, 2)
    register.admit(Group([0, 1], epoch=3), 0, 2)
    with pytest.raises(UsageError, match="has opened epoch 3 of these ranks before"):
        register.admit(Group([0, 1], epoch=2), 0, 2)

"""The register of groups keeps to its bounds, and frees what is left."""

from __future__ import annotations

import gc

import pytest

from wingbeat.errors import UsageError
from wingbeat.transport import loopback
from wingbeat.transport.world import MAX_OPEN_GROUPS, MAX_REMEMBERED_EPOCHS, OpenGroups
from wingbeat.types import SERIES, Group


def test_groups_beyond_the_limit_are_refused() -> None:
    register = OpenGroups()
    groups = [Group((0, 1), epoch) for epoch in range(MAX_OPEN_GROUPS + 1)]
    for group in groups[:-1]:
        register.add(group, 0, 2)
    with pytest.raises(
        UsageError, match=f"rank 0 has {MAX_OPEN_GROUPS} groups open, which is the limit"
    ):
        register.add(groups[-1], 0, 2)
    register.discard(groups[3])
    register.add(groups[-1], 0, 2)


def test_refused_group_may_be_opened_later() -> None:
    """It must not count as an epoch that is over."""
    register = OpenGroups()
    for epoch in range(MAX_OPEN_GROUPS):
        register.add(Group((0,), epoch), 0, 2)
    late = Group((0, 1), 5)
    with pytest.raises(UsageError, match="groups open"):
        register.add(late, 0, 2)
    register.discard(Group((0,), 0))
    register.add(late, 0, 2)


def test_last_epochs_are_stored_up_to_the_limit() -> None:
    register = OpenGroups()
    for rank in range(1, MAX_REMEMBERED_EPOCHS + 2):
        group = Group((0, rank), 3)
        register.add(group, 0, MAX_REMEMBERED_EPOCHS + 2)
        register.discard(group)
    assert len(register._last) == MAX_REMEMBERED_EPOCHS
    with pytest.raises(UsageError, match="opened epoch 3 of these ranks"):
        register.add(Group((0, 2), 3), 0, MAX_REMEMBERED_EPOCHS + 2)


def test_collected_group_no_longer_counts() -> None:
    [world, _] = loopback.worlds(2)
    for epoch in range(MAX_OPEN_GROUPS + 5):
        world.open_group(Group((0, 1), epoch))
    gc.collect()
    assert not world._open_groups._open


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
    with pytest.raises(UsageError, match="on a group or channel: call it on the world"):
        channel.open_group(Group((0, 1)))


def test_each_series_of_epochs_counts_by_itself() -> None:
    register = OpenGroups()
    register.add(Group([0, 1], epoch=SERIES + 3), 0, 2)
    register.add(Group([0, 1], epoch=3), 0, 2)
    with pytest.raises(UsageError, match="has already opened epoch 3 of these ranks"):
        register.add(Group([0, 1], epoch=2), 0, 2)

"""A group's link is made when it is first used, and closes whenever it is told to."""

from __future__ import annotations

import threading

import pytest
import torch

from wingbeat.transport import loopback
from wingbeat.transport.failures import FailureAttribution
from wingbeat.transport.link import (
    GroupSetupError,
    LazyLink,
    Link,
    check_not_aborted,
    group_prefix,
    member_waiting_for,
)
from wingbeat.types import Group

GROUP = Group((0, 2, 3), 4)


def test_link_connects_on_first_use() -> None:
    board, met = loopback.Switchboard(), []

    def meet() -> Link:
        met.append(1)
        return loopback.LoopbackLink(board, 0, "lo0")

    link = LazyLink("lo0", meet)
    assert (link.name, met) == ("lo0", [])
    for _ in range(2):
        link.send(torch.ones(1), 1, 5)
        link.recv(torch.ones(1), 1, 5)
    assert met == [1]


def test_closed_link_does_not_connect() -> None:
    link = LazyLink("lo0", lambda: pytest.fail("met"))  # type: ignore[arg-type, return-value]
    link.close()
    link.close()
    with pytest.raises(RuntimeError, match="the link is closed"):
        link.send(torch.ones(1), 1, 5)


def test_link_closed_during_setup_is_closed_after_it() -> None:
    closed = threading.Event()

    class Noting(loopback.LoopbackLink):
        def close(self) -> None:
            closed.set()

    def meet() -> Link:
        link.close()
        return Noting(loopback.Switchboard(), 0, "lo0")

    link = LazyLink("lo0", meet)
    with pytest.raises(RuntimeError, match="the link is closed"):
        link.recv(torch.ones(1), 1, 5)
    assert closed.is_set()


def test_late_member_reads_for_which_rank_the_others_waited() -> None:
    board = loopback.Switchboard()
    blames = {
        rank: FailureAttribution(board, rank, 4, 1.0, group_prefix(GROUP)) for rank in GROUP.ranks
    }
    check_not_aborted(GROUP, 3, blames[3])
    blames[0].publish_wait(2, "all-reduce of bucket 7")
    blames[2].publish_wait(3, "all-reduce of bucket 1")
    with pytest.raises(GroupSetupError) as caught:
        check_not_aborted(GROUP, 3, blames[3])
    assert str(caught.value).startswith(
        "rank 2 has aborted group (0, 2, 3) of epoch 4, as it waited for this rank in all-reduce "
        "of bucket 1: open a group of a later epoch"
    )
    check_not_aborted(
        Group((0, 2, 3), 5),
        3,
        FailureAttribution(board, 3, 4, 1.0, group_prefix(Group((0, 2, 3), 5))),
    )


def test_values_of_peers_are_checked() -> None:
    board = loopback.Switchboard()
    blame = FailureAttribution(board, 3, 4, 1.0, group_prefix(GROUP))
    for text in ("", "seven", "-1", "4"):
        board.set(f"{group_prefix(GROUP)}given up", text)
        check_not_aborted(GROUP, 3, blame)
        board.set(f"{group_prefix(GROUP)}waited/0", text)
        assert blame.awaited_by(0) is None


def test_group_closed_before_its_setup_is_published_as_aborted() -> None:
    """They would wait for it until their deadline."""
    first, second, _ = loopback.worlds(3, timeout=20.0)
    group = Group((0, 1))
    with pytest.raises(ZeroDivisionError), first.open_group(group) as members:
        members.size / 0
    with pytest.raises(GroupSetupError, match=r"rank 0 has aborted group \(0, 1\) of epoch 0"):
        check_not_aborted(
            group, 1, FailureAttribution(second.store, 1, 3, 20.0, group_prefix(group))
        )


def test_connected_group_closes_without_publishing() -> None:
    world, _ = loopback.worlds(2, timeout=20.0)
    group = Group((0, 1))
    with world.open_group(group) as members:
        members.links[0].send(torch.ones(1), 1, 5)
    assert FailureAttribution(world.store, 1, 2, 20.0, group_prefix(group)).aborted_by() is None


def test_own_rank_is_never_the_blocked_member() -> None:
    blame = FailureAttribution(loopback.Switchboard(), 2, 4, 1.0, group_prefix(GROUP))
    blame.publish_wait(2, "all-reduce")
    assert member_waiting_for(2, GROUP, blame) is None


def test_non_member_cannot_abort_a_group() -> None:
    board = loopback.Switchboard()
    FailureAttribution(board, 1, 4, 1.0, group_prefix(GROUP)).abort()
    check_not_aborted(GROUP, 3, FailureAttribution(board, 3, 4, 1.0, group_prefix(GROUP)))


def test_operation_of_a_peer_is_shown_in_one_line() -> None:
    board = loopback.Switchboard()
    FailureAttribution(board, 0, 4, 1.0, group_prefix(GROUP)).publish_wait(
        2, "all-\nre\x1b[31mduce"
    )
    assert (
        FailureAttribution(board, 3, 4, 1.0, group_prefix(GROUP)).operation(0) == "all-re[31mduce"
    )


def test_group_prefixes_differ_by_ranks_and_epoch() -> None:
    groups = [
        Group((0, 1), 2),
        Group((0, 1, 2), 0),
        Group((0,), 1),
        Group((0, 12)),
        Group((0, 1), 22),
    ]
    assert len({group_prefix(group) for group in groups}) == len(groups)

"""Links of groups: their keys in the store, and what is read from members that failed."""

from __future__ import annotations

from wingbeat.transport import loopback
from wingbeat.transport.failures import FailureAttribution
from wingbeat.transport.link import aborted_text, group_prefix, member_waiting_for
from wingbeat.types import Group

GROUP = Group((0, 2, 3), 4)


def test_late_member_reads_for_which_rank_the_others_waited() -> None:
    board = loopback.Switchboard()
    blames = {
        rank: FailureAttribution(board, rank, 4, 1.0, group_prefix(GROUP)) for rank in GROUP.ranks
    }
    assert member_waiting_for(3, GROUP, blames[3]) is None
    blames[0].publish_wait(2, "all-reduce of bucket 7")
    blames[2].publish_wait(3, "all-reduce of bucket 1")
    assert member_waiting_for(3, GROUP, blames[3]) == 2
    assert aborted_text(GROUP, 3, 2, blames[3]).startswith(
        "rank 2 has aborted group (0, 2, 3) of epoch 4, as it waited for this rank in all-reduce "
        "of bucket 1: open a group of a later epoch"
    )
    later = Group((0, 2, 3), 5)
    blame = FailureAttribution(board, 3, 4, 1.0, group_prefix(later))
    assert member_waiting_for(3, later, blame) is None


def test_values_of_peers_are_checked() -> None:
    board = loopback.Switchboard()
    blame = FailureAttribution(board, 3, 4, 1.0, group_prefix(GROUP))
    for text in ("", "seven", "-1", "4"):
        board.set(f"{group_prefix(GROUP)}waited/0", text)
        assert blame.awaited_by(0) is None


def test_own_rank_is_never_the_blocked_member() -> None:
    blame = FailureAttribution(loopback.Switchboard(), 2, 4, 1.0, group_prefix(GROUP))
    blame.publish_wait(2, "all-reduce")
    assert member_waiting_for(2, GROUP, blame) is None


def test_operation_of_a_peer_is_shown_in_one_line() -> None:
    board = loopback.Switchboard()
    FailureAttribution(board, 0, 4, 1.0, group_prefix(GROUP)).publish_wait(
        2, "all-\nre\x1b[31mduce"
    )
    assert (
        FailureAttribution(board, 3, 4, 1.0, group_prefix(GROUP)).operation(0) == "all-?re?[31mduce"
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

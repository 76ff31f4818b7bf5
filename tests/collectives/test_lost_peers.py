"""What is said of a lost member of a group, whoever failed first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wingbeat.collectives import Collectives
from wingbeat.collectives.executor import LostPeer, explain_loss
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.failures import FailureAttribution, publish_exit
from wingbeat.transport.link import group_prefix
from wingbeat.types import Group

GROUP = Group((2, 5, 7), 3)
JOB: Any = "all-reduce of bucket 1"
WHERE = f"{JOB} on interface eth0"


def said(err: Exception, blocked_member: int | None = None, **waited: str) -> str:
    """What rank 5 says of rank 7, when ranks have published for whom they waited in what."""
    board = loopback.Switchboard()
    for name, text in waited.items():
        rank = int(name.removeprefix("by_"))
        peer, _, doing = text.partition(" ")
        FailureAttribution(board, rank, 8, 0.1, group_prefix(GROUP)).publish_wait(int(peer), doing)
    transfer: Any = None
    lost = LostPeer(JOB, transfer, 7, 0.0, err)
    lost.blocked_member = blocked_member
    return str(
        explain_loss(
            FailureAttribution(board, 5, 8, 0.1, group_prefix(GROUP)), 5, lost, WHERE, GROUP
        )
    )


def test_rank_at_the_end_of_the_chain_of_waits_is_named() -> None:
    text = said(RuntimeError("closed"), by_7=f"2 {JOB}")
    assert text == (
        f"rank 5: rank 2 failed during {WHERE} in group (2, 5, 7) of epoch 3 after 0.0 s "
        "(noticed through rank 7): closed"
    )


def test_rank_that_others_waited_for_receives_the_reason() -> None:
    text = said(RuntimeError("closed"), blocked_member=2, by_2=f"5 {JOB}", by_7=f"2 {JOB}")
    assert text.startswith(
        "rank 5: rank 2 has aborted group (2, 5, 7) of epoch 3, as it waited for this rank in "
        f"{JOB}: open a group of a later epoch"
    )


def test_lost_member_is_the_cause_though_another_waited_for_this_rank() -> None:
    """Rank 5 stopped when rank 7 was lost, and rank 2 published first that it waited for rank 5."""
    text = said(RuntimeError("closed"), blocked_member=2, by_2=f"5 {JOB}")
    assert text.startswith(f"rank 5: rank 7 failed during {WHERE}"), text


def test_peer_in_another_call_is_named_with_that_call() -> None:
    text = said(RuntimeError("closed"), blocked_member=7, by_7="5 broadcast")
    assert "rank 7 was in broadcast while this rank waited for it" in text
    assert "all members must make the same calls" in text


def test_finished_member_is_named_without_advice_about_join() -> None:
    board = loopback.Switchboard()
    publish_exit(board, 7, finished=True)
    transfer: Any = None
    lost = LostPeer(JOB, transfer, 7, 0.0, RuntimeError("closed"))
    text = str(
        explain_loss(
            FailureAttribution(board, 5, 8, 0.1, group_prefix(GROUP)), 5, lost, WHERE, GROUP
        )
    )
    assert text.startswith("rank 5: rank 7 has finished (its script ended, or called")
    assert "join" not in text


def test_blocked_member_is_not_reported_as_slow() -> None:
    """Rank 1 waits for rank 2; meanwhile rank 0 gives up, as it waits for rank 1."""
    board = loopback.Switchboard()
    group = Group((0, 1, 2))
    _, world, _ = loopback.worlds(3, switchboard=board, timeout=0.2)
    members = world.open_group(group)
    FailureAttribution(board, 0, 3, 0.2, group_prefix(group)).publish_wait(1, "all-reduce")
    ranks_before = [peer for peer in group.ranks if peer != 1]
    with pytest.raises(PeerError) as caught:
        Collectives(members).all_reduce(torch.ones(6)).wait()
    assert any(f"rank {peer} failed during" in str(caught.value) for peer in ranks_before)
    members.close()

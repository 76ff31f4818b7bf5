"""A worker's side of the group generator's protocol."""

from __future__ import annotations

import pytest

from wingbeat.methods.model_averaging.generator import Member, ProtocolError, Run
from wingbeat.methods.model_averaging.rules import ABLATION, Rules


def run(number: int, epoch: int = 0, initiator: int = 1) -> Run:
    return Run(number, epoch, (0, 1, 2), initiator)


def test_member_with_a_buffer_continues_after_one_group() -> None:
    member = Member(0, Rules())
    member.request()
    assert member.start(run(3))
    assert member.waiting
    assert member.finish() == run(3)
    assert not member.waiting


def test_member_without_a_buffer_continues_after_its_own_group() -> None:
    member = Member(0, Rules.random())
    member.request()
    for number, initiator in ((3, 1), (5, 2)):
        assert member.start(run(number, initiator=initiator))
        member.finish()
        assert member.waiting
    assert member.start(run(6, initiator=0))
    member.finish()
    assert not member.waiting


def test_new_epoch_replaces_the_running_group() -> None:
    member = Member(0, ABLATION["+ buffer"])
    member.request()
    assert member.start(run(3))
    assert member.start(run(3, epoch=1))
    assert member.running == run(3, epoch=1)
    assert member.finish().epoch == 1


def test_completed_group_is_not_run_again() -> None:
    member = Member(0, Rules())
    member.request()
    member.start(run(3))
    member.finish()
    assert not member.start(run(3, epoch=1))
    assert not member.start(run(2))
    assert member.running is None


@pytest.mark.parametrize("wrong", [run(4), run(4, epoch=1), run(3), Run(3, 1, (1, 2), 1)])
def test_invalid_run_raises(wrong: Run) -> None:
    member = Member(0, Rules())
    member.request()
    member.start(run(3))
    with pytest.raises(ProtocolError, match=r"group \d"):
        member.start(wrong)

"""A worker's side of the group generator."""

from __future__ import annotations

import pytest

from wingbeat.methods.model_averaging.generator import Member, Run, Unexpected
from wingbeat.methods.model_averaging.rules import ABLATION, Rules


def run(number: int, epoch: int = 0, initiator: int = 1) -> Run:
    return Run(number, epoch, (0, 1, 2), initiator)


def test_with_a_buffer_it_goes_on_after_one_group() -> None:
    member = Member(0, Rules())
    member.ask()
    assert member.hear(run(3))
    assert member.waiting
    assert member.done() == run(3)
    assert not member.waiting


def test_without_a_buffer_it_goes_on_after_its_own() -> None:
    member = Member(0, Rules.random())
    member.ask()
    for number, initiator in ((3, 1), (5, 2)):
        assert member.hear(run(number, initiator=initiator))
        member.done()
        assert member.waiting
    assert member.hear(run(6, initiator=0))
    member.done()
    assert not member.waiting


def test_a_new_epoch_takes_the_place_of_what_runs() -> None:
    member = Member(0, ABLATION["+ buffer"])
    member.ask()
    assert member.hear(run(3))
    assert member.hear(run(3, epoch=1))
    assert member.running == run(3, epoch=1)
    assert member.done().epoch == 1


def test_who_is_done_does_not_run_a_group_again() -> None:
    member = Member(0, Rules())
    member.ask()
    member.hear(run(3))
    member.done()
    assert not member.hear(run(3, epoch=1))
    assert not member.hear(run(2))
    assert member.running is None


@pytest.mark.parametrize("wrong", [run(4), run(4, epoch=1), run(3), Run(3, 1, (1, 2), 1)])
def test_what_the_generator_never_says_is_unexpected(wrong: Run) -> None:
    member = Member(0, Rules())
    member.ask()
    member.hear(run(3))
    with pytest.raises(Unexpected, match=r"group \d"):
        member.hear(wrong)

"""What the workers tell each other before they gather gradients or parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.training import on
from wingbeat.collectives import Collectives
from wingbeat.engine.runtime import IntentExchange
from wingbeat.errors import PeerError, UsageError
from wingbeat.schedules.intents import Answer, Intent


@given(
    st.integers(0, 40).flatmap(
        lambda slots: st.tuples(
            st.just(slots),
            st.lists(
                st.tuples(st.sampled_from(Intent), st.sets(st.integers(0, max(0, slots - 1)))),
                min_size=1,
                max_size=4,
            ),
        )
    )
)
def test_all_workers_receive_all_intents_and_the_union_of_slots(case: Any) -> None:
    slots, said = case
    said = [(intent, used if slots else set()) for intent, used in said]

    def body(world: Any) -> Answer:
        exchange = IntentExchange(Collectives(world), slots)
        intent, used = said[world.rank]
        exchange.announce(Intent.STEP, ())
        exchange.await_all()
        exchange.announce(intent, used)
        return exchange.await_all()

    for answer in on(len(said), body):
        assert answer.intents == tuple(intent for intent, _ in said)
        assert answer.used == frozenset().union(*(used for _, used in said))


def test_an_invalid_intent_names_its_sender() -> None:
    def body(world: Any) -> None:
        exchange = IntentExchange(Collectives(world), 3)
        if world.rank == 1:
            row = torch.zeros(2, 2, dtype=torch.uint8)
            row[1, 0] = 99
            Collectives(world).all_gather(row.view(-1), label="intents").wait()
            return
        exchange.announce(Intent.STEP, [1])
        with pytest.raises(PeerError, match="rank 1 sent 99"):
            exchange.await_all()

    on(2, body)


def _answer(*intents: Intent) -> Answer:
    return Answer(intents, frozenset())


def test_answer_names_leader_and_whether_to_gather_first() -> None:
    joined = _answer(Intent.FOLLOW, Intent.CLIP, Intent.CLIP)
    assert (joined.leader, joined.doing, joined.wants_whole) == (1, {Intent.CLIP}, True)
    assert joined.follows(0)
    assert not joined.follows(1)
    assert not _answer(Intent.CLIP, Intent.CLIP).wants_whole
    assert _answer(Intent.STEP, Intent.LOOK).wants_whole
    assert not _answer(Intent.FOLLOW, Intent.STEP).wants_whole


@pytest.mark.parametrize("intent", [i for i in Intent if i is not Intent.FOLLOW])
def test_all_must_do_the_same_unless_they_follow(intent: Intent) -> None:
    _answer(intent, Intent.FOLLOW, intent).check()
    other = Intent.DROP if intent is not Intent.DROP else Intent.STEP
    with pytest.raises(UsageError, match=r"rank 1 .* while rank 2 "):
        _answer(Intent.FOLLOW, intent, other, intent).check()

"""Both ends of a lane: whatever comes in which order, and how often, leaves in order and once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from wingbeat.exchanges.lanes import (
    WINDOW,
    ProtocolError,
    ReorderBuffer,
    RetransmitBuffer,
    unwrap,
)


@settings(deadline=None, max_examples=examples(20))
@given(st.integers(0, 2**32), st.integers(0, 300), st.sampled_from([0, 2**32 - 50]))
def test_all_arrives_in_order_and_once(seed: int, count: int, first: int) -> None:
    chance = random.Random(seed)
    out, into, got, under_way = (
        RetransmitBuffer[int](),
        ReorderBuffer[int](),
        list[int](),
        list[int](),
    )
    out.next = into.next = first
    acks: list[int] = []
    while len(got) < count:
        if out.open and out.next - first < count:
            under_way.append(out.add(out.next))
        what = chance.randrange(4)
        if what == 0 and under_way:
            low = under_way.pop(chance.randrange(len(under_way)))
            got += into.receive(low, unwrap(low, into.next))
        elif what == 1 and len(out):
            under_way.append(chance.choice(list(out)) % 2**32)  # sent a second time
        elif what == 2:
            acks.append(into.acknowledged())
        elif acks:
            out.acknowledge(acks.pop(chance.randrange(len(acks))))
        assert len(into._early) < WINDOW
        assert len(out) <= WINDOW
    assert got == list(range(first, first + count))


def test_what_is_too_far_ahead_is_refused() -> None:
    into = ReorderBuffer[str]()
    assert list(into.receive(WINDOW - 1, "last")) == []
    with pytest.raises(ProtocolError, match=f"number {WINDOW} is beyond the window at 0"):
        into.receive(WINDOW, "too far")


def test_an_ack_of_what_was_not_sent_is_refused() -> None:
    out = RetransmitBuffer[str]()
    out.add("a")
    with pytest.raises(ProtocolError, match="2 items were acknowledged, but only 1 were sent"):
        out.acknowledge(2)
    assert out.acknowledge(1)
    assert not out.acknowledge(0)
    assert len(out) == 0


def test_what_comes_twice_is_told_again() -> None:
    into = ReorderBuffer[str]()
    assert list(into.receive(0, "a")) == ["a"]
    assert into.acknowledged() == 1
    assert list(into.receive(0, "a")) == []
    assert into.unacknowledged == 1

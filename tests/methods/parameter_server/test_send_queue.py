"""`SendQueue`: which message is sent next, in each order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.methods.parameter_server.protocol import Flow, Order, SendQueue

orders = pytest.mark.parametrize("order", Order)
SEEDS = st.integers(0, 2**32)


@dataclass(eq=False)
class Item:
    """Something to be sent."""

    number: int
    flow: Flow
    position: int
    nbytes: int
    complete: bool
    arrived: bool = False


@dataclass
class Play:
    """An outbox whose peers take what comes at moments drawn from a seed."""

    order: Order
    chance: random.Random
    max_in_flight: int = 100
    items: list[Item] = field(default_factory=list)
    sent: list[Item] = field(default_factory=list)
    most_under_way: dict[Flow, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue: SendQueue[Item] = SendQueue(self.order, self.max_in_flight)
        self.window = dict.fromkeys((Flow(p, u) for p in range(2) for u in range(2)), 200)

    def add(self, complete: bool | None = None) -> None:
        flow = Flow(self.chance.randrange(2), self.chance.randrange(2))
        if complete is None:
            complete = self.order is not Order.FORWARD or self.chance.random() < 0.5
        item = Item(
            len(self.items), flow, self.chance.randrange(5), self.chance.randint(1, 60), complete
        )
        self.items.append(item)
        self.queue.enqueue(flow, item.position, item.nbytes, item)

    def room(self, flow: Flow) -> int:
        under = sum(i.nbytes for i in self.sent if i.flow == flow and not i.arrived)
        return self.window[flow] - under

    def send(self, flow: Flow, item: Item) -> object:
        assert item.flow == flow
        assert item.complete, "it was not there yet"
        assert item not in self.sent, "sent twice"
        assert self.room(flow) >= item.nbytes, "there was no room"
        waiting = [i for i in self.items if i.flow == flow and i not in self.sent]
        if self.order is Order.URGENT:
            first = min(waiting, key=lambda i: (i.position, i.number))
            under = sum(i.nbytes for i in self.sent if i.flow == flow and not i.arrived)
            assert under < self.max_in_flight, "max_in_flight is under way"
        else:
            first = min(waiting, key=lambda i: i.number)
        assert item is first
        self.sent.append(item)
        return lambda: item.arrived

    def flush(self) -> None:
        before = len(self.sent)
        self.queue.flush(self.room, self.send, lambda item: item.complete)  # type: ignore[arg-type]
        classes = [item.flow.urgency for item in self.sent[before:]]
        assert classes == sorted(classes), "the most urgent class goes first"
        assert self.queue.queued == len(self.items) - len(self.sent)

    def arrive(self) -> None:
        """In the order in which they were sent on each flow."""
        under = [i for i in self.sent if not i.arrived]
        if under:
            flow = self.chance.choice(under).flow
            next(i for i in under if i.flow == flow).arrived = True


@orders
@given(seed=SEEDS)
def test_queue_sends_each_message_once_in_order(order: Order, seed: int) -> None:
    play = Play(order, random.Random(seed))
    for _ in range(60):
        what = play.chance.randrange(4)
        if what == 0:
            play.add()
        elif what == 1:
            play.flush()
        elif what == 2:
            play.arrive()
        elif play.items:
            play.chance.choice(play.items).complete = True
    for item in play.items:
        item.complete = True
    for _ in range(2 * len(play.items) + 1):
        play.flush()
        play.arrive()
    assert sorted(i.number for i in play.sent) == list(range(len(play.items)))
    assert play.queue.queued == 0


@orders
@given(seed=SEEDS)
def test_flush_sends_everything_that_fits(order: Order, seed: int) -> None:
    play = Play(order, random.Random(seed))
    for _ in range(30):
        play.add()
    play.flush()
    for flow in play.window:
        waiting = [i for i in play.items if i.flow == flow and i not in play.sent]
        if not waiting:
            continue
        key = (lambda i: (i.position, i.number)) if order is Order.URGENT else (lambda i: i.number)
        first = min(waiting, key=key)
        under = sum(i.nbytes for i in play.sent if i.flow == flow)
        full = (
            under >= play.max_in_flight if order is Order.URGENT else play.room(flow) < first.nbytes
        )
        assert full or not first.complete


def test_flush_in_forward_order_blocks_behind_incomplete() -> None:
    play = Play(Order.FORWARD, random.Random(0))
    flow = Flow(0, 0)
    for number, complete in enumerate([True, False, True]):
        item = Item(number, flow, 0, 1, complete)
        play.items.append(item)
        play.queue.enqueue(flow, 0, 1, item)
    play.flush()
    assert [i.number for i in play.sent] == [0]
    play.items[1].complete = True
    play.flush()
    assert [i.number for i in play.sent] == [0, 1, 2]


def test_flush_with_full_flow_sends_other_flows() -> None:
    play = Play(Order.READY, random.Random(0))
    play.window[Flow(0, 0)] = 0
    for number, peer in enumerate([0, 1]):
        item = Item(number, Flow(peer, 0), 0, 10, True)
        play.items.append(item)
        play.queue.enqueue(item.flow, 0, 10, item)
    play.flush()
    assert [i.number for i in play.sent] == [1]

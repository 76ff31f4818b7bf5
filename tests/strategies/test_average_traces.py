"""What events and `wingbeat top` show of averages: requests, waits, groups, who is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wingbeat
from helpers.training import engine, net, on, train
from wingbeat.observe.events import AVERAGES, Event, stream
from wingbeat.transport.world import World

STEPS = 5


@pytest.fixture
def recorded() -> Iterator[list[Event]]:
    """Filled when the stream is stopped; all workers are threads, and record as one."""
    events: list[Event] = []
    stream.start(0)
    try:
        yield events
    finally:
        stream.stop()


def trained(strategy: Any, size: int, events: list[Event]) -> list[dict[str, Any]]:
    """Train, and make all models their mean; what each worker shows in the end."""

    def body(world: World) -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wingbeat.distribute(model, optimizer, strategy, world=world)
        train(model, optimizer, range(STEPS))
        wingbeat.synchronize(model)
        [section] = engine(model).runtime.exchange.sections()
        wingbeat.release(model, optimizer)
        return dict(section.cells)

    found = on(size, body, timeout=60)
    events += stream.take()
    return found


def of(events: list[Event], what: str) -> list[Event]:
    return [event for event in events if event.what == what]


@pytest.mark.parametrize("policy", ["random", "smart"])
def test_trace_of_a_group_has_request_wait_and_average(policy: str, recorded: list[Event]) -> None:
    shown = trained(wingbeat.Ripples(policy=policy, size=2, encrypted=False), 2, recorded)
    counted = Counter(event.what for event in recorded)
    # Of each worker a request for each step, for synchronize and release, each of which waits; an
    # answer may have several groups, of which those of one worker alone average nothing.
    assert counted["request"] == counted["wait"] == 2 * (STEPS + 2)
    assert counted["group_wait"] >= counted["average"] > 4
    assert counted["average"] % 2 == 0
    assert counted["take_over"] == 2 * STEPS
    for event in of(recorded, "take_over"):
        assert sorted(event.group) in ([0], [1], [0, 1])
    groups = Counter(len(event.group) for event in of(recorded, "take_over"))
    assert groups[2]
    if policy == "random":
        assert not groups[1]
    assert {event.lane for event in of(recorded, "take_over")} == {"compute"}
    for event in of(recorded, "average"):
        assert (event.lane, sorted(event.group)) == (AVERAGES, [0, 1])
        assert event.nbytes > 0
        before = [w for w in of(recorded, "group_wait") if w.end_ns <= event.begin_ns]
        assert before, "it waited for the group before"
    for cells in shown:
        assert cells["averages"] == STEPS + 1
        assert cells["group"] == "0 1"
        assert 0 <= cells["waits"] <= STEPS + 1


def test_trace_of_static_groups_has_no_requests(recorded: list[Event]) -> None:
    trained(wingbeat.Ripples(policy="static", encrypted=False), 2, recorded)
    assert not of(recorded, "request")
    assert len(of(recorded, "average")) >= 2


def test_trace_of_a_pair_has_the_average_on_both(recorded: list[Event]) -> None:
    trained(wingbeat.ADPSGD(encrypted=False), 2, recorded)
    assert {event.group for event in of(recorded, "request")} == {(1,)}, "rank 0 asks"
    assert len(of(recorded, "request")) == len(of(recorded, "group_wait")) == STEPS
    asked = Counter(event.group for event in of(recorded, "average"))
    # In synchronize and release both are one group.
    assert asked == {(0, 1): STEPS + 4, (1, 0): STEPS}
    for event in of(recorded, "average"):
        assert event.begin_ns > 0
        assert event.nbytes > 0


def test_trace_has_each_departure_once_per_worker(recorded: list[Event]) -> None:
    def body(world: World) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wingbeat.distribute(model, optimizer, wingbeat.Ripples(encrypted=False), world=world)
        train(model, optimizer, range(2))
        if world.rank == 2:
            engine(model).update._averager.session.client.mailbox.abandon()
            return
        train(model, optimizer, range(2, 5))
        wingbeat.synchronize(model)
        [section] = engine(model).runtime.exchange.sections()
        assert section.cells["absent"] == "2"
        wingbeat.release(model, optimizer)

    on(3, body, timeout=60)
    events = stream.take()
    assert [event.group for event in of(events, "left")] == [(2,)] * 2
    assert not of(events, "joined")


def test_disabled_stream_records_nothing() -> None:
    trained(wingbeat.Ripples(encrypted=False), 2, events := [])
    assert not events

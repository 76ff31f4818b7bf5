"""The contract of actors: order, timers, departures, calls of other threads, closing."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from helpers.mail import Clock
from helpers.received import Received
from wingbeat.errors import PeerError, UsageError
from wingbeat.schema import MalformedMessage, Messages, Word
from wingbeat.transport.actor import Actor
from wingbeat.transport.detector import RECONNECT_S, Failure
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import open_mailbox


class Note(NamedTuple):
    """A message.

    Attributes:
        number: of the message.
    """

    number: Word = 0


MESSAGES = Messages({1: Note})


class FakeMailbox:
    """The part of a mailbox that an actor uses."""

    def __init__(self) -> None:
        self.inbox: deque[Received] = deque()
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.cut: dict[int, float] = {}
        self.refused: Counter[str] = Counter()
        self.closed: list[float] = []

    def interrupter(self) -> Callable[[], None]:
        return lambda: None

    def unconnected(self) -> dict[int, float]:
        return self.cut

    def next(self, seconds: float, *, keep: bool) -> Received | None:
        return self.poll(keep=keep)

    def poll(self, *, keep: bool) -> Received | None:
        return self.inbox.popleft() if self.inbox else None

    def close(self, seconds: float) -> None:
        self.closed.append(seconds)


class Recorder(Actor):
    """Records what it is called with; message 99 is not allowed, 98 is a defect."""

    closed = "the recorder is closed"

    def __init__(self, mailbox: Any, **options: Any) -> None:
        super().__init__(mailbox, MESSAGES, "rank 0", **options)
        self.events: list[Any] = []
        self.is_busy = False

    def handle(self, message: Any, record: Note) -> None:
        if record.number == 99:
            raise MalformedMessage("number is 99")
        if record.number == 98:
            raise ValueError("a defect\nin two lines")
        self.events.append((message.peer, record.number))

    def refuse(self, message: Any, error: MalformedMessage) -> None:
        self.events.append((message.peer, "refused"))

    def check(self, now: float) -> None:
        self.events += [now, *((peer, gone.how) for peer, gone in self.gone.items())]

    def busy(self) -> bool:
        return self.is_busy

    def leave(self) -> None:
        self.events.append("left")


class Rig:
    """A recorder whose thread is the test's steps, at a time that the test sets."""

    def __init__(self, **options: Any) -> None:
        self.box, self.clock = FakeMailbox(), Clock()
        self.actor = Recorder(self.box, clock=self.clock, **options)
        self.step()

    def step(self) -> list[Any]:
        """Return the events of a turn."""
        self.actor.events = []
        self.actor.step(None)
        return self.actor.events

    def send(self, *numbers: int, kind: int = 1, peer: int = 1) -> None:
        for number in numbers:
            self.box.inbox.append(Received(kind, (number, 0, 0, 0), b"", peer))


def test_messages_are_handled_in_order_before_calls() -> None:
    rig = Rig()
    rig.send(1, 2, 3)
    for number in (1, 2):
        rig.actor.submit(lambda number=number: rig.actor.events.append(number), Future())
    assert rig.step() == [(1, 1), (1, 2), (1, 3), 1, 2]


def test_check_is_called_at_its_interval() -> None:
    rig = Rig()
    found = []
    for rig.clock.now in (0.1, 0.24, 0.25, 0.3, 0.49, 0.5, 7.0):
        found += rig.step()
    assert found == [0.25, 0.5, 7.0]


@pytest.mark.parametrize("bad", [{"kind": 7}, {"kind": 1}], ids=["unknown", "not allowed"])
def test_malformed_message_is_counted_and_does_not_end_the_actor(bad: dict[str, int]) -> None:
    rig = Rig()
    rig.send(99, **bad)
    rig.send(1)
    assert rig.step() == [(1, "refused"), (1, 1)]
    assert rig.box.refused == {"content": 1}
    assert rig.actor.error is None


@pytest.mark.parametrize("how", Failure)
def test_departure_is_reported_after_the_last_messages(how: Failure) -> None:
    rig = Rig()
    rig.actor.batch = 2  # type: ignore[misc]
    rig.send(1, 2, 3)
    if how is Failure.LEFT:
        rig.box.left.add(1)
    elif how is Failure.SILENT:
        rig.box.lost[1] = "has been silent"
    else:
        rig.box.cut[1] = 2 * RECONNECT_S
        rig.clock.now = 1.0
    assert (1, how) not in rig.step()
    rig.clock.now += 0.3
    assert rig.step()[-1] == (1, how)


def test_left_and_silent_peers_are_reported_without_waiting_for_the_interval() -> None:
    rig = Rig()
    rig.box.lost[1] = "has been silent"
    assert rig.step() == [0.0, (1, Failure.SILENT)]
    assert rig.actor.gone[1].text == "has been silent"
    rig.box.lost.clear()
    assert rig.step() == [0.0], "it has recovered"
    assert rig.step() == []


def test_unconnected_peer_may_reconnect() -> None:
    rig = Rig()
    rig.box.cut[1] = RECONNECT_S
    rig.clock.now = 1.0
    assert rig.step() == [1.0]


def test_exception_reaches_all_callers_with_its_cause() -> None:
    rig = Rig()
    waiting = rig.actor.submit(lambda: None, Future())
    rig.send(98)
    with pytest.raises(ValueError, match="defect"):
        rig.actor.run()
    with pytest.raises(PeerError, match=r"^rank 0: ValueError: a defect$") as caught:
        waiting.result(0)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(PeerError, match=r"^rank 0: ValueError: a defect$"):
        rig.actor.submit(lambda: None, Future())
    assert rig.actor.failed
    assert rig.box.closed == [1.0], "quickly"


def test_exception_of_a_call_ends_the_actor() -> None:
    rig = Rig()

    def call() -> None:
        raise PeerError("rank 0: rank 3 is lost")

    future = rig.actor.submit(call, Future())
    with pytest.raises(PeerError):
        rig.actor.run()
    with pytest.raises(PeerError, match=r"^rank 0: rank 3 is lost$"):
        future.result(0)


def test_close_fails_pending_calls_and_may_be_repeated() -> None:
    rig = Rig()
    done, pending = Future[None](), Future[None]()
    rig.actor.submit(lambda: done.set_result(None), done)
    rig.actor.submit(lambda: None, pending)
    rig.step()
    rig.actor.close()
    rig.actor.close()
    done.result(0)
    with pytest.raises(UsageError, match="rank 0: the recorder is closed"):
        pending.result(0)
    with pytest.raises(UsageError, match="the recorder is closed"):
        rig.actor.submit(lambda: None, Future())
    assert rig.box.closed[0] == 5.0


@pytest.mark.parametrize(("quick", "seconds"), [(False, 3.0), (True, 0.0)])
def test_busy_actor_closes_at_its_deadline(quick: bool, seconds: float) -> None:
    rig = Rig(close_s=3.0)
    rig.actor.is_busy, rig.actor.closing, rig.actor.quick = True, True, quick
    step = rig.actor.step

    def later(message: Any) -> None:
        rig.clock.now += 0.5
        step(message)

    rig.actor.step = later  # type: ignore[method-assign]
    rig.actor.run()
    assert rig.clock.now == seconds
    assert rig.box.closed == [1.0 if quick else 3.0]
    assert rig.actor.events[-1] == "left"


def test_calls_are_made_before_an_actor_closes() -> None:
    rig = Rig()
    future = Future[None]()
    rig.actor.submit(lambda: future.set_result(None), future)
    rig.actor.closing = True
    rig.actor.run()
    future.result(0)


def test_service_ends_quickly_with_its_parent() -> None:
    rig = Rig()
    parent = iter([True, True, False, False])
    rig.actor.run(lambda: next(parent))
    assert (rig.actor.quick, rig.actor.failed) == (True, False)
    assert rig.box.closed == [1.0]


@pytest.mark.parametrize("abandoned", [False, True])
def test_thread_serves_calls_over_a_real_mailbox_until_it_closes(abandoned: bool) -> None:
    store = Switchboard()
    actor = Recorder(open_mailbox(store, 0, [], interfaces=["lo"]), thread="test-actor")
    actor.start()
    found = Future[str]()
    name = actor.submit(lambda: found.set_result(threading.current_thread().name), found)
    assert name.result(30.0) == "test-actor"
    if abandoned:
        actor.abandon()
        actor._thread.join(30.0)
        assert not actor._thread.is_alive()
    actor.close()
    assert actor.error is not None
    with pytest.raises(UsageError, match="is closed"):
        actor.submit(lambda: None, Future())

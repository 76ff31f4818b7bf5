"""A client of the group generator, in one thread and with real mailboxes and processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.received import Received
from helpers.reducers import TIMEOUT_S, FunctionReducer, SharedValues
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.model_averaging import client as client_module
from wingbeat.methods.model_averaging.client import Client
from wingbeat.methods.model_averaging.generator import (
    MESSAGES,
    Added,
    Done,
    Fetched,
    FetchState,
    Keepalive,
    Lost,
    Reason,
    Refused,
    Removed,
    Request,
    Run,
    RunMessage,
    SendState,
    Synchronize,
)
from wingbeat.methods.model_averaging.rules import Rules, group_of
from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.methods.model_averaging.static_client import (
    ABANDONED,
    NO_INITIATOR,
    STATIC_CONNECTIONS,
    Arrival,
    StatusTable,
)
from wingbeat.transport import detector
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.services import ProcessService, Service, ThreadService
from wingbeat.types import Layout

GENERATOR = 4


def sent(message: Any) -> Received:
    return Received(*MESSAGES.pack(message))


def run_message(*run: Any, connection: int = 5, close: tuple[int, ...] = ()) -> Received:
    made = Run(*run)
    return sent(
        RunMessage(made.number, made.epoch, made.initiator, connection, made.members, close)
    )


class FakeMailbox:
    """The part of a mailbox that a client uses, with prepared messages of the generator."""

    def __init__(self, *messages: Received) -> None:
        self.messages = deque(messages)
        self.arrived: deque[Received] = deque()  # while it waits for members
        self.posted: list[Any] = []
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.cut: dict[int, float] = {}

    def unconnected(self) -> dict[int, float]:
        return self.cut

    def next(self, seconds: float) -> Received | None:
        if not self.messages:
            self.lost[GENERATOR] = "silent"
            return None
        return self.messages.popleft()

    def poll(self) -> Received | None:
        return self.arrived.popleft() if self.arrived else None

    def post(self, peer: int, kind: int, *, ids: tuple[int, ...], urgency: int) -> None:
        assert peer == GENERATOR
        if self.lost:
            raise PeerError("the generator is gone")
        self.posted.append(MESSAGES.parse(Received(kind, ids), workers=GENERATOR))


def client(box: FakeMailbox, rules: Rules | None = None) -> Client:
    table = StatusTable(Switchboard(), "groups/", 4, 0)
    return Client(box, 1, GENERATOR, Layout.even(2, 2), rules or Rules(), 5.0, table)  # type: ignore[arg-type]


@pytest.fixture
def polled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "_POLL_S", 0.0)


def test_step_sends_a_request_averages_and_acknowledges() -> None:
    box = FakeMailbox(run_message(7, 0, (0, 1), 0))
    runs: list[Run] = []
    client(box).step(FunctionReducer(lambda run, alive: runs.append(run)))
    assert runs == [Run(7, 0, (0, 1), 0)]
    assert box.posted == [Request(), Done(7, 0)]


def test_connections_are_closed_before_others_are_opened_and_all_in_a_fallback() -> None:
    box = FakeMailbox(
        run_message(7, 0, (0, 1), 0, connection=3),
        run_message(8, 0, (1, 2), 1, connection=9, close=(3, 4)),
    )
    one, reducer = client(box), FunctionReducer(lambda run, alive: None)
    for _ in range(3):
        one.step(reducer)
    assert reducer.connections == [3, 9]
    assert reducer.closed == [[], [3, 4], None]
    one.step(reducer)
    assert reducer.connections[2:] == [STATIC_CONNECTIONS + 2 * 1 + 2]


def test_synchronize_waits_for_one_group_with_any_rules() -> None:
    for rules in (Rules(), Rules.random(2), Rules.all_workers()):
        box = FakeMailbox(sent(Keepalive()), run_message(7, 0, (0, 1, 2), 0))
        runs: list[int] = []
        client(box, rules).synchronize(
            FunctionReducer(lambda run, alive, runs=runs: runs.append(run.number))
        )
        assert runs == [7]
        assert box.posted == [Synchronize(), Done(7, 0)]


def test_synchronize_is_repeated_after_an_exclusion() -> None:
    box = FakeMailbox(
        sent(Removed(1, 1, Reason.LATE, False)),
        sent(Added(1)),
        run_message(9, 0, (1,), 1),
    )
    client(box).synchronize(FunctionReducer(lambda run, alive: None))
    assert [type(each) for each in box.posted] == [Synchronize, Synchronize, Done]


@pytest.mark.parametrize("does", [Client.step, Client.synchronize])
def test_messages_of_the_generator_extend_a_wait(
    monkeypatch: pytest.MonkeyPatch, does: Callable[..., None]
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    signs = [sent(Keepalive())] * 20
    one = client(FakeMailbox(*signs, run_message(9, 0, (1,), 1)))
    does(one, FunctionReducer(lambda run, alive: None))
    assert one.fallback is None

    box = FakeMailbox()
    box.next = lambda seconds: None  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="no group came from the group generator within 5"):
        client(box).synchronize(FunctionReducer(lambda run, alive: None))


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (Client.step, "the end of its step"),
        (Client.synchronize, r"the call of wingbeat\.synchronize\(\)"),
    ],
)
def test_wait_for_a_live_worker_is_logged_and_fails_after_ten_timeouts(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    does: Callable[..., None],
    what: str,
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    one = client(FakeMailbox(*[sent(Keepalive(2))] * 60))
    with pytest.raises(PeerError, match=rf"rank 1: rank 2 is alive, but {what} .* for 50 s \(10 "):
        does(one, FunctionReducer(lambda run, alive: None))
    assert len(re.findall(rf"rank 1: has waited for {what} of rank 2 for 3\d s", caplog.text)) == 1


def test_member_that_has_averaged_when_the_generator_dies_averages_once() -> None:
    for does in (Client.step, Client.synchronize):
        box = FakeMailbox(run_message(7, 0, (0, 1), 0))
        one = client(box, Rules.all_workers())
        runs: list[Run] = []

        def average(run: Run, arrival: Callable[[], Arrival]) -> None:
            runs.append(run)  # noqa: B023
            box.lost[GENERATOR] = "silent"  # noqa: B023

        does(one, FunctionReducer(average))
        assert one.fallback
        assert [run.number for run in runs] == [7]


@pytest.mark.usefixtures("polled_each_time")
def test_generator_without_connections_is_lost_after_a_second() -> None:
    """Unless it is connected again by then. Later connections change nothing."""
    signs: list[float] = [0.3, 0.9, 0.0, 0.4, 1.1, 0.0]

    class Silent(FakeMailbox):
        def next(self, seconds: float) -> None:
            self.cut = {GENERATOR: sign} if (sign := signs.pop(0)) else {}

    one = client(Silent(), Rules.all_workers())
    runs: list[Run] = []
    one.step(FunctionReducer(lambda run, alive: runs.append(run)))
    assert signs == [0.0]
    assert one.fallback == "it has ended unexpectedly: its connections are closed"
    assert [run.members for run in runs] == [(0, 1, 2, 3)]
    one._connection._mailbox.unconnected().clear()  # type: ignore[attr-defined]
    assert one._connection.lost


@pytest.mark.usefixtures("polled_each_time")
def test_arrival_is_departed_after_the_generator_is_lost() -> None:
    box = FakeMailbox(run_message(7, 0, (0, 1), 0))
    one = client(box)
    found: list[Arrival] = []

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        found.append(arrival())
        box.cut[GENERATOR] = 1.1
        found.append(arrival())
        return None

    one.step(FunctionReducer(average))
    assert found == [Arrival.POSSIBLE, Arrival.DEPARTED]


def test_last_message_of_a_generator_that_leaves_is_handled() -> None:
    class Leaving(FakeMailbox):
        def next(self, seconds: float) -> None:
            if not self.left:
                self.left.add(GENERATOR)
                self.arrived.append(run_message(7, 0, (0, 1), 0))

    one = client(Leaving())
    runs: list[int] = []
    one.step(FunctionReducer(lambda run, alive: runs.append(run.number)))
    assert runs == [7]
    assert one.fallback is None


@pytest.mark.parametrize(
    ("why", "members"), [(Reason.SILENT, (0, 1, 3)), (Reason.LATE, (0, 1, 2, 3))]
)
def test_fallback_with_rules_of_everyone_has_one_group(why: Reason, members: tuple) -> None:
    """A late worker is alive: it takes part, and is not marked as lost for good."""
    one = client(FakeMailbox(sent(Removed(2, 0, why, False))), Rules.all_workers())
    runs: list[Run] = []
    for _ in range(3):
        one.step(FunctionReducer(lambda run, alive: runs.append(run)))
    assert [run.members for run in runs] == [members] * 3


def test_group_of_one_averages_nothing() -> None:
    box = FakeMailbox(run_message(7, 0, (1,), 1))
    client(box).step(FunctionReducer(lambda run, alive: pytest.fail("nothing to average")))
    assert box.posted[-1] == Done(7, 0)


def test_step_without_a_buffer_runs_groups_until_its_own_is_done() -> None:
    box = FakeMailbox(
        run_message(1, 0, (0, 1), 0), run_message(3, 0, (1, 2), 2), run_message(4, 0, (1, 3), 1)
    )
    runs: list[int] = []
    client(box, Rules.random()).step(FunctionReducer(lambda run, alive: runs.append(run.number)))
    assert runs == [1, 3, 4]


def test_lost_member_is_reported_and_the_group_runs_again() -> None:
    box = FakeMailbox(
        run_message(7, 0, (0, 1, 2), 0),
        sent(Removed(2, 0, Reason.LATE, False)),
        run_message(7, 1, (0, 1), 0),
    )
    one = client(box)
    lost = iter([2, None])
    one.step(FunctionReducer(lambda run, alive: next(lost)))
    assert box.posted == [Request(), Lost(7, 0, 2), Done(7, 1)]
    assert one.lost_peers == {2}


def test_exclusion_before_the_last_request_causes_no_second_request() -> None:
    box = FakeMailbox(
        sent(Removed(1, 0, Reason.LATE, False)),
        sent(Added(1)),
        run_message(9, 0, (1,), 1),
    )
    one = client(box)
    one.step(FunctionReducer(lambda run, alive: None))
    assert [type(each) for each in box.posted] == [Request, Done]
    box.messages += [sent(Removed(1, 1, Reason.LATE, False)), run_message(10, 0, (1,), 1)]
    one.step(FunctionReducer(lambda run, alive: None))
    assert [type(each) for each in box.posted[2:]] == [Request, Done]


def test_exclusion_while_waiting_causes_a_second_request() -> None:
    box = FakeMailbox(
        sent(Removed(1, 1, Reason.LATE, False)),
        sent(Added(1)),
        run_message(9, 0, (1,), 1),
    )
    client(box).step(FunctionReducer(lambda run, alive: None))
    assert [type(each) for each in box.posted] == [Request, Request, Done]


@pytest.mark.parametrize("heard", [(1,), (0, 1)])
def test_excluded_worker_that_copies_state_ends_its_step_without_an_average(heard: tuple) -> None:
    """It was excluded while it waits, or before, which the generator repeats."""
    box = FakeMailbox(*(sent(Removed(1, asked, Reason.LATE, False)) for asked in heard))
    one = client(box)
    one.copies_state = True
    one.step(FunctionReducer(lambda run, alive: pytest.fail("nothing to average")))
    assert box.posted == [Request(copies_state=True)]
    assert one.excluded
    box.messages += [sent(Removed(1, 2, Reason.LATE, False)), run_message(9, 0, (1,), 1)]
    one.synchronize(FunctionReducer(lambda run, alive: None))
    assert [type(each) for each in box.posted[1:]] == [Synchronize, Synchronize, Done]
    assert not one.excluded


def test_silent_worker_has_no_average_until_it_fetches_a_state() -> None:
    """Whatever its strategy: its model is old."""
    box = FakeMailbox(sent(Removed(1, 1, Reason.SILENT, False)))
    one = client(box)
    one.step(FunctionReducer(lambda run, alive: pytest.fail("nothing to average")))
    assert box.posted == [Request()]
    assert one.stale
    box.messages.append(sent(SendState(0, 1, 3)))
    assert one.fetch_state(lambda giver, meeting, lives: (giver, meeting)) == (0, 3)
    assert not one.stale
    assert box.posted[1:] == [FetchState(-1, join=False), Fetched()]


def test_state_is_sent_in_the_next_step_if_the_request_arrives_during_a_fetch() -> None:
    """Ranks of a replica send it at the same time: before the fetched state, or after it."""
    box = FakeMailbox(sent(SendState(1, 2, 4)), sent(SendState(0, 1, 3)))
    one = client(box)
    served: list[tuple[int, int]] = []
    one.on_fetch = lambda *each: served.append(each)

    def receive(giver: int, meeting: int, lives: Callable[[], bool]) -> str:
        box.arrived.append(sent(SendState(1, 3, 6)))
        assert lives()
        assert not served
        return "a state"

    assert one.fetch_state(receive) == "a state"
    assert not served
    # A request that arrives after the fetch is served at once.
    box.messages += [sent(SendState(1, 0, 7)), run_message(9, 0, (1,), 1)]
    one.step(FunctionReducer(lambda run, alive: None))
    assert served == [(2, 4), (3, 6), (0, 7)]


@pytest.mark.parametrize("missed", [0, 1])
@pytest.mark.parametrize("why", Reason)
def test_synchronize_alone_fails_unless_all_others_died_or_left(why: Reason, missed: int) -> None:
    outs = [sent(Removed(other, 0, Reason.DIED, False)) for other in (0, 2)]
    one = client(FakeMailbox(*outs, sent(Removed(3, 0, why, missed)), run_message(9, 0, (1,), 1)))
    reducer = FunctionReducer(lambda run, alive: None)
    if why in (Reason.DIED, Reason.LEFT) and not missed:
        one.synchronize(reducer)
        return
    text = r"rank 1: no other worker takes part .* rank 3 .*alone"
    if why is Reason.FINISHED:
        text = "rank 1: rank 3 completed the last mean of all models and left, and this worker"
    with pytest.raises(PeerError, match=text):
        one.synchronize(reducer)


def test_synchronize_with_others_fails_if_one_has_left_after_a_mean_that_none_of_them_has() -> None:
    finished = sent(Removed(3, 0, Reason.FINISHED, False))
    one = client(FakeMailbox(finished, run_message(9, 1, (0, 1), 0)))
    with pytest.raises(PeerError, match=r"rank 1: rank 3 completed the last mean .* from one$"):
        one.synchronize(FunctionReducer(lambda run, alive: None))


def test_stale_run_is_abandoned_after_an_exclusion() -> None:
    """The generator has removed this worker from the group since."""
    box = FakeMailbox(run_message(7, 0, (0, 1), 0), run_message(9, 0, (1,), 1))
    box.arrived.append(sent(Removed(1, 1, Reason.LATE, False)))
    seen: list[Arrival] = []

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        seen.append(arrival())
        return ABANDONED

    client(box).step(FunctionReducer(average))
    assert seen == [Arrival.IMPOSSIBLE]


def test_excluded_worker_in_a_group_has_missed_nothing() -> None:
    """All others are gone."""
    one = client(FakeMailbox(sent(Removed(1, 0, Reason.LATE, False)), run_message(9, 0, (1,), 1)))
    one.copies_state = True
    one.step(FunctionReducer(lambda run, alive: None))
    assert not one.excluded


def test_lost_and_returned_peers_are_reported_once_each() -> None:
    late, out = (sent(Removed(3, 0, why, False)) for why in (Reason.LATE, Reason.DIED))
    back = sent(Added(3))
    one = client(FakeMailbox(late, out, out, back, back, run_message(9, 0, (1,), 1)))
    seen: list[tuple[str, int]] = []
    one.on_lost, one.on_back = (
        lambda w: seen.append(("lost", w)),
        lambda w: seen.append(("back", w)),
    )
    one.step(FunctionReducer(lambda run, alive: None))
    assert seen == [("lost", 3), ("back", 3)]


def test_returned_peer_is_not_lost() -> None:
    out, back = sent(Removed(3, 0, Reason.LATE, False)), sent(Added(3))
    for messages, absent in (((out,), {3}), ((out, back), set())):
        one = client(FakeMailbox(*messages, run_message(9, 0, (1,), 1)))
        one.step(FunctionReducer(lambda run, alive: None))
        assert one.lost_peers == absent


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (run_message(7, 0, (0, 2), 0), "does not contain worker 1"),
        (run_message(7, 0, (0, 1, 9), 0), "members\\[2\\] is 9; allowed: 0 to 3"),
        (sent(Request()), "Request was sent by the generator"),
        (sent(Refused(b"no \xff")), "a refusal: no"),
    ],
)
def test_protocol_violations_of_the_generator_raise(message: Received, said: str) -> None:
    with pytest.raises(PeerError, match=f"rank 1: the group generator violated .*{said}"):
        client(FakeMailbox(message)).step(FunctionReducer(lambda run, alive: None))


def test_fallback_starts_the_static_schedule_at_its_first_step() -> None:
    box = FakeMailbox(run_message(7, 0, (0, 1), 0), sent(Removed(3, 0, Reason.DIED, False)))
    one = client(box)
    runs: list[Run] = []
    for _ in range(6):
        one.step(FunctionReducer(lambda run, alive: runs.append(run)))
    assert one.fallback
    wanted = [set(group_of(Layout.even(2, 2), 1, step)) - {3} for step in range(5)]
    assert [(r.number, set(r.members), r.initiator) for r in runs[1:]] == [
        (2 * step + 2, group, NO_INITIATOR) for step, group in enumerate(wanted) if len(group) > 1
    ]


def test_group_that_not_all_members_know_is_abandoned_in_a_fallback() -> None:
    box = FakeMailbox(run_message(7, 0, (0, 1), 0))
    one = client(box)
    found: list[Arrival] = []

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        if run.initiator == NO_INITIATOR:
            return None
        found.append(arrival())
        box.lost[GENERATOR] = "silent"
        found.append(arrival())
        one._table.mark_fallback(0, 7)  # it was through with this group, and has sent all
        found.append(arrival())
        one._table.mark_fallback(0, 6)
        found.append(arrival())
        return ABANDONED

    one.step(FunctionReducer(average))
    assert found == [Arrival.POSSIBLE, Arrival.DEPARTED, Arrival.DEPARTED, Arrival.IMPOSSIBLE]
    assert one._table.fallbacks([0, 1, 2]) == {0: 6, 1: -1}
    assert Keepalive() in box.posted
    assert one.fallback
    assert one._static.steps == 1


def test_lost_member_is_left_out_after_a_fallback() -> None:
    one = client(FakeMailbox())
    seen: list[tuple[int, ...]] = []
    layout = Layout.even(1, 4)
    one._layout = layout

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        seen.append(run.members)
        return 2 if 2 in run.members else None

    for _ in range(4):
        one.step(FunctionReducer(average))
    assert seen[:2] == [(0, 1, 2, 3), (0, 1, 3)]
    assert all(2 not in members for members in seen[1:])


def test_missing_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    box = FakeMailbox()
    box.next = lambda seconds: None  # type: ignore[method-assign]
    now = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    with pytest.raises(PeerError, match="rank 1: no group came from the group generator within 5"):
        client(box).step(FunctionReducer(lambda run, alive: None))
    assert Keepalive() in box.posted


def test_arrival_is_impossible_once_the_group_runs_again() -> None:
    box = FakeMailbox(run_message(7, 0, (0, 1, 2), 0))
    one = client(box)
    found: list[Arrival] = []

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        if run.epoch:
            return None
        found.append(arrival())
        box.arrived += [sent(Removed(2, 0, Reason.LATE, False)), run_message(7, 1, (0, 1), 0)]
        found.append(arrival())
        return ABANDONED

    reducer = FunctionReducer(average)
    one.step(reducer)
    assert found == [Arrival.POSSIBLE, Arrival.IMPOSSIBLE]
    assert (one.fallback, one.lost_peers) == (None, {2})
    assert box.posted[-1] == Done(7, 1)


def test_messages_from_before_the_generator_died_are_handled() -> None:
    """It ends with the worker that has started it, and removes that one."""
    box = FakeMailbox()
    box.arrived += [
        sent(Removed(3, 0, Reason.SILENT, False)),
        sent(Removed(0, 0, Reason.DIED, False)),
    ]
    one, runs = client(box, Rules.all_workers()), []
    one.step(FunctionReducer(lambda run, coming: runs.append(run.members)))
    assert runs == [(1, 2)]
    assert one._table.lost() == {0, 3}


@pytest.mark.parametrize(("copies", "members"), [(False, (0, 1, 2, 3)), (True, (0, 1, 2))])
def test_late_worker_is_in_groups_without_a_generator_unless_it_must_copy_a_state(
    copies: bool, members: tuple[int, ...]
) -> None:
    one = client(FakeMailbox(sent(Removed(3, 0, Reason.LATE, False))), Rules.all_workers())
    one.copies_state = copies
    runs: list[tuple[int, ...]] = []
    one.step(FunctionReducer(lambda run, coming: runs.append(run.members)))
    assert runs == [members]
    assert one._table.lost() == {0, 1, 2, 3}.difference(members)


class NextGenerator:
    """As `GeneratorSearch`: it has found another generator, which sends messages."""

    def __init__(self, *messages: Received) -> None:
        self.box, self.number, self.runs = FakeMailbox(*messages), 0, False
        self.begun, self.stopped = 0, False

    def stop(self) -> None:
        self.stopped = True

    def begin(self, lost: int) -> None:
        self.number, self.begun = 2 * (lost + 1), self.begun + 1

    def take(self) -> FakeMailbox | None:
        return self.box if self.begun == 1 else None


def alone_after_another_generator(
    *, marked: Sequence[int] = (), died: Sequence[int] = (), left: Sequence[int] = ()
) -> Client:
    """Return worker 1, which has lost all others without a generator, and then found one.

    Others have ``marked`` a worker as lost, and have ``left``. Some are known to have ``died``.
    """
    box, search = FakeMailbox(), NextGenerator(run_message(0, 0, (1,), 1))
    box.abandon = lambda: None  # type: ignore[attr-defined]
    store = Switchboard()
    table, other = (StatusTable(store, "groups/", 4, worker) for worker in (1, 0))
    one = Client(
        box, 1, GENERATOR, Layout.even(2, 2), Rules.all_workers(), 5.0, table,  # type: ignore[arg-type]
        search=search, has_died=lambda worker: worker in died,  # type: ignore[arg-type]
    )  # fmt: skip
    for worker in marked:
        other.mark_lost(worker)
    for worker in left:
        StatusTable(store, "groups/", 4, worker).mark_lost(worker, left=True)
    one.step(FunctionReducer(lambda run, coming: max(set(run.members) - {1})))
    assert one.fallback
    return one


def test_synchronize_alone_fails_after_peers_were_lost_without_a_generator() -> None:
    """They may have been cut off, or have finished."""
    one = alone_after_another_generator(died=[0, 2])
    with pytest.raises(PeerError, match=r"rank 1: no other worker .* rank 3 has given no sign"):
        one.synchronize(FunctionReducer(lambda run, coming: None))
    assert one.fallback is None


def test_synchronize_alone_succeeds_if_the_lost_peers_have_died_or_left() -> None:
    one = alone_after_another_generator(died=[0, 3], left=[2])
    one.synchronize(FunctionReducer(lambda run, coming: None))
    assert one.fallback is None


def test_synchronize_alone_fails_if_the_others_have_continued_without_this_worker() -> None:
    one = alone_after_another_generator(marked=[1], left=[2, 3, 0], died=[0, 2, 3])
    with pytest.raises(PeerError, match=r"rank 2 has left; .* have continued without rank 1"):
        one.synchronize(FunctionReducer(lambda run, coming: None))


def test_lost_peer_in_a_group_of_the_next_generator_is_active_again() -> None:
    one = alone_after_another_generator()
    back: list[int] = []
    one.on_back = back.append
    one._search.box.messages[0] = run_message(0, 0, (1, 2), 1)  # type: ignore[union-attr]
    one.step(FunctionReducer(lambda run, coming: None))
    assert back == [2]
    assert one.lost_peers == {0, 3}


def copying_worker(search: NextGenerator | None, *messages: Received) -> Client:
    """Return worker 1, whose generator sends these messages and is lost while it copies a state."""
    box, table = FakeMailbox(*messages), StatusTable(Switchboard(), "groups/", 4, 1)
    box.abandon = lambda: None  # type: ignore[attr-defined]
    one = Client(
        box, 1, GENERATOR, Layout.even(2, 2), Rules.all_workers(), 5.0, table,  # type: ignore[arg-type]
        search=search,  # type: ignore[arg-type]
    )  # fmt: skip
    one._inactive[3] = Reason.SILENT
    return one


def test_state_is_copied_by_the_next_generator_if_one_is_lost_meanwhile() -> None:
    search = NextGenerator(sent(Removed(2, 0, Reason.LATE, False)), sent(SendState(0, 1, 3)))
    one, renewed = copying_worker(search), list[int]()
    one.on_generation = renewed.append
    assert one.fetch_state(lambda giver, meeting, lives: (giver, meeting), join=True) == (0, 3)
    assert search.box.posted == [FetchState(-1, join=True), Fetched()]
    assert renewed == [1]
    assert one.lost_peers == {2}
    # It was in no group meanwhile, and the others have to search for that generator too.
    assert one._table.lost() == {1}
    assert one._table.statuses()[1].generation == 1
    assert one._table.generator() == 1


def test_state_that_a_lost_generator_has_requested_is_not_sent() -> None:
    """Its connection ids are counted from 0 again by the next generator."""
    search = NextGenerator(sent(SendState(0, 1, 3)), run_message(9, 0, (1,), 1))
    one, served = copying_worker(search, sent(SendState(1, 2, 4))), list[int]()
    one.on_fetch = lambda *each: served.extend(each)
    one.fetch_state(lambda giver, meeting, lives: (giver, meeting))
    one.step(FunctionReducer(lambda run, alive: None))
    assert served == []


def test_copy_of_a_state_without_a_next_generator_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match=r"group generator is unreachable: it silent$"):
        copying_worker(None).fetch_state(lambda *_: None)
    search, now = NextGenerator(), itertools.count()
    search.take = lambda: None  # type: ignore[method-assign]
    monkeypatch.setattr(
        client_module, "time", SimpleNamespace(monotonic=now.__next__, sleep=lambda _: None)
    )
    with pytest.raises(PeerError, match=r"silent, and there was no other one for 5 s: start"):
        copying_worker(search).fetch_state(lambda *_: None)
    assert search.stopped


def test_config_refuses_notified_rules() -> None:
    with pytest.raises(UsageError, match="notified=True"):
        config(2, Rules(notified=True))


# -- with mailboxes, threads and a process -------------------------------------------------------


def steps_of(client: Client) -> int:
    return 0 if client._static is None else client._static.steps


def config(workers: int, rules: Rules | None = None, **fields: Any) -> GeneratorConfig:
    return GeneratorConfig(
        room="groups/", host_of=tuple(w // 2 for w in range(workers)), interfaces=("lo",),
        timeout=TIMEOUT_S, rules=rules or Rules(), **{"silence": 1.0} | fields,
    )  # fmt: skip


@pytest.fixture
def running() -> Iterator[list[Service]]:
    made: list[Service] = []
    yield made
    for each in made:
        each.kill()


def train(
    settings: GeneratorConfig,
    store: Switchboard,
    shared: SharedValues,
    each: Callable[[int, Client], None],
) -> None:
    def one(worker: int) -> None:
        client = settings.client(store, worker)
        mailbox = client.mailbox
        try:
            each(worker, client)
        finally:
            if worker in shared.dead or client.fallback:
                mailbox.abandon()
            else:
                mailbox.close()

    with ThreadPoolExecutor(settings.workers) as threads:
        list(threads.map(one, range(settings.workers)))


@pytest.mark.parametrize("rules", [Rules(), Rules.random(2)], ids=["smart", "random"])
def test_workers_converge_to_one_value(running: list[Service], rules: Rules) -> None:
    store, settings = Switchboard(), config(4, rules)
    shared = SharedValues([0.0, 1.0, 2.0, 3.0])
    running.append(ThreadService(settings, store))

    def steps(worker: int, client: Client) -> None:
        for _ in range(60):
            client.step(FunctionReducer(lambda run, alive: shared.average(worker, run, alive)))

    train(settings, store, shared, steps)
    assert sum(shared.values) == pytest.approx(6.0)
    assert max(shared.values) - min(shared.values) < 0.5
    assert running[0].ended() is None


def test_dead_worker_delays_nobody_for_long_and_is_reported_to_all(
    running: list[Service],
) -> None:
    store, settings = Switchboard(), config(4, least=0.5)
    shared = SharedValues([0.0, 1.0, 2.0, 3.0])
    running.append(ThreadService(settings, store))
    begun = time.monotonic()
    informed: set[int] = set()

    def steps(worker: int, client: Client) -> None:
        made = 0
        while 3 not in client.lost_peers and time.monotonic() < begun + TIMEOUT_S / 2:
            if worker == 3 and made == 5:
                shared.kill(worker)
                return
            client.step(FunctionReducer(lambda run, alive: shared.average(worker, run, alive)))
            made += 1
        informed.add(worker)

    train(settings, store, shared, steps)
    assert time.monotonic() < begun + TIMEOUT_S / 2
    assert informed == {0, 1, 2}


def test_excluded_worker_returns_to_groups(running: list[Service]) -> None:
    store, settings = Switchboard(), config(4, Rules(threshold=None), least=0.3)
    shared = SharedValues([0.0, 1.0, 2.0, 3.0])
    running.append(ThreadService(settings, store))
    back: list[int] = []

    def steps(worker: int, client: Client) -> None:
        begun = time.monotonic()

        def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
            if worker == 3 and slept and len(run.members) > 1:
                back.append(run.number)
            return shared.average(worker, run, arrival)

        slept = False
        while not back and time.monotonic() < begun + TIMEOUT_S / 2:
            client.step(FunctionReducer(average))
            if worker == 3 and not slept and time.monotonic() > begun + 0.2:
                time.sleep(0.9)  # Longer than it may take, so that it is left out.
                slept = True

    train(settings, store, shared, steps)
    assert back


@pytest.mark.parametrize("rules", [Rules(), Rules.random(2), Rules.all_workers()])
def test_synchronize_makes_all_equal_after_uneven_steps(
    running: list[Service], rules: Rules
) -> None:
    store, settings = Switchboard(), config(4, rules)
    shared = SharedValues([0.0, 1.0, 2.0, 7.0])
    running.append(ThreadService(settings, store))
    values: list[set[float]] = []
    together = threading.Barrier(4, action=lambda: values.append(set(shared.values)))

    def steps(worker: int, client: Client) -> None:
        reducer = FunctionReducer(lambda run, alive: shared.average(worker, run, alive))
        for more in (worker, 3 - worker, 0):
            for _ in range(3 * more):
                client.step(reducer)
            client.synchronize(reducer)
            together.wait(TIMEOUT_S)
            shared.values[worker] += worker
            together.wait(TIMEOUT_S)

    train(settings, store, shared, steps)
    assert [len(found) for found in values[::2]] == [1, 1, 1]
    assert sum(shared.values) == pytest.approx(10.0 + 3 * 6.0)


def test_worker_that_dies_in_a_synchronization_is_left_out(running: list[Service]) -> None:
    store, settings = Switchboard(), config(4)
    shared = SharedValues([0.0, 1.0, 2.0, 7.0])
    running.append(ThreadService(settings, store))
    levelled: set[int] = set()

    def steps(worker: int, client: Client) -> None:
        reducer = FunctionReducer(lambda run, alive: shared.average(worker, run, alive))
        client.step(reducer)
        if worker == 3:
            shared.kill(worker)
            return
        client.synchronize(reducer)
        levelled.add(worker)

    train(settings, store, shared, steps)
    assert levelled == {0, 1, 2}
    assert len(set(shared.values[:3])) == 1


@pytest.mark.parametrize("rules", [Rules(), Rules.all_workers()])
def test_training_continues_when_the_generator_is_killed(
    running: list[Service], rules: Rules
) -> None:
    # They find out by their connections, long before its silence.
    store, settings = Switchboard(), config(4, rules, silence=10 * TIMEOUT_S)
    shared = SharedValues([0.0, 1.0, 2.0, 3.0])
    generator = ProcessService(settings, store)
    running.append(generator)
    static: list[int] = []

    def steps(worker: int, client: Client) -> None:
        asked = 0
        while steps_of(client) < 12:  # Until then, whoever is in a group with it needs it.
            if worker == 0 and asked == 5:
                os.kill(generator._process.pid, signal.SIGKILL)
            client.step(FunctionReducer(lambda run, alive: shared.average(worker, run, alive)))
            asked += 1
        static.append(steps_of(client))
        client.synchronize(FunctionReducer(lambda run, alive: shared.average(worker, run, alive)))

    train(settings, store, shared, steps)
    assert sum(shared.values) == pytest.approx(6.0)
    assert len(set(shared.values)) == 1
    assert static == [12, 12, 12, 12]
    assert str(generator.ended()) == "the group generator has ended by signal 9"

"""Groups without a generator: deaths, synchronization, steps that some cannot complete."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.interrupted import InterruptedStore
from helpers.reducers import TIMEOUT_S, FunctionReducer, SharedValues
from wingbeat.errors import PeerError
from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.rules import group_of
from wingbeat.methods.model_averaging.static_client import (
    ABANDONED,
    STATIC_CONNECTIONS,
    Arrival,
    StaticClient,
    Status,
    StatusTable,
)
from wingbeat.transport.loopback import Switchboard
from wingbeat.types import Layout


def client(worker: int, store: Switchboard, everyone: bool = False, hosts: int = 2) -> StaticClient:
    table = StatusTable(store, "groups/", 2 * hosts, worker)
    return StaticClient(worker, Layout.even(hosts, 2), TIMEOUT_S, table, everyone=everyone)


def together(workers: int, body: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(body, range(workers)))


@pytest.mark.parametrize("everyone", [False, True])
def test_synchronize_makes_all_equal_after_uneven_steps(everyone: bool) -> None:
    store, shared = Switchboard(), SharedValues([0.0, 1.0, 2.0, 7.0])
    seen: list[set[float]] = []
    barrier = threading.Barrier(4, action=lambda: seen.append(set(shared.values)))
    steps: list[int] = []

    def body(worker: int) -> None:
        one = client(worker, store, everyone)
        reducer = FunctionReducer(lambda run, alive: shared.average(worker, run, alive))
        for more in (worker // 2, 0, 2 - worker // 2):
            for _ in range(4 + 2 * more):
                one.step(reducer)
            one.synchronize(reducer)
            barrier.wait(TIMEOUT_S)
            shared.values[worker] += worker
            barrier.wait(TIMEOUT_S)
        steps.append(one.steps)

    together(4, body)
    assert [len(values) for values in seen[::2]] == [1, 1, 1]
    assert sum(shared.values) == pytest.approx(10.0 + 3 * 6.0)
    assert len(set(steps)) == 1, "all go on from the largest"


@pytest.mark.parametrize("everyone", [False, True])
def test_dead_worker_is_left_out_by_all(everyone: bool) -> None:
    store, shared = Switchboard(), SharedValues([0.0, 1.0, 2.0, 7.0])
    absent: dict[int, set[int]] = {}

    def body(worker: int) -> None:
        one = client(worker, store, everyone)
        reducer = FunctionReducer(lambda run, alive: shared.average(worker, run, alive))
        for step in range(9):
            if (worker, step) == (3, 5):
                shared.kill(worker)
                return
            one.step(reducer)
        one.synchronize(reducer)
        absent[worker] = one.lost_peers

    together(4, body)
    assert absent == {0: {3}, 1: {3}, 2: {3}}
    assert len(set(shared.values[:3])) == 1


def test_connections_are_kept_for_equal_members() -> None:
    reducer = FunctionReducer(lambda run, alive: None)
    one = client(1, Switchboard())
    for _ in range(8):
        one.step(reducer)
    meetings = [number - STATIC_CONNECTIONS for number in reducer.connections]
    of_step = [group for step in range(8) if len(group := group_of(Layout.even(2, 2), 1, step)) > 1]
    first = {group: meetings[of_step.index(group)] for group in of_step}
    assert meetings == [first[group] for group in of_step]
    assert len(set(meetings)) == len(set(of_step)) < len(of_step)
    assert reducer.closed == []
    odd = FunctionReducer(lambda run, alive: None)
    other = client(1, Switchboard(), hosts=3)
    for _ in range(40):
        other.step(odd)
    assert len(set(odd.connections) - {n for closed in odd.closed for n in closed or []}) == 1


def test_worker_past_a_step_is_not_awaited() -> None:
    """It was done before a member died, and the others were not."""
    store = Switchboard()
    one = client(0, store, everyone=True)
    seen: list[tuple[int, ...]] = []

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        seen.append(run.members)
        if len(seen) == 1:
            StatusTable(store, "groups/", 4, 0).publish(1, Status(0, 0, False, 1, -1))
            return 3
        if 3 in run.members:
            return 3
        return None

    one.step(FunctionReducer(average))
    assert seen == [(0, 1, 2, 3), (0, 2, 3), (0, 2)]
    assert one.lost_peers == {3}


@pytest.mark.parametrize(
    ("status", "found"),
    [
        (Status(0, 0, True, 0, -1), Arrival.IMPOSSIBLE),
        (Status(0, 0, True, 1, -1), Arrival.DEPARTED),
        (Status(1, former_steps=0), Arrival.IMPOSSIBLE),
        (Status(1, former_steps=1), Arrival.DEPARTED),
    ],
)
def test_member_that_synchronizes_is_detected_while_awaited(status: Status, found: Arrival) -> None:
    """Who has made this step may have sent all that is needed before it levels."""
    store = Switchboard()
    one = client(0, store, everyone=True)
    seen: list[tuple[int, ...]] = []

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        seen.append(run.members)
        if len(seen) > 1:
            return None
        StatusTable(store, "groups/", 4, 0).publish(2, status)
        deadline = time.monotonic() + TIMEOUT_S
        while arrival():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert arrival() is found
        return ABANDONED

    one.step(FunctionReducer(average))
    assert seen == [(0, 1, 2, 3), (0, 1, 3)]
    assert one.lost_peers == set()


def test_worker_that_leaves_is_not_awaited() -> None:
    store = Switchboard()
    one, other = (client(worker, store, everyone=True) for worker in (0, 2))
    other.step(FunctionReducer(lambda run, coming: None))
    seen: list[tuple[int, ...]] = []

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        seen.append(run.members)
        if len(seen) == 2:
            other.leave()
            deadline = time.monotonic() + TIMEOUT_S
            while arrival():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return ABANDONED
        return None

    for _ in range(3):
        one.step(FunctionReducer(average))
    assert seen == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 3), (0, 1, 3)]
    assert one.lost_peers == {2}


def test_kept_connection_that_a_peer_closed_is_opened_again() -> None:
    store = Switchboard()
    one = client(0, store, everyone=True)
    seen: list[int] = []

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        seen.append(run.number)
        if len(seen) == 3:
            StatusTable(store, "groups/", 4, 0).publish(1, Status(0, 0, False, 2, 5))
            return 1
        return None

    reducer = FunctionReducer(average)
    for _ in range(3):
        one.step(reducer)
    assert seen == [2, 4, 6, 6]
    assert [number - STATIC_CONNECTIONS for number in reducer.connections] == [2, 2, 2, 6]
    assert one.lost_peers == set()


def test_lost_worker_trains_alone_and_cannot_synchronize(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Switchboard()
    one = client(0, store, everyone=True)

    def average(run: Run, arrival: Callable[[], Arrival]) -> int | None:
        StatusTable(store, "groups/", 4, 1).mark_lost(0)
        return 0

    reducer = FunctionReducer(average)
    for _ in range(3):
        one.step(reducer)
    with pytest.raises(PeerError, match="no other worker takes part in the mean of all models"):
        one.synchronize(reducer)
    assert len(reducer.connections) == 1
    assert "rank 0: the others continue without this worker" in caplog.text


def test_synchronize_fails_while_the_store_is_down_and_succeeds_again_later() -> None:
    store = InterruptedStore()
    table = StatusTable(store, "groups/", 2, 0)
    one = StaticClient(0, Layout.even(1, 2), TIMEOUT_S, table)
    runs: list[Run] = []
    reducer = FunctionReducer(lambda run, alive: runs.append(run))
    store.down = True
    with pytest.raises(PeerError, match=r"rank 0: the rendezvous store does not answer, .* again"):
        one.synchronize(reducer)
    store.down = False
    table.publish(1, Status(0, 0, True, 9, -1))
    one.synchronize(reducer)
    assert [run.members for run in runs] == [(0, 1)]


def test_silent_worker_is_left_out_of_a_synchronization() -> None:
    store = Switchboard()
    one = StaticClient(0, Layout.even(1, 3), 0.3, StatusTable(store, "groups/", 3, 0))
    table = StatusTable(store, "groups/", 3, 0)
    table.publish(1, Status(0, 0, True, 9, -1))
    runs: list[Run] = []
    reducer = FunctionReducer(lambda run, alive: runs.append(run))
    one.synchronize(reducer)
    assert [run.members for run in runs] == [(0, 1)]
    assert (one.lost_peers, one.steps) == ({2}, 10)
    assert table.lost() == {2}


@pytest.mark.parametrize(
    ("left", "levels", "alone"), [(True, 1, False), (True, 2, True), (False, 1, True)]
)
def test_synchronize_of_the_last_worker_succeeds_if_the_others_left_after_theirs(
    left: bool, levels: int, alone: bool
) -> None:
    table = StatusTable(Switchboard(), "groups/", 2, 0)
    one = StaticClient(0, Layout.even(1, 2), 5.0, table)
    reducer = FunctionReducer(lambda run, alive: None)
    table.publish(1, Status(0, 0, True, 9, -1))
    one.synchronize(reducer)
    table.publish(1, Status(0, levels, True, 9, -1))
    table.mark_lost(1, left=left)
    if not alone:
        one.synchronize(reducer)
        return
    with pytest.raises(PeerError, match="no other worker takes part in the mean of all models"):
        one.synchronize(reducer)


def test_silent_worker_that_runs_is_awaited() -> None:
    table = StatusTable(Switchboard(), "groups/", 2, 0)
    asked: list[int] = []

    def is_running(worker: int) -> bool:
        asked.append(worker)
        if len(asked) == 3:
            table.publish(1, Status(0, 0, True, 9, -1))
        return True

    one = StaticClient(0, Layout.even(1, 2), 0.1, table, is_running=is_running)
    runs: list[Run] = []
    one.synchronize(FunctionReducer(lambda run, alive: runs.append(run)))
    assert [run.members for run in runs] == [(0, 1)]
    assert asked == [1, 1, 1]


def test_worker_that_runs_and_never_synchronizes_raises_after_ten_timeouts() -> None:
    table = StatusTable(Switchboard(), "groups/", 2, 0)
    one = StaticClient(0, Layout.even(1, 2), 0.05, table, is_running=lambda _: True)
    with pytest.raises(PeerError, match=r"rank 0: rank 1 is alive, but the call .* for 0\.5 s"):
        one.synchronize(FunctionReducer(lambda run, alive: None))
    assert one.lost_peers == set()


def test_malformed_status_is_ignored() -> None:
    store = Switchboard()
    table = StatusTable(store, "groups/", 4, 0)
    good = json.dumps(Status(0, 1, True, 2, 3))
    wrong = json.dumps([0, 0, False, "1", 0, 0, 0])
    for worker, text in enumerate(("{", "[1, 2, 3, 4]", wrong, good)):
        store.set(f"groups//status/{worker}", text)
    assert table.statuses() == {3: Status(0, 1, True, 2, 3)}

"""Groups that nobody has to be asked for: deaths, levelling and steps that some cannot end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.hall import PATIENCE, Hall, by
from wingbeat.errors import PeerError
from wingbeat.groups.averages import GIVEN_UP, STATIC_MEETINGS, Coming
from wingbeat.groups.board import Board, Sign
from wingbeat.groups.follower import Follower
from wingbeat.groups.generator import Run
from wingbeat.groups.layout import Layout
from wingbeat.groups.static import group_of
from wingbeat.transport.loopback import Switchboard


def follower(worker: int, store: Switchboard, everyone: bool = False, hosts: int = 2) -> Follower:
    board = Board(store, "groups/", 2 * hosts)
    return Follower(worker, Layout.even(hosts, 2), PATIENCE, board, everyone=everyone)


def together(workers: int, body: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(body, range(workers)))


@pytest.mark.parametrize("everyone", [False, True])
def test_all_are_one_after_levelling_whoever_makes_more_steps(everyone: bool) -> None:
    store, hall = Switchboard(), Hall([0.0, 1.0, 2.0, 7.0])
    seen: list[set[float]] = []
    barrier = threading.Barrier(4, action=lambda: seen.append(set(hall.values)))
    steps: list[int] = []

    def body(worker: int) -> None:
        one = follower(worker, store, everyone)
        averages = by(lambda run, alive: hall.average(worker, run, alive))
        for more in (worker // 2, 0, 2 - worker // 2):
            for _ in range(4 + 2 * more):
                one.step(averages)
            one.level(averages)
            barrier.wait(PATIENCE)
            hall.values[worker] += worker
            barrier.wait(PATIENCE)
        steps.append(one.steps)

    together(4, body)
    assert [len(values) for values in seen[::2]] == [1, 1, 1]
    assert sum(hall.values) == pytest.approx(10.0 + 3 * 6.0)
    assert len(set(steps)) == 1, "all go on from the largest"


@pytest.mark.parametrize("everyone", [False, True])
def test_who_dies_is_left_out_by_all_also_by_those_who_were_not_there(everyone: bool) -> None:
    store, hall = Switchboard(), Hall([0.0, 1.0, 2.0, 7.0])
    absent: dict[int, set[int]] = {}

    def body(worker: int) -> None:
        one = follower(worker, store, everyone)
        averages = by(lambda run, alive: hall.average(worker, run, alive))
        for step in range(9):
            if (worker, step) == (3, 5):
                hall.kill(worker)
                return
            one.step(averages)
        one.level(averages)
        absent[worker] = one.absent

    together(4, body)
    assert absent == {0: {3}, 1: {3}, 2: {3}}
    assert len(set(hall.values[:3])) == 1


def test_connections_are_kept_for_the_same_members() -> None:
    averages = by(lambda run, alive: None)
    one = follower(1, Switchboard())
    for _ in range(8):
        one.step(averages)
    meetings = [number - STATIC_MEETINGS for number in averages.met]
    of_step = [group for step in range(8) if len(group := group_of(Layout.even(2, 2), 1, step)) > 1]
    first = {group: meetings[of_step.index(group)] for group in of_step}
    assert meetings == [first[group] for group in of_step]
    assert len(set(meetings)) == len(set(of_step)) < len(of_step)
    assert averages.closed == []
    odd = by(lambda run, alive: None)
    other = follower(1, Switchboard(), hosts=3)
    for _ in range(40):
        other.step(odd)
    assert len(set(odd.met) - {n for closed in odd.closed for n in closed or []}) == 1


def test_who_is_past_a_step_is_not_waited_for_there() -> None:
    """It was done before a member died, and the others were not."""
    store = Switchboard()
    one = follower(0, store, everyone=True)
    seen: list[tuple[int, ...]] = []

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        seen.append(run.members)
        if len(seen) == 1:
            Board(store, "groups/", 4).say(1, Sign(0, False, 1, -1))
            return 3
        if 3 in run.members:
            return 3
        return None

    one.step(by(average))
    assert seen == [(0, 1, 2, 3), (0, 2, 3), (0, 2)]
    assert one.absent == {3}


@pytest.mark.parametrize(
    ("sign", "found"),
    [(Sign(0, True, 0, -1), Coming.NEVER), (Sign(0, True, 1, -1), Coming.PAST)],
)
def test_a_member_that_levels_is_found_out_while_it_is_waited_for(
    sign: Sign, found: Coming
) -> None:
    """Who has made this step may have sent all that is needed before it levels."""
    store = Switchboard()
    one = follower(0, store, everyone=True)
    seen: list[tuple[int, ...]] = []

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        seen.append(run.members)
        if len(seen) > 1:
            return None
        Board(store, "groups/", 4).say(2, sign)
        deadline = time.monotonic() + PATIENCE
        while coming():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert coming() is found
        return GIVEN_UP

    one.step(by(average))
    assert seen == [(0, 1, 2, 3), (0, 1, 3)]
    assert one.absent == set()


def test_who_leaves_is_waited_for_by_nobody_any_more() -> None:
    store = Switchboard()
    one, other = (follower(worker, store, everyone=True) for worker in (0, 2))
    other.step(by(lambda run, coming: None))
    seen: list[tuple[int, ...]] = []

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        seen.append(run.members)
        if len(seen) == 2:
            other.leave()
            deadline = time.monotonic() + PATIENCE
            while coming():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            return GIVEN_UP
        return None

    for _ in range(3):
        one.step(by(average))
    assert seen == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 3), (0, 1, 3)]
    assert one.absent == {2}


def test_a_kept_connection_that_another_had_to_close_is_opened_anew() -> None:
    store = Switchboard()
    one = follower(0, store, everyone=True)
    seen: list[int] = []

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        seen.append(run.number)
        if len(seen) == 3:
            Board(store, "groups/", 4).say(1, Sign(0, False, 2, 5))
            return 1
        return None

    averages = by(average)
    for _ in range(3):
        one.step(averages)
    assert seen == [2, 4, 6, 6]
    assert [number - STATIC_MEETINGS for number in averages.met] == [2, 2, 2, 6]
    assert one.absent == set()


def test_worker_given_up_by_the_others_trains_alone_and_has_no_mean_of_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Switchboard()
    one = follower(0, store, everyone=True)

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        Board(store, "groups/", 4).lose(0)
        return 0

    averages = by(average)
    for _ in range(3):
        one.step(averages)
    with pytest.raises(PeerError, match="no other worker takes part in the mean of all models"):
        one.level(averages)
    assert len(averages.met) == 1
    assert "rank 0: the others go on without this worker" in caplog.text


def test_who_gives_no_sign_is_not_waited_for_by_those_who_level() -> None:
    store = Switchboard()
    one = Follower(0, Layout.even(1, 3), 0.3, Board(store, "groups/", 3))
    board = Board(store, "groups/", 3)
    board.say(1, Sign(0, True, 9, -1))
    runs: list[Run] = []
    averages = by(lambda run, alive: runs.append(run))
    one.level(averages)
    assert [run.members for run in runs] == [(0, 1)]
    assert (one.absent, one.steps) == ({2}, 10)
    assert board.lost() == {2}


@pytest.mark.parametrize(
    ("left", "levels", "alone"), [(True, 1, False), (True, 2, True), (False, 1, True)]
)
def test_mean_of_the_last_worker_is_everyones_if_the_others_left_in_order_after_theirs(
    left: bool, levels: int, alone: bool
) -> None:
    board = Board(Switchboard(), "groups/", 2)
    one = Follower(0, Layout.even(1, 2), 5.0, board)
    averages = by(lambda run, alive: None)
    board.say(1, Sign(0, True, 9, -1))
    one.level(averages)
    board.say(1, Sign(levels, True, 9, -1))
    board.lose(1, left=left)
    if not alone:
        one.level(averages)
        return
    with pytest.raises(PeerError, match="no other worker takes part in the mean of all models"):
        one.level(averages)


def test_worker_that_gives_no_sign_and_lives_is_waited_for_by_those_who_level() -> None:
    board = Board(Switchboard(), "groups/", 2)
    asked: list[int] = []

    def lives(worker: int) -> bool:
        asked.append(worker)
        if len(asked) == 3:
            board.say(1, Sign(0, True, 9, -1))
        return True

    one = Follower(0, Layout.even(1, 2), 0.1, board, lives=lives)
    runs: list[Run] = []
    one.level(by(lambda run, alive: runs.append(run)))
    assert [run.members for run in runs] == [(0, 1)]
    assert asked == [1, 1, 1]


def test_worker_that_lives_and_never_levels_is_an_error_after_ten_timeouts() -> None:
    board = Board(Switchboard(), "groups/", 2)
    one = Follower(0, Layout.even(1, 2), 0.05, board, lives=lambda _: True)
    with pytest.raises(PeerError, match=r"rank 0: rank 1 is alive, but the call .* for 0\.5 s"):
        one.level(by(lambda run, alive: None))
    assert one.absent == set()


def test_what_is_no_sign_is_not_believed() -> None:
    store = Switchboard()
    board = Board(store, "groups/", 4)
    for worker, text in enumerate(("{", "[1, 2, 3, 4]", '[0, false, "1", 0]', "[1, true, 2, 3]")):
        store.set(f"groups//sign/{worker}", text)
    assert board.signs() == {3: Sign(1, True, 2, 3)}

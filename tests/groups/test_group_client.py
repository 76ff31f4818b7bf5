"""A worker's way to the group generator, in one thread and with real mailboxes and processes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from helpers.hall import PATIENCE, Hall, by
from wingbeat.errors import PeerError, UsageError
from wingbeat.groups.averages import GIVEN_UP, STATIC, STATIC_MEETINGS, Coming
from wingbeat.groups.board import Board
from wingbeat.groups.client import Client
from wingbeat.groups.config import GeneratorConfig
from wingbeat.groups.generator import Run
from wingbeat.groups.layout import Layout
from wingbeat.groups.protocol import Kind, Why, ids_of, payload_of
from wingbeat.groups.rules import Rules
from wingbeat.groups.static import group_of
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.services.launch import InProcess, InThread, Started

GENERATOR = 4


class Letter(NamedTuple):
    kind: int
    ids: tuple[int, int, int, int] = (0, 0, 0, 0)
    payload: Any = b""


def told(*run: Any, meeting: int = 5, close: tuple[int, ...] = ()) -> Letter:
    made = Run(*run)
    return Letter(Kind.RUN, ids_of(made, meeting), payload_of(made.members, close))


class Box:
    """What a mailbox is to a worker: what the generator says is known beforehand."""

    def __init__(self, *letters: Letter) -> None:
        self.letters = deque(letters)
        self.said: deque[Letter] = deque()  # that has come while it waits for others
        self.posted: list[tuple[int, ...]] = []
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.cut: dict[int, float] = {}

    def unconnected(self) -> dict[int, float]:
        return self.cut

    def receive(self, seconds: float, *, of: list[int]) -> Letter:
        assert of == [GENERATOR]
        if not self.letters:
            self.lost[GENERATOR] = "silent"
            raise PeerError("the generator has been silent")
        return self.letters.popleft()

    def poll(self, *, of: list[int]) -> Letter | None:
        assert of == [GENERATOR]
        return self.said.popleft() if self.said else None

    def post(self, peer: int, kind: int, *, ids: tuple[int, ...], urgency: int) -> None:
        assert peer == GENERATOR
        if self.lost:
            raise PeerError("the generator is gone")
        self.posted.append((kind, *ids[:3]))


def client(box: Box, rules: Rules | None = None) -> Client:
    board = Board(Switchboard(), "groups/", 4)
    return Client(box, 1, GENERATOR, Layout.even(2, 2), rules or Rules(), 5.0, board)  # type: ignore[arg-type]


def test_a_step_asks_averages_and_says_so() -> None:
    box = Box(told(7, 0, (0, 1), 0))
    runs: list[Run] = []
    client(box).step(by(lambda run, alive: runs.append(run)))
    assert runs == [Run(7, 0, (0, 1), 0)]
    assert box.posted == [(Kind.ASK, 0, 0, 0), (Kind.DONE, 7, 0, 0)]


def test_meetings_are_closed_before_another_is_opened_and_all_of_them_with_the_generator() -> None:
    box = Box(told(7, 0, (0, 1), 0, meeting=3), told(8, 0, (1, 2), 1, meeting=9, close=(3, 4)))
    one, averages = client(box), by(lambda run, alive: None)
    for _ in range(3):
        one.step(averages)
    assert averages.met == [3, 9]
    assert averages.closed == [[], [3, 4], None]
    one.step(averages)
    assert averages.met[2:] == [STATIC_MEETINGS + 2 * 1 + 2]


def test_levelling_waits_for_one_group_whatever_others_are_made_for() -> None:
    for rules in (Rules(), Rules.random(2), Rules.everyone()):
        box = Box(Letter(Kind.ALIVE), told(7, 0, (0, 1, 2), 0))
        runs: list[int] = []
        client(box, rules).level(by(lambda run, alive, runs=runs: runs.append(run.number)))
        assert runs == [7]
        assert box.posted == [(Kind.LEVEL, 0, 0, 0), (Kind.DONE, 7, 0, 0)]


def test_who_is_left_out_while_it_levels_levels_again() -> None:
    box = Box(Letter(Kind.OUT, (1, 1, 0, 0)), Letter(Kind.IN, (1, 0, 0, 0)), told(9, 0, (1,), 1))
    client(box).level(by(lambda run, alive: None))
    assert [kind for kind, *_ in box.posted] == [Kind.LEVEL, Kind.LEVEL, Kind.DONE]


@pytest.mark.parametrize("does", [Client.step, Client.level])
def test_signs_of_the_generator_prolong_a_wait(
    monkeypatch: pytest.MonkeyPatch, does: Callable[..., None]
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("wingbeat.groups.client.time.monotonic", lambda: float(next(now)))
    signs = [Letter(Kind.ALIVE)] * 20
    one = client(Box(*signs, told(9, 0, (1,), 1)))
    does(one, by(lambda run, alive: None))
    assert one.fallen is None

    def nothing(seconds: float, *, of: list[int]) -> Letter:
        raise PeerError("no message")

    box = Box()
    box.receive = nothing  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="no group came from the group generator within 5"):
        client(box).level(by(lambda run, alive: None))


@pytest.mark.parametrize(
    ("does", "what"),
    [
        (Client.step, "the end of its step"),
        (Client.level, r"the call of wingbeat\.synchronize\(\)"),
    ],
)
def test_worker_that_lives_and_does_not_come_is_logged_and_ends_a_wait_after_ten_timeouts(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    does: Callable[..., None],
    what: str,
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("wingbeat.groups.client.time.monotonic", lambda: float(next(now)))
    one = client(Box(*[Letter(Kind.ALIVE, (1 + 2, 0, 0, 0))] * 60))
    with pytest.raises(PeerError, match=rf"rank 1: rank 2 lives, and {what} .* for 50 s \(10 "):
        does(one, by(lambda run, alive: None))
    assert len(re.findall(rf"rank 1: has waited for {what} of rank 2 for 3\d s", caplog.text)) == 1


def test_who_is_done_as_the_generator_dies_does_not_average_twice() -> None:
    for does in (Client.step, Client.level):
        box = Box(told(7, 0, (0, 1), 0))
        one = client(box, Rules.everyone())
        runs: list[Run] = []

        def average(run: Run, coming: Callable[[], Coming]) -> None:
            runs.append(run)  # noqa: B023
            box.lost[GENERATOR] = "silent"  # noqa: B023

        does(one, by(average))
        assert one.fallen
        assert [run.number for run in runs] == [7]


def test_a_generator_whose_connections_have_ended_is_dead_after_a_second() -> None:
    """Unless it is connected again by then; and dead it stays, whatever connects there later."""
    signs: list[float] = [0.3, 0.9, 0.0, 0.4, 1.1, 0.0]

    class Silent(Box):
        def receive(self, seconds: float, *, of: list[int]) -> Letter:
            self.cut = {GENERATOR: sign} if (sign := signs.pop(0)) else {}
            raise PeerError(f"no message within {seconds:g} s")

    one = client(Silent(), Rules.everyone())
    runs: list[Run] = []
    one.step(by(lambda run, alive: runs.append(run)))
    assert signs == [0.0]
    assert one.fallen == "it has ended without a word"
    assert [run.members for run in runs] == [(0, 1, 2, 3)]
    one._line._mailbox.unconnected().clear()  # type: ignore[attr-defined]
    assert one._line.dead


def test_who_is_in_a_group_as_the_generator_dies_looks_whether_the_others_come() -> None:
    box = Box(told(7, 0, (0, 1), 0))
    one = client(box)
    found: list[Coming] = []

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        found.append(coming())
        box.cut[GENERATOR] = 1.1
        found.append(coming())
        return None

    one.step(by(average))
    assert found == [Coming.MAYBE, Coming.PAST]


def test_everyone_is_one_group_too_when_the_generator_is_dead() -> None:
    one = client(Box(Letter(Kind.OUT, (2, 0, 0, 0))), Rules.everyone())
    runs: list[Run] = []
    for _ in range(3):
        one.step(by(lambda run, alive: runs.append(run)))
    assert [run.members for run in runs] == [(0, 1, 3)] * 3


def test_a_group_of_one_averages_nothing() -> None:
    box = Box(told(7, 0, (1,), 1))
    client(box).step(by(lambda run, alive: pytest.fail("nothing to average")))
    assert box.posted[-1] == (Kind.DONE, 7, 0, 0)


def test_without_a_buffer_it_takes_part_until_its_own_group_is_done() -> None:
    box = Box(told(1, 0, (0, 1), 0), told(3, 0, (1, 2), 2), told(4, 0, (1, 3), 1))
    runs: list[int] = []
    client(box, Rules.random()).step(by(lambda run, alive: runs.append(run.number)))
    assert runs == [1, 3, 4]


def test_a_lost_member_is_said_and_the_group_runs_again() -> None:
    box = Box(told(7, 0, (0, 1, 2), 0), Letter(Kind.OUT, (2, 0, 0, 0)), told(7, 1, (0, 1), 0))
    one = client(box)
    lost = iter([2, None])
    one.step(by(lambda run, alive: next(lost)))
    assert box.posted == [(Kind.ASK, 0, 0, 0), (Kind.LOST, 7, 0, 2), (Kind.DONE, 7, 1, 0)]
    assert one.absent == {2}


def test_who_was_left_out_before_its_request_was_heard_does_not_ask_twice() -> None:
    box = Box(Letter(Kind.OUT, (1, 0, 0, 0)), Letter(Kind.IN, (1, 0, 0, 0)), told(9, 0, (1,), 1))
    one = client(box)
    one.step(by(lambda run, alive: None))
    assert [kind for kind, *_ in box.posted] == [Kind.ASK, Kind.DONE]
    box.letters += [Letter(Kind.OUT, (1, 1, 0, 0)), told(10, 0, (1,), 1)]
    one.step(by(lambda run, alive: None))
    assert [kind for kind, *_ in box.posted[2:]] == [Kind.ASK, Kind.DONE]


def test_who_is_left_out_while_it_waits_asks_again() -> None:
    box = Box(Letter(Kind.OUT, (1, 1, 0, 0)), Letter(Kind.IN, (1, 0, 0, 0)), told(9, 0, (1,), 1))
    client(box).step(by(lambda run, alive: None))
    assert [kind for kind, *_ in box.posted] == [Kind.ASK, Kind.ASK, Kind.DONE]


@pytest.mark.parametrize("heard", [(1,), (0, 1)])
def test_who_renews_has_a_step_without_an_average_when_it_was_left_out(heard: tuple) -> None:
    """Whether it was left out while it waits, or before, which is said again."""
    box = Box(*(Letter(Kind.OUT, (1, asked, 0, 0)) for asked in heard))
    one = client(box)
    one.renews = True
    one.step(by(lambda run, alive: pytest.fail("nothing to average")))
    assert box.posted == [(Kind.ASK, 1, 0, 0)]
    assert one.left_out
    box.letters += [Letter(Kind.OUT, (1, 2, 0, 0)), told(9, 0, (1,), 1)]
    one.level(by(lambda run, alive: None))
    assert [kind for kind, *_ in box.posted[1:]] == [Kind.LEVEL, Kind.LEVEL, Kind.DONE]
    assert not one.left_out


def test_worker_that_was_silent_has_no_average_until_it_fetches() -> None:
    """Whatever its strategy: its model is old."""
    box = Box(Letter(Kind.OUT, (1, 1, Why.SILENT, 0)))
    one = client(box)
    one.step(by(lambda run, alive: pytest.fail("nothing to average")))
    assert box.posted == [(Kind.ASK, 0, 0, 0)]
    assert one.stale
    box.letters.append(Letter(Kind.STATE, (0, 1, 3, 0)))
    assert one.fetch(lambda giver, meeting, lives: (giver, meeting)) == (0, 3)
    assert not one.stale


@pytest.mark.parametrize("missed", [0, 1])
@pytest.mark.parametrize("why", Why)
def test_mean_of_all_of_one_worker_is_an_error_unless_all_others_have_died_or_left(
    why: Why, missed: int
) -> None:
    outs = [Letter(Kind.OUT, (other, 0, Why.ENDED, 0)) for other in (0, 2)]
    one = client(Box(*outs, Letter(Kind.OUT, (3, 0, why, missed)), told(9, 0, (1,), 1)))
    averages = by(lambda run, alive: None)
    if why in (Why.ENDED, Why.LEFT) and not missed:
        one.level(averages)
        return
    with pytest.raises(PeerError, match=r"rank 1: no other worker takes part .* rank 3 .*alone"):
        one.level(averages)


def test_run_that_was_told_before_a_stop_is_given_up() -> None:
    """The generator has taken this worker out of the group since."""
    box = Box(told(7, 0, (0, 1), 0), told(9, 0, (1,), 1))
    box.said.append(Letter(Kind.OUT, (1, 1, Why.LATE, 0)))
    seen: list[Coming] = []

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        seen.append(coming())
        return GIVEN_UP

    client(box).step(by(average))
    assert seen == [Coming.NEVER]


def test_who_renews_and_is_in_a_group_all_the_same_has_missed_nothing() -> None:
    """As all others have gone meanwhile."""
    one = client(Box(Letter(Kind.OUT, (1, 0, 0, 0)), told(9, 0, (1,), 1)))
    one.renews = True
    one.step(by(lambda run, alive: None))
    assert not one.left_out


def test_who_takes_part_no_more_and_who_does_again_is_reported_once_each() -> None:
    late, out = (Letter(Kind.OUT, (3, 0, why, 0)) for why in (Why.LATE, Why.ENDED))
    back = Letter(Kind.IN, (3, 0, 0, 0))
    one = client(Box(late, out, out, back, back, told(9, 0, (1,), 1)))
    seen: list[tuple[str, int]] = []
    one.lost, one.back = lambda w: seen.append(("lost", w)), lambda w: seen.append(("back", w))
    one.step(by(lambda run, alive: None))
    assert seen == [("lost", 3), ("back", 3)]


def test_who_takes_part_again_is_not_absent() -> None:
    out, back = Letter(Kind.OUT, (3, 0, 0, 0)), Letter(Kind.IN, (3, 0, 0, 0))
    for letters, absent in (((out,), {3}), ((out, back), set())):
        one = client(Box(*letters, told(9, 0, (1,), 1)))
        one.step(by(lambda run, alive: None))
        assert one.absent == absent


@pytest.mark.parametrize(
    ("letter", "said"),
    [
        (told(7, 0, (0, 2), 0), "without worker 1"),
        (told(7, 0, (0, 1, 9), 0), "is no group of 4 workers"),
        (Letter(Kind.ASK), "a message of kind 1"),
        (Letter(Kind.REFUSED, payload=b"no \xff"), "a refusal: no"),
    ],
)
def test_what_the_generator_never_says_is_an_error(letter: Letter, said: str) -> None:
    with pytest.raises(PeerError, match=f"rank 1: the group generator sent .*{said}"):
        client(Box(letter)).step(by(lambda run, alive: None))


def test_when_it_is_dead_groups_follow_the_static_schedule_from_its_first_step() -> None:
    box = Box(told(7, 0, (0, 1), 0), Letter(Kind.OUT, (3, 0, 0, 0)))
    one = client(box)
    runs: list[Run] = []
    for _ in range(6):
        one.step(by(lambda run, alive: runs.append(run)))
    assert one.fallen
    wanted = [set(group_of(Layout.even(2, 2), 1, step)) - {3} for step in range(5)]
    assert [(r.number, set(r.members), r.initiator) for r in runs[1:]] == [
        (2 * step + 2, group, STATIC) for step, group in enumerate(wanted) if len(group) > 1
    ]


def test_a_group_of_which_not_all_were_told_is_given_up_when_it_is_dead() -> None:
    box = Box(told(7, 0, (0, 1), 0))
    one = client(box)
    found: list[Coming] = []

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        if run.initiator == STATIC:
            return None
        found.append(coming())
        box.lost[GENERATOR] = "silent"
        found.append(coming())
        one._board.fall(0, 7)  # it was through with this group, and has sent all
        found.append(coming())
        one._board.fall(0, 6)
        found.append(coming())
        return GIVEN_UP

    one.step(by(average))
    assert found == [Coming.MAYBE, Coming.PAST, Coming.PAST, Coming.NEVER]
    assert one._board.fallen([0, 1, 2]) == {0: 6, 1: -1}
    assert (Kind.ALIVE, 0, 0, 0) in box.posted
    assert one.fallen
    assert one._follower.steps == 1


def test_a_member_that_is_lost_then_is_left_out_from_then_on() -> None:
    one = client(Box())
    seen: list[tuple[int, ...]] = []
    layout = Layout.even(1, 4)
    one._layout = layout

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        seen.append(run.members)
        return 2 if 2 in run.members else None

    for _ in range(4):
        one.step(by(average))
    assert seen[:2] == [(0, 1, 2, 3), (0, 1, 3)]
    assert all(2 not in members for members in seen[1:])


def test_a_group_that_does_not_come_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box()

    def nothing(seconds: float, *, of: list[int]) -> Letter:
        raise PeerError("no message")

    box.receive = nothing  # type: ignore[method-assign]
    now = iter(range(100))
    monkeypatch.setattr("wingbeat.groups.client.time.monotonic", lambda: float(next(now)))
    with pytest.raises(PeerError, match="rank 1: no group came from the group generator within 5"):
        client(box).step(by(lambda run, alive: None))
    assert (Kind.ALIVE, 0, 0, 0) in box.posted


def test_who_waits_for_a_member_that_died_before_it_came_hears_that_the_group_runs_again() -> None:
    box = Box(told(7, 0, (0, 1, 2), 0))
    one = client(box)
    found: list[Coming] = []

    def average(run: Run, coming: Callable[[], Coming]) -> int | None:
        if run.epoch:
            return None
        found.append(coming())
        box.said += [Letter(Kind.OUT, (2, 0, 0, 0)), told(7, 1, (0, 1), 0)]
        found.append(coming())
        return GIVEN_UP

    averages = by(average)
    one.step(averages)
    assert found == [Coming.MAYBE, Coming.NEVER]
    assert (one.fallen, one.absent) == (None, {2})
    assert box.posted[-1] == (Kind.DONE, 7, 1, 0)


def test_what_was_said_before_the_generator_died_is_heard() -> None:
    """It ends with the worker that has started it, and says that this one is gone."""
    box = Box()
    box.said += [Letter(Kind.OUT, (3, 0, 0, 0)), Letter(Kind.OUT, (0, 0, 0, 0))]
    one, runs = client(box, Rules.everyone()), []
    one.step(by(lambda run, coming: runs.append(run.members)))
    assert runs == [(1, 2)]
    assert one._board.lost() == {0, 3}


def test_groups_that_start_when_notified_are_refused() -> None:
    with pytest.raises(UsageError, match="notified=True"):
        config(2, Rules(notified=True))


# -- with mailboxes, threads and a process -------------------------------------------------------


def steps_of(client: Client) -> int:
    return 0 if client._follower is None else client._follower.steps


def config(workers: int, rules: Rules | None = None, **fields: Any) -> GeneratorConfig:
    return GeneratorConfig(
        room="groups/", host_of=tuple(w // 2 for w in range(workers)), interfaces=("lo",),
        timeout=PATIENCE, rules=rules or Rules(), **{"silence": 1.0} | fields,
    )  # fmt: skip


@pytest.fixture
def running() -> Iterator[list[Started]]:
    made: list[Started] = []
    yield made
    for each in made:
        each.kill()


def train(
    settings: GeneratorConfig, store: Switchboard, hall: Hall, each: Callable[[int, Client], None]
) -> None:
    def one(worker: int) -> None:
        mailbox, client = settings.client(store, worker)
        try:
            each(worker, client)
        finally:
            if worker in hall.dead or client.fallen:
                mailbox.abandon()
            else:
                mailbox.close()

    with ThreadPoolExecutor(settings.workers) as threads:
        list(threads.map(one, range(settings.workers)))


@pytest.mark.parametrize("rules", [Rules(), Rules.random(2)], ids=["smart", "random"])
def test_workers_come_to_one_value(running: list[Started], rules: Rules) -> None:
    store, settings = Switchboard(), config(4, rules)
    hall = Hall([0.0, 1.0, 2.0, 3.0])
    running.append(InThread(settings, store))

    def steps(worker: int, client: Client) -> None:
        for _ in range(60):
            client.step(by(lambda run, alive: hall.average(worker, run, alive)))

    train(settings, store, hall, steps)
    assert sum(hall.values) == pytest.approx(6.0)
    assert max(hall.values) - min(hall.values) < 0.5
    assert running[0].ended() is None


def test_a_worker_that_dies_holds_nobody_up_for_long_and_all_hear_of_it(
    running: list[Started],
) -> None:
    store, settings = Switchboard(), config(4, least=0.5, factor=4.0)
    hall = Hall([0.0, 1.0, 2.0, 3.0])
    running.append(InThread(settings, store))
    begun = time.monotonic()
    told: set[int] = set()

    def steps(worker: int, client: Client) -> None:
        made = 0
        while 3 not in client.absent and time.monotonic() < begun + PATIENCE / 2:
            if worker == 3 and made == 5:
                hall.kill(worker)
                return
            client.step(by(lambda run, alive: hall.average(worker, run, alive)))
            made += 1
        told.add(worker)

    train(settings, store, hall, steps)
    assert time.monotonic() < begun + PATIENCE / 2
    assert told == {0, 1, 2}


def test_a_worker_that_was_left_out_comes_back(running: list[Started]) -> None:
    store, settings = Switchboard(), config(4, Rules(threshold=None), least=0.3, factor=2.0)
    hall = Hall([0.0, 1.0, 2.0, 3.0])
    running.append(InThread(settings, store))
    back: list[int] = []

    def steps(worker: int, client: Client) -> None:
        begun = time.monotonic()

        def average(run: Run, coming: Callable[[], Coming]) -> int | None:
            if worker == 3 and slept and len(run.members) > 1:
                back.append(run.number)
            return hall.average(worker, run, coming)

        slept = False
        while not back and time.monotonic() < begun + PATIENCE / 2:
            client.step(by(average))
            if worker == 3 and not slept and time.monotonic() > begun + 0.2:
                time.sleep(0.9)  # Longer than it may take, so that it is left out.
                slept = True

    train(settings, store, hall, steps)
    assert back


@pytest.mark.parametrize("rules", [Rules(), Rules.random(2), Rules.everyone()])
def test_all_are_one_after_levelling_whoever_makes_more_steps(
    running: list[Started], rules: Rules
) -> None:
    store, settings = Switchboard(), config(4, rules)
    hall = Hall([0.0, 1.0, 2.0, 7.0])
    running.append(InThread(settings, store))
    values: list[set[float]] = []
    together = threading.Barrier(4, action=lambda: values.append(set(hall.values)))

    def steps(worker: int, client: Client) -> None:
        averages = by(lambda run, alive: hall.average(worker, run, alive))
        for more in (worker, 3 - worker, 0):
            for _ in range(3 * more):
                client.step(averages)
            client.level(averages)
            together.wait(PATIENCE)
            hall.values[worker] += worker
            together.wait(PATIENCE)

    train(settings, store, hall, steps)
    assert [len(found) for found in values[::2]] == [1, 1, 1]
    assert sum(hall.values) == pytest.approx(10.0 + 3 * 6.0)


def test_a_worker_that_dies_while_all_level_is_left_out(running: list[Started]) -> None:
    store, settings = Switchboard(), config(4)
    hall = Hall([0.0, 1.0, 2.0, 7.0])
    running.append(InThread(settings, store))
    levelled: set[int] = set()

    def steps(worker: int, client: Client) -> None:
        averages = by(lambda run, alive: hall.average(worker, run, alive))
        client.step(averages)
        if worker == 3:
            hall.kill(worker)
            return
        client.level(averages)
        levelled.add(worker)

    train(settings, store, hall, steps)
    assert levelled == {0, 1, 2}
    assert len(set(hall.values[:3])) == 1


@pytest.mark.parametrize("rules", [Rules(), Rules.everyone()])
def test_when_the_generator_is_killed_training_goes_on_without_it(
    running: list[Started], rules: Rules
) -> None:
    # They find out by their connections, long before its silence.
    store, settings = Switchboard(), config(4, rules, silence=10 * PATIENCE)
    hall = Hall([0.0, 1.0, 2.0, 3.0])
    generator = InProcess(settings, store)
    running.append(generator)
    static: list[int] = []

    def steps(worker: int, client: Client) -> None:
        asked = 0
        while steps_of(client) < 12:  # Until then, whoever is in a group with it needs it.
            if worker == 0 and asked == 5:
                os.kill(generator._process.pid, signal.SIGKILL)
            client.step(by(lambda run, alive: hall.average(worker, run, alive)))
            asked += 1
        static.append(steps_of(client))
        client.level(by(lambda run, alive: hall.average(worker, run, alive)))

    train(settings, store, hall, steps)
    assert sum(hall.values) == pytest.approx(6.0)
    assert len(set(hall.values)) == 1
    assert static == [12, 12, 12, 12]
    assert str(generator.ended()) == "the group generator (started by rank 0) has ended by signal 9"

"""The group generator at work: who is told what, who is gone, and for whom nobody waits."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pytest

from helpers.mail import Clock
from wingbeat.errors import PeerError, UsageError
from wingbeat.groups.generator import Generator, Run
from wingbeat.groups.layout import Layout
from wingbeat.groups.patience import Patience
from wingbeat.groups.protocol import Kind, Why, told_of
from wingbeat.groups.returns import Back
from wingbeat.groups.rules import Rules
from wingbeat.groups.service import GroupService
from wingbeat.transport.messages.mailbox import RECONNECT_S


class Letter(NamedTuple):
    peer: int
    kind: int
    ids: tuple[int, int, int, int]
    payload: Any = b""


class Box:
    """What a mailbox is to the service."""

    def __init__(self, workers: int) -> None:
        self.inbox: deque[Letter] = deque()
        self.sent: list[deque[Letter]] = [deque() for _ in range(workers)]
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.full: set[int] = set()
        self.cut: dict[int, float] = {}
        self.closed = False

    def poll(self) -> Letter | None:
        return self.inbox.popleft() if self.inbox else None

    def next(self, seconds: float) -> Letter | None:
        return self.poll()

    def post(self, peer: int, kind: int, payload: Any = b"", *, ids: Any, urgency: int,
             seconds: float) -> None:  # fmt: skip
        assert seconds == 0.0, "the generator waits for nobody"
        if peer in self.left or peer in self.lost or peer in self.full:
            raise PeerError(f"rank {peer} is gone")
        self.sent[peer].append(Letter(peer, kind, ids, payload))

    def unconnected(self) -> dict[int, float]:
        return self.cut

    def close(self, seconds: float) -> None:
        self.closed = True

    def join(self, peer: int, card: Any) -> None:
        if card is None:
            raise UsageError("it was opened with other limits")
        self.lost.pop(peer, None)
        self.left.discard(peer)
        self.sent[peer].clear()


class Backs:
    """Who has come back, as the service sees it."""

    def __init__(self, *backs: Back) -> None:
        self.backs, self.connected = deque(backs), []

    def news(self) -> Back | None:
        return self.backs.popleft() if self.backs else None

    def met(self, back: Back) -> None:
        self.connected.append(back)


class Rig:
    """A service of workers on one host, that makes groups of all who are idle."""

    def __init__(self, workers: int = 3, size: int = 3) -> None:
        self.workers, self.clock, self.box = workers, Clock(), Box(workers)
        rules = Rules(size=size, inter_intra=False, threshold=None)
        self.generator = Generator(Layout.even(1, workers), rules)
        patience = Patience(workers, first_s=100.0, factor=8.0, least_s=2.0)
        self.service = GroupService(self.box, self.generator, workers, patience, clock=self.clock)  # type: ignore[arg-type]

    def say(self, worker: int, kind: int, *ids: int) -> None:
        self.box.inbox.append(Letter(worker, kind, (*ids, 0, 0, 0, 0)[:4]))
        self.service.step(None)
        self.service.step(self.box.poll())

    def pass_(self, seconds: float) -> None:
        self.clock.now += seconds
        self.service.step(None)

    def heard(self, worker: int) -> list[Letter]:
        letters = list(self.box.sent[worker])
        self.box.sent[worker].clear()
        return letters

    def runs(self, worker: int) -> list[Run]:
        return [
            told_of(letter.ids, letter.payload, self.workers).run
            for letter in self.heard(worker)
            if letter.kind == Kind.RUN
        ]

    def round(self, *workers: int, seconds: float = 1.0) -> None:
        """Let these workers make a step, and average."""
        self.pass_(seconds)
        for worker in workers:
            self.say(worker, Kind.ASK)
        for worker in workers:
            run = self.runs(worker)[-1]
            self.say(worker, Kind.DONE, run.number, run.epoch)


def test_all_members_are_told_when_the_last_one_asks() -> None:
    rig = Rig()
    rig.say(0, Kind.ASK)
    rig.say(2, Kind.ASK)
    assert not any(rig.box.sent)
    rig.say(1, Kind.ASK)
    told = [rig.runs(worker) for worker in range(3)]
    assert told[0] == told[1] == told[2]
    assert sorted(told[0][0].members) == [0, 1, 2]


def test_a_worker_that_is_lost_is_out_and_its_group_goes_on() -> None:
    rig = Rig()
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    rig.box.lost[2] = "has been silent"
    rig.pass_(1.0)
    for worker in (0, 1):
        letters = rig.heard(worker)
        assert [(letter.kind, letter.ids[0]) for letter in letters] == [
            (Kind.OUT, 2),
            (Kind.RUN, 0),
        ]
        assert sorted(told_of(letters[1].ids, letters[1].payload, 3).run.members) == [0, 1]


def test_worker_that_was_silent_is_told_what_it_missed_and_takes_part_with_a_state() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.box.lost[2] = "has been silent"
    rig.pass_(1.0)
    rig.round(0, 1)
    assert not rig.heard(2)
    rig.box.lost.clear()
    rig.pass_(1.0)
    assert [(letter.kind, letter.ids[0]) for letter in rig.heard(2)] == [
        (Kind.IN, 0),
        (Kind.IN, 1),
        (Kind.OUT, 2),
    ]
    rig.say(2, Kind.ASK)
    (out,) = rig.heard(2)
    assert (out.kind, *out.ids[:3]) == (Kind.OUT, 2, 2, Why.SILENT)
    rig.say(2, Kind.FETCH, 0, 0)
    assert [letter.kind for letter in rig.heard(2)] == [Kind.STATE]
    rig.heard(0)
    rig.heard(1)
    rig.say(2, Kind.ASK)
    assert 2 in rig.generator
    assert Kind.OUT not in [letter.kind for letter in rig.heard(2)]


def test_generator_ends_when_all_but_silent_workers_have_left() -> None:
    rig = Rig()
    rig.box.left |= {0, 1}
    rig.box.lost[2] = "has been silent"
    rig.pass_(1.0)
    rig.service.run()
    assert rig.box.closed


@pytest.mark.parametrize("waits", [False, True])
def test_whose_connection_has_ended_is_out_before_its_deadline(waits: bool) -> None:
    """Whether it dies as it computes, or has asked and dies before its group runs or meets."""
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2, seconds=100.0)  # so that its deadline is far away
    for worker in (2, 0, 1) if waits else (0, 1):
        rig.say(worker, Kind.ASK)
        rig.heard(worker)
    rig.box.cut[2] = 0.9 * RECONNECT_S
    rig.pass_(1.0)
    assert 2 in rig.generator, "it may connect again: then it goes on as if nothing had been"
    rig.box.cut[2] = 1.1 * RECONNECT_S
    rig.pass_(1.0)
    for worker in (0, 1):
        kinds = {letter.kind: letter for letter in rig.heard(worker)}
        assert kinds[Kind.OUT].ids[0] == 2
        run = told_of(kinds[Kind.RUN].ids, kinds[Kind.RUN].payload, 3).run
        assert (run.epoch, sorted(run.members)) == (int(waits), [0, 1])
    rig.box.cut.clear()
    rig.say(2, Kind.ASK)
    assert 2 in rig.generator, "it was no death: it takes part from its next step"


def test_who_cannot_be_told_is_out_at_once() -> None:
    rig = Rig()
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    rig.box.full.add(1)
    rig.say(2, Kind.ASK)
    for worker in (0, 2):
        run = rig.runs(worker)[-1]
        assert (run.epoch, sorted(run.members)) == (1, [0, 2])
    assert 1 not in rig.generator


def test_nobody_waits_longer_than_the_usual_step_allows_and_who_is_late_comes_back() -> None:
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2)
    rig.pass_(1.0)
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    rig.pass_(6.5)
    assert rig.runs(0) == []
    assert [letter.kind for letter in rig.heard(2)] == [Kind.ALIVE], "once: to see whether it lives"
    rig.pass_(1.0)
    assert sorted(rig.runs(0)[0].members) == [0, 1]
    assert [letter[1:3] for letter in rig.heard(2)] == [(Kind.OUT, (2, 3, 0, 0))], "it asked thrice"
    rig.say(2, Kind.ASK)
    assert 2 in rig.generator
    assert [letter.kind for letter in rig.heard(0)] == [Kind.IN]
    assert [run.members for run in rig.runs(2)] == [(2,)]


def test_a_member_that_dies_as_it_is_done_is_not_waited_for_either() -> None:
    """It has its average, and its word of that is lost."""
    rig = Rig()
    rig.round(0, 1, 2)
    rig.pass_(1.0)
    for worker in range(3):
        rig.say(worker, Kind.ASK)
    (run,) = rig.runs(0)
    for worker in (0, 1):
        rig.say(worker, Kind.DONE, run.number, run.epoch)
    rig.pass_(1.0)
    rig.heard(2)
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    rig.heard(0)
    rig.pass_(3.0)
    assert [letter.kind for letter in rig.heard(2)] == [Kind.ALIVE]
    assert 2 in rig.generator
    rig.pass_(5.0)
    assert 2 not in rig.generator


def test_who_is_done_late_is_not_late_with_its_next_step() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.pass_(1.0)
    for worker in range(3):
        rig.say(worker, Kind.ASK)
    (run,) = rig.runs(0)
    rig.say(0, Kind.DONE, run.number, run.epoch)
    rig.pass_(6.0)
    rig.say(1, Kind.DONE, run.number, run.epoch)
    rig.say(2, Kind.DONE, run.number, run.epoch)
    rig.say(0, Kind.ASK)
    rig.pass_(6.0)
    assert all(worker in rig.generator for worker in range(3))


def test_who_waits_for_its_own_group_is_not_late_with_a_later_one() -> None:
    """Without a buffer a worker takes part in groups while it waits."""
    rig = Rig()
    rig.generator.rules = Rules.random(2)
    groups = iter([[[0, 1]], [[1, 2]], [[2, 0]]])
    rig.generator._policy = lambda initiator, crowd: next(groups)
    rig.pass_(1.0)
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    rig.say(0, Kind.DONE, 0, 0)
    rig.pass_(1.0)
    rig.say(1, Kind.DONE, 0, 0)
    rig.pass_(58.0)
    rig.say(2, Kind.ASK)
    rig.say(2, Kind.DONE, 1, 0)
    rig.pass_(1.0)
    assert 1 in rig.generator


def test_nobody_is_late_for_whom_nobody_waits() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.pass_(1000.0)
    rig.pass_(10.0)
    assert all(worker in rig.generator for worker in range(3))
    assert [[letter.kind for letter in rig.heard(worker)] for worker in range(3)] == [
        [Kind.ALIVE] for _ in range(3)
    ], "each is looked at, once"


def test_a_member_that_is_lost_by_another_is_out_and_the_rest_run_again() -> None:
    rig = Rig()
    for worker in range(3):
        rig.say(worker, Kind.ASK)
    (run,) = rig.runs(0)
    rig.say(0, Kind.LOST, run.number, run.epoch, 2)
    again = rig.runs(0)
    assert [(each.number, each.epoch) for each in again] == [(run.number, 1)]
    assert sorted(again[0].members) == [0, 1]
    # The other member found out as well; this changes nothing.
    rig.say(1, Kind.LOST, run.number, run.epoch, 2)
    assert rig.runs(0) == []
    assert 0 in rig.generator


@pytest.mark.parametrize("ids", [(0, 0, 0), (0, 0, 3), (0, 0, 9), (1, 0, 1), (0, 1, 1)])
def test_nobody_is_lost_by_who_is_in_no_such_group(ids: tuple[int, int, int]) -> None:
    rig = Rig(workers=4, size=2)
    for worker in range(4):
        rig.say(worker, Kind.ASK)
    pair = next(run.members for run in rig.runs(0))
    if ids[2] in pair and ids[2] != 0 and ids[:2] == (rig.generator._of[0][0].number, 0):
        pytest.skip("they are")
    rig.say(0, Kind.LOST, *ids)
    assert all(worker in rig.generator for worker in range(4))


@pytest.mark.parametrize("nonsense", [(Kind.DONE, 5, 0), (Kind.ASK,), (Kind.RUN,), (99,)])
def test_nonsense_ends_who_says_it_and_nobody_else(nonsense: tuple[int, ...]) -> None:
    rig = Rig()
    for worker in range(3):
        rig.say(worker, Kind.ASK) if worker < 2 else None
    rig.say(1, *nonsense)
    letters = rig.heard(1)
    assert [letter.kind for letter in letters] == [Kind.REFUSED]
    assert letters[0].payload
    rig.say(2, Kind.ASK)
    assert sorted(rig.runs(0)[-1].members) == [0, 2]
    rig.say(1, Kind.ASK)
    assert rig.heard(1) == []
    assert 1 not in rig.generator


def test_members_are_told_which_connections_to_keep() -> None:
    rig = Rig()

    def meet() -> list[tuple[int, tuple[int, ...]]]:
        for worker in range(3):
            rig.say(worker, Kind.ASK)
        found = []
        for worker in range(3):
            letters = [letter for letter in rig.heard(worker) if letter.kind == Kind.RUN]
            for letter in letters:
                told = told_of(letter.ids, letter.payload, 3)
                found.append((told.meeting, told.close))
                rig.say(worker, Kind.DONE, told.run.number, told.run.epoch)
        return found

    assert meet() == [(1, ())] * 3
    assert meet() == [(1, ())] * 3
    rig.box.lost[2] = "has been silent"
    rig.pass_(1.0)
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    told = [told_of(*rig.heard(worker)[-1][2:], workers=3) for worker in (0, 1)]
    assert [(each.meeting, each.close) for each in told] == [(2, (1,))] * 2


def test_it_ends_when_all_have_left() -> None:
    rig = Rig()
    rig.box.left.update(range(3))
    looks = iter(range(100))
    rig.service._clock = lambda: float(next(looks))  # type: ignore[method-assign]
    rig.service.run()
    assert rig.box.closed


def test_it_ends_with_the_one_that_started_it() -> None:
    rig = Rig()
    rig.service.run(lambda: False, 1)
    assert rig.box.closed
    said = [[letter[1:3] for letter in letters] for letters in rig.box.sent]
    assert said == [[(Kind.OUT, (1, 0, 0, 0))], [], [(Kind.OUT, (1, 0, 0, 0))]]


# -- all of them -----------------------------------------------------------------------------


def test_who_levels_is_told_that_the_generator_lives_until_all_do() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.say(0, Kind.LEVEL)
    for _ in range(2):
        rig.pass_(26.0)
        assert Kind.ALIVE in [letter.kind for letter in rig.heard(0)], "a quarter of 100 s"
        rig.round(1, 2)
    rig.say(1, Kind.LEVEL)
    rig.say(2, Kind.LEVEL)
    (run,) = rig.runs(0)
    assert sorted(run.members) == [0, 1, 2]


def test_worker_that_lives_is_in_the_mean_of_all_however_long_it_takes() -> None:
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2)
    rig.say(0, Kind.LEVEL)
    rig.say(1, Kind.LEVEL)
    for _ in range(10):
        rig.pass_(1000.0)
        alive = [letter.ids[0] for letter in rig.heard(0) if letter.kind == Kind.ALIVE]
        assert alive == [1 + 2], "for whom it waits"
    rig.say(2, Kind.LEVEL)
    assert sorted(rig.runs(0)[-1].members) == [0, 1, 2]


def with_a_late_worker() -> Rig:
    """Three have made steps; two have asked again, and waited for the third, 2, long enough."""
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2)
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    rig.pass_(10.0)
    return rig


@pytest.mark.parametrize("early", [False, True])
def test_worker_that_a_group_did_not_wait_for_is_in_the_mean_of_all(early: bool) -> None:
    """It has made fewer steps, and stands in a barrier that the others come to later."""
    rig = with_a_late_worker()
    for worker in (0, 1):
        (run,) = rig.runs(worker)
        assert sorted(run.members) == [0, 1]
        rig.say(worker, Kind.DONE, run.number, run.epoch)
    assert [letter.ids[2] for letter in rig.heard(2) if letter.kind == Kind.OUT] == [Why.LATE]
    for worker in (2, 0, 1) if early else (0, 1, 2):
        assert not rig.runs(0)
        rig.say(worker, Kind.LEVEL)
    assert sorted(rig.runs(0)[-1].members) == [0, 1, 2]


@pytest.mark.parametrize("how", ["left", "lost", "cut"])
def test_worker_that_a_group_did_not_wait_for_and_that_ends_holds_up_no_mean(how: str) -> None:
    rig = with_a_late_worker()
    for worker in (0, 1):
        (run,) = rig.runs(worker)
        rig.say(worker, Kind.DONE, run.number, run.epoch)
        rig.say(worker, Kind.LEVEL)
    assert not rig.runs(0)
    if how == "left":
        rig.box.left.add(2)
    else:
        getattr(rig.box, how)[2] = {"lost": "has been silent", "cut": 60.0}[how]
    rig.pass_(1.0)
    assert sorted(rig.runs(0)[-1].members) == [0, 1]


def test_worker_that_missed_a_mean_of_all_is_told_so_with_its_own() -> None:
    rig = Rig(workers=2)
    rig.round(0, 1)
    rig.box.lost[1] = "has been silent"
    rig.pass_(1.0)
    rig.say(0, Kind.LEVEL)
    (run,) = rig.runs(0)
    rig.say(0, Kind.DONE, run.number, run.epoch)
    rig.box.lost.clear()
    rig.box.left.add(0)
    rig.pass_(1.0)
    rig.heard(1)
    rig.say(1, Kind.LEVEL)
    outs = [letter for letter in rig.heard(1) if letter.kind == Kind.OUT and letter.ids[0] == 0]
    assert {letter.ids[2:] for letter in outs} == {(Why.LEFT, 1)}


def test_worker_whose_mean_of_all_the_others_made_too_has_missed_none() -> None:
    rig = Rig(workers=2)
    rig.round(0, 1)
    for worker in (0, 1):
        rig.say(worker, Kind.LEVEL)
    for worker in (0, 1):
        (run,) = rig.runs(worker)
        rig.say(worker, Kind.DONE, run.number, run.epoch)
    rig.box.left.add(0)
    rig.pass_(1.0)
    rig.heard(1)
    rig.say(1, Kind.LEVEL)
    outs = [letter for letter in rig.heard(1) if letter.kind == Kind.OUT]
    assert {letter.ids[2:] for letter in outs} == {(Why.LEFT, 0)}


def test_who_waits_for_a_long_step_hears_for_whom() -> None:
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2, seconds=100.0)
    rig.say(0, Kind.ASK)
    rig.pass_(6.0)
    alive = [letter.ids[0] for letter in rig.heard(0) if letter.kind == Kind.ALIVE]
    assert alive == [1 + 1]


def test_after_a_group_of_all_a_step_may_take_as_long_as_the_first() -> None:
    rig = Rig()
    for _ in range(3):
        rig.round(0, 1, 2)
    for worker in range(3):
        rig.say(worker, Kind.LEVEL)
    for worker in range(3):
        run = rig.runs(worker)[-1]
        rig.say(worker, Kind.DONE, run.number, run.epoch)
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    rig.pass_(90.0)
    assert 2 in rig.generator, "it may save a checkpoint"
    rig.say(2, Kind.ASK)
    for worker in range(3):
        run = rig.runs(worker)[-1]
        rig.say(worker, Kind.DONE, run.number, run.epoch)
    rig.say(0, Kind.ASK)
    rig.say(1, Kind.ASK)
    rig.pass_(9.0)
    assert 2 not in rig.generator, "its steps are as short as before"


def test_who_was_left_out_and_renews_takes_a_state_before_it_takes_part() -> None:
    """It may be at another part of the model, so that a group with it would wait for ever."""
    rig = Rig()
    for worker in range(3):
        rig.say(worker, Kind.ASK, 1)
    run = rig.runs(0)[0]
    for worker in range(3):
        rig.say(worker, Kind.DONE, run.number, run.epoch)
    for worker in (0, 1):
        rig.say(worker, Kind.ASK, 1)
    rig.pass_(200.0)
    again = rig.runs(0)[-1]
    assert sorted(again.members) == [0, 1]
    for worker in range(3):
        rig.heard(worker)
    for asked in (2, 3):  # however often it asks
        rig.say(2, Kind.ASK, 1)
        assert [(m.kind, m.ids[:2]) for m in rig.heard(2)] == [(Kind.OUT, (2, asked))]
    assert 2 not in rig.generator
    for worker in (0, 1):
        rig.say(worker, Kind.DONE, again.number, again.epoch)
    rig.say(2, Kind.FETCH, 0, 1)
    assert 2 in rig.generator
    for worker in range(3):
        rig.say(worker, Kind.ASK, 1)
    assert [sorted(run.members) for run in rig.runs(2)] == [[0, 1, 2]]


def test_who_renews_and_is_the_last_one_left_has_missed_nothing() -> None:
    rig = Rig(workers=2)
    rig.say(0, Kind.ASK, 1)
    rig.pass_(101.0)
    assert 1 not in rig.generator
    rig.box.left.add(0)
    rig.pass_(1.0)
    rig.heard(1)
    rig.say(1, Kind.ASK, 1)
    assert [run.members for run in rig.runs(1)] == [(1,)]


def test_who_was_left_out_takes_part_again_by_levelling() -> None:
    rig = Rig()
    rig.say(0, Kind.ASK)
    rig.pass_(101.0)
    assert [worker in rig.generator for worker in range(3)] == [True, False, False]
    rig.say(1, Kind.LEVEL)
    assert rig.heard(1)[-1].kind == Kind.IN
    (run,) = rig.runs(0)
    rig.say(0, Kind.DONE, run.number, run.epoch)
    rig.say(0, Kind.LEVEL)
    rig.say(2, Kind.LEVEL)
    assert sorted(rig.runs(1)[0].members) == [0, 1, 2]


# -- coming back --------------------------------------------------------------------------------


def test_who_comes_back_is_not_missed_as_before_and_takes_part_when_it_asks() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.box.lost[1] = "has been silent"
    rig.pass_(1.0)
    rig.say(0, Kind.ASK)
    assert 1 not in rig.generator
    rig.heard(0)
    back = Back(2, 1, object())  # type: ignore[arg-type]
    rig.service._returns = returns = Backs(back)  # type: ignore[assignment]
    rig.pass_(0.0)
    assert returns.connected == [back]
    assert 2 not in rig.generator, "the life before is over"
    told = rig.heard(0)
    assert [(letter.kind, letter.ids[0]) for letter in told] == [(Kind.OUT, 2), (Kind.RUN, 0 + 1)]
    assert [(letter.kind, letter.ids[:2]) for letter in rig.heard(2)] == [(Kind.OUT, (1, 1))]
    rig.say(2, Kind.ASK)
    assert [(letter.kind, letter.ids[:2]) for letter in rig.heard(0)] == [(Kind.IN, (2, 1))]


def test_who_was_opened_otherwise_does_not_come_back() -> None:
    rig = Rig()
    rig.service._returns = returns = Backs(Back(2, 1, None))  # type: ignore[arg-type, assignment]
    rig.pass_(0.0)
    assert returns.connected == []
    assert 2 not in rig.generator
    rig.say(2, Kind.ASK)
    assert 2 not in rig.generator


def test_who_waits_gives_its_state_and_not_who_was_lost_doing_that() -> None:
    rig = Rig()
    rig.say(1, Kind.ASK)
    meetings = []
    for lost, giver in ((-1, 1), (1, 0)):
        rig.say(2, Kind.FETCH, lost + 1)
        (told,) = rig.heard(2)
        assert (told.kind, told.ids[:2]) == (Kind.STATE, (giver, 2))
        assert rig.heard(giver)[-1][1:3] == told[1:3]
        meetings.append(told.ids[2])
    assert meetings == [1, 2], "each is another"
    rig.say(0, Kind.LEVEL)
    rig.box.lost[1] = "has been silent"
    rig.pass_(1.0)
    rig.heard(2)
    rig.say(2, Kind.FETCH, 0 + 1)
    assert rig.heard(2)[-1].ids[:2] == (0, 2), "it may have been the connection: nobody else lives"
    rig.box.lost.update({0: "has been silent", 1: "has been silent"})
    rig.pass_(1.0)
    rig.heard(2)
    rig.say(2, Kind.FETCH, 0)
    assert rig.heard(2)[-1].ids[:2] == (2, 2), "nobody could"


def test_whom_the_others_have_left_out_gives_no_state_while_somebody_else_may() -> None:
    rig = Rig()
    rig.round(0, 1, 2)
    rig.box.cut[0] = 2 * RECONNECT_S
    rig.pass_(1.0)
    rig.box.cut.clear()
    rig.say(0, Kind.ASK)  # it waits, and would answer at once
    for worker in range(3):
        rig.heard(worker)
    rig.say(2, Kind.FETCH)
    assert [letter.ids[:2] for letter in rig.heard(1)] == [(1, 2)]
    for worker in (1, 2):
        rig.say(worker, Kind.ASK)
    run = rig.runs(0)[-1]
    for worker in range(3):
        rig.say(worker, Kind.DONE, run.number, run.epoch)
    rig.say(0, Kind.FETCH)
    rig.say(0, Kind.ASK)  # it has the others' state by now
    rig.heard(0)
    rig.say(1, Kind.FETCH)
    assert (Kind.STATE, (0, 1)) in [(letter.kind, letter.ids[:2]) for letter in rig.heard(0)]

"""Averages of two workers each, as pure machines in virtual time (Ripples, section 2.3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.pairs import Game
from wingbeat.methods.model_averaging.pair_machine import (
    WINDOW,
    Adopt,
    Drop,
    Kind,
    Say,
    Unexpected,
    Worker,
    is_active,
    partners,
)


def spread(game: Game) -> float:
    values = [life.model[0] for life in game.lives]
    return float(max(values) - min(values))


def ring(workers: list[Worker]) -> None:
    """Deliver all that the machines say, until none says anything."""
    while any(worker.orders for worker in workers):
        for rank, worker in enumerate(workers):
            while worker.orders:
                order = worker.orders.popleft()
                if isinstance(order, Say):
                    workers[order.peer].heard(rank, order.kind, order.number, order.piece)


# -- the deadlock of Fig. 2a ---------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_without_the_split_workers_wait_for_each_other_in_a_ring(workers: int) -> None:
    """Fig. 2a: each has asked the next one, and answers nobody before it has its own answer."""
    machines = [
        Worker(rank, workers, 1, restricted=False, choose=lambda _, to=(rank + 1) % workers: to)
        for rank in range(workers)
    ]
    for machine in machines:
        machine.begin()
    ring(machines)
    assert all(machine.pending for machine in machines)
    assert [machine.behind() for machine in machines] == [
        ((rank + 1) % workers,) for rank in range(workers)
    ]
    assert [machine.queue for machine in machines] == [
        ((rank - 1) % workers,) for rank in range(workers)
    ]
    assert all(machine.averages == 0 for machine in machines)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_with_the_split_the_same_moment_ends(workers: int) -> None:
    machines = [Worker(rank, workers, 1, choose=lambda there: there[0]) for rank in range(workers)]
    for machine in machines:
        machine.begin()
    ring(machines)
    assert not any(machine.pending for machine in machines)
    assert [m.averages for m in machines][::2] == [1] * ((workers + 1) // 2)


def test_without_the_split_random_runs_end_in_deadlocks_and_with_it_none_does() -> None:
    runs = range(40)
    ended = [Game(4, seed, restricted=False).play() for seed in runs]
    rings = [game for game in ended if len(waiting := game.stuck) >= 2 and all(
        game.lives[rank].machine.asked is not None for rank in waiting)]  # fmt: skip
    assert len(rings) >= 10
    assert not any(Game(4, seed).play().stuck for seed in runs)


# -- what holds in every run ---------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    workers=st.integers(2, 9),
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 6),
    pieces=st.integers(1, 3),
)
def test_nobody_waits_for_ever_and_the_sum_of_all_models_stays(
    workers: int, seed: int, steps: int, pieces: int
) -> None:
    game = Game(workers, seed, steps=steps, pieces=pieces).play()
    assert game.stuck == []
    for piece in range(pieces):
        assert sum(life.model[piece] for life in game.lives) == game.total[piece]
    averages = [len(life.met) for life in game.lives]
    assert [life.machine.averages for life in game.lives] == averages
    assert averages[::2] == [steps] * ((workers + 1) // 2)  # one for each step that asks
    assert sum(averages[1::2]) == sum(averages[::2])
    assert not any(life.machine.lost or life.machine.alone for life in game.lives)


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(2, 9), seed=st.integers(0, 10**6))
def test_an_average_is_of_the_two_and_of_nobody_else(workers: int, seed: int) -> None:
    """Atomic: both had their models to themselves from the request to the answer."""
    game = Game(workers, seed).play()
    for rank, life in enumerate(game.lives):
        if not is_active(rank):
            continue
        for peer, before, after in life.met:
            theirs = [m for m in game.lives[peer].met if m[0] == rank and m[2] == after]
            assert any(
                [(a + b) / 2 for a, b in zip(before, other, strict=True)] == after
                for _, other, _ in theirs
            )


@settings(max_examples=80, deadline=None)
@given(workers=st.integers(2, 9), seed=st.integers(0, 10**6), data=st.data())
def test_who_dies_holds_nobody_up(workers: int, seed: int, data: st.DataObject) -> None:
    kills = data.draw(st.integers(1, workers - 1))
    game = Game(workers, seed, kills=kills).play()
    assert game.stuck == []


def test_models_come_together() -> None:
    game = Game(6, seed=5, steps=60, gradients=False)
    before = spread(game)
    assert spread(game.play()) < before / 100


# -- one worker ----------------------------------------------------------------------------


def test_the_split_alternates_and_the_larger_part_asks() -> None:
    assert [is_active(rank) for rank in range(5)] == [True, False, True, False, True]
    assert partners(1, 5) == (0, 2, 4)
    assert partners(4, 5) == (1, 3)
    assert partners(0, 1) == ()


def test_each_passive_worker_is_asked_at_random_from_a_seed() -> None:
    def asked(seed: int) -> list[int]:
        machine, out = Worker(0, 9, 0, seed), []
        for number in range(1, 61):
            machine.begin()
            out.append(machine.asked.peer)
            machine.heard(out[-1], Kind.GRANT, number)
            machine.shut()
        return out

    assert asked(1) == asked(1) != asked(2)
    assert set(asked(1)) == {1, 3, 5, 7}


def test_requests_are_served_one_at_a_time_in_their_order() -> None:
    machine = Worker(1, 6, 1)
    for peer in (4, 0, 2):
        machine.heard(peer, Kind.ASK, 7)
    assert not machine.orders, "its model changes now"
    machine.begin()
    assert list(machine.orders) == [Say(4, Kind.GRANT, 7)]
    assert machine.queue == (0, 2)
    machine.shut()
    machine.heard(4, Kind.PIECE, 7, 0)
    assert not machine.pending, "the average is its model"
    assert list(machine.orders)[1:] == [Say(4, Kind.MEAN, 7, 0), Adopt(4, asked=False)]
    machine.heard(4, Kind.DONE, 7)
    assert machine.served is None
    machine.begin()
    assert machine.orders[-1] == Say(0, Kind.GRANT, 7)


def test_few_parts_are_under_way_at_a_time() -> None:
    machine = Worker(0, 2, 3 * WINDOW)
    machine.begin()
    machine.heard(1, Kind.GRANT, 1)
    assert machine.asked.sent == WINDOW
    for piece in reversed(range(WINDOW)):  # over several interfaces they come in any order
        machine.heard(1, Kind.MEAN, 1, piece)
    assert machine.asked.sent == 2 * WINDOW


def test_a_lost_partner_is_replaced_and_what_came_of_it_is_dropped() -> None:
    machine = Worker(0, 4, 2, choose=lambda there: there[0])
    machine.begin()
    machine.heard(1, Kind.GRANT, 1)
    machine.heard(1, Kind.MEAN, 1, 0)
    machine.orders.clear()
    machine.gone(1, lost=True)
    assert list(machine.orders) == [Drop(1), Say(3, Kind.ASK, 2)]
    assert machine.pending
    assert machine.lost == {1}
    assert not machine.heard(1, Kind.MEAN, 1, 1), "its last words do not count"
    machine.gone(3, lost=False)
    assert not machine.pending
    assert machine.alone == 1
    assert machine.lost == {1}


def test_a_lost_asker_is_forgotten_and_the_next_has_its_turn() -> None:
    machine = Worker(1, 6, 2)
    machine.begin()
    for peer in (0, 2, 4):
        machine.heard(peer, Kind.ASK, 1)
    machine.heard(0, Kind.PIECE, 1, 0)
    machine.gone(2, lost=True)
    machine.orders.clear()
    machine.heard(0, Kind.FAILED, 0)
    assert list(machine.orders) == [Drop(0), Say(4, Kind.GRANT, 1)]


def test_who_leaves_takes_its_request_back_and_ends_what_is_under_way() -> None:
    asker = Worker(0, 2, 1)
    asker.begin()
    asker.leave()
    assert not asker.pending
    assert not asker.heard(1, Kind.GRANT, 1), "it was on its way"
    server = Worker(1, 4, 1)
    server.begin()
    for peer in (0, 2):
        server.heard(peer, Kind.ASK, 1)
    server.leave()
    assert server.amid
    server.heard(0, Kind.PIECE, 1, 0)
    server.heard(0, Kind.DONE, 1)
    assert not server.amid
    assert server.queue == (2,)


def test_a_passive_worker_serves_until_all_have_said_that_they_level() -> None:
    machine = Worker(1, 4, 1)
    machine.heard(2, Kind.LEVEL, 1)
    machine.level()
    assert machine.behind() == (0,)
    machine.heard(0, Kind.ASK, 3)
    assert machine.pending
    machine.heard(0, Kind.PIECE, 3, 0)
    machine.heard(0, Kind.DONE, 3)
    assert not machine.levelled
    machine.heard(0, Kind.LEVEL, 1)
    assert machine.levelled
    machine.shut()
    machine.level()
    assert machine.behind() == (0, 2)
    machine.gone(0, lost=True)
    machine.gone(2, lost=False)
    assert machine.levelled


SERVED = [(0, Kind.ASK, 1, 0)]
MET = [*SERVED, (0, Kind.PIECE, 1, 0), (0, Kind.PIECE, 1, 1)]


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        ([], (2, Kind.GRANT, 1, 0)),
        ([], (3, Kind.ASK, 1, 0)),
        ([], (9, Kind.ALIVE, 0, 0)),
        ([], (0, 77, 0, 0)),
        ([], (0, Kind.PIECE, 1, 0)),
        ([], (0, Kind.LEVEL, 2, 0)),
        (SERVED, (0, Kind.ASK, 2, 0)),
        (SERVED, (0, Kind.PIECE, 2, 0)),
        (SERVED, (2, Kind.PIECE, 1, 0)),
        (SERVED, (0, Kind.PIECE, 1, 2)),
        (SERVED, (0, Kind.DONE, 1, 0)),
        (MET, (0, Kind.PIECE, 1, 1)),
        ([*SERVED, (2, Kind.ASK, 5, 0)], (2, Kind.ASK, 6, 0)),
    ],
)
def test_a_passive_worker_takes_no_nonsense(before: list[tuple], wrong: tuple) -> None:
    machine = Worker(1, 4, 2)
    machine.begin()
    for said in before:
        machine.heard(*said)
    with pytest.raises(Unexpected):
        machine.heard(*wrong)


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        ([], (1, Kind.ASK, 1, 0)),
        ([], (1, Kind.LEVEL, 1, 0)),
        ([], (1, Kind.GRANT, 2, 0)),
        ([], (3, Kind.GRANT, 1, 0)),
        ([], (1, Kind.MEAN, 1, 0)),
        ([], (1, Kind.DONE, 1, 0)),
        ([(1, Kind.GRANT, 1, 0)], (1, Kind.GRANT, 1, 0)),
        ([(1, Kind.GRANT, 1, 0)], (1, Kind.MEAN, 1, WINDOW)),
        ([(1, Kind.GRANT, 1, 0), (1, Kind.MEAN, 1, 0)], (1, Kind.MEAN, 1, 0)),
    ],
)
def test_an_active_worker_takes_no_nonsense(before: list[tuple], wrong: tuple) -> None:
    machine = Worker(0, 4, 2 * WINDOW, choose=lambda there: there[0])
    machine.begin()
    for said in before:
        machine.heard(*said)
    with pytest.raises(Unexpected):
        machine.heard(*wrong)

"""The protocol of AD-PSGD as state machines in virtual time (Ripples, section 2.3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.amounts import examples
from helpers.pair_simulation import PairSimulation
from wingbeat.methods.model_averaging.pair_machine import (
    WINDOW,
    Apply,
    Discard,
    Kind,
    PairMachine,
    ProtocolError,
    Send,
    is_active,
    partners,
)


def spread(game: PairSimulation) -> float:
    values = [worker.model[0] for worker in game.workers]
    return float(max(values) - min(values))


def ring(workers: list[PairMachine]) -> None:
    """Deliver all that the machines say, until none says anything."""
    while any(worker.commands for worker in workers):
        for rank, worker in enumerate(workers):
            while worker.commands:
                command = worker.commands.popleft()
                if isinstance(command, Send):
                    workers[command.peer].receive(rank, command.kind, command.number, command.chunk)


# -- the deadlock of Fig. 2a ---------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_deadlock_in_a_ring_without_bipartition(workers: int) -> None:
    """Fig. 2a: each has asked the next one, and answers nobody before it has its own answer."""
    machines = [
        PairMachine(rank, workers, 1, bipartite=False, choose=lambda _, to=(rank + 1) % workers: to)
        for rank in range(workers)
    ]
    for machine in machines:
        machine.begin()
    ring(machines)
    assert all(machine.pending for machine in machines)
    assert [machine.waiting_for() for machine in machines] == [
        ((rank + 1) % workers,) for rank in range(workers)
    ]
    assert [machine.queue for machine in machines] == [
        ((rank - 1) % workers,) for rank in range(workers)
    ]
    assert all(machine.averages == 0 for machine in machines)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_do_not_deadlock_with_bipartition(workers: int) -> None:
    machines = [
        PairMachine(rank, workers, 1, choose=lambda there: there[0]) for rank in range(workers)
    ]
    for machine in machines:
        machine.begin()
    ring(machines)
    assert not any(machine.pending for machine in machines)
    assert [m.averages for m in machines][::2] == [1] * ((workers + 1) // 2)


def test_random_runs_deadlock_without_bipartition_only() -> None:
    runs = range(40)
    ended = [PairSimulation(4, seed, bipartite=False).play() for seed in runs]
    rings = [game for game in ended if len(waiting := game.stuck) >= 2 and all(
        game.workers[rank].machine.requested is not None for rank in waiting)]  # fmt: skip
    assert len(rings) >= 10
    assert not any(PairSimulation(4, seed).play().stuck for seed in runs)


# -- what holds in every run ---------------------------------------------------------------


@settings(max_examples=examples(120), deadline=None)
@given(
    workers=st.integers(2, 9),
    seed=st.integers(0, 10**6),
    steps=st.integers(1, 6),
    chunks=st.integers(1, 3),
)
def test_random_runs_end_and_keep_the_sum_of_models(
    workers: int, seed: int, steps: int, chunks: int
) -> None:
    game = PairSimulation(workers, seed, steps=steps, chunks=chunks).play()
    assert game.stuck == []
    for chunk in range(chunks):
        assert sum(worker.model[chunk] for worker in game.workers) == game.total[chunk]
    averages = [len(worker.met) for worker in game.workers]
    assert [worker.machine.averages for worker in game.workers] == averages
    assert averages[::2] == [steps] * ((workers + 1) // 2)  # one for each step that asks
    assert sum(averages[1::2]) == sum(averages[::2])
    assert not any(worker.machine.lost or worker.machine.skipped for worker in game.workers)


@settings(max_examples=examples(60), deadline=None)
@given(workers=st.integers(2, 9), seed=st.integers(0, 10**6))
def test_average_is_atomic(workers: int, seed: int) -> None:
    """Atomic: both had their models to themselves from the request to the answer."""
    game = PairSimulation(workers, seed).play()
    for rank, worker in enumerate(game.workers):
        if not is_active(rank):
            continue
        for peer, before, after in worker.met:
            theirs = [m for m in game.workers[peer].met if m[0] == rank and m[2] == after]
            assert any(
                [(a + b) / 2 for a, b in zip(before, other, strict=True)] == after
                for _, other, _ in theirs
            )


@settings(max_examples=examples(80), deadline=None)
@given(workers=st.integers(2, 9), seed=st.integers(0, 10**6), data=st.data())
def test_death_delays_nobody_forever(workers: int, seed: int, data: st.DataObject) -> None:
    kills = data.draw(st.integers(1, workers - 1))
    game = PairSimulation(workers, seed, kills=kills).play()
    assert game.stuck == []


def test_models_converge() -> None:
    game = PairSimulation(6, seed=5, steps=60, gradients=False)
    before = spread(game)
    assert spread(game.play()) < before / 100


# -- one worker ----------------------------------------------------------------------------


def test_active_and_passive_ranks_alternate() -> None:
    assert [is_active(rank) for rank in range(5)] == [True, False, True, False, True]
    assert partners(1, 5) == (0, 2, 4)
    assert partners(4, 5) == (1, 3)
    assert partners(0, 1) == ()


def test_partners_are_random_and_seeded() -> None:
    def asked(seed: int) -> list[int]:
        machine, out = PairMachine(0, 9, 0, seed), []
        for number in range(1, 61):
            machine.begin()
            out.append(machine.requested.peer)
            machine.receive(out[-1], Kind.GRANT, number)
            machine.end()
        return out

    assert asked(1) == asked(1) != asked(2)
    assert set(asked(1)) == {1, 3, 5, 7}


def test_requests_are_served_one_at_a_time_in_order() -> None:
    machine = PairMachine(1, 6, 1)
    for peer in (4, 0, 2):
        machine.receive(peer, Kind.REQUEST, 7)
    assert not machine.commands, "its model changes now"
    machine.begin()
    assert list(machine.commands) == [Send(4, Kind.GRANT, 7)]
    assert machine.queue == (0, 2)
    machine.end()
    machine.receive(4, Kind.CHUNK, 7, 0)
    assert not machine.pending, "the average is its model"
    assert list(machine.commands)[1:] == [Send(4, Kind.AVERAGE, 7, 0), Apply(4, is_requester=False)]
    machine.receive(4, Kind.DONE, 7)
    assert machine.served is None
    machine.begin()
    assert machine.commands[-1] == Send(0, Kind.GRANT, 7)


def test_window_limits_chunks_in_flight() -> None:
    machine = PairMachine(0, 2, 3 * WINDOW)
    machine.begin()
    machine.receive(1, Kind.GRANT, 1)
    assert machine.requested.sent == WINDOW
    for chunk in reversed(range(WINDOW)):  # over several interfaces they come in any command
        machine.receive(1, Kind.AVERAGE, 1, chunk)
    assert machine.requested.sent == 2 * WINDOW


def test_lost_partner_is_replaced_and_its_average_discarded() -> None:
    machine = PairMachine(0, 4, 2, choose=lambda there: there[0])
    machine.begin()
    machine.receive(1, Kind.GRANT, 1)
    machine.receive(1, Kind.AVERAGE, 1, 0)
    machine.commands.clear()
    machine.remove(1, lost=True)
    assert list(machine.commands) == [Discard(1), Send(3, Kind.REQUEST, 2)]
    assert machine.pending
    assert machine.lost == {1}
    assert not machine.receive(1, Kind.AVERAGE, 1, 1), "its last words do not count"
    machine.remove(3, lost=False)
    assert not machine.pending
    assert machine.skipped == 1
    assert machine.lost == {1}


def test_lost_requester_is_removed_and_the_next_is_served() -> None:
    machine = PairMachine(1, 6, 2)
    machine.begin()
    for peer in (0, 2, 4):
        machine.receive(peer, Kind.REQUEST, 1)
    machine.receive(0, Kind.CHUNK, 1, 0)
    machine.remove(2, lost=True)
    machine.commands.clear()
    machine.receive(0, Kind.FAILED, 0)
    assert list(machine.commands) == [Discard(0), Send(4, Kind.GRANT, 1)]


def test_leave_cancels_requests_and_completes_granted_averages() -> None:
    asker = PairMachine(0, 2, 1)
    asker.begin()
    asker.leave()
    assert not asker.pending
    assert not asker.receive(1, Kind.GRANT, 1), "it was on its way"
    server = PairMachine(1, 4, 1)
    server.begin()
    for peer in (0, 2):
        server.receive(peer, Kind.REQUEST, 1)
    server.leave()
    assert server.in_transfer
    server.receive(0, Kind.CHUNK, 1, 0)
    server.receive(0, Kind.DONE, 1)
    assert not server.in_transfer
    assert server.queue == (2,)


def test_passive_worker_serves_until_all_synchronize() -> None:
    machine = PairMachine(1, 4, 1)
    machine.receive(2, Kind.SYNCHRONIZE, 1)
    machine.synchronize()
    assert machine.waiting_for() == (0,)
    machine.receive(0, Kind.REQUEST, 3)
    assert machine.pending
    machine.receive(0, Kind.CHUNK, 3, 0)
    machine.receive(0, Kind.DONE, 3)
    assert not machine.synchronized
    machine.receive(0, Kind.SYNCHRONIZE, 1)
    assert machine.synchronized
    machine.end()
    machine.synchronize()
    assert machine.waiting_for() == (0, 2)
    machine.remove(0, lost=True)
    machine.remove(2, lost=False)
    assert machine.synchronized


SERVED = [(0, Kind.REQUEST, 1, 0)]
MET = [*SERVED, (0, Kind.CHUNK, 1, 0), (0, Kind.CHUNK, 1, 1)]


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        ([], (2, Kind.GRANT, 1, 0)),
        ([], (3, Kind.REQUEST, 1, 0)),
        ([], (9, Kind.KEEPALIVE, 0, 0)),
        ([], (0, Kind.CHUNK, 1, 0)),
        ([], (0, Kind.SYNCHRONIZE, 2, 0)),
        (SERVED, (0, Kind.REQUEST, 2, 0)),
        (SERVED, (0, Kind.CHUNK, 2, 0)),
        (SERVED, (2, Kind.CHUNK, 1, 0)),
        (SERVED, (0, Kind.CHUNK, 1, 2)),
        (SERVED, (0, Kind.DONE, 1, 0)),
        (MET, (0, Kind.CHUNK, 1, 1)),
        ([*SERVED, (2, Kind.REQUEST, 5, 0)], (2, Kind.REQUEST, 6, 0)),
    ],
)
def test_passive_worker_refuses_invalid_messages(before: list[tuple], wrong: tuple) -> None:
    machine = PairMachine(1, 4, 2)
    machine.begin()
    for said in before:
        machine.receive(*said)
    with pytest.raises(ProtocolError):
        machine.receive(*wrong)


@pytest.mark.parametrize(
    ("before", "wrong"),
    [
        ([], (1, Kind.REQUEST, 1, 0)),
        ([], (1, Kind.SYNCHRONIZE, 1, 0)),
        ([], (1, Kind.GRANT, 2, 0)),
        ([], (3, Kind.GRANT, 1, 0)),
        ([], (1, Kind.AVERAGE, 1, 0)),
        ([], (1, Kind.DONE, 1, 0)),
        ([(1, Kind.GRANT, 1, 0)], (1, Kind.GRANT, 1, 0)),
        ([(1, Kind.GRANT, 1, 0)], (1, Kind.AVERAGE, 1, WINDOW)),
        ([(1, Kind.GRANT, 1, 0), (1, Kind.AVERAGE, 1, 0)], (1, Kind.AVERAGE, 1, 0)),
    ],
)
def test_active_worker_refuses_invalid_messages(before: list[tuple], wrong: tuple) -> None:
    machine = PairMachine(0, 4, 2 * WINDOW, choose=lambda there: there[0])
    machine.begin()
    for said in before:
        machine.receive(*said)
    with pytest.raises(ProtocolError):
        machine.receive(*wrong)

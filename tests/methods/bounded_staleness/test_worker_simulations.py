"""Simulations of workers from seeds, each checked by its journals."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from helpers.amounts import slow_except
from helpers.staleness_simulation import (
    Replica,
    SimulatedWorker,
    Simulation,
    add,
    check_consistency,
    gradient,
)
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.messages import PieceSum, PullResponse
from wingbeat.transport.membership import initial_view

MODES = {
    "BSP": lambda rng, k: StalenessBound(0, k, k),
    "SSP": lambda rng, k: StalenessBound(rng.randrange(1, 4), k, k),
    "PGE": lambda rng, k: StalenessBound(rng.randrange(3), rng.randrange(1, k), k),
    "ASP": lambda rng, k: StalenessBound(None, k, k),
}


def make_simulation(mode: str, seed: int, kills: int = 0, most: int = 9) -> Simulation:
    """Return a simulation with random settings."""
    rng = random.Random(f"{mode} {seed} {kills}")
    bound = MODES[mode](rng, rng.randrange(2, 5))
    bound = dataclasses.replace(bound, in_flight=rng.choice((1, 2, 3, None)))
    assert bound.mode == mode
    return Simulation(
        seed, rng.randrange(2, most + 1), bound, iterations=rng.randrange(1, 8), kills=kills,
        keep=rng.choice((None, 2, 3)),
    )  # fmt: skip


def simulate(mode: str, seed: int, kills: int = 0, most: int = 9) -> Simulation:
    """Run a simulation, and check it unless no worker with all parameters was left."""
    simulation = make_simulation(mode, seed, kills, most).run()
    if not simulation.stranded:
        check_consistency(simulation)
    assert not simulation.stranded or (
        simulation.keep is not None and (kills > 1 or simulation.n == 2)
    )
    return simulation


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 40), marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_simulated_workers_end_with_equal_replicas(mode: str, seeds: range) -> None:
    for seed in seeds:
        simulate(mode, seed)


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 60), marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_simulated_kills_and_restarts_are_consistent(mode: str, seeds: range) -> None:
    for seed in seeds:
        simulate(mode, seed, kills=1 + seed % 4, most=6)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2250, 125))
@pytest.mark.parametrize("mode", MODES)
def test_ten_thousand_simulations_are_consistent(mode: str, first: int) -> None:
    for seed in range(first, first + 125):
        simulate(mode, seed)
        simulate(mode, seed, kills=1 + seed % 4)


def test_workers_that_pull_from_each_other_recover() -> None:
    simulate("PGE", 1180, kills=1)


def test_simulations_cover_drops_pulls_and_restarts() -> None:
    # Otherwise the simulations above would show nothing.
    simulation = [simulate("PGE", seed, kills=2, most=6) for seed in range(40)]
    workers = [worker for each in simulation for worker in each.alive_workers()]
    assert sum(worker.machine.dropped for worker in workers) > 20
    last = [worker.machine.last_dropped for worker in workers]
    assert sum(each is not None and each[1] > 0 for each in last) > 3
    assert sum(worker.pulls for worker in workers) > 20
    assert sum(worker.incarnation > 0 and len(worker.begun) > 0 for worker in workers) > 5
    assert sum(len(each.dead) for each in simulation) > 40


@pytest.mark.parametrize("n", slow_except([1, 2, 5], [1, 2, 3, 5, 9]))
def test_simulated_bsp_equals_synchronous_training(n: int) -> None:
    bound = StalenessBound(0, 3, 3)
    reference = Replica(n, 3)
    for iteration in range(6):
        for z in range(3):
            for q in range(n):
                grads = {(iteration, w): gradient(w, iteration, z, q) for w in range(n)}
                total = add(z, q, grads)
                reference.apply_round((PieceSum(z, q, iteration, (), (), initial_view(n), total),))
    for seed in range(5):
        simulation = Simulation(seed, n, bound, iterations=6).run()
        check_consistency(simulation)
        assert {worker.replica.bits() for worker in simulation.alive_workers()} == {
            reference.bits()
        }
        assert not any(worker.machine.dropped for worker in simulation.alive_workers())


def test_bsp_continues_after_killed_worker_is_lost() -> None:
    simulation = Simulation(3, 4, StalenessBound(0, 2, 2), iterations=8, returns=False, even=True)
    simulation.schedule(5.0, simulation.kill)
    check_consistency(simulation.run())
    assert len(simulation.alive_workers()) == 3
    for worker in simulation.alive_workers():
        assert worker.begun == list(range(8))


def test_equally_fast_workers_are_summed_together() -> None:
    # Late answers would be correct as well, but cost a round of staleness each.
    simulation = Simulation(0, 6, StalenessBound(4, 3, 4), iterations=12, even=True)
    simulation.lag = 0.01
    check_consistency(simulation.run())
    ages = [
        part.number - iteration
        for parts in simulation.alive_workers()[0].applied
        for part in parts
        for iteration, _ in part.entries
    ]
    assert sum(ages) / len(ages) < 0.5


class Paused(Simulation):
    """A simulation in which worker 2 pauses within an iteration, while the others make 100.

    Attributes:
        waited: the most rounds that have waited at it.
        copies: of parameters that were sent to it.
    """

    def __init__(self, bound: StalenessBound) -> None:
        self.waited = self.copies = 0
        super().__init__(0, 3, bound, iterations=150, keep=bound.max_buffered, even=True)
        self.lag = 0.01

    def at(self, when: float, what: Callable[[], None]) -> None:
        worker = getattr(what, "__self__", None)
        if isinstance(worker, SimulatedWorker) and worker.rank == 2 and 60 <= when < 360:
            when = 360.0
        super().at(when, what)

    def post(self, worker: SimulatedWorker, to: int, message: Any) -> None:
        self.copies += isinstance(message, PullResponse)
        super().post(worker, to, message)

    def flush(self, worker: SimulatedWorker) -> None:
        super().flush(worker)
        if worker.rank == 2:
            self.waited = max(self.waited, worker.machine.buffered_rounds)


@pytest.mark.parametrize(
    "bound", [StalenessBound(2, 2, 3), StalenessBound(18, 2, 3), StalenessBound(None, 3, 3)]
)
def test_rounds_beyond_buffer_are_discarded_and_pulled_once(bound: StalenessBound) -> None:
    simulation = Paused(bound)
    check_consistency(simulation.run())
    late = simulation.alive_workers()[2]
    assert late.pulls == late.machine.pulls == simulation.copies == 1
    assert [worker.pulls for worker in simulation.alive_workers()[:2]] == [0, 0]
    assert (
        simulation.waited <= bound.max_buffered + 2
    )  # the others have not applied the last rounds yet


@pytest.mark.parametrize("bound", [StalenessBound(2, 3, 3), StalenessBound(0, 3, 3)])
def test_no_rounds_are_discarded_if_others_wait(bound: StalenessBound) -> None:
    simulation = Paused(bound)
    check_consistency(simulation.run())
    assert not any(worker.pulls for worker in simulation.alive_workers())
    assert simulation.waited <= bound.max_buffered + 1  # one is incomplete


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 15), marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["BSP", "SSP"])
def test_slow_links_discard_no_rounds(mode: str, seeds: range) -> None:
    for seed in seeds:
        bound = make_simulation(mode, seed).bound
        simulation = Simulation(seed, 5, bound, iterations=12, keep=bound.max_buffered).run()
        check_consistency(simulation)
        assert not any(worker.pulls for worker in simulation.alive_workers())


def test_resume_after_drain_continues_with_same_iteration() -> None:
    simulation = Simulation(1, 3, StalenessBound(2, 1, 2), iterations=4).run()
    check_consistency(simulation)
    at = {
        worker.machine.drained and worker.machine.iteration for worker in simulation.alive_workers()
    }
    for worker in simulation.alive_workers():
        worker.machine.resume()
        worker.machine.outbox.clear()
    assert len({worker.machine.iteration for worker in simulation.alive_workers()}) == 1
    assert simulation.alive_workers()[0].machine.iteration > max(at)


# -- colayer changes -------------------------------------------------------------------------


QUICK_CHANGES = 9
"""Of 30 seeds, how many `make test` runs."""

MOMENTS = ("draining", "drained", "written", "decided", "changed")


def change(mode: str, seed: int, dies: str = "", kills: int = 0) -> Simulation:
    """Simulate workers that change colayers, some of them killed at that moment, and check it."""
    rng = random.Random(f"change {mode} {seed} {dies} {kills}")
    bound = MODES[mode](rng, rng.randrange(2, 5))
    if bound.s == 0:
        bound = dataclasses.replace(bound, s=1)
    bound = dataclasses.replace(bound, in_flight=rng.choice((1, 2, 3, None)))
    simulation = Simulation(
        seed, rng.randrange(3, 6), bound, iterations=rng.randrange(8, 16), kills=kills,
        keep=rng.choice((None, 2, 3)), first=rng.randrange(1, 4), dies=dies,
    ).run()  # fmt: skip
    if not simulation.stranded:
        check_consistency(simulation)
        assert len(set(simulation.digests)) <= 1, "replicas differ where colayers change"
    assert not simulation.stranded or simulation.keep is not None
    return simulation


def changed(simulation: Simulation) -> bool:
    return any(worker.epoch for worker in simulation.alive_workers())


@pytest.mark.parametrize("count", [QUICK_CHANGES, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["SSP", "PGE", "ASP"])
def test_colayer_change_counts_each_contribution_once(mode: str, count: int) -> None:
    simulation = [change(mode, seed) for seed in range(count)]
    assert sum(map(changed, simulation)) > count * 2 // 3
    assert len({p.bound.colayers for each in simulation for p in each.alive_workers()}) == 4


@pytest.mark.parametrize("count", [QUICK_CHANGES, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dies", MOMENTS)
@pytest.mark.parametrize("mode", ["SSP", "PGE"])
def test_kill_during_colayer_change_is_consistent(mode: str, dies: str, count: int) -> None:
    simulation = [change(mode, seed, dies) for seed in range(count)]
    assert sum(not each.dies for each in simulation) > count * 2 // 3
    assert sum(map(changed, simulation)) > count // 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["SSP", "PGE", "ASP"])
def test_thousand_colayer_changes_are_consistent(mode: str) -> None:
    for seed in range(1000, 1400):
        change(mode, seed, (*MOMENTS, "")[seed % 6], kills=seed % 4)


@pytest.mark.parametrize(("count", "least"), [(20, 1), pytest.param(60, 5, marks=pytest.mark.slow)])
def test_restarts_during_colayer_change_are_consistent(count: int, least: int) -> None:
    simulation = [
        change("PGE", seed, MOMENTS[seed % 5], kills=1 + seed % 3) for seed in range(count)
    ]
    came = [
        p
        for each in simulation
        for p in each.alive_workers()
        if p.incarnation and p.epoch and p.begun
    ]
    assert len(came) > least

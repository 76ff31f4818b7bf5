"""Delays of contributions in the journals of simulated runs."""

from __future__ import annotations

from helpers.staleness_simulation import Simulation
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat_lab.audit import applied_delays


def simulate(bound: StalenessBound, kills: int = 0) -> Simulation:
    return Simulation(5, 3, bound, iterations=6, kills=kills).run()


def test_delays_in_bsp_are_zero() -> None:
    found = applied_delays(
        worker.lines for worker in simulate(StalenessBound(0, 2, 2)).alive_workers()
    )
    assert found == {0: 6 * 3 * 2 * 3}  # iterations, workers, colayers, pieces


def test_delays_count_each_contribution_once() -> None:
    simulation = simulate(StalenessBound(3, 2, 2))
    workers = simulation.alive_workers()
    found = applied_delays(worker.lines for worker in workers)
    assert sum(found.values()) == workers[0].machine.gei.counted
    assert max(found) > 0


def test_delays_after_kill_include_contributions_of_dead_worker() -> None:
    simulation = simulate(StalenessBound(2, 1, 2), kills=2)
    lines = [worker.lines for worker in [*simulation.alive_workers(), *simulation.dead]]
    assert simulation.dead
    assert (
        0 < sum(applied_delays(lines).values()) <= simulation.alive_workers()[0].machine.gei.counted
    )

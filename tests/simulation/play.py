"""Runs scenarios, and makes those that fail small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from simulation.scenario import Scenario
from simulation.world import World


class Failed(AssertionError):
    """A scenario has failed; ``scenario`` is the smallest found that does."""

    def __init__(self, scenario: Scenario, cause: BaseException) -> None:
        self.scenario, self.cause = scenario, cause
        what = f"{type(cause).__name__}: {cause}"
        super().__init__(
            f'{what}\n\nThe scenario, which `make simulate ARGS="FILE --log"` plays:\n\n{scenario}'
        )


def machines() -> dict[str, Any]:
    """Return the machines by name."""
    from simulation.groups import Groups
    from simulation.members import Members
    from simulation.servers import Servers
    from simulation.staleness import Staleness

    return {machine.name: machine for machine in (Groups, Staleness, Members, Servers)}


def play(scenario: Scenario, log: Callable[[str], object] = lambda _: None) -> int:
    """Run a scenario; return the number of its steps. Raises what it finds."""
    world = World(scenario, log)
    try:
        machines()[scenario.machine](scenario, world).run()
    finally:
        for process in list(world.processes.values()):
            world.end(process)
    return world.steps


def shrink(scenario: Scenario) -> tuple[Scenario, BaseException]:
    """Leave out faults for as long as a scenario fails; return the last that does, and how."""
    found = failure(scenario)
    assert found is not None, "the scenario does not fail"
    size = max(1, len(scenario.faults) // 2)
    while True:
        for start in range(0, len(scenario.faults), size):
            fewer = scenario.with_faults(
                [*scenario.faults[:start], *scenario.faults[start + size :]]
            )
            if (error := failure(fewer)) is not None:
                scenario, found = fewer, error
                break
        else:
            if size == 1:
                return scenario, found
            size //= 2


def failure(scenario: Scenario) -> BaseException | None:
    """Return why a scenario fails; None if it does not."""
    try:
        play(scenario)
    except Exception as error:
        return error
    return None


def play_or_shrink(scenario: Scenario) -> int:
    """Run a scenario; if it fails, raise `Failed` with a small one that does."""
    try:
        return play(scenario)
    except Exception:
        raise Failed(*shrink(scenario)) from None


def scenarios(machine: str, first: int = 0) -> Iterator[Scenario]:
    """Yield the scenarios of all seeds."""
    draw = machines()[machine].draw
    while True:
        yield draw(first)
        first += 1


def play_steps(machine: str, steps: int, first: int = 0) -> tuple[int, int]:
    """Run the scenarios of the seeds from ``first`` on; return how many, and their steps."""
    done = count = 0
    for scenario in scenarios(machine, first):
        if done >= steps:
            break
        done += play_or_shrink(scenario)
        count += 1
    return count, done

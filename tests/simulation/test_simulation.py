"""The real state machines in virtual time, with faults from a seed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from simulation.__main__ import main
from simulation.mutants import MUTANTS, Mutant
from simulation.play import (
    Failed,
    failure,
    machines,
    play,
    play_or_shrink,
    play_steps,
    scenarios,
    shrink,
)
from simulation.scenario import Fault, FaultRates, Scenario, draw_faults
from simulation.world import Lock, Thread, World

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
"""Those that have failed once."""

SHORT, LONG = 4_000, 50_000
"""Steps of a machine in `make test` and in `make test-slow`."""


SCENARIOS_OF_A_MUTANT = 200
"""At most as many are played until one fails."""


@pytest.mark.parametrize("machine", machines())
def test_random_scenarios_hold_the_invariants(machine: str) -> None:
    count, steps = play_steps(machine, SHORT)
    assert count
    assert steps >= SHORT


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", machines())
def test_more_random_scenarios_hold_the_invariants(machine: str) -> None:
    _, steps = play_steps(machine, LONG, first=1_000_000)
    assert steps >= LONG


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_that_has_failed_holds_the_invariants(path: Path) -> None:
    assert play(Scenario.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("machine", machines())
def test_scenario_read_back_from_its_text_makes_the_same_steps(machine: str) -> None:
    scenario = machines()[machine].draw(1)
    logs: list[list[str]] = [[], []]
    steps = [play(scenario, logs[0].append), play(Scenario.parse(str(scenario)), logs[1].append)]
    assert steps[0] == steps[1]
    assert logs[0] == logs[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mistake_in_a_state_machine_is_found(mutant: Mutant) -> None:
    drawn = scenarios(mutant.machine)
    with mutant.applied():
        assert any(failure(next(drawn)) for _ in range(SCENARIOS_OF_A_MUTANT))


def test_printed_scenario_fails_again_as_long_as_the_mistake_is_there() -> None:
    mutant = next(each for each in MUTANTS if each.new == "self._pulls.get(key, ())")
    with mutant.applied():
        with pytest.raises(Failed, match="requested slice") as failed:
            play_steps(mutant.machine, LONG)
        printed = Scenario.parse(str(failed.value).partition("plays:\n\n")[2])
        with pytest.raises(AssertionError, match="requested slice"):
            play(printed)
    assert play(printed)


def test_scenario_is_text_with_one_fault_a_line() -> None:
    kill, cut = Fault(0.5, "kill", (1,)), Fault(2.25, "cut", (0, 2), 1.5)
    faults = (kill, cut, Fault(3.0, "reset", (0, 1)))
    scenario = Scenario("groups", 7, (("hosts", "0,0,1"),), faults)
    assert str(scenario) == (
        "machine groups\nseed 7\nhosts 0,0,1\n0.500 kill 1\n2.250 cut 0 2 1.500\n3.000 reset 0 1\n"
    )
    assert Scenario.parse(f"# found today\n{scenario}\n") == scenario


@pytest.mark.parametrize("line", ["1.0 kill", "1.0 cut 0 1", "1.0 stop 0 1 2.0"])
def test_fault_with_wrong_arguments_is_refused(line: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        Fault.parse(line)


def test_drawn_faults_leave_one_process_alive() -> None:
    for seed in range(200):
        rates = FaultRates((0, 1, 2), (), 50.0, killable=(0, 1, 2), startable=(0, 1, 2))
        dead: set[int] = set()
        for fault in draw_faults(rates, random.Random(seed), 20):
            (dead.add if fault.kind == "kill" else dead.discard)(fault.where[0])
            assert len(dead) < 3


class Toy:
    """A machine that fails if process 1 is killed."""

    name = "toy"

    def __init__(self, scenario: Scenario, world: World) -> None:
        self.world = world

    def run(self) -> None:
        for number in range(2):
            self.world.spawn(number, lambda: self.world.sleep(10.0))
        self.world.run(lambda: self.world.now > 9.0, 20.0)
        assert self.world.processes[1].alive, "process 1 was killed"


def test_failing_scenario_is_shrunk_to_the_fault_that_matters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("simulation.play.machines", lambda: {"toy": Toy})
    faults = [Fault(float(at), "stop", (0,), 0.5) for at in range(1, 8)]
    scenario = Scenario("toy", 0, (), (*faults, Fault(8.5, "kill", (1,))))
    small, error = shrink(scenario)
    assert small.faults == (Fault(8.5, "kill", (1,)),)
    assert "process 1 was killed" in str(error)
    with pytest.raises(Failed, match=r"process 1 was killed[^$]*machine toy\nseed 0\n8.500 kill 1"):
        play_or_shrink(scenario)


def test_wait_without_a_deadline_is_found_when_nothing_is_in_flight() -> None:
    world = World(Scenario("toy", 0))
    event_waiters: list = []
    world.spawn(0, lambda: world.block(event_waiters, float("inf")))
    with pytest.raises(AssertionError, match=r"process 0\.0 \[main\] waits in .* without limit"):
        world.run(lambda: False, 100.0)


def test_wait_beyond_its_limit_is_found_unless_the_process_is_stopped() -> None:
    def wait() -> None:
        with world.limited(5.0, "the answer"):
            world.sleep(7.0)

    world = World(Scenario("toy", 0))
    world.spawn(0, wait)
    with pytest.raises(AssertionError, match=r"process 0\.0: the answer takes more than 5 s"):
        world.run(lambda: world.now > 8.0, 100.0)

    world = World(Scenario("toy", 0, (), (Fault(1.0, "stop", (0,), 60.0),)))
    world.spawn(0, wait)
    world.after(99.0, lambda: None)
    world.run(lambda: world.now > 62.0, 100.0)


def test_lock_is_held_by_one_thread_at_a_time() -> None:
    world = World(Scenario("toy", 0))
    inside: list[int] = []

    def work(number: int, lock: Lock) -> None:
        for _ in range(20):
            with lock:
                inside.append(number)
                assert len(inside) == 1
                world.sleep(world.chance.random())
                inside.remove(number)
            world.sleep(world.chance.random())

    def main() -> None:
        lock = Lock(world)
        threads = [Thread(world, work, (n, lock)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done.append(True)

    done: list[bool] = []
    world.spawn(0, main)
    world.run(lambda: bool(done), 1000.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory"),
        ("hello\n", r"not a scenario \('machine'\)"),
        ("machine spam\nseed 1\n", r"not a scenario \('spam'\)"),
        ("machine groups\nseed x\n", "not a scenario .*'x'"),
    ],
)
def test_a_file_without_a_scenario_is_refused_in_one_line(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "scenario.txt"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("sys.argv", ["simulation", str(path)])
    with pytest.raises(SystemExit):
        main()
    *_, line = capsys.readouterr().err.splitlines()
    assert re.search(f"{re.escape(str(path))}: {said}.*name a file with a scenario", line)

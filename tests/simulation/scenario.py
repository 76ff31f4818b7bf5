"""A scenario: what a simulation is made of, and the faults in it, as text with one a line."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

FAULTS = {
    "kill": "process",
    "start": "process",
    "stop": "process seconds",
    "reset": "process process",
    "cut": "process process seconds",
    "unstore": "process seconds",
}
"""Each fault and its arguments.

A process is killed; its next incarnation is started; it is suspended; all connections between two
processes are lost, and renewed if both live; nothing passes between two processes; a process does
not reach the store.
"""


CONNECTED_S = 3.0
"""Seconds in which all processes have connected if nothing prevents them."""


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time, in seconds from the beginning."""

    at: float
    kind: str
    where: tuple[int, ...]
    seconds: float = 0.0

    def __str__(self) -> str:
        last = (f"{self.seconds:.3f}",) if "seconds" in FAULTS[self.kind] else ()
        return " ".join([f"{self.at:.3f}", self.kind, *map(str, self.where), *last])

    @staticmethod
    def parse(line: str) -> Fault:
        at, kind, *rest = line.split()
        count = FAULTS[kind].split().count("process")
        if len(rest) != len(FAULTS[kind].split()):
            raise ValueError(f"{line!r}: {kind} has the arguments: {FAULTS[kind]}")
        return Fault(float(at), kind, tuple(map(int, rest[:count])), float((*rest, 0)[count]))


@dataclass(frozen=True)
class Scenario:
    """A machine, its options, a seed for all that is random, and faults in the order of time."""

    machine: str
    seed: int
    options: tuple[tuple[str, str], ...] = ()
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        lines = [f"machine {self.machine}", f"seed {self.seed}"]
        lines += [f"{name} {value}" for name, value in self.options]
        return "\n".join([*lines, *map(str, self.faults)]) + "\n"

    @staticmethod
    def parse(text: str) -> Scenario:
        words, faults = {}, []
        for line in text.splitlines():
            line = line.partition("#")[0].strip()
            if line and line[0].isdigit():
                faults.append(Fault.parse(line))
            elif line:
                name, _, value = line.partition(" ")
                words[name] = value.strip()
        machine, seed = words.pop("machine"), int(words.pop("seed"))
        return Scenario(machine, seed, tuple(words.items()), tuple(faults))

    @property
    def kills_only(self) -> bool:
        """Whether processes are at most killed and started, beside what no process may notice.

        None of them while it connects.
        """
        return all(
            (fault.kind == "kill" and fault.at >= CONNECTED_S)
            or fault.kind in ("start", "reset")
            or (fault.kind == "unstore" and fault.seconds < 1.0)
            for fault in self.faults
        )

    def with_faults(self, faults: Iterable[Fault]) -> Scenario:
        return replace(self, faults=tuple(faults))


@dataclass(frozen=True)
class FaultRates:
    """How many faults of each kind there are, and between which processes.

    Attributes:
        killable: the processes that may be killed.
        startable: those of them that may return.
        processes: those that may be stopped.
        pairs: those whose connections may be lost or cut.
        stop_s, cut_s, store_s: bounds of durations, in seconds; 0 for no such fault.
        until: the last fault begins before.
    """

    processes: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    until: float
    killable: tuple[int, ...] = ()
    startable: tuple[int, ...] = ()
    stop_s: float = 0.0
    cut_s: float = 0.0
    store_s: float = 0.0
    resets: bool = True


def draw_faults(rates: FaultRates, chance: random.Random, most: int) -> tuple[Fault, ...]:
    """Draw up to ``most`` faults; every second time, only those of `Scenario.kills_only`."""
    since = 0.0
    if rates.killable and chance.random() < 0.5:
        rates = replace(rates, stop_s=0.0, cut_s=0.0, store_s=min(rates.store_s, 0.9))
        since = CONNECTED_S
    kinds = ["reset"] * bool(rates.resets and rates.pairs)
    kinds += ["kill"] * bool(rates.killable)
    kinds += ["stop"] * bool(rates.stop_s)
    kinds += ["cut"] * bool(rates.cut_s and rates.pairs)
    kinds += ["unstore"] * bool(rates.store_s)
    faults: list[Fault] = []
    back: dict[int, float] = {}  # when a killed process lives again
    count = chance.randint(0, most) if kinds else 0
    for at in sorted(round(chance.uniform(since, since + rates.until), 3) for _ in range(count)):
        kind = chance.choice(kinds)
        if kind == "kill":
            left = [p for p in rates.killable if back.get(p, 0.0) < at]
            if len(left) <= 1:
                continue
            who = chance.choice(left)
            back[who] = math.inf
            faults.append(Fault(at, "kill", (who,)))
            if who in rates.startable and chance.random() < 0.8:
                back[who] = round(at + chance.choice([3.0, 30.0]) * chance.uniform(0.1, 1.0), 3)
                faults.append(Fault(back[who], "start", (who,)))
        elif kind in ("reset", "cut"):
            seconds = round(_duration(chance, rates.cut_s), 3) if kind == "cut" else 0.0
            faults.append(Fault(at, kind, chance.choice(rates.pairs), seconds))
        else:
            longest = rates.stop_s if kind == "stop" else rates.store_s
            who = chance.choice(rates.processes)
            faults.append(Fault(at, kind, (who,), round(_duration(chance, longest), 3)))
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _duration(chance: random.Random, longest: float) -> float:
    """Return a duration, of which many are short."""
    return longest * chance.random() ** 3

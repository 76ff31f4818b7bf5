"""Runs of a lab as the tests want them: lines by rank, and flows measured between hosts."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from wingbeat_lab import lab
from wingbeat_lab.bench.machine import stolen_seconds

FLOW = Path(__file__).with_name("flow.py")
Flow = tuple[int, int, str, int]
TRIES = 5
"""Of what needs a quiet machine, before it is given up."""


@dataclass
class Ran:
    """A finished run and what each rank printed."""

    result: lab.RunResult
    lines: dict[int, list[str]] = field(default_factory=dict)


@dataclass
class Measured:
    """Rates on the wire in bit/s: of each flow while it lasted, and of all over the whole time.

    ``given`` is the share of the flows' time that this machine surely had: while its own host gives
    a processor to others no timer fires, and a token bucket that is full by then loses what it was
    due. What was slow by no more says nothing about links; upper bounds know no excuse.
    """

    rates: list[float]
    together: float
    stats: lab.LabStats
    given: float


@pytest.fixture
def run_lab() -> Callable[..., Ran]:
    def run(spec: str, command: list[str], **options: Any) -> Ran:
        lines: dict[int, list[str]] = defaultdict(list)
        options.setdefault("timeout", 60)
        result = lab.run(
            spec, command, on_line=lambda rank, line: lines[rank].append(line), **options
        )
        return Ran(result, lines)

    return run


@pytest.fixture
def run_python(run_lab: Callable[..., Ran]) -> Callable[..., Ran]:
    """Run a piece of Python on every host."""

    def run(spec: str, code: str, **options: Any) -> Ran:
        return run_lab(spec, [sys.executable, "-S", "-c", code], **options)

    return run


@pytest.fixture
def measure(run_lab: Callable[..., Ran]) -> Callable[..., Measured]:
    """Run simultaneous flows (source, target, address, TOS)."""

    def run(spec: str, flows: list[Flow], seconds: float = 1.2, **options: Any) -> Measured:
        command = [sys.executable, "-S", str(FLOW), str(seconds), json.dumps(flows)]
        stolen = stolen_seconds()
        ran = run_lab(spec, command, **options)
        assert ran.result.exit_code == 0, ran
        stolen = stolen_seconds() - stolen
        reports: list[dict[str, float]] = [{} for _ in flows]
        for line in (line for lines in ran.lines.values() for line in lines):
            report = json.loads(line)
            reports[report["flow"]].update(report)
        whole = max(r["ended"] for r in reports) - min(r["began"] for r in reports)
        return Measured(
            [r["bits"] / (r["ended"] - r["began"]) for r in reports],
            sum(r["bits"] for r in reports) / whole,
            ran.result.stats,
            max(0.0, 1 - stolen / whole),
        )

    return run


@pytest.fixture
def measure_quietly(measure: Callable[..., Measured]) -> Callable[..., Measured]:
    """The same, again if it is not fast ``enough`` and the machine was not quiet."""

    def run(*args: Any, enough: Callable[[Measured], bool], **options: Any) -> Measured:
        for _ in range(TRIES):
            measured = measure(*args, **options)
            if measured.given >= 0.99 or enough(measured):
                return measured
        pytest.skip(f"others had this machine's processors in each of {TRIES} tries")

    return run

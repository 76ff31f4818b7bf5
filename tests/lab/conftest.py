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

from wingbeat import lab

FLOW = Path(__file__).with_name("flow.py")
Flow = tuple[int, int, str, int]


@dataclass
class Ran:
    """A finished run and what each rank printed."""

    result: lab.RunResult
    lines: dict[int, list[str]] = field(default_factory=dict)


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
def measure(run_lab: Callable[..., Ran]) -> Callable[..., tuple[list[float], lab.LabStats]]:
    """Rates on the wire in bit/s of simultaneous flows (source, target, address, TOS)."""

    def run(
        spec: str, flows: list[Flow], seconds: float = 1.2, **options: Any
    ) -> tuple[list[float], lab.LabStats]:
        command = [sys.executable, "-S", str(FLOW), str(seconds), json.dumps(flows)]
        ran = run_lab(spec, command, **options)
        assert ran.result.exit_code == 0, ran
        reports = [json.loads(line) for lines in ran.lines.values() for line in lines]
        return [r["rate"] for r in sorted(reports, key=lambda r: r["flow"])], ran.result.stats

    return run

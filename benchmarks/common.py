"""What several benchmarks share: a paper's tables, and how figures are kept."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from wingbeat.errors import UsageError, WingbeatError
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.printed import Printed
from wingbeat_lab.cli.bench import check_writable

GERYON_TABLES = {
    10.0: {
        "alexnet": (0.364, 0.802, 0.954),
        "vgg19": (0.269, 0.793, 0.946),
        "resnet50": (0.876, 0.900, 0.957),
        "yolo": (0.209, 0.758, 0.915),
    },
    40.0: {
        "alexnet": (0.794, 0.900, 0.951),
        "vgg19": (0.617, 0.853, 0.948),
        "resnet50": (0.941, 0.941, 0.961),
        "yolo": (0.532, 0.842, 0.936),
    },
}
"""Geryon's Tables II and III, eight workers: scaling efficiency of vanilla, partition and slicing,
Geryon, by Gbit/s and model."""


BEGIN_ANEW = "leave --add out to begin anew"


def refuse_unwritable(path: Path) -> None:
    """End this program, before anything is measured, if what is found cannot be kept."""
    try:
        check_writable(path)
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def at_least_one(text: str) -> int:
    """Return a number of the command line that has to be 1 or more.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are whole numbers from 1 on")
    return int(text)


def measured_before(path: Path, key: str, remedy: str) -> list[Any]:
    """Return what an earlier run has kept there; end this program if there is no such thing.

    The line that says so ends with the ``remedy``.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kept = found[key]
    except (OSError, ValueError, KeyError, TypeError):
        kept = None
    if not isinstance(kept, list):
        print(
            f"{Path(sys.argv[0]).name}: {path} has no {key!r} of an earlier run; {remedy}",
            file=sys.stderr,
        )
        sys.exit(2)
    return kept


def write(path: Path, report: dict[str, Any]) -> None:
    """Keep what there is; called after each part, so that nothing measured is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def show(report: dict[str, Any], table: Printed) -> None:
    """Print a table, and add it to what the report keeps for the documentation."""
    report.setdefault("tables", []).append(table.to_json())
    print(f"\n{table.text()}", flush=True)


FAILED = 3
"""Exit code of a measurement that was not completed; 1 means that a limit is missed."""


def run_and_judge(path: Path, measure: Callable[[dict[str, Any]], list[str]]) -> int:
    """Measure, and print what is missed; return the exit code of a program that does only this.

    Args:
        path: where the report will be kept, which is made sure of first.
        measure: fills the report, and keeps it by `write`; returns which limits are missed.
    """
    end_as_by_ctrl_c()
    report: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
    report["command"] = sys.argv
    try:
        check_writable(path)
        missed = measure(report)
    except WingbeatError as err:
        print(f"{Path(sys.argv[0]).name}: {err}", file=sys.stderr)
        return 2 if isinstance(err, UsageError) else FAILED
    for line in missed:
        print(f"MISSED: {line}")
    return int(bool(missed))


def end_as_by_ctrl_c() -> None:
    """Let a SIGTERM clean up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt

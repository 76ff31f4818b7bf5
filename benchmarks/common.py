"""Shared by several benchmarks: a paper's tables, and the report files."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from wingbeat.errors import UsageError, WingbeatError
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.cli.bench import check_writable
from wingbeat_lab.lab import LabSpec

if TYPE_CHECKING:
    from wingbeat.transport.messages import Mailbox, Message, Posted

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
    """End this program before any measurement if its report cannot be written."""
    try:
        check_writable(path)
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def at_least_one(text: str, least: int = 1) -> int:
    """Parse a whole number that must be 1, or ``least``, or more."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are whole numbers from {least} on")
    return int(text)


def at_least_two(text: str) -> int:
    """Parse a number that must be 2 or more."""
    return at_least_one(text, 2)


def lab_of_replicas(text: str) -> LabSpec:
    """Parse a lab whose hosts are replicas.

    A `UsageError` if it has fewer than two, a `LabError` if there is no such lab.
    """
    spec = LabSpec.parse(text)
    if spec.hosts < 2:
        raise UsageError(f"--lab {text}: allowed are two hosts or more; each is a replica")
    return spec


def measured_before(path: Path, key: str, remedy: str) -> list[Any]:
    """Return the report of an earlier run; end this program if there is none.

    The message ends with the ``remedy``.
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
    """Write the report; called after each part, so that no measurement is lost."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def show(report: dict[str, Any], table: Printed) -> None:
    """Print a table, and add it to the report for the documentation."""
    report.setdefault("tables", []).append(table.to_json())
    print(f"\n{table.text()}", flush=True)


FAILED = 3
"""Exit code of a measurement that was not completed; 1 means a missed limit."""


def run_and_judge(path: Path, measure: Callable[[dict[str, Any]], list[str]]) -> int:
    """Measure, and print the missed limits; return the program's exit code.

    Args:
        path: of the report; checked first.
        measure: fills the report, saves it by `write` and returns the missed limits.
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


def receive(box: Mailbox, seconds: float = 60.0) -> Message:
    """Return the next message of a mailbox; exit if there is none in time."""
    deadline = time.monotonic() + seconds
    while (message := box.next(max(0.0, deadline - time.monotonic()))) is None:
        if time.monotonic() >= deadline:
            raise SystemExit(f"no message within {seconds:g} s")
    return message


def arrive(posted: Iterable[Posted], seconds: float = 60.0) -> None:
    """Wait until messages have arrived; exit if they have not in time."""
    deadline = time.monotonic() + seconds
    for each in list(posted):
        while not each.arrived:
            if time.monotonic() >= deadline:
                raise SystemExit(f"a message has not arrived within {seconds:g} s")
            time.sleep(0.001)

"""Runs the tests: most of them several at a time, then one by one those that measure time.

The last line printed is in pytest's form and counts both runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

NOTHING_FOUND = 5
"""pytest's status where no test was selected."""

COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)")

ENVIRONMENT = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
"""Hundreds of processes load wingbeat: it is compiled once. Each has a core or less to itself."""


def run(marks: str, options: Sequence[str], **variables: str) -> tuple[int, Counter[str]]:
    """Run the tests of these marks; return the status and what the closing line counts."""
    color = "yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "auto"
    command = [sys.executable, "-m", "pytest", "-m", marks, f"--color={color}", *options]
    environment, closing = ENVIRONMENT | variables, ""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            closing = line if COUNT.search(line) else closing
    counts = Counter({what: int(number) for number, what in COUNT.findall(closing)})
    return (0 if process.returncode == NOTHING_FOUND else process.returncode), counts


def run_both(marks: str, chosen: Sequence[str]) -> tuple[int, Counter[str]]:
    """Run what can share the machine, then the rest; the worse status and all counts."""
    workers = min(4, 2 * (os.cpu_count() or 1))  # many tests wait for deadlines
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "alone"
        first, counts = run(
            f"({marks}) and not alone",
            ["-n", str(workers), "--dist", "worksteal", *chosen],
            WINGBEAT_TEST_ALONE_FILES=str(listed),
        )
        # To load all files again takes as long as many of these tests.
        files = listed.read_text(encoding="utf-8").split("\n") if listed.exists() else []
    if chosen or files:
        second, others = run(f"({marks}) and alone", chosen or files)
        counts.update(others)
        first = first or second
    return first, counts


def main() -> int:
    """Run both halves, and say together how it went."""
    began = time.monotonic()
    status, counts = run_both(sys.argv[1], sys.argv[2:])
    counts.pop("deselected", None)
    if not counts:
        print("no tests were selected", file=sys.stderr)
        return status or NOTHING_FOUND
    told = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{'=' * 20} {told} in {time.monotonic() - began:.2f}s {'=' * 20}")
    return status


if __name__ == "__main__":
    sys.exit(main())

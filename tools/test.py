"""Runs the tests: most of them two at a time, then one by one those that measure time.

The last line printed is in pytest's form and counts both runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter

NOTHING_FOUND = 5
"""pytest's status where no test was selected."""

COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)")


def run(marks: str, *options: str) -> tuple[int, Counter[str]]:
    """Run the tests of these marks; return the status and what the closing line counts."""
    color = "yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "auto"
    command = [sys.executable, "-m", "pytest", "-m", marks, f"--color={color}", *options]
    command += sys.argv[2:]
    closing = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            closing = line if COUNT.search(line) else closing
    counts = Counter({what: int(number) for number, what in COUNT.findall(closing)})
    return (0 if process.returncode == NOTHING_FOUND else process.returncode), counts


def main() -> int:
    """Run both halves, and say together how it went."""
    marks, began = sys.argv[1], time.monotonic()
    workers = min(4, os.cpu_count() or 1)
    first, counts = run(f"({marks}) and not alone", "-n", str(workers), "--dist", "worksteal")
    second, others = run(f"({marks}) and alone")
    counts.update(others)
    counts.pop("deselected", None)
    if not counts:
        print("no tests were selected", file=sys.stderr)
        return NOTHING_FOUND
    told = ", ".join(f"{number} {what}" for what, number in counts.items())
    print(f"{'=' * 20} {told} in {time.monotonic() - began:.2f}s {'=' * 20}")
    return first or second


if __name__ == "__main__":
    sys.exit(main())

"""Writes docs/developers/ddp-suite.md from the table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .table import ROWS, STRATEGIES, Row, Verdict

_HEAD = """# PyTorch's own tests of DDP

PyTorch's tests of DistributedDataParallel are inside the installed package, in
`torch/testing/_internal/distributed/distributed_test.py`. {count} of them name DDP or Join: the
name has `ddp` or `join` in it, or the body names `DistributedDataParallel`, `DDP` or `Join`.
`tests/peers` runs them with wingbeat in DDP's place, behind an adapter with DDP's interface over
`distribute`. The tests are imported from torch, not copied. Two processes run them over gloo on
the CPU, which is every rank's device there.

A test *applies* if DDP itself passes it in the same harness, and if it does not use DDP's internals
(its reducer, its logging data, the text of its errors). Of {count} tests, {applies}
apply:

| | passes | refused | fails |
|---|---|---|---|
{summary}

*Refused* means that wingbeat raises an error with the quoted text. A test that *fails* is a known
defect; the suite reports it as soon as it passes. Run them with

```sh
make test TESTS=tests/peers       # tests that pass, in seconds
make test-slow TESTS=tests/peers  # tests that are refused, fail or take long, and DDP itself
```

This page is generated from `tests/peers/table.py`, and a test compares the two. Another test fails
when a new PyTorch has tests of DDP that are not in the table. The order is that of PyTorch 2.15;
tests that an older release lacks are skipped.
"""

_KINDS = ("passes", "refused", "fails")


def _cell(verdict: Verdict) -> str:
    return verdict.kind if not verdict.words else f"{verdict.kind}: {_quoted(verdict)}"


def _quoted(verdict: Verdict) -> str:
    return f'"{verdict.words}"' if verdict.kind == "refused" else verdict.words


def _line(name: str, row: Row) -> str:
    cells = [_cell(row.verdict(strategy)) for strategy in STRATEGIES]
    return f"| `{name}` | {' | '.join(cells)} | {row.note} |"


def text() -> str:
    """The page."""
    summary = []
    for strategy, title in zip(STRATEGIES, ("AllReduce", "DeAR"), strict=True):
        counts = Counter(row.verdict(strategy).kind for row in ROWS.values() if row.applies)
        summary.append(f"| {title} | " + " | ".join(str(counts[kind]) for kind in _KINDS) + " |")
    applying = {name: row for name, row in ROWS.items() if row.applies}
    head = _HEAD.format(count=len(ROWS), applies=len(applying), summary="\n".join(summary))
    lines = [
        head,
        "## What applies\n",
        "| test | AllReduce | DeAR | note |",
        "|---|---|---|---|",
        *(_line(name, row) for name, row in applying.items()),
        "",
        "## What does not apply\n",
        "| test | because |",
        "|---|---|",
        *(f"| `{name}` | {row.why_not} |" for name, row in ROWS.items() if not row.applies),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "developers" / "ddp-suite.md").write_text(text())

"""A small Llama trained by the HF Trainer on slow links: its own DDP, DeAR and a sketch.

    python benchmarks/finetune.py --rate 100mbit --json out/finetune.json

Each row trains the model of ``examples/finetune.py`` from the same weights, on the same batches of
real text, on emulated hosts with one core each. The table has milliseconds of a step, megabytes
that a worker sends in it, by the kernel's counters, and the loss on held-out text.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import run_and_judge, show, write

from wingbeat.errors import LabError
from wingbeat_lab import lab
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab import counters

ROWS = ("ddp", "dear:plan=fixed,mb=1", "dear:plan=fixed,mb=1,compression=sketch:auto_disable=false")
EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune.py"
CLOSE = 1e-3
"""Allowed difference of DeAR's loss from DDP's."""


def train(row: str, steps: int, folder: Path) -> None:
    """Train one row as a worker of a lab; rank 0 writes its results to ``folder``."""
    import torch
    from transformers import TrainerCallback

    class Counting(TrainerCallback):
        """Counts from the third step on: the first ones connect and build buckets."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
            if state.global_step in (2, steps):
                self.seen = [*getattr(self, "seen", []), (time.monotonic(), sent())]

    spec = importlib.util.spec_from_file_location("finetune_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.set_num_threads(1)
    trainer, counting = example.trainer(row, str(folder), steps), Counting()
    trainer.add_callback(counting)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    (begun, before), (ended, after) = counting.seen
    if os.environ["RANK"] == "0":
        found = {
            "row": row,
            "step_ms": (ended - begun) / (steps - 2) * 1e3,
            "sent_mb": (after - before) / (steps - 2) / 1e6,
            "loss": loss,
        }
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def sent() -> float:
    """Bytes sent by this host."""
    return float(sum(each.tx_bytes for name, each in counters.read().items() if name != "lo"))


def measured(args: argparse.Namespace, row: str) -> dict[str, Any]:
    """Train one row in a lab."""
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        ended = lab.run(
            f"star:{args.hosts}@{args.rate}",
            [sys.executable, __file__, "--worker", row, "--steps", str(args.steps), folder],
            timeout=args.timeout,
            on_line=lambda rank, line: said.append(f"[{rank}] {line}"),
        )
        if ended.exit_code:
            print("\n".join(said[-40:]), file=sys.stderr)
            raise LabError(f"{row}: {ended.first_failure or ended.exit_code}")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Fill the report, and print it; return the missed limits."""
    report |= {"lab": f"star:{args.hosts}@{args.rate}", "steps": args.steps, "rows": []}
    for row in args.rows:
        report["rows"].append(measured(args, row))
        write(args.json, report)
    show(report, table(report))
    write(args.json, report)
    losses = {each["row"]: each["loss"] for each in report["rows"]}
    return [
        f"{row}: loss {loss:.4f}, DDP's is {losses['ddp']:.4f}"
        for row, loss in losses.items()
        if "compression" not in row and "ddp" in losses and abs(loss - losses["ddp"]) > CLOSE
    ]


COLUMNS = ("strategy", "step, ms", "times the first's speed", "sent, MB", "held-out loss")


def table(report: dict[str, Any]) -> Printed:
    first = report["rows"][0]["step_ms"]
    cells = [
        (
            row["row"],
            f"{row['step_ms']:.0f}",
            f"{first / row['step_ms']:.2f}",
            f"{row['sent_mb']:.2f}",
            f"{row['loss']:.3f}",
        )
        for row in report["rows"]
    ]
    notes = [f"mean of {report['steps'] - 2} steps; sent: by one worker in a step"]
    return Printed.of(f"HF Trainer, a small Llama on {report['lab']}", COLUMNS, cells, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--hosts", type=int, default=2, help="workers, of a core each (2)")
    parser.add_argument("--rate", default="100mbit", help="of each link (100mbit)")
    parser.add_argument("--steps", type=int, default=100, help="of each row (100)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a row (900)")
    parser.add_argument("--json", type=Path, default=Path("out/finetune.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path, nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args.worker, args.steps, args.folder)
        return 0
    if reason := lab.available():
        print(f"finetune.py: {reason}", file=sys.stderr)
        return 2
    return run_and_judge(args.json, functools.partial(measure, args))


if __name__ == "__main__":
    sys.exit(main())

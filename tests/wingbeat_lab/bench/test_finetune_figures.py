"""What ``benchmarks/finetune.py`` judges, and the rows of Accelerate and the HF Trainer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.scripts import benchmark


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ({"ddp": 2.0, "dear": 2.0005, "dear:compression=sketch": 2.3}, []),
        ({"ddp": 2.0, "dear:mb=1": 2.1}, ["dear:mb=1: loss 2.1000, DDP's is 2.0000"]),
        ({"dear": 2.1}, []),
    ],
)
def test_dear_has_ddps_loss(
    losses: dict[str, float],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with benchmark("finetune") as module:

        def found(_args: Any, row: str) -> dict[str, Any]:
            step = 200.0 if row == "ddp" else 100.0
            return {"row": row, "step_ms": step, "sent_mb": 1.0, "loss": losses[row]}

        monkeypatch.setattr(module, "measured", found)
        path = tmp_path / "found.json"
        args = argparse.Namespace(hosts=2, rate="1gbit", steps=3, rows=list(losses), json=path)
        report: dict[str, Any] = {}
        assert module.measure(args, report) == said
    (table,) = json.loads(path.read_text())["tables"]
    assert [row[0] for row in table["rows"]] == list(losses)
    assert [row[2] for row in table["rows"]] == ["1.00", *["2.00"] * (len(losses) - 1)]

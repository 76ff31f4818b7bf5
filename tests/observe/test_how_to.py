"""The how-to's Python runs, block after block, as a reader would type it."""

from __future__ import annotations

import re
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wingbeat.observe.events import stream

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md"


def _script(rank: int) -> dict[str, Any]:
    """What a training script has by then; each backward waits for a millisecond."""
    clock = count(time.monotonic_ns(), 10_000_000)

    def backward() -> None:
        begin = next(clock)
        stream.record("wait", begin, begin + 1_000_000, bucket=0)

    return {
        "rank": rank,
        "loader": [(1, 1)] * 3,
        "model": lambda x: x,
        "loss_fn": lambda out, y: SimpleNamespace(backward=backward),
        "optimizer": SimpleNamespace(zero_grad=lambda: None, step=lambda: None),
    }


def test_the_pages_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8").partition("## Timeline of iterations")[2]
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    record, rest = blocks[0], blocks[1:]
    assert len(rest) == 3
    for rank in (1, 0):
        exec(record, _script(rank))
    space: dict[str, Any] = {"stream": stream, "tensor": np.ones(4), "exchange": lambda _: None}
    for block in rest:
        exec(block, space)
    assert "3.0 ms in all" in capsys.readouterr().out
    assert Path("out/timeline.png").stat().st_size > 10_000
    assert len(space["events"]) == 2 * 3 * (3 + 1)

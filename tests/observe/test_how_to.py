"""The how-to's Python runs, block after block, as a reader would type it."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from wingbeat.observe.events import stream

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "timeline.md"


_clock = count(10**12, 10**10)


def _train_step(x: int, y: int) -> None:
    begin = next(_clock)
    stream.record("forward", begin, begin + x)
    stream.record("wait", begin + x, begin + x + y)
    stream.record("step", begin + x, begin + x + y)


def test_the_pages_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    record, rest = blocks[0], blocks[1:]
    assert len(rest) == 3
    space: dict[str, Any] = {"train_step": _train_step, "loader": [(4_000_000, 1_000_000)] * 3}
    for rank in (1, 0):
        exec(record, space | {"rank": rank})
    space.update(stream=stream, x=4_000_000, y=1_000_000)
    for block in rest:
        exec(block, space)
    assert "3.0 ms in all" in capsys.readouterr().out
    assert Path("out/timeline.png").stat().st_size > 10_000
    assert len(space["events"]) == 2 * 3 * 3

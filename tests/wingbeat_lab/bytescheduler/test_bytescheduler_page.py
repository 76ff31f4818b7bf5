"""``docs/developers/bytescheduler.md``: its comparison runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/developers/bytescheduler.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_comparison_on_the_page_prints_a_time_for_each_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage, comparison = EXAMPLES
    assert "wingbeat_lab.ByteScheduler()" in usage
    exec(compile(comparison, str(PAGE), "exec"), {"__name__": "page"})
    assert len(re.findall(r": \d+ ms an iteration", capsys.readouterr().out)) == 4

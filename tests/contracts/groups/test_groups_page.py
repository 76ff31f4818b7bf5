"""``docs/how-to/hosts.md``: the survivors of a group print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/how-to/hosts.md"
TEXT = PAGE.read_text(encoding="utf-8").partition("## Groups of workers")[2].partition("\n## ")[0]
_, FAILING = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
[SHOWN] = re.findall(r"```text\n(rank 0: .*)\n```", TEXT)


def test_survivors_go_on_and_say_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(FAILING, str(PAGE), "exec"), {"__name__": "page"})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    by_rank_0 = next(line for line in said if line.startswith("rank 0: "))
    assert (
        re.sub(r"\d+\.\d s", "0.0 s", by_rank_0).replace(" (noticed through rank 1)", "") == SHOWN
    )

"""``docs/how-to/hosts.md``: its examples run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import wingbeat
from wingbeat.transport import loopback
from wingbeat.transport.world import World

PAGE = Path(__file__).parents[3] / "docs/how-to/hosts.md"
TEXT = PAGE.read_text(encoding="utf-8").partition("## Groups of workers")[2].partition("\n## ")[0]
SUMMING, FAILING = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
[SHOWN] = re.findall(r"```\n(rank 0: .*)\n```", TEXT)


def test_members_sum_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> list[float] | None:
        class Here:  # what the example finds under the name of wingbeat
            Group = wingbeat.Group
            init = staticmethod(lambda: world)

        names: dict[str, Any] = {"wingbeat": Here}
        exec(compile(SUMMING.replace("import wingbeat\n", "", 1), str(PAGE), "exec"), names)
        return names["x"].unique().tolist() if "x" in names else None

    members = loopback.worlds(4, timeout=20)
    assert loopback.run(members, body) == [[5.0], None, [5.0], [5.0]]
    for world in members:
        world.close()


def test_survivors_go_on_and_say_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(FAILING, str(PAGE), "exec"), {"__name__": "page"})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    by_rank_0 = next(line for line in said if line.startswith("rank 0: "))
    assert (
        re.sub(r"\d+\.\d s", "0.0 s", by_rank_0).replace(" (noticed through rank 1)", "") == SHOWN
    )

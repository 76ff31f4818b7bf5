"""``docs/developers/messages.md``: its example runs, and its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from helpers.headers import REASONS, Type
from wingbeat.transport import loopback
from wingbeat.transport.messages.frames import HEADER_BYTES
from wingbeat.transport.world import World

PAGE = Path(__file__).parents[3] / "docs/developers/messages.md"
TEXT = PAGE.read_text(encoding="utf-8")
[EXAMPLE] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_example_runs_as_it_stands_there(capsys: pytest.CaptureFixture[str]) -> None:
    def body(world: World) -> None:
        class Here:  # what the example finds under the name of wingbeat
            init = staticmethod(lambda: world)

        names: dict[str, Any] = {"wingbeat": Here}
        exec(compile(EXAMPLE.replace("import wingbeat\n", "", 1), str(PAGE), "exec"), names)

    worlds = loopback.worlds(3, timeout=20)
    loopback.run(worlds, body)
    for world in worlds:
        world.close()
    assert capsys.readouterr().out.splitlines() == 2 * ["[0. 1. 2. 3. 4. 5. 6. 7. 8. 9.]"]


def test_the_layout_is_the_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+)(?: each)? \| (\w+) \|", TEXT, re.MULTILINE)
    place = 0
    for byte, size, _ in rows:
        assert int(byte) == place
        place += int(size)
    assert rows[-1] == (str(HEADER_BYTES), "16", "ranges")
    types = re.search(r"\| type \| (.*) \|", TEXT)
    assert types is not None
    assert types[1] == ", ".join(f"{int(each)} {each.name.lower()}" for each in Type)


def test_every_reason_is_explained() -> None:
    """Those of the header, and those that the code raises anywhere else."""
    root = Path(__file__).parents[3]
    sources = [
        root / f"native/src/{name}.cpp" for name in ("header", "flow", "endpoint", "carrier")
    ]
    raised = {
        reason
        for path in sources
        for reason in re.findall(
            r'(?:Malformed\(|return |fail\([^"]*)"(\w+)"', path.read_text(encoding="utf-8")
        )
    }
    assert raised >= set(REASONS)
    table = TEXT[TEXT.index("| reason | what came |") :]
    for reason in raised:
        assert f"`{reason}`" in table, f"{PAGE.name} does not explain {reason!r}"

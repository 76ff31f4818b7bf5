"""The command of ``docs/how-to/plan.md`` that probes a cluster runs on two emulated hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from helpers.code_blocks import blocks_of
from wingbeat.prediction import cluster
from wingbeat_lab import lab

PAGE = Path(__file__).parents[2] / "docs/how-to/plan.md"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_probe_started_by_a_torchrun_on_each_host_writes_the_file_of_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [block] = [each for each in blocks_of(PAGE) if each.word("elsewhere")]
    command = block.code.replace("node1", "h0")
    assert command != block.code, "the page names another host"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    done = lab.run(
        "star:2@100mbit",
        ["bash", "-eu", "-c", command],
        timeout=250,
        on_line=lambda _, line: lines.append(line),
    )
    assert done.exit_code == 0, lines
    text = (tmp_path / "cluster.toml").read_text(encoding="utf-8")
    found = cluster.decode(text, "cluster.toml")
    assert len(found.layout.hosts) == 2
    assert 'rate = "1' in text or 'rate = "9' in text, text  # 101mbit, or somewhat less

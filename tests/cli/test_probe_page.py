"""The command of ``docs/how-to/plan.md`` that probes a cluster runs on two emulated hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.code_blocks import blocks_of, run_in_lab
from wingbeat.prediction import cluster

PAGE = Path(__file__).parents[2] / "docs/how-to/plan.md"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_probe_started_by_a_torchrun_on_each_host_writes_the_file_of_the_lab(
    tmp_path: Path,
) -> None:
    [block] = [each for each in blocks_of(PAGE) if each.word("elsewhere")]
    done, said = run_in_lab(block, "star:2@100mbit", tmp_path, 250)
    assert done.exit_code == 0, said
    text = (tmp_path / "cluster.toml").read_text(encoding="utf-8")
    found = cluster.decode(text, "cluster.toml")
    assert len(found.layout.hosts) == 2
    assert 'rate = "1' in text or 'rate = "9' in text, text  # 101mbit, or somewhat less

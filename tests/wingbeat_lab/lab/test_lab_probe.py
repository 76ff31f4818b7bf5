"""``wingbeat probe`` in a lab that is started from a cluster file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wingbeat.profiling.cluster import Cluster, Nic, ProbedHost
from wingbeat_lab.lab.spec import LabSpec

pytestmark = [pytest.mark.lab, pytest.mark.alone, pytest.mark.slow]

RATES = ((100e6, 100e6), (100e6, 100e6), (100e6, 30e6))


def test_probe_writes_about_the_file_from_which_its_lab_was_started(
    run_lab: Callable[..., Any], tmp_path: Path
) -> None:
    given, made = tmp_path / "given.toml", tmp_path / "made.toml"
    nics = [tuple(Nic(f"eth{n}", rate, 0) for n, rate in enumerate(own)) for own in RATES]
    hosts = tuple(ProbedHost(f"h{h}", 2, own) for h, own in enumerate(nics))
    given.write_text(Cluster(hosts).to_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "wingbeat.cli.main", "probe", "--out", str(made)]
    ran = run_lab(str(given), command, per_host=2, timeout=120)
    assert ran.result.exit_code == 0, ran
    spec = LabSpec.parse(made)
    assert (spec.kind, spec.hosts, spec.rails) == ("star", 3, 2)
    for h, own in enumerate(RATES):
        for n, rate in enumerate(own):
            assert spec.link_rate(h, n) == pytest.approx(rate, rel=0.1)
    text = made.read_text(encoding="utf-8")
    assert text.count("ranks = 2") == 3
    assert text.count('name = "eth1"') == 3

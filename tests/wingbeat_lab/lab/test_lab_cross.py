"""Cross-traffic on a fat-tree's trunks: as much as asked, best effort, and gone with the lab."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wingbeat.errors import LabError
from wingbeat_lab.lab.cross import Sample

Run = Callable[..., Any]
SPEC = "fat-tree:2/1@200mbit+100mbit,prio=2,cross=60mbitx3"

FIND = """if True:
    import os, pathlib
    found = [int(p.parent.name) for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")
             if b"wingbeat_lab.lab.cross" in p.read_bytes() and int(p.parent.name) != os.getpid()]
"""


def rate(samples: list[Sample]) -> float:
    """Bits per second between the first and the last look that found the flows at work."""
    first, last = samples[len(samples) // 3], samples[-1]
    return 8 * (last.bytes - first.bytes) / (last.when - first.when)


@pytest.mark.lab
@pytest.mark.alone
def test_cross_traffic_reaches_its_rate_each_way_and_is_best_effort(run_lab: Run) -> None:
    result = run_lab(SPEC, ["sleep", "3"]).result
    assert sorted(result.cross) == ["x0", "x1"]
    for samples in result.cross.values():
        assert 0.8 * 60e6 < rate(samples) < 1.1 * 60e6
    for classes in result.stats.trunks.values():
        assert classes["be"].bytes > 10_000_000 > 10_000 > classes["ef"].bytes
    # It shares no link of a host that trains.
    assert result.stats.hosts["h0"]["eth0"].interface.rx_bytes < 10_000


@pytest.mark.lab
def test_without_cross_traffic_there_is_none(run_lab: Run) -> None:
    result = run_lab("fat-tree:2/1@200mbit+100mbit", ["true"]).result
    assert result.cross == {}
    assert sorted(result.stats.hosts) == ["h0", "h1"]


@pytest.mark.lab
def test_a_generator_that_dies_ends_the_run_by_name(run_python: Run) -> None:
    kill = FIND + "    [os.kill(pid, 9) for pid in found[:1]]\n    import time; time.sleep(60)\n"
    with pytest.raises(LabError, match=r"cross-traffic on x[01] ended with exit code "):
        run_python(SPEC, kill, timeout=50)


@pytest.mark.lab
def test_generators_are_gone_when_the_run_is_over(run_python: Run) -> None:
    run_python(SPEC, "import sys; sys.exit(3)", grace=0.0)
    running = [
        p.parent.name
        for p in Path("/proc").glob("[0-9]*/cmdline")
        if b"wingbeat_lab.lab.cross" in read(p)
    ]
    assert running == []


def read(path: Path) -> bytes:
    """What a file of /proc has; nothing if its process is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("line", ["Connection refused", "[1, 2]", '{"when": 1}'])
def test_what_is_no_sample_is_not_read_as_one(line: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Sample.read(line)

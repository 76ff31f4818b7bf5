"""``benchmarks/kills.py``: whom it kills, how it judges, and that it finds nothing wrong."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import FOLDER, benchmark


@pytest.fixture(scope="module")
def kills() -> Iterator[ModuleType]:
    with benchmark("kills") as module:
        yield module


def test_everyone_is_killed_as_often_at_moments_that_follow_from_the_seed(
    kills: ModuleType,
) -> None:
    drawn = [
        [
            (c.victim, c.moment)
            for c in itertools.islice(kills.cases(argparse.Namespace(seed=s)), 20)
        ]
        for s in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    for victim in ("rank 0", "rank 1", "rank 2", "server 0", "server 1"):
        assert [each for each, _ in drawn[0]].count(victim) == 4
    assert all(0.0 <= moment <= 0.9 for _, moment in drawn[0])


@pytest.mark.parametrize(
    ("line", "at", "wrong"),
    [
        ("rank 0: server 1 (started by rank 1) has ended by signal 9", 3.0, None),
        (
            "rank 0: server 0 (started by rank 0) has ended by signal 9",
            3.0,
            "did not name server 1",
        ),
        ("rank 0: server 10 has ended", 3.0, "did not name server 1"),
        ("server 1 has ended", 3.0, "no line of its own"),
        ("rank 0: server 1\nhas ended", 3.0, "no line of its own"),
        ("rank 0: server 1 has ended", 9.0, "after 7.0 s"),
        (None, 3.0, "rank 0 said nothing"),
    ],
)
def test_kills_line_of_a_worker_is_judged(
    kills: ModuleType, tmp_path: Path, line: str | None, at: float, wrong: str | None
) -> None:
    for rank in range(kills.WORKERS):
        said = f"rank {rank}: server 1 has ended" if rank else line
        if said is not None:
            path = tmp_path / f"said-{rank}"
            path.write_text(json.dumps({"line": said, "at": at if not rank else 2.5}))
    case, run = kills.Case("server 1"), argparse.Namespace(home=tmp_path)
    kills.see_lines(argparse.Namespace(timeout=6.0), case, run, 2.0)
    if wrong is None:
        assert case.wrong == []
        assert case.said_s == 1.0
    else:
        assert wrong in " ".join(case.wrong)


def test_kills_require_no_line_of_the_killed_worker(kills: ModuleType, tmp_path: Path) -> None:
    for rank in (0, 2):
        said: dict[str, Any] = {"line": f"rank {rank}: rank 1 has ended", "at": 2.0}
        (tmp_path / f"said-{rank}").write_text(json.dumps(said))
    case = kills.Case("rank 1")
    kills.see_lines(argparse.Namespace(timeout=6.0), case, argparse.Namespace(home=tmp_path), 2.0)
    assert case.wrong == []
    assert len(case.lines) == 2


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(240)
def test_kills_of_two_processes_lose_nothing(tmp_path: Path) -> None:
    words = [sys.executable, str(FOLDER / "kills.py"), "--kills", "2", "--iterations", "30"]
    words += ["--json", str(tmp_path / "kills.json")]
    ended = subprocess.run(words, env=os.environ, capture_output=True, text=True, timeout=220)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "kills.json").read_text())["fine"] == 2


def test_the_table_has_the_range_of_seconds_by_role(kills: ModuleType) -> None:
    done = [
        kills.Case("rank 1", said_s=0.5),
        kills.Case("rank 2", said_s=1.5, wrong=["late"]),
        kills.Case("rank 0", said_s=0.7),
    ]
    made = kills.table(done, strangers=80, timeout=6.0)
    assert made.rows == (
        ("rank", "3", "2", "0.7", "0.5 .. 1.5"),
        ("server", "0", "0", "", ""),
    )
    assert made.notes[-1] == "the timeout is 6 s; strangers refused: 80"

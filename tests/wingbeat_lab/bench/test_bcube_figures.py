"""``benchmarks/bcube.py``: what it counts, how it judges, and that it looks before it measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark

SETTING = {"workers": 9, "ports": 3, "levels": 2, "bytes": 9e6, "bytes_per_s": 1e6}


@pytest.fixture(scope="module")
def bcube() -> Iterator[ModuleType]:
    with benchmark("bcube") as module:
        yield module


def one_round(**seconds: float) -> dict[str, Any]:
    given = {"bml": 8.5, "table2": 10.0, "routed": 12.0, "ring": 17.0, **seconds}
    return {case: {"seconds": each, "sent": [[100, 101]] * 9} for case, each in given.items()}


def test_a_case_at_line_rate_has_all_of_it(bcube: ModuleType) -> None:
    """16/9 of the bytes over one interface or halved, and 3 * 2/3 of them halved."""
    made = bcube.summary([one_round(bml=8.0, table2=9.0, routed=8.0, ring=16.0)], SETTING)
    assert {case: row["of_line_rate"] for case, row in made.items()} == pytest.approx(
        {"bml": 1.0, "table2": 1.0, "routed": 1.0, "ring": 1.0}
    )
    assert made["bml"]["of_tcp_bound"] == pytest.approx(1514 / 1448)
    assert bcube.missed(made, 2) == []


def test_rounds_are_put_together_by_their_median(bcube: ModuleType) -> None:
    rounds = [one_round(bml=seconds) for seconds in (8.5, 99.0, 8.6)]
    rounds[1]["bml"]["sent"] = [[100, 100]] * 8 + [[100, 104]]
    made = bcube.summary(rounds, SETTING)
    assert made["bml"]["seconds"] == 8.6
    assert made["bml"]["rounds"] == [8.5, 99.0, 8.6]
    assert made["bml"]["most_over_least_sent"] == 1.04


@pytest.mark.parametrize(
    ("seconds", "sent", "words"),
    [
        ({"bml": 8.0, "ring": 14.3}, [100, 100], ["1.79 times as fast as one interface's ring"]),
        ({"bml": 9.0, "ring": 17.0}, [100, 100], ["0.889 of the line rate, not 0.9"]),
        ({}, [100, 106], ["1.060 times each other"]),
        ({}, [106, 100], ["1.060 times each other"]),
        ({}, [100, 0], ["100.000 times each other"]),
        ({"bml": 9.5}, [1, 2], ["1.79 times", "0.842 of the line rate", "2.000 times each other"]),
    ],
)
def test_bcube_report_names_each_missed_limit(
    bcube: ModuleType, seconds: dict[str, float], sent: list[int], words: list[str]
) -> None:
    measured = one_round(**seconds)
    measured["bml"]["sent"][4] = sent
    lines = bcube.missed(bcube.summary([measured], SETTING), 2)
    assert len(lines) == len(words)
    assert all(part in line for part, line in zip(words, lines, strict=True))


def test_bcube_table_has_every_case(bcube: ModuleType) -> None:
    made = bcube.table(bcube.summary([one_round()], SETTING), SETTING | {"labs": ("a", "b")})
    assert [row[0] for row in made.rows] == ["bml", "table2", "routed", "ring"]
    assert made.rows[0][1:4] == ("8.500", "8.500 .. 8.500", "2.00")
    assert made.title == "8.6 MiB on a and b"


def test_both_labs_take_turns_and_a_miss_is_the_exit_code(
    bcube: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run_lab(_: Any, spec: str, cases: tuple[str, ...]) -> dict[str, Any]:
        asked.append(spec)
        slow = one_round(bml=17.0)
        return {case: slow[case] for case in cases}

    monkeypatch.setattr(bcube, "run_lab", run_lab)
    path = tmp_path / "out" / "x.json"
    command = ["bcube.py", "--size", "3x2", "--rate", "8mbit", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", [*command, "--json", str(path)])
    assert bcube.main() == 1
    assert asked == ["bcube:3x2@8mbit", "star:9@8mbit"] * 2
    assert '"missed": [' in path.read_text()


def test_what_cannot_be_is_refused_before_anything_is_measured(
    bcube: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bcube, "run_lab", None)
    json = ["--json", str(tmp_path / "x.json")]
    for words, said in (
        (["--size", "3"], "allowed are PORTSxLEVELS"),
        (["--size", "9x9"], "out of range"),
        (["--rate", "fast"], "fast"),
    ):
        monkeypatch.setattr("sys.argv", ["bcube.py", *words, *json])
        assert bcube.main() == 2
        assert said in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["bcube.py", "--json", str(tmp_path / "file" / "x.json")])
    with pytest.raises(SystemExit, match="2"):
        bcube.main()
    assert "cannot write" in capsys.readouterr().err

"""``benchmarks/validation.py``: its grid, what it keeps and predicts anew, and what it judges."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat import strategies
from wingbeat.errors import UsageError
from wingbeat_lab.bench import simulated
from wingbeat_lab.bench.config import BenchConfig
from wingbeat_lab.bench.costs import Costs

MACHINE = Costs(
    launch_s=0.3e-3,
    wake_s=0.1e-3,
    update_s=20e-6,
    update_s_per_byte=1e-9,
    message_s=1e-4,
    cold=2.0,
)


@pytest.fixture(scope="module")
def validation() -> Iterator[ModuleType]:
    with benchmark("validation") as module:
        yield module


def arguments(module: ModuleType, *words: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["validation.py", *words])
        return module.arguments()


def cell(model: str = "resnet50", setting: str = "slow", **times: tuple[float, float]) -> Any:
    rows = [
        {"strategy": name, "lab_s": lab, "simulated_s": virtual, "off": virtual / lab - 1}
        for name, (lab, virtual) in times.items()
    ]
    return {"model": model, "setting": setting, "rows": rows}


def test_every_cell_of_the_grid_is_a_lab_that_can_be_simulated(validation: ModuleType) -> None:
    args, names = arguments(validation), set()
    for model in validation.MODELS:
        for setting in validation.SETTINGS:
            for config in validation.benches(args, model, setting):
                checked = config.check()
                simulated.links_of(checked.lab)
                assert checked.workers <= 8
                names |= {row.name for row in checked.rows}
    assert names == {text.partition(":")[0] for text in validation.STRATEGIES.values()}
    assert names <= set(strategies.names())


def test_four_cells_of_different_models_and_settings_are_held_back(validation: ModuleType) -> None:
    models, settings = zip(*validation.HELD_BACK, strict=True)
    assert sorted(models) == sorted(validation.MODELS)
    assert len(set(settings)) == 4
    assert set(settings) <= set(validation.SETTINGS)


def test_groups_are_judged_apart(
    validation: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = {"a": (1.0, 1.01), "b": (2.0, 2.02)}, {"a": (1.0, 1.2), "b": (2.0, 2.1)}
    report: dict[str, Any] = {"cells": [cell(**good), cell("resnet50", "uneven", **bad)]}
    validation.judge(report)
    assert report["missed"] == [
        "cells held back: median error 12.5%; limit 4%",
        "resnet50, uneven, a: +20.0%; limit 10%",
    ]
    first = report["tables"][0]["rows"]
    assert [line[0] for line in first] == ["cells held back", "other cells"]
    assert [line[4] for line in first] == ["20.0", "1.0"]
    assert "Errors by strategy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("slower", "wrong"),
    [((1.05, 0.99), True), ((1.05, 1.0), True), ((1.05, 1.001), False), ((1.03, 0.9), False)],
)
def test_pairs_count_beyond_four_per_cent(
    validation: ModuleType, slower: tuple[float, float], wrong: bool
) -> None:
    for order in ({"a": (1.0, 1.0), "b": slower}, {"b": slower, "a": (1.0, 1.0)}):
        own = cell(**order)
        assert validation.wrongly_ranked(own) == ([("a", "b")] if wrong else [])
        assert validation.compared_pairs(own) == (slower[0] > 1.04)
        lines = list(validation.missed_by("x", [own]))
        assert ("resnet50, slow: a and b are ranked wrongly" in lines) is wrong


def test_cells_of_the_same_commit_are_not_measured_again(
    validation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = tmp_path / "out.json", []
    words = ["--models", "vgg16", "--settings", "slow", "uneven", "--strategies", "allreduce"]

    def measured(model: str, setting: str, configs: Any, machine: Any) -> Any:
        assert machine == asdict(MACHINE)
        made.append(setting)
        return cell(model, setting, **{text: (1.0, 1.0) for c in configs for text in c.strategies})

    monkeypatch.setattr(validation, "measured", measured)
    monkeypatch.setattr(validation.costs, "measure", lambda: MACHINE)
    for commit, more, wanted in (
        ("abc", [], ["slow", "uneven"]),
        ("abc", [], []),
        ("abc", ["dear"], ["slow", "uneven"]),
        ("def", ["dear"], ["slow", "uneven"]),
        ("def with changes", ["dear"], ["slow", "uneven"]),
    ):
        monkeypatch.setattr(validation, "commit", lambda commit=commit: commit)
        monkeypatch.setattr(sys, "argv", ["validation.py", *words, *more, "--json", str(path)])
        assert validation.main() == 0
        assert made == wanted
        made.clear()
        assert len(json.loads(path.read_text())["cells"]) == 2


def test_kept_measurements_are_predicted_anew_on_their_machine(
    validation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "kept.json", tmp_path / "out.json"
    config = BenchConfig(
        lab="star:2@4gbit", model="paced:alexnet@0.01", strategies=("allreduce",), rounds=1
    )
    checked = config.check()
    want = simulated.iteration_s(checked, checked.rows[0], cores=1, costs=MACHINE)
    assert want != simulated.iteration_s(checked, checked.rows[0], cores=1)
    row = {
        "strategy": "allreduce",
        "config": validation.plain(config, "allreduce"),
        "lab_s": want / 1.08,
        "prices": None,
        "simulated_s": 1.0,
        "off": 0.0,
    }
    own = {"model": "alexnet", "setting": "slow", "cores": 1, "rows": [row]}
    own["costs"] = asdict(MACHINE)
    path.write_text(json.dumps({"report": {"cells": [own]}}))
    words = ["validation.py", "--kept", str(path), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert validation.main() == 1  # the median is beyond 4%
    (made,) = json.loads(out.read_text())["cells"]
    assert made["rows"][0]["simulated_s"] == want
    assert made["rows"][0]["off"] == pytest.approx(0.08)
    path.write_text("{}")
    with pytest.raises(UsageError, match="no report"):
        validation.cells_in(path)
    assert validation.main() == 2


@pytest.mark.parametrize(
    "words", [["--models", "vgg"], ["--settings", "two"], ["--strategies", "x"]]
)
def test_unknown_names_are_refused(
    validation: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(validation, *words)
    assert ended.value.code == 2
    assert words[1] in capsys.readouterr().err

"""``docs/how-to/optimizers.md`` has the table that was measured, and names what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.scripts import benchmark
from wingbeat_lab.baselines import parse

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "how-to/optimizers.md").read_text(encoding="utf-8")
RESULTS: list[dict[str, Any]] = json.loads(
    (DOCS / "results/optimizers.json").read_text(encoding="utf-8")
)["report"]["results"]


def test_its_table_is_the_one_of_the_results() -> None:
    with benchmark("optimizers") as module:
        assert module.table(RESULTS).markdown() in PAGE


def test_the_results_are_of_all_optimizers_and_strategies() -> None:
    with benchmark("optimizers") as module:
        assert [row["optimizer"] for row in RESULTS] == list(module.OPTIMIZERS)
        for row in RESULTS:
            tried = row.get("strategies", {})
            if tried and "error" not in tried["ddp"]:
                assert list(tried) == ["ddp", *module.STRATEGIES]
        for strategy in module.STRATEGIES:
            parse(strategy)


def test_what_is_exact_has_the_weights_of_ddp() -> None:
    compared = 0
    for row in RESULTS:
        for strategy, found in row.get("strategies", {}).items():
            if strategy in ("allreduce", "dear") and "difference" in found:
                assert found["difference"] == 0, (row["optimizer"], strategy)
                assert found["same_everywhere"]
                compared += 1
    assert compared > 20


def test_a_table_tells_apart_what_was_found() -> None:
    with benchmark("optimizers") as module:
        found: dict[str, Any] = {
            name: {"difference": 0.0, "same_everywhere": True} for name in module.STRATEGIES
        }
        found["ddp"] = {"same_everywhere": True, "moved": 0.1}
        found["dear"] = {"difference": 2e-7, "same_everywhere": True}
        found["allreduce"] = {"difference": 0.0, "same_everywhere": False}
        found["canary:s=0"] = {"refused": "Canary(s=0): why; what to do"}
        row = {"optimizer": "a.B", "package": "a", "version": "1", "strategies": found}
        other = {"optimizer": "c.D", "package": "c", "skipped": "not there"}
        table = module.table([row, other]).markdown()
    assert "WORKERS DIFFER | 2e-07 | = | = | refused | trains | trains |" in table
    assert "- a.B: `Canary(s=0): why; what to do`" in table
    assert "- c.D: `not there`" in table


@pytest.mark.parametrize("text", re.findall(r"`wingbeat\.[^`]+`|\]\((\w+\.md)\)", PAGE))
def test_its_links_lead_to_pages(text: str) -> None:
    assert (DOCS / "how-to" / text).exists()

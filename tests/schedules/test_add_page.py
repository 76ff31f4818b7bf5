"""``docs/developers/add-a-schedule.md``: its schedule trains, and passes the contract."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.schedules.test_schedules_contract import history
from wingbeat import schedules
from wingbeat.schedules.events import Operation

PAGE = Path(__file__).parents[2] / "docs/developers/add-a-schedule.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str]) -> Iterator[dict[str, Any]]:
    """What the page has defined and printed, when all its examples have run."""
    names: dict[str, Any] = {"__name__": "page"}
    before = dict(schedules.BY_NAME)
    try:
        for example in EXAMPLES:
            exec(compile(example, str(PAGE), "exec", dont_inherit=True), names)
        yield {**names, "printed": capsys.readouterr().out}
    finally:
        schedules.BY_NAME.clear()
        schedules.BY_NAME.update(before)


def test_the_page_adds_a_schedule_that_trains(page: dict[str, Any]) -> None:
    assert len(EXAMPLES) == 4
    times = [int(ms) for ms in re.findall(r": (\d+) ms", page["printed"])]
    assert len(times) == 2
    assert times[0] < times[1], "nothing is hidden"
    assert schedules.BY_NAME["after"] is page["AfterBackward"]


def test_it_stands_the_histories(page: dict[str, Any]) -> None:
    for seed in range(300):
        workers = history("after", seed)
        assert all(worker.started == workers[0].started for worker in workers)
        assert {operation for operation, _ in workers[0].started} <= {Operation.ALL_REDUCE}

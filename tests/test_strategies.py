"""What a strategy refuses, in one line that names the value."""

from __future__ import annotations

from typing import Any

import pytest

import wingbeat
from wingbeat.errors import UsageError
from wingbeat.strategies import parse


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": "bayes"}, "bo"),
        ({"mb": 0}, "mb=0"),
        ({"mb": True}, "mb=True"),
        ({"edge_mb": -1}, "edge_mb=-1"),
        ({"min_mb": 5, "max_mb": 5}, "min_mb"),
        ({"layers": 0}, "layers=0"),
        ({"trials": 2.5}, "trials=2.5"),
        ({"steps": True}, "steps=True"),
        ({"wire": "int8"}, "int8"),
        ({"shard_optimizer": "false"}, "shard_optimizer='false'"),
        ({"plan_file": 7}, "plan_file=7"),
        ({"plan_file": "a\0b"}, "plan_file"),
        ({"plan": "fixed", "plan_file": "plan.json"}, "plan='fixed'"),
        ({"topology": "star"}, "star"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        wingbeat.DeAR(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_any_size_above_zero_is_at_least_a_byte() -> None:
    choices = wingbeat.DeAR(mb=1e-9, edge_mb=0, min_mb=1e-9).choices()
    assert choices.tuning is not None
    assert (choices.fusion.bucket_bytes, choices.fusion.first_bytes) == (1, 0)
    assert choices.tuning.low_bytes == 1


def test_the_command_line_spells_every_option() -> None:
    assert parse("dear:plan=layers,layers=3,wire=bf16,shard_optimizer=true") == wingbeat.DeAR(
        plan="layers", layers=3, wire="bf16", shard_optimizer=True
    )


def test_a_strategy_says_what_is_not_at_its_default() -> None:
    assert repr(wingbeat.DeAR()) == "DeAR()"
    assert repr(wingbeat.AllReduce(mb=8, wire="fp16")) == "AllReduce(mb=8, wire='fp16')"

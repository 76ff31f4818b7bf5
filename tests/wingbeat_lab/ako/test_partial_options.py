"""The part of partial exchange: what it refuses, alone and with other parts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from wingbeat import Strategy
from wingbeat.errors import UsageError
from wingbeat_lab.ako import Partial


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partitions": -1}, "Partial(partitions=-1): allowed are whole numbers, 0 to 4096"),
        ({"partitions": True}, "Partial(partitions=True): allowed are whole numbers, 0 to 4096"),
        ({"topology": "star"}, "unknown topology 'star'"),
        ({"partition": 2}, "(did you mean 'partitions'?)"),
    ],
)
def test_partial_invalid_option_is_refused_in_one_line(options: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Partial(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"exchange": Partial(partitions=4), "schedule": "dear"},
            "Partial(partitions=4) needs whole all-reduces, which none of FixedBuckets(), "
            "Decoupled(), Deferred() has; allowed: schedule=WaitFree(), which AllReduce has",
        ),
        ({"exchange": Partial(), "schedule": "served"}, "Partial() needs whole all-reduces"),
        (
            {"exchange": Partial(), "compression": "sketch"},
            "Strategy(exchange=Partial(), compression=Sketch()): parts of gradients travel as they "
            "are",
        ),
        (
            {"exchange": Partial(), "plan": "merged"},
            "Strategy(exchange=Partial(), plan=Merged()): layers are merged by what whole",
        ),
    ],
)
def test_partial_with_unsupported_parts_is_refused_in_one_line(options: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Strategy(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_partial_is_an_inexact_value_with_partitions_in_its_key() -> None:
    made = Partial(partitions=3, topology="ring")
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert repr(made) == "Partial(partitions=3, topology='ring')"
    assert made.key() == {"partitions": 3}
    traits = Strategy(exchange=made).traits
    assert (traits.exact, traits.synchronous, traits.bound) == (False, False, "partial")

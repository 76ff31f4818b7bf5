"""The part of ByteScheduler: what it refuses, alone and with other parts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import wingbeat_lab
from wingbeat import Strategy
from wingbeat.errors import UsageError
from wingbeat_lab.bytescheduler import Partitioned


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition_mb": 0}, "Partitioned(partition_mb=0): allowed are sizes above 0 up to 4096"),
        ({"credit": 0}, "Partitioned(credit=0): allowed are whole numbers, 1 to 1024"),
        ({"credit": 1.5}, "Partitioned(credit=1.5): allowed are whole numbers, 1 to 1024"),
        ({"topology": "star"}, "unknown topology 'star'"),
        ({"partition": 2}, "(did you mean 'partition_mb'?)"),
    ],
)
def test_partitioned_invalid_option_is_refused_in_one_line(options: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Partitioned(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"exchange": Partitioned(), "schedule": "dear"},
            "Partitioned() needs sums in one operation, which none of FixedBuckets(), Decoupled(), "
            "Deferred() has",
        ),
        (
            {"exchange": Partitioned(), "schedule": "served", "update": "sharded"},
            "Sharded() needs all-reduces in two halves",
        ),
        (
            {"exchange": Partitioned(), "schedule": "served", "update": "servers"},
            "OnServers() needs sums that are kept until they are pulled",
        ),
        (
            {"exchange": Partitioned(), "schedule": "served", "compression": "sketch"},
            "Strategy(exchange=Partitioned(), compression=Sketch()): partitions travel as they are",
        ),
        (
            {"exchange": Partitioned(), "plan": "merged"},
            "Strategy(exchange=Partitioned(), plan=Merged()): layers are merged by what whole",
        ),
    ],
)
def test_partitioned_with_unsupported_parts_is_refused_in_one_line(
    options: Any, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Strategy(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mb": -1.0}, "ByteScheduler(mb=-1.0): allowed are sizes above 0"),
        ({"credit": 0}, "ByteScheduler(credit=0): allowed are whole numbers"),
        ({"compression": "topk"}, "partitions travel as they are"),
    ],
)
def test_preset_invalid_option_is_refused_with_its_name(options: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        wingbeat_lab.ByteScheduler(**options)
    assert words in str(caught.value)


def test_partitioned_is_an_exact_value_with_sizes_in_its_key() -> None:
    made = Partitioned(partition_mb=2, credit=3, topology="mesh")
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert repr(made) == "Partitioned(partition_mb=2, credit=3, topology='mesh')"
    assert made.key() == {"partition_mb": 2, "credit": 3}
    assert (made.partition_bytes, made.credit_bytes) == (2 << 20, 6 << 20)
    traits = Strategy(exchange=made, schedule="served").traits
    assert (traits.exact, traits.synchronous, traits.bound) == (True, True, "late")


def test_partitions_scale_with_the_model() -> None:
    made = wingbeat_lab.ByteScheduler(mb=8.0, credit=3).scaled(0.25)
    assert made.exchange == Partitioned(partition_mb=1.0, credit=3)
    assert made.plan.fusion().bucket_bytes == 2 << 20


def test_preset_has_a_bucket_for_each_parameter_unless_it_has_a_size() -> None:
    assert wingbeat_lab.ByteScheduler().plan.fusion().kind == "none"
    assert wingbeat_lab.ByteScheduler(mb=3).plan.fusion().bucket_bytes == 3 << 20

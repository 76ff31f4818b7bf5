"""Every option arrives where it belongs: what the engine gets, whole."""

from __future__ import annotations

from typing import Any

import pytest

import wingbeat
import wingbeat_lab
from wingbeat import Strategy, parts
from wingbeat.errors import UsageError
from wingbeat.strategies import MGWFBP
from wingbeat.types import Choices, Fusion, Merging, Staleness, Tuning
from wingbeat.wires import Sketch, TopK

MB = 1 << 20
TUNED = Tuning(search="grid", low_bytes=2 * MB, high_bytes=9 * MB, trials=4, steps=3, file="f")
EDGES = Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB, last_bytes=3 * MB)

CASES: list[tuple[Any, Choices]] = [
    (
        wingbeat.AllReduce(mb=8, first_mb=3, compression="bf16", topology="mesh"),
        Choices(
            schedule="wfbp",
            topology="mesh",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB),
            wire="bfloat16",
        ),
    ),
    (
        wingbeat.AllReduce(
            plan="grid",
            mb=8,
            first_mb=3,
            min_mb=2,
            max_mb=9,
            trials=4,
            steps=3,
            plan_file="f",
            topology="mesh",
        ),
        Choices(
            schedule="wfbp",
            topology="mesh",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB),
            tuning=TUNED,
        ),
    ),
    (
        wingbeat.AllReduce(plan="layers", layers=7),
        Choices(schedule="wfbp", topology="ring", fusion=Fusion(kind="layers", layers=7)),
    ),
    (
        wingbeat.AllReduce(plan="none"),
        Choices(schedule="wfbp", topology="ring", fusion=Fusion(kind="none")),
    ),
    (
        wingbeat.AllReduce(plan="merged@wfbp"),
        MGWFBP().choices(),
    ),
    (
        wingbeat.AllReduce(plan=parts.TunedBuckets(first_mb=1)),
        wingbeat.AllReduce(plan="bo").choices(),
    ),
    (
        wingbeat.BML(plan="random", trials=4),
        wingbeat.AllReduce(plan="random", trials=4, topology="bcube").choices(),
    ),
    (
        wingbeat.DeAR(
            plan="grid",
            mb=8,
            edge_mb=3,
            min_mb=2,
            max_mb=9,
            trials=4,
            steps=3,
            plan_file="f",
            compression="sketch@4",
            shard_optimizer=True,
            topology="doubling",
        ),
        Choices(
            schedule="dear",
            topology="doubling",
            fusion=EDGES,
            tuning=TUNED,
            wire=Sketch(bits=4),
            shard_optimizer=True,
        ),
    ),
    (
        wingbeat_lab.Ako(partitions=5, mb=8, first_mb=3, compression="bf16", topology="ring"),
        Choices(
            schedule="wfbp",
            topology="ring",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB),
            wire="bfloat16",
            partitions=5,
        ),
    ),
    (
        wingbeat.Canary(s=5, p=3, colayers=4, encrypted=False),
        Choices(
            schedule="stale",
            topology="ring",
            fusion=Fusion(kind="colayers", layers=4),
            wire=wingbeat.Sketch(auto_disable=False),
            staleness=Staleness(s=5, p=3, encrypted=False),
        ),
    ),
    (
        wingbeat.Canary(s=None, p=None),
        Choices(
            schedule="stale",
            topology="ring",
            fusion=Fusion(kind="colayers", layers=10),
            wire=wingbeat.Sketch(auto_disable=False),
            staleness=Staleness(s=None, p=None),
        ),
    ),
    (
        wingbeat.DeAR(plan="fixed", mb=8, edge_mb=3),
        Choices(schedule="dear", topology="ring", fusion=EDGES),
    ),
    (
        wingbeat.DeAR(plan="layers", layers=7),
        Choices(schedule="dear", topology="ring", fusion=Fusion(kind="layers", layers=7)),
    ),
    (
        wingbeat.OMGS(
            merge="paper",
            density=0.2,
            warmup=5,
            momentum=0.5,
            groups={"a": 0.5},
            steps=3,
            drift=2.5,
            plan_file="f",
            topology="mesh",
        ),
        Choices(
            schedule="wfbp",
            topology="mesh",
            fusion=Fusion(kind="one"),
            merging=Merging(rule="paper", steps=3, drift=2.5, file="f"),
            wire=TopK(
                density=0.2, warmup=5, momentum=0.5, groups=(("a", 0.5),), auto_disable=False
            ),
        ),
    ),
    (
        wingbeat_lab.MGS(elements=9, compression="bf16"),
        Choices(
            schedule="wfbp",
            topology="ring",
            fusion=Fusion(kind="elements", elements=9),
            wire="bfloat16",
        ),
    ),
    (
        Strategy(
            plan=parts.TunedBuckets(
                search="grid",
                mb=8,
                first_mb=3,
                last_mb=1,
                min_mb=2,
                max_mb=9,
                trials=4,
                steps=3,
                file="f",
            ),
            exchange=parts.Doubling(),
        ),
        Choices(
            schedule="wfbp",
            topology="doubling",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB, last_bytes=MB),
            tuning=TUNED,
        ),
    ),
    (
        Strategy(plan=parts.FixedBuckets(mb=8, first_mb=3, last_mb=1)),
        Choices(
            schedule="wfbp",
            topology="ring",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB, last_bytes=MB),
        ),
    ),
    (
        Strategy(plan=parts.Merged(rule="wfbp", steps=3, drift=2.5, file="f"), schedule="dear"),
        Choices(
            schedule="dear",
            topology="ring",
            fusion=Fusion(kind="one"),
            merging=Merging(rule="wfbp", steps=3, drift=2.5, file="f"),
        ),
    ),
    (
        Strategy(plan=parts.Elements(count=9)),
        Choices(schedule="wfbp", topology="ring", fusion=Fusion(kind="elements", elements=9)),
    ),
]


@pytest.mark.parametrize(("strategy", "choices"), CASES, ids=lambda value: type(value).__name__)
def test_every_option_arrives(strategy: Any, choices: Choices) -> None:
    assert strategy.choices() == choices


def test_an_exchange_that_no_other_worker_could_be_told_of_is_refused() -> None:
    class Star(parts.Ring):
        """Not in `wingbeat.topologies.BY_NAME`."""

    with pytest.raises(UsageError, match=r"Star\(\) has no name"):
        Strategy(exchange=Star())

"""Every option arrives where it belongs: what the engine reads of a strategy, whole."""

from __future__ import annotations

from typing import Any

import pytest

import wingbeat
import wingbeat_lab
from wingbeat import Strategy, parts
from wingbeat.compression import Sketch, TopK
from wingbeat.errors import UsageError
from wingbeat.strategies import MGWFBP
from wingbeat.types import Fusion, Tuning

MB = 1 << 20
TUNED = Tuning(search="grid", low_bytes=2 * MB, high_bytes=9 * MB, trials=4, steps=3, file="f")
EDGES = Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB, last_bytes=3 * MB)


def read(strategy: Strategy) -> dict[str, Any]:
    """What the engine reads."""
    return {
        "schedule": strategy.schedule.machine,
        "topology": strategy.topology,
        "fusion": strategy.plan.fusion(),
        "tuning": strategy.plan.tuning(),
        "merging": strategy.plan.merging(),
        "wire": strategy.wire,
        "shard_optimizer": strategy.update_part.shards,
        "server_updates": strategy.update_part.on_servers,
        "partitions": getattr(strategy.exchange, "partitions", None),
        "exchange": None if strategy.exchange.lockstep else strategy.exchange,
    }


def reads(**given: Any) -> dict[str, Any]:
    """The same, where it is not as for most strategies."""
    usual: dict[str, Any] = {"tuning": None, "merging": None, "wire": "", "partitions": None}
    return {**usual, "shard_optimizer": False, "server_updates": False, "exchange": None, **given}


CASES: list[tuple[Strategy, dict[str, Any]]] = [
    (
        wingbeat.AllReduce(mb=8, first_mb=3, compression="bf16", topology="mesh"),
        reads(
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
        reads(
            schedule="wfbp",
            topology="mesh",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB),
            tuning=TUNED,
        ),
    ),
    (
        wingbeat.AllReduce(plan="layers@7"),
        reads(schedule="wfbp", topology="ring", fusion=Fusion(kind="layers", layers=7)),
    ),
    (
        wingbeat.AllReduce(plan="none"),
        reads(schedule="wfbp", topology="ring", fusion=Fusion(kind="none")),
    ),
    (
        wingbeat.AllReduce(plan="merged@wfbp"),
        read(MGWFBP()),
    ),
    (
        wingbeat.AllReduce(plan=parts.TunedBuckets(first_mb=1)),
        read(wingbeat.AllReduce(plan="bo")),
    ),
    (
        wingbeat.BML(plan="random", trials=4),
        read(wingbeat.AllReduce(plan="random", trials=4, topology="bcube")),
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
        reads(
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
        reads(
            schedule="wfbp",
            topology="ring",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB),
            wire="bfloat16",
            partitions=5,
        ),
    ),
    (
        wingbeat_lab.ByteScheduler(mb=8, compression="bf16", topology="mesh"),
        reads(
            schedule="served",
            topology="mesh",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=0),
            wire="bfloat16",
        ),
    ),
    (
        wingbeat.Canary(s=5, p=3, colayers=4, encrypted=False),
        reads(
            schedule="stale",
            topology="ring",
            fusion=Fusion(kind="colayers", layers=4),
            wire=wingbeat.Sketch(auto_disable=False),
            exchange=parts.Bounded(s=5, p=3, encrypted=False),
        ),
    ),
    (
        wingbeat.Canary(s=None, p=None),
        reads(
            schedule="stale",
            topology="ring",
            fusion=Fusion(kind="colayers", layers=10),
            wire=wingbeat.Sketch(auto_disable=False),
            exchange=parts.Bounded(s=None, p=None),
        ),
    ),
    (
        wingbeat.DeAR(plan="fixed", mb=8, edge_mb=3),
        reads(schedule="dear", topology="ring", fusion=EDGES),
    ),
    (
        wingbeat.DeAR(plan="layers@7"),
        reads(schedule="dear", topology="ring", fusion=Fusion(kind="layers", layers=7)),
    ),
    (
        wingbeat.OMGS(
            merge="paper",
            compression="topk@0.2:warmup=5:momentum=0.5:groups=a@0.5",
            steps=3,
            drift=2.5,
            plan_file="f",
            topology="mesh",
        ),
        reads(
            schedule="wfbp",
            topology="mesh",
            fusion=Fusion(kind="one"),
            merging=parts.Merged(rule="paper", steps=3, drift=2.5, file="f"),
            wire=TopK(
                density=0.2, warmup=5, momentum=0.5, groups=(("a", 0.5),), auto_disable=False
            ),
        ),
    ),
    (
        wingbeat_lab.MGS(elements=9, compression="bf16"),
        reads(
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
        reads(
            schedule="wfbp",
            topology="doubling",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB, last_bytes=MB),
            tuning=TUNED,
        ),
    ),
    (
        Strategy(plan=parts.FixedBuckets(mb=8, first_mb=3, last_mb=1)),
        reads(
            schedule="wfbp",
            topology="ring",
            fusion=Fusion(bucket_bytes=8 * MB, first_bytes=3 * MB, last_bytes=MB),
        ),
    ),
    (
        Strategy(plan=parts.Merged(rule="wfbp", steps=3, drift=2.5, file="f"), schedule="dear"),
        reads(
            schedule="dear",
            topology="ring",
            fusion=Fusion(kind="one"),
            merging=parts.Merged(rule="wfbp", steps=3, drift=2.5, file="f"),
        ),
    ),
    (
        Strategy(plan=parts.Elements(count=9)),
        reads(schedule="wfbp", topology="ring", fusion=Fusion(kind="elements", elements=9)),
    ),
]


@pytest.mark.parametrize(("strategy", "expected"), CASES, ids=lambda value: type(value).__name__)
def test_every_option_arrives(strategy: Strategy, expected: dict[str, Any]) -> None:
    assert read(strategy) == expected


def test_the_options_of_top_k_arrive() -> None:
    for made in (wingbeat.OMGS(density=0.2, warmup=5), wingbeat_lab.LAGS(density=0.2, warmup=5)):
        assert made.compression == TopK(density=0.2, warmup=5, auto_disable=False)


def test_an_exchange_that_no_other_worker_could_be_told_of_is_refused() -> None:
    class Star(parts.Ring):
        """Not in `wingbeat.topologies.BY_NAME`."""

    with pytest.raises(UsageError, match=r"Star\(\) has no name"):
        Strategy(exchange=Star())

"""``benchmarks/servers.py``: what it pushes, what it compares, and how it judges."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from helpers.scripts import benchmark

MIB = 1 << 20


@pytest.fixture(scope="module")
def servers() -> Iterator[ModuleType]:
    with benchmark("servers") as module:
        yield module


def test_slices_have_the_default_size_and_the_last_of_each_class_is_small(
    servers: ModuleType,
) -> None:
    parts = servers.slices_of(64)
    assert [b - a for a, b in parts] == 16 * [4 * MIB] + servers.CLASSES * [servers.SMALL]
    assert [a for a, _ in parts[1:]] == [b for _, b in parts[:-1]]


def found(**values: Any) -> dict[str, Any]:
    speeds = {"server": 0.75e9, "sink": 1e9, "server, encrypted": 0.75e9, "sink, encrypted": 1e9}
    speeds |= values.pop("speeds", {})
    case = {
        "bytes_a_second": {way: 3 * [value] for way, value in speeds.items()},
        "processor_s": dict.fromkeys(speeds, 1.0),
        "shards": 64 * MIB,
        "window": 128 * MIB,
        "even": {"server": 255 * MIB},
        "late": {"server": 255 * MIB},
        **values,
    }
    sums = {"float32": {"server": 3 * [0.81], "torch": 3 * [1.0]}}
    return {"push": {"2": case}, "sum": sums}


@pytest.mark.parametrize(
    ("values", "missed"),
    [
        ({}, []),
        ({"speeds": {"server": 0.69e9}}, ["push, 2 workers: server / sink"]),
        (
            {"speeds": {"server, encrypted": 0.69e9}},
            ["push, 2 workers, encrypted: server / sink"],
        ),
        ({"even": {"server": 257 * MIB}}, ["memory, 2 workers, even, server: MiB"]),
        ({"late": {"server": 257 * MIB}}, ["memory, 2 workers, late, server: MiB"]),
    ],
)
def test_what_misses_its_limit_is_said(
    servers: ModuleType, values: dict[str, Any], missed: list[str]
) -> None:
    assert [row["what"] for row in servers.judge(found(**values)) if not row["ok"]] == missed


def test_sums_are_judged_for_every_dtype(servers: ModuleType) -> None:
    slow = {"server": 3 * [0.5], "torch": 3 * [1.0]}
    made = found()
    made["sum"] = {"float32": slow, "bfloat16": slow}
    rows = [row["what"] for row in servers.judge(made) if not row["ok"]]
    assert rows == ["sum, float32: server / torch", "sum, bfloat16: server / torch"]


def test_ways_take_turns_in_one_order_and_then_in_the_other(servers: ModuleType) -> None:
    order: list[str] = []
    ways = {name: lambda n=name: order.append(n) or 1.0 for name in "ab"}
    assert servers.alternate(ways, 3) == {"a": 3 * [1.0], "b": 3 * [1.0]}
    assert "".join(order) == "abbaab"


def test_the_table_has_the_range_of_rounds_and_what_is_missed(servers: ModuleType) -> None:
    made = found(speeds={"server": 0.69e9})
    made["sum"]["float32"]["server"] = [0.8, 0.81, 0.9]
    rows = {row[0]: row[1:] for row in servers.table(servers.judge(made), rounds=3).rows}
    assert rows["push, 2 workers: server / sink"] == ("0.690", "", "0.7", "MISSED")
    assert rows["sum, float32: server / torch"] == ("0.810", "0.800 .. 0.900", "0.8", "")

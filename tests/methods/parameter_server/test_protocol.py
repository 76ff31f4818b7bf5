"""Integers in messages, and the server's configuration."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.compression import Coded, Half, LowRank, Sketch
from wingbeat.methods.parameter_server.protocol import (
    MAX_LINKS,
    Order,
    interface_of,
    link_of,
    pack_route,
    position_of,
    urgency_of,
)
from wingbeat.methods.parameter_server.server import ServerConfig


@given(st.integers(0, 15), st.integers(0, 2**40), st.integers(0, MAX_LINKS - 1))
def test_pack_route_fits_32_bits(urgency: int, position: int, link: int) -> None:
    route = pack_route(urgency, position, link)
    assert 0 <= route < 2**32
    assert urgency_of(route) == urgency
    assert position_of(route) == min(position, 2**24 - 1)
    assert link_of(route) == link


@pytest.mark.parametrize(
    ("reach", "found"),
    [((0, 1), [0, 1]), ((0,), [0, 0]), ((1,), [1, 1]), ((2, 0, 1), [2, 0])],
    ids=str,
)
def test_interface_of_link_reaches_peer(reach: tuple[int, ...], found: list[int]) -> None:
    assert [interface_of(reach, link) for link in range(2)] == found


CONFIG = ServerConfig(
    room="servers/", index=1, ranks=(0, 1, 2, 3), hosts=(0, 2), interfaces=("eth0", "eth1"),
    classes=2, encrypted=True, timeout=12.5, max_sum_bytes=1 << 40, order="urgent",
)  # fmt: skip


def test_config_round_trips_through_json() -> None:
    found = ServerConfig.from_json(CONFIG.to_json())
    assert found == CONFIG
    assert hash(found) == hash(CONFIG), "lists have become tuples again"
    assert found.me == found.name(5)
    assert Order(found.order) is Order.URGENT


@pytest.mark.parametrize("wire", [Sketch(bits=3, level="ends"), LowRank(rank=7), Half()], ids=repr)
def test_config_with_codec_round_trips_through_json(wire: Coded) -> None:
    config = dataclasses.replace(CONFIG, wire=wire, dense=True)
    assert ServerConfig.from_json(config.to_json()) == config
    sums = config.make_aggregator()
    assert sums._codec is not None
    assert sums._codec.wire == wire
    assert sums._dense


def test_server_without_codec_loads_no_torch() -> None:
    code = (
        "import sys; from wingbeat.methods.parameter_server.server import ServerConfig; "
        f"ServerConfig.from_json({CONFIG.to_json()!r}).make_aggregator(); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "rank 0"), (3, "rank 3"), (4, "server 0 (started by rank 0)"),
     (5, "server 1 (started by rank 2)")],
)  # fmt: skip
def test_name_includes_role(number: int, name: str) -> None:
    assert CONFIG.name(number) == name

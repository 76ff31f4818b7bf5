"""Numbers in messages."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.compression import Coded, Half, LowRank, Sketch
from wingbeat.servers.coded import CodedSums
from wingbeat.servers.config import ServerConfig, name_of
from wingbeat.servers.outbox import Order
from wingbeat.servers.protocol import (
    LINKS,
    interface_of,
    link_of,
    position_of,
    urgency_of,
    wish_of,
)


@given(st.integers(0, 15), st.integers(0, 2**40), st.integers(0, LINKS - 1))
def test_a_wish_is_one_number_of_32_bits(urgency: int, position: int, link: int) -> None:
    wish = wish_of(urgency, position, link)
    assert 0 <= wish < 2**32
    assert urgency_of(wish) == urgency
    assert position_of(wish) == min(position, 2**24 - 1)
    assert link_of(wish) == link


@pytest.mark.parametrize(
    ("reach", "found"),
    [((0, 1), [0, 1]), ((0,), [0, 0]), ((1,), [1, 1]), ((2, 0, 1), [2, 0])],
    ids=str,
)
def test_a_link_is_an_interface_that_reaches_the_peer(
    reach: tuple[int, ...], found: list[int]
) -> None:
    assert [interface_of(reach, link) for link in range(2)] == found


CONFIG = ServerConfig(
    room="servers/", index=1, workers=4, hosts=(0, 2), interfaces=("eth0", "eth1"), classes=2,
    encrypted=True, timeout=12.5, most=1 << 40, order="urgent",
)  # fmt: skip


def test_what_a_server_is_told_comes_back_from_text() -> None:
    found = ServerConfig.from_json(CONFIG.to_json())
    assert found == CONFIG
    assert hash(found) == hash(CONFIG), "lists have become tuples again"
    assert found.number == 5
    assert Order(found.order) is Order.URGENT


@pytest.mark.parametrize("wire", [Sketch(bits=3, level="ends"), LowRank(rank=7), Half()], ids=repr)
def test_a_codec_comes_back_from_text(wire: Coded) -> None:
    config = dataclasses.replace(CONFIG, wire=wire, dense=True)
    assert ServerConfig.from_json(config.to_json()) == config
    sums = config.sums()
    assert isinstance(sums, CodedSums)
    assert sums._wire == wire
    assert sums._dense


def test_a_server_without_a_codec_loads_no_torch() -> None:
    code = (
        "import sys; from wingbeat.servers.config import ServerConfig; "
        f"ServerConfig.from_json({CONFIG.to_json()!r}).sums(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "rank 0"), (3, "rank 3"), (4, "server 0 (started by rank 0)"),
     (5, "server 1 (started by rank 2)")],
)  # fmt: skip
def test_a_process_is_named_with_its_role(number: int, name: str) -> None:
    assert CONFIG.name(number) == name_of(number, 4, (0, 2)) == name

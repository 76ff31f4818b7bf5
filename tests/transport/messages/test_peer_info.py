"""What a card may say; whatever else is under its key is refused with one kind of error."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from wingbeat.transport.interfaces import Host, Interface
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages.peers import PeerInfo, read_peer_info

HOST = Host("a", (Interface("eth0", "10.0.0.1", "10.0.0.0/24"),))
ENDS = (("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5001"),)
CARD = PeerInfo(HOST, ("10.0.0.1",), 7, "1" * 40, ENDS, 1000, 9000)
WRONG = (
    None, True, 0, -1, 1, 2**70, 10**400, 1.5, math.inf, -math.inf, math.nan, "", "x", "1",
    "#" * 40, "é" * 40, "\ud800", [], {}, [[]], {"a": 1}, [1, 2, 3], "10.0.0.0/8", "::1",
)  # fmt: skip


def fields() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(CARD.to_json())
    return data


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value of a document."""
    if at:
        yield at
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from places(value, (*at, key))


def test_peer_info_is_read_as_written() -> None:
    assert PeerInfo.from_json(CARD.to_json()) == CARD


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", math.inf),
        ("session", True),
        ("session", "7"),
        ("message", math.inf),
        ("message", 0),
        ("message", 2**31),
        ("window", 1.0),
        ("window", 2**63),
        ("uses", "10.0.0.1"),
        ("uses", ["10.0.0.1", "10.0.0.1"]),
        ("listens", ["tcp://10.0.0.1:5000"]),
        ("listens", [["tcp://10.0.0.1:5000"] * 5]),
        ("listens", [[]]),
        ("key", "#" * 40),  # of the right letters, and no key
        ("key", None),
        ("host", math.inf),
    ],
)
def test_a_wrong_field_is_a_value_error(field: str, value: object) -> None:
    with pytest.raises(ValueError, match="malformed") as caught:
        PeerInfo.from_json(json.dumps({**fields(), field: value}))
    assert type(caught.value) is ValueError


@pytest.mark.filterwarnings("ignore:__int__ returned non-int")  # a network that is given as true
def test_changed_peer_info_is_read_or_raises_value_error() -> None:
    chance, ways = random.Random(1), list(places(fields()))
    refused = 0
    for _ in range(3000):
        data = fields()
        *way, last = chance.choice(ways)
        inner = data
        for key in way:
            inner = inner[key]
        if chance.random() < 0.2:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(chance.choice(WRONG))
        text = json.dumps(data)
        if chance.random() < 0.2:
            at = chance.randrange(len(text))
            text = text[:at] + chr(chance.randrange(256)) + text[at + 1 :]
        try:
            PeerInfo.from_json(text)
        except ValueError:
            refused += 1
    assert refused > 2000


def test_malformed_peer_info_is_named_by_its_key() -> None:
    store = Switchboard()
    store.set("messages/r/3.1", "[]")
    with pytest.raises(ValueError, match=r"under 'messages/r/3\.1' a malformed peer info"):
        read_peer_info(store, "r", 3, 1, 1.0)

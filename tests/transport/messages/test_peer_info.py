"""What a card may say; whatever else is under its key is refused with one kind of error."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from wingbeat.schema import MalformedMessage, parse_json
from wingbeat.transport.interfaces import Host, Interface
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages.peers import (
    _PRIME,
    PeerInfo,
    new_secret,
    pair_key,
    public_key,
    read_peer_info,
)

HOST = Host("a", (Interface("eth0", "10.0.0.1", "10.0.0.0/24"),))
CARD = PeerInfo(HOST, 7, "1" * 40, True, ((5000, 5001),), 1000, 9000)
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
    assert parse_json(PeerInfo, CARD.to_json()) == CARD


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
        ("ports", [5000]),
        ("ports", [[5000] * 5]),
        ("ports", [[True]]),
        ("ports", [[]]),
        ("encrypted", 1),
        ("key", ""),
        ("key", "#" * 40),
        ("key", "0x11"),
        ("key", "0"),
        ("key", "1"),
        ("key", f"{_PRIME - 1:x}"),
        ("key", "f" * 512),
        ("key", None),
        ("host", math.inf),
    ],
)
def test_a_wrong_field_is_a_value_error(field: str, value: object) -> None:
    with pytest.raises(MalformedMessage, match=r".+"):
        parse_json(PeerInfo, json.dumps({**fields(), field: value}))


def test_addresses_with_different_numbers_of_ports_are_refused() -> None:
    both = (*HOST.interfaces, Interface("eth1", "10.0.1.1", "10.0.1.0/24"))
    two = dataclasses.replace(CARD, host=Host("a", both), ports=((1,), (2,)))
    assert parse_json(PeerInfo, two.to_json()) == two
    for wrong in ([[1]], [[1], [2, 3]]):
        text = json.dumps({**json.loads(two.to_json()), "ports": wrong})
        with pytest.raises(MalformedMessage, match="allowed: as many for each interface"):
            parse_json(PeerInfo, text)


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
            parse_json(PeerInfo, text)
        except ValueError:
            refused += 1
    assert refused > 2000


def test_prime_is_the_one_of_rfc_7919() -> None:
    """2^2048 - 2^1984 + ([2^1918 e] + 560316) 2^64 - 1."""
    bits, term, total, n = 2200, 1 << 2200, 0, 0
    while term:
        total += term
        n += 1
        term //= n
    e = total >> (bits - 1918)
    assert 2**2048 - 2**1984 + ((e + 560316) << 64) - 1 == _PRIME


def test_only_the_two_processes_have_the_key_of_a_pair() -> None:
    secrets = [new_secret() for _ in range(3)]
    infos = [
        dataclasses.replace(CARD, session=n, key=public_key(each)) for n, each in enumerate(secrets)
    ]
    key = pair_key(secrets[0], infos[0], infos[1])
    assert len(key) == 32
    assert key == pair_key(secrets[1], infos[1], infos[0])
    others = {pair_key(secrets[2], infos[0], infos[1]), pair_key(secrets[0], infos[0], infos[2])}
    assert key not in others
    changed = dataclasses.replace(infos[1], session=9)
    assert key != pair_key(secrets[0], infos[0], changed), "it is bound to the sessions"


def test_malformed_peer_info_is_named_by_its_key() -> None:
    store = Switchboard()
    store.set("messages/r/3.1", "[]")
    with pytest.raises(
        MalformedMessage, match=r"malformed peer info, 'messages/r/3\.1' in the ren"
    ):
        read_peer_info(store, "r", 3, 1, 1.0)

"""The header of an encoded slice: a packed header is read, and all others are rejected."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.compression import Half, LowRank, Sketch, kinds
from wingbeat.methods.parameter_server.coding import (
    MAX_HEADER_BYTES,
    MAX_PIECES,
    Piece,
    pack_header,
    unpack_header,
)

WIRES: list[Any] = [
    Sketch(bits=3),
    LowRank(rank=5, bits=7),
    Half(),
    Sketch(groups={"a*": LowRank(rank=2), "b*": "fp32", "c*": "fp16", "d*": 2}),
]
PIECES = [Piece(12), Piece(6, 0, 0)]


def read(data: bytes, wire: Any = WIRES[0], most: int = 1000) -> tuple[Piece, ...]:
    return unpack_header(memoryview(data), wire, most)[0]


@pytest.mark.parametrize("wire", WIRES, ids=repr)
@given(numels=st.lists(st.integers(1, 2**20), min_size=1, max_size=MAX_PIECES), data=st.data())
def test_unpack_header_of_packed_header_returns_pieces(
    wire: Any, numels: list[int], data: st.DataObject
) -> None:
    pieces = []
    for numel in numels:
        kind = data.draw(st.integers(0, len(kinds(wire)) - 1))
        matrix = isinstance(kinds(wire)[kind], LowRank) and data.draw(st.booleans())
        pieces.append(Piece(numel, numel if matrix else 0, kind))
    packed = pack_header(wire, pieces)
    assert len(packed) == 12 + len(pieces) * 12 <= MAX_HEADER_BYTES
    assert len(packed) % 4 == 0, "what follows is read as float32"
    found = unpack_header(memoryview(packed + b"payload"), wire, sum(numels))
    assert found == (tuple(pieces), len(packed))


def changed(place: int, code: str, value: int) -> bytes:
    data = bytearray(pack_header(WIRES[0], PIECES))
    struct.pack_into("<" + code, data, place, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "version is missing"),
        (b"\x03\0\0\0" * 2, "the number of pieces is missing"),
        (changed(0, "I", 2), "version is 2; allowed: 3 to 3"),
        (changed(4, "I", 1), "other settings of the codec; this server has Sketch(bits=3)"),
        (changed(8, "I", 0), "the number of pieces is 0; allowed: 1 to 300"),
        (changed(8, "I", 3), "pieces has 3 items in 6 words"),
        (changed(8, "I", 301) + bytes(9999), "the number of pieces is 301; allowed: 1 to 300"),
        (changed(12, "I", 0), "pieces[0].numel is 0; allowed: 1 to 4294967295"),
        (changed(12, "I", 1001), "a slice of 1007 elements; allowed are 1000"),
        (changed(16, "I", 4), "malformed piece: Piece(numel=12, cols=4, kind=1)"),
        (changed(20, "I", 2), "pieces[0].kind is 2; allowed: 0 to 1"),
        (pack_header(WIRES[0], PIECES)[:-1], "pieces has 2 items in 5 words"),
    ],
)
def test_unpack_header_of_malformed_header_raises(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        read(data)
    assert why in str(caught.value)


@pytest.mark.parametrize("piece", [Piece(12, 5), Piece(12, 24), Piece(12, 4, 0)])
def test_unpack_header_of_partial_rows_raises(piece: Piece) -> None:
    with pytest.raises(ValueError, match="malformed piece"):
        read(pack_header(WIRES[1], [piece]), WIRES[1])


def test_unpack_header_at_element_limit_succeeds() -> None:
    assert read(pack_header(WIRES[0], PIECES), most=18)
    with pytest.raises(ValueError, match="18 elements; allowed are 17"):
        read(pack_header(WIRES[0], PIECES), most=17)


@pytest.mark.parametrize("other", [Sketch(bits=4), Sketch(bits=3, split="count"), LowRank(bits=3)])
def test_unpack_header_of_other_codec_raises(other: Any) -> None:
    with pytest.raises(ValueError, match="other settings"):
        read(pack_header(other, [Piece(12)]))

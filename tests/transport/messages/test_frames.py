"""The layout of a frame's header, byte by byte, and the refusal of everything else."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.headers import REASONS, Type
from wingbeat._native import Header, Malformed, unpack
from wingbeat.transport.messages.frames import HEADER_BYTES

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)

HEADERS = st.builds(
    Header,
    type=st.sampled_from([int(each) for each in Type]),
    session=U64,
    sender=U32,
    receiver=U32,
    sequence=U64,
    arrived=U64,
    taken=U64,
    kind=U32,
    ids=st.tuples(U32, U32, U32, U32),
    dtype=st.integers(0, 7),
    length=U32,
    spans=st.lists(st.tuples(U64, U64), max_size=255).map(tuple),
)

EXAMPLE = Header(3, 0x1122334455667788, 2, 5, 7, 8, 9, 10, (11, 12, 13, 14), 6, 15, ((16, 17),))


def test_the_layout_is_the_documented_one() -> None:
    data = EXAMPLE.pack()
    assert data[:8] == b"wgbt\x01\x03\x06\x01"
    assert data[8:16] == bytes.fromhex("8877665544332211")
    fields = struct.unpack_from("<IIQQQI4II", data, 16)
    assert fields == (2, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    assert struct.unpack_from("<I", data, 72)[0] == zlib.crc32(data[:72] + data[76:])
    assert struct.unpack_from("<QQ", data, 76) == (16, 17)
    assert len(data) == EXAMPLE.size == HEADER_BYTES + 16 == 92


@given(HEADERS, st.binary(max_size=40))
def test_packed_header_is_read_with_any_suffix(header: Header, rest: bytes) -> None:
    assert unpack(header.pack() + rest) == header


@given(HEADERS, st.data())
def test_flipped_bit_is_detected(header: Header, data: st.DataObject) -> None:
    packed = bytearray(header.pack())
    place = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[place // 8] ^= 1 << place % 8
    with pytest.raises(Malformed):
        unpack(bytes(packed))


@given(HEADERS, st.data())
def test_truncated_header_is_detected(header: Header, data: st.DataObject) -> None:
    packed = header.pack()
    with pytest.raises(Malformed, match="size"):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


def resealed(data: bytes, place: int, value: int) -> bytes:
    """The same with one byte changed and the checksum made anew: only checks can find it."""
    changed = data[:place] + bytes([value]) + data[place + 1 :]
    checksum = struct.pack("<I", zlib.crc32(changed[:72] + changed[76:]))
    return changed[:72] + checksum + changed[76:]


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (0, 0, "magic"),
        (4, 2, "version"),
        (5, 0, "type"),
        (5, 8, "type"),
        (6, 8, "dtype"),
        (7, 2, "size"),
    ],
)
def test_each_wrong_field_has_its_reason(place: int, value: int, reason: str) -> None:
    with pytest.raises(Malformed) as caught:
        unpack(resealed(EXAMPLE.pack(), place, value))
    assert str(caught.value) == reason


def test_random_bytes_are_refused_with_a_known_reason() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        with pytest.raises(Malformed) as caught:
            unpack(chance.randbytes(chance.randrange(200)))
        assert str(caught.value) in REASONS

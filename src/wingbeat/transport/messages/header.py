"""What stands before every message: one fixed layout, checked before a byte of it is used. Pure.

Little-endian, without gaps, `FIXED` bytes, then ``spans`` times two numbers of 8 bytes::

     0   4  magic         b"wgbt"
     4   1  version       of this layout
     5   1  type          a `Type`
     6   1  dtype         a place in `DTYPES`
     7   1  spans         how many ranges follow, 0 to 255
     8   8  session       a random number that the sender drew when it started
    16   4  sender        its number in the job
    20   4  receiver      the number of whom it is for
    24   8  sequence      place of a message in its flow, from 1
    32   8  arrived       all up to this place of the flow back have arrived at the sender
    40   8  taken         bytes of the flow back that the sender has done with
    48   4  kind          what the message is, as its users number it
    52  16  ids           four numbers of 4 bytes that mean what the kind says
    68   4  length        bytes of the payload
    72   4  checksum      CRC-32 of everything else in the header, ranges included
    76      ranges        start and length of each, in elements of the dtype
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from wingbeat.errors import UsageError

MAGIC = b"wgbt"
VERSION = 1

DTYPES = ("", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""What a payload consists of; empty where nothing is said of it."""

MOST_SPANS = 255
_BEFORE = struct.Struct("<4sBBBBQIIQQQI4II")
_CHECKSUM = struct.Struct("<I")
_SPAN = struct.Struct("<QQ")
FIXED = _BEFORE.size + _CHECKSUM.size
"""Bytes of a header without ranges."""
LARGEST = FIXED + _SPAN.size * MOST_SPANS
"""Bytes of a header with as many ranges as there may be."""


class Type(enum.IntEnum):
    """What a frame does in its flow."""

    HELLO = 1
    """Here I am, and this is what has arrived of yours; please answer."""
    WELCOME = 2
    """The answer to HELLO."""
    DATA = 3
    """A message of the users'."""
    ACKNOWLEDGE = 4
    """What has arrived and what was taken, and nothing else."""
    MISSING = 5
    """As ACKNOWLEDGE; what comes after ``arrived`` was lost and is to be sent again."""
    ASK = 6
    """Has everything up to ``sequence`` arrived?"""
    LEAVE = 7
    """The last message of the flow: the sender has ended in an orderly way."""


TYPES = frozenset(int(each) for each in Type)


class Malformed(ValueError):
    """A frame that no job of ours has sent; ``reason`` is one of `REASONS`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


REASONS = ("size", "magic", "version", "checksum", "type", "dtype", "length")
"""Why a header is refused, in the order in which it is looked at."""


class Header(NamedTuple):
    """The fields of the layout above; ``spans`` are (start, length) pairs."""

    type: int
    session: int
    sender: int
    receiver: int
    sequence: int = 0
    arrived: int = 0
    taken: int = 0
    kind: int = 0
    ids: tuple[int, int, int, int] = (0, 0, 0, 0)
    dtype: int = 0
    length: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    def pack(self) -> bytes:
        """Return the bytes.

        Raises:
            UsageError: a number does not fit into its field.
        """
        return pack(*self)

    @property
    def size(self) -> int:
        """Bytes of the header with its ranges."""
        return FIXED + _SPAN.size * len(self.spans)


def pack(
    type_: int,
    session: int,
    sender: int,
    receiver: int,
    sequence: int = 0,
    arrived: int = 0,
    taken: int = 0,
    kind: int = 0,
    ids: Sequence[int] = (0, 0, 0, 0),
    dtype: int = 0,
    length: int = 0,
    spans: tuple[tuple[int, int], ...] = (),
) -> bytes:
    """Return the bytes of a header with these fields.

    Raises:
        UsageError: a number does not fit into its field.
    """
    try:
        before = _BEFORE.pack(
            MAGIC, VERSION, type_, dtype, len(spans), session, sender, receiver, sequence,
            arrived, taken, kind, *ids, length,
        )  # fmt: skip
        if not spans:
            return before + _CHECKSUM.pack(crc32(before))
        ranges = b"".join([_SPAN.pack(*span) for span in spans])
    except (struct.error, TypeError) as err:
        raise UsageError(
            f"kind={kind!r}, ids={ids!r}, spans={spans!r:.80}: allowed are a kind and four ids "
            f"from 0 to 2**32 - 1, and up to {MOST_SPANS} (start, length) pairs of numbers from 0 "
            f"to 2**64 - 1 ({err})"
        ) from None
    return before + _CHECKSUM.pack(crc32(ranges, crc32(before))) + ranges


def unpack(data: bytes | memoryview) -> Header:
    """Read and check a header, which ``data`` begins with.

    Raises:
        Malformed: it is none, or of another version, or not as it was sent.
    """
    if len(data) < FIXED:
        raise Malformed("size")
    fields = _BEFORE.unpack_from(data)
    magic, version, kind_of, dtype, count = fields[:5]
    if magic != MAGIC:
        raise Malformed("magic")
    if version != VERSION:
        raise Malformed("version")
    end = FIXED + _SPAN.size * count
    if len(data) < end:
        raise Malformed("size")
    ranges = data[FIXED:end]
    expected = crc32(data[: _BEFORE.size])
    if count:
        expected = crc32(ranges, expected)
    if _CHECKSUM.unpack_from(data, _BEFORE.size)[0] != expected:
        raise Malformed("checksum")
    if kind_of not in TYPES:
        raise Malformed("type")
    if dtype >= len(DTYPES):
        raise Malformed("dtype")
    spans = tuple(_SPAN.iter_unpack(ranges)) if count else ()
    return Header._make((kind_of, *fields[5:12], fields[12:16], dtype, fields[16], spans))

"""What an encoded slice says of itself: a small head before its payload, checked first. Pure.

Little-endian, without gaps, `FIXED` bytes, then `EACH` bytes for each piece::

     0   1  version   of this layout
     1   1  nothing   0
     2   2  pieces    how many follow, 1 to `MOST`
     4   4  settings  CRC-32 of the wire as text: both ends must have the same

     0   4  numel     elements of the piece
     4   4  cols      columns of the matrix whose whole rows they are; 0: they are none
     8   4  kind      a place in `wingbeat.compression.kinds`; 0: float32 as it is

The elements of all pieces are the slice's, in their order.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from wingbeat.compression import Coded, LowRank, kinds, to_text

VERSION = 2

MOST = 300
"""Pieces of a slice. A message's four megabytes have room for the rows of some fifty gradients."""

_FIXED = struct.Struct("<BxHI")
_PIECE = struct.Struct("<III")
FIXED, EACH = _FIXED.size, _PIECE.size

ROOM = FIXED + MOST * EACH
"""Bytes of the largest head."""


class Piece(NamedTuple):
    """Consecutive elements of a slice that travel in one way."""

    numel: int
    cols: int = 0
    kind: int = 1


def pack(wire: Coded, pieces: Sequence[Piece]) -> bytes:
    """Return the head of a slice that ``wire`` encodes in these pieces."""
    assert 0 < len(pieces) <= MOST, f"{len(pieces)} pieces"
    head = _FIXED.pack(VERSION, len(pieces), _settings(wire))
    return head + b"".join(map(_PIECE.pack, *zip(*pieces, strict=True)))


def unpack(payload: memoryview, wire: Coded, most: int) -> tuple[Piece, ...]:
    """Return the pieces of a payload that begins with a head.

    Args:
        payload: as it came, from anybody.
        wire: the only codec that it may be of.
        most: elements that a slice may have.

    Raises:
        ValueError: `pack` has made no such head for this codec.
    """
    if len(payload) < FIXED:
        raise ValueError(f"{len(payload)} bytes are no encoded slice")
    version, count, settings = _FIXED.unpack_from(payload)
    if version != VERSION:
        raise ValueError(f"version {version} of an encoded slice; this is {VERSION}")
    if payload[1] or settings != _settings(wire):
        raise ValueError(f"other settings of the codec; this server has {wire}")
    if not 0 < count <= MOST or len(payload) < FIXED + count * EACH:
        raise ValueError(f"{count} pieces in {len(payload)} bytes; allowed are 1 to {MOST}")
    pieces, known = [], kinds(wire)
    for place in range(count):
        numel, cols, kind = _PIECE.unpack_from(payload, FIXED + place * EACH)
        whole = numel % cols == 0 if cols else True
        matrix = kind < len(known) and isinstance(known[kind], LowRank)
        if not numel or kind >= len(known) or not whole or (cols and not matrix):
            raise ValueError(f"a piece with numel={numel}, cols={cols}, kind={kind}")
        pieces.append(Piece(numel, cols, kind))
    numel = sum(piece.numel for piece in pieces)
    if numel > most:
        raise ValueError(f"a slice of {numel} elements; allowed are {most}")
    return tuple(pieces)


def nbytes(pieces: Sequence[Piece]) -> int:
    """Return the bytes of a head with these pieces."""
    return FIXED + len(pieces) * EACH


@functools.cache
def _settings(wire: Coded) -> int:
    return zlib.crc32(to_text(wire).encode())

"""What an encoded slice says of itself: a small head before its payload, checked first. Pure.

Little-endian, without gaps, `FIXED` bytes, then `EACH` bytes for each piece::

     0   1  version   of this layout
     1   1  codec     a place in `CODECS`
     2   1  bits      of a sketched value; 0: nothing is sketched
     3   1  nothing   0
     4   2  rank      columns of factors; 0: there are none
     6   2  pieces    how many follow, 1 to `MOST`

     0   4  numel     elements of the piece
     4   4  cols      columns of the matrix whose whole rows they are; 0: they are none
     8   4  dense     1: float32 as it is; 0: by the codec

The elements of all pieces are the slice's, in their order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from wingbeat.wires import Coded, Half, LowRank, Sketch

VERSION = 1
CODECS: tuple[type[Coded], ...] = (Sketch, LowRank, Half)
"""What servers can read and write."""

MOST = 300
"""Pieces of a slice. A message's four megabytes have room for the rows of some fifty gradients."""

_FIXED = struct.Struct("<BBBxHH")
_PIECE = struct.Struct("<III")
FIXED, EACH = _FIXED.size, _PIECE.size

ROOM = FIXED + MOST * EACH
"""Bytes of the largest head."""


class Piece(NamedTuple):
    """Consecutive elements of a slice that travel in one way."""

    numel: int
    cols: int = 0
    dense: bool = False


def pack(wire: Coded, pieces: Sequence[Piece]) -> bytes:
    """Return the head of a slice that ``wire`` encodes in these pieces."""
    assert 0 < len(pieces) <= MOST, f"{len(pieces)} pieces"
    head = _FIXED.pack(VERSION, *_settings(wire), len(pieces))
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
    version, codec, bits, rank, count = _FIXED.unpack_from(payload)
    if version != VERSION:
        raise ValueError(f"version {version} of an encoded slice; this is {VERSION}")
    if payload[3] or (codec, bits, rank) != _settings(wire):
        raise ValueError(f"codec {codec} with bits={bits}, rank={rank}; this server has {wire}")
    if not 0 < count <= MOST or len(payload) < FIXED + count * EACH:
        raise ValueError(f"{count} pieces in {len(payload)} bytes; allowed are 1 to {MOST}")
    pieces = []
    for place in range(count):
        numel, cols, dense = _PIECE.unpack_from(payload, FIXED + place * EACH)
        whole = numel % cols == 0 if cols else True
        matrix = isinstance(wire, LowRank) and not dense
        if not numel or dense > 1 or not whole or (cols and not matrix):
            raise ValueError(f"a piece with numel={numel}, cols={cols}, dense={dense}")
        pieces.append(Piece(numel, cols, bool(dense)))
    numel = sum(piece.numel for piece in pieces)
    if numel > most:
        raise ValueError(f"a slice of {numel} elements; allowed are {most}")
    return tuple(pieces)


def nbytes(pieces: Sequence[Piece]) -> int:
    """Return the bytes of a head with these pieces."""
    return FIXED + len(pieces) * EACH


def _settings(wire: Coded) -> tuple[int, int, int]:
    """Return a codec's number, bits and rank."""
    bits = wire.bits if isinstance(wire, Sketch | LowRank) else 0
    return CODECS.index(type(wire)), bits, wire.rank if isinstance(wire, LowRank) else 0

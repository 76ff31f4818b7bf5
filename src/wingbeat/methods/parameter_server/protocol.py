"""Messages between workers and parameter servers, without I/O.

A message has a `Kind`, four integers (`Ids`), a dtype and a payload. Settings and optimizer state
are sent as a `Document`. The payload of an encoded slice begins with a header: little-endian,
without padding, `HEADER_BYTES` bytes, then `PIECE_BYTES` bytes for each piece::

     0   1  version   of this layout
     1   1  reserved  0
     2   2  pieces    number of pieces, 1 to `MAX_PIECES`
     4   4  settings  CRC-32 of the codec's settings as text: both ends must have the same

     0   4  numel     elements of the piece
     4   4  cols      columns of the matrix whose whole rows the piece holds; 0: not a matrix
     8   4  kind      index into `wingbeat.compression.kinds`; 0: float32

The pieces cover the elements of the slice in order.
"""

from __future__ import annotations

import enum
import functools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from wingbeat.compression import Coded, kinds, options_of, to_text
from wingbeat.transport.messages.frames import Reassembly

MAX_REASON = 500
"""Maximum size of a failure's reason, in bytes."""


class RequestError(Exception):
    """A server cannot perform a request. The text names the sender and the reason."""


class Kind(enum.IntEnum):
    """Kinds of messages."""

    PUSH_PULL = 1
    """Worker to server: gradients of a slice. The server replies with the sum."""
    PUSH = 2
    """Worker to server: gradients of a slice. The server keeps the sum until it is pulled."""
    PULL = 3
    """Worker to server: requests the sum of a slice."""
    SUM = 4
    """Server to worker: the sum of a slice over all workers."""
    FAILED = 5
    """Server to worker: the server has failed. The payload is the reason, in UTF-8."""
    PULL_RESIDUAL = 6
    """Worker to server: requests the encoding residual of a slice's sums, up to this round."""
    RESIDUAL = 7
    """Server to worker: the residual in float32, empty if there is none. The server drops it."""
    # Only for servers that run the optimizer. A worker sends these in one flow, so they stay in
    # order.
    LOAD = 8
    """Worker to server: parameters of a slice, and optionally optimizer state, as a document."""
    CONTINUATION = 9
    """Either way: the next fragment of the sender's last document."""
    BARRIER = 10
    """Worker to server: all documents of this worker are sent. Servers wait for all workers."""
    GRADIENTS = 11
    """Worker to server: gradients of a slice that replace the sum in the next update."""
    STEP = 12
    """Worker to server: update all slices, with these settings."""
    FETCH = 13
    """Worker to server: requests the parameters of a slice after the next update."""
    PARAMETERS = 14
    """Server to worker: the parameters of a slice."""
    STATE = 15
    """Worker to server: requests the optimizer state of a slice. The reply is a document."""
    EXPECT = 16
    """Never sent: a worker expects parameters that a `STEP` has requested."""
    PING = 17
    """Either way: no content. Delivery shows that the network interface works."""


UPDATE_KINDS = frozenset(
    {Kind.LOAD, Kind.CONTINUATION, Kind.BARRIER, Kind.GRADIENTS, Kind.STEP, Kind.FETCH, Kind.STATE}
)
"""Requests to servers that run the optimizer."""

ONE_WAY_KINDS = UPDATE_KINDS - {Kind.FETCH, Kind.STATE} | {Kind.PUSH}
"""Requests without a reply."""

NO_ROUND = 2**32 - 1
"""Round number of a `Kind.STEP` that uses the gradients of `Kind.GRADIENTS` and no sum."""


class Ids(NamedTuple):
    """The four integers of a message about a slice.

    Attributes:
        plan: number of the bucketing.
        slice: number of the slice within the plan. In a `Kind.STEP`: the round whose sums are used.
        round: number of earlier sums of the slice; for parameters, number of updates.
        route: class, link and position of the reply, see `pack_route`. In a `Kind.STEP`: 1 if the
            server sends the parameters without a request.
    """

    plan: int
    slice: int
    round: int
    route: int


_POSITIONS = 1 << 24
_CLASSES = 1 << 4

MAX_LINKS = 1 << 4
"""Maximum number of links among which slices are divided."""


def pack_route(urgency: int, position: int, link: int = 0) -> int:
    """Pack the traffic class and link of a reply, and the bucket's position in forward order."""
    return link << 28 | urgency << 24 | min(position, _POSITIONS - 1)


def link_of(route: int) -> int:
    """Return the link that a reply uses, see `interface_of`."""
    return route >> 28


def urgency_of(route: int) -> int:
    """Return the traffic class of a reply; 0 is the most urgent."""
    return route >> 24 & _CLASSES - 1


def position_of(route: int) -> int:
    """Return the bucket's position in forward order."""
    return route & _POSITIONS - 1


def interface_of(reachable: Sequence[int], link: int) -> int:
    """Return the local interface of a link to a peer.

    Both ends number their interfaces in the order of networks, so a link is the same network on
    both. ``reachable`` are the local interfaces that reach the peer, in order. There may be fewer
    than links, to a process of the same host or if not all networks connect all hosts.
    """
    return reachable[link % len(reachable)]


# -- the header of an encoded slice --------------------------------------------------------

HEADER_VERSION = 2

MAX_PIECES = 300
"""Maximum pieces of a slice. A message of 4 MiB holds the rows of about fifty gradients."""

_HEADER = struct.Struct("<BxHI")
_PIECE = struct.Struct("<III")
HEADER_BYTES, PIECE_BYTES = _HEADER.size, _PIECE.size

MAX_HEADER_BYTES = HEADER_BYTES + MAX_PIECES * PIECE_BYTES


class Piece(NamedTuple):
    """Consecutive elements of a slice with one encoding."""

    numel: int
    cols: int = 0
    kind: int = 1


def pack_header(wire: Coded, pieces: Sequence[Piece]) -> bytes:
    """Return the header of a slice that ``wire`` encodes in these pieces."""
    assert 0 < len(pieces) <= MAX_PIECES, f"{len(pieces)} pieces"
    header = _HEADER.pack(HEADER_VERSION, len(pieces), _checksum(wire))
    return header + b"".join(map(_PIECE.pack, *zip(*pieces, strict=True)))


def unpack_header(payload: memoryview, wire: Coded, max_numel: int) -> tuple[Piece, ...]:
    """Return the pieces of an encoded slice; ValueError if the received payload is malformed."""
    if len(payload) < HEADER_BYTES:
        raise ValueError(f"an encoded slice of {len(payload)} bytes has no header")
    version, count, settings = _HEADER.unpack_from(payload)
    if version != HEADER_VERSION:
        raise ValueError(f"version {version} of an encoded slice; expected {HEADER_VERSION}")
    if payload[1] or settings != _checksum(wire):
        raise ValueError(f"other settings of the codec; this server has {wire}")
    if not 0 < count <= MAX_PIECES or len(payload) < HEADER_BYTES + count * PIECE_BYTES:
        raise ValueError(f"{count} pieces in {len(payload)} bytes; allowed are 1 to {MAX_PIECES}")
    pieces, known = [], kinds(wire)
    for index in range(count):
        piece = Piece(*_PIECE.unpack_from(payload, HEADER_BYTES + index * PIECE_BYTES))
        whole_rows = piece.numel % piece.cols == 0 if piece.cols else True
        is_matrix = piece.kind < len(known) and options_of(known[piece.kind]).rank > 0
        if (
            not piece.numel
            or piece.kind >= len(known)
            or not whole_rows
            or (piece.cols and not is_matrix)
        ):
            raise ValueError(
                f"malformed piece: numel={piece.numel}, cols={piece.cols}, kind={piece.kind}"
            )
        pieces.append(piece)
    numel = sum(piece.numel for piece in pieces)
    if numel > max_numel:
        raise ValueError(f"a slice of {numel} elements; allowed are {max_numel}")
    return tuple(pieces)


def header_nbytes(pieces: Sequence[Piece]) -> int:
    """Return the size of a header with these pieces."""
    return HEADER_BYTES + len(pieces) * PIECE_BYTES


@functools.cache
def _checksum(wire: Coded) -> int:
    return zlib.crc32(to_text(wire).encode())


# -- documents -----------------------------------------------------------------------------

_NBYTES = "nbytes"


def split_document(
    fields: dict[str, Any], arrays: Sequence[memoryview], largest: int
) -> Iterator[Any]:
    """Yield the payloads of a document: the fields in JSON, then the arrays in fragments."""
    yield json.dumps({**fields, _NBYTES: sum(map(len, arrays))}).encode()
    for array in arrays:
        for start in range(0, len(array), largest):
            yield array[start : start + largest]


class Document(Reassembly):
    """A document, assembled from its messages."""

    def __init__(self, payload: Any, max_nbytes: int) -> None:
        try:
            fields = json.loads(bytes(payload))
            nbytes = fields[_NBYTES]
            if type(nbytes) is not int or nbytes < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RequestError(f"malformed document {bytes(payload[:40])!r}") from None
        if nbytes > max_nbytes:
            raise RequestError(f"a document of {nbytes} bytes; {max_nbytes} bytes are free")
        super().__init__(nbytes)
        self.fields: dict[str, Any] = fields

    def append(self, fragment: Any) -> None:
        """Append the next fragment, see `Reassembly.append`."""
        try:
            super().append(fragment)
        except ValueError as error:
            raise RequestError(str(error)) from None


def pack_numbers(numbers: Iterable[int]) -> str:
    """Encode a set of integers as a bit mask in hexadecimal."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return f"{bits:x}"


def unpack_numbers(bits: Any) -> frozenset[int]:
    """Return the set of integers of a bit mask in hexadecimal."""
    try:
        digits = f"{int(bits, 16):b}"
    except (TypeError, ValueError):
        raise RequestError(f"malformed parameters of a step: {str(bits)[:40]!r}") from None
    return frozenset(place for place, bit in enumerate(reversed(digits)) if bit == "1")

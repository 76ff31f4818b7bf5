"""How slices are sent if not in their own dtype. Needs torch.

The payload of an encoded slice begins with a `SliceHeader`, in words of 4 bytes.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.codec import ALIGNMENT
from wingbeat.codecs.coding import Region, all_of
from wingbeat.compression import Coded, kinds, options_of, to_text
from wingbeat.methods.parameter_server.aggregator import CODED, Array
from wingbeat.schema import Length, Range, Word, read_prefix, to_bytes
from wingbeat.types import Span

FLOAT32 = 4

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""Names of the dtypes that servers sum."""

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

# -- the header ----------------------------------------------------------------------------

HEADER_VERSION = 3

MAX_PIECES = 300
"""Maximum pieces of a slice. A message of 4 MiB holds the rows of about fifty gradients."""

MAX_HEADER_BYTES = 12 + 12 * MAX_PIECES


class Piece(NamedTuple):
    """Consecutive elements of a slice with one encoding.

    Attributes:
        numel: number of elements.
        cols: columns of the matrix whose whole rows the piece holds; 0 if it is no matrix.
        kind: index into `wingbeat.compression.kinds`; 0 is float32.
    """

    numel: Annotated[int, Range(1)]
    cols: Word = 0
    kind: Annotated[int, Range(0, "kinds")] = 1


class SliceHeader(NamedTuple):
    """The beginning of an encoded slice.

    Attributes:
        version: of this layout.
        settings: CRC-32 of the codec's settings as text, which both ends must have.
        pieces: the elements of the slice, in order.
    """

    version: Annotated[int, Range(HEADER_VERSION, HEADER_VERSION + 1)]
    settings: Word
    pieces: Annotated[tuple[Piece, ...], Length(least=1, most=MAX_PIECES)]


def pack_header(wire: Coded, pieces: Sequence[Piece]) -> bytes:
    """Return the header of a slice that ``wire`` encodes in these pieces."""
    assert 0 < len(pieces) <= MAX_PIECES, f"{len(pieces)} pieces"
    return to_bytes(SliceHeader(HEADER_VERSION, _checksum(wire), tuple(pieces)))


def unpack_header(
    payload: memoryview, wire: Coded, max_numel: int
) -> tuple[tuple[Piece, ...], int]:
    """Return the pieces of an encoded slice, and the bytes of its header.

    Raises ValueError if the received payload is malformed.
    """
    known = kinds(wire)
    header, nbytes = read_prefix(SliceHeader, payload, kinds=len(known))
    if header.settings != _checksum(wire):
        raise ValueError(f"other settings of the codec; this server has {wire}")
    for piece in header.pieces:
        is_matrix = options_of(known[piece.kind]).rank > 0
        if piece.cols and not (is_matrix and piece.numel % piece.cols == 0):
            raise ValueError(f"malformed piece: {piece}")
    total = sum(piece.numel for piece in header.pieces)
    if total > max_numel:
        raise ValueError(f"a slice of {total} elements; allowed are {max_numel}")
    return header.pieces, nbytes


@functools.cache
def _checksum(wire: Coded) -> int:
    return zlib.crc32(to_text(wire).encode())


# -- encoded slices ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceCoding:
    """The encoding of a slice of ``numel`` elements; ``nbytes`` is the size of its payload."""

    header: bytes
    coding: Coding = field(compare=False)
    numel: int = field(compare=False)
    nbytes: int = field(compare=False)

    @staticmethod
    def of(wire: Coded, coding: Coding, span: Span) -> SliceCoding:
        """Return the part of a bucket's coding that belongs to one slice."""
        coding, known = coding.cut(span), all_of(wire)
        pieces = [Piece(len(r.span), r.cols, known.index(r.codec)) for r in coding.regions]
        return SliceCoding._make(pack_header(wire, pieces), coding, len(span))

    @staticmethod
    def _make(header: bytes, coding: Coding, numel: int) -> SliceCoding:
        return SliceCoding(header, coding, numel, len(header) + coding.room(Span(0, numel)))

    def encode(self, values: torch.Tensor | Array, residual: torch.Tensor | Array | None) -> Array:
        """Return the payload of values plus the residual; leave in the residual what it lacks."""
        payload = np.zeros(self.nbytes, np.uint8)  # padding between pieces is sent too
        payload[: len(self.header)] = np.frombuffer(self.header, np.uint8)
        room = torch.from_numpy(payload)[len(self.header) :]
        kept = None if residual is None else torch.as_tensor(residual, device="cpu")
        self.coding.encode(torch.as_tensor(values, device="cpu"), Span(0, self.numel), room, kept)
        return payload

    def decode(self, payload: memoryview, out: torch.Tensor | Array, *, add: bool = False) -> None:
        """Decode a payload with this header into ``out``, or add it."""
        coded = bytes_tensor(payload)[len(self.header) :]
        self.coding.decode(coded, torch.as_tensor(out, device="cpu"), Span(0, self.numel), add=add)


class SliceCodec:
    """Parses encoded slices that are received; ``largest`` is the maximum size of a message.

    ``has_residuals`` states whether encoding a sum leaves a residual.
    """

    def __init__(self, wire: Coded, largest: int) -> None:
        self.wire, self._codecs = wire, all_of(wire)
        self.has_residuals = wire.keeps
        self._max_numel = largest // FLOAT32  # a sum may be sent without the codec

    def parse(self, payload: memoryview, known: SliceCoding | None = None) -> SliceCoding:
        """Return a payload's coding, usually the last ``known`` one; ValueError if malformed."""
        if known is None or payload[: len(known.header)] != known.header:
            pieces, nbytes = unpack_header(payload, self.wire, self._max_numel)
            regions, start = [], 0
            for piece in pieces:
                span = Span(start, start + piece.numel)
                regions.append(Region(span, self._codecs[piece.kind], piece.cols))
                start = span.stop
            known = SliceCoding._make(bytes(payload[:nbytes]), Coding(regions), start)
        if len(payload) != known.nbytes:
            raise ValueError(f"{len(payload)} bytes in place of {known.nbytes}")
        return known


# -- formats of a worker's transfers -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SliceFormat:
    """How a slice is sent, if not in its own dtype.

    Attributes:
        dtype: of the messages with gradients.
        nbytes: the size of the gradients.
        encode: returns the gradients; called once, when they are sent.
        decode: writes a reply's dtype and payload to the slice; ValueError if it is malformed.
    """

    dtype: str
    nbytes: int
    encode: Callable[[], memoryview]
    decode: Callable[[str, memoryview], None]


def cast_format(part: torch.Tensor, dtype: str, reply_dtype: str) -> SliceFormat:
    """Return the format of gradients sent in ``dtype``, whose sum arrives in ``reply_dtype``."""
    narrower = _BY_NAME[dtype]
    return SliceFormat(
        dtype,
        part.numel() * narrower.itemsize,
        lambda: bytes_of(part.to(narrower)),
        functools.partial(copy_sum, part, reply_dtype),
    )


def coded_format(
    coding: SliceCoding, part: torch.Tensor, residual: torch.Tensor | None, dense: str = ""
) -> SliceFormat:
    """Return the format of encoded gradients, whose sum is encoded too or has the dtype ``dense``.

    Encoding adds the residual, and updates it.
    """

    def decode(dtype: str, payload: memoryview) -> None:
        header = coding.header
        if dtype != CODED or len(payload) != coding.nbytes or payload[: len(header)] != header:
            raise ValueError("another format")
        coding.decode(payload, part)

    return SliceFormat(
        CODED,
        coding.nbytes,
        lambda: coding.encode(part, residual).data,
        functools.partial(copy_sum, part, dense) if dense else decode,
    )


def residual_format(residual: torch.Tensor) -> SliceFormat:
    """Return the format of a request for the residual of a slice's sums, added to ``residual``."""

    def decode(dtype: str, payload: memoryview) -> None:
        if dtype or payload:
            residual.add_(_elements(residual.numel(), "float32", dtype, payload))

    return SliceFormat("", 0, lambda: memoryview(b""), decode)


def copy_sum(part: torch.Tensor, expected: str, dtype: str, payload: memoryview) -> None:
    """Copy a sum that is not encoded to a slice; ValueError if it has another dtype or size."""
    part.copy_(_elements(part.numel(), expected, dtype, payload))


def _elements(numel: int, expected: str, dtype: str, payload: memoryview) -> torch.Tensor:
    torch_dtype = _BY_NAME[expected]
    if dtype != expected or len(payload) != numel * torch_dtype.itemsize:
        raise ValueError("another format")
    return bytes_tensor(payload).view(torch_dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, as a view."""
    view: memoryview = tensor.detach().view(torch.uint8).numpy().data
    return view


def bytes_tensor(payload: memoryview) -> torch.Tensor:
    """Return the bytes of a message as a tensor; a copy if they are read-only or not aligned."""
    array = np.frombuffer(payload, np.uint8)
    if payload.readonly or array.__array_interface__["data"][0] % ALIGNMENT:
        array = array.copy()
    return torch.from_numpy(array)

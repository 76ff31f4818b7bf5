"""Gradients of colayers in pieces, one for each worker, dense or encoded by a codec.

A piece is a block of a colayer's gradients, one parameter after the other, as dense elements or as
the payload of a codec, followed by one byte for each parameter of the colayer: 1 if it has a
gradient. The owner of a piece adds the contributions in the given order (Canary, section 4.4.2).
Every worker joins the pieces of a round into gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wingbeat.codecs import Coding
from wingbeat.collectives import Encoded
from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.messages import Contribution, PieceSum
from wingbeat.types import Span, blocks_of

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
"""The dtypes that can be summed."""

Array = np.ndarray[Any, np.dtype[Any]]
Payload = bytes | bytearray


class Pieces:
    """Splits gradients, adds contributions, and joins sums; holds no parameters."""

    def __init__(self, colayers: Sequence[Mapping[str, torch.Tensor]], workers: int) -> None:
        for colayer in colayers:
            _check_colayer(colayer)
        self._shapes = [[param.shape for param in colayer.values()] for colayer in colayers]
        self._dtypes = [_DTYPES[next(iter(colayer.values())).dtype] for colayer in colayers]
        sizes = [sum(shape.numel() for shape in shapes) for shapes in self._shapes]
        self._spans = [blocks_of(size, workers) for size in sizes]

    def __len__(self) -> int:
        return len(self._shapes)

    def split(self, colayer: int, flat: torch.Tensor, used: Sequence[bool]) -> list[Payload]:
        """Return copies of the pieces of this worker's gradients.

        ``flat`` has the gradients of a colayer, one parameter after the other, zeros for parameters
        without one; ``used`` states for each parameter whether it has a gradient.
        """
        values, flags = flat.detach().numpy(), bytes(map(bool, used))
        return [
            self._encode(colayer, piece, values[span.start : span.stop], flags)
            for piece, span in enumerate(self._spans[colayer])
        ]

    def sum_contributions(
        self, colayer: int, piece: int, contributions: Mapping[Contribution, Any]
    ) -> Payload | None:
        """Add contributions in their order; return None if there are none."""
        if not contributions:
            return None
        total = np.empty(len(self._spans[colayer][piece]), self._dtypes[colayer])
        used = np.zeros(len(self._shapes[colayer]), np.uint8)
        for number, ((_, worker), payload) in enumerate(contributions.items()):
            used |= self._read(colayer, piece, payload, worker, total, add=number > 0)
        return self._encode(colayer, piece, total, used.tobytes())

    def join(self, parts: Sequence[PieceSum]) -> list[list[torch.Tensor | None]]:
        """Return the gradients of a round by colayer and parameter; None where there is none."""
        flats = [
            np.zeros(spans[-1].stop, dtype)
            for spans, dtype in zip(self._spans, self._dtypes, strict=True)
        ]
        used = [np.zeros(len(shapes), np.uint8) for shapes in self._shapes]
        for part in parts:
            if part.payload is not None:
                z, q = part.colayer, part.piece
                span = self._spans[z][q]
                out = flats[z][span.start : span.stop]
                used[z] |= self._read(z, q, part.payload, q, out)
        return [
            [grad if flag else None for grad, flag in zip(self._views(z, flat), flags, strict=True)]
            for z, (flat, flags) in enumerate(zip(flats, used, strict=True))
        ]

    def _views(self, colayer: int, flat: Array) -> list[torch.Tensor]:
        shapes = self._shapes[colayer]
        blocks = torch.from_numpy(flat).split([shape.numel() for shape in shapes])
        return [block.view(shape) for block, shape in zip(blocks, shapes, strict=True)]

    def _read(
        self, colayer: int, piece: int, payload: Any, worker: int, out: Array, *, add: bool = False
    ) -> Array:
        """Write or add the values of a payload; return by parameter whether it has a gradient."""
        flags = len(self._shapes[colayer])
        wanted, found = self._nbytes(colayer, piece) + flags, len(payload or b"")
        if wanted != found:
            raise PeerError(
                f"rank {worker} sent {found} bytes for piece {piece} of colayer {colayer}, "
                f"which has {wanted}; check that it trains the same model"
            )
        used = np.frombuffer(payload, np.uint8, offset=wanted - flags)
        if bool((used > 1).any()):
            raise PeerError(
                f"rank {worker} sent piece {piece} of colayer {colayer} with flags other "
                "than 0 and 1; check that it runs the same version"
            )
        self._decode(colayer, piece, payload, out, add=add)
        return used

    def _encode(self, colayer: int, piece: int, values: Array, flags: bytes) -> Payload:  # noqa: ARG002
        return values.tobytes() + flags

    def _nbytes(self, colayer: int, piece: int) -> int:
        return len(self._spans[colayer][piece]) * self._dtypes[colayer].itemsize

    def _decode(self, colayer: int, piece: int, payload: Any, out: Array, *, add: bool) -> None:  # noqa: ARG002
        values = np.frombuffer(payload, self._dtypes[colayer], count=len(out))
        if add:
            out += values
        else:
            out[:] = values


def _check_colayer(colayer: Mapping[str, torch.Tensor]) -> None:
    first = next(iter(colayer))
    for name, param in colayer.items():
        if param.device.type != "cpu" or param.dtype not in _DTYPES:
            raise UsageError(
                f"parameter {name!r} is {param.dtype} on {param.device}: bounded staleness sums "
                "float32 and float64 on the CPU only; use wingbeat.AllReduce()"
            )
        if param.dtype is not colayer[first].dtype:
            raise UsageError(
                f"parameters {first!r} ({colayer[first].dtype}) and {name!r} ({param.dtype}) are "
                "in one colayer, which has one dtype; use a model of one dtype"
            )


class EncodedPieces(Pieces):
    """Pieces of which some colayers are encoded by a codec.

    A worker encodes its contributions. The owner of a piece decodes them, adds them in float32, and
    encodes the sum once for all workers including itself, so all workers hold the same bits. One
    residual keeps the error of this worker's contributions and of the sums of its own piece. The
    communication thread computes sums while the training thread encodes.

    ``wires`` has by colayer the codec and its residual, at least as long as the gradients; None for
    a dense colayer.
    """

    def __init__(
        self,
        colayers: Sequence[Mapping[str, torch.Tensor]],
        workers: int,
        wires: Sequence[Encoded | None],
    ) -> None:
        super().__init__(colayers, workers)
        self._residuals = [None if wire is None else wire.residual for wire in wires]
        self._codings: list[list[Coding] | None] = [
            None if wire is None else [wire.coding.cut(span) for span in spans]
            for wire, spans in zip(wires, self._spans, strict=True)
        ]
        self._lock = threading.Lock()

    def undo_split(self, colayer: int, flat: torch.Tensor, payloads: Sequence[Payload]) -> None:
        """Undo the effect of `split` on the residual, for pieces that were not sent.

        The gradients in them are dropped; the residual of earlier gradients is kept.
        """
        residual = self._residuals[colayer]
        if residual is None:
            return
        for piece, payload in enumerate(payloads):
            span = self._spans[colayer][piece]
            values = np.empty(len(span), np.float32)
            flags = self._read(colayer, piece, payload, piece, values)
            back = torch.from_numpy(values) - flat[span.start : span.stop].float()
            with self._lock:
                for start, stop in self._ranges(colayer, span, flags.tobytes(), used=True):
                    residual[span.start + start : span.start + stop] += back[start:stop]

    def _encode(self, colayer: int, piece: int, values: Array, flags: bytes) -> Payload:
        codings = self._codings[colayer]
        if codings is None:
            return super()._encode(colayer, piece, values, flags)
        span, coding = self._spans[colayer][piece], codings[piece]
        whole = Span(0, len(span))
        nbytes = coding.room(whole)
        out = bytearray(nbytes + len(flags))
        out[nbytes:] = flags
        residual = self._residuals[colayer]
        with self._lock:
            part = None if residual is None else residual[span.start : span.stop]
            before = None if part is None or all(flags) else part.clone()
            if nbytes:
                payload = torch.frombuffer(out, dtype=torch.uint8, count=nbytes)
                coding.encode(torch.from_numpy(np.ascontiguousarray(values)), whole, payload, part)
            if part is not None and before is not None:
                # Values of parameters without a gradient are not used.
                for start, stop in self._ranges(colayer, span, flags, used=False):
                    part[start:stop] = before[start:stop]
        return out

    def _ranges(
        self, colayer: int, span: Span, flags: bytes, *, used: bool
    ) -> Iterator[tuple[int, int]]:
        """Yield the ranges in a piece of the parameters that have a gradient, or have none."""
        start = 0
        for shape, flag in zip(self._shapes[colayer], flags, strict=True):
            stop = start + shape.numel()
            first, last = max(start, span.start), min(stop, span.stop)
            if bool(flag) is used and first < last:
                yield first - span.start, last - span.start
            start = stop

    def _nbytes(self, colayer: int, piece: int) -> int:
        codings = self._codings[colayer]
        if codings is None:
            return super()._nbytes(colayer, piece)
        return codings[piece].room(Span(0, len(self._spans[colayer][piece])))

    def _decode(self, colayer: int, piece: int, payload: Any, out: Array, *, add: bool) -> None:
        codings = self._codings[colayer]
        if codings is None:
            super()._decode(colayer, piece, payload, out, add=add)
        elif nbytes := self._nbytes(colayer, piece):
            # Any bytes of this size can be decoded.
            encoded = torch.frombuffer(payload, dtype=torch.uint8, count=nbytes)
            span = Span(0, len(out))
            codings[piece].decode(encoded, torch.from_numpy(out), span, add=add)

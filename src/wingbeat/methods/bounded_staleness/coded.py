"""Pieces that travel through a codec: what is lost is kept, and sent with what comes next.

A worker encodes its contributions, and the owner of a piece decodes them, adds them up in float32,
and encodes the sum once for everybody, itself too: so all have the same bits. What a worker's
contributions lose, and what the sums of its own piece lose, is in one residual: either is what
the sum still lacks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wingbeat.codecs import Coding
from wingbeat.collectives import Encoded
from wingbeat.methods.bounded_staleness.pieces import Array, Payload, Pieces
from wingbeat.types import Span


class CodedPieces(Pieces):
    """As `Pieces`, some colayers of which are encoded.

    Sums are made in a thread of their own, beside training, which encodes contributions.

    Args:
        colayers: the parameters of each, by name.
        workers: how many there are.
        wires: by colayer, how it is encoded, its residual as long as its gradients at least; None
            where gradients travel as they are.
        name: what messages call the worker of a rank.

    Raises:
        UsageError: as `Pieces`.
    """

    def __init__(
        self,
        colayers: Sequence[Mapping[str, torch.Tensor]],
        workers: int,
        wires: Sequence[Encoded | None],
        name: Callable[[int], str] = "rank {}".format,
    ) -> None:
        super().__init__(colayers, workers, name)
        self._residuals = [None if wire is None else wire.residual for wire in wires]
        self._codings: list[list[Coding] | None] = [
            None if wire is None else [wire.coding.cut(span) for span in spans]
            for wire, spans in zip(wires, self._spans, strict=True)
        ]
        self._lock = threading.Lock()

    def take_back(self, colayer: int, flat: torch.Tensor, payloads: Sequence[Payload]) -> None:
        """Undo what `cut` has done to the residual, as its pieces were not sent after all.

        The gradients in them are dropped by the rule, but not what earlier ones have left.
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
                for start, stop in self._places(colayer, span, flags.tobytes(), used=True):
                    residual[span.start + start : span.start + stop] += back[start:stop]

    def _written(self, colayer: int, piece: int, values: Array, flags: bytes) -> Payload:
        codings = self._codings[colayer]
        if codings is None:
            return super()._written(colayer, piece, values, flags)
        span, coding = self._spans[colayer][piece], codings[piece]
        whole = Span(0, len(span))
        room = coding.room(whole)
        out = bytearray(room + len(flags))
        out[room:] = flags
        residual = self._residuals[colayer]
        with self._lock:
            part = None if residual is None else residual[span.start : span.stop]
            before = None if part is None or all(flags) else part.clone()
            if room:
                payload = torch.frombuffer(out, dtype=torch.uint8, count=room)
                coding.encode(torch.from_numpy(np.ascontiguousarray(values)), whole, payload, part)
            if part is not None and before is not None:
                # Nobody is going to use what has been sent of these parameters.
                for start, stop in self._places(colayer, span, flags, used=False):
                    part[start:stop] = before[start:stop]
        return out

    def _places(
        self, colayer: int, span: Span, flags: bytes, *, used: bool
    ) -> Iterator[tuple[int, int]]:
        """Yield where in a piece the parameters are that have a gradient, or have none."""
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
            # Any bytes of this size mean something. Nothing writes to them.
            coded = torch.frombuffer(payload, dtype=torch.uint8, count=nbytes)
            span = Span(0, len(out))
            codings[piece].decode(coded, torch.from_numpy(out), span, add=add)

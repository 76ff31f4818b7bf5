"""Gradients of colayers as they travel under bounded staleness: in pieces, one for each worker.

A piece is a block of a colayer's gradients, laid out one parameter after the other, as dense
elements of their own dtype; then a byte for each parameter of the colayer, 1 if it has a gradient.
Whoever owns the piece adds up what the workers sent, in the order that it is given (Canary, section
4.4.2). Everybody then joins the pieces of a round into gradients again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wingbeat.errors import PeerError, UsageError
from wingbeat.methods.bounded_staleness.messages import Entry, Round
from wingbeat.types import blocks_of

_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
"""What can be summed, by its owner, as it is."""

Array = np.ndarray[Any, np.dtype[Any]]
Payload = bytes | bytearray


class Pieces:
    """Cuts gradients, adds them up, and joins them; keeps no parameters.

    Args:
        colayers: the parameters of each, c[0] (the last layers) first, by name.
        workers: how many there are; as many are the pieces of a colayer.
        name: what messages call the worker of a rank.

    Raises:
        UsageError: parameters that cannot travel so; names one.
    """

    def __init__(
        self,
        colayers: Sequence[Mapping[str, torch.Tensor]],
        workers: int,
        name: Callable[[int], str] = "rank {}".format,
    ) -> None:
        for colayer in colayers:
            _check(colayer)
        self._shapes = [[param.shape for param in colayer.values()] for colayer in colayers]
        self._dtypes = [_DTYPES[next(iter(colayer.values())).dtype] for colayer in colayers]
        sizes = [sum(shape.numel() for shape in shapes) for shapes in self._shapes]
        self._spans = [blocks_of(size, workers) for size in sizes]
        self._name = name

    def __len__(self) -> int:
        """How many colayers there are."""
        return len(self._shapes)

    def cut(self, colayer: int, flat: torch.Tensor, used: Sequence[bool]) -> list[Payload]:
        """Return the pieces of this worker's gradients; they do not change with these.

        Args:
            colayer: whose.
            flat: the gradients, one parameter after the other; zeros where there is none.
            used: for each parameter, whether there is a gradient.
        """
        values, flags = flat.detach().numpy(), bytes(map(bool, used))
        return [
            self._written(colayer, piece, values[span.start : span.stop], flags)
            for piece, span in enumerate(self._spans[colayer])
        ]

    def summed(self, colayer: int, piece: int, waiting: Mapping[Entry, Any]) -> Payload | None:
        """Add contributions up, in the order that they have; None if there is none.

        Raises:
            PeerError: one of them is none of this piece; names who sent it.
        """
        if not waiting:
            return None
        total = np.empty(len(self._spans[colayer][piece]), self._dtypes[colayer])
        used = np.zeros(len(self._shapes[colayer]), np.uint8)
        for number, ((_, worker), payload) in enumerate(waiting.items()):
            used |= self._read(colayer, piece, payload, worker, total, add=number > 0)
        return self._written(colayer, piece, total, used.tobytes())

    def _written(self, colayer: int, piece: int, values: Array, flags: bytes) -> Payload:  # noqa: ARG002
        """Return what travels of the values of a piece: a worker's own, or a sum."""
        return values.tobytes() + flags

    def joined(self, parts: Sequence[Round]) -> list[list[torch.Tensor | None]]:
        """Return the gradients of a round, by colayer and parameter; None where nobody had one.

        Raises:
            PeerError: a sum is none of its piece; names the worker of its number.
        """
        flats = [
            np.zeros(spans[-1].stop, dtype)
            for spans, dtype in zip(self._spans, self._dtypes, strict=True)
        ]
        used = [np.zeros(len(shapes), np.uint8) for shapes in self._shapes]
        for part in parts:
            if part.payload is not None:
                span = self._spans[part.colayer][part.piece]
                out = flats[part.colayer][span.start : span.stop]
                used[part.colayer] |= self._read(
                    part.colayer, part.piece, part.payload, part.piece, out
                )
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
        """Write or add a payload's values, and return for each parameter if it has a gradient."""
        flags = len(self._shapes[colayer])
        wanted, found = self._nbytes(colayer, piece) + flags, len(payload or b"")
        if wanted != found:
            raise PeerError(
                f"{self._name(worker)} sent {found} bytes for piece {piece} of colayer {colayer}, "
                f"which takes {wanted}; check that it trains the same model"
            )
        used = np.frombuffer(payload, np.uint8, offset=wanted - flags)
        if bool((used > 1).any()):
            raise PeerError(
                f"{self._name(worker)} sent piece {piece} of colayer {colayer} with marks other "
                "than 0 and 1; check that it runs the same version"
            )
        self._decode(colayer, piece, payload, out, add=add)
        return used

    def _nbytes(self, colayer: int, piece: int) -> int:
        """The bytes of a piece's values."""
        return len(self._spans[colayer][piece]) * self._dtypes[colayer].itemsize

    def _decode(self, colayer: int, piece: int, payload: Any, out: Array, *, add: bool) -> None:  # noqa: ARG002
        """Write or add the values in a payload of the right size."""
        values = np.frombuffer(payload, self._dtypes[colayer], count=len(out))
        if add:
            out += values
        else:
            out[:] = values


def _check(colayer: Mapping[str, torch.Tensor]) -> None:
    """Raise a `UsageError` for parameters that cannot travel together."""
    first = next(iter(colayer))
    for name, param in colayer.items():
        if param.device.type != "cpu" or param.dtype not in _DTYPES:
            raise UsageError(
                f"parameter {name!r} is {param.dtype} on {param.device}: under bounded staleness "
                "float32 and float64 on the CPU are summed; use wingbeat.AllReduce()"
            )
        if param.dtype is not colayer[first].dtype:
            raise UsageError(
                f"parameters {first!r} ({colayer[first].dtype}) and {name!r} ({param.dtype}) are "
                "in one colayer, which has one dtype; use a model of one dtype"
            )

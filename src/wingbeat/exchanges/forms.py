"""How a slice of a bucket travels to the servers and back, where that is not as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.coding import all_of
from wingbeat.compression import Coded
from wingbeat.servers import head
from wingbeat.servers.coded import CODED, bytes_of
from wingbeat.types import Span

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""What messages call the dtypes that servers sum."""

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """Gradients in another dtype, and their sum perhaps in a third.

    Attributes:
        part: the slice, where gradients are and their sum is put.
        dtype: what gradients travel in.
        back: what the sum travels in.
    """

    part: torch.Tensor
    dtype: str
    back: str

    @property
    def nbytes(self) -> int:
        """The bytes of its gradients."""
        return self.part.numel() * _BY_NAME[self.dtype].itemsize

    def packed(self) -> memoryview:
        """Return the gradients, cast to the nearest values."""
        return _bytes(self.part.to(_BY_NAME[self.dtype]))

    def unpack(self, dtype: str, payload: memoryview) -> None:
        """Put the sum in its place.

        Raises:
            ValueError: it is of another size or dtype; nothing is written.
        """
        copy_sum(self.part, self.back, dtype, payload)


class Plan:
    """How one slice is encoded: what does not change from iteration to iteration.

    Args:
        wire: the codec's settings.
        coding: of the bucket.
        span: the slice's place there.
    """

    def __init__(self, wire: Coded, coding: Coding, span: Span) -> None:
        self.span = span
        self.coding = coding.cut(span)
        known, regions = all_of(wire), self.coding.regions
        pieces = [head.Piece(len(r.span), r.cols, known.index(r.codec)) for r in regions]
        self.head = head.pack(wire, pieces)
        self.nbytes = len(self.head) + self.coding.room(Span(0, len(span)))


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Gradients that a codec has made small, and their sum, too, unless that is dense.

    Attributes:
        part: the slice, where gradients are and their sum is put.
        residual: what of them is still to be sent, float32; None where nothing is kept.
        plan: how it is encoded.
        dense: what the sum travels in where it is not encoded; empty where it is.
    """

    part: torch.Tensor
    residual: torch.Tensor | None
    plan: Plan
    dense: str = ""
    dtype: str = CODED

    @property
    def nbytes(self) -> int:
        """The bytes of its gradients."""
        return self.plan.nbytes

    def packed(self) -> memoryview:
        """Encode the gradients and what was not sent of earlier ones."""
        plan, first = self.plan, len(self.plan.head)
        payload = torch.zeros(plan.nbytes, dtype=torch.uint8)  # what fills up pieces is sent too
        payload[:first] = torch.frombuffer(bytearray(plan.head), dtype=torch.uint8)
        whole = Span(0, self.part.numel())
        plan.coding.encode(self.part, whole, payload[first:], self.residual)
        return _bytes(payload)

    def unpack(self, dtype: str, payload: memoryview) -> None:
        """Put the sum in its place.

        Raises:
            ValueError: it is of another form; nothing is written.
        """
        plan, first = self.plan, len(self.plan.head)
        if self.dense:
            copy_sum(self.part, self.dense, dtype, payload)
            return
        if dtype != CODED or len(payload) != plan.nbytes or payload[:first] != plan.head:
            raise ValueError("another form")
        plan.coding.decode(bytes_of(payload)[first:], self.part, Span(0, self.part.numel()))


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """What sums of a slice lack: comes back alone, and is added to this worker's residual."""

    residual: torch.Tensor
    dtype: str = ""
    nbytes: int = 0

    def packed(self) -> memoryview:
        """Return nothing."""
        return memoryview(b"")

    def unpack(self, dtype: str, payload: memoryview) -> None:
        """Add it.

        Raises:
            ValueError: it is of another size or dtype; nothing is written.
        """
        if not dtype and not payload:
            return
        self.residual.add_(_elements(self.residual.numel(), "float32", dtype, payload))


def copy_sum(part: torch.Tensor, expected: str, dtype: str, payload: memoryview) -> None:
    """Put a sum that was not encoded in its place.

    Raises:
        ValueError: it is of another size or dtype; nothing is written.
    """
    part.copy_(_elements(part.numel(), expected, dtype, payload))


def _elements(numel: int, expected: str, dtype: str, payload: memoryview) -> torch.Tensor:
    wanted = _BY_NAME[expected]
    if dtype != expected or len(payload) != numel * wanted.itemsize:
        raise ValueError("another form")
    return bytes_of(payload).view(wanted)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data

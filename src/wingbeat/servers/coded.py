"""Sums of slices that a codec has made: decoded, added in float32, encoded once. Needs torch.

Only servers of a job whose gradients go through a codec load this. What encoding a sum loses is
kept, one float32 for each element, and added to the next sum of the slice, in whatever form that
travels. It belongs to no server: between iterations the worker whose slice it is takes it over, and
it is forgotten here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from wingbeat.codecs import Coding
from wingbeat.codecs.codec import ALIGNMENT
from wingbeat.codecs.coding import Region, all_of
from wingbeat.compression import Coded
from wingbeat.servers import head
from wingbeat.servers.dtypes import ITEMSIZE, Array, narrowed, sum_dtype, widened
from wingbeat.servers.sums import Refused, Sum, Sums, Total, elements
from wingbeat.types import Span

CODED = "uint8"
"""The dtype of messages whose payload a codec has made."""

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Form:
    """What a slice's payloads are in one round.

    Attributes:
        dtype: of its messages.
        numel: its elements.
        head: what a codec's payloads begin with; empty if there is none.
        coding: reads and writes what follows the head.
    """

    dtype: str
    numel: int
    head: bytes = b""
    coding: Coding | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """What messages to people call it."""
        return f"{self.numel} {'encoded elements' if self.coding else self.dtype}"

    @property
    def sum_dtype(self) -> np.dtype[np.generic]:
        """What is summed in."""
        return np.dtype(np.float32) if self.coding else sum_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """The size of a payload."""
        if self.coding is None:
            return self.numel * ITEMSIZE[self.dtype]
        return len(self.head) + self.coding.room(Span(0, self.numel))


@dataclass(slots=True)
class CodedTotal(Total):
    """As `Total`; each round may travel in another form, as a codec on trial is off at times.

    Attributes:
        form: of the present round.
        coming: of the payload that is being looked at.
        rest: float32, what the sums still lack; None where nothing was lost since it was taken.
        reserved: whether its bytes are counted.
    """

    form: Form | None = None
    coming: Form | None = None
    rest: NDArray[np.float32] | None = None
    reserved: bool = False


class CodedSums(Sums):
    """All sums of a server whose job has a codec.

    Args:
        workers: how many push each slice.
        most: bytes that all sums together may take.
        wire: the codec's settings.
        largest: bytes of the largest message.
        dense: whether sums go back as they were made, and not encoded: then nothing is lost here.
    """

    def __init__(
        self, workers: int, most: int, *, wire: Coded, largest: int, dense: bool = False
    ) -> None:
        super().__init__(workers, most, dense=dense)
        self._wire, self._codecs = wire, all_of(wire)
        self._keeps = wire.keeps
        self._largest = largest // FLOAT32  # a sum may have to travel as it is

    def take(self, key: tuple[int, int]) -> Array | None:
        """Return what the sums of a slice still lack, and forget it; None if that is nothing."""
        total = self._totals.get(key)
        if total is None:
            return None
        assert isinstance(total, CodedTotal)
        rest, total.rest = total.rest, None
        return rest

    def _total(self, worker: int, key: tuple[int, int], dtype: str, payload: memoryview) -> Total:
        total = self._totals.get(key)
        assert total is None or isinstance(total, CodedTotal)
        if dtype == CODED:
            form = self._form(worker, key, payload, None if total is None else total.form)
        else:
            form = Form(dtype, elements(worker, dtype, payload))
        if total is None:
            self._refuse_old(worker, key)
            total = CodedTotal(form.dtype, form.numel, form=form)
        assert total.form is not None
        # Between rounds a codec may be switched on or off.
        if form.numel != total.numel or (total.buffer is not None and form != total.form):
            raise Refused(
                f"rank {worker} pushed {form.name} of slice {key[1]}, which has {total.form.name}"
            )
        total.coming = form
        return total

    def _form(
        self, worker: int, key: tuple[int, int], payload: memoryview, known: Form | None
    ) -> Form:
        """Return what a codec's payload is, most likely what the one before was.

        Raises:
            Refused: it is malformed.
        """
        where = f"rank {worker} pushed slice {key[1]} malformed"
        if known is None or not known.head or payload[: len(known.head)] != known.head:
            try:
                pieces = head.unpack(payload, self._wire, self._largest)
            except ValueError as err:
                raise Refused(f"{where}: {err}") from None
            numel = sum(piece.numel for piece in pieces)
            start = bytes(payload[: head.nbytes(pieces)])
            known = Form(CODED, numel, start, self._coding(pieces))
        if len(payload) != known.nbytes:
            raise Refused(f"{where}: {len(payload)} bytes in place of {known.nbytes}")
        return known

    def _coding(self, pieces: tuple[head.Piece, ...]) -> Coding:
        regions, start = [], 0
        for piece in pieces:
            span = Span(start, start + piece.numel)
            regions.append(Region(span, self._codecs[piece.kind], piece.cols))
            start = span.stop
        return Coding(regions)

    def _begin(self, total: Total, now: float) -> None:
        """Start a round; the sum is made apart from the bytes that it travels in."""
        assert isinstance(total, CodedTotal)
        form, over = total.coming, [old for old in total.sums[:-1] if old.free()]
        assert form is not None
        spare = total.spare
        if spare is not None and spare.dtype != form.sum_dtype:
            spare = None
        keeps = form.coding is not None and self._keeps and not self._dense
        need = self._bytes_back(form) - sum(old.result.nbytes for old in over)
        if spare is None:
            held = 0 if total.spare is None else total.spare.nbytes
            need += form.numel * form.sum_dtype.itemsize - held
        if keeps and not total.reserved:
            need += form.numel * FLOAT32
        self._reserve(total, need)
        total.sums = [old for old in total.sums if old not in over]
        total.buffer = np.empty(form.numel, form.sum_dtype) if spare is None else spare
        total.spare, total.form, total.dtype = None, form, form.dtype
        total.reserved |= keeps
        total.round, total.added, total.since = total.round + 1, 0, now

    def _add(self, total: Total, payloads: list[memoryview]) -> None:
        assert isinstance(total, CodedTotal)
        assert total.form is not None
        form = total.form
        if form.coding is None:
            super()._add(total, payloads)
            return
        out, span = torch.from_numpy(total.buffer), Span(0, form.numel)
        for payload in payloads:
            coded = bytes_of(payload)[len(form.head) :]
            form.coding.decode(coded, out, span, add=total.added > 0)
            total.added += 1

    def _bytes_back(self, form: Form) -> int:
        if form.coding is None or self._dense:
            return form.numel * ITEMSIZE[self._back(form)]
        return form.nbytes

    def _back(self, form: Form) -> str:
        """Return the dtype of a sum that is not encoded."""
        return form.sum_dtype.name if self._dense else form.dtype

    def _made(self, total: Total) -> Sum:
        assert isinstance(total, CodedTotal)
        assert total.form is not None
        assert total.buffer is not None
        form = total.form
        if form.coding is None or self._dense:
            return Sum(total.round, self._back(form), self._plain(total, form))
        if self._keeps and total.rest is None:
            total.rest = np.zeros(form.numel, np.float32)
        result = np.zeros(form.nbytes, np.uint8)  # what fills up pieces is sent too
        first = len(form.head)
        result[:first] = np.frombuffer(form.head, np.uint8)
        form.coding.encode(
            torch.from_numpy(total.buffer),
            Span(0, form.numel),
            torch.from_numpy(result)[first:],
            None if total.rest is None else torch.from_numpy(total.rest),
        )
        return Sum(total.round, CODED, result)

    def _plain(self, total: CodedTotal, form: Form) -> Array:
        """Return a sum that is not encoded, and what was kept with it; keep what has no room."""
        assert total.buffer is not None
        rest, total.rest = total.rest, None
        wide, back = torch.from_numpy(total.buffer), self._back(form)
        if rest is not None:
            wide += torch.from_numpy(rest)
        result = narrowed(total.buffer, back)
        if result is total.buffer:
            copy: Array = total.buffer.copy()
            return copy
        if rest is not None:
            lost = wide - torch.from_numpy(widened(result.data.cast("B"), back))
            total.rest = lost.nan_to_num_(0.0, 0.0, 0.0).numpy()
        return result

    def _drop_before(self, plan: int) -> None:
        for key, total in self._totals.items():
            assert isinstance(total, CodedTotal)
            if key[0] < plan and total.rest is not None and total.rest.any():
                raise Refused(f"what the sums of slice {key[1]} lack was not asked for in time")
        super()._drop_before(plan)


def bytes_of(payload: memoryview) -> torch.Tensor:
    """Return the bytes of a message as a tensor, in the same memory if they can be read there."""
    array = np.frombuffer(payload, np.uint8)
    if payload.readonly or array.__array_interface__["data"][0] % ALIGNMENT:
        array = array.copy()
    return torch.from_numpy(array)

"""Sums of slices that a codec has encoded: decoded, added in float32, encoded once. Needs torch.

Only servers of a job with a codec load this module. The residual of encoding a sum, one float32 for
each element, is added to the next sum of the slice, in whatever dtype that is sent. Residuals
belong to the workers: between iterations the worker that owns a slice pulls its residual, and the
server drops it.
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
from wingbeat.methods.parameter_server.aggregator import (
    ITEMSIZE,
    Accumulator,
    Aggregator,
    Array,
    SliceKey,
    SliceSum,
    count_elements,
    narrow,
    sum_dtype,
    widen,
)
from wingbeat.methods.parameter_server.protocol import (
    Piece,
    RequestError,
    header_nbytes,
    unpack_header,
)
from wingbeat.types import Span

CODED = "uint8"
"""The dtype of messages with an encoded slice."""

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the payloads of a slice are encoded in one round; ``coding`` is None without a codec."""

    dtype: str
    numel: int
    header: bytes = b""
    coding: Coding | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.numel} {'encoded elements' if self.coding else self.dtype}"

    @property
    def sum_dtype(self) -> np.dtype[np.generic]:
        """The dtype of the sum."""
        return np.dtype(np.float32) if self.coding else sum_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """The size of a payload."""
        if self.coding is None:
            return self.numel * ITEMSIZE[self.dtype]
        return len(self.header) + self.coding.room(Span(0, self.numel))


@dataclass(slots=True)
class CodedAccumulator(Accumulator):
    """An `Accumulator` whose encoding may change between rounds, as in a codec trial.

    Attributes:
        encoding: of the current round.
        incoming: of the payload that is being handled.
        residual: None if nothing was lost since it was taken.
        reserved: whether the residual's bytes are counted.
    """

    encoding: Encoding | None = None
    incoming: Encoding | None = None
    residual: NDArray[np.float32] | None = None
    reserved: bool = False


class CodedAggregator(Aggregator):
    """All sums of a server whose job has a codec; ``largest`` is the maximum size of a message."""

    def __init__(
        self, workers: int, max_nbytes: int, *, wire: Coded, largest: int, dense: bool = False
    ) -> None:
        super().__init__(workers, max_nbytes, dense=dense)
        self._wire, self._codecs = wire, all_of(wire)
        self._has_residuals = wire.keeps and not dense
        self._max_numel = largest // FLOAT32  # a sum may be sent without the codec

    def take_residual(self, key: SliceKey) -> Array | None:
        """Return and drop the encoding residual of a slice; None if nothing was lost."""
        state = self._slices.get(key)
        if state is None:
            return None
        assert isinstance(state, CodedAccumulator)
        residual, state.residual = state.residual, None
        return residual

    def _accumulator(
        self, worker: int, key: SliceKey, dtype: str, payload: memoryview
    ) -> Accumulator:
        state = self._slices.get(key)
        assert state is None or isinstance(state, CodedAccumulator)
        if dtype == CODED:
            known = None if state is None else state.encoding
            encoding = self._encoding(worker, key, payload, known)
        else:
            encoding = Encoding(dtype, count_elements(worker, dtype, payload))
        if state is None:
            self._check_plan(worker, key)
            state = CodedAccumulator(encoding.dtype, encoding.numel, encoding=encoding)
        assert state.encoding is not None
        # The encoding may change between rounds.
        if encoding.numel != state.numel or (
            state.buffer is not None and encoding != state.encoding
        ):
            raise RequestError(
                f"rank {worker} pushed {encoding} of slice {key[1]}, which has {state.encoding}"
            )
        state.incoming = encoding
        return state

    def _encoding(
        self, worker: int, key: SliceKey, payload: memoryview, known: Encoding | None
    ) -> Encoding:
        """Return the encoding of a payload; usually the last one, which is cached."""
        where = f"rank {worker} pushed slice {key[1]} malformed"
        if known is None or not known.header or payload[: len(known.header)] != known.header:
            try:
                pieces = unpack_header(payload, self._wire, self._max_numel)
            except ValueError as err:
                raise RequestError(f"{where}: {err}") from None
            numel = sum(piece.numel for piece in pieces)
            header = bytes(payload[: header_nbytes(pieces)])
            known = Encoding(CODED, numel, header, self._coding(pieces))
        if len(payload) != known.nbytes:
            raise RequestError(f"{where}: {len(payload)} bytes in place of {known.nbytes}")
        return known

    def _coding(self, pieces: tuple[Piece, ...]) -> Coding:
        regions, start = [], 0
        for piece in pieces:
            span = Span(start, start + piece.numel)
            regions.append(Region(span, self._codecs[piece.kind], piece.cols))
            start = span.stop
        return Coding(regions)

    def _begin_round(self, state: Accumulator, now: float) -> None:
        """Start a round; the sum and its encoded form use separate memory."""
        assert isinstance(state, CodedAccumulator)
        encoding, unused = state.incoming, [old for old in state.sums[:-1] if old.is_unused()]
        assert encoding is not None
        spare = state.spare
        if spare is not None and spare.dtype != encoding.sum_dtype:
            spare = None
        keeps = encoding.coding is not None and self._has_residuals
        need = self._reply_nbytes(encoding) - sum(old.result.nbytes for old in unused)
        if spare is None:
            freed = 0 if state.spare is None else state.spare.nbytes
            need += encoding.numel * encoding.sum_dtype.itemsize - freed
        if keeps and not state.reserved:
            need += encoding.numel * FLOAT32
        self._reserve(state, need)
        state.sums = [old for old in state.sums if old not in unused]
        state.buffer = np.empty(encoding.numel, encoding.sum_dtype) if spare is None else spare
        state.spare, state.encoding, state.dtype = None, encoding, encoding.dtype
        state.reserved |= keeps
        state.round, state.added, state.started_at = state.round + 1, 0, now

    def _add(self, state: Accumulator, payloads: list[memoryview]) -> None:
        assert isinstance(state, CodedAccumulator)
        assert state.encoding is not None
        encoding = state.encoding
        if encoding.coding is None:
            super()._add(state, payloads)
            return
        out, span = torch.from_numpy(state.buffer), Span(0, encoding.numel)
        for payload in payloads:
            coded = bytes_tensor(payload)[len(encoding.header) :]
            encoding.coding.decode(coded, out, span, add=state.added > 0)
            state.added += 1

    def _reply_nbytes(self, encoding: Encoding) -> int:
        if encoding.coding is None or self._dense:
            return encoding.numel * ITEMSIZE[self._plain_dtype(encoding)]
        return encoding.nbytes

    def _plain_dtype(self, encoding: Encoding) -> str:
        return encoding.sum_dtype.name if self._dense else encoding.dtype

    def _finish_sum(self, state: Accumulator) -> SliceSum:
        assert isinstance(state, CodedAccumulator)
        assert state.encoding is not None
        assert state.buffer is not None
        encoding = state.encoding
        if encoding.coding is None or self._dense:
            dtype = self._plain_dtype(encoding)
            return SliceSum(state.round, dtype, self._plain_sum(state, dtype))
        if self._has_residuals and state.residual is None:
            state.residual = np.zeros(encoding.numel, np.float32)
        result = np.zeros(encoding.nbytes, np.uint8)  # padding between pieces is sent too
        header = len(encoding.header)
        result[:header] = np.frombuffer(encoding.header, np.uint8)
        encoding.coding.encode(
            torch.from_numpy(state.buffer),
            Span(0, encoding.numel),
            torch.from_numpy(result)[header:],
            None if state.residual is None else torch.from_numpy(state.residual),
        )
        return SliceSum(state.round, CODED, result)

    def _plain_sum(self, state: CodedAccumulator, dtype: str) -> Array:
        """Return a sum without the codec, plus the residual; keep the rounding error."""
        assert state.buffer is not None
        residual, state.residual = state.residual, None
        wide = torch.from_numpy(state.buffer)
        if residual is not None:
            wide += torch.from_numpy(residual)
        result = narrow(state.buffer, dtype)
        if result is state.buffer:
            copy: Array = state.buffer.copy()
            return copy
        if residual is not None:
            lost = wide - torch.from_numpy(widen(result.data.cast("B"), dtype))
            state.residual = lost.nan_to_num_(0.0, 0.0, 0.0).numpy()
        return result

    def _drop_before(self, plan: int) -> None:
        for key, state in self._slices.items():
            assert isinstance(state, CodedAccumulator)
            if key[0] < plan and state.residual is not None and state.residual.any():
                raise RequestError(f"no worker pulled the residual of slice {key[1]} in time")
        super()._drop_before(plan)


def bytes_tensor(payload: memoryview) -> torch.Tensor:
    """Return the bytes of a message as a tensor; a copy if they are read-only or not aligned."""
    array = np.frombuffer(payload, np.uint8)
    if payload.readonly or array.__array_interface__["data"][0] % ALIGNMENT:
        array = array.copy()
    return torch.from_numpy(array)

"""Sums of slices over all workers, without torch: numpy, and C++ for float16 and bfloat16.

Gradients are added in the order of ranks, so equal gradients give equal bits in every run. A
payload that arrives early waits, and occupies its sender's window, until it is added. With a codec,
payloads are decoded, added in float32, and encoded once. The residual of encoding a sum, one
float32 for each element, is added to the next sum of the slice, in whatever dtype that is sent.
Residuals belong to the workers: between iterations the worker that owns a slice pulls its residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wingbeat import _native
from wingbeat.methods.parameter_server.protocol import RequestError

if TYPE_CHECKING:
    from wingbeat.methods.parameter_server.coding import SliceCodec, SliceCoding

Array = NDArray[np.generic]

OnAdded = Callable[[], object]
"""Called when a payload is added, or is the next to be added."""

SliceKey = tuple[int, int]
"""Plan and slice."""

MAX_DEFERRED = 16 << 20
"""Maximum bytes of gradients that wait in place for the next payload of their slice. Adding two
payloads at a time halves the memory traffic of the sum.
"""

SLICE_OVERHEAD = 1024
"""Bytes that count per slice in addition to its sums, which limits the number of slices."""

CODED = "uint8"
"""The dtype of messages with an encoded slice."""


# -- arithmetic ----------------------------------------------------------------------------

ITEMSIZE = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of an element, for each supported dtype."""

_HALF: dict[str, np.dtype[np.generic]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # numpy has no bfloat16
}

_FLOAT32: np.dtype[np.generic] = np.dtype(np.float32)

_BLOCK = 1 << 15
"""Elements of a block, whose intermediate sums stay in the cache."""


def sum_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the dtype of a sum: float64 for float64, otherwise float32."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def _sum_name(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"  # numpy computes a name each time


def widen(payload: memoryview, dtype: str) -> Array:
    """Return a payload's elements in the dtype of their sum; a view if the dtypes are equal."""
    if dtype not in _HALF:
        return np.frombuffer(payload, dtype=dtype)
    wide = np.empty(len(payload) // 2, np.float32)
    add_payloads(wide, [payload], dtype, begin=True)
    return wide


def narrow(total: Array, dtype: str, out: Array | None = None) -> Array:
    """Round a sum to ``dtype`` as torch does; return ``total`` itself if it has that dtype."""
    if total.itemsize == ITEMSIZE[dtype]:
        return total
    half = _HALF[dtype]
    if out is None:
        out = np.empty(len(total), half)
    if len(out) != len(total):
        raise ValueError(f"out has {len(out)} elements; the sum has {len(total)}")
    target = _address(out, half)
    _native.narrow_half(_address(total), len(total), dtype == "bfloat16", target)
    return out


def convert(total: Array, dtype: str) -> Array:
    """Return a float32 sum in another supported dtype, as a copy."""
    return total.astype(np.float64) if dtype == "float64" else narrow(total, dtype)


def add_payloads(
    total: Array, payloads: Sequence[memoryview], dtype: str, *, begin: bool = False
) -> None:
    """Add payloads to a sum block by block, in order; with ``begin``, overwrite the sum."""
    arrays: list[Array] = [np.frombuffer(payload, _HALF.get(dtype, dtype)) for payload in payloads]
    if wrong := [len(array) for array in arrays if len(array) != len(total)]:
        raise ValueError(f"payload of {wrong[0]} elements; the sum has {len(total)}")
    if dtype in _HALF:
        addresses = [_address(array, _HALF[dtype]) for array in arrays]
        _native.add_half(_address(total), addresses, len(total), dtype == "bfloat16", begin)
        return
    adder: Callable[..., object] = np.add
    size = _BLOCK if len(arrays) > 1 else max(1, len(total))  # one payload: no intermediate sums
    # Workers check sums for overflow (GradScaler), so numpy must not warn here.
    with np.errstate(all="ignore"):
        for start in range(0, len(total), size):
            out, *parts = [array[start : start + size] for array in (total, *arrays)]
            first = parts.pop(0) if begin else out
            if not parts:
                np.copyto(out, first)
            for part in parts:
                adder(first, part, out=out)
                first = out


def _address(array: Array, dtype: np.dtype[np.generic] = _FLOAT32) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} with strides {array.strides}; must be flat {dtype}")
    address: int = array.__array_interface__["data"][0]
    return address


# -- sums ----------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class SliceSum:
    """A complete sum of one slice, in the form in which it is sent.

    ``round`` counts earlier sums of the slice. ``result`` is constant until all functions in
    ``readers`` return true. ``requested_by`` are ranks.
    """

    round: int
    dtype: str
    result: Array
    readers: list[Callable[[], bool]] = field(default_factory=list)
    requested_by: set[int] = field(default_factory=set)

    def is_unused(self) -> bool:
        """Whether all readers have finished."""
        return all(finished() for finished in self.readers)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the payloads of a slice are sent in one round; ``coding`` is None without a codec."""

    dtype: str
    numel: int
    coding: SliceCoding | None = None

    def __str__(self) -> str:
        return f"{self.numel} {'encoded elements' if self.coding else self.dtype}"


@dataclass(slots=True)
class Accumulator:
    """The state of one slice: the sum in progress, and the last complete ones."""

    encoding: Encoding  # of the current round; with a codec it may change between rounds
    round: int = -1  # number of earlier sums
    added: int = 0  # workers whose gradients are added, in the order of ranks
    # Payloads that arrived before it was their turn, by rank.
    early: dict[int, tuple[memoryview, OnAdded]] = field(default_factory=dict)
    # Payloads that wait to be added together with the next one.
    deferred: list[memoryview] = field(default_factory=list)
    started_at: float = 0.0  # arrival time of the first payload of this round, in seconds
    buffer: Array | None = None  # the sum in progress; None once it is complete
    spare: Array | None = None  # an unused buffer, where sums are sent in another form
    out: Array | None = None  # unused memory for the sum in that form
    sums: list[SliceSum] = field(default_factory=list)  # with memory in use, the latest one last
    residual: Array | None = None  # of encoding; None if nothing was lost since it was taken
    keeps_residual: bool = False  # whether ``nbytes`` includes it
    nbytes: int = 0  # total size of these buffers

    def has_pushed(self, worker: int) -> bool:
        """Whether a worker has pushed in the current round."""
        return worker < self.added or worker in self.early


class Aggregator:
    """All sums of one server.

    All sums together are limited to ``max_nbytes``; at most ``max_deferred`` bytes of payloads wait
    to be added together with the next. With ``dense``, sums are sent in the dtype of the sum
    instead of that of the gradients. ``codec`` decodes and encodes slices, see `coding.SliceCodec`.
    ``name`` returns the name of a worker in errors.
    """

    def __init__(
        self,
        workers: int,
        max_nbytes: int,
        max_deferred: int = MAX_DEFERRED,
        *,
        dense: bool = False,
        codec: SliceCodec | None = None,
        name: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self._workers, self._dense, self._codec = workers, dense, codec
        self._name = name
        self._has_residuals = codec is not None and codec.has_residuals and not dense
        self.max_nbytes, self._max_deferred = max_nbytes, max_deferred
        self._slices: dict[SliceKey, Accumulator] = {}
        self._plan = -1
        self._deferred = 0
        self.nbytes = 0

    def push(
        self,
        worker: int,
        key: SliceKey,
        number: int,
        dtype: str,
        payload: memoryview,
        now: float = 0.0,
        on_added: OnAdded = lambda: None,
    ) -> SliceSum | None:
        """Add a worker's gradients of a slice; return the sum if it is complete."""
        state = self._slices.get(key)
        encoding = self._encoding(worker, key, dtype, payload, state)
        if state is None:
            if key[0] < self._plan:
                raise RequestError(
                    f"{self._name(worker)} pushed a slice of plan {key[0]} after {self._plan}"
                )
            state = Accumulator(encoding)
        if encoding is not state.encoding and encoding != state.encoding:
            may_change = self._codec is not None and state.buffer is None
            if not may_change or encoding.numel != state.encoding.numel:
                raise RequestError(
                    f"{self._name(worker)} pushed {encoding} of slice {key[1]}, which has "
                    f"{state.encoding}"
                )
        if state.buffer is None and number == state.round + 1:
            self._begin_round(state, encoding, now)
            self._slices[key] = state
        elif state.buffer is None or number != state.round:
            raise RequestError(
                f"{self._name(worker)} pushed slice {key[1]} of round {number} in round "
                f"{state.round}"
            )
        elif state.has_pushed(worker):
            raise RequestError(
                f"{self._name(worker)} pushed slice {key[1]} of round {number} twice"
            )
        state.early[worker] = payload, on_added
        self._add_due(state)
        return self._complete(key, state) if state.added == self._workers else None

    def completed_sum(self, key: SliceKey, number: int) -> SliceSum | None:
        """Return the sum of a round if it is complete; it is available until the next one is."""
        if key[0] < self._plan:
            raise RequestError(
                f"slice {key[1]} of plan {key[0]} was pulled after plan {self._plan}"
            )
        state = self._slices.get(key)
        last = state.sums[-1].round if state is not None and state.sums else -1
        if number not in (last, last + 1):
            raise RequestError(f"slice {key[1]} of round {number} was pulled after round {last}")
        return state.sums[-1] if state is not None and number == last else None

    def take_residual(self, key: SliceKey) -> Array | None:
        """Return and drop the encoding residual of a slice; None if nothing was lost."""
        state = self._slices.get(key)
        if state is None:
            return None
        residual, state.residual = state.residual, None
        return residual

    def find_incomplete(self, before: float) -> tuple[SliceKey, set[int]] | None:
        """Return a slice whose round began before a time, and the workers it waits for.

        Workers that wait for another slice are excluded: their windows may be full until the others
        catch up.
        """
        for key, state in self._slices.items():
            if state.buffer is not None and state.started_at < before:
                late = {rank for rank in range(self._workers) if not state.has_pushed(rank)}
                ahead = {rank for other in self._slices.values() for rank in other.early}
                return key, late - ahead or late
        return None

    def is_waiting(self, worker: int) -> bool:
        """Whether a worker has pushed to an incomplete sum."""
        return any(s.buffer is not None and s.has_pushed(worker) for s in self._slices.values())

    def is_waiting_for(self, worker: int) -> bool:
        """Whether an incomplete sum lacks a worker's gradients."""
        return any(s.buffer is not None and not s.has_pushed(worker) for s in self._slices.values())

    def _encoding(
        self,
        worker: int,
        key: SliceKey,
        dtype: str,
        payload: memoryview,
        state: Accumulator | None,
    ) -> Encoding:
        if dtype == CODED and self._codec is not None:
            try:
                known = None if state is None else state.encoding.coding
                coding = self._codec.parse(payload, known)
            except ValueError as error:
                raise RequestError(
                    f"{self._name(worker)} pushed slice {key[1]} malformed: {error}"
                ) from None
            return Encoding(CODED, coding.numel, coding)
        if dtype not in ITEMSIZE:
            raise RequestError(
                f"{self._name(worker)} pushed {dtype or 'nothing'}; allowed: {', '.join(ITEMSIZE)}"
            )
        numel, rest = divmod(len(payload), ITEMSIZE[dtype])
        if rest or not numel:
            raise RequestError(
                f"{self._name(worker)} pushed {len(payload)} bytes, which is no {dtype}"
            )
        if state is not None and (dtype, numel) == (state.encoding.dtype, state.encoding.numel):
            return state.encoding
        return Encoding(dtype, numel)

    def _begin_round(self, state: Accumulator, encoding: Encoding, now: float) -> None:
        """Start a round in unused memory; the last sum stays available."""
        numel, total_dtype = encoding.numel, sum_dtype(encoding.dtype)
        reply_dtype = self._reply_dtype(encoding)
        coding = encoding.coding if reply_dtype == CODED else None
        unused = [old for old in state.sums[:-1] if old.is_unused()]
        same = [old for old in unused if old.dtype == reply_dtype and coding is None]
        # One sum's memory is used again; memory of another form is freed.
        freed = same[:1] + [old for old in unused if old not in same]
        need = numel * ITEMSIZE[reply_dtype] if coding is None else coding.nbytes
        need -= sum(old.result.nbytes for old in freed)
        spare, separate = state.spare, reply_dtype != _sum_name(encoding.dtype)
        if spare is not None and (not separate or spare.dtype != total_dtype):
            need, spare = need - spare.nbytes, None
        if separate and spare is None:
            need += numel * total_dtype.itemsize
        keeps_residual = encoding.coding is not None and self._has_residuals
        if keeps_residual and not state.keeps_residual:
            need += numel * _FLOAT32.itemsize
        self._reserve(state, need)
        state.sums = [old for old in state.sums if old not in freed]
        state.out = same[0].result if same else None
        state.buffer = spare if separate else state.out
        if state.buffer is None:
            state.buffer = np.empty(numel, total_dtype)
        state.spare, state.encoding = None, encoding
        state.keeps_residual |= keeps_residual
        state.round, state.added, state.started_at = state.round + 1, 0, now

    def _reserve(self, state: Accumulator, need: int) -> None:
        total = self.nbytes + need
        if need > 0 and total + SLICE_OVERHEAD * len(self._slices) > self.max_nbytes:
            raise RequestError(
                f"{len(self._slices)} slices need {total} bytes, and {SLICE_OVERHEAD} more each; "
                f"the server's limit is {self.max_nbytes}"
            )
        self.nbytes = total
        state.nbytes += need

    def _add_due(self, state: Accumulator) -> None:
        """Add the payloads whose turn has come, and report each."""
        due: list[tuple[memoryview, OnAdded]] = []
        while (found := state.early.pop(state.added + len(due), None)) is not None:
            due.append(found)
        if due:
            self._add(state, [payload for payload, _ in due])
        for _, on_added in due:
            on_added()

    def _add(self, state: Accumulator, payloads: list[memoryview]) -> None:
        assert state.buffer is not None
        coding, dtype = state.encoding.coding, state.encoding.dtype
        if coding is not None:
            for payload in payloads:
                coding.decode(payload, state.buffer, add=state.added > 0)
                state.added += 1
            return
        pending = [*state.deferred, *payloads]
        self._deferred -= sum(map(len, state.deferred))
        state.added, state.deferred = state.added + len(payloads), []
        last, first = state.added == self._workers, len(pending[0])
        if len(pending) == 1 and not last and self._deferred + first <= self._max_deferred:
            state.deferred = pending
            self._deferred += first
        else:
            add_payloads(state.buffer, pending, dtype, begin=state.added == len(pending))

    def _complete(self, key: SliceKey, state: Accumulator) -> SliceSum:
        assert state.buffer is not None
        reply_dtype = self._reply_dtype(state.encoding)
        result = (
            self._encoded_sum(state, state.buffer)
            if reply_dtype == CODED
            else self._plain_sum(state, state.buffer, reply_dtype)
        )
        done = SliceSum(state.round, reply_dtype, result)
        if result is not state.buffer:
            state.spare = state.buffer
        state.sums.append(done)
        state.buffer = state.out = None
        if key[0] > self._plan:
            self._drop_before(key[0])
        return done

    def _encoded_sum(self, state: Accumulator, total: Array) -> Array:
        assert state.encoding.coding is not None
        if self._has_residuals and state.residual is None:
            state.residual = np.zeros(len(total), np.float32)
        return state.encoding.coding.encode(total, state.residual)

    def _plain_sum(self, state: Accumulator, total: Array, dtype: str) -> Array:
        """Return a sum without the codec, plus the residual; keep the rounding error."""
        residual, state.residual = state.residual, None
        if residual is None:
            return narrow(total, dtype, state.out)
        with np.errstate(all="ignore"):
            total += residual  # type: ignore[misc]
            result = narrow(total, dtype, state.out)
            if result is not total:
                lost = total - widen(result.data.cast("B"), dtype)  # type: ignore[operator]
                state.residual = np.nan_to_num(lost, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        return result

    def _drop_before(self, plan: int) -> None:
        """Drop older plans. All workers have pushed for this one, so none pulls older sums."""
        old = {key: state for key, state in self._slices.items() if key[0] < plan}
        for key, state in old.items():
            if state.residual is not None and state.residual.any():
                raise RequestError(f"no worker pulled the residual of slice {key[1]} in time")
        self._plan = plan
        for key, state in old.items():
            del self._slices[key]
            self.nbytes -= state.nbytes
            self._deferred -= sum(map(len, state.deferred))

    def _reply_dtype(self, encoding: Encoding) -> str:
        return _sum_name(encoding.dtype) if self._dense else encoding.dtype

"""Sums of slices over all workers, without torch: numpy, and C++ for float16 and bfloat16.

Gradients are added in the order of ranks, so equal gradients give equal bits in every run. A
payload that arrives early waits, and occupies its sender's window, until it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from wingbeat import _native
from wingbeat.methods.parameter_server.protocol import RequestError

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
    if dtype == "float64":
        return total.astype(np.float64)
    return narrow(total, dtype)


def add_payloads(
    total: Array, payloads: Sequence[memoryview], dtype: str, *, begin: bool = False
) -> None:
    """Add payloads to a sum block by block, in order; with ``begin``, overwrite the sum."""
    arrays = [np.frombuffer(payload, _HALF.get(dtype, dtype)) for payload in payloads]
    if wrong := [len(array) for array in arrays if len(array) != len(total)]:
        raise ValueError(f"payload of {wrong[0]} elements; the sum has {len(total)}")
    if dtype in _HALF:
        addresses = [_address(array, _HALF[dtype]) for array in arrays]
        _native.add_half(_address(total), addresses, len(total), dtype == "bfloat16", begin)
        return
    # Workers check sums for overflow (GradScaler), so numpy must not warn here.
    with np.errstate(all="ignore"):
        for part in _blocks(total, len(payloads)):
            _add_block(total[part], [array[part] for array in arrays], begin)


def _add_block(out: Array, arrays: list[Array], begin: bool) -> None:
    adder: Callable[..., object] = np.add
    first, *others = arrays if begin else [out, *arrays]
    if not others:
        np.copyto(out, first)
    for array in others:
        adder(first, array, out=out)
        first = out


def _address(array: Array, dtype: np.dtype[np.generic] = _FLOAT32) -> int:
    """Return the address of a contiguous array of ``dtype``."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} with strides {array.strides}; must be flat {dtype}")
    address: int = array.__array_interface__["data"][0]
    return address


def _blocks(total: Array, payloads: int) -> Iterator[slice]:
    """Yield blocks; one block for a single payload, which has no intermediate sums."""
    step = max(1, len(total)) if payloads == 1 else _BLOCK
    for start in range(0, len(total), step):
        yield slice(start, min(start + step, len(total)))


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


@dataclass(slots=True)
class Accumulator:
    """The state of one slice: the sum in progress, and the last complete ones.

    Attributes:
        round: number of earlier sums.
        added: number of workers whose gradients are added, in the order of ranks.
        early: payloads that arrived before it was their turn, by rank.
        deferred: payloads that wait to be added together with the next one.
        started_at: arrival time of the first payload of this round, in seconds.
        buffer: the sum in progress; None once it is complete.
        spare: an unused buffer, where sums are sent in another dtype.
        out: unused memory for the sum in that dtype.
        sums: complete sums whose memory is in use, the latest one last.
        nbytes: total size of these buffers.
    """

    dtype: str
    numel: int
    round: int = -1
    added: int = 0
    early: dict[int, tuple[memoryview, OnAdded]] = field(default_factory=dict)
    deferred: list[memoryview] = field(default_factory=list)
    started_at: float = 0.0
    buffer: Array | None = None
    spare: Array | None = None
    out: Array | None = None
    sums: list[SliceSum] = field(default_factory=list)
    nbytes: int = 0

    def has_pushed(self, worker: int) -> bool:
        """Whether a worker has pushed in the current round."""
        return worker < self.added or worker in self.early


class Aggregator:
    """All sums of one server.

    All sums together are limited to ``max_nbytes``; at most ``max_deferred`` bytes of payloads wait
    to be added together with the next. With ``dense``, sums are sent in the dtype of the sum
    instead of that of the gradients.
    """

    def __init__(
        self,
        workers: int,
        max_nbytes: int,
        max_deferred: int = MAX_DEFERRED,
        *,
        dense: bool = False,
    ) -> None:
        self._workers = workers
        self._dense = dense
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
        state = self._accumulator(worker, key, dtype, payload)
        if state.buffer is None and number == state.round + 1:
            self._begin_round(state, now)
            self._slices[key] = state
        elif state.buffer is None or number != state.round:
            raise RequestError(
                f"rank {worker} pushed slice {key[1]} of round {number} in round {state.round}"
            )
        elif state.has_pushed(worker):
            raise RequestError(f"rank {worker} pushed slice {key[1]} of round {number} twice")
        state.early[worker] = payload, on_added
        self._add_due(state)
        if state.added < self._workers:
            return None
        return self._complete(key, state)

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

    def take_residual(self, key: SliceKey) -> Array | None:  # noqa: ARG002
        """Return and drop the encoding residual of a slice; always None without a codec."""
        return None

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

    def _accumulator(
        self, worker: int, key: SliceKey, dtype: str, payload: memoryview
    ) -> Accumulator:
        numel = count_elements(worker, dtype, payload)
        state = self._slices.get(key)
        if state is None:
            self._check_plan(worker, key)
            state = Accumulator(dtype, numel)
        if (dtype, numel) != (state.dtype, state.numel):
            raise RequestError(
                f"rank {worker} pushed {numel} {dtype} of slice {key[1]}, which has "
                f"{state.numel} {state.dtype}"
            )
        return state

    def _check_plan(self, worker: int, key: SliceKey) -> None:
        if key[0] < self._plan:
            raise RequestError(f"rank {worker} pushed a slice of plan {key[0]} after {self._plan}")

    def _begin_round(self, state: Accumulator, now: float) -> None:
        """Start a round in unused memory; the last sum stays available."""
        unused = next((old for old in state.sums[:-1] if old.is_unused()), None)
        dtype = sum_dtype(state.dtype)
        itemsize = ITEMSIZE[self._reply_dtype(state.dtype)]
        narrows = itemsize < dtype.itemsize
        need = 0 if unused is not None else state.numel * itemsize
        if narrows and state.spare is None:
            need += state.numel * dtype.itemsize
        if need:
            self._reserve(state, need)
        if unused is not None:
            state.sums.remove(unused)
        state.out = unused.result if unused is not None else None
        state.buffer = state.spare if narrows else state.out
        if state.buffer is None:
            state.buffer = np.empty(state.numel, dtype)
        state.spare = None
        state.round, state.added, state.started_at = state.round + 1, 0, now

    def _reserve(self, state: Accumulator, need: int) -> None:
        total = self.nbytes + need
        if total + SLICE_OVERHEAD * len(self._slices) > self.max_nbytes:
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
        pending = [*state.deferred, *payloads]
        self._deferred -= sum(map(len, state.deferred))
        state.added, state.deferred = state.added + len(payloads), []
        last = state.added == self._workers
        if (
            len(pending) == 1
            and not last
            and self._deferred + len(pending[0]) <= self._max_deferred
        ):
            state.deferred = pending
            self._deferred += len(pending[0])
        else:
            begin = state.added == len(pending)
            add_payloads(state.buffer, pending, state.dtype, begin=begin)

    def _complete(self, key: SliceKey, state: Accumulator) -> SliceSum:
        assert state.buffer is not None
        done = self._finish_sum(state)
        if done.result is not state.buffer:
            state.spare = state.buffer
        state.sums.append(done)
        state.buffer = state.out = None
        if key[0] > self._plan:
            self._drop_before(key[0])
        return done

    def _drop_before(self, plan: int) -> None:
        """Drop older plans. All workers have pushed for this one, so none pulls older sums."""
        self._plan = plan
        for key in [key for key in self._slices if key[0] < plan]:
            state = self._slices.pop(key)
            self.nbytes -= state.nbytes
            self._deferred -= sum(map(len, state.deferred))

    def _finish_sum(self, state: Accumulator) -> SliceSum:
        assert state.buffer is not None
        dtype = self._reply_dtype(state.dtype)
        return SliceSum(state.round, dtype, narrow(state.buffer, dtype, state.out))

    def _reply_dtype(self, dtype: str) -> str:
        return sum_dtype(dtype).name if self._dense else dtype


def count_elements(worker: int, dtype: str, payload: memoryview) -> int:
    """Return the number of elements of a payload."""
    if dtype not in ITEMSIZE:
        raise RequestError(
            f"rank {worker} pushed {dtype or 'nothing'}; allowed: {', '.join(ITEMSIZE)}"
        )
    numel, rest = divmod(len(payload), ITEMSIZE[dtype])
    if rest or not numel:
        raise RequestError(f"rank {worker} pushed {len(payload)} bytes, which is no {dtype}")
    return numel

"""Triton kernels for tensors on a GPU, with the functions of `reference`. Requires triton.

The host waits for the device only to check a top-k payload before its use. With Triton's
interpreter (``TRITON_INTERPRET=1``) the kernels also run on CPU tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.kernels import gpu_kernels as gk
from wingbeat.kernels import layout
from wingbeat.kernels.gpu_kernels import MOST_PROGRAMS, as_floats, check_count, launch, words
from wingbeat.kernels.reference import KEYS, codebook


def sketch_encode(
    x: Tensor,
    payload: Tensor,
    *,
    bits: int,
    split: str = "error",
    level: str = "mean",
    residual: Tensor | None = None,
) -> None:
    """As `reference.sketch_encode`."""
    layout.check_sketch_encode(x, payload, bits, split, level, residual)
    n = x.numel()
    check_count("x", n)
    if n == 0:
        return
    with torch.cuda.device_of(x):
        if layout.sketch_is_raw(n, bits):
            _encode_raw(x, payload, residual, None)
        else:
            into = words(payload)
            _encode_sketch(x, into, bits, split, level, residual)
            _put_back(into, payload)


def sketch_decode(payload: Tensor, out: Tensor, *, bits: int, add: bool = False) -> None:
    """As `reference.sketch_decode`."""
    layout.check_sketch_decode(payload, out, bits)
    n = out.numel()
    check_count("out", n)
    if n == 0:
        return
    with torch.cuda.device_of(out):
        payload = words(payload)
        if layout.sketch_is_raw(n, bits):
            _decode_raw(payload, out, add)
            return
        start = layout.table_bytes(bits)
        table, codes = as_floats(payload[:start]), payload[start:]
        launch(
            gk.sketch_decode,
            _ceil(n, 8 * gk.GROUPS),
            *(codes, table, out, n, codes.numel()),
            BITS=bits,
            ADD=add,
            GROUPS=gk.GROUPS,
            num_warps=gk.WARPS,
        )


def topk_encode(
    x: Tensor,
    payload: Tensor,
    *,
    k: int,
    residual: Tensor | None = None,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
) -> None:
    """As `reference.topk_encode`."""
    layout.check_topk_encode(x, payload, k, residual, velocity)
    n = x.numel()
    check_count("x", n)
    if n == 0:
        return
    with torch.cuda.device_of(x):
        if layout.topk_is_raw(n, k):
            if velocity is not None:
                x = velocity.mul_(momentum).add_(x)
            _encode_raw(x, payload, residual, velocity)
        else:
            into = words(payload)
            _Selection(x, k, residual, velocity, momentum).write(into)
            _put_back(into, payload)


def topk_decode(payload: Tensor, out: Tensor, *, k: int, add: bool = False) -> None:
    """As `reference.topk_decode`. The host waits for the device to check the payload."""
    layout.check_topk_decode(payload, out, k)
    n = out.numel()
    check_count("out", n)
    if n == 0:
        return
    with torch.cuda.device_of(out):
        payload = words(payload)
        if layout.topk_is_raw(n, k):
            _decode_raw(payload, out, add)
            return
        sent, counts, offsets = _parts(payload, n, k)
        places = _located(counts, offsets, n, k)
        if not add:
            out.zero_()
        programs = _ceil(k, gk.STEP)
        launch(
            gk.scatter,
            programs,
            *(as_floats(sent), places, out, k),
            ADD=add,
            BLOCK=gk.STEP,
        )


def _encode_sketch(
    x: Tensor, payload: Tensor, bits: int, split: str, level: str, residual: Tensor | None
) -> None:
    n = x.numel()
    counts = torch.zeros(KEYS, dtype=torch.int32, device=x.device)
    # The kernels need a pointer, which is not read without a residual.
    left = x if residual is None else residual
    launch(
        gk.sketch_histogram,
        _ceil(n, gk.SKETCH_BLOCK),
        *(x, left, counts, n),
        RESIDUAL=residual is not None,
        BLOCK=gk.SKETCH_BLOCK,
        num_warps=gk.SKETCH_WARPS,
    )
    lut, table = codebook(counts.long(), bits, split, level)
    start = layout.table_bytes(bits)
    as_floats(payload[:start]).copy_(table)
    codes = payload[start:]
    launch(
        gk.sketch_encode,
        _ceil(n, 8 * gk.GROUPS),
        *(x, left, lut, table, codes, n, codes.numel()),
        BITS=bits,
        RESIDUAL=residual is not None,
        GROUPS=gk.GROUPS,
    )


class _Selection:
    """Selects the k largest magnitudes of one tensor, in the steps of `gpu_kernels`."""

    def __init__(
        self, x: Tensor, k: int, residual: Tensor | None, velocity: Tensor | None, momentum: float
    ) -> None:
        self._n, self._k, self._momentum = x.numel(), k, float(momentum)
        self._residual, self._velocity = residual, velocity
        self._constants = {"RESIDUAL": residual is not None, "VELOCITY": velocity is not None}
        # The kernels need pointers, which are not used without a residual or velocity.
        self._x = x
        self._left = x if residual is None else residual
        self._moved = x if velocity is None else velocity
        self._blocks = _ceil(self._n, gk.BLOCK)
        self._samples, self._target, self._room = gk.sampling(self._n, k)
        self._scratch = torch.zeros(gk.STATE_SIZE + 3 * gk.BINS, dtype=torch.int32, device=x.device)
        self._state = self._scratch[: gk.STATE_SIZE]
        self._counts = self._scratch[gk.STATE_SIZE :]
        self._candidates, self._places = self._integers(self._room), self._integers(self._room)
        self._starts, self._lengths = self._integers(self._blocks), self._integers(self._blocks)

    def write(self, payload: Tensor) -> None:
        """Write the payload, and keep values that are not sent in residual and velocity."""
        self._gather()
        # Steps 3 and 4 read all values if the candidates do not suffice.
        values = self._left.view(torch.int32)
        self._find(values)
        self._emit(values, payload)
        for left in (self._residual, self._velocity):
            if left is not None:
                self._launch_over(gk.scrub, left.view(torch.int32), self._state, self._n)

    def _gather(self) -> None:
        launch(
            gk.guess,
            1,
            *(self._x, self._left, self._moved, self._momentum, self._state),
            *(self._n, self._samples, self._target),
            **self._constants,
            BLOCK=gk.HISTOGRAM_BLOCK,
            num_warps=gk.GUESS_WARPS,
        )
        launch(
            gk.sweep,
            self._blocks,
            *(self._x, self._left, self._moved, self._momentum, self._state),
            *(self._candidates, self._places, self._starts, self._lengths, self._n, self._room),
            **self._constants,
            BLOCK=gk.BLOCK,
            num_warps=gk.WARPS,
        )

    def _find(self, values: Tensor) -> None:
        for digit in range(3):
            self._launch_over(
                gk.histogram,
                *(values, self._candidates, self._state, self._counts),
                *(self._n, self._k, self._room),
                PASS=digit,
                BINS=gk.BINS,
            )
        launch(gk.settle, 1, self._state, self._counts, BINS=gk.BINS)

    def _emit(self, values: Tensor, payload: Tensor) -> None:
        shares = self._integers(2 * self._blocks).view(2, self._blocks)
        runs = (self._starts, self._lengths, self._state, shares)
        sizes = (self._blocks, self._n, self._k, self._room)
        steps = {"BLOCK": gk.BLOCK, "STEP": gk.RUN_STEP}
        launch(gk.tally, self._blocks, values, self._candidates, *runs, *sizes, **steps)
        through = shares.cumsum(1, dtype=torch.int32)
        sent, counts, offsets = _parts(payload, self._n, self._k)
        counts.zero_()
        launch(
            gk.emit,
            self._blocks,
            *(values, self._candidates, self._places, *runs, through),
            *(sent, counts, offsets, self._left, self._moved, *sizes),
            **self._constants,
            **steps,
        )

    def _integers(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=self._x.device)

    def _launch_over(self, function: object, *arguments: object, **constants: int) -> None:
        """Launch a kernel whose programs loop over all values."""
        programs = min(MOST_PROGRAMS, _ceil(self._n, gk.HISTOGRAM_BLOCK))
        sizes = {"BLOCK": gk.HISTOGRAM_BLOCK, "num_warps": gk.WARPS}
        launch(function, programs, *arguments, **constants, **sizes)


def _located(counts: Tensor, offsets: Tensor, n: int, k: int) -> Tensor:
    """Return the indices of a payload, int32[k]; raise ValueError if it is malformed."""
    # Counts are unsigned; at most 2**15 of them cannot overflow the sum.
    ends = (counts.long() & 0xFFFFFFFF).cumsum(0)
    places = torch.empty(k, dtype=torch.int32, device=counts.device)
    wrong = torch.zeros(3, dtype=torch.int32, device=counts.device)
    launch(
        gk.locate,
        _ceil(k, gk.STEP),
        *(ends, offsets, places, wrong, k, n, ends.numel(), ends.numel().bit_length()),
        BLOCK=gk.STEP,
    )
    sums, ascend, beyond = wrong.tolist()
    if sums:
        raise ValueError(f"payload is malformed: counts do not sum to {k}")
    if ascend:
        raise ValueError("payload is malformed: indices do not ascend")
    if beyond:
        raise ValueError(f"payload is malformed: an index is beyond the {n} values")
    return places


def _parts(payload: Tensor, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the values (as int32), counts (as int32) and offsets (as int16) of a top-k payload."""
    first = layout.VALUE_BYTES * k
    second = first + layout.COUNT_BYTES * layout.blocks_of(n)
    return (
        payload[:first].view(torch.int32),
        payload[first:second].view(torch.int32),
        payload[second:].view(torch.int16),
    )


def _encode_raw(
    x: Tensor, payload: Tensor, residual: Tensor | None, velocity: Tensor | None
) -> None:
    """Send all values."""
    acc = x if residual is None else residual.add_(x)
    payload.copy_(acc.view(torch.uint8))
    for left in (residual, velocity):
        if left is not None:
            left.zero_()


def _decode_raw(payload: Tensor, out: Tensor, add: bool) -> None:
    if add:
        out.add_(as_floats(payload))
    else:
        out.copy_(as_floats(payload))


def _put_back(words_of: Tensor, payload: Tensor) -> None:
    if words_of is not payload:
        payload.copy_(words_of)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)

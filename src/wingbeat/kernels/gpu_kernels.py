"""Triton kernels of the sketch and of top-k, and their launch. Requires triton.

Top-k selects exactly, with one pass over the values and without the host:

1. ``guess`` chooses from a sample a threshold that slightly more than k values should reach.
2. ``sweep`` is the pass over all values. It sums momentum, gradient and residual, and copies the
   values that reach the threshold, the *candidates*, to a buffer, in order within each block.
3. ``histogram``, three times, and ``settle`` find the kth largest magnitude among the candidates by
   its bits: 11, then 10, then 10.
4. ``tally`` counts each block's sent values, a prefix sum locates them, and ``emit`` writes them.

If there are fewer than k candidates, or more than fit into the buffer (for example, if all values
are equal), steps 3 and 4 process all values instead. The device decides this. The result is equally
exact, but the values are read five more times.

Bytes of memory traffic per value (a copy has 8). Top-k: 4, with a residual 12, with a velocity 20.
Sketch: the histogram reads 4, encoding reads 4 and writes bits/8, decoding reads bits/8 and writes
4; a residual adds 4 to the histogram and 8 to encoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_PROGRAMS = 1024
"""Programs of a kernel that loops: about 8 for each multiprocessor of a large GPU."""

_MOST_VALUES = 2**31


def kernel(function: Callable[..., Any]) -> Any:
    """Compile ``function`` with Triton on its first launch, for each set of constants."""
    return triton.jit(function)


def launch(function: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch ``programs`` programs of a kernel on the current stream.

    Floating point fusion is disabled, so that velocities and top-k are bitwise equal to the CPU's.
    """
    function[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def check_count(name: str, n: int) -> None:
    """Raise ValueError if ``n`` exceeds the kernels' 32-bit counters."""
    if n >= _MOST_VALUES:
        raise ValueError(f"{name} has {n} elements; on a GPU it must have fewer than 2**31")


def words(payload: Tensor) -> Tensor:
    """Return ``payload``, or a copy if it is not aligned to 4 bytes."""
    aligned = payload.data_ptr() % 4 == 0 and payload.storage_offset() % 4 == 0
    return payload if aligned else payload.clone()


def as_floats(payload: Tensor) -> Tensor:
    """View the result of `words` as float32."""
    return payload.view(torch.float32)


@kernel
def load_acc(
    x: tl.tensor,
    residual: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    RESIDUAL: tl.constexpr,
) -> Any:
    """Load x, plus the residual if there is one; 0 outside."""
    acc = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if RESIDUAL:
        acc += tl.load(residual + at, mask=inside, other=0.0, eviction_policy="evict_first")
    return acc


SKETCH_BLOCK = 4096
SKETCH_WARPS = 32
"""A thread then needs 32 registers, so that two programs fit: one reads while the other counts."""
GROUPS = 512
"""Groups of 8 values per program: 8 codes are a whole number of bytes."""


@kernel
def sketch_histogram(
    x: tl.tensor,
    residual: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the number of values of each key to counts, int32[65536].

    Global atomics for every value would be several times slower than reading it, and 65536 counters
    exceed shared memory. So a pass counts 8192 keys: one sign, a quarter of the exponents. All
    magnitudes from 2**-63 to 2 are in one quarter, so most blocks need two passes. Zeros, which are
    common and in another quarter, are counted separately.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    acc = load_acc(x, residual, at, inside, RESIDUAL)
    key = (acc.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    rest = inside & ((key & 0x7FFF) != 0)
    positive = tl.sum((inside & (key == 0)).to(tl.int32))
    negative = tl.sum((inside & (key == 0x8000)).to(tl.int32))
    tl.atomic_add(counts, positive, mask=positive > 0, sem="relaxed")
    tl.atomic_add(counts + 0x8000, negative, mask=negative > 0, sem="relaxed")
    quarter = (key >> 13) & 3
    lowest = tl.min(tl.where(rest, quarter, 4))
    highest = tl.max(tl.where(rest, quarter, -1))
    bins = tl.arange(0, 0x2000)
    for q in range(lowest, highest + 1):
        for piece in range(q, q + 8, 4):
            found = tl.histogram(key & 0x1FFF, 0x2000, mask=rest & ((key >> 13) == piece))
            to = counts + piece * 0x2000 + bins
            tl.atomic_add(to, found, mask=found > 0, sem="relaxed")


@kernel
def sketch_encode(
    x: tl.tensor,
    residual: tl.tensor,
    lut: tl.tensor,
    table: tl.tensor,
    codes: tl.tensor,
    n: tl.tensor,
    code_bytes: tl.tensor,
    BITS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Write the packed codes, and the encoding error of x + residual into residual.

    Typical values use a few kilobytes of the look-up table, which fit into the L1 cache.
    """
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)
    at = group[:, None] * 8 + lane[None, :]
    inside = at < n
    acc = load_acc(x, residual, at, inside, RESIDUAL)
    key = (acc.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    code = tl.load(lut + key, mask=inside, other=0, eviction_policy="evict_last")
    if RESIDUAL:
        left = acc - tl.load(table + code.to(tl.int32), eviction_policy="evict_last")
        exponent = left.to(tl.int32, bitcast=True) & 0x7F800000
        tl.store(residual + at, tl.where(exponent == 0x7F800000, 0.0, left), mask=inside)
    if BITS == 8:
        tl.store(codes + at, code, mask=inside)
    else:
        word = tl.sum(code.to(tl.int64) << (lane[None, :] * BITS), axis=1)
        byte = (word[:, None] >> (lane[None, :] * 8)) & 0xFF
        to = group[:, None] * BITS + lane[None, :]
        tl.store(codes + to, byte.to(tl.uint8), mask=(lane[None, :] < BITS) & (to < code_bytes))


@kernel
def sketch_decode(
    codes: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    code_bytes: tl.tensor,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Write the values of the codes into out, or add them."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)
    at = group[:, None] * 8 + lane[None, :]
    inside = at < n
    if BITS == 8:
        code = tl.load(codes + at, mask=inside, other=0, eviction_policy="evict_first").to(tl.int32)
    else:
        of = group[:, None] * BITS + lane[None, :]
        there = (lane[None, :] < BITS) & (of < code_bytes)
        byte = tl.load(codes + of, mask=there, other=0, eviction_policy="evict_first")
        word = tl.sum(byte.to(tl.int64) << (lane[None, :] * 8), axis=1)
        code = ((word[:, None] >> (lane[None, :] * BITS)) & ((1 << BITS) - 1)).to(tl.int32)
    value = tl.load(table + code, eviction_policy="evict_last")
    if ADD:
        value += tl.load(out + at, mask=inside, other=0.0)
    tl.store(out + at, value, mask=inside)


BLOCK = 4096
"""Values of a run; 65536 is a multiple, so a run lies in one block of the payload."""
HISTOGRAM_BLOCK = 8192
BINS = 2048
RUN_STEP = 256
SAMPLES = 1 << 16
LEAST_ROOM = 1 << 16
GUESS_WARPS = 16
WARPS = 8
"""For kernels that read all values: with 4 they need too many registers to hide latency."""

# Indices into `state`, int32.
CANDIDATES = tl.constexpr(0)
BROKEN = tl.constexpr(1)
FLOOR = tl.constexpr(2)
PREFIX = tl.constexpr(3)
NEED = tl.constexpr(6)
STATE_SIZE = 16

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


def sampling(n: int, k: int) -> tuple[int, int, int]:
    """Return the number of samples, the target, and the size of the candidate buffer.

    At least ``target`` samples must reach the threshold. The target exceeds the expected number by
    four standard deviations, so that fewer than k candidates are very unlikely. The buffer has four
    times the expected size, because values may cluster at the threshold.
    """
    samples = min(n, SAMPLES)
    expected = k * samples / n
    target = k if samples == n else math.ceil(expected + 4 * math.sqrt(expected) + 8)
    room = 4 * target * n // samples + LEAST_ROOM
    # If most values were candidates, processing all values would be as fast.
    return samples, target, min(n, room) if target <= samples // 16 or samples == n else 1


@kernel
def guess(
    x: tl.tensor,
    residual: tl.tensor,
    velocity: tl.tensor,
    momentum: tl.tensor,
    state: tl.tensor,
    n: tl.tensor,
    samples: tl.tensor,
    target: tl.tensor,
    RESIDUAL: tl.constexpr,
    VELOCITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find the largest threshold that ``target`` of the samples reach; one program.

    Each of equal intervals has one sample at a pseudorandom index, as values are often periodic.
    """
    stretch = n // samples
    found = tl.zeros([8192], tl.int32)
    for first in range(0, samples, BLOCK):
        sample = first + tl.arange(0, BLOCK)
        inside = sample < samples
        mixed = (sample.to(tl.uint32) * 2654435761) >> 8
        at = sample.to(tl.int64) * stretch + (mixed % stretch.to(tl.uint32)).to(tl.int64)
        if VELOCITY:
            value = tl.load(velocity + at, mask=inside, other=0.0) * momentum
            value += tl.load(x + at, mask=inside, other=0.0)
            value += tl.load(residual + at, mask=inside, other=0.0)
        else:
            value = load_acc(x, residual, at, inside, RESIDUAL)
        # Exponent and 5 bits of the mantissa: thresholds differ by 3%.
        magnitude = value.to(tl.int32, bitcast=True) & _MAGNITUDE
        found += tl.histogram(magnitude >> 18, 8192, mask=inside)
    reaching = samples - tl.cumsum(found, 0) + found
    bins = tl.arange(0, 8192)
    tl.store(state + FLOOR, tl.max(tl.where(reaching >= target, bins, 0)) << 18)


@kernel
def sweep(
    x: tl.tensor,
    residual: tl.tensor,
    velocity: tl.tensor,
    momentum: tl.tensor,
    state: tl.tensor,
    candidates: tl.tensor,
    places: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    n: tl.tensor,
    room: tl.tensor,
    RESIDUAL: tl.constexpr,
    VELOCITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update velocity and residual, and gather the candidates: one run for each block.

    The order of runs in the buffer is arbitrary. Non-finite values stay in the residual until
    ``scrub``, because they may still be selected.
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    broken = 0
    if VELOCITY:
        moved = tl.load(velocity + at, mask=inside, other=0.0) * momentum
        moved += tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first")
        tl.store(velocity + at, moved, mask=inside)
        broken = tl.max(moved.to(tl.int32, bitcast=True) & _MAGNITUDE)
        acc = tl.load(residual + at, mask=inside, other=0.0) + moved
    else:
        acc = load_acc(x, residual, at, inside, RESIDUAL)
    bits = acc.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    if RESIDUAL:
        tl.store(residual + at, acc, mask=inside)
        broken = tl.maximum(broken, tl.max(magnitude))
        tl.store(state + BROKEN, 1, mask=broken >= _INFINITY)
    keep = inside & (magnitude >= tl.load(state + FLOOR))
    length = tl.sum(keep.to(tl.int32))
    start = tl.atomic_add(state + CANDIDATES, length, sem="relaxed")
    tl.store(starts + block, start)
    tl.store(lengths + block, length)
    if length > 0:
        to = start + tl.cumsum(keep.to(tl.int32), 0) - 1
        keep = keep & (to < room)
        tl.store(candidates + to, bits, mask=keep)
        tl.store(places + to, at.to(tl.int32), mask=keep)


@kernel
def _all_values(
    state: tl.tensor,
    k: tl.tensor,
    room: tl.tensor,
) -> Any:
    """Whether the candidates do not suffice, so that all values must be processed."""
    found = tl.load(state + CANDIDATES)
    return (found < k) | (found > room)


@kernel
def _digit(
    counts: tl.tensor,
    need: tl.tensor,
    BINS: tl.constexpr,
) -> Any:
    """Return the bin of the need-th largest value, and how many of its values are needed."""
    bins = tl.arange(0, BINS)
    count = tl.load(counts + bins)
    through = tl.cumsum(count, 0)
    above = tl.sum(count) - through
    here = (above < need) & (above + count >= need)
    return tl.sum(tl.where(here, bins, 0)), need - tl.sum(tl.where(here, above, 0))


@kernel
def histogram(
    values: tl.tensor,
    candidates: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    room: tl.tensor,
    PASS: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Count values by digit PASS, if their previous digits are those of the kth value.

    Every program computes the previous digit from cached counts, which is faster than a launch.
    """
    whole = _all_values(state, k, room)
    total = tl.where(whole, n, tl.load(state + CANDIDATES))
    in_values = tl.where(whole, n, 0)
    prefix = 0
    if PASS == 1:
        prefix, need = _digit(counts, k, BINS)
    if PASS == 2:
        digit, need = _digit(counts + BINS, tl.load(state + NEED + 1), BINS)
        prefix = (tl.load(state + PREFIX + 1) << 10) | digit
    if PASS > 0 and tl.program_id(0) == 0:
        tl.store(state + PREFIX + PASS, prefix)
        tl.store(state + NEED + PASS, need)
    found = tl.zeros([BINS], tl.int32)
    programs = tl.num_programs(0)
    for block in range(tl.program_id(0), tl.cdiv(total, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        inside = at < total
        bits = tl.load(values + at, mask=at < in_values, other=0)
        bits |= tl.load(candidates + at, mask=at < total - in_values, other=0)
        magnitude = bits & _MAGNITUDE
        if PASS == 0:
            digit_of, like = magnitude >> 20, inside
        elif PASS == 1:
            digit_of, like = (magnitude >> 10) & 1023, inside & ((magnitude >> 20) == prefix)
        else:
            digit_of, like = magnitude & 1023, inside & ((magnitude >> 10) == prefix)
        found += tl.histogram(digit_of, BINS, mask=like)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + PASS * BINS + bins, found, mask=found > 0, sem="relaxed")


@kernel
def settle(
    state: tl.tensor,
    counts: tl.tensor,
    BINS: tl.constexpr,
) -> None:
    """Store the kth largest magnitude and the number of equal values that are sent; 1 program."""
    digit, need = _digit(counts + 2 * BINS, tl.load(state + NEED + 2), BINS)
    tl.store(state + PREFIX, (tl.load(state + PREFIX + 2) << 10) | digit)
    tl.store(state + NEED, need)


@kernel
def _run(
    starts: tl.tensor,
    lengths: tl.tensor,
    block: tl.tensor,
    whole: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> Any:
    """Return the start and length of a block's run."""
    first = block.to(tl.int64) * BLOCK
    start = tl.where(whole, first, tl.load(starts + block).to(tl.int64))
    length = tl.where(whole, tl.minimum(n - first, BLOCK), tl.load(lengths + block).to(tl.int64))
    return start, length.to(tl.int32)


@kernel
def tally(
    values: tl.tensor,
    candidates: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    state: tl.tensor,
    shares: tl.tensor,
    blocks: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    room: tl.tensor,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Count each block's values above and equal to the kth into shares, int32[2, blocks]."""
    whole = _all_values(state, k, room)
    kth = tl.load(state + PREFIX)
    block = tl.program_id(0)
    start, length = _run(starts, lengths, block, whole, n, BLOCK)
    in_values = tl.where(whole, length, 0)
    above = tl.zeros([STEP], tl.int32)
    equal = tl.zeros([STEP], tl.int32)
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        inside = at < length
        bits = tl.load(values + start + at, mask=at < in_values, other=0)
        bits |= tl.load(candidates + start + at, mask=at < length - in_values, other=0)
        magnitude = bits & _MAGNITUDE
        above += (inside & (magnitude > kth)).to(tl.int32)
        equal += (inside & (magnitude == kth)).to(tl.int32)
    tl.store(shares + block, tl.sum(above))
    tl.store(shares + blocks + block, tl.sum(equal))


@kernel
def emit(
    values: tl.tensor,
    candidates: tl.tensor,
    places: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    state: tl.tensor,
    shares: tl.tensor,
    through: tl.tensor,
    sent: tl.tensor,
    counts: tl.tensor,
    offsets: tl.tensor,
    residual: tl.tensor,
    velocity: tl.tensor,
    blocks: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    room: tl.tensor,
    RESIDUAL: tl.constexpr,
    VELOCITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Write each block's part of the payload, and set sent elements of residual and velocity to 0.

    ``through`` is the prefix sum of ``shares``, which locates each block's part.
    """
    whole = _all_values(state, k, room)
    kth, ties = tl.load(state + PREFIX), tl.load(state + NEED)
    block = tl.program_id(0)
    start, length = _run(starts, lengths, block, whole, n, BLOCK)
    in_values = tl.where(whole, length, 0)
    equals = tl.load(through + blocks + block) - tl.load(shares + blocks + block)
    begin = tl.load(through + block) - tl.load(shares + block) + tl.minimum(equals, ties)
    to = begin
    for i in range(0, length, STEP):
        at = i + tl.arange(0, STEP)
        inside = at < length
        bits = tl.load(values + start + at, mask=at < in_values, other=0)
        bits |= tl.load(candidates + start + at, mask=at < length - in_values, other=0)
        place = tl.load(places + start + at, mask=at < length - in_values, other=0)
        place = tl.where(at < in_values, (start + at).to(tl.int32), place)
        magnitude = bits & _MAGNITUDE
        equal = (inside & (magnitude == kth)).to(tl.int32)
        rank = equals + tl.cumsum(equal, 0)
        take = (inside & (magnitude > kth)) | ((equal > 0) & (rank <= ties))
        taken = take.to(tl.int32)
        position = to + tl.cumsum(taken, 0) - 1
        tl.store(sent + position, bits, mask=take)
        tl.store(offsets + position, (place & 0xFFFF).to(tl.int16), mask=take)
        if RESIDUAL:
            tl.store(residual + place, 0.0, mask=take)
        if VELOCITY:
            tl.store(velocity + place, 0.0, mask=take)
        equals += tl.sum(equal)
        to += tl.sum(taken)
    tl.atomic_add(counts + block // (65536 // BLOCK), to - begin, mask=to > begin, sem="relaxed")


@kernel
def scrub(
    left: tl.tensor,
    state: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Set non-finite values to 0 if ``sweep`` found any, so that they do not persist."""
    if tl.load(state + BROKEN) != 0:
        programs = tl.num_programs(0)
        for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), programs):
            at = block * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
            bits = tl.load(left + at, mask=at < n, other=0)
            tl.store(left + at, 0, mask=(at < n) & ((bits & _INFINITY) == _INFINITY))


STEP = 1024
"""Sent values that each program of ``locate`` and ``scatter`` processes."""


@kernel
def locate(
    ends: tl.tensor,
    offsets: tl.tensor,
    places: tl.tensor,
    wrong: tl.tensor,
    k: tl.tensor,
    n: tl.tensor,
    blocks: tl.tensor,
    steps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute a payload's indices and validate them.

    ``ends`` is the prefix sum of the payload's counts, int64[blocks]. The elements of wrong,
    int32[3], are set if the counts do not sum to k, indices do not ascend, or an index exceeds n.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < k
    # The block of i is the first one that ends after i.
    low = tl.zeros([BLOCK], tl.int32)
    high = low + (blocks - 1)
    for _ in range(steps):
        middle = (low + high) // 2
        behind = tl.load(ends + middle) > i
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, tl.minimum(middle + 1, high))
    begin = tl.load(ends + low - 1, mask=low > 0, other=0)
    offset = tl.load(offsets + i, mask=inside, other=0).to(tl.int32) & 0xFFFF
    follows = inside & (i > begin)
    before = tl.load(offsets + i - 1, mask=follows, other=0).to(tl.int32) & 0xFFFF
    place = low.to(tl.int64) * 65536 + offset
    tl.store(wrong, 1, mask=tl.load(ends + blocks - 1) != k)
    tl.store(wrong + 1, 1, mask=tl.max((follows & (offset <= before)).to(tl.int32)) > 0)
    tl.store(wrong + 2, 1, mask=tl.max((inside & (place >= n)).to(tl.int32)) > 0)
    tl.store(places + i, place.to(tl.int32), mask=inside)


@kernel
def scatter(
    sent: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    k: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write each sent value to its index, or add it. Indices are unique."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < k
    place = tl.load(places + i, mask=inside, other=0)
    value = tl.load(sent + i, mask=inside, other=0.0)
    if ADD:
        value += tl.load(out + place, mask=inside, other=0.0)
    tl.store(out + place, value, mask=inside)

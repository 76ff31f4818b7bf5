"""Triton kernels of the sketch: histogram, encoding and decoding.

Bytes of memory traffic per value (a copy has 8): the histogram reads 4, encoding reads 4 and writes
bits/8, decoding reads bits/8 and writes 4. A residual adds 4 to the histogram and 8 to encoding.
"""

from __future__ import annotations

import triton.language as tl

from wingbeat.kernels.gpu_base import kernel, load_acc

HISTOGRAM_BLOCK = 4096
HISTOGRAM_WARPS = 32
"""A thread then needs 32 registers, so that two programs fit: one reads while the other counts."""
WARPS = 8
GROUPS = 512
"""Groups of 8 values per program: 8 codes are a whole number of bytes."""


@kernel
def histogram(
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
def encode(
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
def decode(
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

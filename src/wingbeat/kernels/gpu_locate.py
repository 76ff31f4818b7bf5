"""Triton kernels that read a top-k payload: where each value belongs, and whether that can be.

Bytes moved for each value, of which a copy moves 8: zeros are written, 4; the k sent hardly count.
"""

from __future__ import annotations

import triton.language as tl

from wingbeat.kernels.gpu_base import kernel

STEP = 1024
"""Sent values that one program locates or scatters."""


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
    """Work out a payload's indices and what is wrong with them.

    ``ends`` is the running sum of the payload's counts, int64[blocks]. wrong, int32[3], is set
    where the counts do not sum to k, indices do not ascend, or one is beyond n.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < k
    # The block of i is the first one that ends behind it.
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
    """Write each sent value to its place, or add it: no two have the same."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < k
    place = tl.load(places + i, mask=inside, other=0)
    value = tl.load(sent + i, mask=inside, other=0.0)
    if ADD:
        value += tl.load(out + place, mask=inside, other=0.0)
    tl.store(out + place, value, mask=inside)

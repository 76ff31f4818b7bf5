"""Computes a sketch's codes and table from a histogram (Canary, section 4.3.1), in float64.

A *bin* is all floats with the same leading 16 bits, their *key*: sign, exponent, 7 of 23 mantissa
bits. The histogram has 65536 exact counts and needs one pass; encoding a value is then one table
look-up. The paper sorts instead.

The host does not wait for the device: values that depend on the data remain tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

KEYS = 1 << 16
LLOYD_ITERATIONS = 3
RUN = 16

_HALF = KEYS // 2
_FIRST_NOT_FINITE = 0x7F80


@dataclass(frozen=True)
class Bins:
    """The 65536 bins in ascending order of their values, with non-finite bins at both ends.

    Attributes:
        key: int64, the leading 16 bits of a bin's floats.
        low: float64, the lower bound; 0 for non-finite bins.
        high: float64, the upper bound, exclusive; 0 for non-finite bins.
        middle: float64; exactly 0 for the two bins of zero.
        finite: bool.
        zero: bool, +0 and -0 with the denormals below 2**-133.
    """

    key: Tensor
    low: Tensor
    high: Tensor
    middle: Tensor
    finite: Tensor
    zero: Tensor


@cache
def bins(device: torch.device) -> Bins:
    """Return the bins on ``device``."""
    # Computed on the host, which does not flush float32 denormals.
    magnitude = torch.arange(_FIRST_NOT_FINITE + 1)
    edges = (magnitude << 16).to(torch.int32).view(torch.float32).to(torch.float64)
    edges[-1] = 2.0**128
    near, far = torch.zeros(2, _HALF, dtype=torch.float64)
    near[:_FIRST_NOT_FINITE], far[:_FIRST_NOT_FINITE] = edges[:-1], edges[1:]
    middle = (near + far) / 2
    middle[0] = 0.0
    positive = torch.arange(_HALF)
    finite, zero = positive < _FIRST_NOT_FINITE, positive == 0
    made = Bins(
        key=torch.cat([(positive + _HALF).flip(0), positive]),
        low=torch.cat([-far.flip(0), near]),
        high=torch.cat([-near.flip(0), far]),
        middle=torch.cat([-middle.flip(0), middle]),
        finite=torch.cat([finite.flip(0), finite]),
        zero=torch.cat([zero.flip(0), zero]),
    )
    return Bins(**{name: tensor.to(device) for name, tensor in vars(made).items()})


def codebook(counts: Tensor, bits: int, split: str, level: str) -> tuple[Tensor, Tensor]:
    """Assign the bins to ``2**bits`` codes and a value to each code.

    ``counts``, int64[65536], has the number of values of each key, in the order of keys. The split
    ``"count"`` gives all codes nearly equal counts, as the paper does (section 4.3.1, step 1);
    ``"error"`` reduces the squared error: codes in proportion to the cube root of the density
    (Panter and Dite), then three iterations of Lloyd's algorithm. A code's level is the ``"mean"``
    of its values, approximated by the middles of bins, or the middle of their ``"ends"``, as in the
    paper (step 2).

    Return the code of each key, uint8[65536], and the table, float32[2**bits], 0 where unused. The
    order of codes is: ordinary values, ascending; zeros, if they have a separate code; non-finite
    values, if there are any.
    """
    b = bins(counts.device)
    counts = counts[b.key]
    broken = torch.where(b.finite, 0, counts).sum()
    zeros = torch.where(b.zero, counts, 0).sum()
    has_broken = broken > 0
    has_zeros = (zeros > 0) & ((zeros << bits) >= counts.sum())
    # The number of codes for ordinary values.
    free = (1 << bits) - has_zeros.long() - has_broken.long()
    ordinary = b.finite & ~(b.zero & has_zeros)
    members = torch.where(ordinary, counts, 0)
    if split == "count":
        codes = _equal_counts(members, free)
    else:
        codes = _least_error(members, ordinary, free, bits, b)
    table = _means(members, codes, bits, b) if level == "mean" else _ends(members, codes, bits, b)
    code = torch.arange(1 << bits, device=counts.device)
    table = torch.where(has_zeros & (code == free), 0.0, table)
    table = torch.where(has_broken & (code == code[-1]), torch.nan, table)
    codes = torch.where(b.zero & has_zeros, free, codes)
    codes = torch.where(b.finite, codes, (1 << bits) - 1)
    lut = torch.empty(KEYS, dtype=torch.uint8, device=counts.device)
    lut[b.key] = codes.to(torch.uint8)
    return lut, table.to(torch.float32)


def _equal_counts(members: Tensor, free: Tensor) -> Tensor:
    """Return the code of each bin for nearly equal counts, in exact integer arithmetic."""
    twice_before = 2 * members.cumsum(0) - members
    twice_total = (2 * members.sum()).clamp(min=1)
    codes = torch.div(free * twice_before, twice_total, rounding_mode="floor")
    return codes.minimum(free - 1).clamp(min=0)


def _least_error(members: Tensor, ordinary: Tensor, free: Tensor, bits: int, b: Bins) -> Tensor:
    """Return the code of each bin for a small squared error."""
    occupied = members > 0
    own = (occupied.cumsum(0) - 1).clamp(min=0)
    codes = _companded(members, ordinary, free, b)
    for _ in range(LLOYD_ITERATIONS):
        codes = _nearest(members, codes, bits, b)
    return torch.where(occupied.sum() <= free, own, codes)


def _companded(members: Tensor, ordinary: Tensor, free: Tensor, b: Bins) -> Tensor:
    """Return codes as dense as the cube root of the values' density, optimal for many codes."""
    width = torch.where(ordinary, b.high - b.low, 0.0)
    # Single bins of a small tensor have too few values to estimate a density.
    run_width = width.view(-1, RUN).sum(1)
    density = members.view(-1, RUN).sum(1) / torch.where(run_width > 0, run_width, 1.0)
    weight = density.pow(1 / 3).repeat_interleave(RUN, output_size=KEYS) * width
    middle = weight.cumsum(0) - weight / 2
    total = weight.sum()
    codes = (free * middle / torch.where(total > 0, total, 1.0)).floor().long()
    return codes.minimum(free - 1).clamp(min=0)


def _nearest(members: Tensor, codes: Tensor, bits: int, b: Bins) -> Tensor:
    """Assign each bin to the nearest mean (Lloyd's algorithm), and renumber codes without gaps."""
    count = _sums(members, codes, bits)
    means = _means(members, codes, bits, b)
    used = count > 0
    # Used levels move to the front; the infinities after them are never the nearest.
    place = torch.where(used, used.cumsum(0) - 1, 1 << bits)
    levels = torch.full(((1 << bits) + 1,), torch.inf, dtype=torch.float64, device=members.device)
    levels[place] = means
    levels = levels[:-1]
    return torch.searchsorted((levels[:-1] + levels[1:]) / 2, b.middle, right=True)


def _means(members: Tensor, codes: Tensor, bits: int, b: Bins) -> Tensor:
    """Return the mean of each code's values, float64[2**bits]; 0 for empty codes."""
    count = _sums(members, codes, bits)
    return _sums(members * b.middle, codes, bits) / count.clamp(min=1)


def _ends(members: Tensor, codes: Tensor, bits: int, b: Bins) -> Tensor:
    """Return the middle of each code's occupied range, float64[2**bits]; 0 for empty codes."""
    occupied = members > 0
    start = torch.full((1 << bits,), torch.inf, dtype=torch.float64, device=members.device)
    low = torch.where(occupied, b.low, torch.inf)
    high = torch.where(occupied, b.high, -torch.inf)
    lowest = start.scatter_reduce(0, codes, low, "amin")
    highest = (-start).scatter_reduce(0, codes, high, "amax")
    return torch.where(lowest <= highest, (lowest + highest) / 2, 0.0)


def _sums(values: Tensor, codes: Tensor, bits: int) -> Tensor:
    return torch.zeros(1 << bits, dtype=values.dtype, device=values.device).index_add_(
        0, codes, values
    )

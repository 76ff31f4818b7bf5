"""The kernels in torch operations, for any device: the reference for the fast kernels.

Values, residuals, velocities and outputs are float32[n], payloads uint8 of the size in ``layout``.
Invalid arguments raise ValueError.

A sketch's codes and table are computed in float64 from a histogram (Canary, section 4.3.1). A *bin*
is all floats with the same leading 16 bits, their *key*: sign, exponent, 7 of 23 mantissa bits. The
histogram has 65536 exact counts and needs one pass; encoding a value is then one table look-up. The
paper sorts instead. The host does not wait for the device: values that depend on the data remain
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from wingbeat.kernels import layout

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
    magnitude = torch.arange(_FIRST_NOT_FINITE + 1, device="cpu")
    edges = (magnitude << 16).to(torch.int32).view(torch.float32).to(torch.float64)
    edges[-1] = 2.0**128
    near, far = torch.zeros(2, _HALF, dtype=torch.float64, device="cpu")
    near[:_FIRST_NOT_FINITE], far[:_FIRST_NOT_FINITE] = edges[:-1], edges[1:]
    middle = (near + far) / 2
    middle[0] = 0.0
    positive = torch.arange(_HALF, device="cpu")
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


def sketch_encode(
    x: Tensor,
    payload: Tensor,
    *,
    bits: int,
    split: str = "error",
    level: str = "mean",
    residual: Tensor | None = None,
) -> None:
    """Write a sketch of ``x`` (Canary, section 4.3.1), with ``bits`` from 1 to 8 per code.

    Non-finite values are decoded as NaN and do not affect others. Zeros are exact if at least one
    in ``2**bits`` values is zero. A raw payload (see ``layout``) is lossless. Denormals below
    2**-133 count as zeros. For ``split`` and ``level`` see ``codebook``.

    With a ``residual``, x + residual is encoded, and residual becomes the encoding error; 0 where
    that is not finite.
    """
    layout.check_sketch_encode(x, payload, bits, split, level, residual)
    n = x.numel()
    if n == 0:
        return
    acc = x if residual is None else x + residual
    if layout.sketch_is_raw(n, bits):
        payload.copy_(acc.view(torch.uint8))
    else:
        key = (acc.view(torch.int32).long() >> 16) & (KEYS - 1)
        lut, table = codebook(torch.bincount(key, minlength=KEYS), bits, split, level)
        start = layout.table_bytes(bits)
        payload[:start].copy_(table.view(torch.uint8))
        payload[start:].copy_(_packed(lut[key], bits))
    if residual is not None:
        sketch_decode(payload, residual, bits=bits)
        _keep_finite(torch.sub(acc, residual, out=residual))


def sketch_decode(payload: Tensor, out: Tensor, *, bits: int, add: bool = False) -> None:
    """Decode a sketch into ``out``, or add it. Any bytes of the right size are valid."""
    layout.check_sketch_decode(payload, out, bits)
    n = out.numel()
    if n == 0:
        return
    if layout.sketch_is_raw(n, bits):
        decoded = _floats(payload)
    else:
        start = layout.table_bytes(bits)
        codes = _unpacked(payload[start:], n, bits)
        decoded = _floats(payload[:start])[codes]
    _put(decoded, out, add)


def topk_encode(
    x: Tensor,
    payload: Tensor,
    *,
    k: int,
    residual: Tensor | None = None,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
) -> None:
    """Write the ``k`` largest magnitudes of ``x`` and their indices; k is 1 to n, or 0 for n = 0.

    Magnitudes are compared by their bits, so NaN > infinity > finite, and of equal magnitudes the
    lowest index is sent. All kernels write the same bytes.

    With a ``residual``, the largest of x + residual are sent, and the others stay in residual; 0
    where not finite. With a ``velocity``, which requires a residual, momentum correction applies
    (Deep Gradient Compression, sections 3.2 and 3.3): velocity becomes momentum * velocity + x,
    rounded after the product and after the sum, and replaces x; then it is set to 0 where an
    element was sent or is not finite. ``momentum`` is rounded to float32.
    """
    layout.check_topk_encode(x, payload, k, residual, velocity)
    n = x.numel()
    if n == 0:
        return
    if velocity is not None:
        x = velocity.mul_(momentum).add_(x)
    acc = x if residual is None else residual.add_(x)
    if layout.topk_is_raw(n, k):
        sent: Tensor | slice = slice(None)
        payload.copy_(acc.view(torch.uint8))
    else:
        sent = _largest(acc, k)
        payload.copy_(_topk_payload(acc, sent))
    for left in (residual, velocity):
        if left is not None:
            left[sent] = 0.0
            _keep_finite(left)


def topk_decode(payload: Tensor, out: Tensor, *, k: int, add: bool = False) -> None:
    """Decode a payload of ``topk_encode`` into ``out``, or add it; elements not sent are 0.

    Raises ValueError if the payload is malformed: counts do not sum to k, or indices do not ascend
    or exceed n. ``out`` is then unchanged.
    """
    layout.check_topk_decode(payload, out, k)
    n = out.numel()
    if n == 0:
        return
    if layout.topk_is_raw(n, k):
        _put(_floats(payload), out, add)
        return
    values, index = _read_topk(payload, n, k)
    if add:
        out[index] += values
    else:
        out.zero_()
        out[index] = values


def sorted_sketch(x: Tensor, bits: int, level: str = "mean") -> Tensor:
    """Return ``x`` quantized with exact quantiles (Canary, section 4.3.1).

    The reference for the histogram's error: ``x`` is sorted and divided into ``2**bits`` runs of
    equal counts. Slow, and for finite values only. A run's value is its ``"mean"``, or the middle
    of its ``"ends"`` as in the paper's step 2.
    """
    n, values = x.numel(), x.double()
    ordered, index = values.sort()
    code = (torch.arange(n, device=x.device) << bits) // max(n, 1)
    zeros = torch.zeros(1 << bits, dtype=torch.float64, device=x.device)
    if level == "mean":
        count = torch.bincount(code, minlength=1 << bits).clamp(min=1)
        table = zeros.index_add(0, code, ordered) / count
    else:
        low = zeros.scatter_reduce(0, code, ordered, "amin", include_self=False)
        high = zeros.scatter_reduce(0, code, ordered, "amax", include_self=False)
        table = (low + high) / 2
    return torch.empty_like(x).scatter_(0, index, table[code].float())


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes as a little-endian bit stream: 8 codes are one word of ``bits`` bytes."""
    n = codes.numel()
    groups = torch.nn.functional.pad(codes, (0, -n % 8)).view(-1, 8)
    words = torch.zeros(len(groups), dtype=torch.int64, device=codes.device)
    for i in range(8):
        words |= groups[:, i].long() << (i * bits)
    return _bytes_of(words, bits)[: -(-n * bits // 8)]


def _unpacked(stream: Tensor, n: int, bits: int) -> Tensor:
    words = _integers(torch.nn.functional.pad(stream, (0, -stream.numel() % bits)), bits)
    mask = (1 << bits) - 1
    groups = torch.stack([((words >> (i * bits)) & mask).int() for i in range(8)], dim=1)
    return groups.view(-1)[:n]


def _largest(acc: Tensor, k: int) -> Tensor:
    """Return ascending indices of the ``k`` largest magnitudes, with ties to the lowest index."""
    magnitude = acc.view(torch.int32) & 0x7FFFFFFF
    order = magnitude.sort(descending=True, stable=True).indices
    return order[:k].sort().values


def _topk_payload(acc: Tensor, index: Tensor) -> Tensor:
    counts = torch.bincount(index // layout.BLOCK, minlength=layout.blocks_of(acc.numel()))
    return torch.cat(
        [
            acc[index].view(torch.uint8),
            _bytes_of(counts, layout.COUNT_BYTES),
            _bytes_of(index % layout.BLOCK, layout.OFFSET_BYTES),
        ]
    )


def _read_topk(payload: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return values and their indices; raise ValueError if the payload is malformed."""
    blocks = layout.blocks_of(n)
    values, counts, offsets = payload.split(
        [layout.VALUE_BYTES * k, layout.COUNT_BYTES * blocks, layout.OFFSET_BYTES * k]
    )
    count = _integers(counts, layout.COUNT_BYTES)
    # Must precede allocations of the size of the counts.
    if int(count.sum()) != k:
        raise ValueError(f"payload is malformed: counts sum to {int(count.sum())} and not to {k}")
    block = torch.arange(blocks, device=payload.device).repeat_interleave(count)
    index = block * layout.BLOCK + _integers(offsets, layout.OFFSET_BYTES)
    if bool((index.diff() <= 0).any()):
        raise ValueError("payload is malformed: indices do not ascend")
    if int(index[-1]) >= n:
        raise ValueError(f"payload is malformed: index {int(index[-1])} of {n} values")
    return _floats(values), index


def _bytes_of(numbers: Tensor, width: int) -> Tensor:
    """Return integers as ``width`` bytes each, little endian."""
    return torch.stack([(numbers >> (8 * i)) & 0xFF for i in range(width)], dim=1).byte().view(-1)


def _integers(stream: Tensor, width: int) -> Tensor:
    """Return little-endian integers of ``width`` bytes, as int64."""
    groups = stream.view(-1, width)
    numbers = torch.zeros(len(groups), dtype=torch.int64, device=stream.device)
    for i in range(width):
        numbers |= groups[:, i].long() << (8 * i)
    return numbers


def _floats(stream: Tensor) -> Tensor:
    """Return bytes as float32; a copy, because a payload may begin at any address."""
    return stream.clone().view(torch.float32)


def _put(decoded: Tensor, out: Tensor, add: bool) -> None:
    if add:
        out.add_(decoded)
    else:
        out.copy_(decoded)


def _keep_finite(left: Tensor) -> None:
    """Set non-finite values to 0, so that they do not persist in a residual or velocity."""
    left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

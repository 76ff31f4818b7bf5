"""The kernels in torch operations: what the fast ones are held against. Any device."""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat.kernels import check, layout
from wingbeat.kernels.codebook import KEYS, codebook


def sketch_encode(
    x: Tensor,
    payload: Tensor,
    *,
    bits: int,
    split: str = "error",
    level: str = "mean",
    residual: Tensor | None = None,
) -> None:
    """Write a sketch of ``x`` (Canary, section 4.3.1) into ``payload``.

    What is not finite arrives as NaN and changes nothing else; where zeros are at least one in
    ``2**bits``, they arrive as exact zeros. A raw payload (see ``layout``) keeps every bit.
    Denormals below 2**-133 count as zeros.

    Args:
        x: float32[n]; not changed.
        payload: uint8[layout.sketch_bytes(n, bits)].
        bits: of a code, 1 to 8.
        split: which values share a code, ``"error"`` or ``"count"``; see ``codebook``.
        level: what a code stands for, ``"mean"`` or ``"ends"``; see ``codebook``.
        residual: float32[n], error feedback: x + residual is encoded, and what the payload does
            not say of it is left in residual; 0 where that is not finite.

    Raises:
        ValueError: an argument has the wrong dtype, shape, size, device or value.
    """
    check.sketch_encode(x, payload, bits, split, level, residual)
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
    """Read a sketch. Any bytes of the right size are one.

    Args:
        payload: uint8[layout.sketch_bytes(n, bits)].
        out: float32[n]; overwritten, or added to.
        bits: of a code, as it was encoded.
        add: whether to add to ``out``.

    Raises:
        ValueError: an argument has the wrong dtype, shape, size, device or value.
    """
    check.sketch_decode(payload, out, bits)
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
    """Write the ``k`` largest magnitudes of ``x`` and their places into ``payload``.

    Magnitudes compare as their bits do, so NaN > infinity > finite, and of equal ones the lowest
    index goes first: all kernels write the same bytes.

    Args:
        x: float32[n]; not changed.
        payload: uint8[layout.topk_bytes(n, k)].
        k: how many, 1 to n (0 for n = 0).
        residual: float32[n], error feedback: the largest of x + residual are sent, and the others
            stay in residual; 0 where one is not finite.
        velocity: float32[n], momentum correction (Deep Gradient Compression, sections 3.2 and
            3.3): becomes momentum * velocity + x, rounded after the product and after the sum, and
            takes the place of x; then 0 where an element was sent or it is not finite.
        momentum: of the velocity; taken as float32.

    Raises:
        ValueError: an argument has the wrong dtype, shape, size, device or value, or there is a
            velocity and no residual.
    """
    check.topk_encode(x, payload, k, residual, velocity)
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
    """Read what ``topk_encode`` wrote; elements that were not sent are 0.

    Args:
        payload: uint8[layout.topk_bytes(n, k)].
        out: float32[n]; overwritten, or added to.
        k: how many were sent.
        add: whether to add to ``out``.

    Raises:
        ValueError: an argument has the wrong dtype, shape, size, device or value; or the payload is
            malformed: counts that do not sum to k, indices that do not ascend or are beyond n.
            ``out`` is then untouched.
    """
    check.topk_decode(payload, out, k)
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
    """Return ``x`` as it arrives when codes are exact quantiles (Canary, section 4.3.1).

    The yardstick for what a histogram loses: ``x`` is sorted and cut into ``2**bits`` runs of equal
    counts. Slow, and for finite values only.

    Args:
        x: float32[n].
        bits: of a code, 1 to 8.
        level: ``"mean"`` of a run, or the middle of its ``"ends"`` as in the paper's step 2.
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
    """Codes as a little-endian bit stream: 8 codes are one word of ``bits`` bytes."""
    n = codes.numel()
    groups = torch.nn.functional.pad(codes, (0, -n % 8)).view(-1, 8)
    words = torch.zeros(len(groups), dtype=torch.int64, device=codes.device)
    for i in range(8):
        words |= groups[:, i].long() << (i * bits)
    return _bytes_of(words, bits)[: -(-n * bits // 8)]


def _unpacked(stream: Tensor, n: int, bits: int) -> Tensor:
    """The ``n`` codes of a bit stream, int32."""
    words = _integers(torch.nn.functional.pad(stream, (0, -stream.numel() % bits)), bits)
    mask = (1 << bits) - 1
    groups = torch.stack([((words >> (i * bits)) & mask).int() for i in range(8)], dim=1)
    return groups.view(-1)[:n]


def _largest(acc: Tensor, k: int) -> Tensor:
    """Ascending indices of the ``k`` largest magnitudes; of equal ones the first."""
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
    """Values and their indices, or ValueError if the payload is malformed."""
    blocks = layout.blocks_of(n)
    values, counts, offsets = payload.split(
        [layout.VALUE_BYTES * k, layout.COUNT_BYTES * blocks, layout.OFFSET_BYTES * k]
    )
    count = _integers(counts, layout.COUNT_BYTES)
    # Before anything is made as long as the counts say.
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
    """Integers as ``width`` bytes each, little endian."""
    return torch.stack([(numbers >> (8 * i)) & 0xFF for i in range(width)], dim=1).byte().view(-1)


def _integers(stream: Tensor, width: int) -> Tensor:
    """Little-endian integers of ``width`` bytes, int64."""
    groups = stream.view(-1, width)
    numbers = torch.zeros(len(groups), dtype=torch.int64, device=stream.device)
    for i in range(width):
        numbers |= groups[:, i].long() << (8 * i)
    return numbers


def _floats(stream: Tensor) -> Tensor:
    """Bytes as float32; a copy, because a payload may begin at any address."""
    return stream.clone().view(torch.float32)


def _put(decoded: Tensor, out: Tensor, add: bool) -> None:
    if add:
        out.add_(decoded)
    else:
        out.copy_(decoded)


def _keep_finite(left: Tensor) -> None:
    """A NaN must not stay for ever in what is carried to the next round."""
    left.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

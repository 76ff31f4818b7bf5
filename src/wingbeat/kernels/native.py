"""The kernels in C++, for the CPU: one or two passes over memory (sources in ``native/``).

The functions are those of ``reference`` and raise what those raise; the extension is given
addresses and trusts them, so everything is checked here. It works without the interpreter's lock,
on as many threads as torch would use for a large tensor; how many never changes a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wingbeat import _native
from wingbeat.kernels import check


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

    Args:
        x: float32[n] on the CPU; not changed.
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
    _native.sketch_encode(
        _address(x),
        x.numel(),
        _address(payload),
        bits,
        split == "error",
        level == "ends",
        _optional(residual),
        torch.get_num_threads(),
    )


def sketch_decode(payload: Tensor, out: Tensor, *, bits: int, add: bool = False) -> None:
    """Read a sketch. Any bytes of the right size are one.

    Args:
        payload: uint8[layout.sketch_bytes(n, bits)] on the CPU.
        out: float32[n]; overwritten, or added to.
        bits: of a code, as it was encoded.
        add: whether to add to ``out``.

    Raises:
        ValueError: an argument has the wrong dtype, shape, size, device or value.
    """
    check.sketch_decode(payload, out, bits)
    threads = torch.get_num_threads()
    _native.sketch_decode(_address(payload), out.numel(), _address(out), bits, add, threads)


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

    The bytes are those that ``reference`` writes.

    Args:
        x: float32[n] on the CPU; not changed.
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
    _native.topk_encode(
        _address(x),
        x.numel(),
        _address(payload),
        k,
        _optional(residual),
        _optional(velocity),
        momentum,
        torch.get_num_threads(),
    )


def topk_decode(payload: Tensor, out: Tensor, *, k: int, add: bool = False) -> None:
    """Read what ``topk_encode`` wrote; elements that were not sent are 0.

    Args:
        payload: uint8[layout.topk_bytes(n, k)] on the CPU.
        out: float32[n]; overwritten, or added to.
        k: how many were sent.
        add: whether to add to ``out``.

    Raises:
        ValueError: an argument has the wrong dtype, shape, size, device or value; or the payload is
            malformed: counts that do not sum to k, indices that do not ascend or are beyond n.
            ``out`` is then untouched.
    """
    check.topk_decode(payload, out, k)
    threads = torch.get_num_threads()
    _native.topk_decode(_address(payload), out.numel(), _address(out), k, add, threads)


def instructions() -> str:
    """Return the instruction set that the kernels use here: ``"avx2"`` or ``"portable"``."""
    return _native.instructions()


def _address(tensor: Tensor) -> int:
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor is on {tensor.device}; the native kernels need the CPU")
    return tensor.data_ptr()


def _optional(tensor: Tensor | None) -> int:
    return 0 if tensor is None else _address(tensor)

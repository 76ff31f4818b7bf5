"""The interface of codecs, and those without state: dense, bfloat16, float16 and sketch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wingbeat import kernels
from wingbeat.kernels import layout

ALIGNMENT = 4
"""Alignment of each region's payload in bytes, so that it can be viewed as float32."""


NativeFields = tuple[int, int, bool, bool, float]
"""A codec in ``native/src/net/coding.h``: its number, bits, whether a sketch is split by error,
whether its levels are the means of the ends, and the density.
"""


class Codec(ABC):
    """Encodes a flat float32 tensor as bytes, and decodes them to approximately the same values.

    Payloads cannot be summed. Their size depends on the number of elements only, so receivers can
    compute it. With ``cols``, the elements are complete rows of a matrix with that number of
    columns; 0 means no matrix. Non-finite values are decoded as infinite or NaN.

    Attributes:
        lossless: whether decoded values are equal.
        separate: whether a large tensor benefits from a payload of its own.
        feedback: whether the encoding error should be added to the next iteration's values.
        bytes_per_element: approximate, except in matrices.
    """

    lossless: ClassVar[bool] = False
    separate: ClassVar[bool] = False
    feedback: bool = False
    bytes_per_element: float

    @property
    def native(self) -> NativeFields | None:
        """The codec in the extension; None if only Python can run it."""
        return None

    def without_matrix(self) -> Codec:
        """Return the codec of elements that are in no matrix."""
        return self

    @abstractmethod
    def nbytes(self, numel: int, cols: int = 0) -> int:
        """Return the exact size of the payload of ``numel`` elements."""

    @abstractmethod
    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        residual: Tensor | None = None,
        cols: int = 0,
        velocity: Tensor | None = None,
    ) -> None:
        """Write ``x``, or ``x + residual``, into ``payload``, uint8 of ``nbytes`` elements.

        Afterwards ``residual``, float32, holds the encoding error; 0 where that is not finite.
        ``velocity``, float32, accumulates momentum in a codec with momentum correction. A
        `ValueError` if the payload's size is wrong; nothing is written.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, cols: int = 0) -> None:
        """Decode ``payload`` into ``out``, flat float32, or add it.

        A `ValueError` if the payload is malformed; ``out`` is unchanged.
        """


def check_size(payload: Tensor, nbytes: int) -> None:
    """Raise a `ValueError` unless ``payload`` has ``nbytes`` bytes."""
    if payload.numel() != nbytes:
        raise ValueError(f"payload has {payload.numel()} bytes; it must have {nbytes}")


class _Cast(Codec):
    """Writes values in ``dtype``."""

    dtype: ClassVar[torch.dtype]

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """As `Codec.nbytes`."""
        return self.dtype.itemsize * numel

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, cols: int = 0) -> None:
        """As `Codec.decode`."""
        check_size(payload, self.nbytes(out.numel()))
        if out.numel() == 0:  # a view of an empty payload may be misaligned
            return
        values = payload.view(self.dtype)
        if add:
            out.add_(values)
        else:
            out.copy_(values)


@dataclass(frozen=True)
class Dense(_Cast):
    """Copies float32 values without loss."""

    dtype = torch.float32
    lossless = True
    bytes_per_element = 4.0

    @property
    def native(self) -> NativeFields:
        """As `Codec.native`."""
        return 0, 0, False, False, 0.0

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        residual: Tensor | None = None,
        cols: int = 0,
        velocity: Tensor | None = None,
    ) -> None:
        """As `Codec.encode`. The residual is zero afterwards."""
        check_size(payload, self.nbytes(x.numel()))
        values = payload.view(torch.float32).copy_(x)
        if residual is not None:
            values.add_(residual)
            residual.zero_()


_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class Bf16Codec(_Cast):
    """Rounds values to the nearest finite bfloat16; infinities and NaN are unchanged.

    Intended for models, whose updates may be smaller than the rounding error.
    """

    dtype = torch.bfloat16
    feedback = True
    bytes_per_element = 2.0

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        residual: Tensor | None = None,
        cols: int = 0,
        velocity: Tensor | None = None,
    ) -> None:
        """As `Codec.encode`."""
        check_size(payload, self.nbytes(x.numel()))
        if x.numel() == 0:
            return
        total = x if residual is None else residual.add_(x)
        values = payload.view(torch.bfloat16).copy_(total)
        if bool(values.isinf().any()):  # finite values must stay finite
            finite = total.isfinite()
            values.copy_(torch.where(finite, total.clamp(-_LARGEST, _LARGEST), total))
        if residual is not None:
            residual.sub_(values).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class SketchCodec(Codec):
    """Writes a table of ``2**bits`` levels and each value's index in it (Canary, section 4.3.1).

    The options are those of `wingbeat.Sketch`. Zeros are exact if at least one in ``2**bits``
    values is zero. Non-finite values are decoded as NaN and do not affect others. Magnitudes below
    2**-133 become zero.
    """

    separate = True

    bits: int = 8
    split: str = "error"
    level: str = "mean"
    feedback: bool = True

    @property
    def bytes_per_element(self) -> float:  # type: ignore[override]
        """Bytes of an index, without the table."""
        return self.bits / 8

    @property
    def native(self) -> NativeFields:
        """As `Codec.native`."""
        return 2, self.bits, self.split == "error", self.level == "ends", 0.0

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """As `Codec.nbytes`."""
        return layout.sketch_bytes(numel, self.bits)

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        residual: Tensor | None = None,
        cols: int = 0,
        velocity: Tensor | None = None,
    ) -> None:
        """As `Codec.encode`."""
        kernels.of(x.device).sketch_encode(
            x, payload, bits=self.bits, split=self.split, level=self.level, residual=residual
        )

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, cols: int = 0) -> None:
        """As `Codec.decode`."""
        kernels.of(out.device).sketch_decode(payload, out, bits=self.bits, add=add)


CHUNK = 1 << 19
"""Elements processed at a time on a CPU; intermediate values of this size fit into the cache."""

TOP_EXPONENT = 14
"""Exponent of the largest magnitude after scaling; float16's maximum is 65504."""

BIAS = 127
"""Bias of float32's exponent field, bits 23 to 30."""

HEAD = 4
"""Bytes of the float32 scale."""


@dataclass(frozen=True)
class HalfCodec(Codec):
    """Rounds values to the nearest float16 after scaling. Infinities and NaN are unchanged.

    Payload: ``[scale: float32][values: float16]``. The scale is a power of two that brings the
    largest finite magnitude into ``[2**14, 2**15]``: no finite value overflows, and values keep 11
    bits down to ``2**-29`` of the largest. The smallest scale is ``2**-126``, which can represent
    denormals. If all values are zero, the scale is 1. The error is small, so that no feedback is
    needed; a residual is used if given.
    """

    bytes_per_element = 2.0

    @property
    def native(self) -> NativeFields:
        """As `Codec.native`."""
        return 1, 16, False, False, 0.0

    def nbytes(self, numel: int, cols: int = 0) -> int:
        """As `Codec.nbytes`; an empty payload has no scale."""
        return HEAD + 2 * numel if numel else 0

    def encode(
        self,
        x: Tensor,
        payload: Tensor,
        *,
        residual: Tensor | None = None,
        cols: int = 0,
        velocity: Tensor | None = None,
    ) -> None:
        """As `Codec.encode`."""
        check_size(payload, self.nbytes(x.numel()))
        if x.numel() == 0:
            return
        total = x if residual is None else residual.add_(x)
        scale, values = _fields(payload)
        _write_scaled(total, scale, values)
        if residual is not None:
            for chunk, wide in _chunks(total):
                wide.copy_(values[chunk]).mul_(scale)
                residual[chunk].sub_(wide).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, cols: int = 0) -> None:
        """As `Codec.decode`."""
        check_size(payload, self.nbytes(out.numel()))
        if out.numel() == 0:
            return
        scale, values = _fields(payload)
        for chunk, wide in _chunks(out):
            if add:
                out[chunk].add_(wide.copy_(values[chunk]).mul_(scale))
            else:
                out[chunk].copy_(values[chunk]).mul_(scale)


def _fields(payload: Tensor) -> tuple[Tensor, Tensor]:
    return payload[:HEAD].view(torch.float32)[0], payload[HEAD:].view(torch.float16)


def _write_scaled(x: Tensor, scale: Tensor, values: Tensor) -> None:
    """Choose ``scale`` and write the float16 nearest to ``x / scale``, without a GPU sync."""
    peak = _peak(x)
    field = ((peak.view(torch.int32) >> 23) - TOP_EXPONENT).clamp(min=1)  # of the scale: 1 to 240
    field = torch.where(peak == 0, BIAS, field).to(torch.int32)
    scale.copy_((field << 23).view(torch.float32))
    inverse = ((2 * BIAS - field) << 23).view(torch.float32)
    # float32's largest values would be rounded up to 2**15 * 2**113, which overflows.
    top = field == 2 * BIAS - TOP_EXPONENT
    limit = None
    if not _may_ask(field) or top:
        limit = torch.where(top, 2.0**15 - 2.0**4, torch.inf)
    for chunk, scaled in _chunks(x):
        torch.mul(x[chunk], inverse, out=scaled)
        if limit is not None:
            scaled.copy_(torch.where(scaled.isinf(), scaled, scaled.clamp(-limit, limit)))
        values[chunk].copy_(scaled)


def _peak(x: Tensor) -> Tensor:
    """Return the largest finite magnitude in ``x``, or 0, as a scalar tensor."""
    if _may_ask(x):
        peak = _largest(x)
        if torch.isfinite(peak):
            return peak
    return _largest(x.nan_to_num(0.0, 0.0, 0.0))


def _may_ask(x: Tensor) -> bool:
    """Whether a branch may depend on values; on a GPU the host would wait for the device."""
    return x.device.type == "cpu"


def _largest(x: Tensor) -> Tensor:
    low, high = x.aminmax()
    return torch.maximum(-low, high)


def _chunks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of ``x`` with float32 scratch; on a GPU one slice, to save kernel launches."""
    step = min(CHUNK, x.numel()) if x.device.type == "cpu" else x.numel()
    scratch = torch.empty(step, dtype=torch.float32, device=x.device)
    for start in range(0, x.numel(), max(1, step)):
        yield slice(start, start + step), scratch[: x.numel() - start]

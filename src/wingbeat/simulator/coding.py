"""Encodings of gradients in virtual time: their sizes, and the seconds that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wingbeat.compression import Coded, Sketch, options_of
from wingbeat.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """Encoding of gradients and their sums; dense float32 by default.

    Attributes:
        ratio: encoded bytes for each byte of float32.
        encode_s_per_byte: seconds for each byte of float32, on the training thread for gradients,
            and on an owner's communication thread for sums.
        decode_s_per_byte: the same, on an owner's communication thread for each contribution, and
            on the training thread for sums.

    Raises:
        UsageError: a value is out of range.
    """

    ratio: float = 1.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(f"Coding(ratio={self.ratio}): allowed are numbers above 0 up to 1")
        if min(self.encode_s_per_byte, self.decode_s_per_byte) < 0:
            raise UsageError("Coding(): seconds for each byte are 0 or more")


SKETCH = Coding(ratio=0.251, encode_s_per_byte=1 / 3.43e9, decode_s_per_byte=1 / 5.78e9)
"""An 8-bit sketch on one core ("Codecs" in ``docs/results.md``)."""


SKETCH_4 = Coding(ratio=0.126, encode_s_per_byte=1 / 2.74e9, decode_s_per_byte=1 / 3.91e9)
"""A 4-bit sketch on one core."""

_HALF = 0.5
_FEW_BITS = 4


def coding_of(wire: str | Coded) -> Coding:
    """Return the encoding of a strategy's ``wire`` on one core ("Codecs" in ``docs/results.md``).

    Raises:
        UsageError: the encoded size depends on tensor shapes, or differs between tensors.
    """
    if not wire:
        return Coding()
    if options_of(wire).rounded_bytes:
        return Coding(ratio=_HALF)
    if isinstance(wire, Sketch) and not wire.groups:
        known = SKETCH if wire.bits > _FEW_BITS else SKETCH_4
        return replace(known, ratio=wire.bits / 32 + 0.001)
    raise UsageError(
        f"simulate(): how small {wire} makes gradients depends on which they are: say it with "
        "coding=simulator.Coding(ratio=...)"
    )

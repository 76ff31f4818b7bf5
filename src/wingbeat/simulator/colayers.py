"""Colayers of a simulated model: compute times and message sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from wingbeat.compression import Coded, Half, Sketch
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.messages import (
    Message,
    Piece,
    PieceSum,
    Progress,
    encode_frame,
    initial_view,
)
from wingbeat.planning import plans
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.mailbox import LIMITS
from wingbeat.simulator.model import ITEMSIZE, Model
from wingbeat.transport.messages.frames import HEADER_BYTES
from wingbeat.types import Fusion

_TYPICAL = 100
"""Number of a typical iteration."""


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
    if isinstance(wire, str | Half):
        return Coding(ratio=_HALF)
    if isinstance(wire, Sketch) and not wire.groups:
        known = SKETCH if wire.bits > _FEW_BITS else SKETCH_4
        return replace(known, ratio=wire.bits / 32 + 0.001)
    raise UsageError(
        f"simulate(): how small {wire} makes gradients depends on which they are: say it with "
        "coding=simulator.Coding(ratio=...)"
    )


@dataclass(frozen=True, slots=True)
class Bundled:
    """A model in colayers, the last layers first; times in seconds for one batch.

    ``backward_s`` is by colayer, from the end of the previous one; ``rest_s`` is backward after the
    last. ``numel`` and ``tensors`` count elements and parameters by colayer.
    """

    forward_s: float
    backward_s: tuple[float, ...]
    rest_s: float
    numel: tuple[int, ...]
    tensors: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Seconds of an iteration without waiting."""
        return self.forward_s + sum(self.backward_s) + self.rest_s


def bundled(model: Model, count: int, *, measured: bool = False) -> Bundled:
    """Group a model's layers into ``count`` colayers as training does.

    Raises:
        UsageError: the model has fewer layers with parameters.
    """
    plan = plans.make_plan(
        Fusion(kind="colayers", layers=count),
        model.tensors,
        model.ready_order,
        model.measured if measured else None,
    )
    tensors = [bucket.tensors for bucket in plan.buckets]
    if len(tensors) < count:
        raise UsageError(
            f"colayers={count}; allowed: up to {len(tensors)}, as many as the model has layers"
        )
    last = {each[-1] for each in tensors}
    seconds, ends = 0.0, []
    for layer in reversed(model.layers):
        seconds += layer.backward_s
        if last.intersection(layer.tensors):
            ends.append(seconds)
            seconds = 0.0
    return Bundled(
        sum(layer.forward_s for layer in model.layers),
        tuple(ends),
        seconds,
        tuple(sum(model.tensors[t].numel for t in each) for each in tensors),
        tuple(map(len, tensors)),
    )


class Letter(NamedTuple):
    """The size of a message in bytes, headers included, and in messages of the message layer."""

    nbytes: int
    parts: int

    def handled_s(self, work: Work) -> float:
        """Return the seconds in which a communication thread sends or receives it."""
        return self.parts * work.message_s + self.nbytes * work.message_s_per_byte


class Letters:
    """Message sizes of `wingbeat.methods.bounded_staleness.courier`.

    ``numel`` and ``pieces`` are elements and size of a `Piece` by colayer, ``here`` the size of a
    `Progress`.
    """

    def __init__(self, model: Bundled, workers: int, coding: Coding) -> None:
        self.numel = tuple(-(-numel // workers) for numel in model.numel)
        self._flags, self._ratio = model.tensors, coding.ratio
        view, first = initial_view(workers), (_TYPICAL,) * workers
        number = _TYPICAL
        self.here = _letter(_words(Progress(number, number, number, False, number, view)), 0)
        words = _words(Piece(number, 0, workers - 1, view))
        self.pieces = tuple(_letter(words, self._payload(z)) for z in range(len(self.numel)))

        def length(entries: Sequence[tuple[int, int]]) -> int:
            return _words(PieceSum(0, workers - 1, number, tuple(entries), first, view))

        entry = number, workers - 1
        self._entry = length([entry, entry]) - length([entry])
        self._empty = length([entry]) - self._entry

    def of(self, message: Message) -> Letter:
        """Return the size of a message."""
        match message:
            case PieceSum():
                return self.round(message.colayer, len(message.entries))
            case Piece():
                return self.pieces[message.colayer]
        return self.here

    def round(self, colayer: int, entries: int) -> Letter:
        """Return the size of the sum of ``entries`` contributions."""
        payload = self._payload(colayer) if entries else 0
        return _letter(self._empty + entries * self._entry, payload)

    def _payload(self, colayer: int) -> int:
        return int(self.numel[colayer] * ITEMSIZE * self._ratio) + self._flags[colayer]


def _words(message: Message) -> int:
    return len(encode_frame(message, 0).header)


def _letter(words: int, payload: int) -> Letter:
    parts = 1
    if words + payload > LIMITS.message:
        parts += -(-payload // LIMITS.message)
    return Letter(words + payload + HEADER_BYTES * parts, parts)

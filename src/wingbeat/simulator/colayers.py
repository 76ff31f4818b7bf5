"""A model's colayers as a simulator sees them: when each is computed, and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.messages import (
    Message,
    Piece,
    PieceSum,
    Progress,
    encode_frame,
)
from wingbeat.methods.bounded_staleness.view import initial_view
from wingbeat.planning import plans
from wingbeat.simulator.cluster import Work
from wingbeat.simulator.mailbox import LIMITS
from wingbeat.simulator.model import ITEMSIZE, Model
from wingbeat.transport.messages.header import FIXED
from wingbeat.types import Fusion
from wingbeat.wires import Coded, Half, Sketch

_TYPICAL = 100
"""An iteration like most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """How gradients and their sums travel, dense float32 by default.

    Attributes:
        ratio: bytes on the wire for each byte of float32.
        encode_s_per_byte: seconds for each byte of float32, of the training thread for its
            gradients, and of an owner's courier for its sums.
        decode_s_per_byte: the same, of an owner's courier for each contribution, and of the
            training thread for sums.
    """

    ratio: float = 1.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: one is out of range.
        """
        if not 0 < self.ratio <= 1:
            raise UsageError(f"Coding(ratio={self.ratio}): allowed are numbers above 0 up to 1")
        if min(self.encode_s_per_byte, self.decode_s_per_byte) < 0:
            raise UsageError("Coding(): seconds for each byte are 0 or more")


SKETCH = Coding(ratio=0.251, encode_s_per_byte=1 / 3.43e9, decode_s_per_byte=1 / 5.78e9)
"""A sketch of 8 bits on one core ("Codecs" in ``docs/results.md``)."""


SKETCH_4 = Coding(ratio=0.126, encode_s_per_byte=1 / 2.74e9, decode_s_per_byte=1 / 3.91e9)
"""The same with 4 bits."""

_HALF = 0.5
_FEW_BITS = 4


def coding_of(wire: str | Coded) -> Coding:
    """Return how gradients travel by a strategy's wire, on one core ("Codecs" in the results).

    Raises:
        UsageError: how small they become depends on their shapes, or differs between them.
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
    """A model in colayers, the last layers' first; times are a batch's, in seconds.

    Attributes:
        forward_s: of forward.
        backward_s: by colayer, from the end of the one before.
        rest_s: of backward after the last colayer.
        numel: elements by colayer.
        tensors: parameters by colayer.
    """

    forward_s: float
    backward_s: tuple[float, ...]
    rest_s: float
    numel: tuple[int, ...]
    tensors: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """What an iteration takes that waits for nobody."""
        return self.forward_s + sum(self.backward_s) + self.rest_s


def bundled(model: Model, count: int, *, measured: bool = False) -> Bundled:
    """Bundle a model's layers as training does, by the same rule and what it goes by.

    Args:
        model: layers and their times.
        count: colayers, k.
        measured: whether by what training measures, as after its first iterations.

    Raises:
        UsageError: it has fewer layers with parameters.
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
    """A message as it travels.

    Attributes:
        nbytes: all of them, headers too.
        parts: in how many messages of the message layer.
    """

    nbytes: int
    parts: int

    def handled_s(self, work: Work) -> float:
        """Return what a courier needs to post or to take it."""
        return self.parts * work.message_s + self.nbytes * work.message_s_per_byte


class Letters:
    """Sizes of what couriers carry (`wingbeat.methods.bounded_staleness.courier`).

    Args:
        model: in colayers.
        workers: how many there are; as many are the pieces.
        coding: how gradients travel.

    Attributes:
        numel: elements of a piece, by colayer.
        here: of a `Progress`.
        pieces: of a `Piece`, by colayer.
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
        """Return how a message travels."""
        match message:
            case PieceSum():
                return self.round(message.colayer, len(message.entries))
            case Piece():
                return self.pieces[message.colayer]
        return self.here

    def round(self, colayer: int, entries: int) -> Letter:
        """Return how the sum of so many contributions travels."""
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
    return Letter(words + payload + FIXED * parts, parts)

"""Messages as numbers, which are checked before anything of them is used. Pure.

What is said most often is said in few bytes and soon read: of a worker's messages there are ``4 k``
for each other worker in every round. A letter is a head, the numbers of the message, and its
payload (gradients, sums, parameters), which is checked by whoever knows how large it must be. What
is short goes with others into one part of what travels.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from wingbeat.methods.bounded_staleness.gei import Gei
from wingbeat.methods.bounded_staleness.messages import (
    Here,
    Message,
    Parameters,
    Piece,
    Pull,
    Report,
    Round,
    Settled,
    Welcome,
)
from wingbeat.methods.bounded_staleness.view import View

MOST = 1 << 48
"""Iterations, rounds and lives are below this."""

_HEAD = struct.Struct("<IIQ")
"""Bytes of a number, how many numbers, and bytes of the payload."""

_FORMATS = {4: "i", 8: "q"}
_LIMB = 30
"""Bits of a mask of workers in one number."""

_KINDS = (Here, Piece, Round, Report, Welcome, Pull, Parameters, Settled)
_FIELDS: Mapping[type, tuple[str, ...]] = {
    kind: tuple(each.name for each in dataclasses.fields(kind) if each.name != "payload")
    for kind in _KINDS
}


class Malformed(Exception):
    """A letter that no worker of this job has sent; says what is wrong with it."""


class Letter(NamedTuple):
    """A message to be sent.

    Attributes:
        said: head and numbers.
        payload: what follows, maybe nothing.
    """

    said: bytes
    payload: memoryview


class Read(NamedTuple):
    """A letter that has come.

    Attributes:
        numbers: what it says; see `message_of`.
        nbytes: of the payload.
        payload: as much of it as has come with the numbers: all, or nothing.
    """

    numbers: tuple[int, ...]
    nbytes: int
    payload: memoryview


# -- what is sent ----------------------------------------------------------------------------


def letter_of(message: Message, life: int, epoch: int = 0) -> Letter:
    """Say what a message says.

    Args:
        message: of this worker.
        life: in which of its lives it sends it.
        epoch: how often its colayers have changed.
    """
    data = getattr(message, "payload", None)
    payload = memoryview(b"" if data is None else data).cast("B")
    numbers = numbers_of(message, life, epoch)
    width = 4 if max(numbers) < 1 << 31 else 8
    head = _HEAD.pack(width, len(numbers), len(payload))
    return Letter(head + struct.pack(f"<{len(numbers)}{_FORMATS[width]}", *numbers), payload)


def numbers_of(message: Message, life: int, epoch: int = 0) -> list[int]:
    """Return the sender's epoch, the message's kind, the sender's life, and the message's fields.

    Args:
        message: its payload is not among them.
        life: of the sender.
        epoch: how often its colayers have changed.
    """
    kind = type(message)
    out = [epoch, _KINDS.index(kind), life]
    for name in _FIELDS[kind]:
        out += _HOW[name][0](getattr(message, name))
    return out


def _one(value: int) -> tuple[int]:
    return (value,)


def _entries(entries: Sequence[tuple[int, int]]) -> list[int]:
    return [len(entries), *(number for entry in entries for number in entry)]


def _marks(marks: Iterable[Iterable[Iterable[int]]]) -> list[int]:
    return [number for piece in marks for row in piece for number in row]


def _gei(gei: Gei) -> list[int]:
    rows = gei.rows
    out = [gei.retired, gei.zeta, gei.counted, len(rows)]
    for iteration in sorted(rows):
        out.append(iteration)
        for mask in (mask for pieces in rows[iteration] for mask in pieces):
            out += [mask >> bit & (1 << _LIMB) - 1 for bit in range(0, gei.workers, _LIMB)]
    return out


# -- what has come ---------------------------------------------------------------------------


def letters_in(part: Any, most: int) -> Iterator[Read]:
    """Yield the letters that begin in a part; of the last one the payload may be still to come.

    Args:
        part: bytes, or what has them.
        most: bytes that a payload may take.

    Raises:
        Malformed: these are no letters.
    """
    view = memoryview(part).cast("B")
    if not len(view):
        raise Malformed("a part without a letter")
    while len(view):
        if len(view) < _HEAD.size:
            raise Malformed(f"{len(view)} bytes are no head of a letter")
        width, count, nbytes = _HEAD.unpack_from(view)
        end = _HEAD.size + width * count
        if width not in _FORMATS or end > len(view):
            raise Malformed(f"{count} numbers of {width} bytes each in a part of {len(view)}")
        if nbytes > most:
            raise Malformed(f"{nbytes} bytes would follow, and there is room for {most}")
        numbers = struct.unpack_from(f"<{count}{_FORMATS[width]}", view, _HEAD.size)
        payload, view = view[end : end + nbytes], view[end + nbytes :]
        if 0 < len(payload) < nbytes:
            raise Malformed(f"{nbytes} bytes were to follow, and {len(payload)} did")
        yield Read(numbers, nbytes, payload)


def epoch_of(numbers: Sequence[int]) -> int:
    """Return how often the sender's colayers had changed: the rest is to be read with as many.

    Raises:
        Malformed: it is no such number.
    """
    return _Reader(numbers, 0, 0).number("epoch")


def message_of(
    numbers: Sequence[int], workers: int, colayers: int, payload: Any
) -> tuple[int, Message]:
    """Return the sender's life, and the message that ``numbers`` and ``payload`` are.

    Args:
        numbers: see `numbers_of`.
        workers: how many there may be.
        colayers: k.
        payload: what has come behind them; None for nothing.

    Raises:
        Malformed: a worker of this job would not say so.
    """
    read = _Reader(numbers, workers, colayers)
    read.number("epoch")
    kind = _KINDS[read.number("kind", end=len(_KINDS))]
    life = read.number("life")
    fields = {name: _HOW[name][1](read, name) for name in _FIELDS[kind]}
    read.end()
    if kind in (Piece, Round, Parameters):
        fields["payload"] = payload
    elif payload is not None:
        raise Malformed(f"{kind.__name__} with {len(payload)} bytes behind it")
    return life, kind(**fields)


class _Reader:
    """Takes one field after the other."""

    def __init__(self, numbers: Sequence[int], workers: int, colayers: int) -> None:
        self._numbers, self._at = numbers, 0
        self._workers, self._colayers = workers, colayers

    def end(self) -> None:
        if self._at != len(self._numbers):
            raise Malformed(f"{len(self._numbers) - self._at} numbers too many")

    def number(self, name: str, least: int = 0, end: int = MOST) -> int:
        numbers, at = self._numbers, self._at
        self._at += 1
        if at >= len(numbers) or not least <= numbers[at] < end:
            raise Malformed(f"{name} is {numbers[at : self._at]!r:.40}")
        return numbers[at]

    def row(self, name: str, length: int, least: int = 0, end: int = MOST) -> tuple[int, ...]:
        row = tuple(self._numbers[self._at : self._at + length])
        self._at += length
        if len(row) != length or (length and not least <= min(row) <= max(row) < end):
            raise Malformed(f"{name} is {row!r:.40}")
        return row

    def worker(self, name: str) -> int:
        return self.number(name, end=self._workers)

    def colayer(self, name: str) -> int:
        return self.number(name, end=self._colayers)

    def may_lack(self, name: str) -> int:
        return self.number(name, least=-1)

    def flag(self, name: str) -> bool:
        return bool(self.number(name, end=2))

    def view(self, name: str) -> View:
        return View(self.row(name, self._workers))

    def by_colayer(self, name: str) -> tuple[int, ...]:
        return self.row(name, self._colayers)

    def places(self, name: str) -> tuple[int, ...]:
        return self.row(name, self._workers, least=-1)

    def entries(self, name: str) -> tuple[tuple[int, int], ...]:
        flat = self.row(name, 2 * self.number(name, end=len(self._numbers)))
        out = tuple(zip(flat[::2], flat[1::2], strict=True))
        if max(flat[1::2], default=0) >= self._workers:
            raise Malformed(f"{name} are {out!r:.40}")
        if any(before >= after for before, after in itertools.pairwise(out)):
            raise Malformed(f"{name} are not in order, or not all different")
        return out

    def marks(self, name: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(self.places(name) for _ in range(self._colayers)) for _ in range(self._workers)
        )

    def gei(self, name: str) -> Gei:
        retired, zeta = self.number(name), self.number(name, least=-1)
        counted, rows = self.number(name), dict[int, list[list[int]]]()
        least = retired
        for _ in range(self.number(name, end=len(self._numbers))):
            iteration = self.number(name, least, zeta + 1)
            least = iteration + 1
            rows[iteration] = [
                [self._mask(name) for _ in range(self._workers)] for _ in range(self._colayers)
            ]
        return Gei.of(self._workers, self._colayers, retired, zeta, counted, rows)

    def _mask(self, name: str) -> int:
        limbs = self.row(name, -(-self._workers // _LIMB), end=1 << _LIMB)
        mask = sum(limb << _LIMB * place for place, limb in enumerate(limbs))
        if mask >> self._workers:
            raise Malformed(f"{name} has a mask {mask:#x}"[:60])
        return mask


_NUMBER = _one, _Reader.number
_MAY_LACK = _one, _Reader.may_lack
_HOW: Mapping[str, tuple[Callable[[Any], Iterable[int]], Callable[[_Reader, str], Any]]] = {
    "view": (tuple, _Reader.view),
    "at": _NUMBER,
    "first": (tuple, _Reader.places),
    "said": _MAY_LACK,
    "applied": _MAY_LACK,
    "complete": _MAY_LACK,
    "ended": (_one, _Reader.flag),
    "zeta": _NUMBER,
    "iteration": _NUMBER,
    "number": _NUMBER,
    "rounds": _NUMBER,
    "colayer": (_one, _Reader.colayer),
    "piece": (_one, _Reader.worker),
    "entries": (_entries, _Reader.entries),
    "marks": (_marks, _Reader.marks),
    "numbers": (tuple, _Reader.by_colayer),
    "gei": (_gei, _Reader.gei),
}
"""How each field is said and read, whatever message it is in."""

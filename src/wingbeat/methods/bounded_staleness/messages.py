"""Views of the membership, messages between workers, and their encoding as frames of integers.

Iterations, rounds, colayers (0 has the last layers), pieces and workers are counted from 0. A frame
is a header, the integers of one message, and its payload (gradients, sums or parameters). Every
integer is range-checked before use; the receiver of a payload checks its size.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType

# -- views -----------------------------------------------------------------------------------

View = NewType("View", tuple[int, ...])
"""One number for each worker, even while the worker is alive, in incarnation number / 2, and odd
when that incarnation has ended. Numbers only grow, so merging two views takes the larger ones."""


def initial_view(workers: int) -> View:
    """Return the view in which a job starts: all workers are alive in their first incarnation."""
    return View((0,) * workers)


def merge_views(a: View, b: View) -> View:
    """Return the view with all information of both."""
    return View(tuple(map(max, a, b)))


def covers(a: View, b: View) -> bool:
    """Whether ``a`` contains all information of ``b``."""
    return all(x >= y for x, y in zip(a, b, strict=True))


def without_worker(view: View, worker: int) -> View:
    """Return the view in which the current incarnation of ``worker`` has ended."""
    return View((*view[:worker], view[worker] | 1, *view[worker + 1 :]))


def with_incarnation(view: View, worker: int, incarnation: int) -> View:
    """Return the view in which ``worker`` is alive in ``incarnation``, counted from 0."""
    return View((*view[:worker], max(view[worker], 2 * incarnation), *view[worker + 1 :]))


@functools.lru_cache(maxsize=64)
def members(view: View) -> tuple[int, ...]:
    """Return the workers that are alive."""
    return tuple(worker for worker, number in enumerate(view) if number % 2 == 0)


def piece_owner(view: View, piece: int) -> int:
    """Return the worker that sums a piece: the one with its number, or the next living one."""
    n = len(view)
    return next(w % n for w in range(piece, piece + n) if view[w % n] % 2 == 0)


def is_reassigned(view: View, piece: int) -> bool:
    """Whether the worker of a piece has ever died; its rounds then restart in each view."""
    return view[piece] != 0


# -- messages --------------------------------------------------------------------------------

Contribution = tuple[int, int]
"""Iteration and worker of the gradients of one colayer."""

Watermarks = tuple[tuple[int, ...], ...]
"""By colayer and worker: the last iteration of which a piece was summed; -1 for none."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a worker, and the rounds for which it has nothing (more): the empty packet.

    Attributes:
        iteration: the current or next iteration.
        sent_through: the worker has sent everything for the rounds up to this one.
        applied: rounds in its parameters; -1 if it has to pull parameters itself.
        finished: whether it begins no iteration until all workers have finished.
        zeta: the latest iteration that any worker is known to have entered.
        view: its committed view.
    """

    iteration: int
    sent_through: int
    applied: int
    finished: bool
    zeta: int
    view: View


@dataclass(frozen=True, slots=True)
class Piece:
    """A worker's gradients of one piece of one colayer, sent to the owner of the piece."""

    iteration: int
    colayer: int
    piece: int
    view: View
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PieceSum:
    """The sum of one piece of one colayer in round ``number``, from the owner to all workers.

    ``entries`` are the contributions in the order of addition, none in an empty packet.
    ``earliest`` has by worker the first iteration that later rounds may contain; -1 if it is dead.
    """

    colayer: int
    piece: int
    number: int
    entries: tuple[Contribution, ...]
    earliest: tuple[int, ...]
    view: View
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ViewProposal:
    """A worker's proposal of a view, with the rounds that the worker has.

    Of ``complete`` rounds it has all pieces of all colayers; -1 if it is joining. ``watermarks``
    are the contributions in these rounds, by piece.
    """

    view: View
    complete: int
    watermarks: tuple[Watermarks, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first round of a piece that a joining worker receives, by colayer."""

    piece: int
    first_rounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A request for parameters with at least ``applied`` rounds."""

    applied: int
    view: View


@dataclass(frozen=True, slots=True)
class GeiState:
    """What a `Gei` has counted, with its attributes."""

    retired: int
    zeta: int
    counted: int
    rows: dict[int, list[list[int]]]


@dataclass(frozen=True, slots=True)
class PullResponse:
    """Parameters with ``applied`` rounds; ``watermarks`` has their contributions by piece."""

    applied: int
    watermarks: tuple[Watermarks, ...]
    gei: GeiState
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Drained:
    """A finished worker has received ``rounds`` rounds and expects no more."""

    rounds: int
    view: View


Message = (
    Progress | Piece | PieceSum | ViewProposal | Welcome | PullRequest | PullResponse | Drained
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and its receivers; each receiver gets the messages of a sender in order."""

    to: tuple[int, ...]
    message: Message


# -- frames ----------------------------------------------------------------------------------

MAX_NUMBER = 1 << 48
"""Upper bound of iterations, rounds and incarnations, exclusive."""

_HEADER = struct.Struct("<IIQ")
"""Bytes of an integer, number of integers, bytes of the payload."""

_FORMATS = {4: "i", 8: "q"}
_LIMB = 30
"""Bits of a mask of workers in one integer."""

_KINDS = (
    Progress, Piece, PieceSum, ViewProposal, Welcome, PullRequest, PullResponse, Drained,
)  # fmt: skip
_FIELDS: Mapping[type, tuple[str, ...]] = {
    kind: tuple(each.name for each in dataclasses.fields(kind) if each.name != "payload")
    for kind in _KINDS
}


class MalformedMessage(Exception):
    """Bytes or text that no worker of this job sends; the text states the violation."""


class Frame(NamedTuple):
    """An encoded message."""

    header: bytes
    payload: memoryview


class ReceivedFrame(NamedTuple):
    """A frame with the integers for `decode_message`.

    ``payload`` is the whole payload of ``payload_nbytes``, or empty if it follows in later parts.
    """

    numbers: tuple[int, ...]
    payload_nbytes: int
    payload: memoryview


def encode_frame(message: Message, incarnation: int, epoch: int = 0) -> Frame:
    """Encode a message of a worker."""
    data = getattr(message, "payload", None)
    payload = memoryview(b"" if data is None else data).cast("B")
    numbers = encode_numbers(message, incarnation, epoch)
    width = 4 if max(numbers) < 1 << 31 else 8
    header = _HEADER.pack(width, len(numbers), len(payload))
    return Frame(header + struct.pack(f"<{len(numbers)}{_FORMATS[width]}", *numbers), payload)


def encode_numbers(message: Message, incarnation: int, epoch: int = 0) -> list[int]:
    """Return epoch, kind of message, incarnation, and the fields without the payload."""
    kind = type(message)
    out = [epoch, _KINDS.index(kind), incarnation]
    for name in _FIELDS[kind]:
        out += _CODERS[name][0](getattr(message, name))
    return out


def decode_frames(part: Any, max_payload: int) -> Iterator[ReceivedFrame]:
    """Yield the frames in a part; the last payload may follow in later parts.

    Raises MalformedMessage if the part is not a sequence of frames.
    """
    view = memoryview(part).cast("B")
    if not len(view):
        raise MalformedMessage("empty part")
    while len(view):
        if len(view) < _HEADER.size:
            raise MalformedMessage(f"frame header of {len(view)} bytes")
        width, count, nbytes = _HEADER.unpack_from(view)
        end = _HEADER.size + width * count
        if width not in _FORMATS or end > len(view):
            raise MalformedMessage(f"{count} integers of {width} bytes in {len(view)} bytes")
        if nbytes > max_payload:
            raise MalformedMessage(f"payload of {nbytes} bytes; the limit is {max_payload}")
        numbers = struct.unpack_from(f"<{count}{_FORMATS[width]}", view, _HEADER.size)
        payload, view = view[end : end + nbytes], view[end + nbytes :]
        if 0 < len(payload) < nbytes:
            raise MalformedMessage(f"{len(payload)} bytes of a payload of {nbytes}")
        yield ReceivedFrame(numbers, nbytes, payload)


def decode_epoch(numbers: Sequence[int]) -> int:
    """Return the sender's epoch, which determines how the other integers are decoded."""
    return _FieldReader(numbers, 0, 0).number("epoch")


def decode_message(
    numbers: Sequence[int], workers: int, colayers: int, payload: Any
) -> tuple[int, Message]:
    """Return the sender's incarnation and message; MalformedMessage if they are invalid here."""
    reader = _FieldReader(numbers, workers, colayers)
    reader.number("epoch")
    kind = _KINDS[reader.number("kind", end=len(_KINDS))]
    incarnation = reader.number("incarnation")
    fields = {name: _CODERS[name][1](reader, name) for name in _FIELDS[kind]}
    reader.check_end()
    if kind in (Piece, PieceSum, PullResponse):
        fields["payload"] = payload
    elif payload is not None:
        raise MalformedMessage(f"unexpected payload of {len(payload)} bytes in {kind.__name__}")
    return incarnation, kind(**fields)


class _FieldReader:
    def __init__(self, numbers: Sequence[int], workers: int, colayers: int) -> None:
        self._numbers, self._at = numbers, 0
        self.workers, self.colayers = workers, colayers

    def check_end(self) -> None:
        if self._at != len(self._numbers):
            raise MalformedMessage(f"{len(self._numbers) - self._at} extra integers")

    def row(self, name: str, length: int, least: int = 0, end: int = MAX_NUMBER) -> tuple[int, ...]:
        row = tuple(self._numbers[self._at : self._at + length])
        self._at += length
        if len(row) != length or (length and not least <= min(row) <= max(row) < end):
            raise MalformedMessage(f"{name} is {row!r:.40}")
        return row

    def number(self, name: str, least: int = 0, end: int = MAX_NUMBER) -> int:
        numbers, at = self._numbers, self._at
        self._at += 1
        if at >= len(numbers) or not least <= numbers[at] < end:
            raise MalformedMessage(f"{name} is {numbers[at : self._at]!r:.40}")
        return numbers[at]

    def entries(self, name: str) -> tuple[Contribution, ...]:
        flat = self.row(name, 2 * self.number(name, end=len(self._numbers)))
        out = tuple(zip(flat[::2], flat[1::2], strict=True))
        if max(flat[1::2], default=0) >= self.workers:
            raise MalformedMessage(f"{name} are {out!r:.40}")
        if any(before >= after for before, after in itertools.pairwise(out)):
            raise MalformedMessage(f"{name} are not strictly increasing")
        return out

    def watermarks(self, name: str) -> tuple[Watermarks, ...]:
        return tuple(
            tuple(self.row(name, self.workers, -1) for _ in range(self.colayers))
            for _ in range(self.workers)
        )

    def gei(self, name: str) -> GeiState:
        retired, zeta = self.number(name), self.number(name, least=-1)
        counted, rows, least = self.number(name), dict[int, list[list[int]]](), retired
        for _ in range(self.number(name, end=len(self._numbers))):
            iteration = self.number(name, least, zeta + 1)
            least = iteration + 1
            rows[iteration] = [
                [self._mask(name) for _ in range(self.workers)] for _ in range(self.colayers)
            ]
        return GeiState(retired, zeta, counted, rows)

    def _mask(self, name: str) -> int:
        limbs = self.row(name, -(-self.workers // _LIMB), end=1 << _LIMB)
        mask = sum(limb << _LIMB * place for place, limb in enumerate(limbs))
        if mask >> self.workers:
            raise MalformedMessage(f"{name} has a mask {mask:#x}"[:60])
        return mask


def _encode_entries(entries: Sequence[Contribution]) -> list[int]:
    return [len(entries), *(number for entry in entries for number in entry)]


def _encode_watermarks(watermarks: Iterable[Iterable[Iterable[int]]]) -> list[int]:
    return [number for piece in watermarks for row in piece for number in row]


def _encode_gei(gei: GeiState) -> list[int]:
    out = [gei.retired, gei.zeta, gei.counted, len(gei.rows)]
    for iteration, pieces in sorted(gei.rows.items()):
        out.append(iteration)
        for mask in itertools.chain(*pieces):
            out += [mask >> bit & (1 << _LIMB) - 1 for bit in range(0, len(pieces[0]), _LIMB)]
    return out


def _as_row(number: int) -> tuple[int]:
    return (number,)


_NUMBER = _as_row, _FieldReader.number
_NUMBER_OR_NONE = _as_row, lambda reader, name: reader.number(name, least=-1)
_CODERS: Mapping[str, tuple[Callable[[Any], Iterable[int]], Callable[[_FieldReader, str], Any]]] = {
    "view": (tuple, lambda reader, name: View(reader.row(name, reader.workers))),
    "earliest": (tuple, lambda reader, name: reader.row(name, reader.workers, -1)),
    "first_rounds": (tuple, lambda reader, name: reader.row(name, reader.colayers)),
    "iteration": _NUMBER,
    "zeta": _NUMBER,
    "number": _NUMBER,
    "rounds": _NUMBER,
    "sent_through": _NUMBER_OR_NONE,
    "applied": _NUMBER_OR_NONE,
    "complete": _NUMBER_OR_NONE,
    "finished": (_as_row, lambda reader, name: bool(reader.number(name, end=2))),
    "colayer": (_as_row, lambda reader, name: reader.number(name, end=reader.colayers)),
    "piece": (_as_row, lambda reader, name: reader.number(name, end=reader.workers)),
    "entries": (_encode_entries, _FieldReader.entries),
    "watermarks": (_encode_watermarks, _FieldReader.watermarks),
    "gei": (_encode_gei, _FieldReader.gei),
}
"""How each field is encoded and decoded, in every message."""

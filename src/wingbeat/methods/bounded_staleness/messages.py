"""Views of the membership, messages between workers, and their encoding as frames.

Iterations, rounds, colayers (0 has the last layers), pieces and workers are counted from 0. A frame
is a header, the words of one message, and its payload (gradients, sums or parameters), whose size
the receiver checks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args

from wingbeat.errors import UsageError
from wingbeat.schema import (
    Length,
    MalformedMessage,
    Mask,
    Messages,
    Payload,
    Range,
    WorkerId,
    from_words,
    to_words,
)
from wingbeat.transport.membership import MAX_NUMBER, Number, View, WholeView

NumberOrNone: TypeAlias = Annotated[int, Range(-1, MAX_NUMBER)]
Colayer: TypeAlias = Annotated[int, Range(0, "colayers")]


def piece_owner(view: View, piece: int) -> int:
    """Return the worker that sums a piece: the one with its number, or the next living one."""
    n = len(view)
    return next(w % n for w in range(piece, piece + n) if view[w % n] % 2 == 0)


def is_reassigned(view: View, piece: int) -> bool:
    """Whether the worker of a piece has ever died; its rounds then restart in each view."""
    return view[piece] != 0


# -- messages --------------------------------------------------------------------------------

Contribution: TypeAlias = tuple[Number, WorkerId]
"""Iteration and worker of the gradients of one colayer."""

ByWorker: TypeAlias = Annotated[tuple[NumberOrNone, ...], Length("workers")]

Watermarks: TypeAlias = Annotated[tuple[ByWorker, ...], Length("colayers")]
"""By colayer and worker: the last iteration of which a piece was summed; -1 for none."""

ByPiece: TypeAlias = Annotated[tuple[Watermarks, ...], Length("workers")]


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

    iteration: Number
    sent_through: NumberOrNone
    applied: NumberOrNone
    finished: bool
    zeta: Number
    view: WholeView


@dataclass(frozen=True, slots=True)
class Piece:
    """A worker's gradients of one piece of one colayer, sent to the owner of the piece.

    Attributes:
        iteration: of the gradients.
        colayer: of the gradients.
        piece: of the colayer.
        view: the sender's view.
        payload: the gradients.
    """

    iteration: Number
    colayer: Colayer
    piece: WorkerId
    view: WholeView
    payload: Payload = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PieceSum:
    """The sum of one piece of one colayer in round ``number``, from the owner to all workers.

    Attributes:
        colayer: of the sum.
        piece: of the colayer.
        number: of the round.
        entries: the contributions in the order of addition, none in an empty packet.
        earliest: by worker, the first iteration that later rounds may contain; -1 if it is dead.
        view: the sender's view.
        payload: the sum.
    """

    colayer: Colayer
    piece: WorkerId
    number: Number
    entries: Annotated[tuple[Contribution, ...], Length(increasing=True)]
    earliest: ByWorker
    view: WholeView
    payload: Payload = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ViewProposal:
    """A worker's proposal of a view, with the rounds that the worker has.

    Attributes:
        view: the proposed one.
        complete: rounds of which the worker has all pieces of all colayers; -1 if it is joining.
        watermarks: the contributions in these rounds, by piece.
    """

    view: WholeView
    complete: NumberOrNone
    watermarks: ByPiece


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first rounds that a joining worker receives from the owner of a piece.

    Attributes:
        piece: number of the piece.
        first_rounds: by colayer.
    """

    piece: WorkerId
    first_rounds: Annotated[tuple[Number, ...], Length("colayers")]


@dataclass(frozen=True, slots=True)
class PullRequest:
    """A request for parameters.

    Attributes:
        applied: rounds that they must have.
        view: the sender's view.
    """

    applied: NumberOrNone
    view: WholeView


Rows: TypeAlias = Annotated[
    list[Annotated[list[Annotated[int, Mask("workers")]], Length("workers")]], Length("colayers")
]


@dataclass(frozen=True, slots=True)
class GeiState:
    """What a `Gei` has counted.

    Attributes:
        retired: number of complete rows that were removed.
        zeta: the last row; -1 before the first.
        counted: number of contributions.
        rows: by iteration, colayer and piece, the workers whose pieces were applied.
    """

    retired: Number
    zeta: NumberOrNone
    counted: Number
    rows: dict[Number, Rows]

    def __post_init__(self) -> None:
        """Raise MalformedMessage for a row that is retired or later than the last one."""
        if self.rows and not self.retired <= min(self.rows) <= max(self.rows) <= self.zeta:
            rows = [*self.rows]
            raise MalformedMessage(f"rows is {rows!r:.60}; allowed: {self.retired} to {self.zeta}")


@dataclass(frozen=True, slots=True)
class PullResponse:
    """Parameters of another worker.

    Attributes:
        applied: rounds in the parameters.
        watermarks: their contributions, by piece.
        gei: the state of the gradient exchange index.
        payload: parameters, buffers and optimizer state, see `exchanges.snapshot`.
    """

    applied: NumberOrNone
    watermarks: ByPiece
    gei: GeiState
    payload: Payload = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Drained:
    """A finished worker expects no more rounds.

    Attributes:
        rounds: number of rounds that it has received.
        view: the sender's view.
    """

    rounds: Number
    view: WholeView


Message = (
    Progress | Piece | PieceSum | ViewProposal | Welcome | PullRequest | PullResponse | Drained
)

MESSAGES = Messages(dict(enumerate(get_args(Message))))
"""The kinds are the places in `Message`."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and its receivers; each receiver gets the messages of a sender in order."""

    to: tuple[int, ...]
    message: Message


# -- frames ----------------------------------------------------------------------------------

_HEADER = struct.Struct("<IIQ")
"""Bytes of a word, number of words, bytes of the payload."""

_FORMATS = {4: "I", 8: "Q"}


class FrameHeader(NamedTuple):
    """The first words of a frame.

    Attributes:
        epoch: the sender's, which determines the number of colayers.
        kind: of the message.
        incarnation: the sender's.
    """

    epoch: Number
    kind: Annotated[int, Range(0, len(MESSAGES.records))]
    incarnation: Number


class Frame(NamedTuple):
    """An encoded message."""

    header: bytes
    payload: memoryview


class ReceivedFrame(NamedTuple):
    """A frame with the words for `decode_message`.

    ``payload`` is the whole payload of ``payload_nbytes``, or empty if it follows in later parts.
    """

    words: tuple[int, ...]
    payload_nbytes: int
    payload: memoryview


def encode_frame(message: Message, incarnation: int, epoch: int = 0) -> Frame:
    """Encode a message of a worker."""
    data = getattr(message, "payload", None)
    payload = memoryview(b"" if data is None else data).cast("B")
    words = encode_words(message, incarnation, epoch)
    width = 4 if max(words) < 1 << 32 else 8
    header = _HEADER.pack(width, len(words), len(payload))
    return Frame(header + struct.pack(f"<{len(words)}{_FORMATS[width]}", *words), payload)


def encode_words(message: Message, incarnation: int, epoch: int = 0) -> list[int]:
    """Return the words of a message and its header."""
    header = FrameHeader(epoch, MESSAGES.kind_of(message), incarnation)
    return to_words(header) + to_words(message)


def largest_control_bytes(workers: int, colayers: int, rows: int) -> int:
    """Return the bytes of the largest message without gradients; it is not divided into parts.

    Both a `ViewProposal` and a `PullResponse` have the watermarks of all workers by piece and
    colayer. The latter also has the ``rows`` of the gradient exchange index, each with a mask of
    the workers by piece and colayer; with none, the proposal is the larger one.

    >>> [largest_control_bytes(100, colayers=10, rows=rows) >> 10 for rows in (0, 21)]
    [391, 800]
    """
    watermarks = workers * colayers * workers
    row = 1 + workers * colayers * (1 + -(-workers // 32))
    proposal, response = workers + 1 + watermarks, 1 + watermarks + 4 + rows * row
    return _HEADER.size + 4 * (len(FrameHeader._fields) + max(proposal, response))


def check_workers(workers: int, colayers: int, rows: int, limit: int) -> None:
    """Raise a `UsageError` if a loss or a restart may need a message of more than ``limit`` bytes.

    ``colayers`` and ``rows`` are as for `largest_control_bytes`.
    """
    nbytes, most = largest_control_bytes(workers, colayers, rows), workers
    if nbytes <= limit:
        return
    while largest_control_bytes(most, colayers, rows) > limit:
        most -= 1
    raise UsageError(
        f"Canary with {workers} workers and {colayers} colayers: the loss or restart of a worker "
        f"may need a message of {nbytes} bytes, above the limit of {limit}; allowed are {most} "
        "workers, more with fewer colayers or a smaller s, and any number with s=0"
    )


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
            raise MalformedMessage(f"{count} words of {width} bytes in {len(view)} bytes")
        if nbytes > max_payload:
            raise MalformedMessage(f"payload of {nbytes} bytes; the limit is {max_payload}")
        words = struct.unpack_from(f"<{count}{_FORMATS[width]}", view, _HEADER.size)
        payload, view = view[end : end + nbytes], view[end + nbytes :]
        if 0 < len(payload) < nbytes:
            raise MalformedMessage(f"{len(payload)} bytes of a payload of {nbytes}")
        yield ReceivedFrame(words, nbytes, payload)


def decode_header(words: Sequence[int]) -> FrameHeader:
    """Return the first words of a frame; MalformedMessage if they are invalid."""
    return from_words(FrameHeader, words[: len(FrameHeader._fields)])


def decode_message(
    header: FrameHeader, words: Sequence[int], workers: int, colayers: int, payload: Any
) -> Message:
    """Return the message of a frame with this header; MalformedMessage if it is invalid here."""
    record, rest = MESSAGES.records[header.kind], words[len(header) :]
    message: Message = from_words(record, rest, payload, workers=workers, colayers=colayers)
    return message

"""What workers and the group generator say to each other. Pure.

A message is a kind, four numbers (`ids`) and, of `Kind.RUN`, members and meetings as a payload.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from wingbeat.methods.model_averaging.generator import Run

WRAPS = 1 << 32
"""Numbers of messages are below this."""


class Kind(enum.IntEnum):
    """Kinds of messages: the first four and `FETCH` a worker's, `ALIVE` anybody's, the rest the
    generator's.

    ``ids`` of `RUN`, `DONE` and `LOST` begin with the group's number and epoch.
    """

    ASK = 1
    """A step is over. Whoever was left out takes part again, unless the first number is 1: then it
    is told that it is out, and takes somebody's state before."""
    DONE = 2
    """The group's average is this worker's parameters."""
    LOST = 3
    """The third number is a member that was lost while the group ran."""
    LEVEL = 4
    """An average over all that take part is waited for. It counts as asking."""
    ALIVE = 5
    """It has to arrive, so whoever is dead is found out. The generator's first number is 0, or 1
    more than a worker that lives and that the receiver waits for."""
    RUN = 6
    """Average with the payload's workers; the third number is the initiator, the fourth the
    meeting. What follows the workers are meetings to close before."""
    OUT = 7
    """The first number is a worker that takes no part any more; the second, how often it has asked.

    So it knows whether it has asked again since, which lets it take part again. The third says why,
    a `Why`. The fourth is 1 if others have made a mean of all without the receiver.
    """
    IN = 8
    """The first number is a worker that takes part again."""
    REFUSED = 9
    """What was said was nonsense; the payload says why. Nothing else follows."""
    FETCH = 10
    """Somebody's state is wanted. The first number is 0, or 1 more than a worker that was lost; the
    second is 1 if whoever wants it takes part from now on."""
    STATE = 11
    """The first number is a worker that gives its state to the second; the third is their meeting.

    If both are the same there is nobody who could.
    """


class Why(enum.IntEnum):
    """Why a worker takes no part."""

    LATE = 0
    """Its step, or an average with it, took too long. It lives: a mean over all waits for it."""
    SILENT = 1
    """Nothing came from it for long: its process was stopped, or the network was cut. Its model is
    old, so it takes another's state before it is in a group again."""
    ENDED = 2
    """Its connections have ended without a word: its process has died."""
    LEFT = 3
    """It has left in an orderly way."""


class Malformed(Exception):
    """A message that nobody of this job has sent; says what is wrong with it."""


def why_of(number: int) -> Why:
    """Return the third number of a `Kind.OUT`; `Why.LATE` if it means nothing."""
    return Why(number) if number in Why._value2member_map_ else Why.LATE


class Told(NamedTuple):
    """What a `Kind.RUN` says.

    Attributes:
        run: the group.
        meeting: its number, see `wingbeat.methods.model_averaging.rooms`.
        close: meetings whose connections are not kept any longer.
    """

    run: Run
    meeting: int
    close: tuple[int, ...] = ()


def payload_of(members: Sequence[int], close: Sequence[int] = ()) -> bytes:
    """Return a `Kind.RUN`'s payload: how many members, these, and the meetings to close."""
    return struct.pack(f"<{1 + len(members) + len(close)}I", len(members), *members, *close)


def ids_of(run: Run, meeting: int) -> tuple[int, int, int, int]:
    """Return the numbers of a `Kind.RUN`."""
    return run.number, run.epoch, run.initiator, meeting


def told_of(ids: Sequence[int], payload: bytes | memoryview, workers: int) -> Told:
    """Return what a `Kind.RUN` says.

    Raises:
        Malformed: it is none of so many workers.
    """
    if ids[2] >= workers:
        raise Malformed(f"initiator {ids[2]} is none of {workers} workers")
    if len(payload) % 4 or not 8 <= len(payload) <= _MOST:
        raise Malformed(f"{len(payload)} bytes are no group")
    size, *numbers = struct.unpack(f"<{len(payload) // 4}I", payload)
    members = tuple(numbers[:size])
    if not members or max(members) >= workers or len(set(members)) < size:
        raise Malformed(f"{members[:8]} is no group of {workers} workers")
    return Told(Run(ids[0], ids[1], members, ids[2]), ids[3], tuple(numbers[size:]))


_MOST = 1 << 20
"""Bytes of the largest payload."""

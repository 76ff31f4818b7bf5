"""What workers tell each other; the gradients themselves are the business of whoever carries it.

Indices: iterations, rounds, colayers (0 is the last layers'), pieces and workers count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wingbeat.methods.bounded_staleness.gei import Gei
from wingbeat.methods.bounded_staleness.view import View

Entry = tuple[int, int]
"""Iteration and worker of a contribution: the gradients of one colayer that it has computed."""

Marks = tuple[tuple[int, ...], ...]
"""By colayer and worker: the last iteration of which a piece was counted; -1 for none."""


@dataclass(frozen=True, slots=True)
class Here:
    """Where a worker is, and for which rounds it has nothing (more): the empty packet.

    Attributes:
        at: the iteration that it computes, or wants to.
        said: it has sent all that it has for rounds up to here.
        applied: rounds that are in its parameters; -1 if it has to pull some itself.
        ended: it begins no more iterations until all have ended.
        zeta: the latest iteration it has heard of.
        view: what it knows of the workers.
    """

    at: int
    said: int
    applied: int
    ended: bool
    zeta: int
    view: View


@dataclass(frozen=True, slots=True)
class Piece:
    """A worker's gradients of one piece of one colayer, to the piece's owner.

    Attributes:
        payload: the gradients, however they travel.
    """

    iteration: int
    colayer: int
    piece: int
    view: View
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Round:
    """The sum of what has come of a piece since the round before, from its owner to all.

    Attributes:
        entries: what it is the sum of, in the order of addition; empty for an empty packet.
        first: by worker, the first iteration of which later rounds may have something; -1 if it
            does not live.
        payload: the sum, however it travels.
    """

    colayer: int
    piece: int
    number: int
    entries: tuple[Entry, ...]
    first: tuple[int, ...]
    view: View
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker has, told to all when it learns that somebody came or went.

    Attributes:
        complete: rounds that it has of all pieces of all colayers.
        marks: what these have counted, by piece.
    """

    view: View
    complete: int
    marks: tuple[Marks, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """From which round on somebody new gets a piece, by colayer."""

    piece: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks for parameters with at least so many rounds applied."""

    applied: int
    view: View


@dataclass(frozen=True, slots=True)
class Parameters:
    """The answer to `Pull`.

    Attributes:
        applied: rounds that are in them.
        marks: what these have counted, by piece.
        gei: what they are, by iteration.
        payload: parameters, and the optimizer's state.
    """

    applied: int
    marks: tuple[Marks, ...]
    gei: Gei
    payload: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Settled:
    """A worker that has ended has this many rounds of everything, and expects no more."""

    rounds: int
    view: View


Message = Here | Piece | Round | Report | Welcome | Pull | Parameters | Settled


@dataclass(frozen=True, slots=True)
class Post:
    """Send a message to each of these workers, in order with what was sent to them before."""

    to: tuple[int, ...]
    message: Message

"""Journals: what each worker began, sent, dropped, pulled, applied and drained.

A journal is a JSON Lines file; its first line describes the worker. A worker that is killed leaves
its last line unfinished. `wingbeat_lab.audit` checks the journals of a run against each other.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.observe.log import log

FOLDER = "WINGBEAT_JOURNAL"
"""The environment variable with the name of the folder."""


class Journal:
    """Writes the journal of one incarnation of a worker."""

    def __init__(
        self,
        write: Callable[[str], object] | None,
        rank: int,
        incarnation: int,
        workers: int,
        bound: StalenessBound,
    ) -> None:
        self._write = write
        self._dropped: tuple[int, int] | None = None
        self.enabled = write is not None
        self._line(
            rank=rank, incarnation=incarnation, workers=workers, colayers=bound.colayers,
            s=bound.s, p=bound.p, mode=bound.mode, in_flight=bound.in_flight,
        )  # fmt: skip

    def _line(self, **fields: Any) -> None:
        if self._write is not None:
            self._write(json.dumps(fields, separators=(",", ":")) + "\n")

    def began(self, iteration: int) -> None:
        """Record the start of an iteration."""
        self._line(began=iteration)

    def sent(self, iteration: int, colayer: int) -> None:
        """Record that all pieces of a colayer were sent."""
        self._line(sent=[iteration, colayer])

    def dropped(self, last: tuple[int, int] | None) -> None:
        """Record `Worker.last_dropped` if it is new."""
        if last != self._dropped:  # no iteration is dropped twice
            self._dropped = last
            self._line(dropped=last)

    def changed_colayers(self, bound: StalenessBound, first: int) -> None:
        """Record that colayers change from iteration ``first`` on."""
        self._line(first=first, colayers=bound.colayers, p=bound.p, mode=bound.mode)

    def resumed(self, iteration: int) -> None:
        """Record that training resumes without a drain, and ``iteration`` is not computed."""
        self._line(resumed=iteration)

    def pulled(self, applied: int) -> None:
        """Record that parameters with ``applied`` rounds were loaded."""
        self._line(pulled=applied)

    def applied(self, parts: Sequence[PieceSum]) -> None:
        """Record an applied round."""
        if self.enabled:
            entries = [[part.colayer, part.piece, part.entries] for part in parts if part.entries]
            self._line(round=parts[0].number, entries=entries)

    def drained(self, rounds: int, digest: str | None) -> None:
        """Record that all workers have drained after ``rounds`` rounds."""
        self._line(drained=rounds, digest=digest)


def open_journal(
    name: str,
    rank: int,
    incarnation: int,
    workers: int,
    bound: StalenessBound,
    env: Mapping[str, str] = os.environ,
) -> Journal:
    """Return a journal in its own file below the folder in ``env``, or one that writes nothing.

    A write error is logged once, and training continues without a journal.
    """
    folder, write = env.get(FOLDER, ""), None
    if folder:
        try:
            path = Path(folder) / f"{name}-{rank}.{incarnation}.jsonl"
            write = functools.partial(_write_line, path.open("wb", buffering=0), folder, rank)
        except OSError as error:
            _warn(folder, rank, error)
    return Journal(write, rank, incarnation, workers, bound)


def _write_line(file: FileIO, folder: str, rank: int, line: str) -> None:
    """Write a line unbuffered; close the file at the first error."""
    rest = memoryview(line.encode())
    try:
        while rest and not file.closed:
            # A nearly full disk accepts part of a write and rejects the rest.
            rest = rest[file.write(rest) :]
    except OSError as error:
        _warn(folder, rank, error)
        file.close()


def _warn(folder: str, rank: int, error: OSError) -> None:
    log.warning(
        "%s=%s: %s: cannot write the journal of rank %d; training continues without it",
        FOLDER, folder, error.strerror or error, rank,
    )  # fmt: skip

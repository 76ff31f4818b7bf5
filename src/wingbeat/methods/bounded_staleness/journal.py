"""What one life of a worker has done, line by line, for `audit`. Pure.

Each line is JSON: first who it is, then what it began, sent, dropped, pulled, applied and settled.
Whoever is killed leaves its last line unfinished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from wingbeat.methods.bounded_staleness.messages import Round
from wingbeat.methods.bounded_staleness.pace import Pace


class Journal:
    """Writes the lines.

    Args:
        write: takes a line, with its end.
        rank: whose.
        life: which of its lives.
        workers: how many there may be.
        pace: the thresholds.

    Attributes:
        kept: whether anybody reads it.
    """

    kept = True

    def __init__(
        self, write: Callable[[str], object], rank: int, life: int, workers: int, pace: Pace
    ) -> None:
        self._write, self._dropped = write, 0
        self._line(
            rank=rank, life=life, workers=workers, colayers=pace.colayers, s=pace.s, p=pace.p,
            mode=pace.mode, in_flight=pace.in_flight,
        )  # fmt: skip

    def _line(self, **words: Any) -> None:
        self._write(json.dumps(words, separators=(",", ":")) + "\n")

    def began(self, iteration: int) -> None:
        """Note that an iteration has begun."""
        self._line(began=iteration)

    def sent(self, iteration: int, colayer: int) -> None:
        """Note that all pieces of a colayer were sent."""
        self._line(sent=[iteration, colayer])

    def dropped(self, all_: Sequence[tuple[int, int]]) -> None:
        """Note what is new in `Worker.dropped`."""
        for iteration, colayers in all_[self._dropped :]:
            self._line(dropped=[iteration, colayers])
        self._dropped = len(all_)

    def rebundled(self, pace: Pace, first: int) -> None:
        """Note that there are other colayers from an iteration on."""
        self._line(first=first, colayers=pace.colayers, p=pace.p, mode=pace.mode)

    def went_on(self, iteration: int) -> None:
        """Note that it goes on without having settled, and ``iteration`` was not computed."""
        self._line(went_on=iteration)

    def pulled(self, applied: int) -> None:
        """Note that parameters were taken over which have so many rounds."""
        self._line(pulled=applied)

    def applied(self, parts: Sequence[Round]) -> None:
        """Note a round that was applied."""
        entries = [[part.colayer, part.piece, part.entries] for part in parts if part.entries]
        self._line(round=parts[0].number, entries=entries)

    def settled(self, rounds: int, digest: str | None) -> None:
        """Note that all have settled, and what the replica is then.

        Args:
            rounds: how many it has.
            digest: the same for the same bits; None if there is no replica any more.
        """
        self._line(settled=rounds, digest=digest)


class Unwritten(Journal):
    """One that nobody reads."""

    kept = False

    def __init__(self) -> None:
        self._dropped = 0

    def _line(self, **words: Any) -> None:
        pass

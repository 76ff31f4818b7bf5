"""How far workers may be apart: staleness s and proportion p (Canary, section 5.3).

The paper's Pseudocode 1 takes p for a mask (lines 11 and 22) and its prose for a count; here p is
a count of colayers, because a mask would make it matter which colayers were exchanged, and
backward exchanges them in one order anyway.

The paper bounds with s both how slow another worker may be and how late gradients are. Where links
are slower than computation these are two things: nobody is slow, and still all of s would be used
up by what waits to be sent. So a bound of its own (``in_flight``) says how many rounds a worker may
be ahead of the sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from wingbeat.errors import UsageError

IN_FLIGHT = 2
"""Rounds that a worker is ahead of the sums at most, where somebody is slow: these answer for a
round when the fastest wants to be two iterations ahead, and meanwhile it computes one more."""

EVEN_ROUNDS = 8
"""Rounds in a row that have all workers' gradients, after which nobody counts as slow; and every
so many iterations one finds out whether somebody is."""


KEPT_ROUNDS = 32
"""Rounds that may wait at a worker where staleness has no bound."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The thresholds, and what follows from them.

    - ``s=0, p=colayers``: BSP. Each iteration begins with the gradients of all before.
    - ``s>0, p=colayers``: SSP. Who would leave a worker more than ``s`` behind waits for it.
    - ``p<colayers``: Canary. Such a worker drops its iteration and goes on from the fastest's,
      unless it has already exchanged ``p`` colayers; then the others wait for the rest.
    - ``s=None``: ASP. Nobody waits for another worker's iteration, and nothing is dropped.

    Attributes:
        s: iterations that a worker may be behind the fastest; None for any number.
        p: colayers that a worker must have exchanged not to be out of date, 1 to ``colayers``.
        colayers: colayers of the model, k in the paper.
        in_flight: rounds that need not have been applied when an iteration begins, where somebody
            is slow; one where nobody is (`Even`). None for as many as ``s``, whoever is slow.
    """

    s: int | None
    p: int
    colayers: int
    in_flight: int | None = IN_FLIGHT

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UsageError: one is not allowed; names it.
        """
        if self.colayers < 1:
            raise UsageError(f"colayers={self.colayers}; allowed: 1 or more")
        if self.s is not None and self.s < 0:
            raise UsageError(f"s={self.s}; allowed: 0 or more iterations, or None for no bound")
        if not 1 <= self.p <= self.colayers:
            raise UsageError(
                f"p={self.p} of {self.colayers} colayers; allowed: 1 to {self.colayers}"
            )
        if self.in_flight is not None and self.in_flight < 1:
            raise UsageError(
                f"in_flight={self.in_flight}; allowed: 1 or more rounds, or None for as many as s"
            )

    @property
    def mode(self) -> str:
        """``"BSP"``, ``"SSP"``, ``"ASP"`` or, where iterations may be dropped, ``"PGE"``."""
        if self.s is None:
            return "ASP"
        if self.p < self.colayers:
            return "PGE"
        return "SSP" if self.s else "BSP"

    @property
    def keep(self) -> int:
        """How many rounds may wait to be applied: all that come for a worker within the bound.

        An iteration begins with all but ``in_flight`` of the rounds before it, and while it is
        computed the others are up to ``s`` ahead. Whoever has more waiting is beyond the bound.
        """
        if self.s is None:
            return KEPT_ROUNDS
        assert self.ahead is not None
        return self.s + 1 + self.ahead

    @property
    def ahead(self) -> int | None:
        """Rounds that need not have been applied where somebody is slow; None for any number."""
        bounds = [bound for bound in (self.s, self.in_flight) if bound is not None]
        return min(bounds, default=None)

    def fresh(self, staleness: int) -> bool:
        """Whether a worker so many iterations behind is within the bound (line 19)."""
        return self.s is None or staleness <= self.s

    def outdated(self, staleness: int, exchanged: int) -> bool:
        """Whether the rest of an iteration is to be dropped (lines 19 and 22).

        Args:
            staleness: iterations between this one and the fastest worker's.
            exchanged: colayers of it that have been sent.
        """
        return self.mode == "PGE" and not self.fresh(staleness) and exchanged < self.p

    def reached(self, iteration: int, zeta: int) -> int:
        """Return the last iteration that anybody computes while a worker is in ``iteration``.

        The fastest may already want more, but waits.
        """
        return zeta if self.s is None else min(zeta, iteration + self.s)

    def first_needed(self, iteration: int, *, even: bool) -> int:
        """Return how many rounds must have been applied before ``iteration`` is computed.

        Args:
            iteration: which.
            even: whether nobody is slow. Then what is not there yet waits for links alone, and who
                sends more does not have it sooner: while one round is under way the next is
                computed, and that is all that can be hidden. Now and then one goes ahead all the
                same: else whoever just comes in time would be waited for and never count as slow.
        """
        ahead = self.ahead
        if ahead is None:
            return 0
        if even and self.in_flight is not None and iteration % EVEN_ROUNDS:
            ahead = min(ahead, 1)
        return max(iteration - ahead, 0)


class Even:
    """Whether rounds have the gradients of all workers, each of its own iteration.

    Who waits for its links alone answers for its own iteration, however late; who is slow says
    that it has nothing yet. So a round tells one from the other, when it is applied.

    >>> even = Even()
    >>> even.applied([[(0, 0), (0, 1)]], 0, workers=[0, 1])
    >>> even.now
    True
    >>> even.applied([[(1, 0)]], 1, workers=[0, 1])
    >>> even.now
    False
    """

    def __init__(self) -> None:
        self._since = EVEN_ROUNDS

    @property
    def now(self) -> bool:
        """Whether nobody has been slow for some rounds."""
        return self._since >= EVEN_ROUNDS

    def applied(
        self,
        parts: Iterable[Iterable[tuple[int, int]]],
        number: int,
        workers: Collection[int],
    ) -> None:
        """Look at a round; one that has nothing, as after the last iteration, says nothing.

        Args:
            parts: of each piece of each colayer: its contributions, by iteration and worker.
            number: of the round.
            workers: those that train.
        """
        for entries in parts:
            there = {worker for iteration, worker in entries if iteration == number}
            if there and not there.issuperset(workers):
                self._since = 0
                return
        self._since += 1

"""The staleness bound: staleness s and proportion p (Canary, section 5.3).

The paper's Pseudocode 1 uses p as a mask (lines 11 and 22), its prose as a count. Here p is a count
of colayers, because backward exchanges colayers in a fixed order.

The paper uses s to bound both how slow a worker may be and how late gradients may be applied. On
links slower than computation no worker is slow, but gradients waiting to be sent would use up all
of s. ``in_flight`` therefore bounds how many rounds a worker may be ahead of the applied sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from wingbeat.errors import UsageError

IN_FLIGHT = 2
"""Default of ``in_flight``: a slow worker answers for a round when the fastest is about to be two
iterations ahead, and computes one more meanwhile."""

STRAGGLER_WINDOW = 8
"""Complete rounds in a row after which no worker counts as slow, and iterations between probes."""

MAX_BUFFERED_UNBOUNDED = 32
"""Rounds that a worker buffers when staleness is unbounded."""


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The thresholds of bounded staleness, and the rules derived from them.

    - ``s=0, p=colayers``: BSP. Each iteration starts with the gradients of all earlier ones.
    - ``s>0, p=colayers``: SSP. A worker waits if another would be more than ``s`` behind.
    - ``p<colayers``: Canary. A worker more than ``s`` behind drops its iteration and continues from
      the fastest worker's, unless it has exchanged ``p`` colayers; then the others wait for it.
    - ``s=None``: ASP. No worker waits for another worker's iteration, and nothing is dropped.

    ``s`` counts iterations behind the fastest worker, ``p`` (1 to ``colayers``) exchanged colayers;
    ``colayers`` is k in the paper. ``in_flight`` rounds need not be applied when an iteration
    starts while a worker is slow, one if none is slow; None for ``s`` in either case. Values out of
    range raise UsageError.
    """

    s: int | None
    p: int
    colayers: int
    in_flight: int | None = IN_FLIGHT

    def __post_init__(self) -> None:
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
        """``"BSP"``, ``"SSP"``, ``"ASP"`` or, if iterations may be dropped, ``"PGE"``."""
        if self.s is None:
            return "ASP"
        if self.p < self.colayers:
            return "PGE"
        return "SSP" if self.s else "BSP"

    @property
    def max_buffered(self) -> int:
        """Maximum number of rounds that a worker buffers, enough for a worker within the bound."""
        if self.s is None or self.max_ahead is None:
            return MAX_BUFFERED_UNBOUNDED
        # All but `in_flight` of the earlier rounds are applied when an iteration starts, and the
        # others get up to `s` iterations ahead while it is computed.
        return self.s + 1 + self.max_ahead

    @property
    def max_ahead(self) -> int | None:
        """Maximum rounds that are not yet applied while a worker is slow; None for no maximum."""
        bounds = [bound for bound in (self.s, self.in_flight) if bound is not None]
        return min(bounds, default=None)

    def is_outdated(self, staleness: int, exchanged: int) -> bool:
        """Whether an iteration this far behind the fastest, of which this many colayers were sent,
        is dropped (Pseudocode 1, lines 19 and 22).
        """
        if self.s is None or self.p == self.colayers:
            return False
        return staleness > self.s and exchanged < self.p

    def last_computed(self, iteration: int, zeta: int) -> int:
        """Return the last iteration that any worker can compute while one is in ``iteration`` and
        the fastest is, or waits, in ``zeta``.
        """
        return zeta if self.s is None else min(zeta, iteration + self.s)

    def rounds_required(self, iteration: int, *, stragglers: bool) -> int:
        """Return how many rounds must be applied before ``iteration`` is computed."""
        ahead = self.max_ahead
        if ahead is None:
            return 0
        # Without slow workers missing rounds wait for links only, and more than one round in flight
        # hides nothing more. Probing iterations start anyway: otherwise a worker that is just in
        # time would never be found slow.
        if not stragglers and self.in_flight is not None and iteration % STRAGGLER_WINDOW:
            ahead = min(ahead, 1)
        return max(iteration - ahead, 0)


class StragglerDetector:
    """Detects slow workers by the contributions in applied rounds.

    A worker that waits for links still contributes to the round of its own iteration. A slow worker
    reports that it has nothing yet, so the round lacks its contribution.

    >>> detector = StragglerDetector()
    >>> detector.observe_round([[(0, 0), (0, 1)]], 0, workers=[0, 1])
    >>> detector.found
    False
    >>> detector.observe_round([[(1, 0)]], 1, workers=[0, 1])
    >>> detector.found
    True
    """

    def __init__(self) -> None:
        self._even_rounds = STRAGGLER_WINDOW

    @property
    def found(self) -> bool:
        """Whether a worker was slow in the last rounds."""
        return self._even_rounds < STRAGGLER_WINDOW

    def observe_round(
        self, parts: Iterable[Iterable[tuple[int, int]]], number: int, workers: Collection[int]
    ) -> None:
        """Record an applied round; an empty one, as after the last iteration, is complete."""
        for entries in parts:
            present = {worker for iteration, worker in entries if iteration == number}
            if present and not present.issuperset(workers):
                self._even_rounds = 0
                return
        self._even_rounds += 1

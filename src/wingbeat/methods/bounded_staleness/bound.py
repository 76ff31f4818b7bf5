"""The staleness bound: staleness s and proportion p (Canary, section 5.3).

The paper's Pseudocode 1 uses p as a mask (lines 11 and 22), its prose as a count. Here p is a count
of colayers: with a mask it would matter which colayers were exchanged, and backward exchanges them
in a fixed order.

The paper bounds with s both how slow a worker may be and how late gradients may be applied. When
links are slower than computation, no worker is slow, and gradients that wait to be sent would still
use up all of s. ``in_flight`` therefore bounds how many rounds a worker may be ahead of the sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from wingbeat.errors import UsageError

IN_FLIGHT = 2
"""Rounds that a worker is ahead of the sums at most when another one is slow: a slow worker answers
for a round when the fastest wants to be two iterations ahead, and computes one more meanwhile."""

STRAGGLER_WINDOW = 8
"""Consecutive rounds with the gradients of all workers after which no worker counts as slow. One
iteration in as many probes whether a worker is slow."""

MAX_BUFFERED_UNBOUNDED = 32
"""Rounds that a worker buffers when staleness is unbounded."""


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The thresholds, and the rules that follow from them.

    - ``s=0, p=colayers``: BSP. Each iteration starts with the gradients of all earlier ones.
    - ``s>0, p=colayers``: SSP. A worker waits if another would be more than ``s`` behind.
    - ``p<colayers``: Canary. A worker that is more than ``s`` behind drops its iteration and
      continues from the fastest worker's, unless it has exchanged ``p`` colayers; the others then
      wait for the rest.
    - ``s=None``: ASP. No worker waits for another worker's iteration, and nothing is dropped.

    Attributes:
        s: iterations that a worker may be behind the fastest; None for no bound.
        p: colayers that a worker must have exchanged to keep its iteration, 1 to ``colayers``.
        colayers: colayers of the model, k in the paper.
        in_flight: rounds that need not be applied when an iteration starts and a worker is slow;
            one when no worker is. None for ``s``, whoever is slow.

    Raises:
        UsageError: a value is out of range.
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
        """Rounds that a worker buffers: all that a worker within the bound can receive.

        An iteration starts with all but ``in_flight`` of the earlier rounds applied, and the others
        get up to ``s`` iterations ahead while it is computed.
        """
        if self.s is None:
            return MAX_BUFFERED_UNBOUNDED
        assert self.max_ahead is not None
        return self.s + 1 + self.max_ahead

    @property
    def max_ahead(self) -> int | None:
        """Rounds that need not be applied when a worker is slow; None for any number."""
        bounds = [bound for bound in (self.s, self.in_flight) if bound is not None]
        return min(bounds, default=None)

    def is_outdated(self, staleness: int, exchanged: int) -> bool:
        """Whether the rest of an iteration is dropped (lines 19 and 22).

        Args:
            staleness: iterations between this one and the fastest worker's.
            exchanged: colayers of it that have been sent.
        """
        return (
            self.mode == "PGE" and self.s is not None and staleness > self.s and exchanged < self.p
        )

    def last_computed(self, iteration: int, zeta: int) -> int:
        """Return the last iteration that any worker computes while one is in ``iteration``.

        The fastest worker may be in ``zeta``, and wait there.
        """
        return zeta if self.s is None else min(zeta, iteration + self.s)

    def rounds_required(self, iteration: int, *, stragglers: bool) -> int:
        """Return how many rounds must be applied before ``iteration`` is computed.

        Args:
            iteration: the iteration.
            stragglers: whether a worker is slow. If none is, missing rounds wait for links only, so
                more rounds in flight than one hide nothing more. A probing iteration goes ahead all
                the same: a worker that is just in time would never be found slow otherwise.
        """
        ahead = self.max_ahead
        if ahead is None:
            return 0
        if not stragglers and self.in_flight is not None and iteration % STRAGGLER_WINDOW:
            ahead = min(ahead, 1)
        return max(iteration - ahead, 0)


class StragglerDetector:
    """Detects slow workers by the contributions in applied rounds.

    A worker that waits for links answers for its own iteration, however late. A slow worker answers
    that it has nothing yet, so a round lacks its contribution.

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
        self,
        parts: Iterable[Iterable[tuple[int, int]]],
        number: int,
        workers: Collection[int],
    ) -> None:
        """Observe an applied round. An empty one, as after the last iteration, counts as even.

        Args:
            parts: the contributions, by iteration and worker, of each piece of each colayer.
            number: of the round.
            workers: the workers that train.
        """
        for entries in parts:
            present = {worker for iteration, worker in entries if iteration == number}
            if present and not present.issuperset(workers):
                self._even_rounds = 0
                return
        self._even_rounds += 1

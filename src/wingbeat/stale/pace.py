"""How far workers may be apart: staleness s and proportion p (Canary, section 5.3).

The paper's Pseudocode 1 takes p for a mask (lines 11 and 22) and its prose for a count; here p is
a count of colayers, because a mask would make it matter which colayers were exchanged, and
backward exchanges them in one order anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.errors import UsageError


@dataclass(frozen=True, slots=True)
class Pace:
    """The thresholds, and what follows from them.

    - ``s=0, p=colayers``: BSP. Each iteration begins with the gradients of all before.
    - ``s>0, p=colayers``: SSP. Who would leave a worker more than ``s`` behind waits for it.
    - ``p<colayers``: Canary. Such a worker drops its iteration and goes on from the fastest's,
      unless it has already exchanged ``p`` colayers; then the others wait for the rest.
    - ``s=None``: ASP. Nobody waits, and nothing is dropped.

    Attributes:
        s: iterations that a worker may be behind the fastest; None for any number.
        p: colayers that a worker must have exchanged not to be out of date, 1 to ``colayers``.
        colayers: colayers of the model, k in the paper.
    """

    s: int | None
    p: int
    colayers: int

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

    @property
    def mode(self) -> str:
        """``"BSP"``, ``"SSP"``, ``"ASP"`` or, where iterations may be dropped, ``"PGE"``."""
        if self.s is None:
            return "ASP"
        if self.p < self.colayers:
            return "PGE"
        return "SSP" if self.s else "BSP"

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

    def first_needed(self, iteration: int) -> int:
        """Return how many rounds must have been applied before ``iteration`` is computed."""
        return 0 if self.s is None else max(iteration - self.s, 0)

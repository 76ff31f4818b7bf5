"""How workers agree on who takes part, and on what they all have when somebody comes or goes.

Each worker tells all others the largest view that it knows, and what it has. Whoever hears of a
larger one merges it and tells again. A view holds once everyone in it has told exactly that one: so
all have stopped to take in what the dead had begun, and all compute the same from the same reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.methods.bounded_staleness.messages import Report
from wingbeat.methods.bounded_staleness.view import View, members, merge, nobody


@dataclass(frozen=True, slots=True)
class Agreed:
    """A view, and what those who are in it had.

    Attributes:
        view: who takes part from now on.
        best: the report of the one who had the most complete rounds; of several the first.
    """

    view: View
    best: Report


class Agreement:
    """One worker's part in it.

    Args:
        view: the view that a job begins with, or what is known to a worker that comes back.
        new: whether it comes back: then no view holds yet.

    Attributes:
        view: the view that holds.
        proposed: what this worker has told; the same if nothing is under way.
    """

    def __init__(self, view: View, *, new: bool = False) -> None:
        self.proposed = view
        self.view = nobody(len(view)) if new else view
        self._reports: dict[int, Report] = {}

    @property
    def frozen(self) -> bool:
        """Whether a view is being agreed on."""
        return self.proposed != self.view

    def propose(self, view: View) -> bool:
        """Merge what is known; return whether that is more than what was told."""
        view = merge(self.proposed, view)
        if view == self.proposed:
            return False
        self.proposed = view
        self._reports = {}
        return True

    def hear(self, worker: int, report: Report) -> None:
        """Keep a worker's report on what this one proposes as well; others come again."""
        if report.view == self.proposed:
            self._reports[worker] = report

    def conclude(self) -> Agreed | None:
        """Return what is agreed on now, and let it hold; None if reports are missing."""
        if not self.frozen or any(w not in self._reports for w in members(self.proposed)):
            return None
        self.view = self.proposed
        _, best = min(self._reports.items(), key=lambda item: (-item[1].complete, item[0]))
        return Agreed(self.view, best)

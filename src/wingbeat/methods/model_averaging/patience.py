"""How long workers may compute until others wait for them no more. Pure: time is passed in."""

from __future__ import annotations

FACTOR = 8.0
"""How many times its usual step a worker may take."""

LEAST_S = 2.0
"""Seconds that any step may take."""

_KEPT = 0.9
"""How much of its longest step counts one step later."""


class Patience:
    """Deadlines that follow the step times of each worker.

    Args:
        workers: how many there are.
        first_s: seconds that a step may take until its worker's usual one is known: its first.
        factor: how many times the usual one it may take later.
        least_s: seconds that it may take in any case.

    Attributes:
        first_s: as above.
    """

    def __init__(
        self, workers: int, first_s: float, factor: float = FACTOR, least_s: float = LEAST_S
    ) -> None:
        self.first_s, self._factor, self._least_s = first_s, factor, least_s
        self._usual_s = [0.0] * workers
        self._since: list[float | None] = [None] * workers
        self._paused: set[int] = set()
        self._steps = [0] * workers

    def freed(self, worker: int, now: float) -> None:
        """Note that ``worker`` goes on computing."""
        self._since[worker] = now

    def pauses(self, worker: int, now: float) -> None:
        """Note that ``worker`` goes on after all were one: it may evaluate and save first.

        Its next step may take as long as a first one, and says nothing of those that follow.
        """
        self._since[worker] = now
        self._paused.add(worker)

    def waits(self, worker: int) -> None:
        """Note that ``worker`` waits for others."""
        self._since[worker] = None

    def owes(self, worker: int, now: float) -> None:
        """Note that others of its group are done, and ``worker`` is about to be."""
        if self._since[worker] is None:
            self._since[worker] = now

    def asked(self, worker: int, now: float) -> None:
        """Note that ``worker`` has ended a step."""
        since, self._since[worker] = self._since[worker], None
        if worker in self._paused:
            self._paused.discard(worker)
        elif since is not None:
            self._steps[worker] += 1
            # The first step, which warms up, counts only until there is another.
            kept = _KEPT if self._steps[worker] > 2 else 0.0
            self._usual_s[worker] = max(now - since, kept * self._usual_s[worker])

    def gone(self, worker: int) -> None:
        """Forget its steps: those of its next life may differ."""
        self._usual_s[worker], self._since[worker], self._steps[worker] = 0.0, None, 0
        self._paused.discard(worker)

    def deadline_s(self, worker: int) -> float:
        """Return how many seconds its step may take."""
        usual_s = 0.0 if worker in self._paused else self._usual_s[worker]
        return max(self._least_s, self._factor * usual_s) if usual_s else self.first_s

    def unusual(self, worker: int, now: float) -> bool:
        """Whether its step takes twice as long as usual: time to see whether it lives."""
        since = self._since[worker]
        return since is not None and now - since > 2 * self._usual_s[worker]

    def overdue(self, worker: int, now: float) -> bool:
        """Whether its step takes longer than it may."""
        since = self._since[worker]
        return since is not None and now - since > self.deadline_s(worker)

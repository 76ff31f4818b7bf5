"""What a simulated run under bounded staleness did: who was how far behind, what was applied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.simulator.agenda import Agenda


@dataclass(frozen=True, slots=True)
class StaleRun:
    """A run until all replicas have as many contributions as were asked for.

    A contribution is what one worker has computed in one iteration; one of which only some
    colayers were sent counts for these.

    Attributes:
        seconds: until the last replica had them.
        iterations: by worker, how many it has begun.
        dropped: by worker, iterations that the rule has ended before all colayers were sent.
        lost: contributions that these have not sent.
        rounds: that worker 0 has applied: steps of its optimizer.
        waited_s: by worker, how long its training has waited for others.
        lags: by iterations that the fastest, as far as is known, is ahead when a worker ends one,
            how many were ended that were not dropped.
        delays: by steps that the parameters were ahead of those a contribution was computed on,
            when worker 0 applied it, how many contributions. 0 in BSP.
        begun: by worker, of each iteration that it has begun: when, and how many iterations' worth
            of all workers' contributions it had applied by then.
    """

    seconds: float
    iterations: tuple[int, ...]
    dropped: tuple[int, ...]
    lost: float
    rounds: int
    waited_s: tuple[float, ...]
    lags: Mapping[int, int]
    delays: Mapping[int, float]
    begun: tuple[tuple[tuple[float, float], ...], ...] = ()


class Log:
    """What workers tell while they train.

    Args:
        agenda: is stopped when all have what was asked for.
        colayers: k.
        target: contributions.
    """

    def __init__(self, agenda: Agenda, workers: int, colayers: int, target: float) -> None:
        self._agenda, self._colayers, self._target = agenda, colayers, target
        self.iterations = [0] * workers
        self.rounds = [0] * workers
        self.waited_s = [0.0] * workers
        self._applied = [0] * workers  # entries: a piece of a colayer of a contribution
        self._reached = [False] * workers
        self._lags: Counter[int] = Counter()
        self._delays: Counter[int] = Counter()
        self._begun: dict[tuple[int, int], int] = {}
        self._moments: list[list[tuple[float, int]]] = [[] for _ in range(workers)]
        self._pieces = 1

    @property
    def whole(self) -> bool:
        """Whether all replicas have what was asked for."""
        return all(self._reached)

    def began(self, worker: int, iteration: int) -> None:
        """Note that a worker begins an iteration."""
        self.iterations[worker] += 1
        self._begun[iteration, worker] = self.rounds[worker]
        self._moments[worker].append((self._agenda.now, self._applied[worker]))

    def ended(self, lag: int) -> None:
        """Note that a worker ends an iteration so many behind the fastest."""
        self._lags[lag] += 1

    def applied(self, worker: int, parts: Sequence[PieceSum]) -> None:
        """Note that a worker has applied a round."""
        self._pieces = len(parts) // self._colayers
        self._applied[worker] += sum(len(part.entries) for part in parts)
        if worker == 0:
            number = self.rounds[0]
            for part in parts:
                for entry in part.entries:
                    self._delays[number - self._begun[entry]] += 1
        self.rounds[worker] += 1
        unit = self._colayers * self._pieces
        if not self._reached[worker] and self._applied[worker] >= self._target * unit:
            self._reached[worker] = True
            if self.whole:
                self._agenda.stop()

    def run(self, dropped: Sequence[Sequence[tuple[int, int]]]) -> StaleRun:
        """Return what has been.

        Args:
            dropped: by worker, iterations, and how many colayers of each were sent.
        """
        k = self._colayers
        unit = k * self._pieces
        return StaleRun(
            self._agenda.now,
            tuple(self.iterations),
            tuple(map(len, dropped)),
            sum(k - sent for each in dropped for _, sent in each) / k,
            self.rounds[0],
            tuple(self.waited_s),
            dict(sorted(self._lags.items())),
            {delay: count / unit for delay, count in sorted(self._delays.items())},
            tuple(
                tuple((when, applied / unit / len(self.rounds)) for when, applied in each)
                for each in self._moments
            ),
        )

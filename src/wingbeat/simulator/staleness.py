"""The result of a simulated run under bounded staleness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wingbeat.methods.bounded_staleness.messages import PieceSum
from wingbeat.simulator.agenda import Agenda


@dataclass(frozen=True, slots=True)
class StaleRun:
    """A run until all replicas have applied the requested number of contributions.

    A contribution is the gradients of one worker in one iteration; if only some colayers were sent,
    it counts for these.

    Attributes:
        seconds: until the last replica had applied them.
        iterations: by worker, iterations begun.
        dropped: by worker, iterations that ended by the rule before all colayers were sent.
        lost: contributions that these have not sent.
        rounds: rounds applied by worker 0: steps of its optimizer.
        waited_s: by worker, seconds for which its training waited for others.
        lags: histogram of the iterations by which the fastest known worker is ahead at the end of
            an iteration that was not dropped.
        delays: histogram of staleness in steps: of contributions that worker 0 applied, the steps
            by which its parameters were ahead of those used to compute them. 0 in BSP.
        begun: by worker and begun iteration, its time, and the contributions applied by then, in
            iterations of all workers.
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
    """Records the progress of workers, and stops the agenda at ``target`` contributions."""

    def __init__(self, agenda: Agenda, workers: int, colayers: int, target: float) -> None:
        self._agenda, self._colayers, self._target = agenda, colayers, target
        self.iterations = [0] * workers
        self.rounds = [0] * workers
        self.waited_s = [0.0] * workers
        self._applied = [0] * workers  # in entries: a piece of a colayer of a contribution
        self._reached = [False] * workers
        self._lags: Counter[int] = Counter()
        self._delays: Counter[int] = Counter()
        self._begun: dict[tuple[int, int], int] = {}
        self._moments: list[list[tuple[float, int]]] = [[] for _ in range(workers)]
        self._pieces = 1

    @property
    def whole(self) -> bool:
        """Whether all replicas have applied the requested contributions."""
        return all(self._reached)

    def began(self, worker: int, iteration: int) -> None:
        """Record the begin of an iteration."""
        self.iterations[worker] += 1
        self._begun[iteration, worker] = self.rounds[worker]
        self._moments[worker].append((self._agenda.now, self._applied[worker]))

    def ended(self, lag: int) -> None:
        """Record the end of an iteration, ``lag`` iterations behind the fastest."""
        self._lags[lag] += 1

    def applied(self, worker: int, parts: Sequence[PieceSum]) -> None:
        """Record an applied round."""
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
        """Return the result; ``dropped`` has iterations and their colayers sent, by worker."""
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

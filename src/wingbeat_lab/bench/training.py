"""One row as it trains inside a worker: its iterations, slowed where that is asked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wingbeat.planning.control import Decisions
from wingbeat_lab.bench import attach, models, slow
from wingbeat_lab.bench.attached import Attached
from wingbeat_lab.bench.config import Checked
from wingbeat_lab.bench.models import Built
from wingbeat_lab.bench.steps import SharedSteps

_ROUNDING = 1e-6


@dataclass
class Training:
    """A freshly built model that trains as its row says.

    Attributes:
        checked: the bench.
        rank: this worker.
        normal_s: seconds that a normal iteration takes, of which a slow worker sleeps several.
        built: the model and its data.
        made: the same, attached to the row's strategy.
        steps: of all workers, where they average models and none waits for all; None otherwise.
        curve: seconds and loss of each iteration so far.
    """

    checked: Checked
    rank: int
    normal_s: float
    built: Built
    made: Attached
    steps: SharedSteps | None = None
    curve: list[tuple[float, float]] = field(default_factory=list)

    def iterate(self, number: int) -> None:
        """Make one iteration, the sleep of a slow worker before it.

        Args:
            number: of the iteration; timed ones count from 1 over all rounds, those before a
                row's timed ones from 0 downwards.
        """
        begin = time.monotonic()
        self.pause(number)
        loss = attach.step(self.made, self.built.loss)
        end = time.monotonic()
        self.curve.append((end - begin, loss))
        if self.steps is not None:
            self.steps.add(end)

    def done(self) -> float:
        """Return how many iterations there have been: those whose gradients were applied.

        Where workers average models, an iteration is as many steps as there are workers.
        """
        if self.steps is not None:
            return self.steps.total() / self.checked.workers
        applied = self.made.applied
        return len(self.curve) if applied is None else applied()

    def iterations(self, first: int, count: int, since: float | None = None) -> Iterator[int]:
        """Make iterations; yield their numbers, from 0, as each is done.

        Where workers are not in lockstep, one is done when as many gradients have been applied as
        all workers make in one, whoever made them: a worker makes as many of its own as that takes.
        The same holds for steps where models are averaged.

        Args:
            first: number of the first, as for `iterate`.
            count: how many are to be done.
            since: how many were done before, if not those that are done now. Who is late finds
                that others have begun.
        """
        before, own, found = self.done() if since is None else since, 0, 0
        while found < count:
            self.iterate(first + own)
            own += 1
            while found < count and self.done() - before > found + 1 - _ROUNDING:
                yield found
                found += 1

    def pause(self, number: int) -> None:
        """Sleep as a slow worker does before this iteration; mostly not at all."""
        factor = slow.factor(
            self.checked.slow,
            rank=self.rank,
            iteration=number,
            workers=self.checked.workers,
            seed=self.checked.config.seed,
        )
        if factor:
            time.sleep(factor * self.normal_s)


@contextlib.contextmanager
def training(
    checked: Checked,
    row: int,
    rank: int,
    normal_s: float,
    known: Decisions | None,
    *,
    recorded: bool = False,
    counted: Path | None = None,
) -> Iterator[Training]:
    """Build a row's model for the length of a ``with`` block; the same weights each time.

    Args:
        checked: the bench.
        row: index into its rows.
        rank: this worker.
        normal_s: seconds of a normal iteration.
        known: what the row has found out before, to be kept.
        recorded: as for `attach.attach`.
        counted: the file in which workers count their steps; None where they are in lockstep.
    """
    config = checked.config
    built = models.build(checked.model, rank=rank, workers=checked.workers, seed=config.seed)
    maker = attach.optimizer_maker(config.optimizer, paced=checked.model.profile is not None)
    with attach.attached(checked.rows[row], built.model, maker, recorded=recorded) as made:
        if known is not None:
            made.keep(known)
        steps = None if counted is None else SharedSteps(counted, rank, checked.workers)
        try:
            yield Training(checked, rank, normal_s, built, made, steps)
        finally:
            if steps is not None:
                steps.close()

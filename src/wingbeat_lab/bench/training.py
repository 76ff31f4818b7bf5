"""The training of one row inside a worker: its iterations, with optional slowness."""

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
    """A newly built model that trains by its row.

    Attributes:
        normal_s: seconds of a normal iteration, the unit of a slow worker's sleeps.
        made: the same, attached to the row's strategy.
        steps: of all workers, if they average models without lockstep; None otherwise.
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
        """Run one iteration, after the sleep of a slow worker.

        Timed iterations count from 1 over all rounds, those before them from 0 downwards.
        """
        begin = time.monotonic()
        self.pause(number)
        loss = attach.step(self.made, self.built.loss)
        end = time.monotonic()
        self.curve.append((end - begin, loss))
        if self.steps is not None:
            self.steps.add(end)

    def done(self) -> float:
        """Return the number of iterations whose gradients were applied.

        Where workers average models, an iteration is as many steps as there are workers.
        """
        if self.steps is not None:
            return self.steps.total() / self.checked.workers
        applied = self.made.applied
        return len(self.curve) if applied is None else applied()

    def iterations(self, first: int, count: int, since: float | None = None) -> Iterator[int]:
        """Run iterations; yield their numbers, from 0, as each completes.

        Where workers are not in lockstep, an iteration completes when as many gradients of any
        worker have been applied as all workers produce in one; this worker runs as many of its own
        as that takes. The same holds for steps where models are averaged.

        ``first`` is as for `iterate`. ``since`` is the number completed before, by default the
        current one; for a late worker it is lower, because the others have begun.
        """
        before, own, found = self.done() if since is None else since, 0, 0
        while found < count:
            self.iterate(first + own)
            own += 1
            while found < count and self.done() - before > found + 1 - _ROUNDING:
                yield found
                found += 1

    def pause(self, number: int) -> None:
        """Sleep before this iteration if this worker is slow in it."""
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
    """Build a row's model for a ``with`` block; the same weights each time.

    ``known`` are earlier decisions of the row, to be applied. ``counted`` is the file in which
    workers count their steps; None where they are in lockstep.
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

"""From the workers' stamps to the figures: pure arithmetic, and the JSON that holds them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wingbeat.bench import bound
from wingbeat.bench.config import Checked
from wingbeat.bench.contenders import Contender
from wingbeat.bench.links import reduce_seconds_per_byte
from wingbeat.bench.speedup import Measured
from wingbeat.observe.breakdown import Parts


@dataclass(frozen=True, slots=True)
class Block:
    """What one row did in one round.

    Attributes:
        row: index into the rows.
        starts: for each worker, when each timed iteration began and, last, when the one after
            them began; seconds of the machine's monotonic clock, one for all workers.
        sent_bytes: for each worker, what its host's interfaces sent in each iteration, over the
            timed ones and the last warm-up, with nothing under way before and after.
        loss: of the last timed iteration, mean over workers.
        accuracy: on the test set after the block, 0 to 1; None for a paced model.
        coded: whether gradients went through the row's codec; None where it has none.
        merge: what the row's plan says of itself; None where it plans nothing.
    """

    row: int
    starts: list[list[float]]
    sent_bytes: list[float]
    loss: float
    accuracy: float | None = None
    coded: bool | None = None
    merge: dict[str, Any] | None = None

    def iterations_s(self) -> list[float]:
        """Seconds between the last worker's start of one iteration and of the next."""
        last = [max(stamps) for stamps in zip(*self.starts, strict=True)]
        return [after - before for before, after in itertools.pairwise(last)]

    def bytes_per_iteration(self, sharing: int) -> float:
        """Bytes per worker and iteration, where ``sharing`` workers share a host's counters."""
        return statistics.fmean(self.sent_bytes) / sharing


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and the range that 80% of the values lie in, in seconds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Quantiles of ``values``, between neighbours by linear interpolation."""
        ordered = sorted(values)
        return cls(*(_quantile(ordered, share) for share in (0.5, 0.1, 0.9)))


@dataclass(frozen=True, slots=True)
class Run:
    """One row's figures; ``notes.NOTES`` says what each is."""

    strategy: str
    iteration_s: Quantiles
    ratio: float
    bytes_per_iteration: float
    exposed_s: float | None
    bound_s: float | None
    bound_eq6_s: float | None
    bound_formula: str
    fraction_of_bound: float | None
    final_loss: float
    accuracy: float | None
    exact: bool
    samples_s: list[float]
    speedup: float | None = None
    bound_measured_s: float | None = None
    fraction_of_s_max: float | None = None
    breakdown: dict[str, Parts] | None = None
    codec: str | None = None
    merge: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole bench: what was asked, where it ran, and what came out."""

    lab: str
    model: str
    machine: dict[str, Any]
    runs: list[Run]
    asked_lab: str
    workers: int
    config: dict[str, Any]
    command: str
    date: str
    versions: dict[str, str]
    compute_s: dict[str, float] | None
    notes: dict[str, str]
    measured: Measured | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values; ``lab, model, machine, runs`` first."""
        return asdict(self)


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def runs(checked: Checked, blocks: Sequence[Block], measured: Measured | None = None) -> list[Run]:
    """Turn the blocks into one run for each row, in the rows' order."""
    by_row = [[block for block in blocks if block.row == i] for i in range(len(checked.rows))]
    samples = [[s for block in own for s in block.iterations_s()] for own in by_row]
    quantiles = [Quantiles.of(values) for values in samples]
    compute = _compute_s(checked, quantiles)
    per_byte = reduce_seconds_per_byte(checked.lab)
    sharing = checked.config.per_host if checked.lab.shaped else checked.workers
    out = []
    for row, own, values, times in zip(checked.rows, by_row, samples, quantiles, strict=True):
        floor, eq6, formula = _bounds(checked, row, per_byte)
        alone = None if measured is None or row.alone else measured.bound_s
        out.append(
            Run(
                strategy=row.text,
                iteration_s=times,
                ratio=times.median / quantiles[0].median,
                bytes_per_iteration=statistics.fmean(b.bytes_per_iteration(sharing) for b in own),
                exposed_s=None if compute is None else max(0.0, times.median - compute),
                bound_s=floor,
                bound_eq6_s=eq6,
                bound_formula=formula,
                fraction_of_bound=None if floor is None else floor / times.median,
                final_loss=own[-1].loss,
                accuracy=own[-1].accuracy,
                exact=row.traits.exact,
                samples_s=values,
                speedup=None if measured is None else measured.speedup(times.median),
                bound_measured_s=alone,
                fraction_of_s_max=None if alone is None else alone / times.median,
                codec=_codec(own),
                merge=next((b.merge for b in own if b.merge is not None), None),
            )
        )
    return out


def _codec(blocks: Sequence[Block]) -> str | None:
    """Whether the row's codec was on, once that had been measured; None without one."""
    states = {block.coded for block in blocks}
    if states == {None}:
        return None
    return {True: "on", False: "off"}[states.pop() is True] if len(states) == 1 else "on and off"


def _compute_s(checked: Checked, quantiles: Sequence[Quantiles]) -> float | None:
    times = checked.model.compute_s()
    if times is not None:
        return sum(times)
    for row, own in zip(checked.rows, quantiles, strict=True):
        if row.alone:
            return own.median
    return None


def _bounds(
    checked: Checked, row: Contender, per_byte: float | None
) -> tuple[float | None, float | None, str]:
    """The floor, its simple form, and the formula or why there is none."""
    layers = checked.model.layers(row)
    if layers is None:
        return None, None, f"none: {checked.model.name} has no stated compute time"
    if row.traits.bound not in bound.BOUNDS:
        return None, None, f"none: no floor is known for {row.name}"
    if per_byte is None and not row.alone:
        return None, None, "none: the lab's links have no stated rate"
    rate = per_byte or 0.0
    own = bound.BOUNDS[row.traits.bound]
    return own.floor(layers, rate), own.simple(layers, rate), own.formula

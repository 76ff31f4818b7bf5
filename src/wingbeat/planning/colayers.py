"""Colayers: layers with similar computation and communication share a bucket (Canary, 4.3.2).

The paper names the criteria (kind, parameters, gradient distribution, computation), gives one
example, VGG-19 in four colayers, and leaves the rest to trial and error. Here consecutive layers of
backward are grouped, and the best grouping is found exactly by dynamic programming:

- Without measurements, by kind and number of parameters, which are equal on all workers: the groups
  that are most equal in size.
- With measurements, by the backward time per parameter and the width of the gradient distribution,
  both as logarithms: the groups within which these vary least, weighted by parameters. The groups
  of the paper's example are alike in backward time per parameter: FC3 to FC1, and CONV5; it is four
  times as long in CONV4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from wingbeat.errors import UsageError
from wingbeat.types import Plan, PlannedBucket, TensorSpec

DEFAULT_COUNT = 10
"""Number of colayers in the paper's figures (section 6)."""

MIN_COUNT = 4
"""Fewest colayers where their number is chosen, as in the paper's example. With fewer, too little
is sent during backward."""

REMAINING_VARIATION = 0.05
"""Share of a model's variation that may remain within colayers where their number is chosen."""

NOISE = 0.1
"""Difference of logarithms below which layers are similar, as measured times vary by 10%. Sizes
decide among similar layers."""


@dataclass(frozen=True, slots=True)
class LayerProperties:
    """Properties of one layer.

    Attributes:
        kind: type of computation, such as ``"fc"`` or ``"conv"``; a colayer has one kind if
            possible.
        numel: parameters.
        backward_s: seconds of its backward; 0 if not measured.
        width: width of its gradient distribution: the natural logarithm of a quantile of the
            absolute values; None if not measured.
    """

    kind: str
    numel: int
    backward_s: float = 0.0
    width: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Ready times of tensors in seconds from the first, and their `LayerProperties.width`."""

    ready_s: tuple[float, ...]
    widths: tuple[float | None, ...]


def colayers(layers: Sequence[LayerProperties], count: int = DEFAULT_COUNT) -> tuple[range, ...]:
    """Group layers, in the order of backward, into ``count`` colayers, or one for each layer.

    Raises:
        UsageError: there is no layer, or ``count`` is not positive.
    """
    if not layers:
        raise UsageError("no layers to group into colayers: the model has no trainable parameters")
    if count < 1:
        raise UsageError(f"colayers={count}; allowed: 1 or more")
    return _groupings(tuple(layers), min(count, len(layers)))[-1].colayers


def fewest_colayers(
    layers: Sequence[LayerProperties], least: int = MIN_COUNT, most: int = DEFAULT_COUNT
) -> tuple[range, ...]:
    """Group measured layers into as few colayers as leave little variation within them.

    Return the first grouping from ``least`` on that mixes no more kinds than ``most`` colayers do
    and leaves at most `REMAINING_VARIATION` of the model's variation; otherwise ``most`` colayers.
    """
    colayers(layers, most)
    found = _groupings(tuple(layers), min(most, len(layers)))
    whole = _variation(tuple(layers)).within(0, len(layers))
    for each in found[least - 1 : -1]:
        if each.mixed == found[-1].mixed and each.variation <= REMAINING_VARIATION * whole:
            return each.colayers
    return found[-1].colayers


def colayer_plan(
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    count: int,
    measured: Measured | None = None,
    least: int | None = None,
) -> Plan:
    """Return a plan with one bucket for each colayer of a model.

    A layer is the module that tensors belong to. Its kind is its type together with the dtype and
    device, of which a bucket has one.
    """
    members: dict[tuple[str, str], list[int]] = {}
    for index in order:
        spec = specs[index]
        members.setdefault((spec.name.rpartition(".")[0], spec.kind), []).append(index)
    tensors = list(members.values())
    seconds = [0.0] * len(tensors)
    if measured is not None:
        seconds = _backward_times(tensors, measured.ready_s)
    layers = [
        LayerProperties(
            f"{next(filter(None, (specs[i].layer for i in indices)), '')} in {kind}",
            sum(specs[i].numel for i in indices),
            each_s,
            None if measured is None else _mean_width(specs, indices, measured.widths),
        )
        for ((_, kind), indices), each_s in zip(members.items(), seconds, strict=True)
    ]
    found = colayers(layers, count) if least is None else fewest_colayers(layers, least, count)
    buckets = [[i for layer in group for i in tensors[layer]] for group in found]
    for bucket in buckets:
        _check_one_kind([specs[index] for index in bucket], count)
    return Plan(tuple(PlannedBucket(tuple(bucket)) for bucket in buckets))


def _backward_times(layers: Sequence[Sequence[int]], ready_s: Sequence[float]) -> list[float]:
    """Return the backward time of each layer; 0 for the first, whose start is unknown."""
    ends = list(
        itertools.accumulate((max(ready_s[index] for index in each) for each in layers), max)
    )
    return [0.0, *(b - a for a, b in itertools.pairwise(ends))]


def _mean_width(
    specs: Sequence[TensorSpec], indices: Sequence[int], widths: Sequence[float | None]
) -> float | None:
    """Return the mean width of a layer's tensors, weighted by size; None if not measured."""
    known = [(specs[i].numel, width) for i in indices if (width := widths[i]) is not None]
    total = sum(numel for numel, _ in known)
    return sum(numel * width for numel, width in known) / total if total else None


def _check_one_kind(specs: Sequence[TensorSpec], count: int) -> None:
    first = specs[0]
    for other in specs:
        if other.kind != first.kind:
            raise UsageError(
                f"colayers={count}: {first.name!r} ({first.kind}) and {other.name!r} "
                f"({other.kind}) would share a colayer, which has one dtype on one device; "
                "use more colayers, or a model of one dtype"
            )


class _Variation:
    """Variation within groups of consecutive layers; the best grouping minimizes the sum."""

    def __init__(self, layers: Sequence[LayerProperties]) -> None:
        self._sizes = [0, *itertools.accumulate(layer.numel for layer in layers)]
        per_parameter = [
            math.log(layer.backward_s / layer.numel) if layer.backward_s > 0 < layer.numel else None
            for layer in layers
        ]
        features = per_parameter, [layer.width for layer in layers]
        self._measured = any(value is not None for values in features for value in values)
        # By feature: running sums of weight, weight times feature, and weight times its square.
        self._sums = [self._running_sums(layers, values) for values in features]

    def _running_sums(
        self, layers: Sequence[LayerProperties], values: Sequence[float | None]
    ) -> list[tuple[float, float, float]]:
        known = [(x.numel, v) for x, v in zip(layers, values, strict=True) if v is not None]
        weight = sum(w for w, _ in known)
        # About the mean, because squares of large numbers would lose their differences.
        mean = sum(w * v for w, v in known) / weight if weight else 0.0
        out = [(0.0, 0.0, 0.0)]
        for layer, value in zip(layers, values, strict=True):
            w, x = (0.0, 0.0) if value is None else (float(layer.numel), value - mean)
            a, b, c = out[-1]
            out.append((a + w, b + w * x, c + w * x * x))
        return out

    def within(self, start: int, stop: int) -> float:
        """Return the variation of the features among layers, weighted by their parameters."""
        total = 0.0
        for sums in self._sums:
            w, x, xx = (b - a for a, b in zip(sums[start], sums[stop], strict=True))
            total += max(xx - x * x / w, 0.0) if w else 0.0
        return total

    def cost(self, start: int, stop: int) -> float:
        """Return the variation of a group plus a small term for its size squared."""
        size = self._sizes[stop] - self._sizes[start]
        if not self._measured:
            return size * size
        return self.within(start, stop) + NOISE**2 * size * size / (self._sizes[-1] or 1)


_variation = cache(_Variation)


@dataclass(frozen=True, slots=True)
class _Grouping:
    """Colayers, the number of kind changes within them, and their variation."""

    colayers: tuple[range, ...]
    mixed: int
    variation: float


@cache
def _groupings(layers: tuple[LayerProperties, ...], most: int) -> list[_Grouping]:
    """Return the best grouping into 1 to ``most`` colayers; ties go to the earliest cuts."""
    variation = _variation(layers)
    changes = [0]
    for one, other in itertools.pairwise(layers):
        changes.append(changes[-1] + (one.kind != other.kind))
    # For the first `stop` layers in so many colayers: mixed kinds, cost and cuts.
    row: list[tuple[int, float, tuple[int, ...]] | None] = [(0, 0, ()), *[None] * len(layers)]
    out = []
    for _ in range(most):
        before, row = row, [None] * (len(layers) + 1)
        for stop in range(1, len(layers) + 1):
            row[stop] = min(
                (
                    (
                        known[0] + changes[stop - 1] - changes[start],
                        known[1] + variation.cost(start, stop),
                        (*known[2], stop),
                    )
                    for start in range(stop)
                    if (known := before[start]) is not None
                ),
                default=None,
            )
        found = row[len(layers)]
        assert found is not None, "there are at least as many layers as colayers"
        groups = tuple(range(a, b) for a, b in itertools.pairwise((0, *found[2])))
        within = sum(variation.within(group.start, group.stop) for group in groups)
        out.append(_Grouping(groups, found[0], within))
    return out

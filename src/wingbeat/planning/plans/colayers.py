"""Colayers: layers with analogous computation and communication, exchanged as one (Canary, 4.3.2).

The paper names what counts (kind, parameters, gradient distribution, computation), gives one
example, VGG-19 in four, and says that the rest is trial and error. Here layers that follow each
other in backward are bundled, the best bundles being found exactly:

- Before anything is measured, by kind and by parameters: what a model says of itself, so that all
  workers bundle alike. The bundles are those that are most alike in size.
- By what was measured, if it was: how long backward takes for each parameter, and how wide
  gradients are distributed, both as logarithms. The bundles are those within which these vary
  least, each layer counting by its parameters. What the paper's example has in common is the first
  of the two: all of FC3 to FC1 alike, all of CONV5 alike, four times as much in CONV4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from wingbeat.errors import UsageError
from wingbeat.types import Plan, PlannedBucket, TensorSpec

DEFAULT = 10
"""Colayers, as in the paper's figures (section 6)."""

LEAST = 4
"""Colayers at least where their number is chosen, as in the paper's example: with fewer, too little
is sent while backward goes on."""

SHARE = 0.05
"""Part of a model's variation that may stay within colayers where their number is chosen."""

NOISE = 0.1
"""Difference of two logarithms that says nothing: measured times vary by 10%. Where layers differ
by less, their sizes decide."""


@dataclass(frozen=True, slots=True)
class LayerProperties:
    """What is known of one layer.

    Attributes:
        kind: what it computes, as ``"fc"`` or ``"conv"``; a colayer has one kind if it can.
        numel: parameters.
        backward_s: seconds of its backward; 0 for not measured.
        width: how wide its gradients are distributed, as the natural logarithm of a quantile of
            their absolute values; None for not measured.
    """

    kind: str
    numel: int
    backward_s: float = 0.0
    width: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a model's tensors.

    Attributes:
        ready_s: when each tensor's gradient is ready, by index, in seconds from the first.
        widths: by index, as `LayerProperties.width`.
    """

    ready_s: tuple[float, ...]
    widths: tuple[float | None, ...]


def colayers(layers: Sequence[LayerProperties], count: int = DEFAULT) -> tuple[range, ...]:
    """Bundle layers, the first of which is the last of the model: where backward begins.

    Args:
        layers: in the order of backward.
        count: how many colayers, k; as many as there are layers if these are fewer.

    Returns:
        The layers of each colayer as a range of positions, c[0] first.

    Raises:
        UsageError: there is no layer, or ``count`` is not positive.
    """
    if not layers:
        raise UsageError("no layers to be bundled: the model has no parameters that are trained")
    if count < 1:
        raise UsageError(f"colayers={count}; allowed: 1 or more")
    return _best(tuple(layers), min(count, len(layers)))[-1].bundles


def fitting(
    layers: Sequence[LayerProperties], least: int = LEAST, most: int = DEFAULT
) -> tuple[range, ...]:
    """Bundle layers into as few colayers as leave little variation within them.

    Args:
        layers: in the order of backward; measured.
        least: how many colayers at least.
        most: how many at most.

    Returns:
        As `colayers`: the first number from ``least`` on that mixes no more kinds than ``most``
        does and leaves `SHARE` of the variation within the whole model; else ``most``.

    Raises:
        UsageError: as `colayers`.
    """
    colayers(layers, most)
    found = _best(tuple(layers), min(most, len(layers)))
    whole = _costs(tuple(layers)).varied(0, len(layers))
    for each in found[least - 1 : -1]:
        if each.mixed == found[-1].mixed and each.varied <= SHARE * whole:
            return each.bundles
    return found[-1].bundles


def bundled(
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    count: int,
    measured: Measured | None = None,
    least: int | None = None,
) -> Plan:
    """Return the colayers of a model's tensors.

    A layer is the module that tensors belong to; its kind is what it computes, and the dtype and
    device that a bucket has one of.

    Args:
        specs: every tensor of the model.
        order: indices into ``specs``, in the order in which gradients become ready.
        count: colayers, k; as many as there are layers if these are fewer.
        measured: what has been measured of them; None for nothing.
        least: colayers at least, if ``count`` is only the most; see `fitting`.

    Raises:
        UsageError: there is no tensor, ``count`` is not positive, or too small to keep dtypes and
            devices apart.
    """
    members: dict[tuple[str, str], list[int]] = {}
    for index in order:
        spec = specs[index]
        members.setdefault((spec.name.rpartition(".")[0], spec.kind), []).append(index)
    tensors = list(members.values())
    seconds = [0.0] * len(tensors) if measured is None else _seconds(tensors, measured.ready_s)
    layers = [
        LayerProperties(
            f"{next(filter(None, (specs[i].layer for i in indices)), '')} in {kind}",
            sum(specs[i].numel for i in indices),
            each_s,
            None if measured is None else _width(specs, indices, measured.widths),
        )
        for ((_, kind), indices), each_s in zip(members.items(), seconds, strict=True)
    ]
    bundles = colayers(layers, count) if least is None else fitting(layers, least, count)
    buckets = [[i for layer in b for i in tensors[layer]] for b in bundles]
    for bucket in buckets:
        _check_one_kind([specs[index] for index in bucket], count)
    return Plan(tuple(PlannedBucket(tuple(bucket)) for bucket in buckets))


def _seconds(layers: Sequence[Sequence[int]], ready_s: Sequence[float]) -> list[float]:
    """Return the time from when a layer's predecessors are ready until all of it is.

    Of the first layer that is not known (0): times count from one of its own gradients.
    """
    ends = list(
        itertools.accumulate((max(ready_s[index] for index in each) for each in layers), max)
    )
    return [0.0, *(b - a for a, b in itertools.pairwise(ends))]


def _width(
    specs: Sequence[TensorSpec], indices: Sequence[int], widths: Sequence[float | None]
) -> float | None:
    """Return the mean width of a layer's tensors by size; None if none was measured."""
    known = [(specs[i].numel, width) for i in indices if (width := widths[i]) is not None]
    total = sum(numel for numel, _ in known)
    return sum(numel * width for numel, width in known) / total if total else None


def _check_one_kind(specs: Sequence[TensorSpec], count: int) -> None:
    """Raise a `UsageError` for tensors that cannot travel together."""
    first = specs[0]
    for other in specs:
        if other.kind != first.kind:
            raise UsageError(
                f"colayers={count}: {first.name!r} ({first.kind}) and {other.name!r} "
                f"({other.kind}) would be in one colayer, which has one dtype on one device; "
                "use more colayers, or a model of one dtype"
            )


class _Costs:
    """What bundles of layers cost; sums of it are least for the best ones.

    Args:
        layers: in the order of backward.
    """

    def __init__(self, layers: Sequence[LayerProperties]) -> None:
        self._sizes = [0, *itertools.accumulate(layer.numel for layer in layers)]
        per = [
            math.log(layer.backward_s / layer.numel) if layer.backward_s > 0 < layer.numel else None
            for layer in layers
        ]
        features = per, [layer.width for layer in layers]
        self._measured = any(value is not None for values in features for value in values)
        # By feature: running sums of weight, and of the feature times weight, once and squared.
        self._sums = [self._running(layers, values) for values in features]

    def _running(
        self, layers: Sequence[LayerProperties], values: Sequence[float | None]
    ) -> list[tuple[float, float, float]]:
        known = [(x.numel, v) for x, v in zip(layers, values, strict=True) if v is not None]
        weight = sum(w for w, _ in known)
        # About the mean: squares of large numbers would lose what they differ by.
        mean = sum(w * v for w, v in known) / weight if weight else 0.0
        out = [(0.0, 0.0, 0.0)]
        for layer, value in zip(layers, values, strict=True):
            w, x = (0.0, 0.0) if value is None else (float(layer.numel), value - mean)
            a, b, c = out[-1]
            out.append((a + w, b + w * x, c + w * x * x))
        return out

    def varied(self, start: int, stop: int) -> float:
        """Return how much the features vary among layers, weighted by their parameters."""
        total = 0.0
        for sums in self._sums:
            w, x, xx = (b - a for a, b in zip(sums[start], sums[stop], strict=True))
            total += max(xx - x * x / w, 0.0) if w else 0.0
        return total

    def of(self, start: int, stop: int) -> float:
        """Return what a bundle costs: its variation, and by a little its size squared."""
        size = self._sizes[stop] - self._sizes[start]
        if not self._measured:
            return size * size
        return self.varied(start, stop) + NOISE**2 * size * size / (self._sizes[-1] or 1)


_costs = cache(_Costs)


@dataclass(frozen=True, slots=True)
class _Bundles:
    """Bundles, how many changes of kind are within them, and their variation."""

    bundles: tuple[range, ...]
    mixed: int
    varied: float


@cache
def _best(layers: tuple[LayerProperties, ...], most: int) -> list[_Bundles]:
    """Return the bundles of least cost in 1 to ``most`` colayers; of equals, the first cuts.

    A colayer has several kinds only if there are more changes of kind than cuts.
    """
    costs = _costs(layers)
    changes = [0]
    for one, other in itertools.pairwise(layers):
        changes.append(changes[-1] + (one.kind != other.kind))
    # Of the first `stop` layers in so many colayers: mixed kinds, cost and cuts.
    row: list[tuple[int, float, tuple[int, ...]] | None] = [(0, 0, ()), *[None] * len(layers)]
    out = []
    for _ in range(most):
        before, row = row, [None] * (len(layers) + 1)
        for stop in range(1, len(layers) + 1):
            row[stop] = min(
                (
                    (
                        known[0] + changes[stop - 1] - changes[start],
                        known[1] + costs.of(start, stop),
                        (*known[2], stop),
                    )
                    for start in range(stop)
                    if (known := before[start]) is not None
                ),
                default=None,
            )
        found = row[len(layers)]
        assert found is not None, "there are at least as many layers as colayers"
        bundles = tuple(range(a, b) for a, b in itertools.pairwise((0, *found[2])))
        varied = sum(costs.varied(bundle.start, bundle.stop) for bundle in bundles)
        out.append(_Bundles(bundles, found[0], varied))
    return out

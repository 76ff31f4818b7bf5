"""Colayers: layers with analogous computation and communication, exchanged as one (Canary, 4.3.2).

The paper names what counts (kind, parameters, gradient distribution, computation), gives one
example, VGG-19 in four, and says that the rest is trial and error. What its example has in common
is how much backward computes for each parameter: all of FC3 to FC1 alike, all of CONV5 alike, four
times that in CONV4. So layers that follow each other in backward are bundled by the logarithm of
that, and by the width of their gradients' distribution where it has been measured, each layer
counting by its parameters: the bundles in which these vary least, found exactly. Where nothing has
been measured, colayers are about as large as each other.
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


@dataclass(frozen=True, slots=True)
class LayerProperties:
    """What is known of one layer.

    Attributes:
        name: as users know it.
        kind: what it computes, as ``"fc"`` or ``"conv"``; a colayer has one kind if it can.
        numel: parameters.
        backward_s: seconds of its backward; 0 for not measured.
        spread: how wide its gradients are distributed: a logarithm that grows with the width, such
            as that of their 99.9th percentile over their median; 0 for not measured.
    """

    name: str
    kind: str
    numel: int
    backward_s: float = 0.0
    spread: float = 0.0


def colayers(layers: Sequence[LayerProperties], count: int = DEFAULT) -> tuple[range, ...]:
    """Bundle layers, the first of which is the last of the model: where backward begins.

    Args:
        layers: in the order of backward.
        count: how many colayers, k; as many as there are layers if these are fewer.

    Returns:
        The layers of each colayer as a range of positions, c[0] first. Where nothing is measured
        of any layer, those of about as many parameters.

    Raises:
        UsageError: there is no layer, or ``count`` is not positive.
    """
    if not layers:
        raise UsageError("no layers to be bundled: the model has no parameters that are trained")
    if count < 1:
        raise UsageError(f"colayers={count}; allowed: 1 or more")
    return _best(tuple(layers), min(count, len(layers)))[1]


def bundled(specs: Sequence[TensorSpec], order: Sequence[int], count: int) -> Plan:
    """Return colayers of tensors of which nothing has been measured.

    A layer is the module that tensors belong to; its kind is what it computes, and the dtype and
    device that a bucket has one of.

    Args:
        specs: every tensor of the model.
        order: indices into ``specs``, in the order in which gradients become ready.
        count: colayers, k; as many as there are layers if these are fewer.

    Raises:
        UsageError: there is no tensor, ``count`` is not positive, or too small to keep dtypes and
            devices apart.
    """
    members: dict[tuple[str, str], list[int]] = {}
    for index in order:
        spec = specs[index]
        members.setdefault((spec.name.rpartition(".")[0], spec.kind), []).append(index)
    layers = [
        LayerProperties(
            name,
            f"{next(filter(None, (specs[i].layer for i in indices)), '')} in {kind}",
            sum(specs[i].numel for i in indices),
        )
        for (name, kind), indices in members.items()
    ]
    tensors = list(members.values())
    buckets = [[i for layer in b for i in tensors[layer]] for b in colayers(layers, count)]
    for bucket in buckets:
        _check_one_kind([specs[index] for index in bucket], count)
    return Plan(tuple(PlannedBucket(tuple(bucket)) for bucket in buckets))


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


def fitting(
    layers: Sequence[LayerProperties], most: int = DEFAULT, tolerance: float = 0.05
) -> tuple[range, ...]:
    """Bundle layers into as few colayers as will do.

    Args:
        layers: in the order of backward.
        most: colayers at the most.
        tolerance: which part of the variation within one single colayer may stay.

    Returns:
        As `colayers`.

    Raises:
        UsageError: as `colayers`.
    """
    finest = colayers(layers, most)
    whole = _cost(_sums(tuple(layers)), 0, len(layers))
    for count in range(1, len(finest)):
        cost, bundles = _best(tuple(layers), count)
        if cost <= tolerance * whole:
            return bundles
    return finest


def rebundled(
    layers: Sequence[LayerProperties],
    current: Sequence[range],
    most: int = DEFAULT,
    *,
    fixed: bool = True,
    gain: float = 0.2,
) -> tuple[range, ...] | None:
    """Decide, between two iterations, whether what is measured now asks for other colayers.

    All workers must decide by the same numbers: one of them measures for all.

    Args:
        layers: as measured now.
        current: the colayers of today.
        most: how many there are to be; at the most, if the number may change too.
        fixed: whether the number is ``most``, or what `fitting` finds.
        gain: which part of the variation within today's colayers others must save: measured times
            are never twice the same, and each change costs a drain.

    Returns:
        The new colayers; None if today's are to stay.
    """
    new = colayers(layers, most) if fixed else fitting(layers, most)
    if new == tuple(current):
        return None
    sums = _sums(tuple(layers))
    before, after = (
        sum(_cost(sums, bundle.start, bundle.stop) for bundle in bundles)
        for bundles in (current, new)
    )
    fewer = len(new) < len(current) and not fixed
    return new if fewer or after < (1 - gain) * before else None


_Sums = list[tuple[float, float, float, float, float]]


def _is_measured(layers: Sequence[LayerProperties]) -> bool:
    return any(layer.backward_s > 0 or layer.spread for layer in layers)


def _features(layer: LayerProperties) -> tuple[float, float]:
    """Return computation by parameter, and the gradients' spread, as logarithms."""
    seconds = layer.backward_s / max(layer.numel, 1)
    return (math.log(seconds) if seconds > 0 else 0.0), layer.spread


@cache
def _sums(layers: tuple[LayerProperties, ...]) -> _Sums:
    """Return running sums of weight, and of each feature times weight, once and squared."""
    total = (0.0, 0.0, 0.0, 0.0, 0.0)
    out = [total]
    for layer in layers:
        w, (a, b) = float(layer.numel), _features(layer)
        step = (w, w * a, w * a * a, w * b, w * b * b)
        total = tuple(map(sum, zip(total, step, strict=True)))  # type: ignore[assignment]
        out.append(total)
    return out


def _cost(sums: _Sums, start: int, stop: int) -> float:
    """Return how much the features vary among layers, weighted by their parameters."""
    w, a, aa, b, bb = (y - x for x, y in zip(sums[start], sums[stop], strict=True))
    return max((aa - a * a / w) + (bb - b * b / w), 0.0) if w else 0.0


def _size(sums: _Sums, start: int, stop: int) -> float:
    """Return what is least, in sum, for bundles of one size: the square of each one's."""
    return (sums[stop][0] - sums[start][0]) ** 2


@cache
def _best(layers: tuple[LayerProperties, ...], count: int) -> tuple[float, tuple[range, ...]]:
    """Return the best bundles, and the sum of their costs; of equals, that with the first cuts.

    A colayer has several kinds only if there are more changes of kind than cuts.
    """
    sums, cost_of = _sums(layers), _cost if _is_measured(layers) else _size
    changes = [0]
    for one, other in itertools.pairwise(layers):
        changes.append(changes[-1] + (one.kind != other.kind))
    # best[c][stop]: mixed kinds, cost and cuts of the first `stop` layers in c colayers.
    best: list[list[tuple[int, float, tuple[int, ...]] | None]] = [[None] * (len(layers) + 1)]
    best[0][0] = (0, 0.0, ())
    for _ in range(count):
        row: list[tuple[int, float, tuple[int, ...]] | None] = [None] * (len(layers) + 1)
        for stop in range(1, len(layers) + 1):
            row[stop] = min(
                (
                    (
                        before[0] + changes[stop - 1] - changes[start],
                        before[1] + cost_of(sums, start, stop),
                        (*before[2], stop),
                    )
                    for start in range(stop)
                    if (before := best[-1][start]) is not None
                ),
                default=None,
            )
        best.append(row)
    found = best[count][len(layers)]
    assert found is not None, "there are at least as many layers as colayers"
    _, cost, stops = found
    return cost, tuple(range(a, b) for a, b in itertools.pairwise((0, *stops)))

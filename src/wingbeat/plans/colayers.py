"""Colayers: layers with analogous computation and communication, exchanged as one (Canary, 4.3.2).

The paper names what counts (kind, parameters, gradient distribution, computation), gives one
example, VGG-19 in four, and says that the rest is trial and error. Here layers that follow each
other in backward are bundled by kind and by parameters: what a model says of itself, so that all
workers bundle alike before anything has been measured, and a simulator as they do. The bundles are
those that are most alike in size, found exactly.

The paper's example has four times as much computation for each parameter in CONV4 as in CONV5,
which sizes do not say: of VGG-19 in four colayers this makes others.
"""

from __future__ import annotations

import itertools
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
        kind: what it computes, as ``"fc"`` or ``"conv"``; a colayer has one kind if it can.
        numel: parameters.
    """

    kind: str
    numel: int


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
    return _best(tuple(layers), min(count, len(layers)))


def bundled(specs: Sequence[TensorSpec], order: Sequence[int], count: int) -> Plan:
    """Return the colayers of a model's tensors.

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
            f"{next(filter(None, (specs[i].layer for i in indices)), '')} in {kind}",
            sum(specs[i].numel for i in indices),
        )
        for (_, kind), indices in members.items()
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


@cache
def _best(layers: tuple[LayerProperties, ...], count: int) -> tuple[range, ...]:
    """Return the bundles whose squared sizes are least in sum; of equals, that with the first cuts.

    A colayer has several kinds only if there are more changes of kind than cuts.
    """
    sums = [0, *itertools.accumulate(layer.numel for layer in layers)]
    changes = [0]
    for one, other in itertools.pairwise(layers):
        changes.append(changes[-1] + (one.kind != other.kind))
    # best[c][stop]: mixed kinds, cost and cuts of the first `stop` layers in c colayers.
    best: list[list[tuple[int, int, tuple[int, ...]] | None]] = [[None] * (len(layers) + 1)]
    best[0][0] = (0, 0, ())
    for _ in range(count):
        row: list[tuple[int, int, tuple[int, ...]] | None] = [None] * (len(layers) + 1)
        for stop in range(1, len(layers) + 1):
            row[stop] = min(
                (
                    (
                        before[0] + changes[stop - 1] - changes[start],
                        before[1] + (sums[stop] - sums[start]) ** 2,
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
    return tuple(range(a, b) for a, b in itertools.pairwise((0, *found[2])))

"""Bucketing rules: which tensors share a bucket, by size, by layers or in colayers.

Colayers (Canary, 4.3.2) are layers with similar computation and communication. The paper names the
criteria (kind, parameters, gradient distribution, computation), gives one example, VGG-19 in four
colayers, and leaves the rest to trial and error. Here consecutive layers of backward are grouped,
and the best grouping is found exactly by dynamic programming:

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from wingbeat.errors import UsageError
from wingbeat.parts.plan import COLAYERS, MIN_COLAYERS
from wingbeat.planning import merge
from wingbeat.planning.costs import Workload
from wingbeat.types import Fusion, Plan, PlannedBucket, TensorSpec


def make_plan(
    fusion: Fusion,
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    measured: Measured | None = None,
) -> Plan:
    """Apply a bucketing rule to a model; ``measured`` is None before there are measurements."""
    if fusion.kind == "layers":
        return by_layers(specs, order, fusion.layers)
    if fusion.kind == "colayers":
        least = fusion.least or None if measured else None
        return colayer_plan(specs, order, fusion.layers, measured, least)
    if fusion.kind == "named":
        return by_names(specs, order, fusion.fragments)
    if fusion.kind == "none":
        return in_ready_order([(index,) for index in order], order)
    if fusion.kind not in ("one", "elements"):
        return by_size(specs, order, fusion.bucket_bytes, fusion.first_bytes, fusion.last_bytes)
    workload = Workload(
        tensors=tuple(order),
        ready_s=(0.0,) * len(order),
        numels=tuple(specs[index].numel for index in order),
        nbytes=tuple(float(specs[index].nbytes) for index in order),
        kinds=tuple(specs[index].kind for index in order),
    )
    if fusion.kind == "one":
        return merge.single_bucket(workload)
    return merge.by_elements(workload, fusion.elements)


def by_layers(specs: Sequence[TensorSpec], order: Sequence[int], count: int) -> Plan:
    """Put ``count`` consecutive layers into a bucket (DeAR-NL, section VI-G).

    A bucket holds one dtype on one device. A layer is the module that tensors belong to:
    ``fc.weight`` and ``fc.bias`` are of ``fc``.
    """
    number: dict[str, int] = {}
    buckets: dict[tuple[int, str, str], list[int]] = {}
    for index in order:
        spec = specs[index]
        layer = number.setdefault(spec.name.rpartition(".")[0], len(number))
        buckets.setdefault((layer // count, spec.dtype, spec.device), []).append(index)
    return in_ready_order([tuple(tensors) for tensors in buckets.values()], order)


def by_names(
    specs: Sequence[TensorSpec], order: Sequence[int], fragments: Sequence[Sequence[str]]
) -> Plan:
    """Put the tensors of the named modules, and the named tensors, into a bucket each.

    The buckets are in reverse order: the first fragment is the last bucket, as in backward. Of two
    names of a tensor the longer one counts.

    Raises:
        UsageError: a tensor is in no fragment or in two, or a name has no tensor.
    """
    place = {name: number for number, names in enumerate(fragments) for name in names}
    buckets: list[list[int]] = [[] for _ in fragments]
    used = set()
    for index in order:
        words = specs[index].name.split(".")
        prefixes = (".".join(words[:count]) for count in range(len(words), 0, -1))
        found = next((prefix for prefix in prefixes if prefix in place), None)
        if found is None:
            raise UsageError(
                f"fragments: the parameter {specs[index].name!r} is in none of the "
                f"{len(fragments)} fragments; add it, or the name of its module, to one of them"
            )
        used.add(found)
        buckets[place[found]].append(index)
    unknown = [name for name in place if name not in used]
    if unknown:
        raise UsageError(
            f"fragments: {unknown[0]!r} is no module or parameter with parameters that are trained "
            "and in no longer name of the list; names are those of model.named_parameters(), such "
            f"as {specs[order[0]].name!r} or {specs[order[0]].name.partition('.')[0]!r}"
        )
    return Plan(tuple(PlannedBucket(tuple(bucket)) for bucket in reversed(buckets)))


def by_size(
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    bucket_bytes: int,
    first_bytes: int = 0,
    last_bytes: int = 0,
) -> Plan:
    """Fill buckets up to a size, in the order in which gradients become ready (DeAR-FB, IV-A).

    A bucket holds one dtype on one device. A tensor larger than the bucket travels alone. All sizes
    from the total of a kind on make the same plan. The exchange of the bucket that is ready last is
    exposed (its reduce-scatter ends the backward pass, its all-gather begins the next forward), and
    the links idle until the first bucket is ready. Both may therefore be smaller than the others.
    Sizes double from each edge, because the bucket before hides twice as much.
    """
    kinds: dict[str, list[int]] = {}
    for index in order:
        kinds.setdefault(specs[index].kind, []).append(index)
    buckets: list[tuple[int, ...]] = []
    for members in kinds.values():
        limit = min(bucket_bytes, sum(specs[t].nbytes for t in members))
        # The end is tapered first; the rest is filled from its beginning.
        tail, rest = _taper(specs, members[::-1], limit, last_bytes)
        head, middle = _taper(specs, rest[::-1], limit, first_bytes)
        buckets += map(tuple, [*head, *_fill(specs, middle, limit)])
        buckets += [tuple(tensors[::-1]) for tensors in reversed(tail)]
    return in_ready_order(buckets, order)


def in_ready_order(buckets: Sequence[tuple[int, ...]], order: Sequence[int]) -> Plan:
    """Sort buckets by when each becomes complete."""
    ready = {index: position for position, index in enumerate(order)}
    complete = sorted(buckets, key=lambda tensors: max(ready[t] for t in tensors))
    return Plan(tuple(PlannedBucket(tensors) for tensors in complete))


def _taper(
    specs: Sequence[TensorSpec], members: list[int], limit: int, edge: int
) -> tuple[list[list[int]], list[int]]:
    """Cut buckets of ``edge`` bytes, twice that and so on below ``limit``; also return the rest."""
    out: list[list[int]] = []
    placed = 0
    while members and 0 < edge < limit:
        # After a tensor larger than the edge, the next bucket may be as large.
        edge = max(edge, placed)
        size = min(edge, limit)
        tensors = next(_fill(specs, members, size, least=size // 8))
        out.append(tensors)
        placed += sum(specs[t].nbytes for t in tensors)
        members = members[len(tensors) :]
        edge *= 2
    return out, members


def _fill(
    specs: Sequence[TensorSpec], members: Sequence[int], limit: int, least: int = 0
) -> Iterator[list[int]]:
    """Cut buckets of up to ``limit`` bytes; one with less than ``least`` takes another tensor."""
    tensors: list[int] = []
    nbytes = 0
    for index in members:
        if tensors and nbytes >= least and nbytes + specs[index].nbytes > limit:
            yield tensors
            tensors, nbytes = [], 0
        tensors.append(index)
        nbytes += specs[index].nbytes
    if tensors:
        yield tensors


# -- colayers ------------------------------------------------------------------------------------

REMAINING_VARIATION = 0.05
"""Share of a model's variation that may remain within colayers where their number is chosen."""

NOISE = 0.1
"""Difference of logarithms below which layers are similar, as measured times vary by 10%. Sizes
decide among similar layers."""


@dataclass(frozen=True, slots=True)
class LayerProperties:
    """Properties of one layer.

    ``kind`` is the type of computation, such as ``"fc"`` or ``"conv"``; a colayer has one kind if
    possible. ``backward_s`` is 0 if not measured. ``width`` is that of its gradient distribution:
    the natural logarithm of a quantile of the absolute values; None if not measured.
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


def colayers(layers: Sequence[LayerProperties], count: int = COLAYERS) -> tuple[range, ...]:
    """Group layers, in the order of backward, into ``count`` colayers, or one for each layer.

    Without layers, or with a count below 1, a `UsageError`.
    """
    if not layers:
        raise UsageError("no layers to group into colayers: the model has no trainable parameters")
    if count < 1:
        raise UsageError(f"colayers={count}; allowed: 1 or more")
    return _groupings(tuple(layers), min(count, len(layers)))[-1][0]


def fewest_colayers(
    layers: Sequence[LayerProperties], least: int = MIN_COLAYERS, most: int = COLAYERS
) -> tuple[range, ...]:
    """Group measured layers into as few colayers as leave little variation within them.

    Return the first grouping from ``least`` on that mixes no more kinds than ``most`` colayers do
    and leaves at most `REMAINING_VARIATION` of the model's variation; otherwise ``most`` colayers.
    """
    colayers(layers, most)  # checks the arguments
    found = _groupings(tuple(layers), min(most, len(layers)))
    allowed = REMAINING_VARIATION * _variation(tuple(layers)).within(0, len(layers))
    last, fewest_mixed, _ = found[-1]
    smaller = (
        groups
        for groups, mixed, variation in found[least - 1 : -1]
        if mixed == fewest_mixed and variation <= allowed
    )
    return next(smaller, last)


def colayer_plan(
    specs: Sequence[TensorSpec],
    order: Sequence[int],
    count: int,
    measured: Measured | None = None,
    least: int | None = None,
) -> Plan:
    """Return a plan with one bucket for each colayer of a model.

    A layer is the module that tensors belong to. Its kind is its type together with the dtype and
    device, of which a bucket has one: too few colayers for that are a `UsageError`.
    """
    members: dict[tuple[str, str], list[int]] = {}
    for index in order:
        spec = specs[index]
        members.setdefault((spec.name.rpartition(".")[0], spec.kind), []).append(index)
    tensors = list(members.values())
    seconds = [0.0] * len(tensors)
    widths: Sequence[float | None] = [None] * len(specs)
    if measured is not None:
        widths = measured.widths
        ready = (max(measured.ready_s[index] for index in each) for each in tensors)
        # The start of the first layer is unknown, and so is its time.
        seconds[1:] = [b - a for a, b in itertools.pairwise(itertools.accumulate(ready, max))]
    layers = []
    for ((_, kind), indices), each_s in zip(members.items(), seconds, strict=True):
        layer = next((specs[i].layer for i in indices if specs[i].layer), "")
        known = [(specs[i].numel, width) for i in indices if (width := widths[i]) is not None]
        total = sum(numel for numel, _ in known)
        mean = sum(numel * width for numel, width in known) / total if total else None
        numel = sum(specs[i].numel for i in indices)
        layers.append(LayerProperties(f"{layer} in {kind}", numel, each_s, mean))
    found = colayers(layers, count) if least is None else fewest_colayers(layers, least, count)
    buckets = [[i for layer in group for i in tensors[layer]] for group in found]
    for bucket in buckets:
        first = specs[bucket[0]]
        for other in (specs[index] for index in bucket):
            if other.kind != first.kind:
                raise UsageError(
                    f"colayers={count}: {first.name!r} ({first.kind}) and {other.name!r} "
                    f"({other.kind}) would share a colayer, which has one dtype on one device; "
                    "use more colayers, or a model of one dtype"
                )
    return Plan(tuple(PlannedBucket(tuple(bucket)) for bucket in buckets))


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


@cache
def _groupings(
    layers: tuple[LayerProperties, ...], most: int
) -> list[tuple[tuple[range, ...], int, float]]:
    """Return the best groupings into 1 to ``most`` colayers; ties go to the earliest cuts.

    Each has the number of kind changes within its colayers, and their variation.
    """
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
            options = (
                (
                    known[0] + changes[stop - 1] - changes[start],
                    known[1] + variation.cost(start, stop),
                    (*known[2], stop),
                )
                for start in range(stop)
                if (known := before[start]) is not None
            )
            row[stop] = min(options, default=None)
        found = row[len(layers)]
        assert found is not None, "there are at least as many layers as colayers"
        groups = tuple(range(a, b) for a, b in itertools.pairwise((0, *found[2])))
        within = sum(variation.within(group.start, group.stop) for group in groups)
        out.append((groups, found[0], within))
    return out

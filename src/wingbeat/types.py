"""Types that all modules share. They do not import torch, so plans can be tested without it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wingbeat.errors import UsageError


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range ``[start, stop)`` of elements in a flat buffer."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def overlaps(self, other: Span) -> bool:
        """Whether the two ranges share at least one element."""
        return self.start < other.stop and other.start < self.stop

    def cut(self, size: int) -> list[Span]:
        """Cut into consecutive pieces of ``size`` elements; the last one may be shorter."""
        return [Span(s, min(s + size, self.stop)) for s in range(self.start, self.stop, size)]


def split(span: Span, weights: Sequence[float]) -> list[Span]:
    """Split ``span`` into consecutive spans with lengths in proportion to ``weights``.

    Every element belongs to exactly one piece; a piece may be empty.

    >>> split(Span(0, 10), [1, 1, 1])
    [Span(start=0, stop=3), Span(start=3, stop=7), Span(start=7, stop=10)]
    """
    total = float(sum(weights))
    bounds, acc = [span.start], 0.0
    for weight in weights:
        acc += weight
        bounds.append(span.start + round(len(span) * acc / total))
    bounds[-1] = span.stop
    return [Span(a, b) for a, b in itertools.pairwise(bounds)]


def blocks_of(length: int, size: int) -> list[Span]:
    """Return one block per rank of a buffer of ``length`` elements; lengths differ by at most 1."""
    return [Span(length * i // size, length * (i + 1) // size) for i in range(size)]


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``span`` of the buffer to rank ``peer`` over network interface ``interface``.

    ``near``: the peer is on the same host, and no codec is used.
    """

    peer: int
    span: Span
    interface: int = 0
    near: bool = False


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive ``span`` from ``peer``; add it to the buffer (``reduce``) or overwrite.

    ``near`` as in `Send`.
    """

    peer: int
    span: Span
    reduce: bool
    interface: int = 0
    near: bool = False


_SHOWN_RANKS = 9
"""Messages list the first ranks of a longer list and the last one."""

Hop = Send | Recv
"""One worker's part in the transfer of a span between two workers."""

Round = tuple[Hop, ...]
"""Hops that may run concurrently; a Send depends on Recvs of its elements in earlier rounds."""


SERIES = 1 << 40
"""Number of epochs in a series; components with groups of their own use separate series."""


@dataclass(frozen=True, slots=True, init=False)
class Group:
    """A subset of the workers, with an epoch.

    A group is a value: two groups of the same ranks and epoch are equal. The order of ``ranks``
    does not matter. ``epoch`` distinguishes successive groups of the same ranks and increases
    within a series.

    Raises:
        UsageError: ``ranks`` is empty, contains a rank twice, or has a value that is not an integer
            from 0 on.

    >>> Group([2, 0], epoch=7)
    Group(ranks=(0, 2), epoch=7)
    """

    ranks: tuple[int, ...]
    epoch: int

    def __init__(self, ranks: Iterable[int], epoch: int = 0) -> None:
        listed = list(ranks)
        wrong = [rank for rank in listed if type(rank) is not int or rank < 0]
        if wrong:
            raise UsageError(f"Group: ranks has {wrong[0]!r}: allowed are whole numbers from 0 on")
        if not listed:
            raise UsageError("Group: ranks is empty: a group has at least one member")
        twice = sorted({rank for rank in listed if listed.count(rank) > 1})
        if twice:
            raise UsageError(f"Group: rank {twice[0]} occurs twice in ranks: list each rank once")
        if type(epoch) is not int or epoch < 0:
            raise UsageError(f"Group: epoch={epoch!r}: allowed are whole numbers from 0 on")
        object.__setattr__(self, "ranks", tuple(sorted(listed)))
        object.__setattr__(self, "epoch", epoch)

    @property
    def series(self) -> int:
        """The index of the epoch's series of `SERIES` epochs."""
        return self.epoch // SERIES

    def __str__(self) -> str:
        shown = [str(rank) for rank in self.ranks]
        if len(shown) > _SHOWN_RANKS:
            shown[_SHOWN_RANKS - 1 :] = ["...", shown[-1]]
        return f"group ({', '.join(shown)}) of epoch {self.epoch}"


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """Workers by host. Hosts may have different numbers of workers.

    Attributes:
        hosts: the workers of each host in ascending order; the k-th is local worker k of the host.
        host_of: the host of each worker.

    Raises:
        UsageError: there is no worker, or a host has none.

    >>> Layout([0, 0, 1, 1]).hosts
    ((0, 1), (2, 3))
    """

    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...] = field(compare=False, repr=False)

    def __init__(self, host_of: Sequence[int]) -> None:
        hosts: list[list[int]] = [[] for _ in range(max(host_of, default=-1) + 1)]
        for worker, host in enumerate(host_of):
            if host < 0:
                raise UsageError(f"Layout: worker {worker} is on host {host}: allowed are 0 and up")
            hosts[host].append(worker)
        if not hosts:
            raise UsageError("Layout: there are no workers: name the host of one at least")
        if not all(hosts):
            raise UsageError(f"Layout: host {hosts.index([])} has no worker: leave no number out")
        object.__setattr__(self, "hosts", tuple(map(tuple, hosts)))
        object.__setattr__(self, "host_of", tuple(host_of))

    @classmethod
    def even(cls, hosts: int, workers: int) -> Layout:
        """Return the layout of ``hosts`` hosts with ``workers`` workers each, in torchrun's order.

        Raises:
            UsageError: there are no hosts, or no workers.
        """
        if hosts < 1 or workers < 1:
            raise UsageError(f"Layout.even(hosts={hosts}, workers={workers}): 1 or more of each")
        return cls([host for host in range(hosts) for _ in range(workers)])

    @classmethod
    def by_name(cls, names: Iterable[object]) -> Layout:
        """Return the layout of workers that each name their host, by any hashable value.

        >>> Layout.by_name(["a", "b", "a"]).hosts
        ((0, 2), (1,))
        """
        numbers: dict[object, int] = {}
        return cls([numbers.setdefault(name, len(numbers)) for name in names])

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.host_of)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a parameter that plans use.

    Attributes:
        name: as in ``named_parameters()``.
        dtype: as torch prints it, without ``torch.``.
        itemsize: bytes per element.
        device: ``str(tensor.device)``.
        layer: the kind of its layer: ``"fc"``, ``"conv"``, or empty for others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str = "cpu"
    layer: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.itemsize

    @property
    def kind(self) -> str:
        """Dtype and device, which all tensors of a bucket share."""
        return f"{self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Parameters whose gradients are sent together, as indices into the plan's tensor list."""

    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Buckets of tensors, in the order in which their gradients become ready.

    All workers have the same plan and start its buckets in its order, so they need no negotiation
    (DeAR, section III-B).
    """

    buckets: tuple[PlannedBucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Which tensors share a bucket: a rule for `wingbeat.planning.plans.make_plan`.

    Attributes:
        kind: ``"buffer"`` (adjacent tensors up to ``bucket_bytes``), ``"layers"`` (``layers``
            adjacent layers), ``"elements"`` (adjacent tensors up to ``elements`` elements),
            ``"one"`` (all tensors), ``"none"`` (each tensor alone), ``"colayers"`` (``layers``
            bundles of adjacent layers, see `wingbeat.planning.plans`) or ``"named"``
            (``fragments``).
        first_bytes: with ``"buffer"``, size of the bucket that is ready first; sizes double towards
            the middle up to ``bucket_bytes``. 0: ``bucket_bytes``.
        last_bytes: the same for the bucket that is ready last.
        measured: whether colayers are made again by measurements.
        least: if not 0, their smallest number then; ``layers`` is the largest.
        fragments: with ``"named"``, of each bucket the names of its modules and parameters.
    """

    kind: str = "buffer"
    bucket_bytes: int = 25 << 20
    first_bytes: int = 0
    last_bytes: int = 0
    layers: int = 1
    elements: int = 8192
    measured: bool = False
    least: int = 0
    fragments: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How bucket sizes, and ``topologies`` if any, are tuned (`wingbeat.parts.TunedBuckets`)."""

    search: str
    low_bytes: int
    high_bytes: int
    trials: int = 10
    steps: int = 10
    drift: float = 1.5
    file: str = ""
    topologies: tuple[str, ...] = ()


class LayerPositions(NamedTuple):
    """Positions of buckets among the layers of a model.

    Attributes:
        first: for each bucket in forward order, the position of its first layer, from 1.
        layers: number of layers.
    """

    first: tuple[int, ...]
    layers: int

"""The words every other module speaks. No torch here, so that plans can be tested alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wingbeat.errors import UsageError
from wingbeat.wires import Coded


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
        """Cut into consecutive pieces of at most ``size`` elements, the last one the shortest."""
        return [Span(s, min(s + size, self.stop)) for s in range(self.start, self.stop, size)]


def split(span: Span, weights: Sequence[float]) -> list[Span]:
    """Split ``span`` into consecutive spans whose lengths follow ``weights``.

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
    """One block per rank of a buffer of ``length`` elements: lengths differ by at most one."""
    return [Span(length * i // size, length * (i + 1) // size) for i in range(size)]


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``span`` of the buffer to rank ``peer`` over network interface ``interface``."""

    peer: int
    span: Span
    interface: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive ``span`` from ``peer``; add it to what is there (``reduce``) or overwrite."""

    peer: int
    span: Span
    reduce: bool
    interface: int = 0


_SHOWN_RANKS = 9
"""Of a longer list messages show the first ranks and the last one."""

Hop = Send | Recv
"""One worker's part in the passage of one span between two workers."""

Round = tuple[Hop, ...]
"""Hops that may run at once; a Send depends on every earlier round's Recv of its elements."""


SERIES = 1 << 40
"""Epochs in a series: whoever opens groups by rules of its own begins at a multiple of it."""


@dataclass(frozen=True, slots=True, init=False)
class Group:
    """Some of the workers, and which of their meetings this is.

    A value: two groups of the same ranks and epoch are equal. The order of ``ranks`` does not
    matter. ``epoch`` tells apart groups of the same ranks that come after one another; it grows,
    within a series.

    Raises:
        UsageError: there is no rank, a rank twice, or something that is no number from 0 on.

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
            raise UsageError(f"Group: rank {twice[0]} stands twice in ranks: list each once")
        if type(epoch) is not int or epoch < 0:
            raise UsageError(f"Group: epoch={epoch!r}: allowed are whole numbers from 0 on")
        object.__setattr__(self, "ranks", tuple(sorted(listed)))
        object.__setattr__(self, "epoch", epoch)

    @property
    def series(self) -> int:
        """Which epochs come before and after this one: those from a multiple of `SERIES` on."""
        return self.epoch // SERIES

    def __str__(self) -> str:
        shown = [str(rank) for rank in self.ranks]
        if len(shown) > _SHOWN_RANKS:
            shown[_SHOWN_RANKS - 1 :] = ["...", shown[-1]]
        return f"group ({', '.join(shown)}) of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a plan needs to know of one parameter.

    ``name`` as in ``named_parameters()``; ``dtype`` as torch prints it, without ``torch.``;
    ``itemsize`` in bytes; ``device`` as ``str(tensor.device)``; ``layer`` what the layer computes
    that has it: ``"fc"``, ``"conv"``, or empty for others.
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
        """Dtype and device: what all tensors of a bucket have in common."""
        return f"{self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """Parameters whose gradients travel together, as indices into the plan's tensor list."""

    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which tensors travel together, in the order in which their gradients become ready.

    All workers hold the same plan and launch its buckets in its order, so no negotiation is
    needed (DeAR, section III-B).
    """

    buckets: tuple[PlannedBucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Which tensors share a bucket: a rule for `wingbeat.planning.plans.make_plan`.

    ``kind`` is ``"buffer"`` (nearby tensors up to ``bucket_bytes``), ``"layers"`` (``layers``
    nearby layers), ``"elements"`` (nearby tensors until there are ``elements`` elements),
    ``"one"`` (all of them), ``"none"`` (every tensor alone) or ``"colayers"`` (``layers`` bundles
    of nearby layers, see `wingbeat.planning.colayers`). Colayers that are ``measured`` are made
    anew by what training has measured; with a ``least``, in so many to ``layers``. With
    ``"buffer"``, ``first_bytes`` and ``last_bytes`` are the sizes of the buckets that are ready
    first and last; towards the middle sizes double until ``bucket_bytes``. 0 means
    ``bucket_bytes``.
    """

    kind: str = "buffer"
    bucket_bytes: int = 25 << 20
    first_bytes: int = 0
    last_bytes: int = 0
    layers: int = 1
    elements: int = 8192
    measured: bool = False
    least: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How bucket sizes are tried out while training goes on (DeAR, section IV-B).

    ``search`` is ``"bo"``, ``"random"`` or ``"grid"``; sizes are in bytes. A trial is ``steps``
    iterations with one size. Sizes are tried anew when iterations come to take ``drift`` times as
    long, or as short, as right after tuning. With a ``file``, what was found is kept there, and
    taken from there. Where there are ``topologies``, each trial has one of them as well.
    """

    search: str
    low_bytes: int
    high_bytes: int
    trials: int = 10
    steps: int = 10
    drift: float = 1.5
    file: str = ""
    topologies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Merging:
    """How layers are merged by what they are measured to cost (OMGS-SGD, section IV).

    ``rule`` is ``"exact"``, ``"paper"`` (Algorithm 1, put right), ``"printed"`` (Algorithm 1 line
    by line), ``"wfbp"`` (MG-WFBP) or ``"tried"`` (the fastest, by a trial of whole iterations).
    Backward is measured over ``steps`` iterations; everything is measured anew when iterations come
    to take ``drift`` times as long, or as short, as right after planning. With a ``file``, what was
    measured is kept there, and taken from there.
    """

    rule: str
    steps: int = 10
    drift: float = 1.5
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdTuning:
    """How thresholds are tried out while training goes on (Geryon, section III-C).

    A trial is ``steps`` iterations with the same thresholds. With a ``file``, what was found is
    kept there, and taken from there.
    """

    steps: int = 5
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How gradients go to servers and sums come back (Geryon, sections III and IV).

    Attributes:
        count: how many servers; 0 for one on each host.
        whole: whether each bucket is placed on one server, in place of a shard on each.
        slice: the most elements in a slice; 0: shards are not cut.
        thresholds: levels of urgency that divide the classes of flows, falling; none: one class,
            or classes by kind of layer.
        coarse: whether there are two classes, fully connected layers in the second.
        tuning: how thresholds are tuned, which start at ``thresholds``; None where they are not.
        pushes: whether gradients are pushed in the classes in which their sums come back, and not
            all in the last.
        order: in which order a sender sends, see `methods.parameter_server.send_queue.Order`.
        shuffled: whether sums are pulled in a random order.
        encrypted: whether messages are.
        dense: whether sums come back in float32, or float64, where gradients travel as another
            dtype or through a codec.
    """

    count: int = 0
    whole: bool = False
    slice: int = 1 << 20
    thresholds: tuple[float, ...] = (0.5,)
    coarse: bool = False
    tuning: ThresholdTuning | None = None
    pushes: bool = True
    order: str = "ready"
    shuffled: bool = False
    encrypted: bool = True
    dense: bool = False

    @property
    def classes(self) -> int:
        """How many classes of flows there are."""
        return 2 if self.coarse else len(self.thresholds) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How far workers may be apart (Canary, section 5.3); see `Pace`.

    Attributes:
        s: iterations that a worker may be behind the fastest; None for any number.
        p: buckets that a worker must have exchanged not to have its iteration dropped; None for
            all of them, so that nothing is dropped; ``"auto"`` for 6 in 10 of them.
        encrypted: whether messages are.
        in_flight: rounds that a worker may be ahead of the sums where one is slow; None for as many
            as ``s``.
    """

    s: int | None
    p: int | str | None = None
    encrypted: bool = True
    in_flight: int | None = 2

    def exchanged(self, count: int) -> int:
        """Return p of so many buckets.

        >>> [Staleness(s=18, p="auto").exchanged(count) for count in (1, 4, 10)]
        [1, 2, 6]
        >>> Staleness(s=2).exchanged(10), Staleness(s=2, p=3).exchanged(10)
        (10, 3)
        """
        if self.p == "auto":
            return max(1, count * 6 // 10)
        return count if self.p is None else int(self.p)

    @property
    def synchronous(self) -> bool:
        """Whether nobody is ever ahead, so that an iteration's sum is there when it ends."""
        return self.s == 0 and self.p is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """How models are averaged between steps on local gradients (Ripples; local SGD; DiLoCo).

    Attributes:
        partners: with whom: ``"all"``; ``"pairs"``, a worker of the other half at a time; or how
            groups are made, a name of `wingbeat.methods.model_averaging.rules.POLICIES`.
        size: members of a random group.
        threshold: C_thres of the slowdown filter; None for no filter.
        every: steps from one average of a fragment to its next.
        delay: steps after which an average is taken over; 0: before the step returns.
        outer: learning rate and momentum of the outer optimizer; None where parameters become the
            average itself.
        state: whether what the optimizer remembers of each element is averaged with parameters.
        seed: of random choices.
        encrypted: whether messages are; parameters of groups never are.
    """

    partners: str
    size: int = 3
    threshold: int | None = 4
    every: int = 1
    delay: int = 0
    outer: tuple[float, float] | None = None
    state: bool = False
    seed: int = 0
    encrypted: bool = True

    @property
    def in_groups(self) -> bool:
        """Whether a worker meets some of the others at a time, and waits for them."""
        return self.partners not in ("all", "pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """A strategy's answers, as the engine wants them.

    ``schedule`` is a name of `wingbeat.schedules.BY_NAME`; gradients go along ``topology``, or to
    servers if there are ``servers``; ``wire`` is the dtype that gradients have on the links, empty
    for their own, or a codec; ``shard_optimizer`` updates each parameter on one worker only,
    ``server_updates`` on the servers; with ``partitions`` each worker sends one of so many parts of
    its gradients an iteration, 0 for as many as there are workers; with ``staleness`` workers make
    iterations of their own, and exchange gradients as these come; with ``averaging`` each makes
    steps on its own gradients, and parameters are averaged.
    """

    schedule: str
    topology: str
    fusion: Fusion
    tuning: Tuning | None = None
    merging: Merging | None = None
    wire: str | Coded = ""
    shard_optimizer: bool = False
    servers: Serving | None = None
    server_updates: bool = False
    partitions: int | None = None
    staleness: Staleness | None = None
    averaging: Averaging | None = None

    @property
    def lockstep(self) -> bool:
        """Whether all workers make the same iterations: each may wait for all in each of them."""
        return self.staleness is None and self.averaging is None

    @property
    def returns(self) -> bool:
        """Whether a worker that was started again alone is let in."""
        if self.averaging is None:
            return self.staleness is not None
        # Without a generator nobody is there who could let it in.
        return self.averaging.partners not in ("static", "pairs")

    @property
    def divides(self) -> bool:
        """Whether no worker has the whole optimizer."""
        return self.shard_optimizer or self.server_updates

"""Exchanges other than along a topology: by servers, in parts, or with bounded staleness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from wingbeat import topologies
from wingbeat.errors import UsageError, unknown
from wingbeat.settings import READ, SIZE, Named, Settings, is_number
from wingbeat.traits import KEPT, ONCE, OWN, ROUNDS, WHOLE, Part
from wingbeat.types import Serving, Staleness, ThresholdTuning

ASKED = ("forward", "random")
"""Orders of sums that workers request; sums that are sent unrequested have none."""

ORDERS = ("ready", "urgent", *ASKED)
BACKS = ("wire", "dense")
PLACEMENTS = ("sharded", "whole")
CLASSES = 4
"""The largest number of traffic classes."""

AUTO = "auto"

COARSE, TUNED = "coarse", "tuned"
Threshold = float | tuple[float, ...] | str
THRESHOLD: Threshold = 0.5
"""The default threshold between traffic classes, also of the presets."""

STEPS = 5


def threshold_of(text: str) -> Threshold:
    """Parse a threshold of the command line: a name, a number, or several numbers with ``+``.

    >>> threshold_of("tuned"), threshold_of("0.5"), threshold_of("0.8+0.4")
    ('tuned', 0.5, (0.8, 0.4))

    Raises:
        UsageError: the text is none of these.
    """
    if text in (COARSE, TUNED):
        return text
    try:
        levels = tuple(map(float, text.split("+")))
    except ValueError:
        raise UsageError(
            f"threshold={text!r}: allowed are a number from 1 to 0, several that fall, such as "
            f"0.8+0.4, {COARSE} and {TUNED}"
        ) from None
    return levels if len(levels) > 1 else levels[0]


@dataclass(frozen=True, kw_only=True, repr=False)
class Servers(Part, Settings):
    """Parameter servers sum the gradients of all workers (Geryon, sections III and IV).

    wingbeat starts the servers with the job and stops them with it.

    Args:
        count: number of servers; 0: one on each host, next to the workers.
        placement: ``"sharded"``, a part of every bucket on each server; or ``"whole"``, each bucket
            on one server, in turn.
        slice: largest number of elements that a server sums at a time; 0: shards are not cut. Whole
            buckets (``placement="whole"``) are not cut either.
        classes: number of traffic classes, 1 to 4, each with a priority in the network (DSCP); 1:
            no priorities.
        threshold: a bucket is sent in a more urgent class if the urgency of its first layer,
            ``1 - l/L`` for the ``l``-th of ``L`` layers in forward order, exceeds this; decreasing
            numbers for more than two classes. ``"tuned"``: tuned during training (section III-C).
            ``"coarse"``: two classes, fully connected layers in the second (section III-B).
        steps: iterations for which each threshold is tried, with ``"tuned"``.
        file: file in which rank 0 stores tuned thresholds; a run that finds the file does not tune.
        pushes: send gradients to the servers in these classes too, instead of in the last class.
        order: which sum is sent first. ``"ready"``: in order of completion. ``"urgent"``: by the
            time at which forward needs it, with few bytes in flight (P3). With ``pull="start"``,
            where workers request sums, also ``"forward"``: strictly in forward order (TICTAC), or
            ``"random"``: in the order of requests (TensorFlow).
        back: encoding of sums if ``compression`` is not ``"fp32"``: ``"wire"``, as the gradients;
            or ``"dense"``, float32 (float64 for sums in float64).
        encrypted: encrypt messages. Without encryption, anyone who can observe the traffic can
            forge them.

    Raises:
        UsageError: a value is out of range.
    """

    has: ClassVar[frozenset[str]] = frozenset({KEPT})

    count: int = 0
    placement: str = "sharded"
    slice: int = field(default=1 << 20, metadata=SIZE)
    classes: int = 2
    threshold: Threshold = field(default=THRESHOLD, metadata={READ: threshold_of})
    steps: int = STEPS
    file: str = ""
    pushes: bool = True
    order: str = "ready"
    back: str = "wire"
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_count("count", 0, 1024)
        self.check_name("placement", PLACEMENTS)
        self.check_count("slice", 0, 2**40)
        self.check_count("classes", 1, CLASSES)
        self.check_flag("pushes")
        self.check_name("order", ORDERS)
        self.check_name("back", BACKS)
        self.check_flag("encrypted")
        self.check_count("steps", 1, 10_000)
        self.check_file("file")
        self.thresholds()
        if self.file and self.threshold != TUNED:
            raise UsageError(
                f"Servers(threshold={self.threshold!r}, file={self.file!r}): only thresholds that "
                f"are tuned have a file; allowed is threshold={TUNED!r}, or no file"
            )

    @property
    def needs(self) -> frozenset[str]:
        """A schedule that sums each bucket in one operation."""
        return frozenset({ONCE})

    def thresholds(self) -> tuple[float, ...]:
        """Return the initial thresholds between the classes; empty for classes by kind of layer.

        Raises:
            UsageError: the threshold does not fit the number of classes.
        """
        given = self.threshold
        if isinstance(given, str):
            return self._named_thresholds(given)
        levels = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if self.classes == 1:
            if given != THRESHOLD:
                raise UsageError(
                    f"Servers(classes=1, threshold={given!r}): a threshold divides two classes or "
                    f"more; allowed are classes from 2 to {CLASSES}, or no threshold"
                )
            return ()
        fine = len(levels) == self.classes - 1 and all(is_number(v) and 0 <= v <= 1 for v in levels)
        if not fine or list(levels) != sorted(set(levels), reverse=True):
            raise UsageError(
                f"Servers(classes={self.classes}, threshold={given!r}): allowed are "
                f"{self.classes - 1} falling numbers from 1 to 0, {TUNED!r}, and with two classes "
                f"{COARSE!r}"
            )
        return levels

    def _named_thresholds(self, name: str) -> tuple[float, ...]:
        if name not in (COARSE, TUNED):
            raise unknown("threshold", name, (COARSE, TUNED), where=f"Servers(threshold={name!r})")
        fine = self.classes == 2 if name == COARSE else self.classes > 1
        if not fine:
            raise UsageError(
                f"Servers(classes={self.classes}, threshold={name!r}): allowed with it are "
                + ("classes=2" if name == COARSE else f"classes from 2 to {CLASSES}")
            )
        if name == COARSE:
            return ()
        return tuple(1 - (i + 1) / self.classes for i in range(self.classes - 1))

    def serving(self) -> Serving:
        """Return the options in the form that the engine reads."""
        random, tuned = self.order == "random", self.threshold == TUNED
        return Serving(
            count=self.count,
            whole=self.placement == "whole",
            slice=self.slice,
            thresholds=self.thresholds(),
            coarse=self.threshold == COARSE,
            tuning=ThresholdTuning(steps=self.steps, file=self.file) if tuned else None,
            pushes=self.pushes,
            order="ready" if random else self.order,
            shuffled=random,
            encrypted=self.encrypted,
            dense=self.back == "dense",
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Partial(Part, Settings):
    """Each worker sends a part of its gradients per iteration and accumulates the rest (Ako).

    Partial gradient exchange (Watcharapichat et al., SoCC 2016), in lockstep: an iteration ends
    when all parts sent in it have arrived. A worker applies its own gradients completely and at
    once, and those of other workers when they arrive. Every gradient is applied once on every
    worker, but at different times, so weights differ between workers.

    Args:
        partitions: number of parts of each bucket, of which one is sent per iteration, in turn,
            with all gradients accumulated for it. 0: the number of workers, so that a worker sends
            at most the size of its gradients, and a gradient reaches all workers within that number
            of iterations.
        topology: name of the topology along which parts are sent.

    Raises:
        UsageError: a number or a name is out of range.
    """

    exact: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False
    bound: ClassVar[str] = "partial"

    partitions: int = 0
    topology: str = "mesh"

    def __post_init__(self) -> None:
        self.check_count("partitions", 0, 4096)
        topologies.get(str(self.topology))

    @property
    def needs(self) -> frozenset[str]:
        """A schedule that waits for each bucket before the step."""
        return frozenset({WHOLE})


def count_of(text: str) -> int | None:
    """Parse a number, or ``none``.

    >>> count_of("18"), count_of("none")
    (18, None)
    """
    return None if text.lower() == "none" else int(text)


def bundles_of(text: str) -> int | str:
    """Parse a number of colayers, or ``auto``.

    >>> bundles_of("4"), bundles_of("auto")
    (4, 'auto')
    """
    return AUTO if text.lower() == AUTO else int(text)


def colayers_of(text: str) -> int | str | None:
    """Parse a number of colayers, ``none`` or ``auto``.

    >>> colayers_of("6"), colayers_of("none"), colayers_of("auto")
    (6, None, 'auto')
    """
    return AUTO if text.lower() == AUTO else count_of(text)


@dataclass(frozen=True, kw_only=True, repr=False)
class Bounded(Part, Settings):
    """Workers exchange pieces of buckets while they are a bounded number of iterations apart.

    Canary (sections 4.3, 4.4.2 and 5). Every worker sums one piece of each bucket over the
    gradients that have arrived, and all workers apply these sums in the same order. Synchronous
    only with ``s=0`` and ``p`` None or ``"auto"``.

    Args:
        s: iterations that a worker may be behind the fastest. None (``none`` in textual form): no
            bound.
        p: a worker that is further behind drops its iteration, unless it has sent this number of
            its buckets; then the others wait for the rest. ``"auto"``: 6 of 10 (section 6.6), in
            proportion for other counts; nothing is dropped if ``s`` is 0 or None. None: nothing is
            dropped, and the others wait.
        encrypted: encrypt messages. Without encryption, anyone who can observe the traffic can
            forge them.
        in_flight: rounds of sums that may be outstanding when an iteration begins while another
            worker is slow; one if no worker is slow. None (``none``): always as many as ``s``.

    Raises:
        UsageError: a number is out of range, or ``p`` is set without ``s``.
    """

    has: ClassVar[frozenset[str]] = frozenset({ROUNDS})

    s: int | None = field(default=2, metadata={READ: count_of})
    p: int | str | None = field(default=None, metadata={READ: colayers_of})
    encrypted: bool = True
    in_flight: int | None = field(default=2, metadata={READ: count_of})

    def __post_init__(self) -> None:
        check_thresholds(self)
        self.check_flag("encrypted")

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether weights equal DDP's: no worker runs ahead, and nothing is dropped."""
        return self.s == 0 and self.p in (None, AUTO)

    @property
    def synchronous(self) -> bool:  # type: ignore[override]
        """Whether an update uses all workers' gradients of its own iteration."""
        return self.exact

    @property
    def bound(self) -> str:
        """The lower bound of an iteration: that of whole all-reduces if no worker runs ahead."""
        return "whole" if self.exact else "stale"

    @property
    def needs(self) -> frozenset[str]:
        """A schedule in which no step waits for all workers."""
        return frozenset({OWN})

    def staleness(self) -> Staleness:
        """Return the options in the form that the engine reads."""
        p = None if self.p == AUTO and not self.s else self.p
        return Staleness(s=self.s, p=p, encrypted=self.encrypted, in_flight=self.in_flight)


def check_thresholds(options: Any) -> None:
    """Raise a `UsageError` unless ``s``, ``p`` and ``in_flight`` are valid together."""
    options.check_count_if_any("s", 0, 1_000_000)
    if options.p != AUTO:
        options.check_count_if_any("p", 1, 100_000)
    options.check_count_if_any("in_flight", 1, 1_000_000)
    if options.s is None and options.p not in (None, AUTO):
        raise UsageError(
            f"{type(options).__name__}(s=None, p={options.p!r}): without a bound nobody is out of "
            "date, and nothing is dropped; leave p out, or give s"
        )


BY_NAME: Mapping[str, Named[Servers | Partial | Bounded]] = {
    "servers": Named(Servers, "count", int),
    "partial": Named(Partial, "partitions", int),
    "bounded": Named(Bounded, "s", count_of),
}

"""How gradients are exchanged where no topology says it: by servers, in parts, as they come."""

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
"""Orders of sums that are asked for; those that come by themselves have none."""

ORDERS = ("ready", "urgent", *ASKED)
BACKS = ("wire", "dense")
PLACEMENTS = ("sharded", "whole")
CLASSES = 4
"""The most classes of flows that there are."""

AUTO = "auto"

COARSE, TUNED = "coarse", "tuned"
Threshold = float | tuple[float, ...] | str
THRESHOLD: Threshold = 0.5
"""What divides the classes unless it is said: here and in the presets."""

STEPS = 5


def threshold_of(text: str) -> Threshold:
    """Read a threshold as the command line has it: a name, a number, or several with ``+``.

    >>> threshold_of("tuned"), threshold_of("0.5"), threshold_of("0.8+0.4")
    ('tuned', 0.5, (0.8, 0.4))

    Raises:
        UsageError: it is none of them.
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
    """Parameter servers sum what all workers push (Geryon, sections III and IV).

    wingbeat starts and ends them with the job.

    Args:
        count: how many; 0: one on each host, together with a worker.
        placement: ``"sharded"``, a part of every bucket on each server; or ``"whole"``, every
            bucket on one of them in turn.
        slice: the most elements of what a server sums at a time; 0: shards are not cut. Whole
            buckets (``placement="whole"``) are not cut either.
        classes: of flows, 1 to 4, each with a priority that the network honours (DSCP). 1: none.
        threshold: a bucket travels in a more urgent class if the urgency of its first layer,
            ``1 - l/L`` for the ``l``-th of ``L`` in the order of forward, is above this; for more
            than two classes, falling numbers. ``"tuned"``: found out while training goes on
            (section III-C). ``"coarse"``: two classes, fully connected layers in the second
            (section III-B).
        steps: iterations in which each threshold is tried, with ``"tuned"``.
        file: where rank 0 keeps the thresholds that were found; a run that finds it there does not
            tune.
        pushes: whether gradients go to the servers in these classes too, and not in the last.
        order: which sum a sender sends first: ``"ready"``, as they come; ``"urgent"``, by when
            forward needs it, with little under way (P3); and of sums that are asked for
            (``pull="start"``) also ``"forward"``, in that order alone (TICTAC), or ``"random"``,
            as workers happen to ask (TensorFlow).
        back: what sums come back as where the wire is not ``"fp32"``: ``"wire"``, the same as
            gradients; or ``"dense"``, in float32 (float64 where that is summed).
        encrypted: whether messages are; without it whoever sees the traffic can send in them.

    Raises:
        UsageError: a value out of range.
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
        """A schedule that has each bucket summed at once."""
        return frozenset({ONCE})

    def thresholds(self) -> tuple[float, ...]:
        """Return what divides the classes at first; nothing where they go by kind of layer.

        Raises:
            UsageError: what is given does not divide so many classes.
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
        """Return the same for the engine."""
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
    """Each worker sends the others a part of its gradients an iteration, and keeps the rest (Ako).

    Partial gradient exchange (Watcharapichat et al., SoCC 2016), in step: an iteration ends when
    what was sent in it has arrived. A worker applies its own gradients whole and at once, and what
    the others send when it comes. So every gradient is applied once on every worker, at different
    times: weights differ between workers, and are nobody's but each worker's own.

    Args:
        partitions: of each bucket, of which one is sent an iteration, another one the next time;
            what was gathered for it is sent at once. 0: as many as there are workers, so that a
            worker sends no more than its gradients' bytes whatever the number of workers, and a
            gradient reaches everyone within as many iterations.
        topology: along which connections.

    Raises:
        UsageError: a number or a name out of range.
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
    """Read a number, or ``none``.

    >>> count_of("18"), count_of("none")
    (18, None)

    Raises:
        ValueError: it is neither.
    """
    return None if text.lower() == "none" else int(text)


def bundles_of(text: str) -> int | str:
    """Read a number of colayers, or ``auto``.

    >>> bundles_of("4"), bundles_of("auto")
    (4, 'auto')

    Raises:
        ValueError: it is neither.
    """
    return AUTO if text.lower() == AUTO else int(text)


def colayers_of(text: str) -> int | str | None:
    """Read a number of colayers, ``none`` or ``auto``.

    >>> colayers_of("6"), colayers_of("none"), colayers_of("auto")
    (6, None, 'auto')

    Raises:
        ValueError: it is none of them.
    """
    return AUTO if text.lower() == AUTO else count_of(text)


@dataclass(frozen=True, kw_only=True, repr=False)
class Bounded(Part, Settings):
    """Workers exchange pieces of buckets among themselves, up to so many iterations apart.

    Canary (sections 4.3, 4.4.2 and 5). Every worker sums one piece of each bucket of what has come,
    and all apply these sums in the same order. Not synchronous, but with ``s=0`` and all of ``p``.

    Args:
        s: iterations that a worker may be behind the fastest; None (``none`` where strategies are
            spelled): any number.
        p: a worker that is further behind drops its iteration, unless it has sent so many of its
            buckets; then the others wait for the rest. ``"auto"``: 6 of 10 (section 6.6), as many
            in proportion of others, and nothing is dropped where ``s`` is 0 or None. None: nothing
            is dropped, and the others wait.
        encrypted: whether messages are; without it whoever sees the traffic can send in them.
        in_flight: rounds that a worker may be ahead of the sums while another is slow; one while
            nobody is. None (``none``): as many as ``s``, whoever is slow.

    Raises:
        UsageError: a number out of range, or ``p`` without a bound that it would belong to.
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
        """Whether weights stay DDP's: if nobody is ahead, and nothing is dropped."""
        return self.s == 0 and self.p in (None, AUTO)

    @property
    def synchronous(self) -> bool:  # type: ignore[override]
        """Whether an update has all workers' gradients of its own iteration."""
        return self.exact

    @property
    def bound(self) -> str:
        """Which bound holds: where nobody is ahead, that of whole all-reduces."""
        return "whole" if self.exact else "stale"

    @property
    def needs(self) -> frozenset[str]:
        """A schedule in which nobody waits for all."""
        return frozenset({OWN})

    def staleness(self) -> Staleness:
        """Return the thresholds for the engine."""
        p = None if self.p == AUTO and not self.s else self.p
        return Staleness(s=self.s, p=p, encrypted=self.encrypted, in_flight=self.in_flight)


def check_thresholds(options: Any) -> None:
    """Raise a `UsageError` unless the thresholds are some of bounded staleness."""
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

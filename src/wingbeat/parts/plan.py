"""Which tensors travel together: a rule for buckets, and how its numbers are found while training.

Sizes are in MB of 2**20 bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from wingbeat.errors import UsageError
from wingbeat.settings import SIZE, Named, Settings
from wingbeat.traits import ROUNDS, Part
from wingbeat.types import Fusion, Merging, Tuning

SEARCHES = ("bo", "random", "grid")
TOPOLOGIES = ("ring", "mesh", "doubling")
"""Those that any workers can have, whatever joins them."""

RULES = ("tried", "exact", "paper", "printed", "wfbp")


class PlanPart(Part, Settings, ABC):
    """Which tensors travel together; a subclass is a frozen dataclass that has `fusion`."""

    @abstractmethod
    def fusion(self) -> Fusion:
        """Return the rule that the first buckets are made by."""

    def tuning(self) -> Tuning | None:
        """Return how bucket sizes are tried out; None where they are not."""
        return None

    def merging(self) -> Merging | None:
        """Return how layers are merged by what is measured; None where they are not."""
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class FixedBuckets(PlanPart):
    """Nearby tensors up to a size, as DDP has it (DeAR-FB).

    Args:
        mb: bucket size in MB (1 MB = 2**20 bytes); a parameter that is larger travels alone.
        first_mb: size of the bucket that is ready first; towards the middle sizes double until
            ``mb``. 0: ``mb``.
        last_mb: the same for the bucket that is ready last, whose exchange nothing hides.

    Raises:
        UsageError: a value out of range.
    """

    mb: float = field(default=25.0, metadata=SIZE)
    first_mb: float = field(default=1.0, metadata=SIZE)
    last_mb: float = field(default=0.0, metadata=SIZE)

    def __post_init__(self) -> None:
        self.check_size("mb")
        for key in ("first_mb", "last_mb"):
            self.check_size(key, zero=True)

    def fusion(self) -> Fusion:
        """Return the rule that the first buckets are made by."""
        return Fusion(
            bucket_bytes=in_bytes(self.mb),
            first_bytes=in_bytes(self.first_mb),
            last_bytes=in_bytes(self.last_mb),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class TunedBuckets(PlanPart):
    """Buckets whose size is tuned while training goes on (DeAR, section IV-B).

    Args:
        search: ``"bo"`` (Bayesian optimisation), ``"random"`` or ``"grid"``.
        mb: the size that tuning starts with.
        first_mb: size of the bucket that is ready first, whatever is tried; 0: the one tried.
        last_mb: the same for the bucket that is ready last.
        min_mb: smallest size that is tried.
        max_mb: largest size that is tried.
        trials: sizes that are tried before it is decided.
        steps: iterations in a trial.
        drift: tune anew when iterations take this many times as long, or as short, as right after
            tuning.
        topology: whether each trial also has one of the topologies ``"ring"``, ``"mesh"`` and
            ``"doubling"``, beginning with the strategy's own, so that both are found together.
        file: where rank 0 keeps what was found; a run that finds it there does not tune at first.

    Raises:
        UsageError: a value out of range.
    """

    search: str = "bo"
    mb: float = field(default=25.0, metadata=SIZE)
    first_mb: float = field(default=0.0, metadata=SIZE)
    last_mb: float = field(default=0.0, metadata=SIZE)
    min_mb: float = field(default=1.0, metadata=SIZE)
    max_mb: float = field(default=100.0, metadata=SIZE)
    trials: int = 10
    steps: int = 10
    drift: float = 1.5
    topology: bool = False
    file: str = ""

    def __post_init__(self) -> None:
        self.check_name("search", SEARCHES)
        self.check_flag("topology")
        for key in ("mb", "min_mb", "max_mb"):
            self.check_size(key)
        for key in ("first_mb", "last_mb"):
            self.check_size(key, zero=True)
        for key in ("trials", "steps"):
            self.check_count(key, 1, 10_000)
        check_drift(self)
        self.check_file("file")
        check_range(self)

    def fusion(self) -> Fusion:
        """Return the rule that the first buckets are made by."""
        return Fusion(
            bucket_bytes=in_bytes(self.mb),
            first_bytes=in_bytes(self.first_mb),
            last_bytes=in_bytes(self.last_mb),
        )

    def tuning(self) -> Tuning:
        """Return how bucket sizes are tried out."""
        return Tuning(
            search=self.search,
            low_bytes=in_bytes(self.min_mb),
            high_bytes=in_bytes(self.max_mb),
            trials=self.trials,
            steps=self.steps,
            drift=self.drift,
            file=self.file,
            topologies=TOPOLOGIES if self.topology else (),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Layers(PlanPart):
    """A number of nearby layers in each bucket (DeAR-NL).

    Raises:
        UsageError: a ``count`` out of range.
    """

    count: int = 4

    def __post_init__(self) -> None:
        self.check_count("count", 1, 10_000)

    def fusion(self) -> Fusion:
        """Return the rule that the first buckets are made by."""
        return Fusion(kind="layers", layers=self.count)


@dataclass(frozen=True, kw_only=True, repr=False)
class Colayers(PlanPart):
    """Layers that follow each other, bundled by kind and size into so many buckets (Canary, 4.3.2).

    Where a model has fewer layers, there are as many buckets.

    Args:
        count: how many.
        measured: whether they are bundled anew, by what the first iterations have measured.
        least: then there may be fewer than ``count``, so many at least; 0: exactly ``count``.

    Raises:
        UsageError: a number out of range, or ``least`` without ``measured``.
    """

    count: int = 10
    measured: bool = False
    least: int = 0

    def __post_init__(self) -> None:
        self.check_count("count", 1, 10_000)
        self.check_flag("measured")
        self.check_count("least", 0, self.count if self.measured else 0)

    @property
    def needs(self) -> frozenset[str]:
        """Where they are measured, workers that settle."""
        return frozenset({ROUNDS} if self.measured else ())

    def fusion(self) -> Fusion:
        """Return the rule that the buckets are made by."""
        return Fusion(kind="colayers", layers=self.count, measured=self.measured, least=self.least)


@dataclass(frozen=True, kw_only=True, repr=False)
class Elements(PlanPart):
    """Nearby tensors until there are so many elements (MGS-SGD).

    Raises:
        UsageError: a ``count`` out of range.
    """

    count: int = field(default=8192, metadata=SIZE)

    def __post_init__(self) -> None:
        self.check_count("count", 1, 2**40)

    def fusion(self) -> Fusion:
        """Return the rule that the first buckets are made by."""
        return Fusion(kind="elements", elements=self.count)


@dataclass(frozen=True, kw_only=True, repr=False)
class PerTensor(PlanPart):
    """Each tensor alone: no tensor fusion."""

    def fusion(self) -> Fusion:
        """Return the rule that the first buckets are made by."""
        return Fusion(kind="none")


@dataclass(frozen=True, kw_only=True, repr=False)
class OneBucket(PlanPart):
    """All tensors together, when backward is over."""

    def fusion(self) -> Fusion:
        """Return the rule that the first buckets are made by."""
        return Fusion(kind="one")


@dataclass(frozen=True, kw_only=True, repr=False)
class Merged(PlanPart):
    """Layers merged by what backward, codec and links are measured to cost (OMGS-SGD, section IV).

    Args:
        rule: ``"exact"``, the plan with the shortest iteration of all, as predicted; ``"paper"``,
            Algorithm 1 with its lines put right by the equations that it stands for;
            ``"printed"``, Algorithm 1 line by line; ``"wfbp"``, MG-WFBP, which knows no codec; or
            ``"tried"``, of ``"exact"``, ``"paper"`` and all in one bucket the one with which whole
            iterations are shortest.
        steps: iterations in which backward is measured.
        drift: measure and merge anew when iterations take this many times as long, or as short,
            as right after planning.
        file: where rank 0 keeps what was measured; a run that finds it there measures nothing.

    Raises:
        UsageError: a value out of range.
    """

    rule: str = "tried"
    steps: int = 10
    drift: float = 1.5
    file: str = ""

    def __post_init__(self) -> None:
        self.check_name("rule", RULES)
        self.check_count("steps", 1, 10_000)
        check_drift(self)
        self.check_file("file")

    def fusion(self) -> Fusion:
        """Return one bucket: until all is measured, nothing is to disturb the measuring."""
        return Fusion(kind="one")

    def merging(self) -> Merging:
        """Return how layers are merged by what is measured."""
        return Merging(rule=self.rule, steps=self.steps, drift=self.drift, file=self.file)


def in_bytes(mb: float) -> int:
    """Return a size in MB in bytes: at least 1 for any above 0.

    >>> in_bytes(0), in_bytes(1e-9), in_bytes(1)
    (0, 1, 1048576)
    """
    return max(1, int(mb * 2**20)) if mb else 0


def check_drift(settings: Settings) -> None:
    """Raise a `UsageError` unless ``drift`` is a number above 1."""
    settings.check_number("drift", "numbers above 1", lambda v: v > 1)


def check_range(tuned: Settings) -> None:
    """Raise a `UsageError` unless ``min_mb`` is below ``max_mb``."""
    low, high = getattr(tuned, "min_mb"), getattr(tuned, "max_mb")  # noqa: B009 - two classes
    if not low < high:
        raise UsageError(
            f"{type(tuned).__name__}(min_mb={low!r}, max_mb={high!r}): min_mb must be the smaller"
        )


BY_NAME: Mapping[str, Named[PlanPart]] = {
    "fixed": Named(FixedBuckets, "mb"),
    **{search: Named(partial(TunedBuckets, search=search)) for search in SEARCHES},
    "layers": Named(Layers, "count", int),
    "elements": Named(Elements, "count", int),
    "colayers": Named(Colayers, "count", int),
    "none": Named(PerTensor),
    "one": Named(OneBucket),
    "merged": Named(Merged, "rule", str),
}
"""Names of plans, which may be followed by ``@`` and a value of the option that is named here."""

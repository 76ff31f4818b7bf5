"""Which tensors are sent together: rules for buckets, and their tuning during training.

Sizes are in MB of 2**20 bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from wingbeat.compression import CodecOptions, Sketch
from wingbeat.settings import SIZE, Settings
from wingbeat.traits import MEANS, ROUNDS, Part
from wingbeat.types import Fusion, Tuning

SEARCHES = ("bo", "random", "grid")
TOPOLOGIES = ("ring", "mesh", "doubling")
"""Topologies that any number of workers can use on any network."""

RULES = ("tried", "exact", "paper", "printed", "wfbp")

COLAYERS = 10
"""Number of colayers in Canary's figures (section 6)."""

MIN_COLAYERS = 4
"""Fewest colayers where their number is chosen, as in the paper's example. With fewer, too little
is sent during backward."""


class PlanPart(Part, Settings, ABC):
    """Which tensors are sent together; a subclass is a frozen dataclass that defines `fusion`."""

    @abstractmethod
    def fusion(self) -> Fusion:
        """Return the rule for the initial buckets."""

    def tuning(self) -> Tuning | None:
        """Return how bucket sizes are tuned; None if they are not."""
        return None

    def merging(self) -> Merged | None:
        """Return the plan itself if layers are merged by measured costs, else None."""
        return None

    def choosing(self) -> Chosen | None:
        """Return the plan itself if it is chosen together with a schedule, else None."""
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class FixedBuckets(PlanPart):
    """Adjacent tensors up to a size, as in DDP (DeAR-FB).

    Args:
        mb: bucket size in MB (1 MB = 2**20 bytes); a larger parameter is sent alone.
        first_mb: size in MB of the bucket that is ready first; sizes double towards the middle up
            to ``mb``. 0: ``mb``.
        last_mb: the same for the bucket that is ready last, whose exchange overlaps with nothing.

    Raises:
        UsageError: a value is out of range.
    """

    mb: float = field(default=25.0, metadata=SIZE)
    first_mb: float = field(default=1.0, metadata=SIZE)
    last_mb: float = field(default=0.0, metadata=SIZE)

    def __post_init__(self) -> None:
        self.check_size("mb")
        for key in ("first_mb", "last_mb"):
            self.check_size(key, zero=True)

    def fusion(self) -> Fusion:
        """Return the rule for the buckets."""
        return Fusion(
            bucket_bytes=in_bytes(self.mb),
            first_bytes=in_bytes(self.first_mb),
            last_bytes=in_bytes(self.last_mb),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class TunedBuckets(PlanPart):
    """Buckets whose size is tuned during training (DeAR, section IV-B).

    Args:
        search: ``"bo"`` (Bayesian optimisation), ``"random"`` or ``"grid"``.
        mb: initial size in MB.
        first_mb: size in MB of the bucket that is ready first, in all trials; 0: the trial's size.
        last_mb: the same for the bucket that is ready last.
        min_mb: smallest size that is tried, in MB.
        max_mb: largest size that is tried, in MB.
        trials: number of sizes that are tried.
        steps: iterations of a trial.
        drift: tune again when iterations become slower or faster than after tuning by this factor.
        topology: tune the topology, one of ``"ring"``, ``"mesh"`` and ``"doubling"``, together with
            the size, starting with the strategy's own.
        file: file in which rank 0 stores the result; a run that finds the file starts without
            tuning.

    Raises:
        UsageError: a value is out of range.
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
        if not self.min_mb < self.max_mb:
            raise self.refusal("min_mb must be the smaller", "min_mb", "max_mb")

    def fusion(self) -> Fusion:
        """Return the rule for the initial buckets."""
        return Fusion(
            bucket_bytes=in_bytes(self.mb),
            first_bytes=in_bytes(self.first_mb),
            last_bytes=in_bytes(self.last_mb),
        )

    def tuning(self) -> Tuning:
        """Return how bucket sizes are tuned."""
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
    """A fixed number of adjacent layers in each bucket (DeAR-NL).

    Raises:
        UsageError: ``count`` is out of range.
    """

    count: int = 4

    def __post_init__(self) -> None:
        self.check_count("count", 1, 10_000)

    def fusion(self) -> Fusion:
        """Return the rule for the buckets."""
        return Fusion(kind="layers", layers=self.count)


@dataclass(frozen=True, kw_only=True, repr=False)
class Colayers(PlanPart):
    """Consecutive layers, bundled by kind and size into a number of buckets (Canary, 4.3.2).

    A model with fewer layers has one bucket per layer.

    Args:
        count: number of buckets.
        measured: bundle layers again, once, by measurements of the first iterations.
        least: with ``measured``, the smallest number of buckets that may be chosen; 0: ``count``.

    Raises:
        UsageError: a number is out of range, or ``least`` is set without ``measured``.
    """

    count: int = COLAYERS
    measured: bool = False
    least: int = 0

    def __post_init__(self) -> None:
        self.check_count("count", 1, 10_000)
        self.check_flag("measured")
        self.check_count("least", 0, self.count if self.measured else 0)

    @property
    def needs(self) -> frozenset[str]:
        """With ``measured``, an exchange in rounds, in which workers can agree."""
        return frozenset({ROUNDS} if self.measured else ())

    def fusion(self) -> Fusion:
        """Return the rule for the buckets."""
        return Fusion(kind="colayers", layers=self.count, measured=self.measured, least=self.least)


@dataclass(frozen=True, kw_only=True, repr=False)
class Elements(PlanPart):
    """Adjacent tensors up to a number of elements (MGS-SGD).

    Raises:
        UsageError: ``count`` is out of range.
    """

    count: int = field(default=8192, metadata=SIZE)

    def __post_init__(self) -> None:
        self.check_count("count", 1, 2**40)

    def fusion(self) -> Fusion:
        """Return the rule for the buckets."""
        return Fusion(kind="elements", elements=self.count)


@dataclass(frozen=True, kw_only=True, repr=False)
class PerTensor(PlanPart):
    """One tensor in each bucket: no tensor fusion."""

    def fusion(self) -> Fusion:
        """Return the rule for the buckets."""
        return Fusion(kind="none")


@dataclass(frozen=True, kw_only=True, repr=False)
class OneBucket(PlanPart):
    """All tensors in one bucket, sent after backward."""

    def fusion(self) -> Fusion:
        """Return the rule for the bucket."""
        return Fusion(kind="one")


@dataclass(frozen=True, kw_only=True, repr=False)
class Fragments(PlanPart):
    """Parameters by name, for models that are averaged one fragment at a time.

    Args:
        names: of each fragment the names of its modules and parameters, as in
            ``model.named_parameters()``: ``"layers.1"`` has all parameters whose names begin with
            ``layers.1.``, unless a longer name has them.

    Raises:
        UsageError: ``names`` is no sequence of sequences of names, or a name is given twice.
    """

    names: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self._checked())

    def _checked(self) -> tuple[tuple[str, ...], ...]:
        allowed = "lists of lists of names, such as [['embedding', 'layers.0'], ['layers.1']]"
        if not _is_list(self.names) or not all(map(_is_list, self.names)):
            raise self.refusal(f"allowed are {allowed}", "names")
        found = tuple(map(tuple, self.names))
        each = [name for names in found for name in names]
        if not each or not all(found) or not all(name and isinstance(name, str) for name in each):
            raise self.refusal(f"allowed are {allowed}, with a name in each", "names")
        twice = next((name for name in each if each.count(name) > 1), "")
        if twice:
            raise self.refusal(f"{twice!r} is named twice; allowed is once", "names")
        return found

    @property
    def needs(self) -> frozenset[str]:
        """An exchange that averages models: buckets of gradients have one dtype each."""
        return frozenset({MEANS})

    def fusion(self) -> Fusion:
        """Return the rule for the buckets."""
        return Fusion(kind="named", fragments=self.names)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def fragments_of(text: str) -> int | tuple[tuple[str, ...], ...]:
    """Parse a number of fragments, or names with ``+`` between them and ``/`` between fragments.

    >>> fragments_of("4"), fragments_of("embedding+layers.0/layers.1")
    (4, (('embedding', 'layers.0'), ('layers.1',)))
    """
    if text.lstrip("-").isdecimal():
        return int(text)
    return tuple(tuple(part.split("+")) for part in text.split("/"))


@dataclass(frozen=True, kw_only=True, repr=False)
class Merged(PlanPart):
    """Layers merged by the measured costs of backward, codec and network (OMGS-SGD, section IV).

    Args:
        rule: ``"exact"``, the plan with the shortest predicted iteration. ``"paper"``, Algorithm 1,
            corrected by the equations that it implements. ``"printed"``, Algorithm 1 line by line.
            ``"wfbp"``, MG-WFBP, which ignores the codec. ``"tried"``, the fastest of ``"exact"``,
            ``"paper"`` and a single bucket in a trial of whole iterations.
        steps: iterations in which backward is measured.
        drift: measure and merge again when iterations become slower or faster than after planning
            by this factor.
        file: file in which rank 0 stores the measurements; a run that finds the file measures
            nothing.

    Raises:
        UsageError: a value is out of range.
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
        """Return one bucket, so that no exchange disturbs the measurement of backward."""
        return Fusion(kind="one")

    def merging(self) -> Merged:
        """Return the plan itself."""
        return self


class Candidate(NamedTuple):
    """What a trial of `Chosen` compares.

    Attributes:
        name: the call of the preset that trains in the same way.
        schedule: the name of its state machine in `wingbeat.schedules`.
        fusion: the rule for its buckets.
        topology: the name of its topology; empty: the strategy's own.
        codec: what gradients go through, the strategy's codec or one with fewer bits; None: none.
    """

    name: str
    schedule: str
    fusion: Fusion
    topology: str = ""
    codec: CodecOptions | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Chosen(PlanPart):
    """Buckets, schedule and topology, chosen by a trial of whole iterations (`wingbeat.Auto`).

    Needs the schedule `Decoupled`, with which training begins, updates of single buckets, and
    collectives. A codec of the strategy is tried too.

    Args:
        mb: largest bucket size that is tried, in MB.
        steps: iterations for which each candidate is timed in each of its turns.
        drift: choose again when iterations become slower or faster than after the choice by this
            factor.
        file: file in which rank 0 stores the choice; a run that finds the file tries nothing.

    Raises:
        UsageError: a value is out of range.
    """

    mb: float = field(default=25.0, metadata=SIZE)
    steps: int = 3
    drift: float = 1.5
    file: str = ""

    def __post_init__(self) -> None:
        self.check_size("mb")
        self.check_count("steps", 1, 10_000)
        check_drift(self)
        self.check_file("file")

    def fusion(self) -> Fusion:
        """Return the rule for the initial buckets, those of the first candidate."""
        return Fusion(bucket_bytes=in_bytes(self.mb))

    def choosing(self) -> Chosen:
        """Return the plan itself."""
        return self

    def candidates(
        self, topology: str = "", codec: CodecOptions | None = None
    ) -> tuple[Candidate, ...]:
        """Return five candidates at most, six with a codec; the initial one first.

        ``topology`` is one to try in addition, without a codec; empty: none. ``codec`` is the
        strategy's. A sketch is also tried with half of its bits.
        """
        small = self.mb / 5
        whole, fifth = Fusion(bucket_bytes=in_bytes(self.mb)), Fusion(bucket_bytes=in_bytes(small))
        # As DDP's: 25 MB, and 1 MB for the bucket that is ready first.
        usual = Fusion(bucket_bytes=in_bytes(self.mb), first_bytes=in_bytes(self.mb / 25))
        size, fewer = f"mb={self.mb:g}", f"mb={small:g}"
        found = [
            Candidate(f"DeAR(plan='fixed', {size})", "dear", whole),
            Candidate(f"AllReduce({size}, first_mb={self.mb / 25:g})", "wfbp", usual),
            Candidate(f"DeAR(plan='fixed', {fewer})", "dear", fifth),
        ]
        if codec:
            tried = [(codec, size, whole), (codec, fewer, fifth)]
            if isinstance(codec, Sketch) and codec.bits > 2:
                tried.append((replace(codec, bits=codec.bits // 2), size, whole))
            for each, mb, fusion in tried:
                name = f"DeAR(plan='fixed', {mb}, compression={each!r})"
                found.append(Candidate(name, "dear", fusion, codec=each))
            return tuple(found)
        found.append(Candidate("DeAR(plan='layers@1')", "dear", Fusion(kind="layers", layers=1)))
        if topology:
            name = f"DeAR(plan='fixed', {size}, topology={topology!r})"
            found.append(Candidate(name, "dear", whole, topology))
        return tuple(found)


def in_bytes(mb: float) -> int:
    """Convert MB to bytes; a size above 0 is at least 1 byte.

    >>> in_bytes(0), in_bytes(1e-9), in_bytes(1)
    (0, 1, 1048576)
    """
    return max(1, int(mb * 2**20)) if mb else 0


def check_drift(settings: Settings) -> None:
    """Raise a `UsageError` unless ``drift`` is a number above 1."""
    settings.check_number("drift", "numbers above 1", lambda v: v > 1)

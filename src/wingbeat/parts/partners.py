"""Which workers average their models: dynamic groups, all workers, or pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.rules import FILTERED, GROUP_SIZE, POLICIES, THRESHOLD
from wingbeat.settings import READ, Named, Settings
from wingbeat.traits import LOCAL, MEANS, Part


def threshold_of(text: str) -> int | None:
    """Parse a threshold of the command line: a number, or ``none``."""
    return None if text == "none" else int(text)


class PartnersPart(Part, Settings):
    """Which workers average their models; a subclass is a frozen dataclass."""

    exact: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False
    has: ClassVar[frozenset[str]] = frozenset({MEANS})

    @property
    def needs(self) -> frozenset[str]:
        """A schedule with local steps between averages."""
        return frozenset({LOCAL})

    def averaging(self) -> dict[str, Any]:
        """Return the fields of `wingbeat.types.Averaging` that this part sets."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class Groups(PartnersPart):
    """Workers average within groups that a generator forms on request (Ripples, sections 4 and 5).

    Args:
        policy: ``"smart"``, the paper's smart groups with corrections. ``"paper"``, the same
            exactly as published. ``"random"``, the paper's random groups (4.1). ``"buffered"``,
            ``"divided"`` and ``"inter-intra"`` each add one step from ``"random"`` to ``"smart"``.
            ``"static"``, a schedule without a generator (4.2). ``"all"``, one group of all workers.
        size: number of members of a random group.
        threshold: C_thres of the slowdown filter (5.3), for ``"smart"`` and ``"paper"``. None
            (``none`` on the command line): no filter.
        seed: seed of random choices.
        encrypted: encrypt messages to and from the generator. Parameters are sent over connections
            that are neither authenticated nor encrypted.

    Raises:
        UsageError: a value is out of range.
    """

    policy: str = "smart"
    size: int = GROUP_SIZE
    threshold: int | None = field(default=THRESHOLD, metadata={READ: threshold_of})
    seed: int = 0
    encrypted: bool = True

    def __post_init__(self) -> None:
        check_groups(self)
        self.check_flag("encrypted")
        self.check_count("seed", 0, 2**31 - 1)

    def averaging(self) -> dict[str, Any]:
        """Return the fields of `wingbeat.types.Averaging` that this part sets."""
        return {
            "partners": self.policy,
            "size": self.size,
            "threshold": self.threshold,
            "seed": self.seed,
            "encrypted": self.encrypted,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class Pairs(PartnersPart):
    """A worker of one half averages with one worker of the other half at a time (AD-PSGD).

    Args:
        seed: seed of random choices.
        encrypted: encrypt messages between workers, including parameters. `wingbeat.synchronize` is
            not encrypted: it uses the connections of collectives.

    Raises:
        UsageError: a value is out of range.
    """

    seed: int = 0
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_flag("encrypted")
        self.check_count("seed", 0, 2**31 - 1)

    def averaging(self) -> dict[str, Any]:
        """Return the fields of `wingbeat.types.Averaging` that this part sets."""
        return {"partners": "pairs", "seed": self.seed, "encrypted": self.encrypted}


def check_groups(options: Any) -> None:
    """Raise a `UsageError` unless ``policy``, ``size`` and ``threshold`` are valid together."""
    options.check_name("policy", POLICIES)
    options.check_count("size", 2, 100_000)
    if options.threshold is not None:
        options.check_count("threshold", 2, 1_000_000)
    if options.threshold != THRESHOLD and options.policy not in FILTERED:
        raise UsageError(
            f"{type(options).__name__}(policy={options.policy!r}, threshold={options.threshold!r}):"
            ' only policy="smart" and "paper" have a filter; leave threshold out'
        )


BY_NAME: Mapping[str, Named[PartnersPart]] = {
    "groups": Named(Groups, "policy", str),
    "pairs": Named(Pairs),
}

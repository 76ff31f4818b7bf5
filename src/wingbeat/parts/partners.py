"""With whom models are averaged: in groups of the moment, with all, or with one other worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.rules import FILTERED, GROUP_SIZE, POLICIES, THRESHOLD
from wingbeat.settings import READ, Named, Settings
from wingbeat.traits import LOCAL, MEANS, Part


def threshold_of(text: str) -> int | None:
    """Read a threshold as the command line has it: a number, or ``none``.

    Raises:
        ValueError: it is neither.
    """
    return None if text == "none" else int(text)


class PartnersPart(Part, Settings):
    """With whom models are averaged; a subclass is a frozen dataclass."""

    exact: ClassVar[bool] = False
    synchronous: ClassVar[bool] = False
    has: ClassVar[frozenset[str]] = frozenset({MEANS})

    @property
    def needs(self) -> frozenset[str]:
        """Steps between averages."""
        return frozenset({LOCAL})

    def averaging(self) -> dict[str, Any]:
        """Return what of `wingbeat.types.Averaging` it decides."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class Groups(PartnersPart):
    """Workers average in groups that a generator makes as they ask (Ripples, sections 4 and 5).

    Args:
        policy: ``"smart"``, the paper's smart groups with what was found missing; ``"paper"``,
            these exactly as published; ``"random"``, the paper's random groups (4.1); steps from
            there to ``"smart"``, ``"buffered"``, ``"divided"`` and ``"inter-intra"``, each with all
            before it; ``"static"``, a schedule that needs no generator (4.2); or ``"all"``, one
            group of everybody.
        size: members of a random group.
        threshold: C_thres of the slowdown filter (5.3), of ``"smart"`` and ``"paper"``; None
            (``none`` on the command line): no filter.
        seed: of random choices.
        encrypted: whether requests to the generator, and its answers, are. Parameters never are:
            they travel over links that are neither authenticated nor encrypted.

    Raises:
        UsageError: a value out of range.
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
        """Return what of `wingbeat.types.Averaging` it decides."""
        return {
            "partners": self.policy,
            "size": self.size,
            "threshold": self.threshold,
            "seed": self.seed,
            "encrypted": self.encrypted,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class Pairs(PartnersPart):
    """A worker of the one half averages with one of the other half at a time (AD-PSGD).

    Args:
        seed: of random choices.
        encrypted: whether messages between workers, parameters among them, are.
            `wingbeat.synchronize` is not: it goes over the links of collectives.

    Raises:
        UsageError: a value out of range.
    """

    seed: int = 0
    encrypted: bool = True

    def __post_init__(self) -> None:
        self.check_flag("encrypted")
        self.check_count("seed", 0, 2**31 - 1)

    def averaging(self) -> dict[str, Any]:
        """Return what of `wingbeat.types.Averaging` it decides."""
        return {"partners": "pairs", "seed": self.seed, "encrypted": self.encrypted}


def check_groups(options: Any) -> None:
    """Raise a `UsageError` unless ``policy``, ``size`` and ``threshold`` are those of groups."""
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

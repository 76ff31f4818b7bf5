"""Scenarios (run twice and compared) and checks (asserted directly), registered by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .sides import Side

TINY, LARGE = 0.0004, 25.0
"""Bucket sizes in MB: one parameter or so a bucket, and the whole model in one."""

CHANGES = "auto"
"""Changes schedule and buckets before each iteration."""

BOTH = ("allreduce", "dear", CHANGES)
"""The strategies with which every worker has the whole optimizer, and gradients last."""

ALL = (*BOTH, "dear-sharded")

CODED = ("allreduce-coded", "dear-coded")
"""The same through a codec that loses nothing."""

BOUND = ("canary",)
"""Bounded staleness with a bound of 0, which allows what a synchronous strategy allows."""

MEASURED = ("mgwfbp",)
"""Dense gradients in buckets that are planned from what the first iterations show."""


UPDATED_THERE = ("geryon-server", "geryon-server-start")
"""Parameters that servers update, which take seconds to start."""

SERVED = ("geryon", "geryon-start", *UPDATED_THERE)
"""Sums of servers, or parameters, when they are ready or are asked for."""

DIVIDED = ("dear-sharded", "geryon-server")
"""With which no worker has the whole optimizer: some things are refused."""

SERVED_CODED = ("geryon-coded",)
"""Sums through a codec that loses nothing, at a server that takes seconds to start."""


BY_PRIORITY = ("bytescheduler",)
"""All-reduces of partitions, in an order that rank 0 decides."""


@dataclass(frozen=True)
class Grid:
    """Which worlds, strategies and bucket sizes a case runs with."""

    worlds: tuple[int, ...] = (2, 3)
    strategies: tuple[str, ...] = (
        *ALL, *CODED, *MEASURED, *SERVED, *SERVED_CODED, *BY_PRIORITY
    )  # fmt: skip
    mbs: tuple[float, ...] = (TINY, LARGE)


@dataclass(frozen=True)
class Scenario:
    """A training run that must end the same under wingbeat as under its ``reference``.

    ``tolerance`` is the largest allowed difference of a tensor, relative to its largest
    reference element (or ``floor`` where that is smaller). ``state_of`` says on which rank the
    reference's optimizer state is the one to reach: every one, or only the last (under DDP's
    Join the others stop stepping); ``None`` compares no optimizer state.
    """

    name: str
    play: Callable[[Side], None]
    grid: Grid
    reference: str = "ddp"
    find_unused: bool = True
    tolerance: float = 1e-5
    floor: float = 1e-6
    state_of: str | None = "every"


@dataclass(frozen=True)
class Rig:
    """What a check is given: a strategy and its place in the world."""

    strategy: Any
    strategy_name: str
    mb: float
    rank: int
    size: int


@dataclass(frozen=True)
class Check:
    """A function that asserts something about wingbeat alone, on every rank at once."""

    name: str
    play: Callable[[Rig], None]
    grid: Grid


SCENARIOS: dict[str, Scenario] = {}
CHECKS: dict[str, Check] = {}


def add(play: Callable[[Side], None], name: str, grid: Grid | None = None, **options: Any) -> None:
    """Register a scenario made by code."""
    assert name not in SCENARIOS, name
    SCENARIOS[name] = Scenario(name, play, grid or Grid(), **options)


def scenario(
    grid: Grid | None = None, **options: Any
) -> Callable[[Callable[[Side], None]], Callable[[Side], None]]:
    """Register the decorated function under its own name; options as `Scenario`'s fields."""

    def register(play: Callable[[Side], None]) -> Callable[[Side], None]:
        add(play, play.__name__, grid, **options)
        return play

    return register


def check(
    grid: Grid | None = None,
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    """Register the decorated check under its own name."""

    def register(play: Callable[[Rig], None]) -> Callable[[Rig], None]:
        assert play.__name__ not in CHECKS, play.__name__
        CHECKS[play.__name__] = Check(play.__name__, play, grid or Grid())
        return play

    return register

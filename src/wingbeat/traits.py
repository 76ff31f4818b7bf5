"""What may be relied on: each part of a strategy declares it, and who measures or tests reads it.

No names of strategies are compared: a bench asks for `Traits.bound`, a test for `Traits.exact`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

WHOLE = "whole all-reduces"
"""Under backward, so that gradients are whole on every worker when it returns."""

ONCE = "sums in one operation"
"""Each bucket's sum is made and spread by one operation, which any exchange has."""

LATE = "sums that come after backward"
"""A bucket's sum may still be on its way when the next forward begins."""

KEPT = "sums that are kept until they are pulled"
"""Somebody else than the workers has them."""

HALVES = "all-reduces in two halves"
"""Reduce-scatter and all-gather are apart, and between them each worker owns blocks of the sum."""

ROUNDS = "sums in rounds"
"""Which come when they come, and are applied in the same order by every worker."""

OWN = "steps without a wait for all"
"""Each worker makes iterations of its own, and no part of any is a collective of all."""

MEANS = "means of models"
"""Parameters are averaged, with all workers or with some."""

LOCAL = "steps on a worker's own gradients"
"""No gradient travels; models part, and are averaged now and then."""


class Part:
    """One of a strategy's answers to the design's questions: a frozen value.

    Attributes:
        exact: whether weights stay DDP's, up to the rounding of sums.
        synchronous: whether an update has all workers' gradients of its own iteration, and no
            others.
        has: what the part offers to the others; a schedule, how it exchanges.
    """

    __slots__ = ()

    exact: ClassVar[bool] = True
    synchronous: ClassVar[bool] = True
    has: ClassVar[frozenset[str]] = frozenset()

    @property
    def needs(self) -> frozenset[str]:
        """What one of the other parts must have."""
        return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What follows from all parts of a strategy together.

    Attributes:
        exact: whether weights stay DDP's, up to the rounding of sums.
        synchronous: whether an update has all workers' gradients of its own iteration, and no
            others.
        bound: which of `wingbeat_lab.bench.bound.BOUNDS` says how short an iteration can be.
        halves: whether each bucket travels in a reduce-scatter and an all-gather.
        in_parts: whether the optimizer is run on some parameters at a time, and not in one call.
        gathered: whether each worker's payload goes to all the others, so that bytes grow with
            the workers.
    """

    exact: bool
    synchronous: bool
    bound: str
    halves: bool
    in_parts: bool
    gathered: bool

    def words(self) -> str:
        """Say what decides whether one may use it.

        >>> from wingbeat import DeAR
        >>> DeAR().traits.words()
        'exact, synchronous'
        """
        exact = "exact" if self.exact else "not exact"
        return f"{exact}, {'synchronous' if self.synchronous else 'not synchronous'}"

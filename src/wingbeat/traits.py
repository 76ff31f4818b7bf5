"""Traits: what each part of a strategy guarantees and requires.

Benchmarks and tests read them, such as `Traits.bound` and `Traits.exact`, instead of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

WHOLE = "whole all-reduces"
"""All-reduces run during backward; gradients are complete on every worker when it returns."""

ONCE = "sums in one operation"
"""Each bucket's sum is computed and distributed by one operation, which every exchange has."""

LATE = "sums that come after backward"
"""A bucket's sum may still be in progress when the next forward begins."""

KEPT = "sums that are kept until they are pulled"
"""Servers keep sums until workers pull them."""

HALVES = "all-reduces in two halves"
"""Reduce-scatter and all-gather are separate; in between, each worker owns blocks of the sum."""

ROUNDS = "sums in rounds"
"""Sums arrive at any time and are applied in the same order by every worker."""

OWN = "steps without a wait for all"
"""Each worker runs its own iterations, without collectives of all workers."""

MEANS = "means of models"
"""Parameters are averaged over all workers or some."""

LOCAL = "steps on a worker's own gradients"
"""Gradients are not exchanged; models diverge and are averaged periodically."""


class Part:
    """A part of a strategy: a frozen value.

    Attributes:
        exact: whether weights equal DDP's, up to the rounding of sums.
        synchronous: whether an update uses exactly all workers' gradients of its own iteration.
        has: what the part provides to other parts; for a schedule, how it exchanges.
    """

    __slots__ = ()

    exact: ClassVar[bool] = True
    synchronous: ClassVar[bool] = True
    has: ClassVar[frozenset[str]] = frozenset()

    @property
    def needs(self) -> frozenset[str]:
        """What another part must provide."""
        return frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a strategy as a whole.

    Attributes:
        exact: whether weights equal DDP's, up to the rounding of sums.
        synchronous: whether an update uses exactly all workers' gradients of its own iteration.
        bound: the lower bound of an iteration, a name in `wingbeat_lab.bench.bound.BOUNDS`.
        halves: whether each bucket is sent in a reduce-scatter and an all-gather.
        in_parts: whether the optimizer runs on some parameters at a time.
        gathered: whether each worker's payload is sent to all others, so that bytes grow with the
            number of workers.
    """

    exact: bool
    synchronous: bool
    bound: str
    halves: bool
    in_parts: bool
    gathered: bool

    def words(self) -> str:
        """Return a summary for users.

        >>> from wingbeat import DeAR
        >>> DeAR().traits.words()
        'exact, synchronous'
        """
        exact = "exact" if self.exact else "not exact"
        return f"{exact}, {'synchronous' if self.synchronous else 'not synchronous'}"

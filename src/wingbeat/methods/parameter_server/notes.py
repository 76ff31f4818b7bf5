"""What a server that updates keeps note of: slices, steps, and what is said of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from wingbeat.methods.parameter_server.aggregator import Refused, Sum
from wingbeat.methods.parameter_server.dtypes import Array
from wingbeat.methods.parameter_server.protocol import Ids

Key = tuple[int, int]
"""Plan and slice."""


class Applies(Protocol):
    """Who does the arithmetic: `wingbeat.methods.parameter_server.shard_optimizer.Applier`."""

    def hold(self, words: Mapping[str, Any], data: bytearray) -> Any:
        """Take the parameters of a slice, with what is remembered of them."""

    def put(self, held: Any, data: bytearray) -> None:
        """Take other values, in new memory."""

    def renew(self, held: Any) -> None:
        """Leave the memory to those who still read it."""

    def drop(self, held: Any) -> None:
        """Forget a slice."""

    def export(self, held: Any) -> tuple[dict[str, Any], list[memoryview]]:
        """Return what is remembered of a slice."""

    def settle(self, groups: list[dict[str, Any]], words: dict[str, Any]) -> None:
        """Have these settings for the steps that follow."""

    def step(self, held: Any, gradients: Array, used: frozenset[int]) -> None:
        """Update the parameters of a slice."""


@dataclass(eq=False, slots=True)
class Shard:
    """One slice with its parameters.

    Attributes:
        held: they, and what is remembered of them.
        made: as they travel; its round is how often they had been updated.
        final: gradients to be used in place of a sum, in the next update.
        wish: how the parameters are to be sent if nobody asks.
        fetches: workers that wait for the next update, and what they have asked for.
    """

    held: Any
    made: Sum
    final: Array | None = None
    wish: int = 0
    fetches: dict[int, Ids] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a worker is to have of a slice.

    Attributes:
        worker: its rank.
        ids: what it has asked for.
        made: the parameters; None where they are to come later.
        state: in place of those, what is remembered of it: words, and arrays.
    """

    worker: int
    ids: Ids
    made: Sum | None = None
    state: tuple[dict[str, Any], list[memoryview]] | None = None


@dataclass(frozen=True, slots=True)
class Early:
    """A message, and how often all workers have to be ready before it is taken."""

    worker: int
    turn: int
    kind: int
    ids: Ids
    payload: Any
    since: float


@dataclass(slots=True)
class Step:
    """One update of all slices, as the workers tell of it.

    Attributes:
        plan: whose slices.
        number: the updates after it.
        round: whose sums are used; `NO_ROUND`: gradients that were sent for it.
        since: when the first worker told of it, in seconds.
        said: by worker: whether parameters are to come to it unasked.
        digest: of the settings, by the first worker that has some.
        words: the settings, from the worker that leads; None before it has told.
        rest: slices that are still to be updated.
        used: parameters that some worker has a gradient for.
    """

    plan: int
    number: int
    round: int
    since: float
    said: dict[int, bool] = field(default_factory=dict)
    digest: tuple[int, str] | None = None
    words: dict[str, Any] | None = None
    rest: set[int] = field(default_factory=set)
    used: frozenset[int] = frozenset()


def numbers_in(bits: Any) -> frozenset[int]:
    """Return the places of the ones in a number that is written in hexadecimal.

    Raises:
        Refused: it is none.

    >>> sorted(numbers_in(bits_of({0, 2, 9})))
    [0, 2, 9]
    """
    try:
        shown = f"{int(bits, 16):b}"
    except (TypeError, ValueError):
        raise Refused(f"malformed parameters of a step: {str(bits)[:40]!r}") from None
    return frozenset(place for place, bit in enumerate(reversed(shown)) if bit == "1")


def bits_of(numbers: Iterable[int]) -> str:
    """Write numbers as the places of ones, in hexadecimal."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return f"{bits:x}"

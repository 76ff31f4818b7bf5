"""Along which links gradients travel, where that is no topology: to servers and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from wingbeat.errors import UsageError
from wingbeat.settings import Named, Settings, is_number
from wingbeat.traits import KEPT, ONCE, Part
from wingbeat.types import Serving

ORDERS = ("ready", "urgent", "forward", "random")
BACKS = ("wire", "dense")
PLACEMENTS = ("sharded", "whole")
CLASSES = 4
"""The most classes of flows that there are."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Servers(Part, Settings):
    """Parameter servers sum what all workers push (Geryon, sections III and IV).

    wingbeat starts and ends them with the job.

    Args:
        count: how many; 0: one on each host, together with a worker.
        placement: ``"sharded"``, a part of every bucket on each server; or ``"whole"``, every
            bucket on one of them in turn.
        slice: the most elements of what a server sums at a time; 0: shards are not cut.
        classes: of flows, 1 to 4, each with a priority that the network honours (DSCP). 1: none.
        threshold: a bucket travels in a more urgent class if its urgency, ``1 - l/L`` for the
            ``l``-th of ``L`` in the order of forward, is above this; for more than two classes,
            falling numbers.
        pushes: whether gradients go to the servers in these classes too, and not in the last.
        order: which sum a sender sends first: ``"ready"``, as they come; ``"urgent"``, by when
            forward needs it, with little under way (P3); ``"forward"``, in that order alone
            (TICTAC); ``"random"``, as workers happen to ask (TensorFlow).
        back: what sums come back as where the wire is not ``"fp32"``: ``"wire"``, the same as
            gradients; or ``"dense"``, in float32 (float64 where that is summed).
        encrypted: whether messages are; without it whoever sees the traffic can send in them.

    Raises:
        UsageError: a value out of range.
    """

    has: ClassVar[frozenset[str]] = frozenset({KEPT})

    count: int = 0
    placement: str = "sharded"
    slice: int = 1 << 20
    classes: int = 2
    threshold: float | tuple[float, ...] = 0.5
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
        self.thresholds()

    @property
    def needs(self) -> frozenset[str]:
        """A schedule that has each bucket summed at once."""
        return frozenset({ONCE})

    def thresholds(self) -> tuple[float, ...]:
        """Return what divides the classes, one less than there are classes."""
        given = self.threshold
        levels = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if self.classes == 1:
            return ()
        fine = len(levels) == self.classes - 1 and all(is_number(v) and 0 <= v <= 1 for v in levels)
        if not fine or list(levels) != sorted(set(levels), reverse=True):
            raise UsageError(
                f"Servers(classes={self.classes}, threshold={given!r}): allowed are "
                f"{self.classes - 1} falling numbers from 1 to 0"
            )
        return levels

    def serving(self) -> Serving:
        """Return the same for the engine."""
        random = self.order == "random"
        return Serving(
            count=self.count,
            whole=self.placement == "whole",
            slice=self.slice,
            thresholds=self.thresholds(),
            pushes=self.pushes,
            order="ready" if random else self.order,
            shuffled=random,
            encrypted=self.encrypted,
            dense=self.back == "dense",
        )


BY_NAME: Mapping[str, Named[Servers]] = {"servers": Named(Servers, "count", int)}

"""Traits: what each part of a strategy guarantees and requires.

Benchmarks and tests read them, such as `Traits.bound` and `Traits.exact`, instead of names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self  # `typing` has it from Python 3.11 on

    from wingbeat.compression import Coded
    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.runtime import Runtime
    from wingbeat.parts.strategy import Strategy
    from wingbeat.simulator.exchange import SimulatedExchanges, SimulationContext
    from wingbeat.transport.world import World

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


class ExchangePart(Part):
    """How gradients or models are exchanged: along a topology, or by a method's own means.

    Attributes:
        bound: the lower bound of an iteration, as `Traits.bound`; empty: the schedule's.
        lockstep: whether all workers run the same iterations, so that each may wait for all.
        collective: whether collectives of all workers sum whole buckets.
        topology: name of the topology of other collectives, such as a broadcast.
    """

    __slots__ = ()

    bound: str = ""
    lockstep: ClassVar[bool] = True
    collective: ClassVar[bool] = False
    topology: str = "ring"

    @property
    def everyone(self) -> bool:
        """Whether each exchange is of all workers."""
        return True

    @property
    def waits(self) -> bool:
        """Whether a worker waits for some others at a time, and not for all."""
        return False

    @property
    def tuned(self) -> bool:
        """Whether thresholds between its traffic classes are tuned during training."""
        return False

    @property
    def readmits(self) -> bool:
        """Whether a worker that is restarted alone may rejoin."""
        return False

    def key(self) -> dict[str, Any]:
        """Return the options for which sizes and thresholds in a plan file are valid."""
        return {}

    def check(self, strategy: Strategy) -> None:
        """Raise a `UsageError` for parts of ``strategy`` that the exchange does not support."""

    def refusal_in_replicas(self, strategy: Strategy) -> str:  # noqa: ARG002
        """Return why ``strategy`` is not possible between replicas of several ranks, and what is.

        Each column of the mesh has an exchange of its own, see `transport.mesh`. Empty: it is
        possible.
        """
        return ""

    def check_model(self, model: torch.nn.Module) -> None:
        """Raise a `UsageError` for a model that the exchange does not support."""

    def codec(self, codec: Coded) -> Coded:
        """Return the codec of what it sends, for a strategy's."""
        return codec

    def gradient_wire(self, wire: str | Coded, workers: int) -> str | Coded:  # noqa: ARG002
        """Return how it encodes gradients, for the dtype or codec of what it sends."""
        return wire

    def open_world(self, world: World) -> World:
        """Return the world in which a model's workers exchange; every worker must call it."""
        return world.open_channel()

    def scaled(self, factor: float) -> Self:  # noqa: ARG002
        """Return the exchange for a model of ``factor`` times the size."""
        return self

    def build(self, context: BuildContext) -> Runtime:
        """Make the runtime of two workers or more; not called for a single one."""
        raise NotImplementedError

    def build_simulated(self, context: SimulationContext) -> SimulatedExchanges:
        """Make the exchange of each worker in virtual time; by default collectives."""
        return context.collectives()


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

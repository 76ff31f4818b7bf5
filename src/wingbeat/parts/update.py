"""Where the optimizer is applied, to which parameters, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from wingbeat.settings import Settings
from wingbeat.traits import HALVES, LATE, WHOLE, Part

if TYPE_CHECKING:
    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.gradients.views import ShownGradients
    from wingbeat.engine.updates.update import Update
    from wingbeat.schedules.events import Schedule


class UpdatePart(Part, Settings):
    """Where the optimizer is applied; a subclass is a frozen dataclass.

    Attributes:
        in_parts: whether the optimizer runs on some parameters at a time instead of in one call.
        shards: whether each worker updates only its own blocks, and parameters are gathered.
        on_servers: whether the servers update, and workers pull parameters.
    """

    in_parts: ClassVar[bool] = True
    shards: ClassVar[bool] = False
    on_servers: ClassVar[bool] = False

    @property
    def divides(self) -> bool:
        """Whether no worker has the complete optimizer."""
        return self.shards or self.on_servers

    def machine(self, schedule: str) -> str:
        """Return the name of the state machine of ``schedule`` with this update."""
        return schedule

    def build(self, context: BuildContext, schedule: Schedule, views: ShownGradients) -> Update:
        """Make the update of an exchange in lockstep; methods with an own one build it there."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, repr=False)
class Whole(UpdatePart):
    """``optimizer.step()`` updates all parameters on every worker, as under DDP."""

    in_parts: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """Gradients that are complete when ``step()`` is called."""
        return frozenset({WHOLE})

    def build(
        self,
        context: BuildContext,
        schedule: Schedule,  # noqa: ARG002
        views: ShownGradients,  # noqa: ARG002
    ) -> Update:
        """Make the update of all parameters."""
        return context.whole_update()


@dataclass(frozen=True, kw_only=True, repr=False)
class Deferred(UpdatePart):
    """Every worker updates a bucket just before the layer that needs its parameters."""

    @property
    def needs(self) -> frozenset[str]:
        """Sums that may arrive after the next forward has begun."""
        return frozenset({LATE})

    def build(
        self,
        context: BuildContext,
        schedule: Schedule,  # noqa: ARG002
        views: ShownGradients,  # noqa: ARG002
    ) -> Update:
        """Make the update of single buckets."""
        return context.deferred_update()


@dataclass(frozen=True, kw_only=True, repr=False)
class Sharded(UpdatePart):
    """Each worker updates the blocks that it has reduced, and parameters are gathered.

    The optimizer's state and arithmetic are divided among the workers.
    """

    shards: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Blocks of the sum that each worker owns."""
        return frozenset({HALVES})

    def machine(self, schedule: str) -> str:  # noqa: ARG002
        """Return the machine that gathers parameters in place of gradients."""
        return "sharded"

    def build(self, context: BuildContext, schedule: Schedule, views: ShownGradients) -> Update:
        """Make the update of a worker's own blocks."""
        return context.sharded_update(schedule, views)

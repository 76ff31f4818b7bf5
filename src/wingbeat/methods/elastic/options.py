"""The exchange part of exact strategies that continue without a failed replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from wingbeat import topologies
from wingbeat.errors import UsageError
from wingbeat.settings import Settings
from wingbeat.traits import ExchangePart

if TYPE_CHECKING:
    import torch

    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.runtime import Runtime
    from wingbeat.parts.strategy import Strategy
    from wingbeat.transport.world import World

MAX_REPLICAS = 1 << 16


@dataclass(frozen=True, kw_only=True, repr=False)
class Elastic(Settings, ExchangePart):
    """Collectives of the workers that are alive: a failed one is left out, and may return.

    The step in which a worker fails is dropped on all others alike, which then have equal weights.
    Later gradients are the mean over the workers that take part. Exact: between two changes of the
    workers, weights equal DDP's with these workers.

    Args:
        min_replicas: with fewer workers than this training waits for the timeout of `wingbeat.init`
            for others to return, and ends then.
        topology: as for `wingbeat.AllReduce`; ``"ring"``, ``"mesh"`` or ``"doubling"``.

    Raises:
        UsageError: a value is out of range.
    """

    min_replicas: int = 1
    topology: str = "ring"

    collective: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_count("min_replicas", 1, MAX_REPLICAS)
        self.check_name("topology", ("ring", "mesh", "doubling"))

    @property
    def readmits(self) -> bool:
        """Whether a worker that is restarted alone may rejoin."""
        return True

    def check(self, strategy: Strategy) -> None:
        """Raise a `UsageError` for a plan, codec or update that a returned replica cannot join."""
        topologies.get(self.topology).check(strategy)
        plan = strategy.plan
        reason = ""
        if plan.tuning() or plan.merging() or plan.choosing():
            reason = "a replica that returns has not measured what a plan is tuned by: use a fixed "
            reason += 'plan, such as plan="fixed"'
        elif strategy.codec is not None:
            reason = 'codecs keep numbers of steps and residuals: use compression="bf16" or "fp32"'
        elif strategy.machine not in ("wfbp", "dear") or strategy.update_part.divides:
            reason = "each replica needs the whole optimizer to continue: leave shard_optimizer out"
        if reason:
            raise UsageError(f"min_replicas={self.min_replicas}: {reason}")

    def check_model(self, model: torch.nn.Module) -> None:
        """As `ExchangePart.check_model`."""
        from wingbeat.methods.elastic.build import check_modules

        check_modules(model)

    def open_world(self, world: World) -> World:
        """Return the group of the present members; a process that was restarted waits for it."""
        from wingbeat.methods.elastic.build import open_world

        return open_world(self, world)

    def build(self, context: BuildContext) -> Runtime:
        """Make a runtime that continues without failed workers."""
        from wingbeat.methods.elastic.build import build_runtime

        return build_runtime(context)

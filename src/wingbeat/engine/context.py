"""What the parts of a strategy make a runtime of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from wingbeat import schedules
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.gradients.views import Gatherer, HiddenGradients, ShownGradients
from wingbeat.engine.runtime import IntentExchange, Runtime
from wingbeat.engine.updates.divided import ShardedUpdate
from wingbeat.engine.updates.shards import TensorShards
from wingbeat.engine.updates.update import (
    DeferredUpdate,
    SingleWorkerUpdate,
    Training,
    Update,
    WholeUpdate,
)
from wingbeat.errors import UsageError
from wingbeat.exchanges.collective import CollectiveExchange, Exchange
from wingbeat.parts.strategy import Strategy
from wingbeat.schedules.events import Schedule
from wingbeat.transport.world import World


@dataclass
class BuildContext:
    """What an exchange part builds the runtime of a model from (`ExchangePart.build`).

    Attributes:
        compression: of gradients; the part may replace it.
        gatherer: completes gradients that are read early.
        buffers: returns the model's buffers.
        rebucket: changes to the next plan, between two iterations.
    """

    strategy: Strategy
    training: Training
    compression: Compression
    gatherer: Gatherer
    buffers: Callable[[], list[torch.Tensor]]
    rebucket: Callable[[], object]

    @property
    def world(self) -> World:
        """The workers that train the model."""
        return self.training.collectives.world

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.training.bucketing.device

    @property
    def on_gpu(self) -> bool:
        """Whether parameters are on a device whose collectives are NCCL's."""
        return self.device.type in self.world.nccl_devices

    # -- the runtime ----------------------------------------------------------------------

    def assemble(
        self, schedule: Schedule, exchange: Exchange, views: ShownGradients, update: Update
    ) -> Runtime:
        """Return the runtime of these parts."""
        training = self.training
        intents = IntentExchange(training.collectives, len(training.bucketing.slots))
        return Runtime(
            schedule, exchange, training.bucketing, views, update, intents, training.steps
        )

    def runtime(
        self, make_exchange: Callable[[], Exchange], views: ShownGradients | None = None
    ) -> Runtime:
        """Return a runtime in lockstep, with the strategy's schedule and update.

        The exchange may start servers, so it is made after the update, which refuses optimizers.
        """
        schedule = self.schedule()
        views = views or self.views(schedule)
        update = self.strategy.update_part.build(self, schedule, views)
        return self.assemble(schedule, make_exchange(), views, update)

    def single_worker(self) -> Runtime:
        """Return the runtime of one worker, which exchanges nothing."""
        views = ShownGradients(self.training.bucketing)
        update = SingleWorkerUpdate(self.training, self.compression)
        return self.assemble(schedules.Wfbp(), self.collective_exchange(), views, update)

    # -- what the parts of several methods have -------------------------------------------

    def schedule(self) -> Schedule:
        """Make the strategy's state machine."""
        return schedules.BY_NAME[self.strategy.machine]()

    def views(self, schedule: Schedule) -> ShownGradients:
        """Make the gradients' views, which are hidden where sums come after backward."""
        if schedule.whole_after_backward:
            return ShownGradients(self.training.bucketing)
        return HiddenGradients(self.training.bucketing, self.gatherer)

    def collective_exchange(self) -> Exchange:
        """Make an exchange by collectives of all workers."""
        self.training.collectives.sum_inside_hosts(self.device)
        return CollectiveExchange(self.training.collectives, self.compression)

    def whole_update(self) -> Update:
        """Make the update of all parameters in ``step()``."""
        return WholeUpdate(self.training)

    def deferred_update(self) -> Update:
        """Make the update of a bucket when its parameters are needed."""
        return DeferredUpdate(self.training)

    def sharded_update(self, schedule: Schedule, views: ShownGradients) -> Update:
        """Make the update of a worker's own blocks; a `UsageError` if codecs cannot divide it."""
        update = ShardedUpdate(self.training, schedule, views)
        coded = self.compression.coded is not None
        if self.on_gpu and coded and isinstance(update.shards, TensorShards):
            raise UsageError(
                f"DeAR(shard_optimizer=True): optimizer {type(self.training.optimizer).__name__} "
                "is divided by whole parameters, and codecs on GPUs have equal blocks; use "
                'compression="fp32" or "bf16", or leave shard_optimizer out'
            )
        return update

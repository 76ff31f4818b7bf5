"""Which parameters share a bucket at the moment, in which order, and which module needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wingbeat import plans
from wingbeat.errors import PeerError
from wingbeat.sync.bucket import Bucket, Prior, Slot
from wingbeat.sync.order import ForwardOrder
from wingbeat.transport.world import World
from wingbeat.types import Fusion, Plan, TensorSpec


class Bucketing:
    """The plan in force, as buckets with buffers; and how the next one comes about.

    The order in which gradients become ready and the order in which forward needs parameters
    are those that rank 0 saw in the first iteration, so that all workers hold the same plan.

    Attributes:
        slots: one for each trained parameter, in the order of ``model.named_parameters()``.
        buckets: in the order in which their gradients become ready.
        forward_buckets: the same, in the order in which forward needs their parameters.
        fusion: the rule by which they are made, unless a plan is given.
        stale: whether the rule or an order has changed since, so that `rebuild` is due.
    """

    def __init__(self, model: torch.nn.Module, fusion: Fusion, world: World) -> None:
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.slots = [Slot(i, name, param) for i, (name, param) in enumerate(trained)]
        self.specs = [spec_of(name, param) for name, param in trained]
        self.forward_order = ForwardOrder(model, [param for _, param in trained])
        self.buckets: list[Bucket] = []
        self.forward_buckets: list[Bucket] = []
        self._world = world
        self.fusion = fusion
        self._plan: Plan | None = None
        self._seen: list[int] | None = []
        self._ready_order = list(reversed(range(len(self.slots))))
        self._first_use: list[int] = []
        self._buckets_of: dict[torch.nn.Module, list[Bucket]] = {}
        self.stale = False

    def needed_by(self, module: torch.nn.Module) -> Sequence[Bucket]:
        """Return the buckets whose parameters the module reads in forward."""
        return self._buckets_of.get(module, ())

    # -- learning the orders --------------------------------------------------------------

    @property
    def learning(self) -> bool:
        """Whether no whole iteration has been watched yet."""
        return self._seen is not None

    def watch_forward(self) -> None:
        """Watch the forward that begins now, if it is the first."""
        if self.learning and not self.forward_order.watching:
            self.forward_order.start()

    def end_forward(self) -> None:
        """Take over what has been seen of a forward."""
        if self.forward_order.watching:
            self.forward_order.stop()
            self.order_forward()

    def ready(self, index: int) -> None:
        """Note that the gradient of slot ``index`` is ready."""
        if self._seen is not None:
            self._seen.append(index)

    def agree(self) -> None:
        """After the first backward: take over the orders that rank 0 saw, on every rank.

        Also after one that an exception cut short here, because the others wait for it.

        Raises:
            PeerError: what rank 0 sent is no order of the parameters.
        """
        if self._seen is None:
            return
        self.forward_order.stop()
        seen, self._seen = self._seen, None
        missing = sorted(set(range(len(self.slots))) - set(seen), reverse=True)
        mine = [[*seen, *missing], self.forward_order.first_use]
        ready_order, first_use = self._world.exchange("order", mine)[0]
        if sorted(ready_order) != list(range(len(self.slots))):
            raise PeerError(f"rank {self._world.rank}: rank 0 sent a malformed parameter order")
        self._first_use = [i for i in first_use if 0 <= i < len(self.slots)]
        self._ready_order = ready_order
        self.stale = True

    # -- the plan -------------------------------------------------------------------------

    def use(self, fusion: Fusion) -> None:
        """Fuse by another rule from the next `rebuild` on; all workers alike."""
        self.fusion = fusion
        self.stale = True

    def follow(self, plan: Plan) -> None:
        """Follow a plan from the next `rebuild` on, whatever the rule; all workers alike."""
        self._plan = plan
        self.stale = True

    @property
    def ready_order(self) -> Sequence[int]:
        """Indices of the slots, first ready first, as all workers have agreed."""
        return self._ready_order

    def rebuild(self) -> None:
        """Make buckets anew, between iterations; gradients that still count move along."""
        for bucket in self.buckets:
            bucket.settle()
        for slot in self.slots:
            if slot.prior is Prior.KEPT:
                grad = slot.param.grad
                slot.param.grad = slot.view if grad is None else grad.add_(slot.view)
                slot.prior = Prior.NONE
        self.build()

    def build(self) -> None:
        """Make the buckets of the rule and the orders in force."""
        plan = self._plan or plans.make(self.fusion, self.specs, self._ready_order)
        self.buckets = [
            Bucket(i, [self.slots[t] for t in bucket.tensors], multiple=self._world.size)
            for i, bucket in enumerate(plan.buckets)
        ]
        self.stale = False
        self.order_forward()

    def order_forward(self) -> None:
        """Find out which buckets each module waits for, and which are needed first.

        What a module waits for is this worker's own affair; the order in which buckets are
        gathered is what all have agreed on, and the definition order until then.
        """
        first = {slot: i for i, slot in enumerate(self._first_use)}
        position = [first.get(i, len(first) + i) for i in range(len(self.slots))]
        self.forward_buckets = sorted(
            self.buckets, key=lambda b: min(position[slot.index] for slot in b.slots)
        )
        self._buckets_of.clear()
        for bucket in self.forward_buckets:
            for slot in bucket.slots:
                for module in self.forward_order.readers[slot.index]:
                    buckets = self._buckets_of.setdefault(module, [])
                    if bucket not in buckets:
                        buckets.append(bucket)


def spec_of(name: str, param: torch.Tensor) -> TensorSpec:
    """Describe a parameter for the plan."""
    return TensorSpec(
        name,
        tuple(param.shape),
        str(param.dtype).removeprefix("torch."),
        param.element_size(),
        str(param.device),
    )

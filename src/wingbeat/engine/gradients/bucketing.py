"""Which parameters share a bucket at the moment, in which order, and which module needs them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch

from wingbeat import plans
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.layers import convolutional, fully_connected
from wingbeat.errors import PeerError
from wingbeat.transport.world import World
from wingbeat.types import Fusion, Plan, TensorSpec

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Where DDP's users name what is not to be synchronised."""


class Bucketing:
    """The plan in force, as buckets with buffers; and how the next one comes about.

    The order in which gradients become ready is the one that rank 0 saw in the first backward, so
    that all workers hold the same plan. Forward needs parameters in the reverse order: a gradient
    is ready when backward has passed the parameter's first use. Where workers are not in lockstep,
    the order stays that in which the parameters are defined, reversed.

    Args:
        model: whose parameters.
        fusion: the rule by which buckets are made.
        world: the workers.
        lockstep: whether all make the same iterations.
        sparse: names of parameters whose gradients have no place in a bucket.

    Attributes:
        slots: one for each trained parameter with a dense gradient, in the order of
            ``model.named_parameters()``.
        frozen: the names of parameters that need no gradient, and these.
        others: the model's tensors that are not trained, and buffers, but those to be ignored.
        buckets: in the order in which their gradients become ready.
        forward_buckets: the same, in the order in which forward needs their parameters.
        fusion: the rule by which they are made, unless a plan is given.
        strided: whether gradients are laid out as their parameters are.
        stale: whether the rule or an order has changed since, so that `rebuild` is due.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        fusion: Fusion,
        world: World,
        *,
        lockstep: bool = True,
        sparse: Container[str] = (),
    ) -> None:
        known = list(synchronised(model))
        self.frozen = [(name, param) for name, param in known if not param.requires_grad]
        trained = [(n, p) for n, p in known if p.requires_grad and n not in sparse]
        connected = fully_connected(model)
        kinds = dict.fromkeys(convolutional(model), "conv") | dict.fromkeys(connected, "fc")
        self.slots = [
            Slot(i, name, param, param in connected) for i, (name, param) in enumerate(trained)
        ]
        self.specs = [spec_of(name, param, kinds.get(param, "")) for name, param in trained]
        self.slot_of: dict[torch.Tensor, Slot] = {slot.param: slot for slot in self.slots}
        left_out, named = ignored(model), [*model.named_parameters(), *model.named_buffers()]
        self.others = [
            tensor.detach()
            for name, tensor in named
            if name not in left_out and tensor not in self.slot_of
        ]
        self._readers = list(_readers(model, self.slot_of))
        self.buckets: list[Bucket] = []
        self.forward_buckets: list[Bucket] = []
        self._world = world
        self.fusion = fusion
        self._plan: Plan | None = None
        # Without lockstep nobody waits for what rank 0 has seen: definition order, reversed, stays.
        self._seen: list[int] | None = [] if lockstep else None
        self._told = not lockstep
        self._ready_order = list(reversed(range(len(self.slots))))
        self._unused: list[int] = []
        self._buckets_of: dict[torch.nn.Module, list[Bucket]] = {}
        self.stale = False
        self.strided = False

    def needed_by(self, module: torch.nn.Module) -> Sequence[Bucket]:
        """Return the buckets whose parameters the module is known to read in forward."""
        return self._buckets_of.get(module, ())

    @property
    def device(self) -> torch.device:
        """Where parameters are: a device other than the CPU, if one of them is on one."""
        devices = [slot.param.device for slot in self.slots]
        found = [device for device in devices if device.type != "cpu"] or devices
        return found[0] if found else torch.device("cpu")

    # -- learning the order ---------------------------------------------------------------

    @property
    def learning(self) -> bool:
        """Whether the workers have not agreed on an order yet."""
        return not self._told

    def ready(self, index: int) -> None:
        """Note that the gradient of slot ``index`` is ready."""
        if self._seen is not None:
            self._seen.append(index)

    def tell(self) -> None:
        """After the first backward: tell the others the order that rank 0 saw.

        Also after one that an exception cut short here, because the others wait for it.
        """
        seen, self._seen = self._seen, None
        if seen is not None and self._world.rank == 0:
            unused = sorted(set(range(len(self.slots))) - set(seen), reverse=True)
            self._world.publish("order", [seen, unused])

    def hear(self) -> None:
        """Before the second backward: take over the order that rank 0 saw, on every rank.

        Nobody waits for it at the end of the first: several models may take part in one backward,
        and end it in another order on each rank.

        Raises:
            PeerError: what rank 0 sent is no order of the parameters.
        """
        if self._seen is not None or self._told:
            return
        self._told = True
        answer = self._world.read("order", 0)
        try:
            seen, unused = ([int(i) for i in part] for part in answer)
            if sorted([*seen, *unused]) != list(range(len(self.slots))):
                raise ValueError
        except (TypeError, ValueError):
            raise PeerError(
                f"rank {self._world.rank}: rank 0 sent a malformed parameter order"
            ) from None
        self._ready_order = [*seen, *unused]
        self._unused = unused
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
        """Make buckets anew, between iterations; gradients stay in the old ones until taken in."""
        for bucket in self.buckets:
            bucket.settle()
        self.build()

    def build(self) -> None:
        """Make the buckets of the rule and the orders in force."""
        plan = self._plan or plans.make(self.fusion, self.specs, self._ready_order)
        self.buckets = [
            Bucket(i, [self.slots[t] for t in bucket.tensors], self._world.size, self.strided)
            for i, bucket in enumerate(plan.buckets)
        ]
        self.stale = False
        self.order_forward()

    def order_forward(self) -> None:
        """Find out which buckets are needed first, and which each module waits for."""
        unused = set(self._unused)
        order = [i for i in reversed(self._ready_order) if i not in unused]
        position = {slot: place for place, slot in enumerate([*order, *self._unused])}
        self.forward_buckets = sorted(
            self.buckets, key=lambda b: min(position[slot.index] for slot in b.slots)
        )
        rank = {bucket: place for place, bucket in enumerate(self.forward_buckets)}
        self._buckets_of = {
            module: sorted({slot.bucket for slot in slots}, key=rank.__getitem__)
            for module, slots in self._readers
        }


def synchronised(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the named parameters that the workers hold in common.

    Those are all but the ones that the model names as DDP's
    ``_set_params_and_buffers_to_ignore_for_model`` has it.
    """
    left_out = ignored(model)
    return ((name, p) for name, p in model.named_parameters() if name not in left_out)


def ignored(model: torch.nn.Module) -> set[str]:
    """Return the names of parameters and buffers that each worker keeps for itself."""
    return set(model.__dict__.get(IGNORED, ()))


def _readers(
    model: torch.nn.Module, slot_of: Mapping[torch.Tensor, Slot]
) -> Iterator[tuple[torch.nn.Module, list[Slot]]]:
    """Yield each module that has parameters of its own, and these.

    What is compiled reads all of what is in it, and nobody can watch it do so.
    """
    for module in model.modules():
        opaque = is_opaque(module)
        params = module.parameters() if opaque else module._parameters.values()
        slots = [slot_of[param] for param in params if param is not None and param in slot_of]
        if slots:
            yield module, slots


def is_opaque(module: torch.nn.Module) -> bool:
    """Whether a module's forward is compiled code."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return isinstance(module, torch.jit.ScriptModule) or compiled or hasattr(module, "_orig_mod")


def spec_of(name: str, param: torch.Tensor, layer: str = "") -> TensorSpec:
    """Describe a parameter, of a layer of that kind, for the plan."""
    return TensorSpec(
        name,
        tuple(param.shape),
        str(param.dtype).removeprefix("torch."),
        param.element_size(),
        str(param.device),
        layer,
    )

"""The current plan: which parameters share a bucket, and which modules need them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from wingbeat.engine.gradients.bucket import Bucket, Slot, dtype_name
from wingbeat.engine.gradients.placed import groups_of, local, sharded_tensors
from wingbeat.errors import PeerError
from wingbeat.planning import plans
from wingbeat.transport.world import World
from wingbeat.types import Fusion, Plan, TensorSpec

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute that lists names of parameters and buffers that DDP ignores."""

_DENSE = (nn.Linear, nn.Bilinear, nn.MultiheadAttention)
"""Fully connected layers of torch, including lazy and parametrized ones, which are subclasses."""


class Bucketing:
    """The buckets of the current plan, and the rule for the next plan.

    The ready order is the one that rank 0 observed in the first backward, so that all workers have
    the same plan. Forward order is its reverse: a gradient is ready when backward has passed the
    parameter's first use. Without lockstep the ready order is the reversed order of definition.

    Attributes:
        slots: one for each trained parameter with a dense gradient, in the order of
            ``model.named_parameters()``.
        slot_of: the same by the identity of the parameter.
        frozen: names and parameters that require no gradient.
        device: the first trained parameter's that is not the CPU, else the CPU.
        others: untrained parameters and buffers that are synchronised.
        buckets: in the order in which their gradients become ready.
        forward_buckets: the same buckets, in the order in which forward needs their parameters.
        fusion: the rule that forms buckets, unless a plan is given.
        learning: whether the workers have not yet agreed on an order.
        ready_order: indices of the slots, first ready first; the same on all workers.
        strided: whether gradients have the memory format of their parameters.
        stale: whether the rule or the order has changed, so that `rebuild` is due.
    """

    def __init__(
        self,
        model: nn.Module,
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
        self.slot_of = {id(slot.param): slot for slot in self.slots}
        left_out, named = ignored(model), [*model.named_parameters(), *model.named_buffers()]
        self.others = [
            local(tensor.detach())
            for name, tensor in named
            if name not in left_out and id(tensor) not in self.slot_of
        ]
        devices = (slot.param.device for slot in self.slots)
        self.device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
        self._readers = list(_readers(model, self.slot_of))
        self.buckets: list[Bucket] = []
        self.forward_buckets: list[Bucket] = []
        self._world = world
        self.fusion = fusion
        self._plan: Plan | None = None
        self._observed: list[int] | None = [] if lockstep else None
        self.learning = lockstep
        self.ready_order: Sequence[int] = list(reversed(range(len(self.slots))))
        self._unused: list[int] = []
        self._buckets_of: dict[nn.Module, list[Bucket]] = {}
        self.stale = False
        self.strided = False

    def needed_by(self, module: nn.Module) -> Sequence[Bucket]:
        """Return the buckets whose parameters the module reads in forward."""
        return self._buckets_of.get(module, ())

    # -- the ready order ------------------------------------------------------------------

    @property
    def observing(self) -> bool:
        """Whether the order in which gradients become ready is being recorded."""
        return self._observed is not None

    def observe_ready(self, index: int) -> None:
        """Record that the gradient of slot ``index`` is ready."""
        if self._observed is not None:
            self._observed.append(index)

    def publish_order(self) -> None:
        """Publish rank 0's order after the first backward, even after an interrupted one."""
        observed, self._observed = self._observed, None
        if observed is not None and self._world.rank == 0:
            unused = sorted(set(range(len(self.slots))) - set(observed), reverse=True)
            self._world.publish("order", [observed, unused])

    def adopt_order(self) -> None:
        """Adopt rank 0's order before the second backward; raise a `PeerError` if it is invalid.

        Not at the end of the first: it may contain several models, and end them in different orders
        on each rank.
        """
        if self._observed is not None or not self.learning:
            return
        self.learning = False
        answer = self._world.read("order", 0)
        try:
            observed, unused = ([int(i) for i in part] for part in answer)
            if sorted([*observed, *unused]) != list(range(len(self.slots))):
                raise ValueError
        except (TypeError, ValueError):
            ranks = self._world.ranks
            raise PeerError(
                f"rank {ranks[self._world.rank]}: rank {ranks[0]} sent a malformed parameter order"
            ) from None
        self.ready_order = [*observed, *unused]
        self._unused = unused
        self.stale = True

    @property
    def order(self) -> tuple[Sequence[int], Sequence[int]]:
        """The order that rank 0 observed, and the unused slots; empty before it is adopted."""
        if self._observed is not None or self.learning:
            return (), ()
        return self.ready_order, self._unused

    def follow_order(self, order: Sequence[int], unused: Sequence[int]) -> None:
        """Use another worker's `order`; learn it in the next backward if that is empty.

        A `ValueError` if it does not have all slots.
        """
        if order and sorted(order) != list(range(len(self.slots))):
            raise ValueError("an order of other parameters")
        if not set(unused) <= set(order):
            raise ValueError("unused parameters that are not in the order")
        self._observed, self.learning = None if order else [], not order
        if order:
            self.ready_order, self._unused = list(order), list(unused)
        self.stale = True

    def move(self, world: World) -> None:
        """Make buckets for the workers of ``world`` from the next `rebuild` on."""
        self._world = world
        self.stale = True

    # -- the plan -------------------------------------------------------------------------

    def use(self, fusion: Fusion) -> None:
        """Set the rule for the buckets from the next `rebuild`; the same on all workers."""
        self.fusion = fusion
        self.stale = True

    def follow(self, plan: Plan) -> None:
        """Set the plan from the next `rebuild`; the same on all workers."""
        self._plan = plan
        self.stale = True

    def rebuild(self) -> None:
        """Make new buckets between iterations; gradients stay in the old ones until copied."""
        for bucket in self.buckets:
            bucket.settle()
        self.build()

    def build(self) -> None:
        """Make the buckets of the current rule and order."""
        plan = self._plan or plans.make_plan(self.fusion, self.specs, self.ready_order)
        self.buckets = [
            Bucket(i, [self.slots[t] for t in bucket.tensors], self._world.size, self.strided)
            for i, bucket in enumerate(plan.buckets)
        ]
        self.stale = False
        unused = set(self._unused)
        order = [i for i in reversed(self.ready_order) if i not in unused]
        position = {slot: place for place, slot in enumerate([*order, *self._unused])}
        self.forward_buckets = sorted(
            self.buckets, key=lambda b: min(position[slot.index] for slot in b.slots)
        )
        rank = {bucket: place for place, bucket in enumerate(self.forward_buckets)}
        self._buckets_of = {
            module: sorted({slot.bucket for slot in slots}, key=rank.__getitem__)
            for module, slots in self._readers
        }


# -- parameters ---------------------------------------------------------------------------


def synchronised(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the named parameters that all workers share: all but `ignored` ones."""
    left_out = ignored(model)
    return ((name, p) for name, p in model.named_parameters() if name not in left_out)


def ignored(model: nn.Module) -> set[str]:
    """Return the names passed to DDP's ``_set_params_and_buffers_to_ignore_for_model``."""
    return set(model.__dict__.get(IGNORED, ()))


def _readers(
    model: nn.Module, slot_of: Mapping[int, Slot]
) -> Iterator[tuple[nn.Module, list[Slot]]]:
    """Yield modules that read parameters (compiled ones: all inside), with their slots."""
    for module in model.modules():
        compiled = is_compiled(module)
        params = [*(module.parameters() if compiled else module._parameters.values())]
        params += sharded_tensors(groups_of(module))
        slots = [slot_of[id(param)] for param in params if id(param) in slot_of]
        if slots:
            yield module, slots


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is compiled code."""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return isinstance(module, torch.jit.ScriptModule) or compiled or hasattr(module, "_orig_mod")


def spec_of(name: str, param: torch.Tensor, layer: str = "") -> TensorSpec:
    """Describe a parameter and the kind of its layer for the plan."""
    return TensorSpec(
        name,
        tuple(local(param).shape),
        dtype_name(param.dtype),
        param.element_size(),
        str(param.device),
        layer,
    )


# -- kinds of layers ----------------------------------------------------------------------


def fully_connected(model: nn.Module) -> set[torch.Tensor]:
    """Return the parameters of fully connected layers that no other kind of layer shares."""
    dense: set[torch.Tensor] = set()
    others: set[torch.Tensor] = set()
    parametrizations = {
        inner
        for module in model.modules()
        if isinstance(module, parametrize.ParametrizationList)
        for inner in module.modules()
    }
    for module in model.modules():
        if module not in parametrizations:  # these count for the layer that they parametrize
            (dense if is_fully_connected(module) else others).update(_own(module))
    return dense - others


def convolutional(model: nn.Module) -> set[torch.Tensor]:
    """Return the parameters of torch's convolutions and of their subclasses."""
    convolutions = (module for module in model.modules() if isinstance(module, _ConvNd))
    return {param for module in convolutions for param in _own(module)}


def is_fully_connected(module: nn.Module) -> bool:
    """Whether a layer multiplies its input by a matrix.

    True for torch's layers and their subclasses. Any other layer is fully connected if it has no
    submodules and its largest number of parameter dimensions is two (GPT-2's ``Conv1D``).
    """
    if isinstance(module, _DENSE):
        return True
    bases = [base for base in type(module).__mro__ if base is not nn.Module]
    if any(base.__module__.startswith("torch.nn.") for base in bases) or any(module.children()):
        return False
    return max((param.dim() for param in _own(module)), default=0) == 2


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's direct parameters, and the originals of parametrized ones."""
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]

"""What every overlapped schedule shares: gradients into buckets, buckets onto the links.

Buckets are launched strictly in the plan's order, on every worker, so no negotiation is needed
(DeAR, section III-B). All of this runs in the thread that runs autograd.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from wingbeat import plans
from wingbeat.collectives import Collectives
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.events import stream
from wingbeat.sync.bucket import Bucket, Prior, Slot
from wingbeat.sync.buffers import BufferSync
from wingbeat.sync.hooks import ModuleHook
from wingbeat.sync.order import ForwardOrder
from wingbeat.sync.partial import PartialOptimizer
from wingbeat.transport.world import World
from wingbeat.types import Choices, TensorSpec


class Engine:
    """Synchronises one model's gradients; subclasses say which collectives run when."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        choices: Choices,
        world: World,
        collectives: Collectives,
        plain_step: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.collectives = collectives
        self.partial = PartialOptimizer(optimizer, plain_step)
        self.slots = [
            Slot(i, name, param)
            for i, (name, param) in enumerate(model.named_parameters())
            if param.requires_grad
        ]
        for index, slot in enumerate(self.slots):
            slot.index = index
        self.specs = [spec_of(slot.name, slot.param) for slot in self.slots]
        self.buffer_sync = BufferSync(list(model.buffers()), collectives)
        self.forward_order = ForwardOrder(model, [slot.param for slot in self.slots])
        self.sync = True
        self.buffer_root = 0
        self.last_clip: tuple[float, float] | None = None
        self.before_synced_forward: Callable[[], Any] | None = None
        self._choices = choices
        self._scale = 1.0 / world.size
        self._buckets_of: dict[torch.nn.Module, list[Bucket]] = {}
        self._handles: list[Any] = []
        self._in_backward = False
        self._next = 0
        self._ready_order: list[int] | None = []
        self._new_order: list[int] | None = None
        self._first_use: list[int] = []
        self.buckets: list[Bucket] = []
        self.forward_buckets: list[Bucket] = []
        self._build(list(reversed(range(len(self.slots)))))
        self._attach()

    # -- what a schedule decides ---------------------------------------------------------

    def launch(self, bucket: Bucket) -> None:
        """Start the collective for a bucket whose gradients are complete."""
        raise NotImplementedError

    def finish_backward(self) -> None:
        """Called when every bucket of a backward has been launched."""
        raise NotImplementedError

    def discard(self) -> None:
        """Let the links finish with the last backward's gradients, which are not wanted."""
        for bucket in self.buckets:
            bucket.settle()

    def flush(self) -> None:
        """Apply updates that are still under way."""
        self.buffer_sync.apply()

    def settle(self) -> None:
        """Make parameters current and gradients whole, because somebody looks at them."""
        self.recover()
        self.flush()

    def before_module(self, buckets: Sequence[Bucket]) -> None:
        """Called before a module runs that reads parameters of ``buckets``."""

    def settle_gradients(self) -> None:
        """Make gradients whole between backward and step, because somebody looks at them."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the optimizer's own step: gradients are whole, unless a schedule defers that."""
        self.recover()
        return self.partial.whole_step(closure)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the averaged gradients so that their global norm is at most ``max_norm``."""
        return torch.nn.utils.clip_grad_norm_(self.partial.params(), max_norm, norm_type)

    # -- plan -----------------------------------------------------------------------------

    def _build(self, ready_order: Sequence[int]) -> None:
        plan = plans.make(self._choices.fusion, self.specs, ready_order)
        self.buckets = [
            Bucket(i, [self.slots[t] for t in bucket.tensors], multiple=self.world.size)
            for i, bucket in enumerate(plan.buckets)
        ]
        self._order_forward()

    def _order_forward(self) -> None:
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

    def _agree_on_order(self) -> None:
        """After the first backward: take over the order that rank 0 saw, on every rank."""
        ready, self._ready_order = self._ready_order, None
        seen = set(ready or ())
        missing = [i for i in reversed(range(len(self.slots))) if i not in seen]
        mine = [[*(ready or ()), *missing], self.forward_order.first_use]
        ready_order, first_use = self.world.exchange("order", mine)[0]
        if sorted(ready_order) != list(range(len(self.slots))):
            raise PeerError(f"rank {self.world.rank}: rank 0 sent a malformed order of parameters")
        self._first_use = [i for i in first_use if 0 <= i < len(self.slots)]
        self._new_order = ready_order

    def _replan(self) -> None:
        """Re-bucket between iterations; gradients that still count move along."""
        order, self._new_order = self._new_order, None
        if order is None:
            return
        for bucket in self.buckets:
            bucket.settle()
        for slot in self.slots:
            if slot.prior is Prior.KEPT:
                grad = slot.param.grad
                slot.param.grad = slot.view if grad is None else grad.add_(slot.view)
                slot.prior = Prior.NONE
        self._build(order)

    # -- hooks ----------------------------------------------------------------------------

    def _attach(self) -> None:
        me = weakref.ref(self)
        for slot in self.slots:
            hook = functools.partial(_on_grad, me, slot.index)
            self._handles.append(slot.param.register_post_accumulate_grad_hook(hook))
        for module in self.model.modules():
            hook_of = ModuleHook(me, "_before_module")
            self._handles.append(module.register_forward_pre_hook(hook_of))
            self._handles.append(
                module.register_state_dict_pre_hook(ModuleHook(me, "_before_state"))
            )
            self._handles.append(
                module.register_load_state_dict_pre_hook(ModuleHook(me, "_before_state"))
            )
        self._handles.append(
            self.model.register_forward_pre_hook(ModuleHook(me, "_before_forward"), prepend=True)
        )
        self._handles.append(
            self.model.register_forward_hook(ModuleHook(me, "_after_forward"), always_call=True)
        )
        for register in (
            self.optimizer.register_state_dict_pre_hook,
            self.optimizer.register_load_state_dict_pre_hook,
        ):
            self._handles.append(register(ModuleHook(me, "_before_state")))
        self._handles.append(
            self.optimizer.register_load_state_dict_post_hook(ModuleHook(me, "_after_load"))
        )

    def detach(self) -> None:
        """Apply what is pending and remove every hook; gradients become plain tensors."""
        self.settle()
        self.forward_order.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.param.grad is slot.view:
                    slot.param.grad = slot.view.clone()

    def _before_forward(self, model: torch.nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled() or not model.training:
            return
        self.recover()
        if self._ready_order is not None and not self.forward_order.watching:
            self.forward_order.start()
        if self.sync and self.before_synced_forward is not None:
            self.before_synced_forward()

    def _after_forward(self, _model: torch.nn.Module, _args: Any, _out: Any) -> None:
        if self.forward_order.watching:
            self.forward_order.stop()
            self._order_forward()

    def _before_module(self, module: torch.nn.Module, _args: Any) -> None:
        self.buffer_sync.apply()
        buckets = self._buckets_of.get(module)
        if buckets:
            self.before_module(buckets)

    def _before_state(self, *_args: Any) -> None:
        self.settle()

    def _after_load(self, *_args: Any) -> None:
        self.partial.refresh()

    # -- backward -------------------------------------------------------------------------

    def on_grad(self, index: int) -> None:
        """Take in one gradient; called by autograd as soon as it has been accumulated."""
        if not self.sync:
            return
        if not self._in_backward:
            self._begin_backward()
        slot = self.slots[index]
        grad = slot.param.grad
        if slot.ready:
            raise UsageError(
                f"parameter {slot.name!r} got its gradient twice in one backward, as reentrant "
                "activation checkpointing does; use checkpoint(..., use_reentrant=False)"
            )
        if grad is not None and grad.layout is not torch.strided:
            raise UsageError(
                f"parameter {slot.name!r} has a sparse gradient, which has no place in a bucket; "
                "use torch.nn.Embedding(..., sparse=False)"
            )
        if self._ready_order is not None:
            self._ready_order.append(index)
        self._take(slot)
        bucket = slot.bucket
        bucket.missing -= 1
        if bucket.missing == 0:
            self._launch_complete()

    def _open_backward(self) -> None:
        self._next = 0
        self.before_backward()
        self._replan()
        for bucket in self.buckets:
            bucket.reopen()

    def _begin_backward(self) -> None:
        self._open_backward()
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(_on_backward_end, weakref.ref(self))
        )

    def before_backward(self) -> None:
        """Called before the first gradient of a backward is taken in."""

    @torch.no_grad()
    def _take(self, slot: Slot) -> None:
        slot.bucket.settle()
        slot.used = slot.fill(self._scale)
        slot.ready = True
        self.store(slot)

    def store(self, slot: Slot) -> None:
        """Leave the slot's ``p.grad`` as the schedule wants it while the bucket travels."""
        raise NotImplementedError

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            bucket.write_flags()
            bucket.kept = True
            self.launch(bucket)

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            for slot in bucket.slots:
                if not slot.ready:
                    self._take(slot)
            bucket.missing = 0
        self._launch_complete()

    def end_backward(self) -> None:
        """Launch buckets that miss unused parameters, and close this backward."""
        if not self._in_backward:
            return
        self._launch_rest()
        self._in_backward = False
        self.buffer_sync.start(self.buffer_root)
        if self._ready_order is not None:
            self.forward_order.stop()
            self._agree_on_order()
        self.finish_backward()

    def recover(self) -> None:
        """After a backward that an exception cut short: keep in step with the other workers.

        Every worker launches each bucket exactly once per backward, wherever it was cut short,
        so that their next collectives still match. The gradients are dropped.
        """
        if self._in_backward:
            self._launch_rest()
            self._in_backward = False
            self._ready_order = [] if self._ready_order is not None else None
            self.buffer_sync.start(self.buffer_root)
            self.discard()
            for slot in self.slots:
                slot.param.grad = None
                slot.prior = Prior.NONE

    def shadow_backward(self) -> None:
        """Take part in one backward of the others with gradients of zero."""
        self._open_backward()
        self.zero_grad(True)
        for slot in self.slots:
            slot.param.grad = None
        self._in_backward = True
        self.end_backward()

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients, also those that only exist in the buckets."""
        self.recover()
        self.discard()
        for bucket in self.buckets:
            bucket.kept = False
        for slot in self.slots:
            if slot.param.grad is None and slot.prior is not Prior.NONE:
                slot.prior = Prior.NONE if set_to_none else Prior.ZERO
            elif set_to_none:
                slot.prior = Prior.NONE

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this worker only, until a backward outside of this context."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    @contextlib.contextmanager
    def exposed(self, bucket: int = -1) -> Iterator[None]:
        """Record the time inside as a wait that nothing hides."""
        if not stream.on:
            yield
            return
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            stream.record("wait", begin, time.monotonic_ns(), bucket=bucket)


def spec_of(name: str, param: torch.Tensor) -> TensorSpec:
    """Describe a parameter for the plan."""
    return TensorSpec(
        name,
        tuple(param.shape),
        str(param.dtype).removeprefix("torch."),
        param.element_size(),
        str(param.device),
    )


def _on_grad(engine: weakref.ref[Engine], index: int, _param: torch.Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.on_grad(index)


def _on_backward_end(engine: weakref.ref[Engine]) -> None:
    alive = engine()
    if alive is not None:
        alive.end_backward()

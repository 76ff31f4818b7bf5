"""What every overlapped schedule shares: gradients into buckets, buckets onto the links.

Buckets are launched strictly in the plan's order, on every worker, so no negotiation is needed
(DeAR, section III-B). All of this runs in the thread that runs autograd.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from wingbeat.collectives import Collectives
from wingbeat.errors import UsageError
from wingbeat.observe.events import stream
from wingbeat.sync.attach import attach, on_backward_end
from wingbeat.sync.bucket import Bucket, Prior, Slot
from wingbeat.sync.bucketing import Bucketing
from wingbeat.sync.buffers import BufferSync
from wingbeat.sync.merging import LayerMerging
from wingbeat.sync.partial import PartialOptimizer
from wingbeat.sync.tuning import SizeTuning
from wingbeat.sync.wiring import Wiring
from wingbeat.transport.world import World
from wingbeat.types import Choices


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
        self.choices = choices
        self.buffer_sync = BufferSync(list(model.buffers()), collectives)
        self.bucketing = Bucketing(model, choices.fusion, world)
        self.wiring = Wiring(choices.wire, self.bucketing.slots, collectives)
        self.tuning: SizeTuning | None = None
        self.merging: LayerMerging | None = None
        self.sync = True
        self.buffer_root = 0
        self.last_clip: tuple[float, float] | None = None
        self.before_synced_forward: Callable[[], Any] | None = None
        self._scale = 1.0 / world.size
        self._handles: list[Any] = []
        self._in_backward = False
        self._next = 0
        self._start()

    def _start(self) -> None:
        if self.choices.tuning is not None:
            self.tuning = SizeTuning(
                self.choices.tuning, self.choices, self.bucketing, self.collectives
            )
        if self.choices.merging is not None:
            self.merging = LayerMerging(
                self.choices.merging, self.choices, self.bucketing, self.wiring, self.collectives
            )
        self.bucketing.build()
        self._handles = attach(self)

    @property
    def shadowed(self) -> bool:
        """Whether a worker without batches may be repeating this one's collectives blindly."""
        return self.before_synced_forward is not None

    @property
    def slots(self) -> list[Slot]:
        """One for each trained parameter."""
        return self.bucketing.slots

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the plan in force, first ready first."""
        return self.bucketing.buckets

    @property
    def forward_buckets(self) -> list[Bucket]:
        """The buckets of the plan in force, first needed first."""
        return self.bucketing.forward_buckets

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

    def scaler_groups(self) -> list[dict[str, Any]] | None:
        """Return what a GradScaler may work on instead of the whole gradients, if anything."""
        return None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the optimizer's own step: gradients are whole, unless a schedule defers that."""
        self.recover()
        return self.partial.whole_step(closure)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the averaged gradients so that their global norm is at most ``max_norm``."""
        return torch.nn.utils.clip_grad_norm_(self.partial.params(), max_norm, norm_type)

    # -- hooks ----------------------------------------------------------------------------

    def detach(self) -> None:
        """Apply what is pending and remove every hook; gradients become plain tensors."""
        self.settle()
        self.bucketing.forward_order.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.param.grad is slot.view:
                    slot.param.grad = slot.view.clone()

    def enter_forward(self, model: torch.nn.Module, _args: Any) -> None:
        """Before the model's forward: get ready for the backward that may follow."""
        if not torch.is_grad_enabled() or not model.training:
            return
        self.recover()
        self.bucketing.watch_forward()
        if self.sync and self.before_synced_forward is not None:
            self.before_synced_forward()

    def leave_forward(self, _model: torch.nn.Module, _args: Any, _out: Any) -> None:
        """After the model's forward, also one that failed."""
        self.bucketing.end_forward()

    def enter_module(self, module: torch.nn.Module, _args: Any) -> None:
        """Before any module's forward: bring up to date what it reads."""
        self.buffer_sync.apply()
        buckets = self.bucketing.needed_by(module)
        if buckets:
            self.before_module(buckets)

    def before_state(self, *_args: Any) -> None:
        """Before a state dict is made or loaded."""
        self.settle()

    def after_load(self, *_args: Any) -> None:
        """After the optimizer has loaded a state dict: its groups are new."""
        self.partial.refresh()

    # -- backward -------------------------------------------------------------------------

    def on_grad(self, index: int) -> None:
        """Take in one gradient; called by autograd as soon as it has been accumulated."""
        if not self.sync:
            return
        if not self._in_backward:
            self._begin_backward()
        if self.merging is None:
            self._take_in(index)
            return
        self.merging.enter(index)
        self._take_in(index)
        self.merging.leave()

    def _take_in(self, index: int) -> None:
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
        self.bucketing.ready(index)
        self._take(slot)
        bucket = slot.bucket
        bucket.missing -= 1
        if bucket.missing == 0:
            self._launch_complete()

    def _open_backward(self) -> None:
        self._next = 0
        self.before_backward()
        self.wiring.boundary()
        if self.tuning is not None and not self.wiring.deciding():
            self.tuning.boundary()
        if self.merging is not None and not self.wiring.deciding():
            self.merging.boundary()
        if self.bucketing.stale:
            self.rebucket()
        for bucket in self.buckets:
            bucket.reopen()

    def _begin_backward(self) -> None:
        self._open_backward()
        self._in_backward = True
        on_backward_end(self)
        if self.merging is not None:
            self.merging.begin()

    def before_backward(self) -> None:
        """Called before the first gradient of a backward is taken in."""

    def rebucket(self) -> None:
        """Change to the next plan; every worker does so before the same backward."""
        self.wiring.settle()
        self.bucketing.rebuild()

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
        if self.merging is not None:
            self.merging.end()
        self._launch_all()
        self.finish_backward()
        if self.merging is not None:
            self.merging.finish()

    def _launch_all(self) -> None:
        """Launch whatever every worker launches once in a backward, however it ended."""
        self._launch_rest()
        self._in_backward = False
        self.buffer_sync.start(self.buffer_root)
        self.wiring.exchange()
        if self.tuning is not None and not self.wiring.deciding():
            self.tuning.exchange()
        if self.merging is not None and not self.wiring.deciding():
            self.merging.exchange()
        self.bucketing.agree()

    def recover(self) -> None:
        """After a backward that an exception cut short: keep in step with the other workers.

        Every worker launches each bucket exactly once per backward, wherever it was cut short,
        so that their next collectives still match. The gradients are dropped.
        """
        if self._in_backward:
            if self.merging is not None:
                self.merging.abandon()
            self._launch_all()
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

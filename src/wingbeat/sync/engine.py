"""What every overlapped schedule shares: gradients into buckets, buckets onto the links.

Buckets are launched strictly in the plan's order, on every worker, so no negotiation is needed
(DeAR, section III-B). All of this runs in the thread that runs autograd.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from wingbeat.collectives import Collectives
from wingbeat.errors import UsageError
from wingbeat.observe.events import stream
from wingbeat.sync.attach import attach, in_backward, on_backward_end
from wingbeat.sync.bucket import Bucket, Slot
from wingbeat.sync.bucketing import Bucketing, ignored, synchronised
from wingbeat.sync.buffers import BufferSync
from wingbeat.sync.convert import check_kind
from wingbeat.sync.merging import LayerMerging
from wingbeat.sync.partial import PartialOptimizer
from wingbeat.sync.steps import Steps
from wingbeat.sync.tuning import SizeTuning
from wingbeat.sync.wiring import Wiring
from wingbeat.sync.wrapped import refuse_around
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
        self.buffer_sync = BufferSync(model, ignored(model), collectives)
        self.bucketing = Bucketing(model, choices.fusion, world)
        self.wiring = Wiring(choices.wire, self.bucketing.slots, collectives)
        self.tuning: SizeTuning | None = None
        self.merging: LayerMerging | None = None
        self.steps_made = Steps(world)
        self.sync = True
        self.lock = threading.RLock()
        self.buffer_root = 0
        self.last_clip: tuple[float, float] | None = None
        self.before_synced_forward: Callable[[], Any] | None = None
        self._scale = 1.0 / world.size
        self._handles: list[Any] = []
        self.inner_handles: list[Any] = []
        self._frozen = [p for _, p in synchronised(model) if not p.requires_grad]
        self._decided: bool | None = None
        self._in_backward = False
        self._skipping = False
        self._shadowing = False
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
        self.steps_made.count += 1
        return self.partial.whole_step(closure)

    def visible_state(self) -> Any:
        """Return the optimizer's state for somebody to read: of the last step, if it is here."""
        return self.optimizer.__dict__["state"]

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the averaged gradients so that their global norm is at most ``max_norm``."""
        return torch.nn.utils.clip_grad_norm_(self.partial.params(), max_norm, norm_type)

    # -- hooks ----------------------------------------------------------------------------

    def detach(self) -> None:
        """Apply what is pending and remove every hook; gradients become plain tensors."""
        self.settle()
        for handle in (*self._handles, *self.inner_handles):
            handle.remove()
        self._handles.clear()
        self.inner_handles.clear()
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.holds(slot.param.grad):
                    bucket.settle()
                    slot.param.grad = slot.view.clone()

    def close(self) -> None:
        """Give the channels back; nothing can be exchanged after that."""
        for world in (self.buffer_sync.channel, self.world if self.world.channel else None):
            if world is not None:
                world.close()

    def enter_forward(self, _model: torch.nn.Module, _args: Any) -> None:
        """Before the model's forward: get ready for the backward that may follow."""
        if not torch.is_grad_enabled() or in_backward():
            return
        refuse_around(self.model)
        self._refuse_unfrozen()
        self.recover()
        # As under DDP, it is the forward that decides whether its gradients are synchronised.
        self._decided = self.sync
        if self.sync:
            if self.before_synced_forward is not None:
                self.before_synced_forward()
            self.buffer_sync.ask(self.buffer_root)

    def _refuse_unfrozen(self) -> None:
        for param in self._frozen:
            if param.requires_grad:
                name = next(n for n, p in self.model.named_parameters() if p is param)
                raise UsageError(
                    f"parameter {name!r} needs a gradient, but was frozen when distribute() was "
                    "called, so the workers would drift apart: call wingbeat.release(model, "
                    "optimizer), and distribute() again after requires_grad_()"
                )

    def reads_directly(self, module: torch.nn.Module) -> bool:
        """Whether the module has parameters or buffers of its own that are synchronised."""
        return bool(self.bucketing.needed_by(module)) or self.buffer_sync.owns(module)

    def enter_compiled(self) -> None:
        """Before a forward that ``torch.compile`` has compiled: nothing can be done inside of it.

        Hooks there would cut the graph in pieces. So all of the model is brought up to date.
        """
        for handle in self.inner_handles:
            handle.remove()
        self.inner_handles.clear()
        self.flush()

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
        """Take in one gradient; called by autograd as soon as it has been accumulated.

        With parameters on several devices several threads of autograd come here.
        """
        with self.lock:
            self._on_grad(index)

    def _on_grad(self, index: int) -> None:
        if not self._in_backward:
            if not (self.sync if self._decided is None else self._decided):
                self._skip_backward()
                return
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

    def _skip_backward(self) -> None:
        """Leave a backward alone, which ends what the forward before it has decided."""
        if self._decided is not None and not self._skipping:
            self._skipping = True
            on_backward_end(self)

    def _open_backward(self) -> None:
        self._next = 0
        self.before_backward()
        self.wiring.boundary()
        if self.tuning is not None and not self.wiring.deciding():
            self.tuning.boundary()
        if self.merging is not None and not self.wiring.deciding():
            self.merging.boundary()
        self.bucketing.hear()
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
        if slot.param.dtype is not slot.view.dtype or slot.param.shape != slot.view.shape:
            check_kind(slot.name, slot.param, slot.view)
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
            bucket.write_tail(None if self._shadowing else self.steps_made.count)
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
        with self.lock:
            self._end_backward()

    def _end_backward(self) -> None:
        self._decided = None
        self._skipping = False
        if not self._in_backward:
            return
        if self.merging is not None:
            self.merging.end()
        self._launch_all()
        # Another model of this backward may have launched nothing yet that others wait for.
        if in_backward():
            on_backward_end(self, "close_backward")
        else:
            self.close_backward()

    def close_backward(self) -> None:
        """Bring the gradients where they are to be; all that is launched has been launched."""
        with self.lock:
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
        self.bucketing.tell()

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

    def shadow_backward(self) -> None:
        """Take part in one backward of the others with gradients of zero."""
        self._open_backward()
        self.zero_grad(True)
        for slot in self.slots:
            slot.param.grad = None
        self._in_backward = self._shadowing = True
        try:
            self.end_backward()
        finally:
            self._shadowing = False

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients, also those that only exist in the buckets."""
        self.recover()
        self.discard()
        for slot in self.slots:
            grad = slot.param.grad
            if grad is not None and grad is slot.pending:
                zeros = not set_to_none and slot.used
                slot.param.grad = torch.zeros_like(slot.param) if zeros else None

    def check_in_step(self, bucket: Bucket) -> None:
        """Make sure that all workers had made the same number of steps; ``bucket`` is whole.

        Raises:
            UsageError: they had not; on every worker.
        """
        if bucket.flat.device.type == "cpu" and not bucket.in_step():
            self.steps_made.disagree()

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

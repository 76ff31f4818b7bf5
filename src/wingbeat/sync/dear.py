"""DeAR's gradients and updates: neither is there before somebody looks.

What starts when is the schedule's (`wingbeat.schedules.dear`). Here pending gradients stand in
``p.grad`` until they are whole, and parameters are marked until their update is made.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from wingbeat.errors import UsageError
from wingbeat.gradients.bucket import Bucket, Slot
from wingbeat.gradients.convert import overlapping
from wingbeat.observe.events import stream
from wingbeat.schedules import Dear
from wingbeat.schedules.dear import Phase
from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    GradientsDropped,
    GradientsNeeded,
    ParametersNeeded,
    PartsNeeded,
    StepCalled,
)
from wingbeat.sync import reduced, scaler
from wingbeat.sync.attach import in_backward
from wingbeat.sync.engine import Engine
from wingbeat.sync.pending import PendingGradient
from wingbeat.updates.ambient import Ambient
from wingbeat.updates.separable import steps_apart
from wingbeat.updates.stale import StaleParameters
from wingbeat.updates.stepper import GroupSnapshot

TWICE = (
    "a parameter that gets its gradient twice in one backward, as with reentrant activation "
    "checkpointing, or a hook that reads it; use checkpoint(..., use_reentrant=False), and read "
    "gradients after backward"
)

PROVING_STEPS = 2
"""Steps in which an optimizer has to show that it leaves gradients as they are."""


class DearEngine(Engine):
    """Hides gradients that are not whole, and makes each bucket's update when it is needed."""

    make_schedule: ClassVar[type[Dear]] = Dear
    defers: ClassVar[bool] = True
    schedule: Dear
    _steps = 0
    _writes_gradients = False
    _added_to: Slot | None = None
    _snapshot: GroupSnapshot
    _ambient: Ambient

    def _start(self) -> None:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise UsageError(
                "DeAR with torch.optim.LBFGS is not possible: each of its steps evaluates the loss "
                "several times and needs whole gradients each time; use wingbeat.AllReduce()"
            )
        self.stale = StaleParameters(self.refresh)
        self.in_parts = self.can_step_in_parts()
        super()._start()
        self._make_pending()

    def can_step_in_parts(self) -> bool:
        """Whether parameters can be updated apart, each when it is needed."""
        params = [slot.param for slot in self.slots]
        apart = not overlapping(params) and steps_apart(self.optimizer)
        return apart and self.stale.can_mark(params)

    def rebucket(self) -> None:
        """Change to the next plan; every worker does so before the same backward."""
        super().rebucket()
        self._make_pending()

    def _make_pending(self) -> None:
        for bucket in self.buckets:
            self.renewed(bucket)

    def renewed(self, bucket: Bucket) -> None:
        """Have what stands for gradients that are not whole stand for the new ones."""
        me = weakref.ref(self)
        for slot in bucket.slots:
            slot.pending = PendingGradient(slot, me)

    def store(self, slot: Slot) -> None:
        """Hide the gradient: what the buffer holds until the all-gather is no gradient."""
        if slot.used:
            slot.param.grad = slot.pending

    def before_backward(self) -> None:
        """Finish the last step, and gather gradients that this backward adds to."""
        self.flush()
        self.tell(BackwardBegins())

    def finish_backward(self) -> None:
        """Do not wait: what has been started may go on while the optimizer's step is called.

        Whether another worker has a gradient where this one has none is not known yet.
        """
        others = self._others
        self.tell(BackwardEnds(looked_at=bool(others)))
        for slot in self.slots:
            slot.param.grad = slot.pending
        # Another optimizer asks first whether there is a gradient at all.
        self._show_gradients_of(others)

    def after_cut_short(self) -> None:
        """The other workers do not know: for them this backward ends like any other."""
        self.tell(BackwardEnds())

    def discard(self) -> None:
        """Let the links finish; the sums are not used, but the others may want to have them."""
        self.tell(GradientsDropped())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let every bucket be updated when it is needed, and return at once.

        A ``closure`` is called once, before. An optimizer that cannot be run on some of its
        parameters steps at once, on whole gradients, and calls the closure as it likes.
        """
        if not self.in_parts or self.partial.hooked:
            return self._step_whole(closure)
        loss = self.evaluate(closure)
        self.recover()
        if self.phase is not Phase.REDUCED or self._replaced():
            self._step_whole(None)
            return loss
        self._steps += 1
        self.steps_made.count += 1
        self._snapshot = self.partial.snapshot()
        self._ambient = Ambient(self.buckets[0].flat.device)
        self.tell(StepCalled())
        self.step_outside(self._snapshot)
        return loss

    def _step_whole(self, closure: Callable[[], Any] | None) -> Any:
        """Step at once on whole gradients: the user's hooks are to see these and new parameters."""
        self.settle()

        def whole() -> Any:
            assert closure is not None
            loss = closure()
            self.settle()
            return loss

        return self.tell(StepCalled(in_parts=False), whole if closure is not None else None)

    def defer(self, bucket: Bucket) -> None:
        """FeedPipe: keep the step's settings, and have whoever reads a parameter update it."""
        bucket.snapshot = self._snapshot
        self.stale.mark(slot.param for slot in bucket.slots if self.partial.owns(slot.param))

    @property
    def phase(self) -> Phase:
        """Where the gradients of the last backward are."""
        return self.schedule.phase

    def evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Call the closure, if there is one, as optimizers do."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _replaced(self) -> bool:
        """Whether somebody has put other gradients, or none, where pending ones were."""
        owns = self.partial.owns
        return any(s.param.grad is not s.pending for s in self.slots if owns(s.param))

    def visible_state(self) -> Any:
        """Return the optimizer's state after all updates; inside its own step, as it is."""
        if not self.partial.stepping:
            self.flush()
        return super().visible_state()

    def step_outside(self, snapshot: GroupSnapshot) -> None:
        """Update at once what is in no bucket but has got a gradient from somewhere."""
        others = [p for p in self.outside if p.grad is not None]
        if others:
            self.partial.step(others, snapshot)

    @property
    def _others(self) -> list[Slot]:
        """Slots of parameters that another optimizer updates, or none."""
        return [slot for slot in self.slots if not self.partial.owns(slot.param)]

    @property
    def outside(self) -> list[torch.Tensor]:
        """The optimizer's parameters that are in no bucket, because they are frozen."""
        slotted = {slot.param for slot in self.slots}
        return [p for p in self.partial.params() if p not in slotted]

    def before_module(self, buckets: Sequence[Bucket]) -> None:
        """Bring the parameters up to date that the module is about to read."""
        with self.lock:
            due = [bucket.index for bucket in buckets if bucket.snapshot is not None]
            if due:
                # As if at the moment of the step that the updates belong to.
                with self._ambient.restored():
                    self.tell(ParametersNeeded(tuple(due)))

    def refresh(self, params: Sequence[torch.Tensor]) -> None:
        """Bring these parameters up to date, as somebody is about to read them."""
        slots = self.bucketing.slot_of
        self.before_module([slots[param].bucket for param in params if param in slots])

    def flush(self) -> None:
        """Apply every update that is due."""
        super().flush()
        self.before_module(self.forward_buckets)

    def settle(self) -> None:
        """Make parameters current and gradients whole, and show the gradients in ``p.grad``."""
        super().settle()
        if not self.amid_backward:  # else they are on their way
            self.settle_gradients()
            self.show_gradients()

    def settle_gradients(self) -> None:
        """Gather what is only reduced, and show it in ``p.grad``."""
        self.tell(GradientsNeeded())

    def show_gradient(self, slot: Slot) -> None:
        """Make ``slot``'s view whole, because somebody touches what stands for it in ``p.grad``.

        Raises:
            UsageError: this happens in a backward that is making it, or it was dropped.
        """
        if self.amid_backward:
            raise UsageError(
                f"the gradient of parameter {slot.name!r} was needed in its own backward: " + TWICE
            )
        with self.lock:
            cut_short = self._in_backward
            # Autograd, which is adding to it now, must find it where it was.
            self._added_to = slot if in_backward() else None
            try:
                self.settle()
            finally:
                self._added_to = None
            slot.used |= in_backward()  # now it has a gradient
        if cut_short:
            raise UsageError(
                f"the gradient of parameter {slot.name!r} is gone: an exception cut its backward "
                "short; call optimizer.zero_grad() and run the backward again"
            )

    def show_gradients(self) -> None:
        """Put whole gradients in the place of pending ones, and None where nobody has any."""
        self._show_gradients_of(self.slots)

    def _show_gradients_of(self, slots: Sequence[Slot]) -> None:
        whole: dict[Bucket, set[Slot]] = {}
        for slot in slots:
            if slot.param.grad is not slot.pending or slot is self._added_to:
                continue
            bucket = slot.bucket
            if bucket not in whole:
                bucket.settle()
                whole[bucket] = set(bucket.contributed())
            if slot in whole[bucket]:
                slot.show()
            else:
                slot.param.grad = None

    def update(self, bucket: Bucket) -> None:
        """Run the update of one bucket, whose gradients are whole."""
        snapshot, bucket.snapshot = bucket.snapshot, None
        assert snapshot is not None
        self.stale.clear(slot.param for slot in bucket.slots)
        begin = time.monotonic_ns()
        self._update_bucket(bucket, snapshot)
        if stream.on:
            stream.record("update", begin, time.monotonic_ns(), bucket=bucket.index)

    def _update_bucket(self, bucket: Bucket, snapshot: GroupSnapshot) -> None:
        whole = bucket.contributed()
        slots = [slot for slot in whole if self.partial.owns(slot.param)]
        # Gradients made since step() belong to the next one, as do zeros asked for meanwhile.
        later = [slot.param.grad for slot in slots]
        for slot in slots:
            slot.show()
        version = bucket.flat._version
        try:
            self.partial.step([slot.param for slot in slots], snapshot)
        finally:
            self._writes_gradients |= bucket.flat._version != version
            for slot, grad in zip(slots, later, strict=True):
                slot.param.grad = grad
        if len(whole) < len(bucket.slots):
            for slot in set(bucket.slots).difference(whole):
                if slot.param.grad is slot.pending:
                    slot.param.grad = None  # nobody has used it

    def wait_for(self, bucket: Bucket, whole: bool) -> None:
        """Wait until what was started last on the bucket is done.

        What an update reads may still be on its way to others, unless the optimizer writes to
        gradients (SGD with ``nesterov`` and ``foreach``). In the first two steps it shows whether
        this one does.
        """
        if bucket.snapshot is None or bucket.handle is None:
            super().wait_for(bucket, whole)
        elif self._writes_gradients or self._steps <= PROVING_STEPS:
            bucket.handle.wait()
        else:
            bucket.handle.wait_received()

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm over all workers' reduced blocks: one small exchange, no gather.

        Inside of ``join()`` whole gradients are clipped, which needs no exchange of its own: a
        worker that has run out of batches cannot know when the others clip.
        """
        self.recover()
        self.tell(PartsNeeded())
        if self.phase is not Phase.REDUCED or self.shadowed:
            self.settle()
            return super().clip_grad_norm_(max_norm, norm_type)
        owned = self._reduced_parts()
        total = reduced.global_norm(self, owned, norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for part in owned:
            part.mul_(scale.to(part.device, part.dtype))
        return total

    def scaler_groups(self) -> list[dict[str, Any]] | None:
        """Show a GradScaler this worker's reduced blocks; None where it needs whole gradients."""
        self.recover()
        self.tell(PartsNeeded())
        if self.phase is not Phase.REDUCED or self.shadowed:
            return None
        device = self.buckets[0].flat.device
        return scaler.groups_of(self._reduced_parts(), self.collectives, device)

    def _reduced_parts(self) -> list[torch.Tensor]:
        """Return what this worker has of the gradients, which is all there."""
        return [part for bucket in self.buckets for part in reduced.owned_parts(self, bucket)]

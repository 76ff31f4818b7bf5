"""One engine for all strategies: hooks become events, and what the schedule answers is done.

What differs from strategy to strategy is in its parts: when what happens (`schedules`), what an
operation on a bucket means (`exchanges`), how gradients are shown (`engine.gradients.views`), who
updates what (`engine.updates`), and what is decided while training goes on (`control`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wingbeat.collectives import Collectives
from wingbeat.control.control import Control
from wingbeat.engine import forks, kinds, looks
from wingbeat.engine.attach import Hooks, in_backward, outside_transforms
from wingbeat.engine.buffers import BufferSync
from wingbeat.engine.entrance import Entrance
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.bucketing import Bucketing, ignored, synchronised
from wingbeat.engine.gradients.convert import (
    refuse_assignment,
    refuse_fused_layouts,
)
from wingbeat.engine.gradients.sparse import SparseGradients, gathers_sparse, sparse_parameters
from wingbeat.engine.gradients.steps import Steps
from wingbeat.engine.hooks import ForwardHook, WeakCall
from wingbeat.engine.members import Members
from wingbeat.engine.returned import refuse_loading
from wingbeat.engine.updates.given import Given
from wingbeat.engine.updates.stepper import Stepper
from wingbeat.engine.updates.update import Closure, Training
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.meter import Meter
from wingbeat.schedules.events import (
    BackwardBegins,
    BackwardEnds,
    BucketReady,
    Event,
    GradientsDropped,
    GradientsNeeded,
    ParametersNeeded,
    Phase,
    Planned,
)
from wingbeat.transport import leaving, termination
from wingbeat.types import Choices


class Engine(Entrance):
    """Synchronises one model's gradients: tells its schedule what happens, and does what it says.

    Attributes:
        control: what is decided while training goes on; None for a worker alone, and where workers
            are not in lockstep.
        add_group: takes a param group for the optimizer; None where none can be added.
        scaled: whether a GradScaler unscales the gradients.
        asked: whether it has asked the optimizer, since the last step, what to do.
        copied: whether all that this worker has is a copy of another's, which it has not used yet.
        hooks: on the model, its parameters and its optimizer; None for a worker alone.
        meter: what its training has taken so far, for whoever watches the job.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        choices: Choices,
        collectives: Collectives,
        plain_step: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        world = collectives.world
        super().__init__(scale=1.0 / world.size)
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.collectives = collectives
        self.choices = choices
        self.stepper = Stepper(optimizer, plain_step)
        lockstep = choices.lockstep or world.size == 1
        self.buffer_sync = BufferSync(model, ignored(model), collectives, lockstep=lockstep)
        sparse = sparse_parameters(model) if world.size > 1 and gathers_sparse(choices) else {}
        self.bucketing = Bucketing(model, choices.fusion, world, lockstep=lockstep, sparse=sparse)
        self.compression = kinds.compression_of(choices, self.bucketing.slots, collectives)
        self.steps_made = Steps(world.rank)
        self.sparse = SparseGradients(sparse, collectives, self.steps_made)
        self.control: Control | None = None
        self.add_group: Callable[[dict[str, Any]], None] | None = None
        self.scaled = self.asked = False
        self.copied = world.returned
        self.hooks: Hooks | None = None
        self._alone: Any = None
        # Parts of parameters are cut from a flat one, and codecs look at matrices in order.
        flat = self.compression.coded is not None or not lockstep
        self.bucketing.strided = not choices.divides and not flat
        if flat and not choices.shard_optimizer:
            refuse_fused_layouts(optimizer)
        self._frozen = [p for _, p in synchronised(model) if not p.requires_grad]
        self._members = Members(model, optimizer)
        refresh = WeakCall(self.refresh)
        training = Training(
            optimizer, self.stepper, self.steps_made, self.bucketing, collectives, refresh
        )
        # Before the exchange, which is made next, is closed: leave no update behind.
        if world.size > 1 and (choices.shard_optimizer or choices.servers is not None):
            world.on_close(WeakCall(self.flush_at_last))
        buffers = self.buffer_sync.tensors
        self.runtime = kinds.runtime_of(choices, training, self.compression, self, buffers)
        self.meter = self.runtime.meter = Meter(type(model).__name__)
        self.meter.show(self.runtime.exchange.sections)
        self.bundling = kinds.bundling_of(choices, self.runtime, WeakCall(self.rebucket))
        self.views = self.runtime.views
        self.update = self.runtime.update
        if world.size > 1:
            self._start()
        else:
            hook = ForwardHook(weakref.ref(self), "enter_alone")
            self._alone = model.register_forward_pre_hook(hook, prepend=True)

    def __reduce__(self) -> Any:
        # Objects that copy their attributes by themselves come out as plain ones.
        return type(None), ()

    def _start(self) -> None:
        exchange, links = self.runtime.exchange, self.collectives
        if self.choices.lockstep:
            self.control = Control(self.choices, self.bucketing, self.compression, links, exchange)
        local = self.choices.averaging is not None
        if not local:
            self.bucketing.build()
        self._planned()
        self.hooks = Hooks(self, gradients=not local)
        forks.add(self)

    def _planned(self) -> None:
        for bucket in self.buckets:
            self.views.renewed(bucket)
        owns = self.stepper.owns
        members = (
            frozenset(slot.index for slot in bucket.slots if owns(slot.param))
            for bucket in self.buckets
        )
        self.runtime.exchange.planned(self.buckets, self.forward_buckets)
        forward = tuple(bucket.index for bucket in self.forward_buckets)
        self.tell(Planned(forward, tuple(members)))
        self.update.planned()

    def rebucket(self) -> None:
        """Change to the next plan; every worker does so before the same backward."""
        super().rebucket()
        self._planned()

    @property
    def phase(self) -> Phase:
        """Where the gradients of the last backward are."""
        return self.runtime.schedule.phase

    @property
    def shadowed(self) -> bool:
        """Whether a worker without batches may be repeating this one's collectives blindly.

        Where the workers agree before each exchange, it is not blind.
        """
        return self.before_synced_forward is not None and not self.update.agrees

    def tell(self, event: Event, closure: Closure = None) -> Any:
        """Do what the schedule has to say to ``event``; return what a step has returned, if any."""
        return self.runtime.tell(event, closure)

    # -- backward -------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Finish the last step, and gather gradients that this backward adds to."""
        self.meter.enter("backward")
        self.before_module(self.forward_buckets)
        self.tell(BackwardBegins())
        self.runtime.checked = False

    def launch(self, bucket: Bucket) -> None:
        """Send a bucket, whose gradients are complete, on its way."""
        if self.bundling is not None:
            self.bundling.look(bucket)
        bucket.wire = self.compression.launching(bucket)
        if bucket.wire is not None and self.update.shards is not None:  # encoded once, not gathered
            self.compression.add_own_residual(bucket, self.runtime.exchange.owned(bucket))
        self.tell(BucketReady(bucket.index))

    def finish_backward(self) -> None:
        """Let gradients be seen, or stand for themselves until somebody looks."""
        # Another optimizer asks first whether there is a gradient at all.
        others = [slot for slot in self.slots if not self.stepper.owns(slot.param)]
        blind = self._shadowing and self.update.agrees
        lost = self.update.lost()
        self.views.hide()
        self.tell(BackwardEnds(looked_at=bool(others) and not blind, lost=lost))
        self.sparse.show()
        if lost:
            for slot in self.slots:
                if self.stepper.owns(slot.param):
                    self.views.lose(slot, self.update.why_lost("a gradient was read"))
                else:
                    slot.param.grad = None
        elif others and not blind:
            self.views.show(others)
        self.meter.enter("other")

    def recover(self) -> None:
        """After a backward that an exception cut short: keep in step with the other workers."""
        cut_short = self.cut_short
        super().recover()
        if cut_short:
            self.update.dropped(True)

    def close_backward(self) -> None:
        """Bring the gradients where they are to be.

        Raises:
            UsageError: none are left for another optimizer, whose step would not say so.
        """
        super().close_backward()
        if self.update.lost() and not all(self.stepper.owns(slot.param) for slot in self.slots):
            self.update.refuse_lost("backward() for another optimizer")

    def discard(self) -> None:
        """Let the links finish; the sums are not used, but the others may want to have them."""
        self.tell(GradientsDropped())

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients, also those that only exist in the buckets."""
        if self.hooks is not None:
            super().zero_grad(set_to_none)
            self.update.dropped(set_to_none)

    # -- who looks ------------------------------------------------------------------------

    def flush(self) -> None:
        """Apply updates that are still under way."""
        self.buffer_sync.apply()
        self.before_module(self.forward_buckets)

    def flush_at_last(self) -> None:
        """Apply what can be, as the world is closed."""
        if self.hooks is None or (self.choices.servers and leaving.failing()):
            return  # nothing is pending yet; or others may never push what would be waited for
        if self.steps_made.parted:
            return  # so nothing is right any more, and that is said already
        with contextlib.suppress(PeerError):  # told already to whoever waited
            self.flush()

    def level(self, *, always: bool = True) -> None:
        """Apply all that is under way; where workers differ for a while, all must call it.

        Args:
            always: whether also if this worker has made no step since the last time.

        Raises:
            PeerError: a worker did not; names it.
        """
        self.recover()
        self.flush()
        if self.update.level(always=always):
            self.buffer_sync.level()
        self.copied = self.copied and not always

    def settle(self) -> None:
        """Make parameters current and gradients whole, and show the gradients in ``p.grad``."""
        self.recover()
        self.flush()
        if self.views.hidden and not self.amid_backward:  # else they are on their way
            self.settle_gradients()
            self.views.show()

    def settle_gradients(self) -> None:
        """Make gradients whole between backward and step, because somebody looks at them."""
        self.tell(GradientsNeeded())

    def before_module(self, buckets: Sequence[Bucket]) -> None:
        """Bring the parameters up to date that a module is about to read."""
        if not self.update.defers:
            return
        with self.lock:
            due = tuple(bucket.index for bucket in buckets if bucket.due)
            if due:
                # As if at the moment of the step that the updates belong to.
                with outside_transforms(), self.update.as_of_step():
                    self.tell(ParametersNeeded(due))

    def refresh(self, params: Sequence[torch.Tensor]) -> None:
        """Bring these parameters up to date, as somebody is about to read them."""
        slots = self.bucketing.slot_of
        self.before_module([slots[param].bucket for param in params if param in slots])

    def show_gradient(self, slot: Slot) -> None:
        """Make ``slot``'s view whole, because somebody touches what stands for it in ``p.grad``.

        Raises:
            UsageError: this happens in a backward that is making it, or it was dropped.
        """
        if self.amid_backward:
            raise UsageError(
                f"the gradient of parameter {slot.name!r} was needed in its own backward: a "
                "parameter that gets its gradient twice in one backward, as in two reentrant "
                "checkpoints that share it, or a hook that reads it; use checkpoint(..., "
                "use_reentrant=False), and read gradients after backward"
            )
        with self.lock:
            cut_short = self._in_backward
            with self.views.adding_to(slot if in_backward() else None):
                self.settle()
            slot.used |= in_backward()  # now it has a gradient
        if cut_short:
            raise UsageError(f"the gradient of parameter {slot.name!r} is gone: " + looks.GONE)

    def unscale(
        self, grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Do as a GradScaler does with ``grads``, on this worker's blocks where these suffice."""
        looks.unscale(self, grads, found_inf, inv_scale)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the averaged gradients so that their global norm is at most ``max_norm``.

        By the norm over all workers' reduced blocks where these suffice: one small exchange, no
        gather. Inside of ``join()`` whole gradients are clipped, which needs no exchange of its
        own: a worker that has run out of batches cannot know when the others clip.
        """
        return looks.clip_grad_norm_(self, max_norm, norm_type)

    # -- the optimizer --------------------------------------------------------------------

    def step(self, given: Given) -> Any:
        """Do what a call of the user's ``optimizer.step`` asks for; return the closure's value.

        Raises:
            UsageError: model or optimizer have other parameters than at `distribute`.
        """
        if self.hooks is not None:
            self._members.check()
        # A scaler asks before each step that it makes: without one, that was the last.
        if given.closure is not None:  # whose forwards belong to the step
            self.between_steps()
        self.scaled, self.asked = self.scaled and self.asked, False
        self.copied = False
        self.meter.enter("update")
        with self.stepper.calling(given):
            returned = self.update.step(self, given.closure)
        self.meter.stepped()
        termination.stepped()
        return returned

    def between_steps(self) -> None:
        """Before what may be the first of a step: stop here if SIGTERM stops the job.

        Raises:
            SystemExit: it does, and all is saved.
        """
        if not self.stepper.stepping:
            termination.between(lockstep=self.choices.lockstep)

    def _begin_forward(self) -> None:
        super()._begin_forward()
        self.update.before_forward()

    def enter_alone(self, *_args: Any) -> None:
        """Before a forward of a worker alone, which has no other hooks."""
        if torch.is_grad_enabled() and not in_backward():
            self.between_steps()

    def visible_state(self) -> Any:
        """Return the optimizer's state after all updates; inside its own step, as it is."""
        if self.update.defers and not self.stepper.stepping:
            self.flush()
        return self.update.visible_state()

    def whole_state(self) -> contextlib.AbstractContextManager[None]:
        """Let the optimizer hold its whole state inside; with shards on all workers alike."""
        return self.update.whole_state(self)

    def after_load(self, *_args: Any) -> None:
        """After the optimizer has loaded a state dict: its groups are new."""
        self.stepper.refresh()
        self.update.loaded()

    # -- hooks ----------------------------------------------------------------------------

    def detach(self, *, meet: bool = True) -> None:
        """Apply what is pending and remove every hook; gradients become plain tensors.

        Args:
            meet: whether workers whose models differ level them first, which all must do.
        """
        self.settle()
        if meet:
            self.update.leave()
            self.level()
        self.remove_hooks()
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.holds(slot.param.grad):
                    slot.param.grad = slot.view.clone()
        self.update.detach()

    def remove_hooks(self) -> None:
        """Take notice of nothing any more; safe to call twice."""
        forks.discard(self)
        if self.hooks is not None:
            self.hooks.remove()
        if self._alone is not None:
            self._alone.remove()

    def close(self) -> None:
        """Give the channel back, and the buffers' in it; nothing can be exchanged after that."""
        if self.world.channel:
            self.world.close()

    def before_state(self, *_args: Any) -> None:
        """Before a state dict is made."""
        self.settle()

    def before_loading(self, *_args: Any) -> None:
        """Before a state dict is loaded: nothing of the old one is to come after it.

        Each module of a model asks for it, so only the first finds anything to do.

        Raises:
            UsageError: it would undo, on this worker alone, what that has copied from another.
        """
        refuse_loading(self, "load_state_dict()")
        self.settle()
        self.level(always=False)

    def before_load(
        self, _module: Any, _state: Any, prefix: str, metadata: dict[str, Any], *_args: Any
    ) -> None:
        """Before a module loads its part of a state dict."""
        refuse_assignment(prefix, metadata)
        self.before_loading()

"""What every overlapped schedule shares: its parts, and what the user's calls set going."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from wingbeat.collectives import Collectives
from wingbeat.control.merging import LayerMerging
from wingbeat.control.tuning import SizeTuning
from wingbeat.errors import UsageError
from wingbeat.exchanges.collective import Exchange
from wingbeat.gradients.bucket import Bucket
from wingbeat.gradients.bucketing import Bucketing, ignored, synchronised
from wingbeat.gradients.compression import Wiring
from wingbeat.gradients.convert import refuse_fused_layouts
from wingbeat.gradients.steps import Steps
from wingbeat.observe.events import stream
from wingbeat.schedules.events import (
    BucketReady,
    Defer,
    Event,
    Planned,
    Schedule,
    Show,
    Start,
    Step,
    StepCalled,
    Update,
    Wait,
)
from wingbeat.sync.attach import attach, in_backward
from wingbeat.sync.buffers import BufferSync
from wingbeat.sync.intake import Intake
from wingbeat.sync.wrapped import refuse_around
from wingbeat.transport.world import World
from wingbeat.types import Choices
from wingbeat.updates.stepper import PartialOptimizer

_ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()


def _flush_all() -> None:
    """Before a fork: a child has no threads that could bring it what is on its way."""
    for engine in list(_ENGINES):
        engine.flush()


os.register_at_fork(before=_flush_all)


class Engine(Intake):
    """Synchronises one model's gradients: tells its schedule what happens, and does what it says.

    Attributes:
        make_schedule: makes the schedule.
        defers: whether gradients or updates may be there only when somebody looks.
        checked: whether workers are known to be in step in the present iteration.
    """

    make_schedule: ClassVar[type[Schedule]]
    defers: ClassVar[bool] = False

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        choices: Choices,
        world: World,
        collectives: Collectives,
        plain_step: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        super().__init__(scale=1.0 / world.size)
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
        self.exchange = Exchange(collectives, self.wiring)
        self.steps_made = Steps(world)
        self.before_synced_forward: Callable[[], Any] | None = None
        self._handles: list[Any] = []
        self.inner_handles: list[Any] = []
        # Parts of parameters are cut from a flat one, and codecs look at matrices in order.
        self.bucketing.strided = not choices.shard_optimizer and self.wiring.coded is None
        if self.wiring.coded is not None and not choices.shard_optimizer:
            refuse_fused_layouts(optimizer)
        self._frozen = [p for _, p in synchronised(model) if not p.requires_grad]
        self._start()

    def __reduce__(self) -> Any:
        # Objects that copy their attributes by themselves come out as plain ones.
        return type(None), ()

    def _start(self) -> None:
        self.schedule = self.make_schedule()
        if self.choices.tuning is not None:
            self.tuning = SizeTuning(
                self.choices.tuning, self.choices, self.bucketing, self.collectives
            )
        if self.choices.merging is not None:
            self.merging = LayerMerging(
                self.choices.merging, self.choices, self.bucketing, self.wiring, self.collectives
            )
        self.bucketing.build()
        self._tell_plan()
        self._handles = attach(self)
        _ENGINES.add(self)

    @property
    def shadowed(self) -> bool:
        """Whether a worker without batches may be repeating this one's collectives blindly.

        With shards the workers agree before each exchange.
        """
        return self.before_synced_forward is not None and not self.choices.shard_optimizer

    @property
    def forward_buckets(self) -> list[Bucket]:
        """The buckets of the plan in force, first needed first."""
        return self.bucketing.forward_buckets

    # -- what the schedule says ----------------------------------------------------------

    def tell(self, event: Event, closure: Callable[[], Any] | None = None) -> Any:
        """Do what the schedule has to say to ``event``; return what a step has returned, if any."""
        returned = None
        for command in self.schedule.react(event):
            match command:
                case Start(operation, number, chained):
                    self.exchange.start(operation, self.buckets[number], chained)
                case Wait(number, whole):
                    self._wait(self.buckets[number], whole)
                case Show():
                    self.show_gradients()
                case Defer(number):
                    self.defer(self.buckets[number])
                case Update(number):
                    self.update(self.buckets[number])
                case Step():
                    self.steps_made.count += 1
                    returned = self.partial.whole_step(closure)
        return returned

    def _tell_plan(self) -> None:
        self.tell(Planned(tuple(bucket.index for bucket in self.forward_buckets)))

    def _wait(self, bucket: Bucket, whole: bool) -> None:
        with self.exposed(bucket.index):
            self.wait_for(bucket, whole)
        if whole and not self.checked:
            self.check_in_step(bucket)
            self.checked = True

    def wait_for(self, bucket: Bucket, whole: bool) -> None:
        """Wait until what was started last on the bucket is done."""
        if whole:
            bucket.settle()
        elif bucket.handle is not None:
            bucket.handle.wait()

    def show_gradients(self) -> None:
        """Put whole gradients in the place of what stands for them in ``p.grad``."""

    def defer(self, bucket: Bucket) -> None:
        """Remember that the bucket's update is due."""
        raise NotImplementedError

    def update(self, bucket: Bucket) -> None:
        """Make the bucket's update that is due."""
        raise NotImplementedError

    def launch(self, bucket: Bucket) -> None:
        """Send a bucket, whose gradients are complete, on its way."""
        bucket.wire = self.wiring.launching(bucket)
        self.tell(BucketReady(bucket.index))

    def rebucket(self) -> None:
        """Change to the next plan; every worker does so before the same backward."""
        super().rebucket()
        self._tell_plan()

    # -- what kinds of engines differ in --------------------------------------------------

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
        """Run the optimizer's own step on whole gradients, unless a kind of engine defers it."""
        self.recover()
        return self.tell(StepCalled(in_parts=False), closure)

    def visible_state(self) -> Any:
        """Return the optimizer's state for somebody to read: of the last step, if it is here."""
        return self.optimizer.__dict__["state"]

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the averaged gradients so that their global norm is at most ``max_norm``."""
        self.recover()
        return torch.nn.utils.clip_grad_norm_(self.partial.params(), max_norm, norm_type)

    # -- hooks ----------------------------------------------------------------------------

    def detach(self) -> None:
        """Apply what is pending and remove every hook; gradients become plain tensors."""
        self.settle()
        _ENGINES.discard(self)
        for handle in (*self._handles, *self.inner_handles):
            handle.remove()
        self._handles.clear()
        self.inner_handles.clear()
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.holds(slot.param.grad):
                    slot.param.grad = slot.view.clone()

    def close(self) -> None:
        """Give the channel back, and the buffers' in it; nothing can be exchanged after that."""
        if self.world.channel:
            self.world.close()

    def enter_forward(self, _model: torch.nn.Module, _args: Any) -> None:
        """Before the model's forward: get ready for the backward that may follow."""
        if not torch.is_grad_enabled() or in_backward():
            return
        refuse_around(self.model)
        self._refuse_unfrozen()
        self.recover()
        # As under DDP, it is the forward that decides whether its gradients are synchronised.
        # One that is not does not undo what an earlier one of the same backward has decided.
        self._decided = self.sync or bool(self._decided)
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

    def before_load(
        self, _module: Any, _state: Any, prefix: str, metadata: dict[str, Any], *_args: Any
    ) -> None:
        """Before a module loads its part of a state dict.

        Raises:
            UsageError: with ``assign=True``, which would give it other parameters.
        """
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                f"load_state_dict(assign=True) of {prefix or 'the model'!r} would exchange the "
                "parameters that the optimizer and the buckets have: call it before distribute(), "
                "or leave assign out"
            )
        self.settle()

    def after_load(self, *_args: Any) -> None:
        """After the optimizer has loaded a state dict: its groups are new."""
        self.partial.refresh()

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

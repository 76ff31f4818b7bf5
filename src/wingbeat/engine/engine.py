"""One engine for all strategies: hooks become events, and the schedule's commands are performed.

A strategy is a composition of parts: the order of operations (`schedules`), the operations on a
bucket (`exchanges`), the contents of ``p.grad`` (`engine.gradients.views`), the places of updates
(`engine.updates`), and decisions during training (`control`).

======================================== =========================== ========================
PyTorch calls                            method of `Engine`          event
======================================== =========================== ========================
forward pre-hook of the model            ``before_forward``
forward pre-hook of a module             ``before_module_forward``   `ParametersNeeded`
read of a parameter, update deferred     ``refresh``                 `ParametersNeeded`
hook on the first gradient of a backward ``on_grad``                 `BackwardBegins`
hook on the last gradient of a bucket    ``on_grad``                 `BucketReady`
autograd callback, end of a backward     ``end_backward``            `BackwardEnds`
read of a placeholder in ``p.grad``      ``show_gradient``           `GradientsNeeded`
``GradScaler.unscale_``                  ``unscale``                 `PartsNeeded`
``clip_grad_norm_``                      ``clip_grad_norm_``         `PartsNeeded`
``zero_grad``                            ``zero_grad``               `GradientsDropped`
``optimizer.step``                       ``step``                    `StepCalled`
======================================== =========================== ========================

`Planned` follows each change of buckets. `runtime.Runtime` passes each command to the part that
performs it. Buckets are launched strictly in the plan's order, on every worker, so no negotiation
is needed (DeAR, section III-B). Gradients arrive in the threads that run autograd.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.buffers import BufferSync
from wingbeat.engine.context import BuildContext
from wingbeat.engine.gradients.bucket import Bucket, Slot, StepCounter, check_kind, fill
from wingbeat.engine.gradients.bucketing import (
    Bucketing,
    ignored,
    is_compiled,
    synchronised,
)
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.gradients.placed import (
    CopiesCheck,
    clip,
    local,
    reduces_later,
    shard_all,
    sharding_states,
)
from wingbeat.engine.gradients.sparse import SparseGradients, gathers_sparse, sparse_parameters
from wingbeat.engine.gradients.streams import GradientStreams
from wingbeat.engine.gradients.views import (
    PendingGradient,
    clip_blocks,
    norm_is_separable,
    unscale_blocks,
)
from wingbeat.engine.hooks import (
    ForwardHook,
    Hooks,
    WeakCall,
    arrived_twice,
    call_at_backward_end,
    callers_of_backward,
    in_backward,
    in_transform,
    outside_transforms,
    sum_partial_gradients,
    threads_in_backward,
)
from wingbeat.engine.model_checks import (
    ParameterCheck,
    refuse_assignment,
    refuse_fused_layouts,
    refuse_loading,
    refuse_unfrozen,
    refuse_wrapper_around,
)
from wingbeat.engine.runtime import Recovery
from wingbeat.engine.updates.stepper import StepArguments, Stepper
from wingbeat.engine.updates.update import Training
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.meter import Meter
from wingbeat.parts.strategy import Strategy
from wingbeat.planning.backward import BackwardProfiler
from wingbeat.planning.control import Control
from wingbeat.planning.merging import LayerMerging
from wingbeat.schedules import events
from wingbeat.schedules.events import Phase
from wingbeat.schedules.intents import Intent
from wingbeat.traits import KEPT, MEANS
from wingbeat.transport import graceful_shutdown
from wingbeat.transport.world import World

_is_due = operator.attrgetter("due")

P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(
    method: Callable[Concatenate[Engine, P], R],
) -> Callable[Concatenate[Engine, P], R]:
    """Let one thread at a time run such methods: others may read the model while one trains it."""

    @functools.wraps(method)
    def run(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return run


_GONE = "an exception cut its backward short; call optimizer.zero_grad() and run the backward again"


class Engine:
    """Synchronises one model's gradients, and runs its optimizer.

    Attributes:
        slots: one for each trained parameter with a dense gradient.
        control: the decisions made during training; None for a single worker or without lockstep.
        add_group: adds a param group to the optimizer; None if no group can be added.
        scaled: whether a GradScaler unscales the gradients.
        asked: whether a GradScaler has queried, since the last step, how gradients are unscaled.
        copied: whether this worker has copied another's state, and has not used it yet.
        hooks: on the model, its parameters and its optimizer; None for a single worker.
        recovery: continues without failed workers; None where training ends.
        dropped: whether the last step was dropped after a failure.
        meter: counts for `wingbeat top`.
        sync: whether backwards synchronise gradients; False inside `no_sync`.
        scale: factor of gradients, the inverse of the number of workers.
        buffer_root: the rank whose buffers all workers copy.
        before_synced_forward: called before a forward whose gradients are synchronised.
        dispatch: performs the schedule's commands for an event; returns the result of a whole step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        collectives: Collectives,
        plain_step: Callable[[torch.optim.Optimizer], Any],
    ) -> None:
        world = collectives.world
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.collectives = collectives
        self.strategy = strategy
        self.sync = True
        self.lock = threading.RLock()
        self.buffer_root = 0
        self.scale = 1.0 / world.size
        self.before_synced_forward: Callable[[], Any] | None = None
        self._decided: bool | None = None
        self._in_backward = False
        self._callers: set[int] = set()  # idents of threads that may have called the backward
        self._backward: Callable[[], Any] = lambda: None
        self._profiled: BackwardProfiler | None = None
        self._skipping = False
        self._shadowing = False
        self._next = 0
        self.stepper = Stepper(optimizer, plain_step)
        lockstep = strategy.exchange.lockstep or world.size == 1
        self.buffer_sync = BufferSync(model, ignored(model), collectives, lockstep=lockstep)
        sparse = sparse_parameters(model) if world.size > 1 and gathers_sparse(strategy) else {}
        self.bucketing = Bucketing(
            model, strategy.plan.fusion(), world, lockstep=lockstep, sparse=sparse
        )
        exchange = strategy.exchange
        self.compression = Compression(
            exchange.gradient_wire(strategy.wire, world.size),
            self.bucketing.slots,
            collectives,
            sums=exchange.collective,
        )
        self.steps_made = StepCounter(world.rank, world.ranks)
        self.sparse = SparseGradients(sparse, collectives, self.steps_made)
        self.control: Control | None = None
        self.add_group: Callable[[dict[str, Any]], None] | None = None
        self.scaled = self.asked = False
        self.copied = world.returned
        self.slots = self.bucketing.slots
        device = self.bucketing.device
        self._streams = None if device.type == "cpu" else GradientStreams(device)
        self._updated: torch.Event | None = None  # after the last deferred update
        self._copies: CopiesCheck | None = None
        self._sharding = [] if world.inside is None else sharding_states(model)
        if world.inside is not None and world.size > 1:
            named = [(slot.name, slot.param) for slot in self.slots]
            self._copies = CopiesCheck(named, world.inside)
        self.stepper.follow(self.slots)
        self.hooks: Hooks | None = None
        self._single_worker_hooks: list[Any] = []
        # Parts of parameters are slices of a flat buffer, and codecs read matrices in order.
        flat = self.compression.coded is not None or not lockstep
        self.bucketing.strided = not strategy.update_part.divides and not flat
        if flat and not strategy.update_part.shards:
            refuse_fused_layouts(optimizer)
        self._frozen = [p for _, p in synchronised(model) if not p.requires_grad]
        self._parameter_check = ParameterCheck(model, optimizer)
        refresh = WeakCall(self.refresh)
        training = Training(
            optimizer, self.stepper, self.steps_made, self.bucketing, collectives, refresh
        )
        # Pending updates are applied before the exchange, which is made next, is closed.
        if world.size > 1 and (strategy.update_part.shards or KEPT in exchange.has):
            world.on_close(WeakCall(self.flush_on_close))
        context = BuildContext(
            strategy,
            training,
            self.compression,
            gatherer=self,
            buffers=self.buffer_sync.tensors,
            rebucket=WeakCall(self.rebucket),
        )
        several = world.size > 1 or world.group is not None
        self.runtime = exchange.build(context) if several else context.single_worker()
        self.compression = context.compression
        self.meter = self.runtime.meter = Meter(type(model).__name__)
        self.meter.show(self.runtime.exchange.sections)
        self.recovery = self.runtime.recovery
        self.dropped = False
        self.bundling = self.runtime.profiler
        self.views = self.runtime.views
        self.update = self.runtime.update
        self.dispatch = self.runtime.dispatch
        if several:
            self._start()
        else:
            hook = ForwardHook(weakref.ref(self), "before_forward")
            self._single_worker_hooks = [
                model.register_forward_pre_hook(hook, prepend=True),
                *sum_partial_gradients(self.slots),
            ]
        if self.recovery is not None:
            self.recovery.attach(self)

    def __reduce__(self) -> Any:
        # Copies of objects that refer to the engine are plain.
        return type(None), ()

    def _start(self) -> None:
        if self.strategy.exchange.lockstep:
            self.control = Control(
                self.strategy, self.bucketing, self.compression, self.collectives, self.runtime
            )
            self.meter.compare = self.control.compare
        local = MEANS in self.strategy.exchange.has
        if not local:
            self.bucketing.build()
        self._adopt_buckets()
        self.hooks = Hooks(self, gradients=not local)
        _flushed_before_fork.add(self)

    # -- parameters, buckets and phases ---------------------------------------------------

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """All trained parameters, those with sparse gradients last."""
        return [*(slot.param for slot in self.slots), *self.sparse.params]

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the current plan, first ready first."""
        return self.bucketing.buckets

    def readers(self) -> set[torch.nn.Module]:
        """Return the modules that directly hold tensors that may not be current in a forward."""
        modules = filter(self.bucketing.needed_by, self.model.modules())
        # Buffers may be inside compiled modules too.
        due = {each for each in modules if self.update.defers or is_compiled(each)}
        return due | self.buffer_sync.owners()

    @property
    def phase(self) -> Phase:
        """The state of the last backward's gradients."""
        return self.runtime.schedule.phase

    @property
    def backward_running(self) -> bool:
        """Whether a synchronised backward is running, in any thread."""
        if not self._in_backward or self._backward() is None:
            return False
        # After an exception, a thread of autograd for a device may keep the graph a little longer.
        return in_backward() or not self._callers.isdisjoint(threads_in_backward())

    @property
    def backward_aborted(self) -> bool:
        """Whether an exception has ended a synchronised backward."""
        return self._in_backward and not self.backward_running

    @property
    def merging(self) -> LayerMerging | None:
        """Plans which layers are merged; None without a plan."""
        return None if self.control is None else self.control.merging

    @property
    def passes(self) -> BackwardProfiler | None:
        """Times backwards for planning; None without a plan."""
        by = self.merging or self.bundling
        return None if by is None else by.passes

    @property
    def shadowed(self) -> bool:
        """Whether a worker without batches may repeat this one's collectives.

        False where the workers agree before each exchange.
        """
        return self.before_synced_forward is not None and not self.update.agrees

    def rebucket(self) -> None:
        """Change to the next plan; every worker does so before the same backward."""
        self.compression.settle()
        self.bucketing.rebuild()
        self._adopt_buckets()

    def move(self, world: World) -> None:
        """Exchange in ``world``, another group of workers, from the next backward on."""
        self.collectives.move(world)
        self.world, self.scale = world, 1.0 / world.size
        self.steps_made.move(world.rank, world.ranks)
        self.bucketing.move(world)
        self.buffer_sync.move()

    def _guard(self, operation: Callable[[], object]) -> None:
        """Perform an operation with other workers, and recover where that is possible."""
        if self.recovery is None:
            operation()
        else:
            self.recovery.guard(operation)

    @property
    def dropping(self) -> bool:
        """Whether the present step exchanges and applies nothing, after a failure."""
        return self.recovery is not None and self.recovery.progress.dropping

    def _adopt_buckets(self) -> None:
        buckets, forward = self.buckets, self.bucketing.forward_buckets
        for bucket in buckets:
            self.views.on_new_buffer(bucket)
        if self.hooks is not None:
            self.hooks.arrivals.watch(buckets)
        members = [frozenset(slot.index for slot in b.slots if slot.owned) for b in buckets]
        self.runtime.exchange.planned(buckets, forward)
        self.dispatch(events.Planned(tuple(bucket.index for bucket in forward), tuple(members)))
        self.update.on_new_buckets()

    # -- forward --------------------------------------------------------------------------

    def before_forward(self, _model: torch.nn.Module, _args: Any) -> None:
        """Decide before a forward whether the backward that may follow synchronises."""
        if not torch.is_grad_enabled() or in_backward():
            return
        self.between_steps()
        if self.hooks is None:  # a single worker
            return
        with outside_transforms():
            self._begin_forward()
        if self.sync and not self.model.training and self.before_synced_forward is None:
            return  # an evaluation, perhaps on this worker only; or backward decides
        # As under DDP, the forward decides whether gradients are synchronised. One that does not
        # synchronise keeps an earlier forward's decision.
        self._decided = self.sync or bool(self._decided)
        self._request_buffers()

    def begin_step(self) -> None:
        """Begin a step in which each backward decides whether it synchronises."""
        self.between_steps()
        self._begin_forward()
        self._request_buffers()

    @_exclusive
    def _begin_forward(self) -> None:
        self.meter.enter("forward")
        if self._streams is not None:
            self._streams.enter_forward()
        refuse_wrapper_around(self.model, meshed=self.world.inside is not None)
        refuse_unfrozen(self.model, self._frozen)
        self.recover()
        self.update.before_forward()

    @_exclusive
    def _request_buffers(self) -> None:
        if self.sync:
            if self.before_synced_forward is not None:
                self.before_synced_forward()
            # Buffers may be a transform's arguments, and cannot be written to.
            if not in_transform() and not self.dropping:
                self._begin_exchange(of_buffers=True)
                self._guard(lambda: self.buffer_sync.request(self.buffer_root))

    def _begin_exchange(self, *, of_buffers: bool = False) -> None:
        """Record the beginning of an exchange, after which a failure costs the present step."""
        if self.recovery is None or (of_buffers and self.buffer_sync.channel is None):
            return
        self.recovery.progress.begin()
        self.steps_made.asks = self.recovery.wanted

    @_exclusive
    def before_compiled_forward(self) -> None:
        """Make the whole model current before a compiled forward: inner hooks break its graph."""
        if self.hooks is not None:
            self.hooks.remove_inner()
        self.flush()

    def is_pending(self, module: torch.nn.Module) -> bool:
        """Whether a module's parameters, or any buffers, are not current."""
        if self.buffer_sync.pending:
            return True
        return any(map(_is_due, self.bucketing.needed_by(module)))

    @_exclusive
    def before_module_forward(self, module: torch.nn.Module, _args: Any) -> None:
        """Make the tensors that a module reads current before its forward."""
        if not in_transform():
            self._guard(self.buffer_sync.apply)
        buckets = self.bucketing.needed_by(module)
        if buckets:
            self.apply_updates(buckets)

    def apply_updates(self, buckets: Sequence[Bucket]) -> None:
        """Apply the deferred updates of these buckets."""
        if not self.update.defers:
            return
        with self.lock:
            due = tuple(bucket.index for bucket in buckets if bucket.due)
            if due and self.update.modes is not None:
                with outside_transforms(), self.update.modes.restored():
                    self.dispatch(events.ParametersNeeded(due))
                self._note_update()

    def _note_update(self) -> None:
        """Record that parameters were written on the current stream."""
        if self._streams is not None:
            self._updated = self._streams.current.record_event()

    def before_gather(self, params: Sequence[torch.Tensor]) -> torch.Event | None:
        """Update parameters that ``fully_shard`` is about to gather; return what it must follow."""
        self.refresh(params)
        return self._updated

    def refresh(self, params: Sequence[torch.Tensor]) -> None:
        """Apply the deferred updates of parameters that are about to be read."""
        found = (self.bucketing.slot_of.get(id(param)) for param in params)
        self.apply_updates([slot.bucket for slot in found if slot is not None])

    # -- backward: gradients into buckets -------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this worker only, until a backward outside this context."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    def on_grad(self, param: torch.Tensor) -> None:
        """Copy accumulated gradients into their bucket; called by several threads of autograd."""
        with self.lock:
            slot = self.bucketing.slot_of[id(param)]
            if not self._enters_backward(slot.name):
                return
            assert self.hooks is not None
            if self.hooks.arrivals.listing:
                if self.hooks.arrivals.add(slot):
                    self._add_gradients(slot.bucket)
                return
            passes = self._profiled
            if passes is not None:
                passes.enter(slot.index)
            self._add_gradient(slot)
            if passes is not None:
                passes.leave()

    def on_sparse_grad(self, index: int, _param: torch.Tensor) -> None:
        """Check a sparse gradient, which is exchanged at the end of its backward."""
        with self.lock:
            if self._enters_backward(self.sparse.names[index]):
                self.sparse.check(index)

    def _enters_backward(self, name: str) -> bool:
        """Begin a backward at its first gradient; return whether it is synchronised."""
        if not self._in_backward:
            if not (self.sync if self._decided is None else self._decided):
                if self._decided is not None and not self._skipping:
                    self._skipping = True
                    self.meter.enter("backward")
                    call_at_backward_end(self, "end_backward")  # resets the forward's decision
                return False
            if torch.is_grad_enabled():
                self._refuse_graph()
            decided, self._decided = self._decided, None
            self.views.begin_backward()  # if it raises, the forward's decision is consumed
            self._decided = decided
            self._open_backward()
            self._in_backward, self._callers = True, callers_of_backward()
            assert self.hooks is not None
            arrivals = self.hooks.arrivals
            self._backward = call_at_backward_end(self, "end_backward", arrivals.abandon)
            passes = self.passes
            self._profiled = passes if passes is not None and passes.enabled else None
            if self._profiled is not None:
                self._profiled.begin()
            elif not self.bucketing.observing and self.bucketing.device.type == "cpu":
                arrivals.begin()  # elsewhere gradients are copied on the streams that made them
        elif self._backward() is None:
            raise UsageError(
                f"parameter {name!r} got a gradient, but an exception has cut the backward before "
                "this one short; call optimizer.zero_grad() after it"
            )
        return True

    def _refuse_graph(self) -> NoReturn:
        self._decided = None
        for param in self.trained:
            param.grad = None
        raise UsageError(
            "backward(create_graph=True): gradients that are exchanged have no graph, so a "
            "penalty on p.grad would have no effect; use torch.autograd.grad(loss, "
            "model.parameters(), create_graph=True) and call backward() on the loss with the "
            "penalty"
        )

    def _open_backward(self) -> None:
        """Finish the last step, and gather gradients that this backward adds to."""
        self._next = 0
        self.meter.enter("backward")
        self.apply_updates(self.bucketing.forward_buckets)
        self._begin_exchange()
        self.dispatch(events.BackwardBegins())
        self.runtime.checked = False
        self.bucketing.adopt_order()
        self.compression.count_step()
        if self.control is not None:
            self.control.boundary()
        if self.bucketing.stale:
            if self._streams is not None:
                for bucket in self.buckets:
                    self._streams.record_uses(bucket.flat)
            self.rebucket()
        for bucket in self.buckets:
            bucket.settle()  # an operation on the buffer holds a reference too
            if bucket.is_referenced():
                if self._streams is not None:
                    self._streams.record_uses(bucket.flat)
                bucket.reallocate()
                self.views.on_new_buffer(bucket)
            bucket.reset()
        if self._streams is not None:
            self._streams.begin()

    def _add_gradient(self, slot: Slot) -> None:
        if slot.ready:
            raise arrived_twice(slot.name)
        self.bucketing.observe_ready(slot.index)
        bucket = slot.bucket
        self._copy_gradients(bucket, [slot])
        bucket.missing -= 1
        if bucket.missing == 0:
            self._launch_complete()

    def _add_gradients(self, bucket: Bucket) -> None:
        """Copy all gradients of a bucket that has become complete, and launch it."""
        self._copy_gradients(bucket, bucket.slots)
        bucket.missing = 0
        self._launch_complete()

    def _copy_gradients(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        if bucket.handle is not None:
            bucket.settle()
        if self._streams is not None:
            self._streams.before_write(bucket)
        for slot in slots:
            param, view = slot.param, slot.view
            grad = param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise UsageError(
                    f"parameter {slot.name!r} has a sparse gradient, which has no place in a "
                    "bucket: sparse gradients are those of torch.nn.Embedding and EmbeddingBag, "
                    "made with sparse=True before distribute(); use one of these, or sparse=False"
                )
            if param.dtype is not view.dtype or local(param).shape != view.shape:
                check_kind(slot.name, local(param), view)
        fill(slots, self.scale)
        if self._copies is not None and self._copies.on:
            for slot in slots:
                self._copies.add(slot.index, slot.view)
        self.views.on_gradients(slots)

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            self._next += 1
            if self._streams is not None:
                self._streams.join(bucket)
            steps = None if self._shadowing else self.steps_made.count
            bucket.write_tail(steps, self.steps_made.rank, asks=self.steps_made.asks)
            if self.bundling is not None:
                self.bundling.measure_widths(bucket)
            bucket.wire = self.compression.launching(bucket)
            if bucket.wire is not None and self.update.shards is not None:
                # Encoded once, because the sums are not gathered.
                self.compression.add_own_residual(bucket, bucket.owned(self.world.rank))
            self.dispatch(events.BucketReady(bucket.index))

    @torch.no_grad()
    def _launch_all(self) -> None:
        """Launch whatever is launched once per backward, complete or not."""
        for bucket in self.buckets[self._next :]:
            missing = [slot for slot in bucket.slots if not slot.ready]
            if missing:
                self._copy_gradients(bucket, missing)
            bucket.missing = 0
        self._launch_complete()
        self._in_backward = False
        self.sparse.start(self.scale, shadowing=self._shadowing)
        if not self.dropping:
            self._guard(lambda: self.buffer_sync.start(self.buffer_root))
        if self.control is not None:
            self.control.exchange()
        self.bucketing.publish_order()

    # -- backward: its end ----------------------------------------------------------------

    def end_backward(self) -> None:
        """Launch all buckets, after callbacks in which ``fully_shard`` reduces the last ones."""
        if reduces_later(self._sharding):
            call_at_backward_end(self, "launch_rest")
        else:
            self.launch_rest()

    def launch_rest(self) -> None:
        """Launch buckets that lack gradients of unused parameters, and close this backward."""
        with self.lock:
            self._decided = None
            self._skipping = False
            if not self._in_backward:
                self.meter.enter("other")
                return
            assert self.hooks is not None
            self.hooks.arrivals.end()
            if self.passes is not None:
                self.passes.end()
            if self._streams is not None:
                self._streams.end()
            self._launch_all()
            # Another model of this backward may still have to launch collectives that peers wait
            # for.
            if not in_backward():
                self.sparse.send()
                self.close_backward()
            else:
                call_at_backward_end(self, "send_sparse" if self.sparse else "close_backward")

    def send_sparse(self) -> None:
        """Send sparse gradients, before any model of this backward waits for others."""
        with self.lock:
            self.sparse.send()
        call_at_backward_end(self, "close_backward")

    def close_backward(self) -> None:
        """Finish a backward; raise a `UsageError` for gradients lost to another optimizer."""
        with self.lock:
            passes = self.passes
            if passes is not None:
                passes.launched(self.buckets[-1].handle)
            self._finish_backward()
            if passes is not None:
                passes.waited()
        if self._copies is not None and self._copies.on:
            self._copies.end()
        lost = self.update.lost_message("backward() for another optimizer")
        if lost and not all(slot.owned for slot in self.slots):
            raise UsageError(lost)

    def _finish_backward(self) -> None:
        # Another optimizer first checks whether there is a gradient at all.
        others = [slot for slot in self.slots if not slot.owned]
        blind = self._shadowing and self.update.agrees
        lost = self.update.lost_message("a gradient was read")
        self.views.hide()
        self.dispatch(events.BackwardEnds(looked_at=bool(others) and not blind, lost=bool(lost)))
        self.sparse.show()
        if lost:
            for slot in self.slots:
                if slot.owned:
                    self.views.lose(slot, lost)
                else:
                    slot.param.grad = None
        elif others and not blind:
            self.views.show(others)
        self.meter.enter("other")

    @_exclusive
    def recover(self) -> None:
        """Complete the collectives of an interrupted backward, and drop its gradients.

        Every worker launches each bucket once per backward, so later collectives still match. Does
        nothing while the backward is still running: in a hook, a recomputation, or another thread.
        """
        if not self.backward_aborted:
            return
        if self.passes is not None:
            self.passes.abandon()
        try:
            self._launch_all()
            self.sparse.send()
            self._finish_backward()  # peers see a normal end
            self.dispatch(events.GradientsDropped())
        finally:
            for param in self.trained:
                param.grad = None
        self.update.on_zero_grad(True)

    @_exclusive
    def shadow_backward(self) -> None:
        """Take part in one backward of the other workers with gradients of zero."""
        self._open_backward()
        self.zero_grad(True)
        for param in self.trained:
            param.grad = None
        self._in_backward = self._shadowing = True
        try:
            self.end_backward()
        finally:
            self._shadowing = False

    @_exclusive
    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients, including those that exist in buckets only."""
        if self.hooks is None:
            return
        self.recover()
        self.dispatch(events.GradientsDropped())
        self.views.on_zero_grad(set_to_none)
        # No operation here reads a parameter, so deferred updates stay deferred.
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                grad = slot.param.grad
                if grad is not None and grad is slot.pending:
                    zeros = not set_to_none and slot.used
                    slot.param.grad = torch.zeros_like(slot.param) if zeros else None
        self.update.on_zero_grad(set_to_none)

    # -- reading gradients and parameters -------------------------------------------------

    @_exclusive
    def flush(self) -> None:
        """Apply all deferred updates, and the buffers that have arrived."""
        self._guard(self.buffer_sync.apply)
        self.apply_updates(self.bucketing.forward_buckets)

    def flush_on_close(self) -> None:
        """Apply deferred updates before the world is closed, unless an operation has failed."""
        if self.hooks is None or (
            KEPT in self.strategy.exchange.has and graceful_shutdown.is_failing()
        ):
            return  # no update is pending; or peers may never push their gradients
        if self.steps_made.diverged:
            return  # already raised
        with contextlib.suppress(PeerError):  # already raised where it was awaited
            self.flush()

    @_exclusive
    def level(self, *, always: bool = True) -> None:
        """Apply pending updates; diverged models are averaged, which all workers must call.

        ``always``: even if this worker has made no step since the last call.
        """
        self.recover()
        self.flush()
        if self.recovery is not None and always:
            self.recovery.level()
        if self.update.level(always=always):
            self.buffer_sync.level()
        if self.update.averaging and self.world.inside is not None:
            shard_all(self.model)  # gathered parameters are those before
        self.copied = self.copied and not always

    @_exclusive
    def settle(self) -> None:
        """Make parameters current and gradients whole, and show the gradients in ``p.grad``."""
        self.recover()
        self.flush()
        if self.views.hidden and not self.backward_running:  # otherwise an exchange is in progress
            self.settle_gradients()
            self.views.show()

    @_exclusive
    def settle_gradients(self) -> None:
        """Gather gradients between backward and step, because they are read."""
        self.dispatch(events.GradientsNeeded())

    def show_gradient(self, slot: Slot) -> None:
        """Gather ``slot``'s gradient for a reader; raise a `UsageError` during its backward."""
        if self.backward_running:
            raise UsageError(
                f"the gradient of parameter {slot.name!r} was needed in its own backward: a "
                "parameter that gets its gradient twice in one backward, as in two reentrant "
                "checkpoints that share it, or a hook that reads it; use checkpoint(..., "
                "use_reentrant=False), and read gradients after backward"
            )
        with self.lock:
            aborted = self._in_backward
            self.views.accumulating = slot if in_backward() else None
            try:
                self.settle()
            finally:
                self.views.accumulating = None
            if self._streams is not None and in_backward():
                self._streams.publish()  # other gradients of the bucket may be added to there
            slot.used |= in_backward()  # now it has a gradient
        if aborted:
            raise UsageError(f"the gradient of parameter {slot.name!r} is gone: {_GONE}")

    @_exclusive
    def unscale(
        self, grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
    ) -> None:
        """Unscale ``grads`` on this worker's blocks; raise a `UsageError` for dropped gradients."""
        aborted = self.backward_aborted
        self.recover()
        if aborted:
            raise UsageError("GradScaler.unscale_(): the gradients are gone: " + _GONE)
        self.update.refuse_lost("GradScaler.unscale_()")
        self.dispatch(events.PartsNeeded(Intent.SCALE))
        if self.phase is Phase.REDUCED and not self.shadowed:
            # All buckets of this kind, whichever gradients the user has replaced: other workers do
            # the same.
            kind = grads[0].dtype.to_real(), grads[0].device
            buckets = [b for b in self.buckets if (b.flat.dtype, b.flat.device) == kind]
            others = [grad for grad in grads if not isinstance(grad, PendingGradient)]
            unscale_blocks(buckets, others, self.collectives, found_inf, inv_scale)
            return
        self.settle_gradients()
        whole = [local(g.whole() if isinstance(g, PendingGradient) else g) for g in grads]
        torch._amp_foreach_non_finite_check_and_unscale_(whole, found_inf, inv_scale)
        if self.world.inside is not None:
            found_inf.copy_(self.world.inside.max(found_inf))

    @_exclusive
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale the averaged gradients so that their global norm is at most ``max_norm``.

        Where reduced blocks suffice, one small exchange replaces the gather. Inside ``join()``
        whole gradients are clipped: a worker without batches cannot detect when the others clip.
        """
        self.recover()
        self.update.refuse_lost("clip_grad_norm_()")
        self.dispatch(events.PartsNeeded(Intent.CLIP))
        in_parts = self.phase is Phase.REDUCED and not self.shadowed and not self.sparse
        in_parts = in_parts and self.recovery is None  # no exchange that is not recovered from
        replica = self.world.inside
        if in_parts and norm_is_separable(self.buckets, norm_type, replica):
            return clip_blocks(self.buckets, self.collectives, max_norm, norm_type)
        if self.views.hidden:
            self.settle()
        if replica is not None:
            with torch.no_grad():
                return clip(self.stepper.params(), replica, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(self.stepper.params(), max_norm, norm_type)

    # -- the optimizer --------------------------------------------------------------------

    def step(self, arguments: StepArguments) -> Any:
        """Perform a call of the user's ``optimizer.step``; return its result."""
        if self.hooks is not None:
            self._parameter_check.check()
        # A scaler queries before each of its steps; without a query, it made its last one before.
        if arguments.closure is not None:  # its forwards belong to the step
            self.between_steps()
        self.scaled, self.asked = self.scaled and self.asked, False
        self.copied = False
        self.meter.enter("update")
        # The lock is not held in a closure: its backward needs it in threads of autograd.
        with contextlib.nullcontext() if arguments.closure is not None else self.lock:
            if self.recovery is None:
                returned = self._apply_step(arguments)
            else:
                returned = self._elastic_step(self.recovery, arguments)
        self.meter.stepped()
        graceful_shutdown.count_step()
        return returned

    def _apply_step(self, arguments: StepArguments) -> Any:
        with self.stepper.calling(arguments):
            return self.update.step(self, arguments.closure)

    def _elastic_step(self, recovery: Recovery, arguments: StepArguments) -> Any:
        """Make a step, or drop it after a failure."""
        if arguments.closure is not None:
            raise UsageError(
                "optimizer.step(closure) with min_replicas=: a step that is dropped would have "
                "called the closure; call it yourself, and then step()"
            )
        self.recover()
        returned, applied = None, False
        if not recovery.progress.dropping:
            steps = self.steps_made.count
            returned, applied = self._apply_step(arguments), self.steps_made.count > steps
        if not applied:
            self.dispatch(events.GradientsDropped())
            self.steps_made.count = recovery.progress.steps + 1
        self.dropped = not applied
        recovery.stepped(self, applied=applied)
        return returned

    def between_steps(self) -> None:
        """Raise `SystemExit` before the first forward of a step if SIGTERM has stopped the job."""
        if not self.stepper.stepping:
            inside, lockstep = self.world.inside, self.strategy.exchange.lockstep
            together = () if inside is None else inside.ranks
            graceful_shutdown.stop_if_due(lockstep=lockstep, together=together)

    @_exclusive
    def visible_state(self) -> Any:
        """Return the optimizer's state after all updates; inside its own step, unchanged."""
        if self.update.defers and not self.stepper.stepping:
            self.flush()
        return self.update.visible_state()

    # -- state dicts ----------------------------------------------------------------------

    def before_state_dict(self, *_args: Any) -> None:
        """Complete pending updates before a state dict or a copy, which have no gradients."""
        self.recover()
        self.flush()

    def before_load_state_dict(self, *_args: Any) -> None:
        """Complete pending operations before a state dict is loaded."""
        refuse_loading(self, "load_state_dict()")
        self.settle()
        self.level(always=False)

    def before_load_module(
        self, _module: Any, _state: Any, prefix: str, metadata: dict[str, Any], *_args: Any
    ) -> None:
        """Complete pending operations before a module loads its part of a state dict."""
        refuse_assignment(prefix, metadata)
        self.before_load_state_dict()

    def after_load_state_dict(self, *_args: Any) -> None:
        """Read the optimizer's new groups after it has loaded a state dict."""
        self.stepper.refresh()
        self.update.on_load_state_dict()

    # -- detaching ------------------------------------------------------------------------

    @_exclusive
    def detach(self, *, meet: bool = True) -> None:
        """Apply pending updates, and remove every hook; gradients become plain tensors.

        ``meet``: level diverged models first, which all workers must do.
        """
        self.settle()
        if meet:
            self.update.before_detach()
            self.level()
        self.remove_hooks()
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.holds(slot.param.grad):
                    slot.param.grad = slot.expose(slot.view.clone())
        self.update.detach()

    def remove_hooks(self) -> None:
        """Remove all hooks; safe to call twice."""
        _flushed_before_fork.discard(self)
        if self.hooks is not None:
            self.hooks.remove()
        for handle in self._single_worker_hooks:
            handle.remove()

    def close(self) -> None:
        """Close the engine's channel; no exchange is possible afterwards."""
        if self.recovery is not None:
            self.recovery.close()
        if self.world.channel:
            self.world.close()


_flushed_before_fork: weakref.WeakSet[Engine] = weakref.WeakSet()


def _flush_before_fork() -> None:
    # A child process has no threads for pending operations.
    for engine in list(_flushed_before_fork):
        engine.flush()


os.register_at_fork(before=_flush_before_fork)

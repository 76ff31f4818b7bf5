"""Updates, which run the optimizer: on all parameters at once, or on a bucket when it is needed.

The schedule decides the order of operations (`wingbeat.schedules`; for deferred updates section
III-B of the DeAR paper).
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from wingbeat.collectives import Collectives
from wingbeat.engine.gradients.bucket import Bucket, StepCounter, show
from wingbeat.engine.gradients.bucketing import Bucketing
from wingbeat.engine.gradients.compression import Compression
from wingbeat.engine.gradients.placed import local
from wingbeat.engine.gradients.views import reads_values, replaced, tensors_in
from wingbeat.engine.updates.stepper import GroupSnapshot, Modes, Stepper, step_outside
from wingbeat.engine.updates.trials import steps_independently
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.events import stream
from wingbeat.schedules import events
from wingbeat.schedules.events import Phase, StepCalled

if TYPE_CHECKING:
    from wingbeat.engine.updates.shards import Shards

Closure = Callable[[], Any] | None


class Host(Protocol):
    """The part of the engine that updates call.

    Attributes:
        lock: held while a thread changes the model, its gradients or the optimizer.
    """

    lock: threading.RLock

    @property
    def phase(self) -> Phase:
        """The state of the last backward's gradients."""

    def dispatch(self, event: events.Event, closure: Closure = None) -> Any:
        """Perform the schedule's commands for ``event``; return the result of a whole step."""

    def recover(self) -> None:
        """Complete the collectives of a backward that an exception interrupted."""

    def flush(self) -> None:
        """Apply all deferred updates."""

    def settle(self) -> None:
        """Make parameters current and gradients whole."""

    @property
    def dropping(self) -> bool:
        """Whether the present step exchanges and applies nothing, after a failure."""


@dataclass(frozen=True)
class Training:
    """The objects that an update uses; ``refresh`` applies deferred updates of parameters."""

    optimizer: torch.optim.Optimizer
    stepper: Stepper
    steps: StepCounter
    bucketing: Bucketing
    collectives: Collectives
    refresh: Callable[[list[torch.Tensor]], None]


SHARED, VELOCITY, START, UNMERGED = "shared", "velocity", "start", "unmerged"
"""Entries of a checkpoint under an outer optimizer: the shared model, its momentum buffer, the
model from which inner steps start, if parameters are narrower than the shared model; and, with
weights, of each fragment the tokens and steps since its last merge."""

LOADED = "load_state_dict(): averages"
"""Where errors of such a checkpoint are."""


class Update:
    """Runs the optimizer; the base class updates at once, on whole gradients, on every worker.

    Attributes:
        defers: whether updates may be made only when parameters are read.
        agrees: whether the workers agree on their next action before each exchange after a
            backward.
        option: the user's option that divides the optimizer among workers or servers; empty if each
            worker has the whole optimizer.
        averaging: whether models are averaged.
        shards: this worker's part of the optimizer's state; None if each has the whole.
        modes: of the step that deferred updates belong to.
    """

    defers: ClassVar[bool] = False
    agrees: ClassVar[bool] = False
    option: ClassVar[str] = ""
    averaging: ClassVar[bool] = False
    shards: Shards | None = None
    modes: Modes | None = None

    def averages(self) -> dict[str, Any] | None:
        """Return the state of averages for a checkpoint: ``steps``, and tensors by kind."""
        return None

    @property
    def steps(self) -> int:
        """The number of calls of ``optimizer.step()``, also of the others before this one joined.

        Under bounded staleness only this process's own.
        """
        return self._training.steps.count

    def check_averages(self, averages: Mapping[str, Any]) -> None:
        """Raise a `UsageError` unless `resume` can continue from a checkpoint's `averages`."""

    def resume(self, averages: Mapping[str, Any]) -> None:
        """Continue from the result of `averages`, which was checked; from step 0 if empty."""

    def count_tokens(self, tokens: int) -> None:  # noqa: ARG002
        """Count tokens that this worker has processed; a `UsageError` if nothing is weighted."""
        raise UsageError(
            "count_tokens(): the strategy weights workers by no tokens; leave the call out, or use "
            'DiLoCo(weights="tokens")'
        )

    @property
    def differs(self) -> bool:
        """Whether this worker's model may differ from the others'."""
        return False

    @property
    def is_own(self) -> bool:
        """Whether a state dict contains state of this worker only."""
        return False

    def log_lost(self, saver: int, size: int, differed: bool) -> None:
        """Log once, on one rank, what a state lacks that rank ``saver`` of ``size`` has saved."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def step(self, host: Host, closure: Closure) -> Any:
        """Perform a call of the user's ``optimizer.step``."""
        raise NotImplementedError

    def shadow_step(self, host: Host) -> None:
        """Step like the other workers, after a backward without batches of its own."""
        raise NotImplementedError

    def perform(self, command: events.UpdateCommand, closure: Closure) -> Any:
        """Perform a command of the schedule; return the result of a whole step."""
        raise NotImplementedError

    def preserves_gradients(self, bucket: Bucket) -> bool:  # noqa: ARG002
        """Whether the deferred update does not write to the bucket, which may still be sent."""
        return False

    def on_new_buckets(self) -> None:
        """Handle a change of the plan."""

    def on_zero_grad(self, set_to_none: bool) -> None:
        """Handle zeroed gradients, or an interrupted backward."""

    def lost_message(self, what: str) -> str:  # noqa: ARG002
        """Return the error text for ``what`` if a step has consumed the gradients, else nothing."""
        return ""

    def refuse_lost(self, what: str) -> None:
        """Raise a `UsageError` if ``what`` needs gradients that a step has consumed."""
        message = self.lost_message(what)
        if message:
            raise UsageError(message)

    def level(self, *, always: bool) -> bool:  # noqa: ARG002
        """Wait until all workers hold the same parameters; return whether they synchronised here.

        ``always``: even if this worker has made no step since the last call.
        """
        return False

    def on_load_state_dict(self) -> None:
        """Handle a whole state that the optimizer has loaded."""

    def whole_state(self, host: Host) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Give the optimizer its whole state within the context."""
        return contextlib.nullcontext()

    def visible_state(self) -> Any:
        """Return the optimizer's state for the user to read."""
        return self._training.optimizer.__dict__["state"]

    def before_forward(self) -> None:
        """Handle the start of a forward that may be trained on."""

    def before_detach(self) -> None:
        """Complete operations that an error interrupted, before `detach`, on all workers."""

    def detach(self) -> None:
        """Make the optimizer a plain one."""


class WholeUpdate(Update):
    """Runs the optimizer's own step at once, on whole gradients."""

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step."""
        host.recover()
        return host.dispatch(StepCalled(in_parts=False), closure)

    def shadow_step(self, host: Host) -> None:
        """Run the optimizer's own step: all workers have the same gradients."""
        self.step(host, None)

    def perform(self, command: events.UpdateCommand, closure: Closure) -> Any:
        """Perform `Step`, the only command of these schedules."""
        assert isinstance(command, events.Step), command
        self._training.steps.count += 1
        return self._training.stepper.whole_step(closure)


class SingleWorkerUpdate(WholeUpdate):
    """Steps with the momentum and residuals that codecs have kept in a run of many workers."""

    def __init__(self, training: Training, compression: Compression) -> None:
        super().__init__(training)
        self._compression = compression

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step."""
        if closure is None:
            self._compression.complete_alone(self._training.bucketing.slots)
            return super().step(host, None)

        def completed() -> Any:
            loss = closure()
            self._compression.complete_alone(self._training.bucketing.slots)
            return loss

        return super().step(host, completed)


def evaluated(closure: Closure) -> Any:
    """Call the closure, if any, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# -- deferred updates ---------------------------------------------------------------------
#
# While an update is deferred, a parameter's class is a subclass whose ``__torch_function__``
# applies the update before any operation reads the parameter, and restores the class. So any reader
# triggers the update: a module's forward, another method, or an older list of parameters. Two
# readers are not intercepted: compiled code that received the parameter before (a ``torch.jit``
# function), which the engine's hooks handle, and views of its values that the user has kept.

PROVING_STEPS = 2
"""Steps in which an optimizer has to show that it does not write to gradients."""


class DeferredParameters:
    """Marks parameters whose update is deferred, and calls ``refresh``, which must `clear` them."""

    def __init__(self, refresh: Callable[[list[torch.Tensor]], None]) -> None:
        self._refresh = refresh
        self._marked_class: dict[type, type] = {}
        self._plain_class: dict[type, type] = {}

    def can_mark(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether reads of all these can be intercepted, which a user's class may not allow."""
        try:
            self.mark(params)
        except TypeError:
            return False
        finally:
            self.clear(params)
        return True

    def mark(self, params: Iterable[torch.Tensor]) -> None:
        """Call ``refresh`` before the next operation that reads one of ``params``."""
        for param in params:
            kind = type(param)
            if kind not in self._plain_class:
                param.__class__ = self._marked_class.get(kind) or self._make_class(kind)

    def clear(self, params: Iterable[torch.Tensor]) -> None:
        """Restore the classes of ``params``."""
        for param in params:
            plain = self._plain_class.get(type(param))
            if plain is not None:
                param.__class__ = plain

    def add(self, bucket: Bucket, params: Iterable[torch.Tensor]) -> None:
        """Defer the update of these parameters of the bucket."""
        bucket.due = True
        self.mark(params)

    @contextlib.contextmanager
    def updating(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Update these buckets within the context, whose end other threads wait for."""
        for bucket in buckets:
            self.clear(slot.param for slot in bucket.slots)
        try:
            yield
        finally:
            for bucket in buckets:
                bucket.due = False

    def _make_class(self, plain: Any) -> Any:
        ref = weakref.ref(self)

        def refresh_those_in(value: Any) -> None:
            found = [tensor for tensor in tensors_in(value) if type(tensor) is marked]
            owner = ref()
            if owner is not None:
                owner._refresh(found)
            for param in found:  # also those without a pending update
                param.__class__ = plain

        def __torch_function__(
            _cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if not reads_values(func, args, kwargs):
                return plain.__torch_function__(func, types, args, kwargs)
            refresh_those_in((args, kwargs))
            return func(*args, **kwargs)

        def __deepcopy__(param: Any, memo: Any) -> Any:
            refresh_those_in(param)
            return copy.deepcopy(param, memo)

        def __reduce_ex__(param: Any, protocol: Any) -> Any:
            refresh_those_in(param)
            return param.__reduce_ex__(protocol)

        methods: dict[str, Any] = {
            "__torch_function__": classmethod(__torch_function__),
            "__deepcopy__": __deepcopy__,
            "__reduce_ex__": __reduce_ex__,
            "__doc__": plain.__doc__,
            "__module__": plain.__module__,
        }
        if hasattr(plain, "_local_tensor"):  # a DTensor, whose methods read it
            part = plain._local_tensor

            def read_local(param: Any) -> Any:
                refresh_those_in(param)
                return part.__get__(param)

            methods["_local_tensor"] = property(read_local, part.__set__)
        marked = type(f"Deferred{plain.__name__}", (plain,), methods)
        self._marked_class[plain] = marked
        self._plain_class[marked] = plain
        return marked


class DeferredUpdate(WholeUpdate):
    """Records a step's settings, and runs the optimizer on one bucket at a time.

    Attributes:
        in_parts: whether the optimizer can run on some of its parameters; otherwise it steps at
            once, on whole gradients.
        on_update: called with the numbers of the buckets that were updated.

    Raises:
        UsageError: the optimizer evaluates the loss in its step.
    """

    defers: ClassVar[bool] = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        refuse_evaluating(training.optimizer)
        self._pending = DeferredParameters(training.refresh)
        self._snapshot: GroupSnapshot = []
        self._steps = 0
        self._writes_gradients = False
        self.on_update: Callable[[set[int]], None] = lambda _: None
        params = [slot.param for slot in training.bucketing.slots]
        apart = not overlapping([*map(local, params)]) and steps_independently(training.optimizer)
        self.in_parts = apart and self._pending.can_mark(params)

    def step(self, host: Host, closure: Closure) -> Any:
        """Defer the update of every bucket, after one call of the closure, and return.

        An optimizer that cannot run on some of its parameters, or whose step has other arguments,
        steps at once on whole gradients, and calls the closure itself.
        """
        training = self._training
        if not self.in_parts or training.stepper.hooked or training.stepper.arguments.others:
            return self._step_whole(host, closure)
        loss = evaluated(closure)
        with host.lock:
            host.recover()
            slots = training.bucketing.slots
            coming = host.phase in (Phase.REDUCED, Phase.UNDER_WAY)
            if not coming or replaced(slots):
                self._step_whole(host, None)
                return loss
            self._steps += 1
            training.steps.count += 1
            self._snapshot = training.stepper.snapshot()
            self.modes = Modes(training.bucketing.device)
            host.dispatch(StepCalled())
            step_outside(training.bucketing.slot_of, training.stepper, self._snapshot)
        return loss

    def _step_whole(self, host: Host, closure: Closure) -> Any:
        """Step at once on whole gradients, which the user's step hooks need."""
        host.settle()
        if host.dropping:  # the wait for them has failed
            return None

        def whole() -> Any:
            assert closure is not None
            loss = closure()
            host.settle()
            return loss

        event = StepCalled(in_parts=False)
        return host.dispatch(event, whole if closure is not None else None)

    def perform(self, command: events.UpdateCommand, closure: Closure) -> Any:
        """Defer an update, or apply it."""
        buckets = self._training.bucketing.buckets
        match command:
            case events.Defer(number):
                bucket = buckets[number]
                self._pending.add(bucket, [slot.param for slot in bucket.slots if slot.owned])
            case events.Update(number):
                if buckets[number].due:  # otherwise updated together with another
                    self._update(buckets[number])
            case events.Step():
                return super().perform(command, closure)
        return None

    def _update(self, bucket: Bucket) -> None:
        together = [bucket, *self._arrived_after(bucket)]
        if not bucket.due:
            return  # dropped by the wait for another bucket
        with self._pending.updating(together), stream.timed("update", bucket=bucket.index):
            self._step_on(together)
        self.on_update({each.index for each in together})

    def drop(self) -> bool:
        """Drop the due updates; return whether there were any."""
        due = [bucket for bucket in self._training.bucketing.buckets if bucket.due]
        with self._pending.updating(due):
            return bool(due)

    def _arrived_after(self, bucket: Bucket) -> list[Bucket]:
        """Return the buckets needed next whose gradients have arrived: one call updates them too.

        Always in forward order: an optimizer's random numbers must be the same on all workers.
        """
        due = [each for each in self._training.bucketing.forward_buckets if each.due]
        arrived: list[Bucket] = []
        for each in due[1:] if due[0] is bucket else []:
            if each.handle is not None and not each.handle.done():
                break
            try:
                each.settle()
            except PeerError:  # raised again when the bucket is needed
                break
            if not each.due:  # the wait has failed, and due updates were dropped
                return []
            arrived.append(each)
        return arrived

    def _step_on(self, buckets: Sequence[Bucket]) -> None:
        stepper = self._training.stepper
        whole = {bucket: bucket.contributed() for bucket in buckets}
        slots = [slot for each in whole.values() for slot in each if slot.owned]
        # Gradients made or zeroed after step() belong to the next step.
        later = [slot.param.grad for slot in slots]
        show(slots)
        versions = [bucket.flat._version for bucket in buckets]
        try:
            stepper.step([slot.param for slot in slots], self._snapshot)
        finally:
            self._writes_gradients |= [bucket.flat._version for bucket in buckets] != versions
            for slot, grad in zip(slots, later, strict=True):
                slot.param.grad = grad
        for bucket, used in whole.items():
            if len(used) < len(bucket.slots):
                for slot in set(bucket.slots).difference(used):
                    if slot.param.grad is slot.pending:
                        slot.param.grad = None  # no worker has used it

    def preserves_gradients(self, bucket: Bucket) -> bool:
        """Whether the bucket's deferred update does not write to its gradients.

        The first two steps show this. SGD with ``nesterov`` and ``foreach`` writes to them.
        """
        return bucket.due and not self._writes_gradients and self._steps > PROVING_STEPS


def refuse_evaluating(optimizer: torch.optim.Optimizer) -> None:
    """Raise a `UsageError` if the optimizer evaluates the loss in its own step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "torch.optim.LBFGS with updates that wait for the next forward (DeAR, servers) is not "
            "possible: each of its steps evaluates the loss several times and needs whole "
            "gradients each time; use wingbeat.AllReduce()"
        )


def overlapping(params: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the indices of two parameters that share memory, or None."""
    spans = []
    for i, p in enumerate(params):
        if p.numel():
            last = sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True))
            end = p.data_ptr() + (last + 1) * p.element_size()
            spans.append((str(p.device), p.data_ptr(), end, i))
    spans.sort()
    for (device, _, end, i), (other, begin, _, j) in pairwise(spans):
        if device == other and begin < end:
            return min(i, j), max(i, j)
    return None

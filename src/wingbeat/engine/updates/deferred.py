"""Deferred updates: each bucket is updated when its parameters are about to be read.

The schedule decides the order of operations (`wingbeat.schedules.dear`, section III-B of the paper,
and `wingbeat.schedules.served`).

While an update is deferred, a parameter's class is a subclass whose ``__torch_function__`` applies
the update before any operation reads the parameter, and restores the class. So any reader triggers
the update: a module's forward, another method, or an older list of parameters. Two readers are not
intercepted: compiled code that received the parameter before (a ``torch.jit`` function), which the
engine's hooks handle, and views of its values that the user has kept.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.views import reads_values, replaced, tensors_in
from wingbeat.engine.updates.modes import Modes
from wingbeat.engine.updates.stepper import GroupSnapshot, step_outside
from wingbeat.engine.updates.trials import steps_independently
from wingbeat.engine.updates.update import Closure, Host, Training, WholeUpdate, evaluated
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.events import stream
from wingbeat.schedules.events import Defer, Phase, Step, StepCalled, Update, UpdateCommand

PROVING_STEPS = 2
"""Steps in which an optimizer has to show that it does not write to gradients."""

Refresh = Callable[[list[torch.Tensor]], None]


class DeferredParameters:
    """Marks parameters whose update is deferred, and calls ``refresh``, which must `clear` them."""

    def __init__(self, refresh: Refresh) -> None:
        self._refresh = refresh
        self._marked_class: dict[type, type] = {}
        self._plain_class: dict[type, type] = {}

    def can_mark(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether all these can be marked, which a user's own class may not allow."""
        params = list(params)
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

    def _make_class(self, plain: Any) -> Any:
        ref = weakref.ref(self)

        def __torch_function__(
            _cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if not reads_values(func, args, kwargs):
                return plain.__torch_function__(func, types, args, kwargs)
            _refresh_those_in(ref(), marked, plain, (args, kwargs))
            return func(*args, **kwargs)

        def __deepcopy__(param: Any, memo: Any) -> Any:
            _refresh_those_in(ref(), marked, plain, param)
            return copy.deepcopy(param, memo)

        def __reduce_ex__(param: Any, protocol: Any) -> Any:
            _refresh_those_in(ref(), marked, plain, param)
            return param.__reduce_ex__(protocol)

        methods = {
            "__torch_function__": classmethod(__torch_function__),
            "__deepcopy__": __deepcopy__,
            "__reduce_ex__": __reduce_ex__,
            "__doc__": plain.__doc__,
            "__module__": plain.__module__,
        }
        marked = type(f"Deferred{plain.__name__}", (plain,), methods)
        self._marked_class[plain] = marked
        self._plain_class[marked] = plain
        return marked

    def refresh(self, params: list[torch.Tensor]) -> None:
        """Update ``params``; those without a pending update stay unchanged."""
        self._refresh(params)
        self.clear(params)


def _refresh_those_in(
    owner: DeferredParameters | None, marked: type, plain: type, value: Any
) -> None:
    found = [tensor for tensor in tensors_in(value) if type(tensor) is marked]
    if owner is not None:
        owner.refresh(found)
    for param in found:
        param.__class__ = plain


class PendingUpdates:
    """The deferred updates of one step; the next step begins when none are left."""

    snapshot: GroupSnapshot
    _modes: Modes

    def __init__(self, refresh: Refresh) -> None:
        self._parameters = DeferredParameters(refresh)

    def can_defer(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether reads of all these parameters can be intercepted."""
        return self._parameters.can_mark(params)

    def begin(self, snapshot: GroupSnapshot, device: torch.device) -> None:
        """Record the settings and modes of a step."""
        self.snapshot = snapshot
        self._modes = Modes(device)

    def add(self, bucket: Bucket, params: Iterable[torch.Tensor]) -> None:
        """Defer the update of these parameters of the bucket."""
        bucket.due = True
        self._parameters.mark(params)

    def remove(self, bucket: Bucket) -> None:
        """Remove the bucket, which is being updated."""
        bucket.due = False
        self._parameters.clear(slot.param for slot in bucket.slots)

    def step_modes(self) -> contextlib.AbstractContextManager[None]:
        """Restore the step's modes (autocast, streams and others) within the context."""
        return self._modes.restored()


class DeferredUpdate(WholeUpdate):
    """Records a step's settings, and runs the optimizer on one bucket at a time.

    Attributes:
        in_parts: whether the optimizer can run on some of its parameters; otherwise it steps at
            once, on whole gradients.

    Raises:
        UsageError: the optimizer evaluates the loss in its step.
    """

    defers: ClassVar[bool] = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        refuse_evaluating(training.optimizer)
        self._pending = PendingUpdates(training.refresh)
        self._steps = 0
        self._writes_gradients = False
        params = [slot.param for slot in training.bucketing.slots]
        apart = not overlapping(params) and steps_independently(training.optimizer)
        self.in_parts = apart and self._pending.can_defer(params)

    def step(self, host: Host, closure: Closure) -> Any:
        """Defer the update of every bucket, after one call of the closure, and return.

        An optimizer that cannot run on some of its parameters, or whose step has other arguments,
        steps at once on whole gradients, and calls the closure itself.
        """
        training = self._training
        if not self.in_parts or training.stepper.hooked or training.stepper.arguments.others:
            return self._step_whole(host, closure)
        loss = evaluated(closure)
        host.recover()
        slots = training.bucketing.slots
        coming = host.phase in (Phase.REDUCED, Phase.UNDER_WAY)
        if not coming or replaced(slots, training.stepper.owns):
            self._step_whole(host, None)
            return loss
        self._steps += 1
        training.steps.count += 1
        self._pending.begin(training.stepper.snapshot(), training.bucketing.device)
        host.dispatch(StepCalled())
        step_outside(training.bucketing.slot_of, training.stepper, self._pending.snapshot)
        return loss

    def _step_whole(self, host: Host, closure: Closure) -> Any:
        """Step at once on whole gradients, which the user's step hooks need."""
        host.settle()

        def whole() -> Any:
            assert closure is not None
            loss = closure()
            host.settle()
            return loss

        event = StepCalled(in_parts=False)
        return host.dispatch(event, whole if closure is not None else None)

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Defer an update, or apply it."""
        buckets = self._training.bucketing.buckets
        match command:
            case Defer(number):
                owns = self._training.stepper.owns
                params = (slot.param for slot in buckets[number].slots if owns(slot.param))
                self._pending.add(buckets[number], params)
            case Update(number):
                if buckets[number].due:  # otherwise updated together with another
                    self._update(buckets[number])
            case Step():
                return super().perform(command, closure)
        return None

    def _update(self, bucket: Bucket) -> None:
        together = [bucket, *self._arrived_after(bucket)]
        for each in together:
            self._pending.remove(each)
        with stream.timed("update", bucket=bucket.index):
            self._step_on(together)

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
            arrived.append(each)
        return arrived

    def _step_on(self, buckets: Sequence[Bucket]) -> None:
        stepper = self._training.stepper
        whole = {bucket: bucket.contributed() for bucket in buckets}
        slots = [slot for each in whole.values() for slot in each if stepper.owns(slot.param)]
        # Gradients made or zeroed after step() belong to the next step.
        later = [slot.param.grad for slot in slots]
        for slot in slots:
            slot.show()
        versions = [bucket.flat._version for bucket in buckets]
        try:
            stepper.step([slot.param for slot in slots], self._pending.snapshot)
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

    def step_modes(self) -> contextlib.AbstractContextManager[None]:
        """Restore the modes of the step that deferred updates belong to."""
        return self._pending.step_modes()


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
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + _extent(p), i)
        for i, p in enumerate(params)
        if p.numel()
    )
    for (device, _, end, i), (other, begin, _, j) in pairwise(spans):
        if device == other and begin < end:
            return min(i, j), max(i, j)
    return None


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()

"""Deferred updates: each bucket's is made when somebody is about to read its parameters.

What starts when is the schedule's (`wingbeat.schedules.dear`, section III-B of the paper, and
`wingbeat.schedules.served`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.convert import overlapping
from wingbeat.engine.gradients.views import replaced
from wingbeat.engine.updates.due import Due
from wingbeat.engine.updates.separable import steps_apart
from wingbeat.engine.updates.stepper import step_outside
from wingbeat.engine.updates.update import Closure, Host, Training, evaluated
from wingbeat.engine.updates.whole import WholeUpdate
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.events import stream
from wingbeat.schedules.events import Defer, Phase, Step, StepCalled, Update, UpdateCommand

PROVING_STEPS = 2
"""Steps in which an optimizer has to show that it leaves gradients as they are."""


class DeferredUpdate(WholeUpdate):
    """Keeps a step's settings, and runs the optimizer on one bucket after the other.

    Attributes:
        in_parts: whether the optimizer can be run on some of its parameters; otherwise it steps at
            once, on whole gradients.

    Raises:
        UsageError: the optimizer evaluates the loss in its step.
    """

    defers: ClassVar[bool] = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        refuse_evaluating(training.optimizer)
        self._due = Due(training.refresh)
        self._made = 0
        self._writes_gradients = False
        params = [slot.param for slot in training.bucketing.slots]
        apart = not overlapping(params) and steps_apart(training.optimizer)
        self.in_parts = apart and self._due.can_wait(params)

    def step(self, host: Host, closure: Closure) -> Any:
        """Let every bucket be updated when it is needed, and return at once.

        A ``closure`` is called once, before. An optimizer that cannot be run on some of its
        parameters steps at once, on whole gradients, and calls the closure as it likes; so does one
        whose step is given other arguments, of which nothing is known.
        """
        training = self._training
        if not self.in_parts or training.stepper.hooked or training.stepper.given.others:
            return self._step_whole(host, closure)
        loss = evaluated(closure)
        host.recover()
        slots = training.bucketing.slots
        coming = host.phase in (Phase.REDUCED, Phase.UNDER_WAY)
        if not coming or replaced(slots, training.stepper.owns):
            self._step_whole(host, None)
            return loss
        self._made += 1
        training.steps.count += 1
        self._due.begin(training.stepper.snapshot(), training.bucketing.device)
        host.tell(StepCalled())
        step_outside(training.bucketing.slot_of, training.stepper, self._due.snapshot)
        return loss

    def _step_whole(self, host: Host, closure: Closure) -> Any:
        """Step at once on whole gradients: the user's hooks are to see these and new parameters."""
        host.settle()

        def whole() -> Any:
            assert closure is not None
            loss = closure()
            host.settle()
            return loss

        return host.tell(StepCalled(in_parts=False), whole if closure is not None else None)

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Remember that an update is due, or make it."""
        buckets = self._training.bucketing.buckets
        match command:
            case Defer(number):
                owns = self._training.stepper.owns
                params = (slot.param for slot in buckets[number].slots if owns(slot.param))
                self._due.add(buckets[number], params)
            case Update(number):
                if buckets[number].due:  # else it was made with another's
                    self._update(buckets[number])
            case Step():
                return super().perform(command, closure)
        return None

    def _update(self, bucket: Bucket) -> None:
        """Run the update of a bucket whose gradients are whole, and of those that came with it."""
        together = [bucket, *self._here_after(bucket)]
        for each in together:
            self._due.remove(each)
        with stream.timed("update", bucket=bucket.index):
            self._step_on(together)

    def _here_after(self, bucket: Bucket) -> list[Bucket]:
        """Return the buckets needed next whose gradients are here: one call updates them too.

        They are updated in the order in which forward needs them, whenever they come: an optimizer
        may draw random numbers, and workers must draw the same.
        """
        due = [each for each in self._training.bucketing.forward_buckets if each.due]
        here: list[Bucket] = []
        for each in due[1:] if due[0] is bucket else []:
            if each.handle is not None and not each.handle.done():
                break
            try:
                each.settle()
            except PeerError:  # whoever needs it hears of that
                break
            here.append(each)
        return here

    def _step_on(self, buckets: Sequence[Bucket]) -> None:
        stepper = self._training.stepper
        whole = {bucket: bucket.contributed() for bucket in buckets}
        slots = [slot for each in whole.values() for slot in each if stepper.owns(slot.param)]
        # Gradients made since step() belong to the next one, as do zeros asked for meanwhile.
        later = [slot.param.grad for slot in slots]
        for slot in slots:
            slot.show()
        versions = [bucket.flat._version for bucket in buckets]
        try:
            stepper.step([slot.param for slot in slots], self._due.snapshot)
        finally:
            self._writes_gradients |= [bucket.flat._version for bucket in buckets] != versions
            for slot, grad in zip(slots, later, strict=True):
                slot.param.grad = grad
        for bucket, used in whole.items():
            if len(used) < len(bucket.slots):
                for slot in set(bucket.slots).difference(used):
                    if slot.param.grad is slot.pending:
                        slot.param.grad = None  # nobody has used it

    def reads_only(self, bucket: Bucket) -> bool:
        """Whether the bucket's due update leaves gradients as they are.

        Some optimizers write to them (SGD with ``nesterov`` and ``foreach``). In the first two
        steps it shows whether this one does.
        """
        return bucket.due and not self._writes_gradients and self._made > PROVING_STEPS

    def as_of_step(self) -> Any:
        """Let due updates be made inside as if at the moment of their step."""
        return self._due.as_of_step()


def refuse_evaluating(optimizer: torch.optim.Optimizer) -> None:
    """Raise a `UsageError` if the optimizer evaluates the loss in its own step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "torch.optim.LBFGS with updates that wait for the next forward (DeAR, servers) is not "
            "possible: each of its steps evaluates the loss several times and needs whole "
            "gradients each time; use wingbeat.AllReduce()"
        )

"""Steps on a worker's own gradients, and averages of models in between (Ripples, section 3.2)."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from wingbeat.engine.gradients.convert import check_kind
from wingbeat.engine.updates.averager import Averager
from wingbeat.engine.updates.flat import FlatModel
from wingbeat.engine.updates.update import Closure, Host, Training, evaluated
from wingbeat.engine.updates.whole import WholeUpdate
from wingbeat.errors import PeerError, UsageError
from wingbeat.observe.events import stream
from wingbeat.observe.log import log
from wingbeat.schedules.events import Adopt, Average, Step, UpdateCommand
from wingbeat.schedules.local import Local

Tensors = dict[str, torch.Tensor]

_FORWARDS, _CHANGES = 3, 3
"""Forwards without any step, from which on weights are looked at; and changes to be told of."""

_SAMPLE = 8
"""Elements of each parameter by which a change is seen."""


class LocalUpdate(WholeUpdate):
    """Runs the optimizer's own step, and has parameters averaged with other workers'.

    Only the thread that trains changes parameters, inside of ``step``. What was averaged beside
    training is added as a difference to what was sent, so that nothing that happened in between is
    lost; where nothing did, the average itself is taken, with the same bits on all who made it.

    Args:
        training: what it works on.
        model: its parameters.
        averager: with whom; its buffer is the model's.
        schedule: when.

    Attributes:
        waited: told for how many nanoseconds others were waited for.
        left: whether it meets nobody any more.
        renew: called after each average, or where there was none because this worker was left out:
            then it takes over another's state.
    """

    def __init__(
        self, training: Training, model: FlatModel, averager: Averager, schedule: Local
    ) -> None:
        super().__init__(training)
        self._model, self._averager, self._schedule = model, averager, schedule
        self.waited: Callable[[int], None] = lambda _: None
        self.renew: Callable[[], None] = lambda: None
        self._under_way: tuple[int, int] | None = None
        self._begun = 0  # how many steps were made when that was begun
        self._sent: torch.Tensor | None = None
        self._moved = self.left = self._cut = self._stepping = False
        self._forwards: int | None = 0  # None once a step was made
        self._changes = 0
        self._sample: tuple[tuple[float, ...], ...] = ()
        self._hooks = self._watch_inside()
        self._evaluates_once = _evaluates_once(training.optimizer)
        named = [*((s.name, s.param) for s in training.bucketing.slots), *training.bucketing.frozen]
        self._like = [
            (name, param, param.detach().new_empty(()).expand(param.shape)) for name, param in named
        ]

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step, and what the schedule adds.

        Raises:
            UsageError: a parameter has another dtype, device or shape than at `distribute`.
            PeerError: a worker was waited for in vain; names it.
        """
        self._check_kinds()
        self._moved, self._forwards = True, None
        self._wait_again()
        closure = self._evaluated_early(closure)
        self._stepping = True
        try:
            return super().step(host, closure)
        finally:
            self._stepping = False

    def _evaluated_early(self, closure: Closure) -> Closure:
        """Evaluate the loss before an average is waited for, as a loop with ``backward()`` does.

        In its closure a worker may wait for all, with a metric that is summed, while another one
        waits for an average with it. LBFGS compares losses, between which nothing may change, and
        an optimizer of the user's may move weights before it evaluates (SAM).
        """
        if closure is None or not self._evaluates_once:
            return closure
        first = [evaluated(closure)]
        return lambda: first.pop() if first else closure()

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Do as the schedule says; return what a whole step has returned."""
        if isinstance(command, Average):
            self._begin(command.first, command.last)
        elif isinstance(command, Adopt):
            self._adopt()
        else:
            assert isinstance(command, Step), command
            return super().perform(command, closure)
        return None

    def level(self, *, always: bool) -> bool:
        """Make all models their mean, on every worker the same bits.

        Buffers of floating point, such as BatchNorm's statistics, are averaged with them, and
        frozen parameters where workers hold others. All go on as after the same number of steps:
        the mean, for workers may have made different numbers.

        Raises:
            UsageError: a parameter has another dtype, device or shape than at `distribute`.
            PeerError: a worker did not do the same; names it.
        """
        if self._moved or always:
            self._check_kinds()
            self._wait_again()
            self._adopt()
            self._level()
            self._moved = False
        return False  # nothing is left for others to level

    def detach(self) -> None:
        """Meet nobody any more."""
        for hook in self._hooks:
            hook.remove()
        self.left = True
        self._averager.close()

    # -- state --------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        """Whether training would go on in another way without what is here."""
        return self._schedule.every > 1

    @property
    def differs(self) -> bool:
        """Whether this worker's model may be another than the others', who have to meet first."""
        return self._moved

    @property
    def is_own(self) -> bool:
        """Whether a state dict of now has something of this worker alone."""
        return self._moved or not self._model.with_state

    @property
    def steps(self) -> int:
        """How many this worker has made, by which its turns to average come."""
        return self._schedule.made

    def tensors(self) -> dict[str, Tensors]:
        """Return what training goes on with beside the model, by kind and parameter name."""
        return {}

    def resume(self, steps: int, tensors: Mapping[str, Tensors]) -> None:  # noqa: ARG002
        """Go on as after so many steps, with what `tensors` has returned; without it if empty."""
        self._schedule.resume(steps)

    def handed(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return what a worker that comes back is to have beside model and optimizer.

        Another thread asks, while an average is waited for or none is under way.

        Returns:
            Tensors, which are not copied, in the same order on all workers; and the numbers for
            `take_over`.
        """
        return [], [self._schedule.made]

    def take_over(self, numbers: Sequence[int]) -> None:
        """Go on as the worker whose tensors, and numbers, these are.

        Raises:
            ValueError: the numbers are none of this training.
        """
        (steps,) = numbers
        if steps < 0:
            raise ValueError(f"{steps} steps")
        self._schedule.resume(steps)

    # -- updates made by hand -----------------------------------------------------------------

    def before_forward(self) -> None:
        """Log once if weights change from forward to forward, and no step is ever made.

        Models are averaged in steps, so a loop that writes to parameters itself averages nothing.
        """
        if self._forwards is None:
            return
        self._forwards += 1
        if self._forwards < _FORWARDS:
            return
        slots = self._training.bucketing.slots
        now = tuple(tuple(s.param.detach().reshape(-1)[:_SAMPLE].tolist()) for s in slots)
        self._changes += self._sample not in ((), now)
        self._sample = now
        if self._changes == _CHANGES:
            self._forwards = None
            if self._training.collectives.world.rank == 0:
                log.warning(
                    "weights have changed in %d forwards, and optimizer.step() was never called, "
                    "in which models are averaged: call it in place of updates made by hand, or "
                    "wingbeat.consensus(model) on all ranks every so many of them",
                    _CHANGES,
                )

    # -- averages -----------------------------------------------------------------------------

    def _watch_inside(self) -> list[RemovableHandle]:
        """Have steps refused that an optimizer in an attribute of the user's makes by itself."""
        trained = {slot.param for slot in self._training.bucketing.slots}
        outer, here = self._training.optimizer, weakref.ref(self)
        kind, hooks = type(outer).__name__, []

        def refuse(name: str, inner: torch.optim.Optimizer, *_: Any) -> None:
            update = here()
            if update is None or update._stepping:
                return
            if any(param in trained for group in inner.param_groups for param in group["params"]):
                raise UsageError(
                    f"{kind}.{name} was to make a step outside of optimizer.step(), at which "
                    "models are averaged (SAM's second_step() does so): call wingbeat."
                    f"distribute(model, optimizer.{name}, ...) and keep {kind} around it"
                )

        for name, inner in vars(outer).items():
            if isinstance(inner, torch.optim.Optimizer):
                hooks.append(inner.register_step_pre_hook(functools.partial(refuse, name)))
        return hooks

    def _check_kinds(self) -> None:
        for name, param, like in self._like:
            check_kind(name, param, like)

    def _level(self) -> None:
        self._model.number.fill_(self._schedule.made)
        self._model.read()
        self._model.read_checksum()
        try:
            self._wait(functools.partial(self._averager.level, self._model.shared))
        except Exception:
            # Meanwhile others may have averaged with this worker, which they have taken over.
            with contextlib.suppress(PeerError):
                self._averager.end()
                self._model.write(0, len(self._model.spans))
                self._model.write_state()
            raise
        self._model.write()
        self._model.write_state()
        self._schedule.resume(round(float(self._model.number)))
        if self._model.frozen_differ:
            self._model.read_frozen()
            self._wait(functools.partial(self._averager.level, self._model.frozen))
            self._model.write_frozen()

    def _begin(self, first: int, last: int) -> None:
        self._offer(first, last)
        # First, for whoever comes back in the meantime has to know of it.
        self._under_way, self._begun = (first, last), self._schedule.made
        try:
            self._averager.begin(self._model.part(first, last))
        except BaseException:
            self._under_way = None
            raise

    def _adopt(self) -> None:
        if self._under_way is None:
            return
        try:
            self._wait(self._averager.end)
        except Exception:  # it is over: nobody waits for it twice
            self._under_way = None
            raise
        under_way, self._under_way = self._under_way, None
        begin = time.monotonic_ns()
        self._take(*under_way)
        members = self._averager.members
        stream.record("take_over", begin, time.monotonic_ns(), group=members)
        self._averager.taken()
        self.renew()

    def _wait_again(self) -> None:
        """Wait for what Ctrl-C has cut a wait for short: the flat model is in use until then."""
        if not self._cut:
            return
        if self._under_way is None:  # all models' mean, which this worker does not take
            self._wait(self._averager.end)
        self._adopt()
        self._cut = False

    def _wait(self, wait: Callable[[], None]) -> None:
        begin = time.monotonic_ns()
        try:
            wait()
        except KeyboardInterrupt:
            self._cut = True
            raise
        finally:
            end = time.monotonic_ns()
            self.waited(end - begin)
            stream.record("wait", begin, end)

    def _offer(self, first: int, last: int) -> None:
        """Put into the flat model what is to be averaged: the parameters."""
        self._model.read(first, last)
        part = self._model.part(first, last)
        if self._schedule.beside:
            self._sent = self._model.flat[part.start : part.stop].clone()

    def _take(self, first: int, last: int) -> None:
        """Take over the average of these fragments, which is in the flat model."""
        sent, self._sent = self._sent, None
        self._model.write_state(first, last, sent)
        # Also another optimizer, or the user, may have changed what was sent.
        if sent is None or self._model.holds(sent, first, last):
            self._model.write(first, last)
            return
        part = self._model.part(first, last)
        self._model.flat[part.start : part.stop].sub_(sent)
        self._model.add(first, last)


def _evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step evaluates a closure once, and first: torch's own optimizers but LBFGS do."""
    step = next(vars(kind)["step"] for kind in type(optimizer).__mro__ if "step" in vars(kind))
    own = step.__module__.startswith("torch.optim.")
    return own and not isinstance(optimizer, torch.optim.LBFGS)

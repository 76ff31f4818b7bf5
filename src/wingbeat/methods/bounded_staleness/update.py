"""Optimizer steps under bounded staleness: ``step`` applies the rounds that have arrived.

Backward sends a worker's own gradients (Canary, section 5.3). All workers apply the same rounds in
the same order, but at different times: none, one or several per call of ``step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from wingbeat.engine.gradients.views import SentGradients, replaced
from wingbeat.engine.updates.consistency import ConsistencyCheck
from wingbeat.engine.updates.update import Closure, Host, Training, WholeUpdate
from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.exchange import BoundedStalenessExchange
from wingbeat.observe.log import log
from wingbeat.schedules.events import Step, UpdateCommand

_OTHERS = "or use wingbeat.AllReduce()"

_Versions = tuple[tuple[int, int], tuple[tuple[int, int], ...]]
"""Address and version of a parameter, and of the tensors in its optimizer state."""


def _state_versions(state: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
    return tuple((id(tensor), tensor._version) for tensor in tensors)


class SynchronousUpdate(WholeUpdate):
    """The optimizer's own step on synchronous rounds; workers drain before they equalize state."""

    def __init__(self, training: Training, exchange: BoundedStalenessExchange) -> None:
        super().__init__(training)
        self._exchange = exchange
        self._drained_at = 0

    def level(self, *, always: bool) -> bool:
        """Wait for all workers."""
        made = self._training.steps.count
        drains, self._drained_at = always or made != self._drained_at, made
        if drains:
            self._exchange.drain()
        return drains


class BoundedUpdate(WholeUpdate):
    """Applies rounds by the optimizer's own step on all parameters, and enters iterations."""

    def __init__(
        self, training: Training, views: SentGradients, exchange: BoundedStalenessExchange
    ) -> None:
        super().__init__(training)
        self._views, self._exchange = views, exchange
        self._has_stepped = False
        self._versions: dict[str, _Versions] | None = None  # None if all are equal
        self._alike = ConsistencyCheck(training, exchange)
        self._loaded = self._leaving = False

    def step(self, host: Host, closure: Closure) -> Any:
        """Apply rounds when the user calls ``optimizer.step``.

        Raises:
            UsageError: gradients were changed since they were sent, have not been sent, or were
                used by the previous step; or ``step`` has a closure or other arguments.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) under bounded staleness (Canary): gradients are sent in "
                "backward, which a closure may repeat; call backward(), then step() without one"
            )
        if self._exchange.replicas_diverge:
            where = "under bounded staleness (Canary)"
            self._training.stepper.arguments.refuse_others(where, "wingbeat.Canary(s=0)")
        host.recover()
        slots, owns = self._training.bucketing.slots, self._training.stepper.owns
        if not self._views.sent:
            self._check_nothing_to_step()
            return None
        if replaced(slots, owns):
            raise UsageError(
                "optimizer.step(): gradients were changed or dropped after backward, when they had "
                "been sent to the other workers (Canary): leave p.grad alone between backward() "
                f"and step(), {_OTHERS}"
            )
        self._check_unchanged()
        if self._loaded and self._exchange.replicas_diverge:
            self._check_equal()
        self._loaded = False
        return super().step(host, None)

    def _check_nothing_to_step(self) -> None:
        slots = self._training.bucketing.slots
        slot = next((slot for slot in slots if slot.param.grad is not None), None)
        if slot is not None:
            raise UsageError(
                f"optimizer.step(): the gradient of parameter {slot.name!r} has not been sent: "
                "the last backward before a step has to be outside of no_sync(), and after "
                "zero_grad() there has to be one"
            )
        if self._views.spent:
            raise UsageError(
                "a second optimizer.step() after one backward: the first has used its gradients "
                "(Canary); call step() once after each backward, and zero_grad() before the next, "
                f"{_OTHERS}"
            )

    def _check_unchanged(self) -> None:
        """Raise a `UsageError` if weights or optimizer state were changed since the last step."""
        if self._versions is None:
            return
        for name, now in self._current_versions().items():
            before = self._versions[name]
            if now != before:
                what = "the optimizer's state of " if now[0] == before[0] else ""
                raise UsageError(
                    f"{what}parameter {name!r} was changed after optimizer.step(), when workers "
                    "may have applied different sums (Canary): call model.synchronize() on all "
                    "ranks first, and change it on all alike; or use Canary(s=0)"
                )

    def _check_equal(self) -> None:
        """Raise a `UsageError` if weights or optimizer state differ; log it during ``release``."""
        found = self._alike.different()
        if found is None:
            return
        text = (
            f"{found} differs between workers (Canary), because something other than "
            "optimizer.step() has changed it: a state that each rank has saved for itself and "
            "loads, or a write between two steps; save, load and write on all ranks alike right "
            "after model.synchronize(), and load one state on all now; or use Canary(s=0)"
        )
        if not self._leaving:
            raise UsageError(text)
        log.warning("release(): %s", text)

    @torch.no_grad()
    def _broadcast_frozen(self) -> None:
        first = self._alike.of_frozen()
        if first is not None:
            for _, param in self._training.bucketing.frozen:
                values = param.detach().clone(memory_format=torch.contiguous_format)
                sent = values.view(-1).view(torch.uint8)
                collectives = self._training.collectives
                collectives.broadcast(sent, first, label="frozen parameters").wait()
                param.copy_(values)

    def _current_versions(self) -> dict[str, _Versions]:
        state = self._training.optimizer.state
        return {
            slot.name: (
                (slot.param.data_ptr(), slot.param._version),
                _state_versions(state.get(slot.param, {})),
            )
            for slot in self._training.bucketing.slots
        }

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Apply rounds, the only command."""
        assert isinstance(command, Step), command
        self._training.steps.count += 1
        self._has_stepped = True
        try:
            self._exchange.step()
        finally:
            self._views.spend()
            diverge = self._exchange.replicas_diverge
            self._versions = self._current_versions() if diverge else None
        if self._exchange.drain_if_due():
            self._versions = self._current_versions()

    @property
    def differs(self) -> bool:
        """Whether other workers may have applied other rounds."""
        return self._exchange.replicas_diverge and self._has_stepped

    def log_lost(self, saver: int, size: int, differed: bool) -> None:  # noqa: ARG002
        """Log once, on one rank, that a state lacks rounds that were under way."""
        if differed and self._training.collectives.world.rank == 0:
            log.warning(
                "load_state_dict(): this state was saved between two calls of model.synchronize(), "
                "with rounds of gradients under way, which are in no state: training goes on "
                "without them; call model.synchronize() on all ranks before you save"
            )

    @property
    def is_own(self) -> bool:
        """Whether a state dict would be that of this worker only."""
        return self.differs

    def level(self, *, always: bool) -> bool:
        """Wait for all workers and apply all sent rounds; UsageError between backward and step."""
        if self._views.sent:
            raise UsageError(
                "synchronize(), load_state_dict() or release() between backward() and step() "
                "(Canary): the gradients have been sent, and are applied before step(); call it "
                "first"
            )
        drains, self._has_stepped = self._has_stepped or always, False
        self._loaded = self._loaded or not always  # a state is about to be loaded
        if drains:
            self._check_unchanged()
            self._exchange.drain()
            self._versions = None
            if self._exchange.replicas_diverge:
                self._check_equal()
                self._broadcast_frozen()
        return drains

    def before_detach(self) -> None:
        """End the open iteration when training is released; its gradients were sent."""
        self._leaving = True
        if self._views.sent:
            self.perform(Step(), None)
        else:
            self._versions = None

    def refuse_lost(self, what: str) -> NoReturn:
        """Raise a UsageError: gradients cannot be changed after backward has sent them."""
        raise UsageError(
            f"{what}: under bounded staleness (Canary) gradients are sent in backward, and sums of "
            f"several iterations come back; leave it out, {_OTHERS}"
        )

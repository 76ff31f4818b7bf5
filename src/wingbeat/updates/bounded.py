"""Steps under bounded staleness: a call of ``step`` applies the sums that have come (Canary, 5.3).

A worker's own gradients have left under backward. Sums come in rounds, which all workers apply in
the same order, each when it gets there: none, one or several in a step of the user's.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from wingbeat.errors import UsageError
from wingbeat.gradients.views import SentGradients, replaced
from wingbeat.schedules.events import Step, UpdateCommand
from wingbeat.updates.update import Closure, Host, Training
from wingbeat.updates.whole import WholeUpdate

_OTHERS = "or use wingbeat.AllReduce()"


class Rounds(Protocol):
    """The workers' side: `wingbeat.exchanges.stale.StaleExchange`."""

    def step(self) -> None:
        """End the iteration, apply what has come, and enter the next when that is allowed."""

    def level(self) -> None:
        """Wait until all workers have called this and all is applied everywhere."""


class BoundedUpdate(WholeUpdate):
    """Has rounds applied, by the optimizer's own step on all parameters, and enters iterations.

    Args:
        training: what it works on.
        views: of the gradients.
        rounds: where they come from.
    """

    def __init__(self, training: Training, views: SentGradients, rounds: Rounds) -> None:
        super().__init__(training)
        self._views, self._rounds = views, rounds
        self._moved = False

    def step(self, host: Host, closure: Closure) -> Any:
        """Do what a call of the user's ``optimizer.step`` asks for.

        Raises:
            UsageError: gradients were changed since they were sent, or have not been sent.
            PeerError: others were waited for in vain; names them.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) under bounded staleness (Canary): gradients leave under "
                "backward, which a closure may repeat; call backward(), then step() without one"
            )
        host.recover()
        slots, owns = self._training.bucketing.slots, self._training.stepper.owns
        if not self._views.sent:
            slot = next((slot for slot in slots if slot.param.grad is not None), None)
            if slot is not None:
                raise UsageError(
                    f"optimizer.step(): the gradient of parameter {slot.name!r} has not been sent: "
                    "the last backward before a step has to be outside of no_sync(), and after "
                    "zero_grad() there has to be one"
                )
            return None
        if replaced(slots, owns):
            raise UsageError(
                "optimizer.step(): gradients were changed or dropped after backward, when they had "
                "been sent to the other workers (Canary): leave p.grad alone between backward() "
                f"and step(), {_OTHERS}"
            )
        return super().step(host, None)

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Let rounds be applied, which is all that is ever asked for."""
        assert isinstance(command, Step), command
        self._training.steps.count += 1
        self._moved = True
        try:
            self._rounds.step()
        finally:
            self._views.spend()

    def level(self, *, always: bool) -> bool:
        """Wait for all workers, and apply all that has been sent.

        Raises:
            UsageError: between backward and step.
            PeerError: a worker did not do the same; names it.
        """
        if self._views.sent:
            raise UsageError(
                "flush(), load_state_dict() or release() between backward() and step() (Canary): "
                "the gradients have been sent, and are applied before step(); call it first"
            )
        meets, self._moved = self._moved or always, False
        if meets:
            self._rounds.level()
        return meets

    def refuse_lost(self, what: str) -> NoReturn:
        """Refuse what changes gradients after backward: they have been sent.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{what}: under bounded staleness (Canary) gradients leave under backward, and what "
            f"comes back are sums of several iterations; leave it out, {_OTHERS}"
        )

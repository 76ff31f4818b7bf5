"""Steps under bounded staleness: a call of ``step`` applies the sums that have come (Canary, 5.3).

A worker's own gradients have left under backward. Sums come in rounds, which all workers apply in
the same order, each when it gets there: none, one or several in a step of the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

import torch

from wingbeat.engine.gradients.views import SentGradients, replaced
from wingbeat.engine.updates.consistency import ConsistencyCheck, Place
from wingbeat.engine.updates.update import Closure, Host, Training, WholeUpdate
from wingbeat.errors import UsageError
from wingbeat.observe.log import log
from wingbeat.schedules.events import Step, UpdateCommand

_OTHERS = "or use wingbeat.AllReduce()"

_Marks = tuple[tuple[int, int], tuple[tuple[int, int], ...]]
"""Of a parameter and of the tensors in its state: where they are, and how often changed."""


def _versions(state: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
    return tuple((id(tensor), tensor._version) for tensor in tensors)


class Rounds(Place, Protocol):
    """The workers' side: `wingbeat.exchanges.stale.StaleExchange`."""

    @property
    def apart(self) -> bool:
        """Whether workers may apply a round in different steps of theirs."""

    def step(self) -> None:
        """End the iteration, apply what has come, and enter the next when that is allowed."""

    def meet(self) -> bool:
        """Do as `level` where all workers do so by themselves; return whether that was so."""

    def level(self) -> None:
        """Wait until all workers have called this and all is applied everywhere."""


class MeetingUpdate(WholeUpdate):
    """The optimizer's own step where nobody is ahead; all meet where buffers are made equal.

    Args:
        training: what it works on.
        rounds: where gradients come from.
    """

    def __init__(self, training: Training, rounds: Rounds) -> None:
        super().__init__(training)
        self._rounds = rounds
        self._levelled = 0

    def level(self, *, always: bool) -> bool:
        """Wait for all workers.

        Raises:
            PeerError: a worker did not do the same; names it.
        """
        made = self._training.steps.count
        meets, self._levelled = always or made != self._levelled, made
        if meets:
            self._rounds.level()
        return meets


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
        self._left: dict[str, _Marks] | None = None  # by a step; None where all hold the same
        self._alike = ConsistencyCheck(training, rounds)
        self._loaded = self._leaving = False

    def step(self, host: Host, closure: Closure) -> Any:
        """Do what a call of the user's ``optimizer.step`` asks for.

        Raises:
            UsageError: gradients were changed since they were sent, have not been sent, or were
                used up by the step before; or ``step`` is given arguments that it is not run with.
            PeerError: others were waited for in vain; names them.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step(closure) under bounded staleness (Canary): gradients leave under "
                "backward, which a closure may repeat; call backward(), then step() without one"
            )
        if self._rounds.apart:
            where = "under bounded staleness (Canary)"
            self._training.stepper.arguments.refuse_others(where, "wingbeat.Canary(s=0)")
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
            if self._views.spent:
                raise UsageError(
                    "a second optimizer.step() after one backward: the first has used its "
                    "gradients up (Canary); call step() once after each backward, and zero_grad() "
                    f"before the next, {_OTHERS}"
                )
            return None
        if replaced(slots, owns):
            raise UsageError(
                "optimizer.step(): gradients were changed or dropped after backward, when they had "
                "been sent to the other workers (Canary): leave p.grad alone between backward() "
                f"and step(), {_OTHERS}"
            )
        self._refuse_changed()
        if self._loaded and self._rounds.apart:
            self._refuse_different()
        self._loaded = False
        return super().step(host, None)

    def _refuse_changed(self) -> None:
        """Refuse what something else than a step has made of weights since the last one.

        Workers may then have applied different rounds, so what is done to weights, or to what the
        optimizer remembers of them, would leave them different for ever.

        Raises:
            UsageError: some were changed; names the first.
        """
        if self._left is None:
            return
        for name, now in self._marks().items():
            before = self._left[name]
            if now != before:
                what = "the optimizer's state of " if now[0] == before[0] else ""
                raise UsageError(
                    f"{what}parameter {name!r} was changed after optimizer.step(), when workers "
                    "may have applied different sums (Canary): call model.synchronize() on all "
                    "ranks first, and change it on all alike; or use Canary(s=0)"
                )

    def _refuse_different(self) -> None:
        """Refuse to go on with weights, or state, that differ between workers.

        Marks tell nothing of writes through ``p.data``, nor of what was loaded.

        Raises:
            UsageError: some do; names the first. While this is released, it is logged.
            RendezvousError: a worker does not compare its own.
        """
        found = self._alike.different()
        if found is None:
            return
        said = (
            f"{found} differs between workers (Canary), as something else than optimizer.step() "
            "has changed it: a state that each rank has saved for itself and loads, or a write "
            "between two steps; save, load and write on all ranks alike right after "
            "model.synchronize(), and load one state on all now; or use Canary(s=0)"
        )
        if not self._leaving:
            raise UsageError(said)
        log.warning("release(): %s", said)

    @torch.no_grad()
    def _level_frozen(self) -> None:
        """Take over the first worker's frozen parameters, if workers' differ."""
        first = self._alike.of_frozen()
        if first is not None:
            for _, param in self._training.bucketing.frozen:
                values = param.detach().clone(memory_format=torch.contiguous_format)
                sent = values.view(-1).view(torch.uint8)
                collectives = self._training.collectives
                collectives.broadcast(sent, first, label="frozen parameters").wait()
                param.copy_(values)

    def _marks(self) -> dict[str, _Marks]:
        """Return what changes when parameters do, or what the optimizer remembers of them."""
        state = self._training.optimizer.state
        return {
            slot.name: (
                (slot.param.data_ptr(), slot.param._version),
                _versions(state.get(slot.param, {})),
            )
            for slot in self._training.bucketing.slots
        }

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:  # noqa: ARG002
        """Let rounds be applied, which is all that is ever asked for."""
        assert isinstance(command, Step), command
        self._training.steps.count += 1
        self._moved = True
        try:
            self._rounds.step()
        finally:
            self._views.spend()
            self._left = self._marks() if self._rounds.apart else None
        if self._rounds.meet():
            self._left = self._marks()

    @property
    def differs(self) -> bool:
        """Whether rounds may be under way, which other workers may have applied."""
        return self._rounds.apart and self._moved

    @property
    def is_own(self) -> bool:
        """Whether a state dict of now has something of this worker alone, or lacks something."""
        return self.differs

    def level(self, *, always: bool) -> bool:
        """Wait for all workers, and apply all that has been sent.

        Raises:
            UsageError: between backward and step.
            PeerError: a worker did not do the same; names it.
        """
        if self._views.sent:
            raise UsageError(
                "synchronize(), load_state_dict() or release() between backward() and step() "
                "(Canary): the gradients have been sent, and are applied before step(); call it "
                "first"
            )
        meets, self._moved = self._moved or always, False
        self._loaded = self._loaded or not always  # this comes before something is loaded
        if meets:
            self._refuse_changed()
            self._rounds.level()
            self._left = None
            if self._rounds.apart:
                self._refuse_different()
                self._level_frozen()
        return meets

    def before_detach(self) -> None:
        """End the iteration that a refusal has left open, as its gradients have been sent."""
        self._leaving = True
        if self._views.sent:
            self.perform(Step(), None)
        else:
            self._left = None

    def refuse_lost(self, what: str) -> NoReturn:
        """Refuse what changes gradients after backward: they have been sent.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{what}: under bounded staleness (Canary) gradients leave under backward, and what "
            f"comes back are sums of several iterations; leave it out, {_OTHERS}"
        )

"""What comes before a forward: the model is brought up to date, and gets ready for a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from wingbeat.engine.attach import in_backward, in_transform, outside_transforms
from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.gradients.convert import refuse_unfrozen
from wingbeat.engine.intake import Intake
from wingbeat.engine.wrapped import refuse_around

if TYPE_CHECKING:
    from wingbeat.engine.attach import Hooks


class Entrance(Intake):
    """Is told of forwards; says what they decide for the backward that follows.

    Attributes:
        model: the user's.
        hooks: on the model, its parameters and its optimizer; None for a worker alone.
        before_synced_forward: called before a forward whose gradients are synchronised.
    """

    model: torch.nn.Module
    hooks: Hooks | None
    _frozen: list[torch.nn.Parameter]

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.before_synced_forward: Callable[[], Any] | None = None

    def flush(self) -> None:
        """Apply updates that are still under way."""
        raise NotImplementedError

    def before_module(self, buckets: Sequence[Bucket]) -> None:
        """Bring the parameters up to date that a module is about to read."""
        raise NotImplementedError

    def between_steps(self) -> None:
        """Before what may be the first of a step: stop here if SIGTERM stops the job."""
        raise NotImplementedError

    def enter_forward(self, _model: torch.nn.Module, _args: Any) -> None:
        """Before the model's forward: get ready for the backward that may follow."""
        if not torch.is_grad_enabled() or in_backward():
            return
        self.between_steps()
        with outside_transforms():
            self._begin_forward()
        if self.sync and not self.model.training and self.before_synced_forward is None:
            return  # an evaluation, perhaps on this worker alone; else backward decides
        # As under DDP, it is the forward that decides whether its gradients are synchronised.
        # One that is not does not undo what an earlier one of the same backward has decided.
        self._decided = self.sync or bool(self._decided)
        self._ask_for_buffers()

    def enter_step(self) -> None:
        """Before forwards and backwards of which each backward decides whether it synchronises."""
        self.between_steps()
        self._begin_forward()
        self._ask_for_buffers()

    def _begin_forward(self) -> None:
        self.meter.enter("forward")
        refuse_around(self.model)
        refuse_unfrozen(self.model, self._frozen)
        self.recover()

    def _ask_for_buffers(self) -> None:
        if self.sync:
            if self.before_synced_forward is not None:
                self.before_synced_forward()
            if not in_transform():  # buffers may be its arguments, and cannot be written to
                self.buffer_sync.ask(self.buffer_root)

    def readers(self) -> set[torch.nn.Module]:
        """Return the modules that have parameters or buffers of their own that are synchronised."""
        trained = {module for module in self.model.modules() if self.bucketing.needed_by(module)}
        return trained | self.buffer_sync.owners()

    def enter_compiled(self) -> None:
        """Before a forward that ``torch.compile`` has compiled: nothing can be done inside of it.

        Hooks there would cut the graph in pieces. So all of the model is brought up to date.
        """
        if self.hooks is not None:
            self.hooks.remove_inner()
        self.flush()

    def enter_module(self, module: torch.nn.Module, _args: Any) -> None:
        """Before any module's forward: bring up to date what it reads."""
        if not in_transform():
            self.buffer_sync.apply()
        buckets = self.bucketing.needed_by(module)
        if buckets:
            self.before_module(buckets)

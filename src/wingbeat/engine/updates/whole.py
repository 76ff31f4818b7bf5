"""The optimizer's own step, on all parameters at once, when the user calls it."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from wingbeat.engine.gradients.bucket import Bucket
from wingbeat.engine.updates.update import Closure, Host, Training
from wingbeat.schedules.events import Step, StepCalled, UpdateCommand


class WholeUpdate:
    """Steps at once on whole gradients; nothing is ever due."""

    defers: ClassVar[bool] = False
    agrees: ClassVar[bool] = False
    option: ClassVar[str] = ""
    shards = None

    def __init__(self, training: Training) -> None:
        self._training = training

    def step(self, host: Host, closure: Closure) -> Any:
        """Run the optimizer's own step."""
        host.recover()
        return host.tell(StepCalled(in_parts=False), closure)

    def step_of_others(self, host: Host) -> None:
        """Step as they do: all have the same gradients."""
        self.step(host, None)

    def perform(self, command: UpdateCommand, closure: Closure) -> Any:
        """Step, which is all that is ever asked for."""
        assert isinstance(command, Step), command
        self._training.steps.count += 1
        return self._training.stepper.whole_step(closure)

    def reads_only(self, bucket: Bucket) -> bool:  # noqa: ARG002
        """Nothing is known of what the optimizer does with gradients."""
        return False

    def as_of_step(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is due."""
        return contextlib.nullcontext()

    def planned(self) -> None:
        """Buckets do not matter."""

    def dropped(self, set_to_none: bool) -> None:
        """Nothing to forget."""

    def lost(self) -> bool:
        """Gradients are used up by nobody."""
        return False

    def why_lost(self, what: str) -> str:
        """Nothing is ever lost."""
        return what

    def refuse_lost(self, what: str) -> None:
        """Nothing is ever lost."""

    def level(self, *, always: bool) -> bool:  # noqa: ARG002
        """All workers hold the same."""
        return False

    def loaded(self) -> None:
        """The optimizer has it all."""

    def whole_state(self, host: Host) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """It is always whole."""
        return contextlib.nullcontext()

    def visible_state(self) -> Any:
        """Return the optimizer's own."""
        return self._training.optimizer.__dict__["state"]

    def before_forward(self) -> None:
        """Nothing to look at."""

    def leave(self) -> None:
        """Nothing is left open."""

    def detach(self) -> None:
        """Nothing was changed."""

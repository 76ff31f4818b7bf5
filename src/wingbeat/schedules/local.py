"""Steps on a worker's own gradients, and averages of models after some of them.

Ripples (section 3.2) averages after each step, in groups; local SGD after some; DiLoCo, in the
form of Streaming DiLoCo (Douillard et al., 2025), a fragment of the model at a time.
"""

from __future__ import annotations

from typing import ClassVar

from wingbeat.schedules.events import (
    Adopt,
    Average,
    Commands,
    Event,
    Phase,
    Step,
    StepCalled,
)


class Local:
    """Steps at once; every so many steps, the parameters of a fragment are averaged.

    Fragments take turns, spread evenly over the steps from one turn to the next. What is being
    averaged while training goes on is taken over in a later step, before the optimizer's.

    Args:
        every: steps from one average of a fragment to its next.
        delay: steps after which it is taken over; 0: before the step that began it returns.
        fragments: into how many parts the model is cut.

    Attributes:
        phase: always idle: gradients are this worker's own.
        made: how many steps were made.
        every: as given.
        beside: whether averages are made while training goes on.
    """

    whole_after_backward: ClassVar[bool] = True

    def __init__(self, every: int = 1, delay: int = 0, fragments: int = 1) -> None:
        self.phase = Phase.IDLE
        self.every, self._delay, self._fragments = every, delay, fragments
        self.made = 0
        self.beside = delay > 0
        self._begun: int | None = None

    def react(self, event: Event) -> Commands:
        """Yield what is to be done now that ``event`` has happened."""
        if isinstance(event, StepCalled):
            yield from self._step()

    def resume(self, made: int) -> None:
        """Go on as after so many steps, with nothing under way."""
        self.made, self._begun = made, None

    def _step(self) -> Commands:
        number = self.made + 1
        first, last = self._due(number)
        begun = self._begun
        if begun is not None and (number - begun >= self._delay or first < last):
            yield from self._adopt()
            # Whoever was left out goes on as another worker does, at another step.
            number = self.made + 1
            first, last = self._due(number)
        yield Step()
        self.made = number
        if first < last:
            yield Average(first, last)
            self._begun = number
            if not self._delay:
                yield from self._adopt()

    def _adopt(self) -> Commands:
        # What was begun is over, even if it fails: nobody waits for it twice.
        self._begun = None
        yield Adopt()

    def _due(self, step: int) -> tuple[int, int]:
        """Return the fragments to be averaged after step number ``step``, which are neighbours."""
        every, count = self.every, self._fragments
        # Fragment f's turn is after steps of which `every` leaves a remainder of f * every / count.
        first, last = (-(-place * count // every) for place in (step % every, step % every + 1))
        return first, last

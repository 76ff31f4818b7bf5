"""Local steps, with periodic averages of models.

Ripples (section 3.2) averages in groups after each step; local SGD after several steps; DiLoCo, as
Streaming DiLoCo (Douillard et al., 2025), one fragment of the model at a time.
"""

from __future__ import annotations

from typing import ClassVar

from wingbeat.schedules.events import Adopt, Average, Commands, Event, Phase, Step, StepCalled


class Local:
    """Steps immediately and averages each fragment's parameters every ``every`` steps.

    Fragments take turns, spread evenly over the period. An average is adopted ``delay`` steps after
    it started, before the optimizer's step; with 0, before the step that started it returns.
    """

    whole_after_backward: ClassVar[bool] = True

    def __init__(self, every: int = 1, delay: int = 0, fragments: int = 1) -> None:
        self.phase = Phase.IDLE
        self.every, self._delay, self._fragments = every, delay, fragments
        self.made = 0
        self.beside = delay > 0
        self._begun: int | None = None

    def react(self, event: Event) -> Commands:
        """Yield the commands that follow ``event``."""
        if isinstance(event, StepCalled):
            yield from self._step()

    def resume(self, made: int) -> None:
        """Continue as after ``made`` steps, with no average in flight."""
        self.made, self._begun = made, None

    def _step(self) -> Commands:
        number = self.made + 1
        first, last = self._due(number)
        begun = self._begun
        if begun is not None and (number - begun >= self._delay or first < last):
            yield from self._adopt()
            # A worker that was left out resumes at another worker's step.
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
        # The average is over even if it fails, so that it is not awaited twice.
        self._begun = None
        yield Adopt()

    def _due(self, step: int) -> tuple[int, int]:
        """Return the fragments to average after step ``step``, which are neighbours."""
        every, count = self.every, self._fragments
        # Fragment f is averaged after steps equal to f * every / count modulo `every`.
        return -(-(step % every) * count // every), -(-(step % every + 1) * count // every)

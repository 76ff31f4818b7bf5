"""The result of the trial of strategies (`wingbeat.Auto`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wingbeat.errors import UsageError
from wingbeat.planning.files import check_range


@dataclass(frozen=True, slots=True)
class TimedStrategy:
    """A candidate, and the median seconds of its iterations, the mean of all workers."""

    name: str
    seconds: float

    def __post_init__(self) -> None:
        check_range("seconds", (self.seconds,), 1e-9, 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """The candidates of a trial, in the order in which they were first tried, and the chosen one.

    ``iterations`` is how many the trial has taken. A ``chosen`` name that was not tried is a
    `UsageError`.
    """

    kind: ClassVar[str] = "strategy"
    tried: tuple[TimedStrategy, ...]
    chosen: str
    iterations: int

    def __post_init__(self) -> None:
        check_range("iterations", (self.iterations,), 1)
        if self.chosen not in (each.name for each in self.tried):
            raise UsageError(f"chosen is {self.chosen!r}, which was not tried")

    def explain(self) -> str:
        """Summarize what was chosen, and what an iteration takes with the others.

        >>> tried = TimedStrategy("DeAR()", 0.02), TimedStrategy("AllReduce()", 0.03)
        >>> StrategyResult(tried=tried, chosen="DeAR()", iterations=41).explain()
        'DeAR() chosen in 41 iterations, 20 ms each; AllReduce() takes 1.500 times as long'
        """
        times = {each.name: each.seconds for each in self.tried}
        least = times.pop(self.chosen)
        others = [f"{name} takes {seconds / least:.3f}" for name, seconds in times.items()]
        rest = f"; {', '.join(others)} times as long" if others else ""
        return (
            f"{self.chosen} chosen in {self.iterations} iterations, {1e3 * least:.4g} ms each{rest}"
        )

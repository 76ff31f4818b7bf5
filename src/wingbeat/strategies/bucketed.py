"""Base class of the presets with options for the choice of buckets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from wingbeat import parts
from wingbeat.errors import UsageError
from wingbeat.parts import plan as plans
from wingbeat.parts.plan import PlanPart
from wingbeat.settings import named
from wingbeat.strategies.preset import Preset

_OF_PLANS = (
    "mb",
    "min_mb",
    "max_mb",
    "layers",
    "trials",
    "steps",
    "drift",
    "tune_topology",
    "plan_file",
)
"""Options that apply only to a plan given by its plain name, as the options for edges do."""

_WITH_FILE = (*plans.SEARCHES, "merged")


@dataclass(frozen=True, kw_only=True, repr=False)
class Bucketed(Preset):
    """A preset that accepts any plan, with options for plans given by name.

    Attributes:
        edges: names of the preset's options for the sizes of the first and the last bucket.
    """

    edges: ClassVar[tuple[str, ...]]

    plan: str | PlanPart = "fixed"
    mb: float = 25.0
    min_mb: float = 1.0
    max_mb: float = 100.0
    layers: int = 4
    trials: int = 10
    steps: int = 10
    drift: float = 1.5
    tune_topology: bool = False
    plan_file: str = ""

    @abstractmethod
    def edge_sizes(self) -> Mapping[str, float]:
        """Return ``first_mb`` and ``last_mb`` of the plan."""

    def check_buckets(self) -> None:
        """Raise a `UsageError` for an option of plans that is out of range."""
        for key in ("mb", "min_mb", "max_mb"):
            self.check_size(key)
        for key in ("layers", "trials", "steps"):
            self.check_count(key, 1, 10_000)
        plans.check_drift(self)
        self.check_flag("tune_topology")
        if self.tune_topology and self.plan not in plans.SEARCHES:
            raise UsageError(
                f"{type(self).__name__}(plan={self.plan!r}, tune_topology=True): only plans that "
                f"are tuned by trials can tune it; allowed are {', '.join(plans.SEARCHES)}"
            )
        self.check_file("plan_file")
        if self.plan in plans.SEARCHES:
            plans.check_range(self)

    def plan_part(self) -> PlanPart:
        """Return the plan that the options describe."""
        plan = self.plan
        self._check_unused()
        if isinstance(plan, PlanPart):
            return plan
        if plan == "layers":
            return parts.Layers(count=self.layers)
        if plan == "merged":
            return parts.Merged(steps=self.steps, drift=self.drift, file=self.plan_file)
        if plan == "fixed":
            return parts.FixedBuckets(mb=self.mb, **self.edge_sizes())
        if plan in plans.SEARCHES:
            return parts.TunedBuckets(
                search=plan,
                mb=self.mb,
                **self.edge_sizes(),
                min_mb=self.min_mb,
                max_mb=self.max_mb,
                trials=self.trials,
                steps=self.steps,
                drift=self.drift,
                topology=self.tune_topology,
                file=self.plan_file,
            )
        return named("plan", str(plan), plans.BY_NAME)

    def _check_unused(self) -> None:
        """Reject options that a plan with its own options ignores; a plain name keeps them all."""
        name = type(self).__name__
        by_name = not isinstance(self.plan, PlanPart) and "@" not in str(self.plan)
        if by_name and self.plan_file and self.plan not in _WITH_FILE:
            raise UsageError(
                f"{name}(plan={self.plan!r}, plan_file={self.plan_file!r}): only a measured plan "
                f"has a file; allowed are {', '.join(_WITH_FILE)}"
            )
        for key in () if by_name else (*_OF_PLANS, *self.edges):
            if getattr(self, key) != getattr(type(self), key):
                raise UsageError(
                    f"{name}(plan={self.plan!r}, {key}={getattr(self, key)!r}): {key} is an option "
                    "for a plan by its name alone; leave it out, or write it into the plan"
                )

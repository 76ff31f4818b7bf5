"""What tuning has found, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wingbeat.planning.plans.sample import Sample
from wingbeat.types import Tuning

HARDLY = 0.02
"""Share of the throughput below which a difference is not told from noise: a measurement's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The end of a tuning; sizes in bytes, throughputs in iterations per second.

    Attributes:
        search: ``"bo"``, ``"random"`` or ``"grid"``.
        low_bytes: smallest size allowed.
        high_bytes: largest size allowed.
        steps: iterations that counted in each trial.
        samples: the trials in order; the first is the start.
        expected: for each trial, the throughput that all samples together make likely at its size.
        chosen_bytes: the size tried whose expected throughput is highest.
        costs_s: seconds that each decision took on rank 0.
        buckets: of the one plan that all sizes make, where so there was nothing to try, and
            ``samples``, ``expected`` and ``costs_s`` are empty; 0 where sizes were tried.
        chosen_topology: of the chosen size; empty where topologies were not tuned.
    """

    search: str
    low_bytes: int
    high_bytes: int
    steps: int
    samples: tuple[Sample, ...]
    expected: tuple[float, ...]
    chosen_bytes: int
    costs_s: tuple[float, ...]
    buckets: int = 0
    chosen_topology: str = ""

    @property
    def start_bytes(self) -> int:
        """The size of the first trial."""
        return self.samples[0].nbytes if self.samples else self.chosen_bytes

    @property
    def chosen_index(self) -> int:
        """The first trial with the chosen size and topology, counted from 0."""
        tried = [(sample.nbytes, sample.topology) for sample in self.samples]
        return tried.index((self.chosen_bytes, self.chosen_topology))

    @property
    def spread(self) -> float:
        """How much the fastest size tried is expected to gain on the slowest, as a share."""
        return max(self.expected) / min(self.expected) - 1 if self.expected else 0.0

    @property
    def matters(self) -> bool:
        """Whether the size makes a difference that measuring can see."""
        several = len({(sample.nbytes, sample.topology) for sample in self.samples}) > 1
        return bool(self.samples) and (not several or self.spread >= HARDLY)

    @property
    def gain(self) -> float:
        """Expected throughput with the chosen size over that with the start's."""
        return self.expected[self.chosen_index] / self.expected[0]

    def explain(self) -> str:
        """Say in one line what was chosen and why."""
        if not self.samples:
            return f"nothing to tune: {self.one_plan()}"
        trials, steps = counted(len(self.samples), "trial"), counted(self.steps, "iteration")
        head = f"tuned buckets in {trials} of {steps} ({self.search}): "
        cost = f"a decision took up to {1e3 * max(self.costs_s):.1f} ms"
        chosen = setting(self.chosen_bytes, self.chosen_topology)
        if not self.matters:
            return f"{head}{chosen}, but {self.no_matter()}; {cost}"
        if self.chosen_index == 0:
            return (
                f"{head}{chosen}, as at the start: of the sizes tried, none "
                f"is expected to be faster; {cost}"
            )
        start = setting(self.start_bytes, self.samples[0].topology)
        return (
            f"{head}{chosen}, {self.gain:.2f}x the throughput of the start "
            f"({start}): of the sizes tried, the one expected to be fastest; "
            f"{cost}"
        )

    def one_plan(self) -> str:
        """Say that all sizes are one plan."""
        low, high = as_mb(self.low_bytes), as_mb(self.high_bytes)
        return (
            f"for this model bucket sizes from {low} to {high} MB are all one plan, "
            f"{counted(self.buckets, 'bucket')}"
        )

    def no_matter(self) -> str:
        """Say that all sizes are equally fast."""
        share = f"{100 * self.spread:.1f}%"
        return f"no size matters here: those tried are within {share} of each other"


def nothing(tuning: Tuning, start_bytes: int, buckets: int) -> Result:
    """Return what there is to say where all sizes make one plan of so many buckets."""
    return Result(
        search=tuning.search,
        low_bytes=tuning.low_bytes,
        high_bytes=tuning.high_bytes,
        steps=tuning.steps,
        samples=(),
        expected=(),
        chosen_bytes=start_bytes,
        costs_s=(),
        buckets=buckets,
    )


def choose(samples: Sequence[Sample]) -> tuple[int, tuple[float, ...]]:
    """Return the best size tried, in bytes, and the expected throughput of each sample.

    The best is the one with the highest posterior mean, whatever the search was: among noisy
    measurements the highest is too high, and its neighbours know better. So searches differ in
    where they look and in nothing else.
    """
    index, expected = best(samples)
    return samples[index].nbytes, expected


def best(samples: Sequence[Sample]) -> tuple[int, tuple[float, ...]]:
    """Do as `choose` does, and return which sample is the best, counted from 0."""
    from wingbeat.planning.plans import bayes  # scipy and scikit-learn

    sizes, topologies = [s.nbytes for s in samples], [s.topology for s in samples]
    mean, _ = bayes.posterior(samples, sizes, topologies)
    return int(mean.argmax()), tuple(float(value) for value in mean)


def setting(nbytes: float, topology: str) -> str:
    """Write a size, and the topology if there is one.

    >>> setting(25 * 2**20, ""), setting(25 * 2**20, "mesh")
    ('25 MB', '25 MB along mesh')
    """
    return f"{as_mb(nbytes)} MB" + (f" along {topology}" if topology else "")


def as_mb(nbytes: float) -> str:
    """Write a size in MB (2**20 bytes) with three digits.

    >>> [as_mb(mb * 2**20) for mb in (0.05, 6.2041, 25, 4096)]
    ['0.05', '6.2', '25', '4096']
    """
    mb = nbytes / 2**20
    return f"{mb:.0f}" if mb >= 100 else f"{mb:.3g}"


def counted(number: int, what: str) -> str:
    """Write a number of things.

    >>> [counted(1, "trial"), counted(10, "trial")]
    ['1 trial', '10 trials']
    """
    return f"{number} {what}" + ("" if number == 1 else "s")

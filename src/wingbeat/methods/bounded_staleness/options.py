"""The parts of bounded staleness: how far workers may be apart, and when sums are applied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from wingbeat.errors import UsageError
from wingbeat.methods.bounded_staleness.bound import StalenessBound
from wingbeat.parts.schedule import SchedulePart
from wingbeat.parts.update import UpdatePart
from wingbeat.settings import READ, Settings, count_of
from wingbeat.traits import OWN, ROUNDS, ExchangePart

if TYPE_CHECKING:
    from wingbeat.compression import Coded
    from wingbeat.engine.context import BuildContext
    from wingbeat.engine.runtime import Runtime
    from wingbeat.parts.strategy import Strategy

AUTO = "auto"


def bundles_of(text: str) -> int | str:
    """Parse a number of colayers, or ``auto``.

    >>> bundles_of("4"), bundles_of("auto")
    (4, 'auto')
    """
    return AUTO if text.lower() == AUTO else int(text)


def colayers_of(text: str) -> int | str | None:
    """Parse a number of colayers, ``none`` or ``auto``.

    >>> colayers_of("6"), colayers_of("none"), colayers_of("auto")
    (6, None, 'auto')
    """
    return AUTO if text.lower() == AUTO else count_of(text)


@dataclass(frozen=True, kw_only=True, repr=False)
class Bounded(Settings, ExchangePart):
    """Workers exchange pieces of buckets while they are a bounded number of iterations apart.

    Canary (sections 4.3, 4.4.2 and 5). Every worker sums one piece of each bucket over the
    gradients that have arrived, and all workers apply these sums in the same order. Synchronous
    only with ``s=0`` and ``p`` None or ``"auto"``.

    Args:
        s: iterations that a worker may be behind the fastest. None (``none`` in textual form): no
            bound.
        p: a worker that is further behind drops its iteration, unless it has sent this number of
            its buckets; then the others wait for the rest. ``"auto"``: 6 of 10 (section 6.6), in
            proportion for other counts; nothing is dropped if ``s`` is 0 or None. None: nothing is
            dropped, and the others wait.
        encrypted: encrypt messages. Without encryption, anyone who can observe the traffic can
            forge them.
        in_flight: rounds of sums that may be outstanding when an iteration begins while another
            worker is slow; one if no worker is slow. None (``none``): always as many as ``s``.

    Raises:
        UsageError: a number is out of range, or ``p`` is set without ``s``.
    """

    has: ClassVar[frozenset[str]] = frozenset({ROUNDS})
    lockstep: ClassVar[bool] = False

    s: int | None = field(default=2, metadata={READ: count_of})
    p: int | str | None = field(default=None, metadata={READ: colayers_of})
    encrypted: bool = True
    in_flight: int | None = field(default=2, metadata={READ: count_of})

    def __post_init__(self) -> None:
        self.check_count_if_any("s", 0, 1_000_000)
        if self.p != AUTO:
            self.check_count_if_any("p", 1, 100_000)
        self.check_count_if_any("in_flight", 1, 1_000_000)
        if self.s is None and self.p not in (None, AUTO):
            reason = "without a bound no worker is too late, and nothing is dropped; leave p out"
            raise self.refusal(f"{reason}, or set s", "s", "p")
        self.check_flag("encrypted")

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether weights equal DDP's: no worker runs ahead, and nothing is dropped."""
        return self.s == 0 and self.p in (None, AUTO)

    @property
    def synchronous(self) -> bool:  # type: ignore[override]
        """Whether an update uses all workers' gradients of its own iteration."""
        return self.exact

    @property
    def readmits(self) -> bool:
        """True: a worker that is restarted alone may rejoin."""
        return True

    @property
    def bound(self) -> str:  # type: ignore[override]
        """The lower bound of an iteration: that of whole all-reduces if no worker runs ahead."""
        return "whole" if self.exact else "stale"

    @property
    def needs(self) -> frozenset[str]:
        """A schedule in which no step waits for all workers."""
        return frozenset({OWN})

    def exchanged(self, count: int) -> int:
        """Return p for ``count`` buckets.

        >>> [Bounded(s=18, p="auto").exchanged(count) for count in (1, 4, 10)]
        [1, 2, 6]
        >>> Bounded(s=2).exchanged(10), Bounded(s=2, p=3).exchanged(10)
        (10, 3)
        >>> Bounded(s=0, p="auto").exchanged(10)
        10
        """
        if self.p == AUTO and self.s:
            return max(1, count * 6 // 10)
        return count if self.p in (None, AUTO) else int(self.p)

    def thresholds(self, count: int) -> StalenessBound:
        """Return the thresholds for ``count`` buckets."""
        return StalenessBound(self.s, self.exchanged(count), count, self.in_flight)

    def codec(self, codec: Coded) -> Coded:
        """Return the codec; only workers in lockstep can disable it together."""
        return codec.without_trial()

    def check(self, strategy: Strategy) -> None:
        """Raise a `UsageError` for parts that require lockstep or cannot be summed in pieces."""
        where, wire = f"Strategy(exchange={self!r}", strategy.compression
        codec, plan = strategy.codec, strategy.plan
        if wire == "bf16" or (codec is not None and codec.gathers):
            raise UsageError(
                f"{where}, compression={wire!r}): pieces are summed by their owners and sent on in "
                'the same form; allowed: Sketch(), LowRank(), Half(), "fp32", or a topology as the '
                "exchange"
            )
        if codec is not None and codec.ends_after is not None:
            raise UsageError(
                f"{where}, compression={wire!r}): the first part of a training ends in another "
                "iteration on each worker; leave share out, or use a topology as the exchange"
            )
        if plan.tuning() is not None or plan.merging() is not None:
            raise UsageError(
                f"{where}, plan={plan!r}): all workers must decide a plan in the same iteration, "
                "and under bounded staleness each runs its own; allowed: plan=Colayers(), or "
                "another fixed plan, such as Layers()"
            )
        if plan.fusion().measured and self.exact:
            raise UsageError(
                f"{where}, plan={plan!r}): colayers are bundled again during training, and with "
                "s=0 gradients stay in their buckets; leave measured out, or use s=1 or more"
            )

    def refusal_in_replicas(self, strategy: Strategy) -> str:
        """Return why colayers that are bundled again are not possible.

        Workers settle for it after the step in which each learns of it. Ranks of a replica may
        learn of it in different steps in their columns, and would wait for each other for ever.
        """
        if not strategy.plan.fusion().measured:
            return ""
        return (
            "it bundles colayers again after the first iterations, for which all workers must stop "
            "after the same step, and columns of the mesh do not know each other's; leave measured "
            "out"
        )

    def build(self, context: BuildContext) -> Runtime:
        """Make a runtime that sends pieces, and applies rounds of sums."""
        from wingbeat.methods.bounded_staleness.build import build_runtime

        return build_runtime(self, context)


@dataclass(frozen=True, kw_only=True, repr=False)
class InRounds(UpdatePart):
    """``step()`` applies the sums that have arrived, one round at a time, on every worker."""

    in_parts: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """Steps that do not wait for all workers."""
        return frozenset({OWN})


@dataclass(frozen=True, kw_only=True, repr=False)
class Stale(SchedulePart):
    """Gradients are sent during backward; sums are applied as they arrive (Canary, 5.3)."""

    name: ClassVar[str] = "stale"
    bound: ClassVar[str] = "stale"
    update: ClassVar[UpdatePart] = InRounds()
    of: ClassVar[str] = "Canary"
    has: ClassVar[frozenset[str]] = frozenset({OWN})

    @property
    def needs(self) -> frozenset[str]:
        """An exchange with sums in rounds."""
        return frozenset({ROUNDS})

"""The preset whose workers make iterations of their own: Canary."""

from __future__ import annotations

from dataclasses import dataclass, field

from wingbeat import parts
from wingbeat.parts.exchange import AUTO, bundles_of, check_thresholds, colayers_of, count_of
from wingbeat.planning.colayers import DEFAULT_COUNT, MIN_COUNT
from wingbeat.settings import READ
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.strategy import Strategy
from wingbeat.wires import Wire


@dataclass(frozen=True, kw_only=True, repr=False)
class Canary(Preset):
    """Bounded staleness: workers make iterations of their own, and exchange gradients piecewise.

    Canary (Zhou et al., 2023), sections 4.3 to 5.3. The gradients of a colayer leave in pieces as
    its backward is done; each worker sums one piece of what has come of all, and all apply these
    sums in the same order. A slow worker does not hold up the others, as far as ``s`` and ``p``
    allow:

    - ``s=0``: nobody is ahead (BSP). Exact: the weights equal DDP's. Gradients are whole when
      backward returns, so any optimizer and whatever changes gradients works as under `AllReduce`.
    - ``s=2, p=None``: who would be more than 2 iterations ahead of the slowest waits (SSP).
    - ``s=18, p=6``, the defaults, as in the paper: who is more than 18 behind drops what it
      computes and goes on from the fastest's iteration, unless it has sent 6 of its colayers
      already.
    - ``s=None``: nobody waits for a slow worker and nothing is dropped (ASP).

    Replicas differ by the rounds that they have applied, until `wingbeat.synchronize`.

    Args:
        s: iterations that a worker may be behind the fastest; None (``none`` on the command line):
            any number.
        p: colayers that a worker must have sent for its iteration not to be dropped; ``"auto"``: 6
            of 10, and as many in proportion of others, where ``s`` is 1 or more; None (``none``):
            nothing is dropped, and the others wait for it.
        colayers: into how many bundles layers are put, k; a model with fewer layers has as many.
            ``"auto"``: 10 at first, and from 4 to 10 by what is ``measured``.
        measured: whether layers are bundled anew, once, by what the first iterations have measured:
            how long backward takes for each parameter, and how wide gradients are distributed. All
            workers settle for it. Not with ``s=0``.
        compression: what pieces travel as: ``"fp32"`` (the gradients' own dtype), ``"sketch"``,
            ``"lowrank"`` or ``"fp16"``, or their settings, such as ``wingbeat.Sketch(bits=4)``; it
            is not tried whether that is faster. All but fp32 are not exact. ``"auto"``: the sketch
            of 8 bits, as in the paper; ``"fp32"`` where nobody is ahead (``s=0``).
        encrypted: whether messages between workers, gradients and the model for a worker that
            comes back among them, are. Without it whoever is on the network can read them, and
            send in their place; what it costs is in ``docs/how-to/staleness.md``.
        in_flight: rounds that a worker may be ahead of the sums, as far as ``s`` allows, while
            another is slow; one while nobody is, so that what waits for links makes no gradients
            late. None (``none``): as many as ``s``, as in the paper; with ``s=None`` there is then
            no bound to what waits to be sent.

    Raises:
        UsageError: a value out of range.
    """

    s: int | None = field(default=18, metadata={READ: count_of})
    p: int | str | None = field(default=AUTO, metadata={READ: colayers_of})
    colayers: int | str = field(default=DEFAULT_COUNT, metadata={READ: bundles_of})
    measured: bool = False
    compression: Wire = AUTO
    encrypted: bool = True
    in_flight: int | None = field(default=2, metadata={READ: count_of})

    def __post_init__(self) -> None:
        self.check_flag("measured")
        if self.colayers != AUTO:
            self.check_count("colayers", 1, 10_000)
        elif not self.measured:
            raise self._refuse("colayers", "whole numbers; 'auto' with measured=True")
        if self.p not in (None, AUTO, *range(1, self._most + 1)):
            allowed = f"whole numbers, 1 to {self._most} (colayers), None and 'auto'"
            raise self._refuse("p", allowed)
        check_thresholds(self)
        self.check_flag("encrypted")
        self.compose()

    @property
    def _most(self) -> int:
        """How many colayers at most."""
        return self.colayers if isinstance(self.colayers, int) else DEFAULT_COUNT

    @property
    def _least(self) -> int:
        """How many at least, where their number is chosen; 0 where it is not."""
        if self.colayers != AUTO:
            return 0
        return max(MIN_COUNT, self.p) if isinstance(self.p, int) else MIN_COUNT

    def compose(self) -> Strategy:
        """Return the parts that it stands for."""
        exchange = parts.Bounded(
            s=self.s,
            # All colayers, however many the model has.
            p=None if self.p == self._most else self.p,
            encrypted=self.encrypted,
            in_flight=self.in_flight,
        )
        auto: Wire = "fp32" if exchange.exact else "sketch"
        return Strategy(
            plan=parts.Colayers(count=self._most, measured=self.measured, least=self._least),
            compression=auto if self.compression == AUTO else self.compression,
            exchange=exchange,
            schedule=parts.Stale(),
        )

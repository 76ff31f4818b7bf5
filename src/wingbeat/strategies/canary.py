"""The preset with bounded staleness: Canary."""

from __future__ import annotations

from dataclasses import dataclass, field

from wingbeat import parts
from wingbeat.compression import Compression
from wingbeat.parts.exchange import AUTO, bundles_of, check_thresholds, colayers_of, count_of
from wingbeat.planning.plans import DEFAULT_COUNT, MIN_COUNT
from wingbeat.settings import READ
from wingbeat.strategies.preset import Preset
from wingbeat.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True, repr=False)
class Canary(Preset):
    """Bounded staleness: workers run their own iterations and exchange gradients in pieces.

    Canary (Zhou et al., 2023), sections 4.3 to 5.3. When the backward of a colayer is complete, its
    gradients are sent in pieces. Each worker sums one piece of the gradients that have arrived, and
    all workers apply these sums in the same order. ``s`` and ``p`` bound how far a slow worker may
    fall behind before the others wait:

    - ``s=0``: no worker runs ahead (BSP). Exact: the weights equal DDP's. Gradients are complete
      when backward returns, so any optimizer and any code that changes gradients works as with
      `AllReduce`.
    - ``s=2, p=None``: a worker waits if it is more than 2 iterations ahead of the slowest (SSP).
    - ``s=18, p=6``, the defaults, as in the paper: a worker that is more than 18 iterations behind
      drops its iteration and continues from the fastest worker's, unless it has already sent 6 of
      its colayers.
    - ``s=None``: workers never wait for a slow worker, and nothing is dropped (ASP).

    Replicas differ by the rounds that they have applied, until `wingbeat.synchronize`.

    Args:
        s: iterations that a worker may be behind the fastest. None (``none`` on the command line):
            no bound.
        p: colayers that a worker must have sent for its iteration to be kept. ``"auto"``: 6 of 10,
            in proportion for other counts, if ``s`` is 1 or more. None (``none``): nothing is
            dropped, and the others wait.
        colayers: number of bundles of layers, k; a model with fewer layers has one per layer.
            ``"auto"``: 10 at first, then 4 to 10 as ``measured``.
        measured: bundle layers again, once, by the backward time of each parameter and the width of
            the distribution of its gradients, measured in the first iterations. All workers use the
            same bundles. Not allowed with ``s=0``.
        compression: encoding of the pieces: ``"fp32"`` (the gradients' own dtype), ``"sketch"``,
            ``"lowrank"`` or ``"fp16"``, or their settings, such as ``wingbeat.Sketch(bits=4)``.
            Whether it is faster is not measured. All but fp32 are not exact. ``"auto"``: the 8-bit
            sketch, as in the paper; ``"fp32"`` with ``s=0``.
        encrypted: encrypt messages between workers: gradients, and the model that a rejoining
            worker copies. Without encryption, anyone on the network can read and forge them. For
            its cost, see ``docs/how-to/staleness.md``.
        in_flight: rounds of sums that may be outstanding when an iteration begins while another
            worker is slow, at most ``s``. If no worker is slow, one round may be outstanding, so
            that slow connections do not delay gradients. None (``none``): as many as ``s``, as in
            the paper; with ``s=None`` the amount of unsent data is then unbounded.

    Raises:
        UsageError: a value is out of range.
    """

    s: int | None = field(default=18, metadata={READ: count_of})
    p: int | str | None = field(default=AUTO, metadata={READ: colayers_of})
    colayers: int | str = field(default=DEFAULT_COUNT, metadata={READ: bundles_of})
    measured: bool = False
    compression: Compression = AUTO
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
        """The largest number of colayers."""
        return self.colayers if isinstance(self.colayers, int) else DEFAULT_COUNT

    @property
    def _least(self) -> int:
        """The smallest number of colayers if it is chosen automatically, else 0."""
        if self.colayers != AUTO:
            return 0
        return max(MIN_COUNT, self.p) if isinstance(self.p, int) else MIN_COUNT

    def compose(self) -> Strategy:
        """Return the strategy's parts."""
        exchange = parts.Bounded(
            s=self.s,
            # None means all colayers, also in a model with fewer.
            p=None if self.p == self._most else self.p,
            encrypted=self.encrypted,
            in_flight=self.in_flight,
        )
        auto: Compression = "fp32" if exchange.exact else "sketch"
        return Strategy(
            plan=parts.Colayers(count=self._most, measured=self.measured, least=self._least),
            compression=auto if self.compression == AUTO else self.compression,
            exchange=exchange,
            schedule=parts.Stale(),
        )

"""The measured cross-traffic while a row was timed, from the kernel's counters. Pure."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wingbeat_lab.bench.quantiles import Quantiles
from wingbeat_lab.lab.cross import Sample
from wingbeat_lab.lab.spec import LabSpec
from wingbeat_lab.lab.units import format_rate

Seen = Mapping[str, Sequence[Sample]]
"""Samples in order, by receiving host."""


@dataclass(frozen=True, slots=True)
class CrossTraffic:
    """Cross-traffic in the timed iterations of one row.

    Attributes:
        bytes: received by all hosts together.
        bit_per_s: for each iteration, the mean rate in one direction of one trunk.
        cores: CPU usage of its generators, 1 is one core.
    """

    bytes: float
    bit_per_s: list[float]
    cores: float


def during(seen: Seen, rounds: Sequence[Sequence[float]], directions: int) -> CrossTraffic:
    """Return the cross-traffic in the iterations of a row.

    Args:
        seen: all samples of the bench.
        rounds: for each round, when its iterations began and the last ended, in seconds of the
            samples' clock.
        directions: total over all trunks that carry cross-traffic to another host.
    """
    total, cores, rates = 0.0, [], []
    for stamps in rounds:
        got = [sum(_at(own, when, "bytes") for own in seen.values()) for when in stamps]
        used = [sum(_at(own, when, "cpu_s") for own in seen.values()) for when in stamps]
        total += got[-1] - got[0]
        cores.append((used[-1] - used[0]) / (stamps[-1] - stamps[0]))
        rates += [
            8 * (got[i + 1] - got[i]) / (stamps[i + 1] - stamps[i]) / directions
            for i in range(len(stamps) - 1)
        ]
    return CrossTraffic(total, rates, statistics.fmean(cores))


def _at(samples: Sequence[Sample], when: float, name: str) -> float:
    """A counter's value at a time, interpolated between two samples and clamped to the ends."""
    after = bisect.bisect_right(samples, when, key=lambda sample: sample.when)
    if not after or after == len(samples):
        return float(getattr(samples[min(after, len(samples) - 1)], name))
    before, then = samples[after - 1], samples[after]
    share = (when - before.when) / (then.when - before.when)
    first, last = getattr(before, name), getattr(then, name)
    return float(first + (last - first) * share)


def notes(lab: LabSpec, rows: Sequence[tuple[str, CrossTraffic]]) -> list[str]:
    """Describe the requested cross-traffic, and what was measured for each row."""
    if not rows:
        return []
    flows = f"{lab.cross_flows} flow{'s' * (lab.cross_flows > 1)}"
    asked = (
        f"cross-traffic of hosts that do not train, best effort: {format_rate(lab.cross)} asked "
        f"each way on trunks of {format_rate(lab.trunk)}, in {flows}; received in the timed "
        "iterations, by the kernel's counters:"
    )
    return [asked, *(f"{name}: {said(own)}" for name, own in rows)]


def said(own: CrossTraffic) -> str:
    """Format the amount.

    >>> said(CrossTraffic(3e9, [2e8] * 9 + [1e8], 0.05))
    '3000 MB; each way 200 Mbit/s (p10 .. p90 of iterations: 190 .. 200), 0.05 cores'
    """
    mbit = Quantiles.of(1e-6 * rate for rate in own.bit_per_s)
    return (
        f"{own.bytes / 1e6:.0f} MB; each way {mbit.median:.0f} Mbit/s (p10 .. p90 of iterations: "
        f"{mbit.p10:.0f} .. {mbit.p90:.0f}), {own.cores:.2f} cores"
    )

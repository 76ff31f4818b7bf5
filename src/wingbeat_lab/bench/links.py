"""A lab's links in a bench: their rates after scaling, and their reduction speed."""

from __future__ import annotations

from dataclasses import replace

from wingbeat.errors import UsageError
from wingbeat_lab.bench.bound import seconds_per_byte
from wingbeat_lab.lab.spec import LabSpec
from wingbeat_lab.lab.units import MIN_RATE, format_rate


def scaled(spec: LabSpec, factor: float) -> LabSpec:
    """Return the lab with every rate multiplied by ``factor``; loopback is unshaped and unchanged.

    >>> str(scaled(LabSpec.parse("star:4@1gbit,h3@200mbit"), 0.25))
    'star:4@250mbit,h3@50mbit'

    UsageError if a rate would be below the kernel's minimum.
    """
    if not spec.shaped or factor == 1:
        return spec
    rates = [spec.rate, *filter(None, (spec.trunk, spec.cross)), *(o.rate for o in spec.overrides)]
    slowest = min(rates)
    if slowest * factor < MIN_RATE:
        raise UsageError(
            f"lab {str(spec)!r} scaled by {factor:g} has a rate of {slowest * factor:g} bit/s; "
            f"allowed: {format_rate(MIN_RATE)} or more, so scale by at least {MIN_RATE / slowest:g}"
        )
    return replace(
        spec,
        rate=round(spec.rate * factor),
        trunk=round(spec.trunk * factor),
        cross=min(round(spec.cross * factor), round(spec.trunk * factor)),
        overrides=tuple(replace(o, rate=round(o.rate * factor)) for o in spec.overrides),
    )


def reduce_seconds_per_byte(spec: LabSpec) -> float | None:
    """Seconds per byte of a perfect reduce-scatter on this lab; None if links are unshaped.

    >>> reduce_seconds_per_byte(LabSpec.parse("star:4x2@1gbit")) * 250e6
    0.75
    """
    if not spec.shaped:
        return None
    rates = [
        sum(spec.link_rate(host, rail) for rail in range(spec.rails)) / 8
        for host in range(spec.hosts)
    ]
    return seconds_per_byte(rates, _trunks(spec))


def _trunks(spec: LabSpec) -> list[tuple[int, float]]:
    """Each leaf switch's number of hosts and its trunks' rate in bytes per second."""
    if not spec.trunk:
        return []
    sizes = [min(spec.leaf, spec.hosts - first) for first in range(0, spec.hosts, spec.leaf)]
    return [(size, spec.trunk * spec.rails / 8) for size in sizes]

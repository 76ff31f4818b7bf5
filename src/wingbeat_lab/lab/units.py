"""Rates and times in text: ``1gbit``, ``500mbit``, ``2.5s``, ``200ms``."""

from __future__ import annotations

import re
from decimal import Decimal

from wingbeat.errors import UsageError, unknown

RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
TIME_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60)}
MIN_RATE, MAX_RATE = 10**6, 100 * 10**9

_NUMBER = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([a-zA-Z/]*)")


def parse_rate(text: str, *, where: str = "") -> int:
    """Parse a rate in bit/s.

    >>> parse_rate("2.5gbit")
    2500000000

    Raises:
        UsageError: not a number and a unit, or outside 1 mbit to 100 gbit.
    """
    value, unit = _number(text, "rate", "1gbit or 500mbit", where)
    if unit.lower() not in RATE_UNITS:
        raise unknown("rate unit", unit, RATE_UNITS, where=_in(text, where))
    bits = value * RATE_UNITS[unit.lower()]
    if bits != int(bits) or not MIN_RATE <= bits <= MAX_RATE:
        raise UsageError(f"rate {_in(text, where)} is outside 1mbit to 100gbit")
    return int(bits)


def format_rate(rate: int) -> str:
    """Format a rate in the largest unit that needs no fraction.

    >>> format_rate(2_500_000_000)
    '2500mbit'
    """
    for unit, factor in sorted(RATE_UNITS.items(), key=lambda item: -item[1]):
        if rate % factor == 0:
            return f"{rate // factor}{unit}"
    raise AssertionError("every whole number divides by one")


def parse_time(text: str, *, where: str = "") -> float:
    """Parse a duration in seconds; a number without unit is seconds.

    >>> parse_time("250ms")
    0.25

    Raises:
        UsageError: not a number with one of the units ms, s, m.
    """
    value, unit = _number(text, "time", "10s or 250ms", where)
    if unit and unit not in TIME_UNITS:
        raise unknown("time unit", unit, TIME_UNITS, where=_in(text, where))
    return float(value * TIME_UNITS[unit or "s"])


def _number(text: str, kind: str, example: str, where: str) -> tuple[Decimal, str]:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (kind == "rate" and not match[2]):
        raise UsageError(f"{kind} {_in(text, where)} needs a number and a unit, such as {example}")
    return Decimal(match[1]), match[2]


def _in(text: str, where: str) -> str:
    return f"{text!r} in {where!r}" if where else repr(text)

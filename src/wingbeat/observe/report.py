"""A worker's report: its fields, its text form and its validation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from wingbeat.observe.meter import GROWS, PARTS, Cell, Section

LARGEST = 16 << 10
"""Maximum characters of a report. Sections beyond are left out."""

TEXT, MANY, CELLS = 128, 32, 256
"""Limits: characters of a text; interfaces, counts or sections of a report; cells of a section."""

READS = 32
"""Maximum reports that rank 0 forwards per second; with more workers each is read less often."""

_MOST = 1 << 63

ValueT = TypeVar("ValueT")


class Malformed(ValueError):
    """The data is not a valid report."""


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one worker at one moment. All numbers are totals since its start.

    ``strategy`` is the text of all models' strategies, and ``iteration`` the maximum over the
    models. ``number`` counts reports from 0, and ``at_s`` is the worker's own clock. ``spent_s``
    has the keys of `PARTS`. ``interfaces`` has the host's bytes sent and received, from the
    kernel's counters. ``counts`` has rare events. ``ended`` marks the last report.
    """

    rank: int
    size: int
    host: str
    pid: int
    strategy: str
    number: int
    at_s: float
    iteration: int
    spent_s: dict[str, float] = field(default_factory=dict)
    interfaces: dict[str, tuple[int, int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()
    ended: bool = False

    def to_text(self) -> str:
        """Return one line of JSON of at most `LARGEST` characters; sections beyond are left out."""
        data = asdict(self)
        fit = [section for section in data["sections"] if len(section["cells"]) <= CELLS]
        data["sections"] = fit[:MANY]
        while len(text := json.dumps(data, separators=(",", ":"))) > LARGEST and data["sections"]:
            data["sections"] = data["sections"][:-1]
        return text

    @staticmethod
    def from_text(text: str) -> Report:
        """Parse the output of `to_text`; raises Malformed if it is not valid."""
        if len(text) > LARGEST:
            raise Malformed(f"{len(text)} characters; allowed are {LARGEST}")
        return Report.from_json(parsed(text))

    @staticmethod
    def from_json(data: Any) -> Report:
        """Build a report from the output of `asdict`; raises Malformed if it is not valid."""
        try:
            size = whole(data["size"])
            rank = whole(data["rank"])
            if not 0 <= rank < size:
                raise Malformed(f"rank {rank} of {size}")
            return Report(
                rank=rank,
                size=size,
                host=text_of(data["host"]),
                pid=whole(data["pid"]),
                strategy=text_of(data["strategy"]),
                number=whole(data["number"]),
                at_s=seconds(data["at_s"]),
                iteration=whole(data["iteration"]),
                spent_s=by_part(data["spent_s"]),
                interfaces=named(data["interfaces"], _pair),
                counts=named(data["counts"], whole),
                sections=tuple(section_of(each) for each in few(data["sections"], MANY)),
                ended=data["ended"] is True,
            )
        except (KeyError, TypeError, AttributeError) as err:
            raise Malformed(f"no report: {type(err).__name__} {err}"[:TEXT]) from None


def parsed(text: str | bytes) -> Any:
    """Parse JSON; raises Malformed if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise Malformed(f"no JSON: {err}"[:TEXT]) from None


def text_of(value: Any) -> str:
    """Return a text without control characters, cut to `TEXT` characters; raises Malformed."""
    if not isinstance(value, str):
        raise Malformed(f"a text was expected, not {value!r}"[:TEXT])
    return "".join(c if c.isprintable() else "?" for c in value[:TEXT])


def whole(value: Any) -> int:
    """Return an integer from 0; raises Malformed."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise Malformed(f"a whole number from 0 was expected, not {value!r}"[:TEXT])
    return value


def seconds(value: Any) -> float:
    """Return a finite number of seconds from 0; raises Malformed."""
    if type(value) not in (int, float) or not 0 <= value < _MOST:
        raise Malformed(f"seconds were expected, not {value!r}"[:TEXT])
    return float(value)


def few(value: Any, most: int) -> list[Any]:
    """Return a list of at most ``most`` items; raises Malformed."""
    if not isinstance(value, (list, tuple)) or len(value) > most:
        raise Malformed(f"a list of at most {most} was expected")
    return list(value)


def named(value: Any, check: Callable[[Any], ValueT], most: int = MANY) -> dict[str, ValueT]:
    """Return at most ``most`` values by name, each converted by ``check``; raises Malformed."""
    if not isinstance(value, dict) or len(value) > most:
        raise Malformed(f"at most {most} named values were expected")
    return {text_of(name): check(each) for name, each in value.items()}


def by_part(value: Any) -> dict[str, float]:
    """Return numbers by the parts in `PARTS`; raises Malformed."""
    given = named(value, seconds)
    return {part: given[part] for part in PARTS if part in given}


def pair(value: Any, check: Callable[[Any], ValueT]) -> tuple[ValueT, ValueT]:
    """Return two values, each converted by ``check``; raises Malformed."""
    listed = few(value, 2)
    if len(listed) != 2:
        raise Malformed(f"two values were expected, not {value!r}"[:TEXT])
    return check(listed[0]), check(listed[1])


def _pair(value: Any) -> tuple[int, int]:
    return pair(value, whole)


def section_of(value: Any, *, rates: bool = False) -> Section:
    """Build a section; ``rates`` allows floats in growing cells. Raises Malformed."""
    unit = value["unit"]
    if unit not in ("", *GROWS):
        raise Malformed(f"unknown unit {unit!r}"[:TEXT])
    check: Callable[[Any], Cell] = whole if unit and not rates else _cell
    return Section(text_of(value["name"]), named(value["cells"], check, CELLS), unit)


def _cell(value: Any) -> Cell:
    if isinstance(value, str):
        return text_of(value)
    # NaN and infinities fail this comparison too.
    if type(value) not in (int, float) or not -_MOST < value < _MOST:
        raise Malformed(f"a number or a text was expected, not {value!r}"[:TEXT])
    number: int | float = value
    return number

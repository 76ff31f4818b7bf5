"""What a worker says of itself, and the check of what claims to be that."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from wingbeat.observe.meter import GROWS, PARTS, Cell, Section

LARGEST = 16 << 10
"""Characters of a report. A worker that has more to say leaves out sections."""

TEXT, MANY, CELLS = 128, 32, 256
"""Characters of any text; interfaces, counts or sections of a report; cells of a section."""

READS = 32
"""Reports that rank 0 hands on in a second, at most; of more workers each is read less often."""

_MOST = 1 << 63

ValueT = TypeVar("ValueT")


class Malformed(ValueError):
    """What has come is no report."""


@dataclass(frozen=True, slots=True)
class Report:
    """One worker, at one moment. All numbers are totals since it began.

    Attributes:
        rank: whose.
        size: how many workers there are.
        host: its host's name.
        pid: its process.
        strategy: as its user has written it; those of several models in one text.
        number: of this report, from 0.
        at_s: when it was made, by a clock of its own.
        iteration: optimizer steps; of the model that has made most where there are several.
        spent_s: seconds by part of the iteration, see `PARTS`.
        interfaces: bytes sent and received of the host by interface, by the kernel's counters.
        counts: how often things happened that should be rare, by their name.
        sections: what strategies show.
        ended: whether it is the last one.
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
        """Check and rebuild what a worker has said.

        Raises:
            Malformed: it is not what `to_text` makes.
        """
        if len(text) > LARGEST:
            raise Malformed(f"{len(text)} characters; allowed are {LARGEST}")
        return Report.from_json(parsed(text))

    @staticmethod
    def from_json(data: Any) -> Report:
        """Check and rebuild what `asdict` makes of a report.

        Raises:
            Malformed: it is something else.
        """
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
    """Return what a text of JSON says.

    Raises:
        Malformed: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise Malformed(f"no JSON: {err}"[:TEXT]) from None


def text_of(value: Any) -> str:
    """Return a text without what a terminal would obey, cut to `TEXT` characters.

    Raises:
        Malformed: it is no text.
    """
    if not isinstance(value, str):
        raise Malformed(f"a text was expected, not {value!r}"[:TEXT])
    return "".join(c if c.isprintable() else "?" for c in value[:TEXT])


def whole(value: Any) -> int:
    """Return a number of things, from 0.

    Raises:
        Malformed: it is none.
    """
    if type(value) is not int or not 0 <= value < _MOST:
        raise Malformed(f"a whole number from 0 was expected, not {value!r}"[:TEXT])
    return value


def seconds(value: Any) -> float:
    """Return a finite number of seconds from 0.

    Raises:
        Malformed: it is none.
    """
    if type(value) not in (int, float) or not 0 <= value < _MOST:
        raise Malformed(f"seconds were expected, not {value!r}"[:TEXT])
    return float(value)


def few(value: Any, most: int) -> list[Any]:
    """Return a list of at most ``most`` things.

    Raises:
        Malformed: it is none.
    """
    if not isinstance(value, (list, tuple)) or len(value) > most:
        raise Malformed(f"a list of at most {most} was expected")
    return list(value)


def named(value: Any, check: Callable[[Any], ValueT], most: int = MANY) -> dict[str, ValueT]:
    """Return at most ``most`` values by name, each as ``check`` returns it.

    Raises:
        Malformed: it is something else.
    """
    if not isinstance(value, dict) or len(value) > most:
        raise Malformed(f"at most {most} named values were expected")
    return {text_of(name): check(each) for name, each in value.items()}


def by_part(value: Any) -> dict[str, float]:
    """Return numbers by part of an iteration, those of `PARTS`.

    Raises:
        Malformed: it is something else.
    """
    given = named(value, seconds)
    return {part: given[part] for part in PARTS if part in given}


def pair(value: Any, check: Callable[[Any], ValueT]) -> tuple[ValueT, ValueT]:
    """Return two values, each as ``check`` returns it.

    Raises:
        Malformed: they are not two, or something else.
    """
    listed = few(value, 2)
    if len(listed) != 2:
        raise Malformed(f"two values were expected, not {value!r}"[:TEXT])
    return check(listed[0]), check(listed[1])


def _pair(value: Any) -> tuple[int, int]:
    return pair(value, whole)


def section_of(value: Any, *, rates: bool = False) -> Section:
    """Check and rebuild a section; ``rates``: what grows has been divided by seconds.

    Raises:
        Malformed: it is something else.
    """
    unit = value["unit"]
    if unit not in ("", *GROWS):
        raise Malformed(f"unknown unit {unit!r}"[:TEXT])
    check: Callable[[Any], Cell] = whole if unit and not rates else _cell
    return Section(text_of(value["name"]), named(value["cells"], check, CELLS), unit)


def _cell(value: Any) -> Cell:
    if isinstance(value, str):
        return text_of(value)
    # What is not a number, or not finite, is not between these.
    if type(value) not in (int, float) or not -_MOST < value < _MOST:
        raise Malformed(f"a number or a text was expected, not {value!r}"[:TEXT])
    number: int | float = value
    return number

"""A table of figures in the one form that is printed, kept as JSON and set into the docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Printed:
    """A table whose cells are text, as a benchmark prints them.

    Attributes:
        title: what is compared, and where.
        columns: one label for each column, with the unit. The first column names the row.
        rows: one cell for each column. An empty cell has no figure.
        notes: lines below the table: what the figures are, and what spoils them.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        notes: Iterable[str] = (),
    ) -> Printed:
        """Make one from any sequences.

        Raises:
            ValueError: a row has another number of cells than there are columns.
        """
        made = tuple(tuple(row) for row in rows)
        for row in made:
            if len(row) != len(columns):
                raise ValueError(f"{title}: row {row} has {len(row)} cells, not {len(columns)}")
        return cls(title, tuple(columns), made, tuple(notes))

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Printed:
        """Return the table that `to_json` gave.

        Raises:
            ValueError: a row has another number of cells than there are columns.
            KeyError: a part is missing.
        """
        return cls.of(kept["title"], kept["columns"], kept["rows"], kept.get("notes", ()))

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON has it."""
        return asdict(self)

    def text(self) -> str:
        """Return the table for a terminal: the first column to the left, the others to the right.

        >>> print(Printed.of("codecs", ("codec", "ms"), [("sketch", "9.1"), ("none", "12")]).text())
        codecs
        codec    ms
        sketch  9.1
        none     12
        """
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *shown, *self.notes])

    def markdown(self) -> str:
        """Return the table as the docs have it, under its title.

        >>> print(Printed.of("codecs", ("codec", "ms"), [("sketch|8", "9.1")]).markdown())
        codecs
        <BLANKLINE>
        | codec | ms |
        |---|---|
        | sketch\\|8 | 9.1 |
        """
        head = [_line(self.columns), "|" + "---|" * len(self.columns)]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([self.title, "", *head, *map(_line, self.rows), *notes])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

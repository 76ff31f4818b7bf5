"""A table of figures that can be printed, saved as JSON and included in the docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Printed:
    """A table with text cells.

    Attributes:
        title: what is compared, and where.
        columns: one label for each column, with the unit. The first column names the row.
        rows: one cell for each column. An empty cell has no figure.
        notes: lines below the table: the meaning of the figures, and what disturbed them.
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
        """Build a table from any sequences; ValueError if a row has the wrong number of cells."""
        made = tuple(tuple(row) for row in rows)
        for row in made:
            if len(row) != len(columns):
                raise ValueError(f"{title}: row {row} has {len(row)} cells, not {len(columns)}")
        return cls(title, tuple(columns), made, tuple(notes))

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Printed:
        """Build a table from the result of `to_json`.

        Raises:
            ValueError: a row has the wrong number of cells.
            KeyError: a part is missing.
        """
        return cls.of(kept["title"], kept["columns"], kept["rows"], kept.get("notes", ()))

    def to_json(self) -> dict[str, Any]:
        """Return the table for JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return the table for a terminal: the first column is left-aligned, others right-aligned.

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
        r"""Return the table in Markdown, below its title.

        >>> print(Printed.of("codecs", ("codec", "ms"), [("sketch|8", "9.1")]).markdown())
        codecs
        <BLANKLINE>
        | codec | ms |
        |---|---|
        | sketch\|8 | 9.1 |
        """
        head = [_line(self.columns), "|" + "---|" * len(self.columns)]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([self.title, "", *head, *map(_line, self.rows), *notes])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

"""Formats a job as text tables of a given width, for the live view and for pipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from wingbeat.observe.snapshot import Job, Worker

NONE = "-"
"""Placeholder for an unknown value."""

_GAP = 2
"""Spaces between two columns."""


@dataclass(frozen=True)
class Column:
    """A column of the table of workers; columns of highest ``rank`` are dropped first.

    ``cell`` returns a worker's text of at most ``most`` characters.
    """

    name: str
    cell: Callable[[Worker], str]
    rank: int
    left: bool = False
    most: int = 20


@dataclass(frozen=True)
class Sheet:
    """A table: a title, headings, rows of text, the left-aligned columns, an optional note."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset()
    note: str = ""


def headline(job: Job) -> str:
    """Return one line about the whole job."""
    heard = [worker for worker in job.workers if worker.report is not None]
    reports = [worker.report for worker in heard if worker.report is not None]
    if not reports:
        return f"{job.name}: no worker has reported yet"
    strategies = ", ".join(dict.fromkeys(report.strategy for report in reports))
    steps = [report.iteration for report in reports]
    span = f"{steps[0]}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    rates = [worker.rate for worker in heard if worker.rate is not None]
    pace = f", {number(sum(rates) / len(rates))} iterations/s" if rates else ""
    counted = f"{len(job.workers)} worker{'s' * (len(job.workers) > 1)}"
    calm = sum(worker.state == "running" for worker in job.workers)
    rest = "" if calm == len(job.workers) else f", {calm} running"
    return (
        f"{job.name}: iteration {span}{pace}; {counted}{rest}; "
        f"watched for {job.watched_s:.0f} s; {strategies}"
    )


def sheets(job: Job, width: int) -> list[Sheet]:
    """Return all tables of a job: workers, interfaces, and one per section of a strategy.

    Columns that do not fit into ``width`` characters are left out, and a note names them.
    """
    return [_workers(job, width), _interfaces(job), *_sections(job, width)]


def lines(sheet: Sheet) -> list[str]:
    """Return a table as lines of plain text: title, headings, rows and note."""
    rows = [sheet.headings, *sheet.rows]
    wide = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    made = [sheet.title]
    for row in rows:
        padded = []
        for place, (text, width) in enumerate(zip(row, wide, strict=True)):
            space = " " * (width - cell_len(text))
            padded.append(text + space if place in sheet.left else space + text)
        made.append((" " * _GAP).join(padded).rstrip())
    return [*made, sheet.note] if sheet.note else made


# -- workers ------------------------------------------------------------------------------------


def _workers(job: Job, width: int) -> Sheet:
    columns, lost = _fitting(_columns(job), job.workers, width)
    rows = tuple(tuple(cut(c.cell(w), c.most) for c in columns) for w in job.workers)
    left = frozenset(place for place, column in enumerate(columns) if column.left)
    note = f"wider terminals also show: {', '.join(lost)}" if lost else ""
    names = tuple(column.name for column in columns)
    return Sheet("workers", names, rows, left, cut(note, max(width, 1)))


def _columns(job: Job) -> list[Column]:
    columns = [
        Column("rank", lambda w: str(w.rank), 0),
        Column("host", lambda w: w.report.host if w.report else NONE, 6, left=True, most=16),
        Column("iteration", lambda w: str(w.report.iteration) if w.report else NONE, 1),
        Column("it/s", lambda w: NONE if w.rate is None else number(w.rate), 3),
        *(_part(part, 7 + place) for place, part in enumerate(_PARTS)),
        Column("sent/s", lambda w: _moved(w, 0), 4),
        Column("recv/s", lambda w: _moved(w, 1), 5),
    ]
    # Events with a count of zero on all workers have no column.
    whats = {what for w in job.workers if w.report for what, n in w.report.counts.items() if n}
    columns += [_count(what) for what in sorted(whats)]
    return [*columns, Column("state", lambda w: w.state, 2, left=True, most=24)]


_PARTS = ("exchange", "forward", "backward", "update", "codec", "other")


def _part(part: str, rank: int) -> Column:
    return Column(f"{part} ms", lambda w: number(w.ms[part]) if part in w.ms else NONE, rank)


def _count(what: str) -> Column:
    return Column(what, lambda w: str(w.report.counts.get(what, 0)) if w.report else NONE, 5)


def _moved(worker: Worker, way: int) -> str:
    if not worker.interfaces:
        return NONE
    return rate(sum(each[way] for each in worker.interfaces.values()))


def _fitting(
    columns: Sequence[Column], workers: Iterable[Worker], width: int
) -> tuple[list[Column], list[str]]:
    """Return the columns that fit, and the names of those left out."""
    listed = list(workers)
    wide = {
        id(c): max([len(c.name), *(len(cut(c.cell(w), c.most)) for w in listed)]) + _GAP
        for c in columns
    }
    kept, lost = list(columns), []
    for column in sorted(columns, key=lambda c: -c.rank):
        # The column of rank 0 always stays, whatever its width.
        if sum(wide[id(c)] for c in kept) - _GAP <= width or column.rank == 0:
            break
        kept = [each for each in kept if each is not column]
        lost.append(column.name)
    return kept, lost[::-1]


# -- interfaces, and what strategies show -------------------------------------------------------


def _interfaces(job: Job) -> Sheet:
    rows = []
    for worker in job.workers:
        for name, (sent, received) in (worker.report.interfaces if worker.report else {}).items():
            now = [rate(each) for each in worker.interfaces.get(name, ())] or [NONE, NONE]
            rows.append((str(worker.rank), cut(name, 16), *now, size(sent), size(received)))
    headings = ("rank", "interface", "sent/s", "recv/s", "sent", "received")
    note = "all traffic of the worker's host, by the kernel's counters"
    return Sheet("interfaces", headings, tuple(rows), frozenset({1}), note)


def _sections(job: Job, width: int) -> list[Sheet]:
    names = dict.fromkeys(section.name for worker in job.workers for section in worker.sections)
    return [_section(job, name, width) for name in names]


def _section(job: Job, name: str, width: int) -> Sheet:
    """Return one strategy's table: a row per worker."""
    rows, units = [], set()
    cells = {w.rank: s for w in job.workers for s in w.sections if s.name == name}
    columns = list(dict.fromkeys(column for each in cells.values() for column in each.cells))
    for rank, section in sorted(cells.items()):
        units.add(section.unit)
        texts = [_cell(section.cells.get(column), section.unit) for column in columns]
        rows.append((str(rank), *texts))
    headings = ("rank", *(cut(column, 20) for column in columns))
    fits = _prefix(headings, rows, width)
    lost = len(headings) - fits
    note = f"{lost} of {len(columns)} columns have no room here" if lost else ""
    unit = " and ".join(sorted(units - {""}))
    title = f"{name} ({unit})" if unit else name
    kept = tuple(row[:fits] for row in rows)
    said = {c for each in cells.values() for c, cell in each.cells.items() if isinstance(cell, str)}
    left = frozenset(place for place in range(1, fits) if columns[place - 1] in said)
    return Sheet(title, headings[:fits], kept, left, note)


def _prefix(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    """Return how many of the first columns fit, at least two."""
    taken = 0
    for place in range(len(headings)):
        taken += max(len(row[place]) for row in (headings, *rows)) + _GAP
        if taken - _GAP > width:
            return max(2, place)
    return len(headings)


def _cell(cell: object, unit: str) -> str:
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return cut(cell, 40)
    assert isinstance(cell, (int, float))
    if unit == "B/s":
        return rate(cell)
    return str(cell) if isinstance(cell, int) and not unit else number(float(cell))


# -- numbers ------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Return a number with three digits.

    >>> [number(value) for value in (0, 0.0123, 1.234, 56.78, 1234.5)]
    ['0', '0.0123', '1.23', '56.8', '1234']
    """
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def rate(bytes_per_s: float) -> str:
    """Return a rate in bytes per second.

    >>> rate(118e6)
    '118 MB/s'
    """
    return f"{size(bytes_per_s)}/s"


def size(nbytes: float) -> str:
    """Return a size in bytes, with powers of 1000.

    >>> [size(value) for value in (0, 999, 1000, 123_456_789, 4.2e15)]
    ['0 B', '999 B', '1 kB', '123 MB', '4.2 PB']
    """
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    place = 0
    while nbytes >= 999.5 and place + 1 < len(units):
        nbytes, place = nbytes / 1000, place + 1
    return f"{number(nbytes)} {units[place]}"


def cut(text: str, most: int) -> str:
    """Truncate a text to ``most`` characters.

    >>> cut("node1.example.org", 8)
    'node1.e…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"

"""What ``wingbeat top`` does: finds a job, queries it, and formats it as text tables."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len

from wingbeat.errors import UsageError, WingbeatError, unknown
from wingbeat.observe.report import Job, Worker
from wingbeat.observe.supervisor import (
    SUFFIX,
    NotPrivate,
    check_private,
    live_sockets,
    socket_folder,
)
from wingbeat.schema import MalformedMessage, printable
from wingbeat.transport.handshake import receive

TIMEOUT_S = 3.0
"""Seconds for a whole answer."""

LARGEST = 64 << 20
"""Maximum size of an answer in bytes."""

NONE = "-"
"""Placeholder for an unknown value."""

_GAP = 2
"""Spaces between two columns."""


class JobLost(WingbeatError, ConnectionError):
    """The job no longer answers."""


@dataclass(frozen=True)
class Found:
    """A job that can be queried: ``query`` returns its state or raises `JobLost`."""

    name: str
    query: Callable[[], Job]


# -- jobs on this host and others -----------------------------------------------------------------


def find(named: str, folder: Path | None = None) -> Found:
    """Find the job of that name, the only one if it is empty, or one at ``HOST:PORT``.

    Raises UsageError if no job or several jobs match, or other users have access to the folder.
    """
    if ":" in named:
        return job_at(named)
    jobs = running(socket_folder() if folder is None else folder)
    chosen = jobs
    if named:
        # A script's name is enough if exactly one job has it.
        chosen = [each for each in jobs if each.name == named] or [
            each for each in jobs if each.name.rpartition("-")[0] == named
        ]
        if jobs and not chosen:
            raise unknown("job", named, [each.name for each in jobs])
    if not chosen:
        raise UsageError(
            "no wingbeat job of this user runs on this host, or none has called distribute() yet; "
            "look on the host of rank 0, or give HOST:PORT of a job started with WINGBEAT_METRICS"
        )
    if len(chosen) > 1:
        names = ", ".join(each.name for each in chosen)
        raise UsageError(f"{len(chosen)} jobs run here: {names}; name one: wingbeat top NAME")
    return chosen[0]


def running(folder: Path) -> list[Found]:
    """Return the jobs that answer, by name, and remove the sockets of killed jobs.

    Raises UsageError if other users have access to the folder.
    """
    try:
        check_private(folder)
    except NotPrivate as err:
        raise UsageError(f"jobs are not searched in {err}") from None
    return [_job_behind(path) for path in live_sockets(folder)]


def _job_behind(path: Path) -> Found:
    name = path.name.removesuffix(SUFFIX)

    def query() -> Job:
        deadline = time.monotonic() + TIMEOUT_S
        with socket.socket(socket.AF_UNIX) as queried:
            queried.settimeout(TIMEOUT_S)
            try:
                queried.connect(os.fspath(path))
                text = _read_all(queried, deadline)
            except OSError as err:
                raise JobLost(f"job {name} has ended, or does not answer: {err}") from None
        return _parsed(text, name)

    return Found(name, query)


def job_at(address: str) -> Found:
    """Return the job at ``HOST:PORT``; raises UsageError if that is no address."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r:.80}: HOST:PORT needs a port from 1 to 65535")
    host = host.strip("[]") or "127.0.0.1"

    def query() -> Job:
        deadline = time.monotonic() + TIMEOUT_S
        try:
            with socket.create_connection((host, int(port)), TIMEOUT_S) as queried:
                # Of version 1.0, so that the answer ends with the connection.
                queried.sendall(f"GET /job HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                answer = _read_all(queried, deadline)
        except (OSError, UnicodeError) as err:  # a host's name that cannot be encoded
            raise JobLost(f"no wingbeat job answers at {address}: {err}") from None
        head, _, text = answer.partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode("ascii", "replace")
        if not re.match("HTTP/1.[01] 200 ", status):
            raise JobLost(f"no wingbeat job answers at {address}: {printable(status[:80])!r}")
        return _parsed(text, address)

    return Found(address, query)


def _read_all(queried: socket.socket, deadline: float) -> bytes:
    """Read up to the end of a connection; an OSError at the deadline, or if it is too much."""
    text = bytearray()
    while True:
        if not (part := receive(queried, 1 << 16, deadline)):
            return bytes(text)
        text += part
        if len(text) > LARGEST:
            raise OSError(f"more than {LARGEST} bytes")


def _parsed(text: bytes, name: str) -> Job:
    try:
        return Job.from_text(text)
    except MalformedMessage as err:
        raise JobLost(f"what answers as {name} is no wingbeat job of this version: {err}") from None


# -- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of the table of workers; columns of highest ``rank`` are dropped first.

    ``cell`` returns a worker's text, which is cut to ``most`` characters.
    """

    name: str
    cell: Callable[[Worker], str]
    rank: int
    left: bool = False
    most: int = 20


@dataclass(frozen=True)
class Table:
    """A title, headings, rows of text, the left-aligned columns, and an optional note."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int] = frozenset()
    note: str = ""

    def lines(self) -> list[str]:
        """Return lines of plain text: title, headings, rows and note."""
        rows = [self.headings, *self.rows]
        wide = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        made = [self.title]
        for row in rows:
            padded = []
            for place, (text, width) in enumerate(zip(row, wide, strict=True)):
                space = " " * (width - cell_len(text))
                padded.append(text + space if place in self.left else space + text)
            made.append((" " * _GAP).join(padded).rstrip())
        return [*made, self.note] if self.note else made


def headline(job: Job) -> str:
    """Return one line about the whole job."""
    reports = [worker.report for worker in job.workers if worker.report is not None]
    if not reports:
        return f"{job.name}: no worker has reported yet"
    strategies = ", ".join(dict.fromkeys(report.strategy for report in reports))
    steps = [report.iteration for report in reports]
    span = f"{steps[0]}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    rates = [worker.rate for worker in job.workers if worker.rate is not None]
    pace = f", {number(sum(rates) / len(rates))} iterations/s" if rates else ""
    counted = f"{len(job.workers)} worker{'s' * (len(job.workers) > 1)}"
    calm = sum(worker.state == "running" for worker in job.workers)
    rest = "" if calm == len(job.workers) else f", {calm} running"
    return (
        f"{job.name}: iteration {span}{pace}; {counted}{rest}; "
        f"watched for {job.watched_s:.0f} s; {strategies}"
    )


def tables(job: Job, width: int) -> list[Table]:
    """Return all tables of a job: workers, interfaces, and one per section of a strategy.

    Columns that do not fit into ``width`` characters are left out, and a note names them.
    """
    names = dict.fromkeys(section.name for worker in job.workers for section in worker.sections)
    sections = [_section(job, name, width) for name in names]
    return [_workers(job, width), _interfaces(job), *sections]


def _workers(job: Job, width: int) -> Table:
    kept = []
    for column in _columns(job):
        texts = [cut(column.cell(worker), column.most) for worker in job.workers]
        kept.append((column, texts, max(map(len, [column.name, *texts])) + _GAP))
    dropped: list[str] = []
    for column, _, _ in sorted(kept, key=lambda each: -each[0].rank):
        # The column of rank 0 always stays, whatever its width.
        if sum(wide for _, _, wide in kept) - _GAP <= width or column.rank == 0:
            break
        kept = [each for each in kept if each[0] is not column]
        dropped.insert(0, column.name)
    note = f"wider terminals also show: {', '.join(dropped)}" if dropped else ""
    return Table(
        "workers",
        tuple(column.name for column, _, _ in kept),
        tuple(zip(*(texts for _, texts, _ in kept), strict=True)),
        frozenset(place for place, (column, _, _) in enumerate(kept) if column.left),
        cut(note, max(width, 1)),
    )


_PARTS = ("exchange", "forward", "backward", "update", "codec", "other")


def _columns(job: Job) -> list[Column]:
    def part(name: str) -> Callable[[Worker], str]:
        return lambda w: number(w.ms[name]) if name in w.ms else NONE

    def moved(way: int) -> Callable[[Worker], str]:
        return lambda w: rate(sum(b[way] for b in w.interfaces.values())) if w.interfaces else NONE

    def count(what: str) -> Callable[[Worker], str]:
        return lambda w: str(w.report.counts.get(what, 0)) if w.report else NONE

    # Events with a count of zero on all workers have no column.
    whats = {what for w in job.workers if w.report for what, n in w.report.counts.items() if n}
    return [
        Column("rank", lambda w: str(w.rank), 0),
        Column("host", lambda w: w.report.host if w.report else NONE, 6, left=True, most=16),
        Column("iteration", lambda w: str(w.report.iteration) if w.report else NONE, 1),
        Column("it/s", lambda w: NONE if w.rate is None else number(w.rate), 3),
        *(Column(f"{each} ms", part(each), 7 + at) for at, each in enumerate(_PARTS)),
        Column("sent/s", moved(0), 4),
        Column("recv/s", moved(1), 5),
        *(Column(what, count(what), 5) for what in sorted(whats)),
        Column("state", lambda w: w.state, 2, left=True, most=24),
    ]


def _interfaces(job: Job) -> Table:
    rows = []
    for worker in job.workers:
        for name, (sent, received) in (worker.report.interfaces if worker.report else {}).items():
            now = [rate(each) for each in worker.interfaces.get(name, ())] or [NONE, NONE]
            rows.append((str(worker.rank), cut(name, 16), *now, size(sent), size(received)))
    headings = ("rank", "interface", "sent/s", "recv/s", "sent", "received")
    note = "all traffic of the worker's host, by the kernel's counters"
    return Table("interfaces", headings, tuple(rows), frozenset({1}), note)


def _section(job: Job, name: str, width: int) -> Table:
    """Return one strategy's table: a row per worker, and as many columns as fit."""
    sections = {w.rank: s for w in job.workers for s in w.sections if s.name == name}
    columns = list(dict.fromkeys(column for each in sections.values() for column in each.cells))
    headings = ("rank", *(cut(column, 20) for column in columns))
    rows = [
        (str(rank), *(_cell(each.cells.get(column), each.unit) for column in columns))
        for rank, each in sorted(sections.items())
    ]
    fits, taken = 0, -_GAP
    for column in zip(headings, *rows, strict=True):
        taken += max(map(len, column)) + _GAP
        if taken > width and fits >= 2:
            break
        fits += 1
    dropped = len(headings) - fits
    unit = " and ".join(sorted({each.unit for each in sections.values()} - {""}))
    texts = {c for s in sections.values() for c, cell in s.cells.items() if isinstance(cell, str)}
    return Table(
        f"{name} ({unit})" if unit else name,
        headings[:fits],
        tuple(row[:fits] for row in rows),
        frozenset(place for place in range(1, fits) if columns[place - 1] in texts),
        f"{dropped} of {len(columns)} columns have no room here" if dropped else "",
    )


def _cell(cell: int | float | str | None, unit: str) -> str:
    if cell is None:
        return NONE
    if isinstance(cell, str):
        return cut(cell, 40)
    if unit == "B/s":
        return rate(cell)
    return str(cell) if isinstance(cell, int) and not unit else number(float(cell))


def number(value: float) -> str:
    """Return a number with three digits.

    >>> [number(value) for value in (0, 0.0123, 1.234, 56.78, 1234.5)]
    ['0', '0.0123', '1.23', '56.8', '1234']
    """
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def rate(bytes_per_s: float) -> str:
    """Return a rate in bytes per second, such as ``118 MB/s``."""
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

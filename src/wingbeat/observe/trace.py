"""Events in files: one part per worker, merged, and exported to Perfetto.

Each worker saves its own part, and one process merges the parts afterwards:

>>> import pathlib, tempfile
>>> from wingbeat.observe.events import Event
>>> temporary = tempfile.TemporaryDirectory()
>>> folder = pathlib.Path(temporary.name)
>>> save([Event(0, -1, "forward", 10, 20, 0, "compute")], folder / "worker0.json")
>>> save([Event(1, 2, "all_gather", 15, 25, 4096, "eth0")], folder / "worker1.json")
>>> events = merge([folder / "worker0.json", folder / "worker1.json"])
>>> [(e.worker, e.what) for e in events]
[(0, 'forward'), (1, 'all_gather')]
>>> write_perfetto(events, folder / "trace.json")    # open it at https://ui.perfetto.dev
>>> temporary.cleanup()

A part may come from another machine, so ``load`` checks all of it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wingbeat.errors import UsageError, unknown
from wingbeat.files import replacing
from wingbeat.observe.events import WHATS, Event

FORMAT = "wingbeat-events"
VERSION = 2
MAX_BYTES = 1 << 30
"""Maximum size in bytes of a part that ``load`` reads."""

_FIELDS = ("worker", "bucket", "what", "begin_ns", "end_ns", "nbytes", "lane", "group")
_INT64 = 1 << 63
_MAX_LANE = 64
_NAMED = 6
"""Maximum ranks in an event's name in Perfetto; its arguments have all."""
_KEYS = {"format", "version", "boot", "wall_offset_ns", "fields", "events"}

AnyPath = str | os.PathLike[str]


def save(events: Iterable[Event], path: AnyPath) -> None:
    """Write ``events`` as one JSON part, with the data that ``merge`` needs to align clocks."""
    rows = [[getattr(event, name) for name in _FIELDS] for event in events]
    part = {
        "format": FORMAT,
        "version": VERSION,
        "boot": _boot_id(),
        "wall_offset_ns": time.time_ns() - time.monotonic_ns(),
        "fields": list(_FIELDS),
        "events": rows,
    }
    _write(part, path)


def load(path: AnyPath) -> list[Event]:
    """Read one part.

    Raises ``UsageError``, with the file and the entry, if it was not written by ``save``.
    """
    return _read(path)[2]


def merge(paths: Sequence[AnyPath]) -> list[Event]:
    """Read several workers' parts into one list, ordered by begin.

    Parts of one boot of one machine share the monotonic clock and stay unchanged. Parts of other
    machines are shifted to the first part's clock by the wall clocks, so the error is that of NTP.
    """
    merged: list[Event] = []
    first: tuple[str, int] | None = None
    for path in paths:
        boot, offset, events = _read(path)
        if first is None:
            first = (boot, offset)
        shift = 0 if boot and boot == first[0] else offset - first[1]
        if shift:
            events = [
                replace(event, begin_ns=event.begin_ns + shift, end_ns=event.end_ns + shift)
                for event in events
            ]
        merged += events
    merged.sort(key=lambda event: (event.begin_ns, event.worker))
    return merged


def write_perfetto(events: Iterable[Event], path: AnyPath) -> None:
    """Write a trace for https://ui.perfetto.dev and chrome://tracing.

    It has one process per worker and one thread per lane. ``wait`` has a row of its own, because it
    would otherwise be hidden inside forward or backward. Times start at the first event.
    """
    listed = sorted(events, key=lambda event: (event.begin_ns, -event.end_ns))
    zero = listed[0].begin_ns if listed else 0
    rows = _rows(listed)
    order = {"compute": 0, "exposed": 1}
    ordered = sorted(set(rows), key=lambda row: (row[0], order.get(row[1], 2), *row[1:]))
    tids = {row: tid for tid, row in enumerate(ordered)}
    out = _metadata(tids)
    for event, row in zip(listed, rows, strict=True):
        args = {"bucket": event.bucket, "bytes": event.nbytes, "lane": event.lane}
        group = {"group": list(event.group)} if event.group else {}
        ranks = [*map(str, event.group[:_NAMED]), *["..."] * (len(event.group) > _NAMED)]
        name = [event.what, str(event.bucket)] if event.bucket >= 0 else [event.what, *ranks]
        out.append(
            {
                "ph": "X",
                "name": " ".join(name),
                "cat": event.what,
                "pid": event.worker,
                "tid": tids[row],
                "ts": (event.begin_ns - zero) / 1e3,
                "dur": (event.end_ns - event.begin_ns) / 1e3,
                "args": args | group,
            }
        )
    _write({"displayTimeUnit": "ms", "traceEvents": out}, path)


_Row = tuple[int, str, int]
"""Worker, lane, and row within the lane."""


def _rows(listed: Sequence[Event]) -> list[_Row]:
    """Return the row of each event.

    Perfetto drops slices of a row that overlap without nesting, as the collectives of two buckets
    in flight do. Those are moved to a second row.
    """
    open_ends: dict[tuple[int, str], list[list[int]]] = {}
    rows: list[_Row] = []
    for event in listed:
        lane = "exposed" if event.what == "wait" else event.lane
        stacks = open_ends.setdefault((event.worker, lane), [])
        rows.append((event.worker, lane, _nest(stacks, event)))
    return rows


def _nest(stacks: list[list[int]], event: Event) -> int:
    """Push the event on the first stack of ends in which it nests; return the stack's number."""
    for number, stack in enumerate(stacks):
        while stack and stack[-1] <= event.begin_ns:
            stack.pop()
        if not stack or event.end_ns <= stack[-1]:
            stack.append(event.end_ns)
            return number
    stacks.append([event.end_ns])
    return len(stacks) - 1


def _metadata(tids: dict[_Row, int]) -> list[dict[str, Any]]:
    """Perfetto's metadata events for names and order of the rows."""
    out: list[dict[str, Any]] = []

    def note(kind: str, pid: int, tid: int, args: dict[str, Any]) -> None:
        out.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    for worker in sorted({worker for worker, _, _ in tids}):
        note("process_name", worker, 0, {"name": f"worker {worker}"})
        note("process_sort_index", worker, 0, {"sort_index": worker})
    for (worker, lane, number), tid in tids.items():
        name = lane if number == 0 else f"{lane} ({number + 1})"
        note("thread_name", worker, tid, {"name": name})
        note("thread_sort_index", worker, tid, {"sort_index": tid})
    return out


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _write(value: Any, path: AnyPath) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, separators=(",", ":")).encode())


def _read(path: AnyPath) -> tuple[str, int, list[Event]]:
    """Return a part's boot id, wall clock offset and events."""
    part = _parse(path)
    if not isinstance(part, dict) or part.get("format") != FORMAT:
        raise UsageError(f"{str(path)!r} is not an event file: no 'format': {FORMAT!r} in it")
    if part.get("version") != VERSION:
        raise UsageError(
            f"{str(path)!r} has version {_short(part.get('version'))}; allowed: {VERSION}"
        )
    if set(part) != _KEYS or part["fields"] != list(_FIELDS):
        raise UsageError(f"{str(path)!r} has other keys or fields than version {VERSION} has")
    boot, offset, rows = (part[key] for key in ("boot", "wall_offset_ns", "events"))
    if not isinstance(boot, str) or not _is_int(offset) or not isinstance(rows, list):
        raise UsageError(f"{str(path)!r}: 'boot', 'wall_offset_ns' or 'events' has a wrong type")
    return boot, offset, [_event(row, f"event {i} of {str(path)!r}") for i, row in enumerate(rows)]


def _parse(path: AnyPath) -> Any:
    try:
        if (size := os.path.getsize(path)) > MAX_BYTES:
            raise UsageError(f"{str(path)!r} has {size} bytes; allowed: up to {MAX_BYTES}")
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except RecursionError:
        raise UsageError(f"{str(path)!r} is not an event file: nested too deeply") from None
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not JSON: {error}") from None


def _event(row: Any, where: str) -> Event:
    if not isinstance(row, list) or len(row) != len(_FIELDS):
        raise UsageError(f"{where} is not a list of {len(_FIELDS)} values: {_short(row)}")
    for name, value in zip(_FIELDS, row, strict=True):
        if not _KINDS.get(name, _is_int)(value):
            raise UsageError(f"{where}: {name} has a wrong type: {_short(value)}")
    event = Event(**dict(zip(_FIELDS, row, strict=True)) | {"group": tuple(row[-1])})
    if event.what not in WHATS:
        raise unknown("event", event.what[:40], WHATS, where=where)
    if not 0 < len(event.lane) <= _MAX_LANE or not event.lane.isprintable():
        raise UsageError(f"{where}: lane {_short(event.lane)} is empty, too long or unprintable")
    if event.worker < 0 or event.bucket < -1 or min((event.nbytes, *event.group)) < 0:
        raise UsageError(f"{where}: worker, bucket, nbytes or group is negative: {_short(row)}")
    if event.end_ns < event.begin_ns:
        raise UsageError(f"{where} ends before it begins: {_short(row)}")
    return event


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _INT64


_KINDS: dict[str, Callable[[Any], bool]] = {
    "what": lambda value: isinstance(value, str),
    "lane": lambda value: isinstance(value, str),
    "group": lambda value: isinstance(value, list) and all(map(_is_int, value)),
}
"""Checks of the fields that are not numbers."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

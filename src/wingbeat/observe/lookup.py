"""Finds jobs on this host and queries one."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wingbeat.errors import UsageError, WingbeatError, unknown
from wingbeat.observe import place
from wingbeat.observe.report import Malformed
from wingbeat.observe.snapshot import Job

PATIENCE_S = 3.0
"""Seconds to wait for an answer."""

LARGEST = 64 << 20
"""Maximum size of an answer in bytes."""


class Gone(WingbeatError, ConnectionError):
    """The job no longer answers."""


@dataclass(frozen=True)
class Found:
    """A job that can be queried: ``ask`` returns its state or raises `Gone`."""

    name: str
    ask: Callable[[], Job]


def find(named: str, folder: Path | None = None) -> Found:
    """Find the job of that name, the only one if it is empty, or one at ``HOST:PORT``.

    Raises UsageError if no job or several jobs match, or other users have access to the folder.
    """
    if ":" in named:
        return _at(named)
    jobs = running(place.folder() if folder is None else folder)
    if named:
        chosen = [each for each in jobs if each.name == named]
        # A script's name is enough if exactly one job has it.
        chosen = chosen or [each for each in jobs if each.name.rpartition("-")[0] == named]
        if jobs and not chosen:
            raise unknown("job", named, [each.name for each in jobs])
    else:
        chosen = jobs
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
    """Return the jobs that answer, and remove the sockets of killed jobs.

    Raises UsageError if other users have access to the folder.
    """
    try:
        place.check(folder)
    except place.NoPlace as err:
        raise UsageError(f"jobs are not looked for in {err}") from None
    found = []
    for name, path in place.sockets(folder).items():
        if _listens(path):
            found.append(Found(name, _asker(path)))
    return found


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PATIENCE_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:  # its process was killed
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        except OSError:
            return False
    return True


def _asker(path: Path) -> Callable[[], Job]:
    def ask() -> Job:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(PATIENCE_S)
            try:
                asked.connect(os.fspath(path))
                text = _all_of(asked)
            except OSError as err:
                raise Gone(f"job {path.stem} has ended, or does not answer: {err}") from None
        return _job(text, path.stem)

    return ask


def _all_of(asked: socket.socket) -> bytes:
    parts, size = [], 0
    while part := asked.recv(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise OSError(f"more than {LARGEST} bytes")
    return b"".join(parts)


def _at(address: str) -> Found:
    host, _, port = address.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r:.80}: HOST:PORT needs a port from 1 to 65535")
    host = host.strip("[]") or "127.0.0.1"

    def ask() -> Job:
        asked = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        try:
            asked.request("GET", "/job")
            answer = asked.getresponse()
            text = answer.read(LARGEST)
        except (OSError, http.client.HTTPException) as err:
            raise Gone(
                f"no wingbeat job answers at {address}: {err or type(err).__name__}"
            ) from None
        finally:
            asked.close()
        return _job(text, address)

    return Found(address, ask)


def _job(text: bytes, name: str) -> Job:
    try:
        return Job.from_text(text)
    except Malformed as err:
        raise Gone(f"what answers as {name} is no wingbeat job of this version: {err}") from None

"""The supervisor, as rank 0 starts it: a process that hears lines and says a few."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

from wingbeat.errors import UsageError
from wingbeat.monitor import place
from wingbeat.monitor.supervisor import Places

SWITCH = "WINGBEAT_TOP"
"""Environment variable: ``off`` for no reports and no supervisor."""

METRICS = "WINGBEAT_METRICS"
"""Environment variable: ``PORT`` or ``HOST:PORT`` to answer at by HTTP."""

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].splitlines(); "
    "from wingbeat.monitor.__main__ import main; main(sys.argv[2:])"
)
"""As ``python -m wingbeat.monitor``, which would look in the present folder first: whatever this
process could import the other one can, and files there that are called like modules do not matter.
"""

_END_S = 0.5
"""Seconds for the process to end by itself."""


def wanted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether jobs can be looked at.

    Raises:
        UsageError: the environment variable says neither.
    """
    said = env.get(SWITCH, "on").lower()
    if said not in ("on", "off"):
        raise UsageError(f"{SWITCH}={said}: allowed are on and off")
    return said == "on"


def places(env: Mapping[str, str] = os.environ) -> Places:
    """Return where the supervisor is to answer.

    >>> places({"WINGBEAT_METRICS": "9400", "WINGBEAT_RUNTIME_DIR": "/run/wb"})
    Places(folder='/run/wb', host='127.0.0.1', port=9400)

    Raises:
        UsageError: the environment names no port.
    """
    folder, said = str(place.folder(env)), env.get(METRICS, "")
    if not said:
        return Places(folder)
    host, _, port = said.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{METRICS}={said:.80}: allowed is a port up to 65535, or HOST:PORT")
    return Places(folder, host.strip("[]") or "127.0.0.1", int(port))


class Launched:
    """The supervisor's process.

    Args:
        name: the job's.
        where: where it answers.
        tell: hears, in a thread of its own, what the job's user should know.

    Raises:
        OSError: no process can be started, or no thread.
    """

    def __init__(self, name: str, where: Places, tell: Callable[[str], None]) -> None:
        http = () if where.port is None else (where.host, str(where.port))
        self._reports, theirs = socket.socketpair()
        self._reports.settimeout(None)  # a script may have set another default
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, "\n".join(sys.path), name, where.folder, *http],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                bufsize=0,  # no lock of a buffer, which a thread that is blocked in it would have
                # It must not keep the job's own open, for which others may wait.
                stderr=subprocess.DEVNULL,
            )
        except BaseException:
            self._reports.close()
            raise
        finally:
            theirs.close()
        self._tell = tell
        self._missed = False
        self._hearing = threading.Thread(target=self._hear, name="wingbeat-supervisor", daemon=True)
        try:
            self._hearing.start()
        except RuntimeError as err:  # too many threads
            self.close()
            raise OSError(str(err)) from None

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def hand_on(self, text: str) -> bool:
        """Give it a line; return whether it is there to take it, and tell once if it is not."""
        try:
            # A script may have SIGPIPE end it, as tools for pipelines do; not for this.
            self._reports.sendall(text.encode() + b"\n", socket.MSG_NOSIGNAL)
        except OSError:  # it has ended, or is being closed
            self._miss()
            return False
        return True

    def _miss(self) -> None:
        """Tell once that it has ended, unless it was to, or has said itself why."""
        if self._missed or self._reports.fileno() < 0:
            return
        self._missed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(_END_S):
                self._tell("`wingbeat top` shows this job no more: its supervisor has ended")

    def close(self) -> None:
        """Let it end, and end it if it does not; for when no thread may be in `hand_on`."""
        with contextlib.suppress(OSError):  # it has ended, or was closed before
            # Children that were forked, as a DataLoader's workers, have the socket open too.
            self._reports.shutdown(socket.SHUT_WR)
        self._reports.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it, and with it a `hand_on` that waits for it."""
        self._process.kill()
        self._process.wait()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                self._tell(line.decode(errors="replace").strip())

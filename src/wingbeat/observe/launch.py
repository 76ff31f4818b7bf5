"""Starts the supervisor process from rank 0 and exchanges lines with it."""

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
from wingbeat.observe import place
from wingbeat.observe.supervisor import Places

SWITCH = "WINGBEAT_TOP"
"""Environment variable: ``off`` disables reports and the supervisor."""

METRICS = "WINGBEAT_METRICS"
"""Environment variable: ``PORT`` or ``HOST:PORT`` at which the supervisor serves HTTP."""

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1].splitlines(); "
    "from wingbeat.observe.__main__ import main; main(sys.argv[2:])"
)
"""Like ``python -m wingbeat.observe``, with this process's import path."""

_END_S = 0.5
"""Seconds for the process to exit by itself."""


def wanted(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether jobs can be monitored; UsageError reports an invalid environment variable."""
    said = env.get(SWITCH, "on").lower()
    if said not in ("on", "off"):
        raise UsageError(f"{SWITCH}={said}: allowed are on and off")
    return said == "on"


def places(env: Mapping[str, str] = os.environ) -> Places:
    """Return where the supervisor serves; UsageError reports an invalid port.

    >>> places({"WINGBEAT_METRICS": "9400", "WINGBEAT_RUNTIME_DIR": "/run/wb"})
    Places(folder='/run/wb', host='127.0.0.1', port=9400)
    """
    folder, said = str(place.folder(env)), env.get(METRICS, "")
    if not said:
        return Places(folder)
    host, _, port = said.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UsageError(f"{METRICS}={said:.80}: allowed is a port up to 65535, or HOST:PORT")
    return Places(folder, host.strip("[]") or "127.0.0.1", int(port))


class Launched:
    """The supervisor's process; ``tell`` receives messages for the user in a separate thread.

    Raises OSError if a process or a thread cannot be started.
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
                bufsize=0,  # a buffer's lock could be held by a blocked thread
                # The job's stderr must close when the job exits.
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
        """The process id."""
        return self._process.pid

    def hand_on(self, text: str) -> bool:
        """Send a line to the supervisor; return whether it was sent, and report a first failure."""
        try:
            # A script may let SIGPIPE terminate it; this write must not.
            self._reports.sendall(text.encode() + b"\n", socket.MSG_NOSIGNAL)
        except OSError:  # it has exited, or is being closed
            self._miss()
            return False
        return True

    def _miss(self) -> None:
        """Report an unexpected exit once, unless the supervisor has reported the cause."""
        if self._missed or self._reports.fileno() < 0:
            return
        self._missed = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(_END_S):
                self._tell("`wingbeat top` shows this job no more: its supervisor has ended")

    def close(self) -> None:
        """Close the input, then kill the process if needed; no thread may be in `hand_on`."""
        with contextlib.suppress(OSError):  # it has exited, or was closed before
            # Forked children, such as a DataLoader's workers, hold the socket open too.
            self._reports.shutdown(socket.SHUT_WR)
        self._reports.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process, which also unblocks `hand_on`."""
        self._process.kill()
        self._process.wait()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                self._tell(line.decode(errors="replace").strip())

"""The supervisor's process: ``python -m wingbeat.observe NAME FOLDER [HOST PORT]``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from wingbeat.observe.supervisor import Places, serve


def main(arguments: list[str]) -> None:
    """Serve until the parent process exits."""
    # A terminal's interrupt and a scheduler's SIGTERM reach all processes of a job. The supervisor
    # exits after its parent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name, folder, *http = arguments
    places = Places(folder, http[0], int(http[1])) if http else Places(folder)
    parent = os.getppid()
    asyncio.run(serve(name, places, lambda: os.getppid() == parent))


if __name__ == "__main__":
    main(sys.argv[1:])

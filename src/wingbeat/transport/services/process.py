"""What runs in a service's process: ``python -m MODULE CONFIG``, started by a worker."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from wingbeat.errors import WingbeatError
from wingbeat.transport.blame import TERMINATED
from wingbeat.transport.services.launch import Serves
from wingbeat.transport.services.pipes import PipeStore

_LOOK_S = 0.25


def main(config: Serves) -> None:
    """Meet the workers and serve them, for as long as the one that started this process lives."""
    # An interrupt goes to the whole terminal; it is for the workers to end, and this follows them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A scheduler sends SIGTERM to all processes of a job: workers need this one until they have
    # saved what it holds, and have left.
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    parent = os.getppid()
    store = PipeStore(sys.stdout, sys.stdin)
    sys.stdout = sys.stderr  # what anything prints is no request
    met = threading.Event()
    threading.Thread(target=_end_with, args=(parent, met), daemon=True).start()
    threading.Thread(target=_end_late, args=(config, terminated), daemon=True).start()
    try:
        serve = config.meet(store)
        if not config.asks_later:
            store.ready()
    except (WingbeatError, TimeoutError) as error:
        sys.exit(str(error))
    met.set()
    serve(lambda: os.getppid() == parent)


def _end_with(parent: int, met: threading.Event) -> None:
    """End this process if the one that started it does before all have met: nobody else will."""
    while not met.wait(_LOOK_S):
        if os.getppid() != parent:
            os._exit(1)


def _end_late(config: Serves, terminated: threading.Event) -> None:
    """End this process when its workers have not left within the timeout after SIGTERM."""
    terminated.wait()
    time.sleep(config.timeout)
    sys.stderr.write(
        f"{config.me} ends {config.timeout:g} s after SIGTERM: its workers have not left\n"
    )
    sys.stderr.flush()
    os._exit(TERMINATED)

"""What runs in a service's process: ``python -m MODULE CONFIG``, started by a worker."""

from __future__ import annotations

import os
import signal
import sys
import threading

from wingbeat.errors import WingbeatError
from wingbeat.transport.services.launch import Serves
from wingbeat.transport.services.pipes import PipeStore

_LOOK_S = 0.25


def main(config: Serves) -> None:
    """Meet the workers and serve them, for as long as the one that started this process lives."""
    # An interrupt goes to the whole terminal; it is for the workers to end, and this follows them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    store = PipeStore(sys.stdout, sys.stdin)
    sys.stdout = sys.stderr  # what anything prints is no request
    met = threading.Event()
    threading.Thread(target=_end_with, args=(parent, met), daemon=True).start()
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

"""A server's process: ``python -m wingbeat.servers CONFIG``, started by a worker."""

from __future__ import annotations

import os
import signal
import sys

from wingbeat.servers.config import ServerConfig
from wingbeat.servers.pipes import PipeStore


def main(text: str) -> None:
    """Meet the workers and serve them, for as long as the one that started this process lives."""
    # An interrupt goes to the whole terminal; it is for the workers to end, and this follows them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    config = ServerConfig.from_json(text)
    store = PipeStore(sys.stdout, sys.stdin)
    mailbox = config.open(store)
    store.ready()
    config.serve(mailbox, lambda: os.getppid() == parent)


if __name__ == "__main__":
    main(sys.argv[1])

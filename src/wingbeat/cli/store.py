"""``wingbeat store``: the store at which replicas meet that are torch jobs of their own."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from wingbeat.errors import UsageError

HELP = """Serve the store of a job whose replicas are started and restarted one by one.

\b
Start it once, on a host that all others reach, and leave it running:
  wingbeat store --port 29400

\b
Start each replica by a torchrun of its own:
  WINGBEAT_REPLICA=0 WINGBEAT_REPLICAS=2 WINGBEAT_STORE=node1:29400 \\
    torchrun --standalone --nproc-per-node 2 --max-restarts 10 train.py

\b
docs/how-to/restart-replicas.md has an example.
"""


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("store", help=HELP)(store)


def store(
    port: Annotated[int, typer.Option(help="TCP port; 0: any free one.")] = 29400,
) -> None:
    """Serve a store until SIGINT or SIGTERM."""
    from wingbeat.transport.replica_jobs import serve_store

    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: allowed are 0 to 65535")
    ending = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)  # for the threads of the store too
    served = serve_store(port)
    print(f"wingbeat store: serving at port {served.port}", flush=True)
    signal.sigwait(ending)

"""``wingbeat store``: the store at which replicas meet that are torch jobs of their own."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from wingbeat.errors import UsageError

HELP = """Serve the store of a job whose replicas are started and restarted one by one.

\b
Start it once, on a host that all others reach, and leave it running:
  wingbeat store --port 29400

\b
Under systemd or Kubernetes, which start it again after a failure, keep its content in a file:
  wingbeat store --port 29400 --journal /var/lib/wingbeat/store.journal

\b
Start each replica by a torchrun of its own:
  WINGBEAT_REPLICA=0 WINGBEAT_REPLICAS=2 WINGBEAT_STORE=node1:29400 \\
    torchrun --standalone --nproc-per-node 2 --max-restarts 10 train.py

\b
docs/how-to/checkpoints.md has an example.
"""


_POLL_S = 0.1


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("store", help=HELP)(store)


def store(
    port: Annotated[int, typer.Option(help="TCP port; 0: any free one.")] = 29400,
    journal: Annotated[
        Path | None,
        typer.Option(help="File of its content, which it restores when it is started again."),
    ] = None,
) -> None:
    """Serve a store until SIGINT or SIGTERM."""
    from wingbeat.methods.model_averaging.service import GeneratorConfig
    from wingbeat.observe.log import log_to_stderr
    from wingbeat.schema import parse_json
    from wingbeat.transport.hosted_services import ServiceHost
    from wingbeat.transport.served_store import RemoteStore, StoreServer
    from wingbeat.transport.torch_store import job_key

    def generator(text: str) -> GeneratorConfig:
        # Its interfaces are those of a worker's host.
        return replace(parse_json(GeneratorConfig, text), interfaces=())

    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: allowed are 0 to 65535")
    log_to_stderr()
    key, ending = job_key(os.environ), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    served = StoreServer(port, journal, key)
    own = RemoteStore("127.0.0.1", served.port, 10.0, key)
    host = ServiceHost(own, key, {GeneratorConfig.module: generator})
    print(f"wingbeat store: serving at port {served.port}", flush=True)
    while not ending.wait(_POLL_S):
        host.poll()
    host.close()
    own.close()
    served.close()

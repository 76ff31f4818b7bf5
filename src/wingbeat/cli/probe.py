"""``wingbeat probe``: measures the hosts and NICs of a cluster into a file."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from wingbeat.profiling import cluster

HELP = """Measure the hosts of a cluster, their ranks, and the rate and latency of their NICs.

\b
Start it on all hosts, as your training:
  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node1 \\
    --no-python wingbeat probe --out cluster.toml

\b
Rank 0 writes the file. The lab emulates its rates:
  wingbeat lab run cluster.toml -- python train.py
  wingbeat bench --lab cluster.toml --model train.json

\b
docs/how-to/plan.md has the content of the file.
"""


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("probe", help=HELP)(probe)


def probe(
    out: Annotated[Path, typer.Option(help="The file to write, on the host of rank 0.")] = Path(
        "cluster.toml"
    ),
    interface: Annotated[
        list[str] | None,
        typer.Option(
            help="A NIC to measure; may be repeated.",
            show_default="all whose networks connect all hosts",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Longest wait for another rank (s).")] = 300.0,
) -> None:
    """Probe the cluster."""
    if out.suffix != ".toml":
        raise UsageError(f"--out {str(out)!r}: the name has to end in .toml")

    from wingbeat.files import replacing
    from wingbeat.profiling import cluster as measuring
    from wingbeat.transport import rendezvous

    world = rendezvous.init(timeout=timeout, interfaces=interface or None)

    def progress(line: str) -> None:
        if world.rank == 0:
            print(f"wingbeat probe: {line}", file=sys.stderr, flush=True)

    found = measuring.probe(world, socket.gethostname(), progress)
    if world.rank == 0:
        with replacing(out, f"cluster file {str(out)!r}") as file:
            file.write(found.to_toml().encode())
        print("\n".join(report(found)))
        print(f"written: {out}")
    rendezvous.shutdown()


def report(found: cluster.Cluster) -> list[str]:
    """Return a line for each NIC."""
    return [
        f"h{number} {host.name}, {host.ranks} rank{'s' * (host.ranks > 1)}: {nic.name} "
        f"{nic.rate / 1e9:.3g} Gbit/s, {1e6 * nic.latency_s:.0f} us"
        for number, host in enumerate(found.hosts)
        for nic in host.nics
    ]

"""``wingbeat doctor``: checks this host, or all hosts of a job before it starts."""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wingbeat.errors import UsageError, WingbeatError

if TYPE_CHECKING:
    from wingbeat.doctor.checks import Finding
    from wingbeat.doctor.peers import Rendezvous, Result

HELP = """Check this host, or all hosts of a job before it starts, with what to do.

\b
This host alone: versions, cores, GPUs, NICs, limits, environment:
  wingbeat doctor

\b
All hosts of a job: start it as the job, with one process on each host, or with all of them:
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node1 \\
    -m wingbeat doctor
  srun --nodes 2 --ntasks-per-node 1 wingbeat doctor

\b
Without a launcher, such as when torchrun itself does not start; the same on node2 with RANK=1:
  RANK=0 WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500 wingbeat doctor

\b
Rank 0 prints the report; a rank that does not reach the store prints its own. On several hosts it
checks also: the store, TCP connections of each pair of hosts in both directions over each network,
lost full-size packets (MTU), clocks, and that versions, environment and job key are equal.

\b
Exit code 0 if no check has failed, 1 if one has. docs/how-to/troubleshooting.md has more.
"""

_MAX_RANKS = 1 << 16
"""Most ranks of a job: rank 0 looks up each of them, again until its deadline."""


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("doctor", help=HELP)(doctor)


def doctor(
    interface: Annotated[
        list[str] | None,
        typer.Option(
            help="A NIC of this host that the job uses; may be repeated.",
            show_default="all whose networks connect all hosts",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Longest duration, if ranks are missing (s); half is for waiting.")
    ] = 60.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="If nothing failed, measure each NIC's rate too.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option("--json", help="Write the report of rank 0 as JSON too.")
    ] = None,
) -> None:
    """Check this host or a job."""
    if not 4 <= timeout <= 86_400:
        raise UsageError(f"--timeout {timeout:g}: allowed are 4 to 86400 s")
    done, rank, size = _examine(interface, timeout, measure)
    if done.findings:
        print("\n".join(text_of(done, rank, size)), flush=True)
    if report is not None and rank == 0:
        _write(report, done)
    raise typer.Exit(int(done.failed))


def _examine(named: list[str] | None, timeout: float, measure: bool) -> tuple[Result, int, int]:
    """Return the result, and rank and size of the job, 0 and 1 without one."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else stack traces of its store
    _check_modules()
    from wingbeat.doctor import checks, facts, peers
    from wingbeat.transport import descriptors
    from wingbeat.transport.torch_store import job_key

    descriptors.raise_limit()
    env = dict(os.environ)
    rendezvous, problems = None, []
    try:
        rendezvous = rendezvous_of(env)
    except UsageError as error:
        problems = [checks.refused("launcher", str(error))]
    if rendezvous is None or rendezvous.size == 1:
        own = facts.collect(env)
        findings = [*checks.local(own), *checks.named(own.host, named or None), *problems]
        return peers.Result(findings=findings, failed=checks.failed(findings)), 0, 1
    own = facts.collect(env, rendezvous.rank, rendezvous.size)
    try:
        key = job_key(env)
    except UsageError:  # a finding of its own
        key = None
    done = peers.examine(
        own,
        rendezvous,
        key,
        timeout=timeout,
        named=named or None,
        measure=(lambda: _measure(named, timeout)) if measure else None,
    )
    return done, rendezvous.rank, rendezvous.size


def _check_modules() -> None:
    """Report torch or the extension if it cannot be loaded, and exit: nothing else can be read."""
    for module, remedy in (
        ("torch", "install it: pip install torch (pytorch.org/get-started for GPUs)"),
        ("wingbeat._native", "install wingbeat again: pip install --force-reinstall wingbeat"),
    ):
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            raise WingbeatError(f"{module} cannot be loaded: {error}; {remedy}") from None


def rendezvous_of(env: Mapping[str, str]) -> Rendezvous | None:
    """Return where the processes of a job meet, by the launcher's variables; None without one.

    A `UsageError` if they are incomplete or invalid.
    """
    from wingbeat.doctor.peers import Rendezvous
    from wingbeat.transport import launchers

    found = {**env, **launchers.from_environment(env)}
    if "RANK" not in found:
        return None
    rank, size, port = (
        launchers.parse_count(found, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if rank >= size or size > _MAX_RANKS or not 0 < port < 1 << 16:
        raise UsageError(
            f"RANK={rank}, WORLD_SIZE={size}, MASTER_PORT={port}: RANK must be less than "
            f"WORLD_SIZE, WORLD_SIZE at most {_MAX_RANKS}, and MASTER_PORT 1 to 65535"
        )
    return Rendezvous(
        rank=rank,
        size=size,
        host=found["MASTER_ADDR"],
        port=port,
        serves=rank == 0 and found.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=found.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _measure(named: list[str] | None, timeout: float) -> list[Finding]:
    """Connect as a job does, and measure each NIC; all ranks call this together."""
    from wingbeat.cli.probe import report
    from wingbeat.doctor.checks import FAILED, OK, Finding
    from wingbeat.profiling import cluster
    from wingbeat.transport import rendezvous

    try:
        world = rendezvous.init(timeout=timeout, interfaces=named or None)
        try:
            found = cluster.probe(world, socket.gethostname(), lambda _: None)
        finally:
            rendezvous.shutdown()
    except UsageError as error:  # all ranks are on one host
        return [Finding("rates", OK, str(error))]
    except WingbeatError as error:
        return [Finding("rates", FAILED, str(error), "start the job with this error's advice")]
    return [Finding("rates", OK, line) for line in report(found)]


def text_of(done: Result, rank: int, size: int) -> list[str]:
    """Return the lines of a report."""
    hosts = f"{done.hosts} hosts, {size} ranks" if done.hosts > 1 else socket.gethostname()
    lines = [f"wingbeat doctor: {hosts}" + (f", rank {rank}" if rank else "")]
    for each in done.findings:
        where = f"{each.host}: " if each.host else ""
        lines.append(f"{each.status:8} {each.check:14} {where}{each.value}")
        if each.remedy:
            lines.append(f"{'':24}fix: {each.remedy}")
    counts = [sum(f.status == status for f in done.findings) for status in ("failed", "warning")]
    lines.append(f"{counts[0]} failed, {counts[1]} warning{'s' * (counts[1] != 1)}")
    return lines


def _write(path: Path, done: Result) -> None:
    from wingbeat.files import replacing
    from wingbeat.schema import to_json

    content = {"failed": done.failed, "hosts": done.hosts, "findings": to_json(done.findings)}
    with replacing(path, f"--json {str(path)!r}") as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")

"""``wingbeat lab``: run a command on an emulated cluster, observe it, check this machine."""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wingbeat_lab import lab
from wingbeat_lab.lab.launch import GRACE_SECONDS

app = typer.Typer(
    help="An emulated cluster on this machine: hosts, switches, link rates, priorities.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

RUN_HELP = """Run CMD on every host of an emulated cluster, with the environment torchrun sets.

\b
Examples:
  wingbeat lab run star:4@1gbit -- python train.py
  wingbeat lab run star:4x2@1gbit -- python train.py         two interfaces
  wingbeat lab run bcube:3x2@250mbit -- python train.py      BCube, 9 hosts
  wingbeat lab run fat-tree:8/4@1gbit+500mbit -- python train.py
  wingbeat lab run star:4@1gbit,h3@200mbit -- python train.py
  wingbeat lab run star:4@1gbit --fail '5s kill h2' -- python train.py
  wingbeat lab run lab.toml -- python train.py
  wingbeat lab run loopback:4 -- python train.py             links unshaped

\b
The exit code is the first failing worker's (128 + n for signal n); it is 124
at the time limit. docs/how-to/lab.md has the whole of SPEC and of --fail.
"""


@app.command("run", help=RUN_HELP)
def run(
    spec: Annotated[str, typer.Argument(help="The cluster, as text or a .toml file.")],
    command: Annotated[list[str], typer.Argument(help="-- and the command with its arguments.")],
    per_host: Annotated[int, typer.Option(help="Workers on each host.")] = 1,
    prio: Annotated[
        int | None, typer.Option(help="Strict-priority classes by DSCP: 0 (off) or 2 to 4.")
    ] = None,
    fail: Annotated[
        str, typer.Option(help="Faults, as '10s h2.eth0 down; 15s kill h1' or a .toml file.")
    ] = "",
    timeout: Annotated[float | None, typer.Option(help="End the run after this time (s).")] = None,
    grace: Annotated[
        float, typer.Option(help="After the first failure, time (s) for the others to end.")
    ] = GRACE_SECONDS,
    stats: Annotated[bool, typer.Option(help="Print the byte counters at the end.")] = False,
) -> None:
    """Run CMD on every host."""
    cluster = lab.LabSpec.parse(spec)
    if prio is not None:
        cluster = cluster.with_prio(prio)
    if not cluster.shaped:
        _print(f"{cluster}: workers share this host's loopback; links are unshaped")
    signal.signal(signal.SIGTERM, _interrupt)
    result = lab.run(
        cluster,
        command,
        per_host=per_host,
        fail=fail,
        timeout=timeout,
        grace=grace,
        on_event=lambda text: _print(f"fault: {text}"),
    )
    if stats:
        _print_stats(result.stats)
    _summary(result, timeout)
    raise typer.Exit(result.exit_code)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _summary(result: lab.RunResult, timeout: float | None) -> None:
    """Print which rank failed first, and the exit codes of the others."""
    first = result.first_failure
    if result.timed_out:
        _print(f"ended after the time limit of {timeout:g} s")
    elif first is not None:
        others = [
            f"rank {rank}: {code}"
            for rank, code in enumerate(result.exit_codes)
            if code and rank != first.rank
        ]
        rest = f"; then {', '.join(others)}" if others else "; no other failed"
        _print(
            f"{first.host} (rank {first.rank}) failed first: {_describe(first.code)} "
            f"after {first.after:.1f} s{rest}"
        )


def _describe(code: int) -> str:
    if code > 128:
        try:
            return f"exit code {code} ({signal.Signals(code - 128).name})"
        except ValueError:
            pass
    return f"exit code {code}"


def _print(text: str) -> None:
    print(f"wingbeat lab: {text}", file=sys.stderr, flush=True)


STATS_HELP = """The kernel's byte counters of a running lab, per host, interface and class.

\b
Class bytes are as on the wire. Interface bytes count the headers of each piece of up to 64 KB
that TCP hands down once, so they read up to 4% lower.

\b
Examples:
  wingbeat lab stats
  wingbeat lab stats --json
  wingbeat lab stats 4711-a3f0       one of several running labs
"""


@app.command("stats", help=STATS_HELP)
def stats(
    name: Annotated[str | None, typer.Argument(help="Which lab, if several are running.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print the counters of a running lab."""
    reading = lab.stats(name)
    if as_json:
        print(json.dumps(reading.to_json(), indent=2))
    else:
        _print_stats(reading)


def _print_stats(reading: lab.LabStats) -> None:
    table = Table(title=reading.spec)
    for heading in ("host", "interface", "direction", "class"):
        table.add_column(heading)
    for heading in ("bytes", "packets", "drops"):
        table.add_column(heading, justify="right")
    for host, ports in reading.hosts.items():
        for interface, port in ports.items():
            i = port.interface
            _row(table, host, interface, "sent", "interface", (i.tx_bytes, i.tx_packets))
            _class_rows(table, host, interface, "sent", port.out)
            _row(table, host, interface, "received", "interface", (i.rx_bytes, i.rx_packets))
            _class_rows(table, host, interface, "received", port.into)
    for trunk, classes in reading.trunks.items():
        _class_rows(table, "trunk", trunk, "sent", classes)
    Console().print(table)


def _class_rows(
    table: Table, host: str, interface: str, way: str, classes: dict[str, lab.ClassCounters]
) -> None:
    for name, c in classes.items():
        _row(table, host, interface, way, name, (c.bytes, c.packets, c.drops))


def _row(
    table: Table, host: str, interface: str, way: str, name: str, numbers: tuple[int, ...]
) -> None:
    table.add_row(host, interface, way, name, *(f"{n:,}" for n in numbers))


DOCTOR_HELP = """Which kernel features and tools are here, and what each missing one costs the lab.

\b
Every feature is tried, not looked up. Exit code 0 if the lab works here, 1 if not.

\b
Examples:
  wingbeat lab doctor
  wingbeat lab doctor --json
"""


@app.command("doctor", help=DOCTOR_HELP)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check this machine."""
    findings = lab.examine()
    reason = lab.available()
    if as_json:
        report: dict[str, Any] = {
            "works": reason is None,
            "reason": reason,
            "features": [f.to_json() for f in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        _print_findings(findings)
        print("the lab works here" if reason is None else f"the lab does not work here: {reason}")
    raise typer.Exit(0 if reason is None else 1)


def _print_findings(findings: list[lab.Finding]) -> None:
    table = Table("feature", "here", "note", show_lines=False)
    for f in findings:
        if f.found:
            table.add_row(f.name, "yes", f.detail)
            continue
        mark = "[red]no[/]" if f.required else "[yellow]no[/]"
        note = f"{escape(f.detail)}\nwithout it: {f.cost}\nremedy: {escape(f.remedy)}"
        table.add_row(f.name, mark, note.strip())
    Console().print(table)

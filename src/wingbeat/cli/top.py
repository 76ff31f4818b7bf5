"""``wingbeat top``: live view of a running job."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from wingbeat.observe.top import Found

HELP = """Show a running wingbeat job: workers, progress, where time goes, traffic, strategy.

\b
Examples:
  wingbeat top                      the job that runs on this host
  wingbeat top train-4711           one of several
  wingbeat top --json | jq .        once, for programs
  wingbeat top | cat                once, as text
  wingbeat top node7:9400           of another host, if the job was started
                                    with WINGBEAT_METRICS=0.0.0.0:9400

\b
Run it on the host of rank 0, as the job's user. The job needs no option for it.
docs/how-to/monitor.md has the columns, --json and Prometheus.
"""

_MISSING = (
    "the live view needs Textual: pip install 'wingbeat[top]'; without it: wingbeat top --json, or "
    "wingbeat top | cat"
)


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("top", help=HELP)(top)


def top(
    job: Annotated[str, typer.Argument(help="Which job, if several run; or HOST:PORT.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print once as JSON.")] = False,
    every: Annotated[float, typer.Option(help="Time between two looks (s).")] = 1.0,
) -> None:
    """Show a running job."""
    from wingbeat.observe.top import find

    if not 0.1 <= every <= 3600:
        raise UsageError(f"--every {every:g}: allowed are 0.1 to 3600 seconds")
    found = find(job)
    if sys.stdout.isatty() and sys.stdin.isatty() and not as_json:
        _watch(found, every)
        return
    text = json.dumps(found.query().to_json(), indent=2) if as_json else _text(found)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # for example `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _watch(found: Found, every: float) -> None:
    try:
        from wingbeat.observe.screen import Top
    except ModuleNotFoundError as err:
        if (err.name or "").split(".")[0] != "textual":
            raise
        raise UsageError(_MISSING) from None
    found.query()  # report an error as one line, before the screen opens
    Top(found.query, every).run()


def _text(found: Found) -> str:
    from wingbeat.observe.top import headline, tables

    job = found.query()
    width = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else 200
    texts = ["\n".join(table.lines()) for table in tables(job, max(20, width))]
    return "\n\n".join([headline(job), *texts])

"""The ``wingbeat`` command: its verbs, and errors as one line."""

from __future__ import annotations

import sys
from typing import Any

import typer

from wingbeat.cli import bench, demo, lab, plan, top
from wingbeat.errors import UsageError, WingbeatError

# Typer brings its own copy of click, under a private name: reach its error through a public class.
_BAD_INPUT: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="wingbeat",
    help="Data-parallel PyTorch training that does not wait for the network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(lab.app, name="lab")
bench.register(app)
demo.register(app)
plan.register(app)
top.register(app)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit 2 on bad input, 1 on a failure, both with one clear line."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=argv, prog_name="wingbeat", standalone_mode=False)
    except UsageError as err:
        code = _say(err, 2)
    except WingbeatError as err:
        code = _say(err, 1)
    except typer.Abort:
        code = _say("interrupted", 130)
    except _BAD_INPUT as err:
        code = _say(err.format_message(), 2)
    sys.exit(code if isinstance(code, int) else 0)


def _say(message: object, code: int) -> int:
    if str(message):  # empty when the help has just been printed
        print(f"wingbeat: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()

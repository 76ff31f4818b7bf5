"""The ``wingbeat`` command: its subcommands, and errors as one line.

``doctor``, ``plan``, ``probe``, ``profile``, ``show``, ``store`` and ``top`` are defined here.
Other packages add commands through the entry-point group ``wingbeat.commands``: each entry point
names a function that receives the Typer application. ``wingbeat_lab`` adds ``bench``, ``demo`` and
``lab``, so this package does not import it. A new entry point takes effect after the package is
installed again.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

import typer

from wingbeat.cli import doctor, plan, probe, profile, show, store, top
from wingbeat.errors import UsageError, WingbeatError

# Typer bundles click under a private name, so its error is reached through a public class.
_BAD_INPUT: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="wingbeat",
    help="Data-parallel PyTorch training that does not wait for the network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for entry_point in entry_points(group="wingbeat.commands"):
    entry_point.load()(app)
doctor.register(app)
plan.register(app)
probe.register(app)
profile.register(app)
show.register(app)
store.register(app)
top.register(app)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit with 2 on invalid input, 1 on a failure, and a one-line error."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=argv, prog_name="wingbeat", standalone_mode=False)
    except UsageError as err:
        code = _fail(err, 2)
    except WingbeatError as err:
        code = _fail(err, 1)
    except typer.Abort:
        code = _fail("interrupted", 130)
    except _BAD_INPUT as err:
        code = _fail(err.format_message(), 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: object, code: int) -> int:
    if str(message):  # empty after the help was printed
        print(f"wingbeat: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()

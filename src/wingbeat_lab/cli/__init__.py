"""The verbs ``bench``, ``demo`` and ``lab`` of the ``wingbeat`` command.

Each parses its arguments and calls one function of the library.
"""

from __future__ import annotations

import typer

from wingbeat_lab.cli import bench, demo, lab


def register(app: typer.Typer) -> None:
    """Add the verbs. The entry point ``lab`` of the group ``wingbeat.commands`` names this."""
    app.add_typer(lab.app, name="lab")
    bench.register(app)
    demo.register(app)

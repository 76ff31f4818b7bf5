"""The verbs ``bench``, ``demo`` and ``lab`` of the ``wingbeat`` command."""

from __future__ import annotations

import typer

from wingbeat_lab.cli import bench, demo, lab


def register(app: typer.Typer) -> None:
    """Add the verbs; this is the entry point ``lab`` of the group ``wingbeat.commands``."""
    app.add_typer(lab.app, name="lab")
    bench.register(app)
    demo.register(app)

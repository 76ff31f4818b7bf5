"""``python -m wingbeat`` is the command ``wingbeat``, also for ``torchrun -m wingbeat doctor``."""

from __future__ import annotations

from wingbeat.cli.main import main

main()

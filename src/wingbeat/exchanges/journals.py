"""Where it is written down what workers under bounded staleness do, if somebody asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from wingbeat.errors import UsageError
from wingbeat.stale.journal import Journal, Unwritten
from wingbeat.stale.pace import Pace

FOLDER = "WINGBEAT_JOURNAL"
"""The environment variable that names the folder."""


def opened(
    name: str, rank: int, life: int, workers: int, pace: Pace, env: Mapping[str, str] = os.environ
) -> Journal:
    """Return the journal of one life: a file of its own, of whole lines even if it is killed.

    Args:
        name: of the training, different for each in one job.
        rank: whose.
        life: which of its lives.
        workers: how many there may be.
        pace: the thresholds.
        env: names the folder; without it nothing is written.

    Raises:
        UsageError: nothing can be written there.
    """
    folder = env.get(FOLDER, "")
    if not folder:
        return Unwritten()
    path = Path(folder) / f"{name}-{rank}.{life}.jsonl"
    try:
        file = path.open("w", buffering=1, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{FOLDER}={folder}: {error.strerror}; name a folder that exists and can be written"
        ) from None
    return Journal(file.write, rank, life, workers, pace)

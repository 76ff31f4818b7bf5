"""Where it is written down what workers under bounded staleness do, if somebody asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from wingbeat.methods.bounded_staleness.journal import Journal, Unwritten
from wingbeat.methods.bounded_staleness.pace import Pace
from wingbeat.observe.log import log

FOLDER = "WINGBEAT_JOURNAL"
"""The environment variable that names the folder."""


def opened(
    name: str, rank: int, life: int, workers: int, pace: Pace, env: Mapping[str, str] = os.environ
) -> Journal:
    """Return the journal of one life: a file of its own, of whole lines even if it is killed.

    What cannot be written, now or later, is warned of once, and training goes on without it.

    Args:
        name: of the training, different for each in one job.
        rank: whose.
        life: which of its lives.
        workers: how many there may be.
        pace: the thresholds.
        env: names the folder; without it nothing is written.
    """
    folder = env.get(FOLDER, "")
    if not folder:
        return Unwritten()
    try:
        file = (Path(folder) / f"{name}-{rank}.{life}.jsonl").open("wb", buffering=0)
    except OSError as error:
        _warn(folder, rank, error)
        return Unwritten()
    return Journal(_Lines(file, folder, rank).write, rank, life, workers, pace)


class _Lines:
    """Writes lines for as long as that is possible."""

    def __init__(self, file: FileIO, folder: str, rank: int) -> None:
        self._file, self._folder, self._rank = file, folder, rank

    def write(self, line: str) -> None:
        left = memoryview(line.encode())
        try:
            while left and not self._file.closed:
                # A disk that is nearly full takes a part, and refuses what follows.
                left = left[self._file.write(left) :]
        except OSError as error:
            _warn(self._folder, self._rank, error)
            self._file.close()


def _warn(folder: str, rank: int, error: OSError) -> None:
    log.warning(
        "%s=%s: %s: the journal of rank %d ends here; training goes on",
        FOLDER, folder, error.strerror or error, rank,
    )  # fmt: skip

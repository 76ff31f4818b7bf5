"""Files of each worker's residuals next to a checkpoint.

Trainers of other libraries save rank 0's optimizer, which lacks the other workers' residuals. Each
worker therefore writes ``wingbeat_NAME_RANK_of_SIZE.pt`` into the same folder.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wingbeat.engine.model_checks import refuse_loading
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.files import replacing

log = logging.getLogger("wingbeat")

Part = dict[str, Any]

_RANK = r"(\d+)_of_(\d+)\.pt"


def save(optimizer: Any, folder: str | Path, number: int = 0) -> None:
    """Write this worker's residuals, if its strategy keeps any; every worker calls this.

    ``number`` identifies the optimizer in a checkpoint of several.
    """
    engine = engine_of(optimizer)
    part = None if engine is None else engine.compression.state_dict()
    if engine is not None and part is not None:
        write(part, Path(folder), f"residuals_{number}", engine.world.rank, engine.world.size)


def load(optimizer: Any, folder: str | Path, number: int = 0) -> None:
    """Load residuals from a checkpoint's folder, after the optimizer's own state.

    Raises UsageError if a file is missing or damaged, or this worker has just rejoined.
    """
    engine = engine_of(optimizer)
    if engine is None or engine.compression.residuals is None:
        return
    refuse_loading(engine, "loading residuals")
    name = f"residuals_{number}"
    parts = read(Path(folder), name, engine.world.rank, engine.world.size)
    if len(parts) == 1:
        engine.compression.load_state_dict(parts[0])
    elif parts:
        optimizer.load_residuals(parts)


def write(part: Part, folder: Path, name: str, rank: int, size: int) -> None:
    """Write one worker's part; the last worker removes the files of runs of other sizes.

    Earlier files are unchanged if it cannot be written (UsageError).
    """
    with replacing(_path(folder, name, rank, size)) as file:
        try:
            torch.save(part, file)
        except RuntimeError as error:
            # On a full disk torch's writer reports a format error after the disk's error.
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    found = list(_found(folder, name))
    if sum(saved_by == size for saved_by, _ in found) == size:
        for saved_by, path in found:
            if saved_by != size:
                path.unlink(missing_ok=True)


def read(folder: Path, name: str, rank: int, size: int) -> list[Part]:
    """Return this worker's part alone if the number of workers is equal; else all parts, or none.

    The newest file determines the number of workers that saved last. Files of other sizes remain if
    some workers could not write, or if hosts have separate folders. Raises UsageError if a file is
    missing or damaged.
    """
    found = list(_found(folder, name))
    if not found:
        log.info("%s has no residuals: what gradients were still to be sent begins anew", folder)
        return []
    own = _path(folder, name, rank, size)
    latest, _ = max(found, key=lambda each: each[1].stat().st_mtime_ns)
    parts = sorted(path for saved_by, path in found if saved_by == latest)
    if own in parts:
        return [_load(own)]
    if latest == size or len(parts) != latest:
        raise UsageError(
            f"{folder} has residuals of {len(parts)} of {latest} workers, and not "
            f"{own.name}: copy all hosts' wingbeat_*.pt into it on every host, or remove them, to "
            "begin without residuals"
        )
    return [_load(path) for path in parts]


def _path(folder: Path, name: str, rank: int, size: int) -> Path:
    return folder / f"wingbeat_{name}_{rank}_of_{size}.pt"


def _found(folder: Path, name: str) -> Iterator[tuple[int, Path]]:
    pattern = re.compile(f"wingbeat_{re.escape(name)}_{_RANK}")
    for path in folder.glob(f"wingbeat_{name}_*.pt"):
        if match := pattern.fullmatch(path.name):
            yield int(match[2]), path


def _load(path: Path) -> Part:
    try:
        part: Part = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise UsageError(
            f"{path} cannot be read ({type(error).__name__}): remove all wingbeat_*.pt there, to "
            "begin without residuals"
        ) from error
    return part

"""What each worker alone knows of a run, residuals, in a file of its own beside a checkpoint.

Trainers of other libraries save rank 0's optimizer. What the other workers have kept back of their
gradients is not in it, so each writes ``wingbeat_NAME_RANK_of_SIZE.pt`` into the same folder.
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

    Args:
        optimizer: as `wingbeat.distribute` has returned it.
        folder: of the checkpoint; made if it is not there.
        number: of the optimizer, where a checkpoint has several.
    """
    engine = engine_of(optimizer)
    part = None if engine is None else engine.compression.state_dict()
    if engine is not None and part is not None:
        write(part, Path(folder), f"residuals_{number}", engine.world.rank, engine.world.size)


def load(optimizer: Any, folder: str | Path, number: int = 0) -> None:
    """Take over residuals from a checkpoint's folder; after the optimizer's own state.

    Raises:
        UsageError: some files are there and the one that is needed is not, or is damaged; or this
            worker has just come back to the others.
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
    """Write one worker's part; the last of all removes those of an earlier run of another size.

    Raises:
        UsageError: it cannot be written; the parts that were there are as before.
    """
    with replacing(_path(folder, name, rank, size)) as file:
        try:
            torch.save(part, file)
        except RuntimeError as error:
            # On a full disk torch's writer complains of its format, after the error of the disk.
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    found = list(_found(folder, name))
    if sum(saved_by == size for saved_by, _ in found) == size:
        for saved_by, path in found:
            if saved_by != size:
                path.unlink(missing_ok=True)


def read(folder: Path, name: str, rank: int, size: int) -> list[Part]:
    """Return this worker's part alone, if as many workers have saved; else all parts, or none.

    The newest file tells how many workers saved last. Files of other sizes are left over where not
    all of those could write, or where hosts have a folder each.

    Raises:
        UsageError: some files are there and the one that is needed is not, or is damaged.
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
    except Exception as error:  # whatever a damaged file makes of the reader
        raise UsageError(
            f"{path} cannot be read ({type(error).__name__}): remove all wingbeat_*.pt there, to "
            "begin without residuals"
        ) from error
    return part

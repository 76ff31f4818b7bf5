"""Checkpoints with `torch.distributed.checkpoint`, for any number of workers.

    dcp.save(checkpoint.state(model, optimizer), checkpoint_id=folder)
    checkpoint.load(model, optimizer, folder)

Model and optimizer are saved by torch's own functions, so plain torch can load them. The state that
differs between workers (shards of an optimizer, residuals) is saved separately, as bytes:
torch.distributed.checkpoint splits tensors by rows, and shards are split at bucket boundaries.

Trainers of other libraries save rank 0's optimizer, which lacks the other workers' residuals. There
each worker writes ``wingbeat_NAME_RANK_of_SIZE.pt`` into the same folder (`save_residuals`).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as whole
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from wingbeat.engine import checkpoint
from wingbeat.engine.engine import Engine
from wingbeat.engine.model_checks import refuse_loading
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.files import replacing
from wingbeat.observe.log import log

__all__ = ["load", "state"]

_MODEL, _OPTIMIZER, _PART = "model", "optim", "wingbeat"
DROPPED = "residuals start at zero, and warm-up of a codec from the beginning"
"""What the log reports of residuals that were not saved, or are of other replicas."""
_LAYOUT = "[0-9]{1,6}x[0-9a-f]{16}"
_PARTS = re.compile(rf"{_PART}\.((?:([0-9]{{1,6}})_of_({_LAYOUT})\.)?([0-9]{{1,6}}))")


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state to pass to `torch.distributed.checkpoint.save`; entries may be added.

    Every worker calls it. If models differ between workers, the model is synchronized first and the
    mean is saved, and each worker's optimizer is in its own part. A sharded optimizer
    (``shard_optimizer``) is not gathered.

    Args:
        model: the model that `distribute` has returned.
        optimizer: its optimizer.

    Returns:
        ``"model"`` and ``"optim"`` as by torch's ``get_state_dict``, without ``"optim"`` if no
        worker has the whole state; under ``"wingbeat"`` this worker's own part, as bytes.

    Raises:
        UsageError: the model and the optimizer are not distributed.
    """
    engine = _engine(model, optimizer, "state")
    engine.level()
    found: dict[str, Any] = {_MODEL: whole.get_model_state_dict(model)}
    part: dict[str, Any] = {"beside": checkpoint.export_extra(engine)}
    if engine.update.shards is not None:
        part["shard"] = optimizer.shard_state_dict()  # type: ignore[attr-defined]
    elif engine.update.averaging:
        # torch lets any worker write a replicated tensor, and these differ between workers.
        part["own"] = whole.get_optimizer_state_dict(model, optimizer)
    else:
        found[_OPTIMIZER] = whole.get_optimizer_state_dict(model, optimizer)
    file = io.BytesIO()
    torch.save(part, file)
    packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    found[_PART] = {f"{_place(engine, '.')}{engine.world.rank}": packed}
    return found


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: dcp.StorageReader | None = None,
) -> None:
    """Load a checkpoint of `state`, with any number of workers and any strategy.

    Every worker calls it.

    Args:
        model: the model that `distribute` has returned.
        optimizer: its optimizer.
        checkpoint_id: the folder.
        storage_reader: another source, as for `torch.distributed.checkpoint.load`.

    Raises:
        UsageError: the model and the optimizer are not distributed; the checkpoint is of another
            model or not from `state`; or this worker has just rejoined.
    """
    engine = _engine(model, optimizer, "load")
    refuse_loading(engine, "checkpoint.load()")  # reading already writes to the parameters
    if storage_reader is None:
        if checkpoint_id is None:
            raise UsageError("checkpoint.load(): pass a folder, or a storage_reader")
        storage_reader = dcp.FileSystemReader(checkpoint_id)
    try:
        saved = storage_reader.read_metadata()
    except OSError as err:
        raise UsageError(
            f"checkpoint.load({checkpoint_id!r}): {err}; pass what "
            "torch.distributed.checkpoint.save() was given"
        ) from None
    template: dict[str, Any] = {_MODEL: whole.get_model_state_dict(model)}
    if any(key.startswith(f"{_OPTIMIZER}.") for key in saved.state_dict_metadata):
        template[_OPTIMIZER] = whole.get_optimizer_state_dict(model, optimizer)
    where = str(checkpoint_id or type(storage_reader).__name__)
    template[_PART] = _empty_parts(saved, where, engine)
    if not template[_PART] and _OPTIMIZER not in template:
        raise UsageError(
            f"checkpoint.load({where}): its optimizer is in parts of workers that divided the "
            "model in another way: load it on the mesh that saved it"
        )
    dcp.load(template, storage_reader=storage_reader)
    parts = [_unpacked(part) for part in template[_PART].values()]
    extra = [part["beside"] or None for part in parts]
    same = len(extra) == engine.world.size
    beside = extra[engine.world.rank] if same else checkpoint.merge_extra(extra) if extra else None
    checkpoint.check_extra(engine, beside)
    whole.set_model_state_dict(model, template[_MODEL])
    if _OPTIMIZER in template:
        whole.set_optimizer_state_dict(model, optimizer, template[_OPTIMIZER])
    elif "own" in parts[0]:
        own = parts[engine.world.rank % len(parts)]["own"]
        whole.set_optimizer_state_dict(model, optimizer, own)
    else:
        optimizer.load_shards([part["shard"] for part in parts])  # type: ignore[attr-defined]
    checkpoint.load_extra(engine, beside)


def _engine(model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> Engine:
    engine = engine_of(model)
    if engine is None or engine is not engine_of(optimizer):
        raise UsageError(
            f"checkpoint.{what}(): pass a model and its optimizer as distribute() has returned them"
        )
    replica = engine.world.replica
    if engine.update.averaging and replica is not None:
        raise UsageError(
            f"checkpoint.{what}() is not possible for models that differ between replicas of "
            f"{replica.size} ranks: call wingbeat.synchronize(model), and save the state dicts of "
            "model and optimizer by torch.distributed.checkpoint"
        )
    return engine


def _place(engine: Engine, end: str) -> str:
    """Return a prefix that tells workers apart which hold different parts of the model."""
    replica = engine.world.replica
    if replica is None:
        return ""
    return f"{replica.place}_of_{_layout(engine)}{end}"


def _layout(engine: Engine) -> str:
    """Return the ranks of a replica and a digest of how they divide the model; empty for one."""
    replica = engine.world.replica
    if replica is None:
        return ""
    placed = [
        (slot.name, repr(slot.param.placements), tuple(slot.param.device_mesh.shape))  # type: ignore[attr-defined]
        for slot in engine.slots
        if slot.placed
    ]
    sizes = [len(replica.group_ranks(name)) for name in replica.names]
    told = repr((replica.names, sizes, placed)).encode()
    return f"{replica.size}x{hashlib.sha256(told).hexdigest()[:16]}"


def _empty_parts(saved: Metadata, where: str, engine: Engine) -> dict[str, torch.Tensor]:
    """Allocate the parts of all workers that held the same shards, in their saved lengths.

    There are none if replicas divided the model in another way.
    """
    found: dict[tuple[str, int], dict[int, Any]] = {}  # by (layout, position), by rank
    for key, described in saved.state_dict_metadata.items():
        match = _PARTS.fullmatch(key)
        if match and isinstance(described, TensorStorageMetadata):
            place = match[3] or "", int(match[2] or 0)
            found.setdefault(place, {})[int(match[4])] = match[1], described
    layout, size = next(((each, len(ranks)) for (each, _), ranks in found.items()), ("", 0))
    inside = int(layout.partition("x")[0] or 1)
    complete = {(layout, at): {*range(size)} for at in range(min(inside, len(found) + 1))}
    if not found or {place: {*ranks} for place, ranks in found.items()} != complete:
        raise UsageError(
            f"checkpoint.load({where}): parts of workers are missing in it; it was not "
            "saved from wingbeat.integrations.checkpoint.state()"
        )
    replica = engine.world.replica
    mine = _layout(engine), 0 if replica is None else replica.place
    if mine not in found and engine.compression.residuals is not None and engine.world.leads:
        log.info("%s is of replicas that divide the model in another way: %s", where, DROPPED)
    parts = found.get(mine, {})
    return {
        key: torch.empty(described.size, dtype=described.properties.dtype, device="cpu")
        for _, (key, described) in sorted(parts.items())
    }


def _unpacked(data: torch.Tensor) -> dict[str, Any]:
    try:
        part = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    except Exception as error:  # a damaged part may raise anything
        raise _damaged(type(error).__name__) from error
    if not isinstance(part, dict) or "beside" not in part:
        raise _damaged("a field is missing")
    return part


def _damaged(why: str) -> UsageError:
    return UsageError(f"checkpoint.load(): a worker's part is damaged ({why}); save it again")


# -- files of residuals beside other libraries' checkpoints ----------------------------------------


def save_residuals(optimizer: Any, folder: str | Path, number: int = 0) -> None:
    """Write this worker's residuals, if its strategy keeps any; every worker calls this.

    Otherwise files of an earlier checkpoint in the same folder are removed. ``number`` identifies
    the optimizer in a checkpoint of several. Workers that hold different shards write files of
    different names, each with its place in the replica.
    """
    engine, name = engine_of(optimizer), f"residuals_{number}"
    part = None if engine is None else engine.compression.state_dict()
    if engine is not None and part is not None:
        name = f"{_place(engine, '_')}{name}"
        write_part(part, Path(folder), name, engine.world.rank, engine.world.size)
        return
    for path, _ in _of_any_layout(Path(folder), name):
        path.unlink(missing_ok=True)


def load_residuals(optimizer: Any, folder: str | Path, number: int = 0) -> None:
    """Load residuals from a checkpoint's folder, after the optimizer's own state.

    Raises UsageError if a file is missing or damaged, or this worker has just rejoined.
    """
    engine = engine_of(optimizer)
    if engine is None or engine.compression.residuals is None:
        return
    refuse_loading(engine, "loading residuals")
    place, name = _place(engine, "_"), f"residuals_{number}"
    latest = _latest(Path(folder), name)
    if latest is not None and latest != _layout(engine):
        if engine.world.leads:
            log.info("%s is of replicas that divide the model in another way: %s", folder, DROPPED)
        return
    name = f"{place}{name}"
    parts = read_parts(Path(folder), name, engine.world.rank, engine.world.size)
    if len(parts) == 1:
        engine.compression.load_state_dict(parts[0])
    elif parts:
        optimizer.load_residuals(parts)


def _latest(folder: Path, name: str) -> str | None:
    """Return the layout of the files that were written last, or None if there are no files."""
    found = [(path.stat().st_mtime_ns, layout) for path, layout in _of_any_layout(folder, name)]
    return max(found)[1] if found else None


def _of_any_layout(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of an optimizer with their layouts."""
    pattern = re.compile(rf"wingbeat_(?:\d+_of_({_LAYOUT})_)?{re.escape(name)}_\d+_of_\d+\.pt")
    for path in folder.glob(f"wingbeat_*{name}_*.pt"):
        if match := pattern.fullmatch(path.name):
            yield path, match[1] or ""


def write_part(part: dict[str, Any], folder: Path, name: str, rank: int, size: int) -> None:
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


def read_parts(folder: Path, name: str, rank: int, size: int) -> list[dict[str, Any]]:
    """Return this worker's part alone if the number of workers is equal; else all parts, or none.

    The newest file determines the number of workers that saved last. Files of other sizes remain if
    some workers could not write, or if hosts have separate folders. Raises UsageError if a file is
    missing or damaged.
    """
    found = list(_found(folder, name))
    if not found:
        log.info("%s has no residuals: they start at zero", folder)
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
    pattern = re.compile(rf"wingbeat_{re.escape(name)}_(\d+)_of_(\d+)\.pt")
    for path in folder.glob(f"wingbeat_{name}_*.pt"):
        if match := pattern.fullmatch(path.name):
            yield int(match[2]), path


def _load(path: Path) -> dict[str, Any]:
    try:
        part: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise UsageError(
            f"{path} cannot be read ({type(error).__name__}): remove all wingbeat_*.pt there, to "
            "begin without residuals"
        ) from error
    return part

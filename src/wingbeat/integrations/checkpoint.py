"""Training saved and loaded by `torch.distributed.checkpoint`, by any number of workers.

    dcp.save(checkpoint.state(model, optimizer), checkpoint_id=folder)
    checkpoint.load(model, optimizer, folder)

Model and optimizer are saved as torch's own functions save them, so that plain torch can load them.
What each worker alone has (its part of a divided optimizer, residuals) is saved beside, in bytes:
torch.distributed.checkpoint cuts tensors by rows, and these are cut where buckets are.
"""

from __future__ import annotations

import io
import os
import re
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as whole
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from wingbeat.engine import checkpoint
from wingbeat.engine.engine import Engine
from wingbeat.engine.model_checks import refuse_loading
from wingbeat.engine.updates.local import LocalUpdate
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError

__all__ = ["load", "state"]

_MODEL, _OPTIMIZER, _PART = "model", "optim", "wingbeat"
_PARTS = re.compile(rf"{_PART}\.([0-9]{{1,6}})")


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what `torch.distributed.checkpoint.save` takes; more entries may be added.

    Every worker calls it. Where models differ it is `synchronize` first, and what is saved is their
    mean; each worker's optimizer is in its own part then. With a divided optimizer
    (``shard_optimizer``) nobody is asked for the whole of its state.

    Args:
        model: what `distribute` has returned.
        optimizer: its optimizer.

    Returns:
        ``"model"`` and ``"optim"`` as torch's ``get_state_dict`` has them, without ``"optim"``
        where no worker has the state of all; under ``"wingbeat"`` this worker's own part, in bytes.

    Raises:
        UsageError: they are not distributed.
    """
    engine = _engine(model, optimizer, "state")
    engine.level()
    found: dict[str, Any] = {_MODEL: whole.get_model_state_dict(model)}
    part: dict[str, Any] = {"beside": checkpoint.export_extra(engine)}
    if engine.update.shards is not None:
        part["shard"] = optimizer.shard_state_dict()  # type: ignore[attr-defined]
    elif isinstance(engine.update, LocalUpdate):
        # Any worker may be the one that writes a tensor which all have.
        part["own"] = whole.get_optimizer_state_dict(model, optimizer)
    else:
        found[_OPTIMIZER] = whole.get_optimizer_state_dict(model, optimizer)
    found[_PART] = {str(engine.world.rank): _packed(part)}
    return found


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    storage_reader: dcp.StorageReader | None = None,
) -> None:
    """Load what `state` was saved from, by any number of workers and any strategy.

    Every worker calls it.

    Args:
        model: what `distribute` has returned.
        optimizer: its optimizer.
        checkpoint_id: the folder.
        storage_reader: another place than a folder, as for `torch.distributed.checkpoint.load`.

    Raises:
        UsageError: they are not distributed, or what was saved is of another model or not by
            `state`; or this worker has just come back to the others.
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
    template[_PART] = _empty_parts(saved, str(checkpoint_id or type(storage_reader).__name__))
    dcp.load(template, storage_reader=storage_reader)
    parts = [_unpacked(template[_PART][key]) for key in sorted(template[_PART], key=int)]
    beside = _beside(engine, [part["beside"] or None for part in parts])
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
    return engine


def _beside(engine: Engine, saved: list[Any]) -> Any:
    """Return what this worker goes on with beside model and optimizer."""
    world = engine.world
    return saved[world.rank] if len(saved) == world.size else checkpoint.merge_extra(saved)


def _empty_parts(saved: Metadata, where: str) -> dict[str, torch.Tensor]:
    """Return room for every worker's part, as long as it was saved."""
    found = {}
    for key, described in saved.state_dict_metadata.items():
        match = _PARTS.fullmatch(key)
        if match and isinstance(described, TensorStorageMetadata):
            found[match[1]] = torch.empty(described.size, dtype=described.properties.dtype)
    if not found or sorted(map(int, found)) != list(range(len(found))):
        raise UsageError(
            f"checkpoint.load({where}): no worker's part, or not every one's, is in it; it was not "
            "saved from wingbeat.integrations.checkpoint.state()"
        )
    return found


def _packed(part: dict[str, Any]) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(part, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> dict[str, Any]:
    part = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    if not isinstance(part, dict) or "beside" not in part:
        raise UsageError("checkpoint.load(): a worker's part is damaged; save it anew")
    return part

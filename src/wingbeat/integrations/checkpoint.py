"""Checkpoints with `torch.distributed.checkpoint`, for any number of workers.

    dcp.save(checkpoint.state(model, optimizer), checkpoint_id=folder)
    checkpoint.load(model, optimizer, folder)

Model and optimizer are saved by torch's own functions, so plain torch can load them. The state that
differs between workers (shards of an optimizer, residuals) is saved separately, as bytes:
torch.distributed.checkpoint splits tensors by rows, and shards are split at bucket boundaries.
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
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError
from wingbeat.methods.model_averaging.local import LocalUpdate

__all__ = ["load", "state"]

_MODEL, _OPTIMIZER, _PART = "model", "optim", "wingbeat"
_PARTS = re.compile(rf"{_PART}\.([0-9]{{1,6}})")


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
    elif isinstance(engine.update, LocalUpdate):
        # torch lets any worker write a replicated tensor, and these differ between workers.
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
    """Return this worker's extra state, merged from all parts if the number of workers differs."""
    world = engine.world
    return saved[world.rank] if len(saved) == world.size else checkpoint.merge_extra(saved)


def _empty_parts(saved: Metadata, where: str) -> dict[str, torch.Tensor]:
    """Allocate every worker's part in its saved length."""
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

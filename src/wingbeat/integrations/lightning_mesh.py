"""Lightning's ModelParallelStrategy with wingbeat between replicas: FSDP2, tensor parallelism.

Lightning makes a mesh of two dimensions for the parallelism of a model. Here a mesh has a third one
in front, across replicas, which the user's code does not see: it parallelises a model inside a
replica as before, by ``fully_shard`` and ``parallelize_module``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wingbeat.engine.api import distribute, synchronize
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import UsageError, unknown
from wingbeat.integrations.checkpoint import DROPPED, load_residuals, save_residuals
from wingbeat.integrations.lightning_family import (
    MESH_OBJECT,
    FabricStrategy,
    TrainerStrategy,
    WingbeatMixin,
    check_object,
)
from wingbeat.observe.log import log

__all__ = ["MeshFabricStrategy", "MeshTrainerStrategy"]

ACROSS = "replica"
"""The name of the mesh's first dimension; the others have Lightning's names."""

_INSIDE = ("data_parallel", "tensor_parallel")

PASSED_ON = ("process_group_backend", "save_distributed_checkpoint", "timeout")
"""Options that are passed on to Lightning's strategy."""


class _Mesh(WingbeatMixin):
    """The mesh of both classes."""

    # Attributes of ModelParallelStrategy.
    broadcast: Callable[[Any], Any]
    num_nodes: int
    num_processes: int
    _data_parallel_size: int | str
    _device_mesh: DeviceMesh | None
    _tensor_parallel_size: int | str

    def __init__(
        self,
        strategy: Any = None,
        *,
        replicas: int | str = "auto",
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int = 1,
        **options: Any,
    ) -> None:
        self._wingbeat_sizes = (replicas, data_parallel_size, tensor_parallel_size)
        self._wingbeat_mesh: DeviceMesh | None = None
        super().__init__(strategy, **options)
        check_object(self, MESH_OBJECT)

    def _lightning_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            if name not in PASSED_ON:
                raise unknown("option of WingbeatModelParallelStrategy", name, PASSED_ON)
        return dict(options)

    def setup_environment(self) -> None:
        """Make the mesh, of which the user's code gets the dimensions inside a replica.

        Raises UsageError if the sizes do not multiply to the number of workers.
        """
        world = self.num_nodes * self.num_processes
        sizes = _sizes(world, self.num_nodes, *self._wingbeat_sizes)
        replicas, shards, columns = sizes
        # Lightning checks that its two sizes multiply to the number of workers.
        self._data_parallel_size, self._tensor_parallel_size = replicas * shards, columns
        super().setup_environment()
        mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=(ACROSS, *_INSIDE))
        self._wingbeat_mesh = mesh
        self._device_mesh = mesh[_INSIDE]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Batches differ between replicas and among ranks that ``fully_shard`` divides."""
        assert self._wingbeat_mesh is not None
        replicas, shards, _ = self._wingbeat_mesh.mesh.shape
        replica, shard, _ = self._wingbeat_mesh.get_coordinate()
        return {"num_replicas": replicas * shards, "rank": replica * shards + shard}

    def _distribute(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        mesh = self._wingbeat_mesh
        distribute(module, optimizer, self.wingbeat_strategy, mesh=mesh, across=ACROSS)


def _sizes(
    world: int, nodes: int, replicas: int | str, shards: int | str, columns: int
) -> tuple[int, int, int]:
    """Return the sizes of the mesh's dimensions; a replica is a host by default."""
    numbers = [each for each in (replicas, shards) if each != "auto"] + [columns]
    if not all(isinstance(each, int) and each > 0 for each in numbers):
        raise UsageError(
            f"WingbeatModelParallelStrategy(replicas={replicas!r}, data_parallel_size={shards!r}, "
            f"tensor_parallel_size={columns!r}): give positive whole numbers; the first two may be "
            '"auto", which makes a replica of each host'
        )
    if replicas == "auto":
        replicas = nodes if shards == "auto" else world // (int(shards) * columns)
    if shards == "auto":
        shards = world // (int(replicas) * columns)
    found = (int(replicas), int(shards), columns)
    if found[0] * found[1] * found[2] != world:
        raise UsageError(
            f"WingbeatModelParallelStrategy: {found[0]} replicas x data_parallel_size {found[1]} x "
            f"tensor_parallel_size {columns} are not the {world} workers of this job; change "
            "replicas, or devices and num_nodes"
        )
    if found[0] == 1 and world > 1:
        raise UsageError(
            f"WingbeatModelParallelStrategy: all {world} workers are one replica, so there is "
            "nothing to exchange: give replicas=2 or more, or use ModelParallelStrategy"
        )
    return found


class MeshTrainerStrategy(_Mesh, TrainerStrategy):
    """Mixin in front of ``ModelParallelStrategy`` for the Trainer."""

    def setup_environment(self) -> None:
        """Show the mesh to the user's ``configure_model``."""
        super().setup_environment()
        self.lightning_module._device_mesh = self._device_mesh

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer, as ModelParallelStrategy does."""
        state: dict[str, Any] = super(TrainerStrategy, self).optimizer_state(optimizer)  # type: ignore[misc]
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded the state."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, **options: Any) -> None:
        """Save as ModelParallelStrategy does, with each worker's residuals."""
        super().save_checkpoint(checkpoint, filepath, **options)  # type: ignore[misc]
        _save(self._wingbeat_optimizer, self.broadcast(filepath))

    def load_checkpoint(self, checkpoint_path: Any, **options: Any) -> dict[str, Any]:
        """Load as ModelParallelStrategy does, with each worker's residuals."""
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, **options)  # type: ignore[misc]
        _load(self._wingbeat_optimizer, self.broadcast(checkpoint_path))
        return found


class MeshFabricStrategy(_Mesh, FabricStrategy):
    """Mixin in front of ``ModelParallelStrategy`` for Fabric."""

    def __init__(
        self,
        parallelize_fn: Callable[[Any, DeviceMesh], Any],
        strategy: Any = None,
        **options: Any,
    ) -> None:
        self._wingbeat_parallelize = parallelize_fn
        super().__init__(strategy, **options)

    def _lightning_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        own = {"parallelize_fn": self._wingbeat_parallelize}
        return super()._lightning_options(options) | own

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Parallelise a model inside the replica; it is distributed later, with its optimizer."""
        placed = super(FabricStrategy, self).setup_module(module)  # type: ignore[misc]
        return self._refuse_training_alone(placed)

    def setup_module_and_optimizers(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise UsageError: the model's parameters are replaced when it is parallelised."""
        raise UsageError(
            "fabric.setup(model, optimizer): the model's parameters are replaced when it is "
            "parallelised, so call model = fabric.setup(model) first, make the optimizer from "
            "model.parameters(), and call fabric.setup_optimizers(optimizer)"
        )

    def save_checkpoint(self, path: Any, state: dict[str, Any], **options: Any) -> None:
        """Save as ModelParallelStrategy does, with each worker's residuals."""
        for each in state.values():
            if isinstance(each, torch.nn.Module) and engine_of(each) is not None:
                synchronize(each)
        super().save_checkpoint(path, state, **options)  # type: ignore[misc]
        for number, optimizer in enumerate(_optimizers(state)):
            _save(optimizer, self.broadcast(path), number)

    def load_checkpoint(self, path: Any, state: Any = None, **options: Any) -> dict[str, Any]:
        """Load as ModelParallelStrategy does, with each worker's residuals."""
        found: dict[str, Any] = super().load_checkpoint(path, state, **options)  # type: ignore[misc]
        if isinstance(state, Mapping):
            for number, optimizer in enumerate(_optimizers(state)):
                _load(optimizer, self.broadcast(path), number)
        return found


def _save(optimizer: Any, path: Any, number: int = 0) -> None:
    """Write residuals into a checkpoint that is a folder; one file has no place for them."""
    if optimizer is not None and Path(path).is_dir():
        save_residuals(optimizer, path, number)
        return
    engine = None if optimizer is None else engine_of(optimizer)
    if engine is not None and engine.compression.residuals is not None and dist.get_rank() == 0:
        log.warning(
            "the checkpoint %s is one file, which has no place for the workers' residuals: when it "
            "is loaded, %s; save_distributed_checkpoint=True saves them",
            path,
            DROPPED,
        )


def _load(optimizer: Any, path: Any, number: int = 0) -> None:
    if optimizer is not None and Path(path).is_dir():
        load_residuals(optimizer, path, number)


def _optimizers(state: Mapping[str, Any]) -> list[Any]:
    """Return the optimizers of a checkpoint by their keys, in an order that loading has too."""
    return [state[key] for key in sorted(state) if isinstance(state[key], torch.optim.Optimizer)]

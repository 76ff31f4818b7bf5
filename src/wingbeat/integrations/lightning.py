"""wingbeat in Lightning's Trainer, package ``lightning``, in place of ``"ddp"``.

::

    from wingbeat.integrations.lightning import WingbeatStrategy

    trainer = Trainer(strategy=WingbeatStrategy(wingbeat.DeAR()), devices=2)

Importing this module also registers the names of all presets, such as ``strategy="wingbeat_dear"``.
"""

from __future__ import annotations

from wingbeat.integrations.lightning_family import TrainerStrategy, register, trainer_of
from wingbeat.integrations.lightning_mesh import MeshTrainerStrategy

__all__ = ["WingbeatModelParallelStrategy", "WingbeatStrategy"]

_package = trainer_of("lightning")


class WingbeatStrategy(TrainerStrategy, _package.strategies.DDPStrategy):  # type: ignore[misc,name-defined]
    """Strategy for ``lightning.pytorch.Trainer`` that exchanges gradients with wingbeat.

    Args:
        strategy: a strategy, default ``wingbeat.DeAR()``; or its name and options as on the command
            line, such as ``"allreduce:mb=10"``.
        interfaces: names of the network interfaces to use, as for `wingbeat.init`.
        ddp_kwargs: arguments of ``DDPStrategy``: ``timeout`` (of all waits, default: half an hour),
            ``process_group_backend``, ``start_method``, ``checkpoint_io`` and so on. DDP's options
            that are not needed, such as ``find_unused_parameters``, are accepted.

    Raises:
        UsageError: ``strategy`` is not a strategy, or an option of DDP is not supported.
    """


class WingbeatModelParallelStrategy(MeshTrainerStrategy, _package.strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
    """Strategy for ``lightning.pytorch.Trainer`` with sharded models, in place of Lightning's
    ``ModelParallelStrategy``: FSDP2 and tensor parallelism inside replicas, wingbeat between them.

    ``configure_model`` parallelises the model as before, over ``self.device_mesh``, which has the
    dimensions ``"data_parallel"`` and ``"tensor_parallel"`` inside a replica.

    Args:
        strategy: as for `WingbeatStrategy`.
        replicas: their number, or "auto": one on each host.
        data_parallel_size: ranks of a replica for ``fully_shard``, or "auto": all that remain.
        tensor_parallel_size: ranks of a replica for ``parallelize_module``.
        interfaces: as for `WingbeatStrategy`.
        options: ``save_distributed_checkpoint``, ``process_group_backend`` and ``timeout``, as for
            ``ModelParallelStrategy``.

    Raises:
        UsageError: another option is given, or the sizes do not multiply to the number of workers.
    """


register(_package.strategies.StrategyRegistry, WingbeatStrategy)

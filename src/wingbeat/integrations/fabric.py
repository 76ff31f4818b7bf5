"""wingbeat in Lightning Fabric, package ``lightning``, in place of ``"ddp"``.

::

    from wingbeat.integrations.fabric import WingbeatStrategy

    fabric = Fabric(strategy=WingbeatStrategy(wingbeat.DeAR()), devices=2)

Importing this module also registers the names of all presets, such as ``strategy="wingbeat_dear"``.
"""

from __future__ import annotations

from wingbeat.integrations.lightning_family import FabricStrategy, fabric_of, register
from wingbeat.integrations.lightning_mesh import MeshFabricStrategy

__all__ = ["WingbeatModelParallelStrategy", "WingbeatStrategy"]

_package = fabric_of("lightning")


class WingbeatStrategy(FabricStrategy, _package.strategies.DDPStrategy):  # type: ignore[misc,name-defined]
    """Strategy for ``lightning.fabric.Fabric`` that exchanges gradients with wingbeat.

    Arguments and errors are those of `wingbeat.integrations.lightning.WingbeatStrategy`.
    """


class WingbeatModelParallelStrategy(MeshFabricStrategy, _package.strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
    """Strategy for ``lightning.fabric.Fabric`` with sharded models, in place of Fabric's
    ``ModelParallelStrategy``: FSDP2 and tensor parallelism inside replicas, wingbeat between them.

    The first argument is ``parallelize_fn``, as for ``ModelParallelStrategy``; the others, and
    errors, are those of `wingbeat.integrations.lightning.WingbeatModelParallelStrategy`.
    """


register(_package.strategies.STRATEGY_REGISTRY, WingbeatStrategy)

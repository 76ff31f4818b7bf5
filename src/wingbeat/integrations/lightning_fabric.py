"""wingbeat in Lightning Fabric, package ``lightning_fabric``, in place of ``"ddp"``.

::

    from wingbeat.integrations.lightning_fabric import WingbeatStrategy

    fabric = Fabric(strategy=WingbeatStrategy(wingbeat.DeAR()), devices=2)

Importing this module also registers the names of all presets, such as ``strategy="wingbeat_dear"``.
"""

from __future__ import annotations

from wingbeat.integrations.lightning_family import FabricStrategy, fabric_of, register
from wingbeat.integrations.lightning_mesh import MeshFabricStrategy

__all__ = ["WingbeatModelParallelStrategy", "WingbeatStrategy"]

_package = fabric_of("lightning_fabric")


class WingbeatStrategy(FabricStrategy, _package.strategies.DDPStrategy):  # type: ignore[misc,name-defined]
    """Strategy for ``lightning_fabric.Fabric``; as in `wingbeat.integrations.fabric`."""


class WingbeatModelParallelStrategy(MeshFabricStrategy, _package.strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
    """As `wingbeat.integrations.fabric.WingbeatModelParallelStrategy`."""


register(_package.strategies.STRATEGY_REGISTRY, WingbeatStrategy)

"""wingbeat in Lightning Fabric, package ``lightning_fabric``, in place of ``"ddp"``.

::

    from wingbeat.integrations.lightning_fabric import WingbeatStrategy

    fabric = Fabric(strategy=WingbeatStrategy(wingbeat.DeAR()), devices=2)

Importing this module also registers the names of all presets, such as ``strategy="wingbeat_dear"``.
"""

from __future__ import annotations

from wingbeat.integrations.lightning_family import names, options
from wingbeat.integrations.lightning_family.fabric import FabricStrategy

__all__ = ["WingbeatStrategy"]

_package = names.fabric_of("lightning_fabric")


class WingbeatStrategy(FabricStrategy, _package.strategies.DDPStrategy):  # type: ignore[misc,name-defined]
    """Strategy for ``lightning_fabric.Fabric``.

    See `wingbeat.integrations.fabric.WingbeatStrategy`.
    """


options.register(_package.strategies.STRATEGY_REGISTRY, WingbeatStrategy)

"""wingbeat in Lightning Fabric, package ``lightning``: in place of ``"ddp"``.

::

    from wingbeat.integrations.fabric import WingbeatStrategy

    fabric = Fabric(strategy=WingbeatStrategy(wingbeat.DeAR()), devices=2)

Importing this module also registers the names of all presets, as in ``strategy="wingbeat_dear"``.
"""

from __future__ import annotations

from wingbeat.integrations.lightning_family import names, options
from wingbeat.integrations.lightning_family.fabric import FabricStrategy

__all__ = ["WingbeatStrategy"]

_package = names.fabric_of("lightning")


class WingbeatStrategy(FabricStrategy, _package.strategies.DDPStrategy):  # type: ignore[misc,name-defined]
    """For ``lightning.fabric.Fabric``: gradients travel as one of wingbeat's strategies says.

    Args:
        strategy: ``wingbeat.DeAR()``, which is the default, or another; or its name and options as
            on the command line, such as ``"allreduce:mb=10"``.
        interfaces: names of the network interfaces to use, as for `wingbeat.init`.
        ddp_kwargs: what ``DDPStrategy`` takes: ``timeout`` (of all waits, default: half an hour),
            ``process_group_backend``, ``start_method``, ``checkpoint_io`` and so on. Options of DDP
            itself that are not needed, such as ``find_unused_parameters``, are accepted.

    Raises:
        UsageError: no strategy, or an option of DDP's that cannot be followed.
    """


options.register(_package.strategies.STRATEGY_REGISTRY, WingbeatStrategy)

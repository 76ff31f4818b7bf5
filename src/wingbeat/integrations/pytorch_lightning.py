"""wingbeat in Lightning's Trainer, package ``pytorch_lightning``, in place of ``"ddp"``.

::

    from wingbeat.integrations.pytorch_lightning import WingbeatStrategy

    trainer = Trainer(strategy=WingbeatStrategy(wingbeat.DeAR()), devices=2)

Importing this module also registers the names of all presets, such as ``strategy="wingbeat_dear"``.
"""

from __future__ import annotations

from wingbeat.integrations.lightning_family import TrainerStrategy, register, trainer_of
from wingbeat.integrations.lightning_mesh import MeshTrainerStrategy

__all__ = ["WingbeatModelParallelStrategy", "WingbeatStrategy"]

_package = trainer_of("pytorch_lightning")


class WingbeatStrategy(TrainerStrategy, _package.strategies.DDPStrategy):  # type: ignore[misc,name-defined]
    """Strategy for ``pytorch_lightning.Trainer``; as in `wingbeat.integrations.lightning`."""


class WingbeatModelParallelStrategy(MeshTrainerStrategy, _package.strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
    """As `wingbeat.integrations.lightning.WingbeatModelParallelStrategy`."""


register(_package.strategies.StrategyRegistry, WingbeatStrategy)

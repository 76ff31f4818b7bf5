"""Lightning's Trainer, for ``trainers.py``."""

from __future__ import annotations

import os
from typing import Any

from trainer_rows.task import Task, loss_of

TITLE = "Lightning"

BEFORE = """
trainer = pl.Trainer(strategy="ddp", devices=2)
trainer.fit(module, loader)
"""

AFTER = """
from wingbeat.integrations.lightning import WingbeatStrategy
trainer = pl.Trainer(strategy=WingbeatStrategy(wingbeat.DeAR()), devices=2)
trainer.fit(module, loader)
"""


def train(task: Task, name: str) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model()

        def training_step(self, batch: Any) -> Any:
            words, labels = batch
            return loss_of(self.net(words), labels)

        def configure_optimizers(self) -> Any:
            return task.optimizer(self.net)

        def on_train_batch_end(self, *_args: Any) -> None:
            task.tick()

    if name == "ddp":
        strategy: Any = DDPStrategy(bucket_cap_mb=task.mb)
    else:
        from wingbeat.integrations.lightning import WingbeatStrategy

        strategy = WingbeatStrategy(task.strategy(name))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), strategy=strategy,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, task.loader())
    return module.net

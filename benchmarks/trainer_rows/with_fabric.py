"""Fabric, for ``trainers.py``."""

from __future__ import annotations

import os
from typing import Any

from trainer_rows.task import Task, loss_of

TITLE = "Lightning Fabric"

BEFORE = """
fabric = Fabric(strategy="ddp")
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
"""

AFTER = """
from wingbeat.integrations.fabric import WingbeatStrategy
fabric = Fabric(strategy=WingbeatStrategy(wingbeat.DeAR()))
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
"""


def train(task: Task, name: str) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    if name == "ddp":
        strategy: Any = DDPStrategy(bucket_cap_mb=task.mb)
    else:
        from wingbeat.integrations.fabric import WingbeatStrategy

        strategy = WingbeatStrategy(task.strategy(name))
    hosts = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=1, num_nodes=hosts, strategy=strategy)
    fabric.launch()
    bare = task.model()
    model, optimizer = fabric.setup(bare, task.optimizer(bare))
    for words, labels in fabric.setup_dataloaders(task.loader()):
        optimizer.zero_grad()
        fabric.backward(loss_of(model(words), labels))
        optimizer.step()
        task.tick()
    return model

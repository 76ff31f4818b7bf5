"""Accelerate, for ``trainers.py``."""

from __future__ import annotations

from typing import Any

from trainer_rows.task import Task, loss_of

TITLE = "Accelerate"

BEFORE = """
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

AFTER = """
from wingbeat.integrations.accelerate import prepare
accelerator = Accelerator()
model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
"""


def train(task: Task, name: str) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    buckets = DistributedDataParallelKwargs(bucket_cap_mb=task.mb)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[buckets])
    bare = task.model()
    objects = bare, task.optimizer(bare), task.loader()
    if name == "ddp":
        model, optimizer, loader = accelerator.prepare(*objects)
    else:
        from wingbeat.integrations.accelerate import prepare

        model, optimizer, loader = prepare(accelerator, *objects, strategy=task.strategy(name))
    for words, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(words), labels))
        optimizer.step()
        task.tick()
    return bare

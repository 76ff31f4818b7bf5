"""The HF Trainer, for ``trainers.py``; it clips gradients, as it does if nobody tells it not to."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from trainer_rows.task import Task

TITLE = "HF Trainer"

BEFORE = """
trainer = Trainer(model, args, train_dataset=data)
trainer.train()
"""

AFTER = """
from wingbeat.integrations.transformers import WingbeatTrainer
trainer = WingbeatTrainer(model, args, train_dataset=data)
trainer.train()
"""


def train(task: Task, name: str) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticking(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            task.tick()

    def collate(samples: Any) -> dict[str, torch.Tensor]:
        words, labels = zip(*samples, strict=True)
        return {"words": torch.stack(words), "labels": torch.stack(labels)}

    model = task.model()
    args = TrainingArguments(
        output_dir=tempfile.gettempdir(), use_cpu=True, max_steps=task.iterations,
        per_device_train_batch_size=task.batch, lr_scheduler_type="constant",
        ddp_bucket_cap_mb=round(task.mb), ddp_find_unused_parameters=False, save_strategy="no",
        report_to=[], disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    options: dict[str, Any] = {"model": model, "args": args, "train_dataset": task.dataset()}
    options |= {"data_collator": collate, "optimizers": (task.optimizer(model), None)}
    if name == "ddp":
        trainer = Trainer(**options)
    else:
        from wingbeat.integrations.transformers import WingbeatTrainer

        trainer = WingbeatTrainer(**options, strategy=task.strategy(name))
    trainer.add_callback(Ticking())
    trainer.train()
    return model

"""The HF Trainer with wingbeat in place of DDP; ``TrainingArguments`` stay as they are.

::

    trainer = WingbeatTrainer(model, args, train_dataset=data, strategy=wingbeat.DeAR())
    trainer.train()

Other trainers get the same by the mixin: ``class Mine(WingbeatTrainerMixin, Seq2SeqTrainer): ...``
"""

from wingbeat.integrations.transformers.names import transformers as _transformers

_transformers()  # says what to install, before anything else is imported

from wingbeat.integrations.transformers.trainer import (  # noqa: E402
    WingbeatTrainer,
    WingbeatTrainerMixin,
)

__all__ = ["WingbeatTrainer", "WingbeatTrainerMixin"]

"""The HF Trainer with wingbeat in place of DDP; ``TrainingArguments`` stay as they are.

::

    trainer = WingbeatTrainer(model, args, train_dataset=data, strategy=wingbeat.DeAR())
    trainer.train()

Other trainers use the mixin: ``class Mine(WingbeatTrainerMixin, Seq2SeqTrainer): ...``
"""

from wingbeat.integrations.transformers.names import transformers as _transformers

_transformers()  # reports a missing library before the other imports

from wingbeat.integrations.transformers.trainer import (  # noqa: E402
    WingbeatTrainer,
    WingbeatTrainerMixin,
)

__all__ = ["WingbeatTrainer", "WingbeatTrainerMixin"]
